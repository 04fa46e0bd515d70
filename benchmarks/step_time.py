"""Step time of GPT-2: this repository's loop against others, in one run, alternating.

    python benchmarks/step_time.py                          # 30M parameters, two CPU processes
    python benchmarks/step_time.py --model gpt2-large --processes 8 --block-size 1024      # GPUs

- ours: `train` of gpt2_fsdp.py as it stands, from one step's end to the next: data, the count of
  tokens, forward, backward, clip, optimizer, schedule, bar and log.
- bare: forward, backward, clip, step, zero_grad on the same wrapped model, and nothing else: the
  floor.
- accelerate, trainer: Accelerate's loop and Transformers' Trainer on Hugging Face's model. On a CPU
  they have no FSDP and use DistributedDataParallel, whatever they are told; so compare them with
  ours under ddp there, and with ours under full_shard on GPUs.

All train on the same blocks with fused AdamW in the same precision. Each loop runs in a thread of
its own that waits while the others make their step, after a barrier of all ranks; on GPUs a turn is
ten steps, so that a step need not wait for the GPU.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import transformers
from common import Loop, launch, relay, trainer_options, write_gpt2
from datasets import Dataset
from driven import TimedRun

import gpt2_fsdp
import policies
from runtime import batches


def ours(args: argparse.Namespace, device: torch.device) -> tuple[Loop, Loop, Dataset]:
    """Return gpt2_fsdp.py's loop, the bare one on the same model and optimizer, and the data
    set."""
    run = TimedRun(gpt2_fsdp, args, device)

    def bare(end_of_step: Callable[[], None]) -> None:
        optimizer = run.state.optimizer  # which is there: the first turn was the other loop's
        while True:
            for batch in run.loader:
                batch = batches.to_device(batch, device)
                with policies.autocast(args, device):
                    loss = gpt2_fsdp.summed_loss(run.model, batch) / batch["labels"].numel()
                loss.backward()
                policies.clip_gradients(run.model, args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                end_of_step()

    return run.loop, bare, run.train_set.dataset


def plain_collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collate blocks for Hugging Face's models, which shift the labels themselves."""
    input_ids = torch.tensor([example["input_ids"][:-1] for example in examples])
    return {"input_ids": input_ids, "labels": input_ids}


def accelerate_loop(
    args: argparse.Namespace, model: torch.nn.Module, rows: Dataset, describe: Callable[..., None]
) -> Loop:
    """Return the loop of Accelerate's examples, with its FSDP plugin."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        use_orig_params=True,
        backward_prefetch="BACKWARD_PRE",
    )
    mixed = "bf16" if args.precision == "bf16" else "no"
    accelerator = Accelerator(
        mixed_precision=mixed, fsdp_plugin=plugin, cpu=not torch.cuda.is_available()
    )
    loader = torch.utils.data.DataLoader(
        rows, args.batch_size, shuffle=True, drop_last=True, collate_fn=plain_collate
    )
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01, fused=True)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 100, 10_000)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    describe("accelerate", model)

    def loop(end_of_step: Callable[[], None]) -> None:
        model.train()
        while True:
            for batch in loader:
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                end_of_step()

    return loop


def trainer_loop(
    args: argparse.Namespace, model: torch.nn.Module, rows: Dataset, describe: Callable[..., None]
) -> Loop:
    """Return the loop of Transformers' Trainer, told to use FSDP."""
    options = transformers.TrainingArguments(
        dataloader_drop_last=True, **trainer_options(args, "GPT2Block")
    )

    def loop(end_of_step: Callable[[], None]) -> None:
        class Turn(transformers.TrainerCallback):
            def on_train_begin(self, *_: object, **options: object) -> None:
                describe("trainer", trainer.model_wrapped)

            def on_step_end(self, *_: object, **options: object) -> None:
                end_of_step()

        parts = {"train_dataset": rows, "data_collator": plain_collate, "callbacks": [Turn()]}
        trainer = transformers.Trainer(model, options, **parts)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()

    return loop


OURS = {"ddp": ["--strategy", "ddp"], "full_shard": [], "full_shard, FSDP2": ["--fsdp", "2"]}
PEERS = {"accelerate": accelerate_loop, "trainer": trainer_loop}


def worker(options: argparse.Namespace, directory: str) -> None:
    """Run all loops on this rank; rank 0 prints what it found as JSON."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    common = ["--model-name", directory, "--from-scratch", "--dataset", "docstrings",
              "--num-train-samples", "0", "--num-val-samples", "8", "--max-steps", "10000",
              "--block-size", str(options.block_size), "--batch-size", str(options.batch_size),
              "--output-dir", f"{directory}/output"]  # fmt: skip
    args = gpt2_fsdp.parse_args(common)
    device, how = gpt2_fsdp.setup(args), {}
    loops: dict[str, Loop] = {}
    for name, flags in OURS.items():
        loop, bare, rows = ours(gpt2_fsdp.parse_args([*common, *flags]), device)
        loops |= {f"ours, {name}": loop, f"bare, {name}": bare}
    rows = rows.select(range(len(rows) - 1))  # without the last block, which is short

    def describe(name: str, model: torch.nn.Module) -> None:
        how[name] = type(model).__name__

    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.GPT2LMHeadModel(config)
    loops[options.peer] = PEERS[options.peer](args, model, rows, describe)
    turn = 10 if device.type == "cuda" else 1
    seconds = relay(loops, math.ceil(options.steps / turn), device, turn)
    seconds = {name: [value / turn for value in values] for name, values in seconds.items()}
    if dist.get_rank() == 0:
        count = model.num_parameters()
        print(json.dumps({"seconds": seconds, "wrapped": how, "parameters": count}))
    gpt2_fsdp.cleanup()


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="30M", help="a shape of common.py")
    parser.add_argument("--processes", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--block-size", type=int, default=256, help="tokens in a sample")
    parser.add_argument(
        "--steps", type=int, default=15, help="timed steps of each loop; on GPUs in tens"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # directory
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options, options.worker)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_gpt2(options.model, directory, options.block_size)
        for peer in PEERS:
            flags = ["--block-size", options.block_size, "--batch-size", options.batch_size]
            flags += ["--steps", options.steps, "--worker", directory, "--peer", peer]
            found = launch(options.processes, __file__, *flags)
            report(options, peer, found)


def report(options: argparse.Namespace, peer: str, found: dict) -> None:
    """Print the table of one peer."""
    medians = {name: statistics.median(values) for name, values in found["seconds"].items()}
    tokens = options.processes * options.batch_size * options.block_size
    print(f"GPT-2 of {found['parameters']:,} parameters, {options.processes} processes x "
          f"{options.batch_size} x {options.block_size} tokens; medians of {options.steps} steps "
          f"in turn; {peer} wrapped it in {found['wrapped'][peer]}\n")  # fmt: skip
    print("| loop | s per step | tokens/s | of ours, ddp | of ours, full_shard |")
    print("|---|---|---|---|---|")
    for name, median in medians.items():
        ratios = [median / medians[f"ours, {strategy}"] for strategy in ("ddp", "full_shard")]
        print(f"| {name} | {median:.3f} | {tokens / median:,.0f} | {ratios[0]:.3f} "
              f"| {ratios[1]:.3f} |")  # fmt: skip
    print("\n" + json.dumps({"medians": medians, **found}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as `launch` of runtime/run.py, which says why
