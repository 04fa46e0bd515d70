"""Fine-tune T5 to summarise articles, with PyTorch FSDP.

    python T5_training.py --model-name tiny --dataset docstrings             # no GPU, no download
    torchrun --nnodes 1 --nproc_per_node 8 T5_training.py                    # t5-base on WikiHow
    torchrun --nnodes 4 --nproc_per_node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 --rdzv-id 1 T5_training.py                # on each of 4 nodes

One optimizer step trains on --batch-size x --gradient-accumulation-steps x processes samples.
Run the same command again to continue from the newest checkpoint; OUTPUT_DIR/final is a Hugging
Face model. Copy this file with policies.py, checkpointing.py and summarization_dataset.py; for
another model change `setup_model`, for other data `setup_data`.

Left out on purpose: parameter-efficient tuning, beam search, evaluation on the test split.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, ByT5Tokenizer, T5Config
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.t5.modeling_t5 import T5Block, T5ForConditionalGeneration

import checkpointing
import policies
import summarization_dataset
from checkpointing import TrainState

Batch = dict[str, Tensor]
BLOCKS = (T5Block,)  # FSDP units, compiled and recomputed one by one


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Read the command line; what is wrong is said at once, before anything is started."""
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument_group("model").add_argument
    add("--model-name", default="google-t5/t5-base", help="hub id, local directory, or tiny "
        "(random weights, bytes as tokens, no download)")  # fmt: skip
    add("--group-by-length", action=BooleanOptionalAction, default=True,
        help="train on batches of texts of about one length: less padding")  # fmt: skip
    add("--rouge-samples", type=int, default=32, help="examples to summarise at the end")
    summarization_dataset.add_arguments(parser)
    policies.common_arguments(parser)
    args = parser.parse_args(argv)
    problems = policies.common_problems(args) + summarization_dataset.check_arguments(args)
    if args.rouge_samples < 0:
        problems.append(f"--rouge-samples must be 0 or more, not {args.rouge_samples}")
    if args.rouge_samples > 0 and not importlib.util.find_spec("rouge_score"):
        problems.append("--rouge-samples needs `pip install rouge-score`, or 0")
    if problems:
        parser.error("; ".join(problems))
    args.precision = policies.resolve_precision(args.precision)
    return args


def setup(args: Namespace) -> torch.device:
    """Join the process group (nccl for GPU tensors, gloo for CPU tensors); return the device."""
    device, backend = torch.device("cpu"), "gloo"
    options: dict[str, Any] = {"timeout": timedelta(minutes=args.timeout_minutes)}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend, options["device_id"] = "cpu:gloo,cuda:nccl", device
    store, rank, world_size = dist.HashStore(), 0, 1  # without torchrun: one process
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=options["timeout"]))
    # When torchrun restarts its workers, the addresses of those before are still in the store.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
    transformers.set_seed(args.seed)
    return device


def cleanup() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def setup_model(
    args: Namespace, device: torch.device, pretrained: bool
) -> tuple[nn.Module, Tokenizer, str]:
    """The wrapped model with fp32 weights, its tokenizer, and a checksum of its shapes.

    Without `pretrained` a model from files is left empty, for a checkpoint to fill. Raises
    ValueError if the model cannot be had or is no T5.
    """
    init = None
    if args.model_name == "tiny":
        tokenizer = ByT5Tokenizer()
        shape = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
        config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **shape)
        model = T5ForConditionalGeneration(config)
    else:
        directory = policies.first_on_node(checkpointing.model_directory, args.model_name)
        config = AutoConfig.from_pretrained(directory)
        if config.model_type != "t5":
            raise ValueError(f"--model-name {args.model_name} is a {config.model_type}, not a t5")
        tokenizer = checkpointing.load_tokenizer(directory, config.vocab_size)
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id
        model = checkpointing.meta_model(T5ForConditionalGeneration, config, directory)
        init = checkpointing.streamed_init(model, directory if pretrained else None, device)
    shapes = checkpointing.checksum([(n, list(p.shape)) for n, p in model.named_parameters()])
    if args.compile:
        policies.compile_blocks(model, BLOCKS)
    if args.strategy == "ddp":
        for module in list(model.modules()) if init else ():
            init(module)
        model = DDP(model.to(device), device_ids=[device] if device.type == "cuda" else None)
    else:
        model = FSDP(
            model,
            auto_wrap_policy=policies.wrap_policy(BLOCKS),
            mixed_precision=policies.PRECISIONS[args.precision],
            sharding_strategy=policies.STRATEGIES[args.strategy],
            cpu_offload=CPUOffload(offload_params=args.cpu_offload),
            device_mesh=policies.device_mesh(args, device),
            device_id=device,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=True,
            use_orig_params=True,
            param_init_fn=init,
        )
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if args.activation_checkpointing:
        policies.checkpoint_activations(model, BLOCKS)
    return model, tokenizer, shapes


def setup_data(
    args: Namespace, tokenizer: Tokenizer, config: T5Config
) -> tuple[DataLoader, dict[str, DataLoader]]:
    """The loader of this rank's micro-batches, and one of each validation set, by its name.

    Raises ValueError if the data cannot be had or are too few.
    """
    load = summarization_dataset.load_summarization
    train_set, val_set = policies.first_on_node(load, args, tokenizer, dist.get_rank() == 0)
    if len(train_set) < dist.get_world_size():
        raise ValueError(
            f"--dataset {args.dataset} gives {len(train_set)} training examples, fewer than the "
            f"{dist.get_world_size()} processes: use fewer processes, or more data"
        )
    collate = functools.partial(
        summarization_dataset.collate,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )

    def loader(
        dataset: Any, accumulation: int, seed: int | None, lengths: list[int] | None = None
    ) -> DataLoader:
        parts = (len(dataset), args.batch_size, accumulation, seed, lengths)
        sampler = policies.GlobalBatchSampler(*parts)
        options = {"collate_fn": collate, "pin_memory": torch.cuda.is_available()}
        options["generator"] = torch.Generator()  # or each epoch would draw from dropout's
        return DataLoader(dataset, batch_sampler=sampler, **options)

    lengths = train_set["length"][:] if args.group_by_length else None
    train_loader = loader(train_set, args.gradient_accumulation_steps, args.seed, lengths)
    return train_loader, {args.dataset: loader(val_set, 1, None)}


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy in nats, summed over the batch's target tokens (labels that are not -100)."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


def count_tokens(batch: Batch) -> tuple[int, int]:
    """Number of target tokens, and of all tokens that are not padding."""
    targets = int((batch["labels"] != -100).sum())
    return targets, targets + int(batch["attention_mask"].sum())


def throughput(args: Namespace, state: TrainState, tokens: int, seconds: float) -> dict[str, float]:
    """What the log says of the speed over the last steps."""
    return {"tokens_per_second": tokens / seconds}


def train_step(
    args: Namespace, state: TrainState, batches: list[Batch], samples: list[int]
) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's micro-batches of the step's `samples`; all ranks.

    The loss is the mean over the target tokens of all ranks and micro-batches. FSDP and DDP
    average gradients over ranks, hence the factor of the world size. Returns this rank's share
    of the loss, to be summed over ranks, and the global gradient norm before clipping. Raises
    KeyboardInterrupt, on all ranks, before anything is done, if one of them was asked to stop.
    """
    here = torch.tensor([count_tokens(batch) for batch in batches]).sum(dim=0).tolist()
    counts = torch.tensor([*here, state.stop()])
    dist.all_reduce(counts)
    targets, tokens, stop = counts.tolist()
    if stop:
        raise KeyboardInterrupt
    if targets == 0:
        policies.exit_with(f"step {state.step + 1} has no target tokens, in samples {samples}")
    loss = torch.zeros((), device=state.device)
    for number, batch in enumerate(batches, start=1):
        batch = {key: value.to(state.device, non_blocking=True) for key, value in batch.items()}
        sync = not args.accumulate_no_sync or number == len(batches) or dist.get_world_size() == 1
        with contextlib.nullcontext() if sync else state.model.no_sync():
            with policies.autocast(args, state.device):
                share = summed_loss(state.model, batch) / targets
            state.scaler.scale(share * dist.get_world_size()).backward()
        loss += share.detach()
    state.scaler.unscale_(state.optimizer)
    grad_norm = policies.clip_gradients(state.model, args.max_grad_norm)
    scale = state.scaler.get_scale()  # 1 unless fp16
    if scale < 1 or not (grad_norm.isfinite() or state.scaler.is_enabled()):
        ranks = policies.ranks_where(not loss.isfinite()) or "none"
        policies.exit_with(
            f"step {state.step + 1}: gradient norm {grad_norm}, loss not finite on ranks {ranks}, "
            f"samples {samples}"
        )
    state.scaler.step(state.optimizer)
    state.scaler.update()
    if state.scaler.get_scale() >= scale:  # or fp16 overflowed, and the optimizer did not step
        state.scheduler.step()
    state.optimizer.zero_grad()
    state.step += 1
    state.consumed += len(samples)
    state.tokens += tokens
    return loss, grad_norm


def train(
    args: Namespace, state: TrainState, loader: DataLoader, val_loaders: dict[str, DataLoader]
) -> None:
    """Train from where `state` is to its last step; all ranks."""
    sampler, tokens, seconds = loader.batch_sampler, state.tokens, 0.0
    off = dist.get_rank() != 0 or None  # None: only where there is no terminal
    bar = tqdm(total=state.total_steps, initial=state.step, unit="step", disable=off)
    while state.step < state.total_steps:
        sampler.epoch, sampler.consumed = state.epoch, state.consumed
        micro_batches = iter(loader)
        for samples in sampler.steps():
            start, lr = time.perf_counter(), state.scheduler.get_last_lr()[0]
            batches = [next(micro_batches) for _ in range(args.gradient_accumulation_steps)]
            loss, grad_norm = train_step(args, state, batches, samples)
            state.stop.rest()
            seconds += time.perf_counter() - start
            bar.update()
            milestone = state.step == state.total_steps or state.consumed == sampler.num_samples
            if milestone or state.step % args.log_every == 0:  # all ranks, written by rank 0
                dist.all_reduce(loss)
                values = {"loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
                values |= throughput(args, state, state.tokens - tokens, seconds)
                bar.set_postfix({key: f"{value:.3g}" for key, value in values.items()})
                values |= policies.peak_memory(args, state.device)
                log(args, state, "train", tokens=state.tokens, **values)
                tokens, seconds = state.tokens, 0.0
            if milestone or state.step % (args.eval_every or math.inf) == 0:  # all ranks
                val_loss = validation(args, state, val_loaders)
                if val_loss < state.best_loss:
                    checkpointing.save_best(Path(args.output_dir), state, val_loss)
            if milestone or state.step % (args.save_every or math.inf) == 0:  # all ranks
                save(args, state)
            if state.step == state.total_steps:
                break
        else:
            state.epoch, state.consumed = state.epoch + 1, 0
    bar.close()


@torch.no_grad()
def validation(args: Namespace, state: TrainState, loaders: dict[str, DataLoader]) -> float:
    """Mean loss over the target tokens of all validation sets, and of each in the log; all ranks.

    Every example counts once, whatever the number of ranks: a rank that is out of examples is
    given batches without targets, so that all make the same number of forward passes.
    """
    state.model.eval()
    totals = torch.zeros(len(loaders), 2, dtype=torch.float64, device=state.device)
    for total, loader in zip(totals, loaders.values(), strict=True):
        for batch in loader:
            total[1] += count_tokens(batch)[0]
            batch = {key: value.to(state.device, non_blocking=True) for key, value in batch.items()}
            with policies.autocast(args, state.device):
                total[0] += summed_loss(state.model, batch)
    dist.all_reduce(totals)
    state.model.train()
    losses = dict(zip(loaders, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
    loss = totals[:, 0].sum() / totals[:, 1].sum()
    log(args, state, "val", loss=loss.item(), perplexity=loss.exp().item(), losses=losses)
    return loss.item()


def save(args: Namespace, state: TrainState) -> None:
    """Save a checkpoint that a run can continue from; all ranks."""
    start, full = time.perf_counter(), args.checkpoint_type == "full"
    if checkpointing.save_checkpoint(Path(args.output_dir), state, args.keep_checkpoints, full):
        log(args, state, "save", seconds=time.perf_counter() - start)


def log(args: Namespace, state: TrainState, event: str, **values: Any) -> None:
    """Append an event to metrics.jsonl and print its numbers; only rank 0 does anything."""
    if dist.get_rank() == 0:
        line = {"event": event, "step": state.step, "epoch": state.epoch, **values}
        try:
            with Path(args.output_dir, "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk is no reason to end
            tqdm.write(f"metrics.jsonl could not be written ({error.strerror})")
        numbers = [f"{key} {value:.5g}" for key, value in values.items() if type(value) is float]
        tqdm.write("  ".join([f"{event:5} step {state.step}/{state.total_steps}", *numbers]))


def log_start(args: Namespace, state: TrainState) -> None:
    """Cut metrics.jsonl to the restored step and log what this run is; only rank 0 acts."""
    if dist.get_rank() == 0:
        checkpointing.truncate_metrics(Path(args.output_dir, "metrics.jsonl"), state.step)
        about = {"script": Path(__file__).stem, "world_size": dist.get_world_size()}
        about["device"] = torch.cuda.get_device_name() if state.device.type == "cuda" else "cpu"
        about |= {"torch": torch.__version__, "transformers": transformers.__version__}
        options = {"shell": True, "cwd": Path(__file__).parent, "capture_output": True}
        git = subprocess.run("git rev-parse HEAD", **options).stdout.decode().strip()
        log(args, state, "start", **about, git=git or None, arguments=vars(args))
        what = f"{about['world_size']} x {about['device']}, {args.strategy}, {args.precision}"
        print(f"{args.model_name}: {state.identity['model']}; {what}; {state.identity['data']}; "
              f"global batch {state.identity['global batch']}")  # fmt: skip


@torch.no_grad()
def summarize(
    args: Namespace, state: TrainState, tokenizer: Tokenizer, loader: DataLoader
) -> list[tuple[str, str, str]]:
    """Source, reference and generated text of the first --rouge-samples examples; all ranks.

    Generation runs outside the root's forward, so FSDP's root is gathered around it; the blocks
    gather themselves, and `synced_gpus` keeps the ranks at one number of forward passes.
    """
    root, dtype = contextlib.nullcontext(), policies.PRECISIONS[args.precision].param_dtype
    if isinstance(state.model, FSDP):
        root = FSDP.summon_full_params(state.model, recurse=False, writeback=False)
    count = math.ceil(args.rouge_samples / loader.batch_sampler.global_batch)
    mine, everyone = [], [None] * dist.get_world_size()
    options = {"max_new_tokens": args.target_length, "do_sample": False}
    options["synced_gpus"] = dist.get_world_size() > 1
    state.model.eval()
    with root, torch.autocast(state.device.type, dtype, enabled=dtype != torch.float32):
        for batch in itertools.islice(loader, count):
            inputs = {k: batch[k].to(state.device) for k in ("input_ids", "attention_mask")}
            generated = state.model.module.generate(**inputs, **options)
            labels = batch["labels"].masked_fill(batch["labels"] == -100, tokenizer.pad_token_id)
            texts = [
                tokenizer.batch_decode(ids, skip_special_tokens=True)
                for ids in (batch["input_ids"], labels, generated)
            ]
            real = (batch["labels"] != -100).any(dim=1).tolist()
            mine += itertools.compress(zip(*texts, strict=True), real)
    dist.all_gather_object(everyone, mine)
    dealt = itertools.chain(*itertools.zip_longest(*everyone))  # as GlobalBatchSampler deals
    return [triple for triple in dealt if triple][: args.rouge_samples]


def prepare(
    args: Namespace, device: torch.device, checkpoint: Path | None
) -> tuple[TrainState, Tokenizer, DataLoader, dict[str, DataLoader]]:
    """What is trained, as `checkpoint` left it, and the data; all ranks."""
    with checkpointing.report_memory(device):
        model, tokenizer, shapes = setup_model(args, device, pretrained=checkpoint is None)
    loader, val_loaders = setup_data(args, tokenizer, model.module.config)
    sampler = loader.batch_sampler
    total_steps = args.max_steps or args.epochs * sampler.steps_per_epoch
    groups = policies.parameter_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    scheduler = policies.lr_schedule(args, optimizer, total_steps, sampler.steps_per_epoch)
    scaler = policies.gradient_scaler(args, device)
    sets = [x.dataset for x in (loader, *val_loaders.values())]
    samples = [len(d) for d in sets] + [
        d[i] for d in sets for i in range(0, len(d), len(d) // 256 + 1)
    ]
    identity = {
        "script": Path(__file__).stem,
        "model": shapes,
        "data": checkpointing.checksum(samples),
        "--group-by-length": args.group_by_length,
        "global batch": sampler.global_batch,
        "seed": args.seed,
    }
    stop = policies.StopRequest()
    state = TrainState(model, optimizer, scheduler, scaler, device, identity, total_steps, stop)
    if args.async_save:
        limit = timedelta(minutes=args.timeout_minutes)
        state.save_group = dist.new_group(backend="gloo", timeout=limit)
    transformers.set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
    if checkpoint:
        checkpointing.load_checkpoint(checkpoint, state, args.seed, Path(args.output_dir))
    return state, tokenizer, loader, val_loaders


def finish(args: Namespace, state: TrainState, tokenizer: Tokenizer, loader: DataLoader) -> None:
    """Summarise a few examples and write final/ and best/; all ranks."""
    output = Path(args.output_dir)
    triples = summarize(args, state, tokenizer, loader) if args.rouge_samples else []
    checkpointing.export_model(state.model, tokenizer, output / "final", args)
    if state.best_step:  # or no validation followed on a checkpoint taken from elsewhere
        checkpointing.load_weights(checkpointing.best_path(output, state), state.model)
    checkpointing.export_model(state.model, tokenizer, output / "best", args)
    if dist.get_rank() == 0:
        values = {"best_loss": state.best_loss, "best_step": state.best_step}
        values |= policies.peak_memory(args, state.device)
        values |= summarization_dataset.rouge(triples) if triples else {}
        log(args, state, "done", **values)
        print(f"last model: {output / 'final'}, of lowest validation loss: {output / 'best'}")


def export_only(args: Namespace, device: torch.device, checkpoint: Path | None) -> None:
    """Write final/ from a checkpoint, at any world size; all ranks."""
    if checkpoint is None:
        raise ValueError(f"--export-only finds no checkpoint in {args.output_dir}")
    model, tokenizer, shapes = setup_model(args, device, pretrained=False)
    checkpointing.check_identity(checkpoint, {"script": Path(__file__).stem, "model": shapes})
    checkpointing.load_weights(checkpoint, model)
    checkpointing.export_model(model, tokenizer, Path(args.output_dir, "final"), args)
    if dist.get_rank() == 0:
        print(f"{checkpoint.name} is written to {Path(args.output_dir, 'final')}")


@record
def fsdp_main(args: Namespace) -> int:
    """Prepare, train, validate, summarise and export; all ranks. Returns the exit code."""
    device, output, stack = setup(args), Path(args.output_dir), contextlib.ExitStack()
    try:
        with stack:
            try:
                stack.enter_context(checkpointing.locked(output))
                parts = (output, args.resume, Path(__file__).stem)
                checkpoint, status = checkpointing.open_output(*parts)
                if args.export_only:
                    export_only(args, device, checkpoint)
                    return 0
                state, tokenizer, loader, val_loaders = prepare(args, device, checkpoint)
            except (OSError, ValueError) as error:
                policies.exit_with(error)
            if status == "finished" and state.step >= state.total_steps:
                if dist.get_rank() == 0:
                    print(f"{output} is finished, raise --max-steps or --epochs to train on")
                return 0
            stack.enter_context(state.stop)
            stack.enter_context(checkpointing.status(output, state))
            log_start(args, state)
            if state.step == 0:
                validation(args, state, val_loaders)
            try:
                train(args, state, loader, val_loaders)
            except KeyboardInterrupt:  # on all ranks
                state.stop.rest()
                save(args, state)
                raise
            finish(args, state, tokenizer, next(iter(val_loaders.values())))
    except checkpointing.SaveError as error:
        policies.exit_with(error)
    except KeyboardInterrupt:
        return policies.STOPPED
    except RuntimeError as error:
        policies.exit_if_peer_lost(error)
        raise
    finally:
        if device.type == "cpu" or sys.exc_info()[0] is None:  # nccl would wait for absent ranks
            cleanup()
    return 0


if __name__ == "__main__":
    arguments = parse_args()
    try:
        code = fsdp_main(arguments)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    # Under FSDP gloo's threads outlive its group, and now and then abort another exit.
    os._exit(code)
