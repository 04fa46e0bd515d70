"""Compare the speed of the scripts with the trainers of TRL and Transformers, and with a bare loop.

    pip install -r requirements.txt -r benchmarks/requirements.txt trl==1.16.0
    python benchmarks/speed.py
    python benchmarks/speed.py --preset gpu --processes 8 --against trainer
    python benchmarks/speed.py --against bare --before ../before    # a worktree of another commit

- trl: SFTTrainer with packing and assistant_only_loss against llama_fsdp.py, on chats.
- seq2seq: Seq2SeqTrainer, group_by_length and a padding collator against T5_training.py, on pairs.
- trainer: Trainer on grouped blocks, as in Transformers' run_clm.py, against gpt2_fsdp.py.
- bare: only forward, backward, clip and step on a Llama that Transformers has sharded by FSDP2,
  against llama_fsdp.py, on random tokens. The mean losses of all steps agree.

Programs of one comparison have the same weights, rows, global batch, precision and optimizer,
without dropout and recomputation. They are launched in turn, and time the same number of steps
after two others; the table has the medians of the launches. On a CPU the trainers use
DistributedDataParallel, so compare them with ours under ddp. CPU seconds are those of rank 0 and
vary less than wall time. A target is a predicted token that is not padding. The loss that a trainer
reports for its first step is compared with that of the model alone, one sample at a time.

`--before` also launches the scripts of another tree, and compares ours with them. All train on the
docstrings of Python's library.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from common import ENDLESS, Steps, launch, load_with_transformers, parse, synchronize, train
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import chat_dataset
from core import ranks
from core.steps import StepSampler, micro_batches
from tools import docstrings, memory_estimator

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{%
if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>'
}}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n'
}}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""
WARM_UP = 2  # steps that are not timed
OTHERS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dropout_rate": 0.0,
          "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BUILT_IN = memory_estimator.BUILT_IN
PRESETS = {  # models, as lines of memory_estimator.SIZES; tokens of a pack and a block
    "cpu": {
        "llama": "llama 13M 320 864 6 5 5 8192",
        "t5": "t5 13M 256 64 1024 6 4 8192",
        "gpt2": "gpt2 13M 320 8 5 8192",
        "bare": "llama 98M 768 2048 12 12 12 8192",
        "pack": 1024,
        "block": 256,
    },
    "gpu": {
        "llama": BUILT_IN["tinyllama-1.1b"],
        "t5": BUILT_IN["t5-large"],
        "gpt2": BUILT_IN["gpt2-large"],
        "bare": BUILT_IN["tinyllama-1.1b"],
        "pack": 2048,
        "block": 1024,
    },
}
FLAGS = {  # of our script in each comparison
    "trl": "--model-name ./llama --dataset chats.jsonl --val-dataset chats-few.jsonl "
    "--max-seq-length {pack} --batch-size 2 --activation-checkpointing none",
    "seq2seq": "--model-name ./t5 --dataset pairs.jsonl --val-dataset pairs-few.jsonl "
    "--source-column source --target-column target --batch-size 8",
    "trainer": "--model-name ./gpt2 --dataset texts.jsonl --val-dataset texts-few.jsonl "
    "--block-size {block} --batch-size 8",
    "bare": "--model-name ./bare --dataset texts.jsonl --max-seq-length {pack} --batch-size 1 "
    "--activation-checkpointing none --weight-decay 0",
}
SCRIPTS = {
    "trl": "llama_fsdp",
    "seq2seq": "T5_training",
    "trainer": "gpt2_fsdp",
    "bare": "llama_fsdp",
}
OURS = {
    "ours, ddp": ["--strategy", "ddp"],
    "ours, FSDP1": ["--fsdp", "1"],
    "ours, FSDP2": ["--fsdp", "2"],
}


def write_rows(count: int) -> list[str]:
    """Write chats, pairs and texts to files in the working directory, and the first eight rows of
    each to others. Return all texts."""
    rows = list(docstrings.rows())
    files: dict[str, list[dict]] = {"chats": [], "pairs": [], "texts": []}
    for row in rows[:count]:
        question = {"role": "user", "content": row["headline"]}
        answer = {"role": "assistant", "content": row["text"]}
        files["chats"].append({"messages": [question, answer]})
        files["pairs"].append({"source": row["text"], "target": row["headline"]})
        files["texts"].append({"text": row["text"]})
    for name, records in files.items():
        lines = [json.dumps(record) + "\n" for record in records]
        Path(f"{name}.jsonl").write_text("".join(lines))
        Path(f"{name}-few.jsonl").write_text("".join(lines[:8]))
    return [row["text"] for row in rows]


def write_models(preset: str, texts: list[str]) -> None:
    """Write random models, with a byte-level BPE tokenizer that is trained on `texts`."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts,
        vocab_size=8192,
        special_tokens=["<pad>", "<|im_end|>", "<|im_start|>", "<unk>"],
        show_progress=False,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHATML,
    )
    for name, line in PRESETS[preset].items():
        if isinstance(line, str):
            config = memory_estimator.new_config(line, **OTHERS)
            auto_class = transformers.AutoModelForCausalLM
            if config.is_encoder_decoder:
                auto_class = transformers.AutoModelForSeq2SeqLM
            torch.manual_seed(0)
            auto_class.from_config(config, dtype=torch.float32).save_pretrained(name)
            tokenizer.save_pretrained(name)


class Clock(transformers.TrainerCallback):
    """The time of a number of steps after WARM_UP others, and the targets of this rank in each."""

    def __init__(self, steps: int):
        self.last = WARM_UP + steps
        self.done = 0
        self.times: list[tuple[float, float]] = []
        self.targets: list[int] = []

    def on_step_end(self, *_: object, **options: object) -> None:
        """Note that a step is done. A trainer calls this itself."""
        self.done += 1
        if self.done in (WARM_UP, self.last):
            synchronize()
            self.times.append((time.perf_counter(), time.process_time()))

    def result(self) -> dict[str, float]:
        """Return the measurements of all ranks."""
        timed = self.targets[WARM_UP : self.last]
        (targets,) = ranks.host_sums([sum(timed)])
        (start, cpu_start), (end, cpu_end) = self.times
        return {
            # Of all ranks; the seconds are those of this one.
            "targets/s": targets / (end - start),
            "s": (end - start) / len(timed),
            "CPU s": (cpu_end - cpu_start) / len(timed),
        }


def run_ours(script: Any, args: Any, device: torch.device, rows: Any, clock: Clock) -> dict:
    """Run `train` of a script, from the end of one step to the next: data, token count, forward,
    backward, clip, optimizer and schedule. Return the measurements."""

    def steps(loader: Steps, _: torch.nn.Module) -> Steps:
        for _, batches in zip(range(clock.last), loader, strict=False):
            clock.targets.append(sum(batch["targets"] for batch in batches))
            yield batches
            clock.on_step_end()

    train(script, args, device, steps, rows)
    path = args.run.output_dir / "metrics.jsonl"
    loss = ranks.on_rank_zero(lambda: json.loads(path.read_text().splitlines()[-1])["loss"])
    return clock.result() | {"mean loss": loss}


def run_bare(script: Any, args: Any, device: torch.device, rows: Any, clock: Clock) -> dict:
    """Train a Llama that Transformers has sharded by FSDP2; return the measurements."""
    model, optimizer = load_with_transformers(args)
    # The batches of llama_fsdp.py, for steps of one micro-batch.
    sampler = StepSampler(len(rows), args.optim)
    sampler.stop = clock.last
    collate = partial(micro_batches, collate=chat_dataset.collate, optim=args.optim)
    losses = []
    model.train()
    for (batch,) in DataLoader(rows, batch_sampler=sampler, collate_fn=collate):
        clock.targets.append(batch["targets"])
        batch = ranks.to_device(batch, device)
        # Our labels are shifted already. Without positions, a row is one document.
        labels = {"labels": batch["labels"], "shift_labels": batch["labels"]}
        loss = model(batch["input_ids"], use_cache=False, **labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        clock.on_step_end()
    (total,) = ranks.host_sums([torch.stack(losses).mean().item()])
    return clock.result() | {"mean loss": total / dist.get_world_size()}


def trainer_options(args: Any, block: str, steps: int) -> dict[str, Any]:
    """Return arguments for a Transformers trainer that match ours. On GPUs it uses FSDP1 with units
    of the class named `block`, on a CPU DistributedDataParallel."""
    on_gpu = torch.cuda.is_available()
    fsdp = {
        "version": 1,
        "transformer_layer_cls_to_wrap": [block],
        "use_orig_params": True,
        "backward_prefetch": "backward_pre",
    }
    return {
        "output_dir": "peer",
        "max_steps": steps,
        "learning_rate": args.optim.lr,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": args.optim.batch_size,
        "max_grad_norm": args.optim.max_grad_norm,
        "weight_decay": args.optim.weight_decay,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not on_gpu,
        "bf16": args.sharding.precision == "bf16",
        "optim": "adamw_torch_fused",
        "ddp_find_unused_parameters": False,
        "fsdp": "full_shard auto_wrap" if on_gpu else None,
        "fsdp_config": fsdp if on_gpu else None,
    }


def load_whole(args: Any, model_class: type, **options: str) -> transformers.PreTrainedModel:
    """Return the model in fp32, without sharding."""
    return model_class.from_pretrained(args.model.model_name, dtype=torch.float32, **options)


def trl_trainer(args: Any, steps: int) -> transformers.Trainer:
    """Return TRL's SFTTrainer on packed chats."""
    import trl

    attention = "sdpa"
    if torch.cuda.is_available() and transformers.utils.is_flash_attn_2_available():
        attention = "flash_attention_2"
    model = load_whole(args, transformers.LlamaForCausalLM, attn_implementation=attention)
    config = trl.SFTConfig(
        packing=True,
        assistant_only_loss=True,
        max_length=args.data.max_seq_length,
        **trainer_options(args, "LlamaDecoderLayer", steps),
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model.model_name)
    rows = Dataset.from_json(args.data.dataset[0])
    return trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)


def seq2seq_trainer(args: Any, steps: int) -> transformers.Trainer:
    """Return the Seq2SeqTrainer of Transformers' run_summarization.py, with group_by_length."""
    tokenizer = AutoTokenizer.from_pretrained(args.model.model_name)
    model = load_whole(args, transformers.T5ForConditionalGeneration)

    def tokenize(row: dict[str, str]) -> dict[str, list[int]]:
        source = f"summarize: {row['source']}{tokenizer.eos_token}"
        target = row["target"] + tokenizer.eos_token
        limits = {"truncation": True, "return_token_type_ids": False}
        inputs = tokenizer(source, max_length=args.data.source_length, **limits)
        labels = tokenizer(target, max_length=args.data.target_length, **limits)
        return {**inputs, "labels": labels["input_ids"]}

    rows = Dataset.from_json(args.data.dataset[0])
    rows = rows.map(tokenize, remove_columns=rows.column_names)
    options = transformers.Seq2SeqTrainingArguments(
        train_sampling_strategy="group_by_length",
        **trainer_options(args, "T5Block", steps),
    )
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    return transformers.Seq2SeqTrainer(model, options, train_dataset=rows, data_collator=collator)


def clm_trainer(args: Any, steps: int) -> transformers.Trainer:
    """Return the Trainer of Transformers' run_clm.py, on joined texts in blocks of one length."""
    tokenizer = AutoTokenizer.from_pretrained(args.model.model_name)
    model = load_whole(args, transformers.GPT2LMHeadModel)
    texts = Dataset.from_json(args.data.dataset[0])["text"]
    ids = tokenizer(tokenizer.eos_token.join([*texts, ""]))["input_ids"]
    size = args.data.block_size
    blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    # The Trainer's model shifts the labels.
    rows = Dataset.from_dict({"input_ids": blocks, "labels": blocks})
    options = transformers.TrainingArguments(**trainer_options(args, "GPT2Block", steps))
    collator = transformers.default_data_collator
    return transformers.Trainer(model, options, train_dataset=rows, data_collator=collator)


TRAINERS = {"trl": trl_trainer, "seq2seq": seq2seq_trainer, "trainer": clm_trainer}


def run_trainer(args: Any, trainer: transformers.Trainer, clock: Clock) -> dict:
    """Run a trainer; return the measurements, and the loss of its first step as it reports it and
    as the model alone has it."""
    collate = trainer.data_collator
    batches = []

    def count_and_collate(rows: list) -> dict[str, Tensor]:
        batch = collate(rows)
        batches.append(dict(batch))
        clock.targets.append(count_targets(trainer.model, batch["labels"]))
        return batch

    # The collator is called once for each step, in order.
    trainer.data_collator = count_and_collate
    trainer.add_callback(clock)
    trainer.train()
    alone = plain_loss(load_whole(args, type(trainer.model)).eval(), batches[0])
    return clock.result() | {"reported": trainer.state.log_history[0]["loss"], "alone": alone}


def count_targets(model: torch.nn.Module, labels: Tensor) -> int:
    """Return the number of predicted labels; a causal model does not predict the first of a row."""
    if not model.config.is_encoder_decoder:
        labels = labels[:, 1:]
    return (labels != -100).sum().item()


def samples(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield each sample of a batch without padding: the documents of a pack, pairs, or blocks."""
    if "position_ids" in batch:
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], batch["input_ids"].shape[1]]
        for start, end in zip(starts, ends, strict=True):
            yield {name: batch[name][:, start:end] for name in ("input_ids", "labels")}
        return
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    for ids, mask, labels in zip(batch["input_ids"], masks, batch["labels"], strict=True):
        yield {"input_ids": ids[mask][None], "labels": labels[labels != -100][None]}


@torch.no_grad()
def plain_loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> float:
    """Return the model's mean loss per target over the batches of all ranks, computed on the CPU,
    one sample at a time."""
    total = 0.0
    count = 0
    for sample in samples(batch):
        targets = count_targets(model, sample["labels"])
        if targets:
            total += model(**sample).loss.item() * targets
            count += targets
    total, count = ranks.host_sums([total, count])
    return total / count


def worker(options: argparse.Namespace) -> None:
    """Run a loop of a comparison on this rank; rank 0 prints the measurements as JSON."""
    name, loop = options.worker
    script = importlib.import_module(SCRIPTS[name])
    clock = Clock(options.steps)
    flags = FLAGS[name].format(**PRESETS[options.preset]).split()
    flags += [*ENDLESS, "--log-every", clock.last, "--output-dir", f"output/{os.getpid()}"]
    args = parse(script, *flags, *OURS.get(loop, []))
    device = ranks.setup(args.run.timeout_minutes)
    if loop in TRAINERS:
        trainer = TRAINERS[loop](args, clock.last)
        result = run_trainer(args, trainer, clock)
    else:
        rows = random_rows(args, clock.last) if name == "bare" else read_rows(args)
        run = run_bare if loop == "bare" else run_ours
        result = run(script, args, device, rows, clock)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    ranks.finish()


def read_rows(args: Any) -> Any:
    """Return the training set of a script."""
    tokenizer = AutoTokenizer.from_pretrained(args.model.model_name)
    data = sys.modules[type(args.data).__module__]
    if data is chat_dataset:
        data.set_chat_template(tokenizer, args.data.chat_template)
    return ranks.local_main_process_first(data.load, args.data, tokenizer)[0]


def random_rows(args: Any, steps: int) -> list:
    """Return random documents for llama_fsdp.py, in which every position is a target."""
    count = steps * args.optim.batch_size * dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8192, (count, args.data.max_seq_length + 1), generator=generator).numpy()
    return [[{"input_ids": row, "labels": row}] for row in ids]


def report(results: dict[str, list[dict]]) -> None:
    """Print the medians of each loop's launches, relative to the same loop before or the first."""
    print("| loop | targets/s | ratio | s a step | CPU s a step | ratio | mean loss |")
    print("|---|---|---|---|---|---|---|")
    medians = {}
    for loop, launches in results.items():
        medians[loop] = {key: median(x[key] for x in launches) for key in launches[0]}
    first = next(iter(medians.values()))
    for loop, row in medians.items():
        base = medians.get(f"before: {loop}", first)
        speed = f"{row['targets/s']:,.0f} | {row['targets/s'] / base['targets/s']:.2f}"
        cpu = f"{row['CPU s']:.3f} | {row['CPU s'] / base['CPU s']:.2f}"
        print(f"| {loop} | {speed} | {row['s']:.3f} | {cpu} | {row.get('mean loss', '')} |")
    if "reported" in row:
        print(f"\n{loop} reports a loss of {row['reported']:.6f} for its first step; the model "
              f"alone has {row['alone']:.6f}.")  # fmt: skip


def main() -> None:
    """Write the data and models, and print a table for each comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="cpu", help="sizes")
    add("--processes", type=int, default=2, help="ranks, one per GPU")
    add("--against", nargs="+", choices=list(FLAGS), default=list(FLAGS), help="comparisons")
    add("--rows", type=int, default=800, help="number of docstrings")
    add("--steps", type=int, default=20, help="timed steps of a launch")
    add("--rounds", type=int, default=3, help="launches of each loop, in turn")
    add("--before", type=os.path.abspath, help="another tree, to compare ours with")
    add("--worker", nargs=2, help=argparse.SUPPRESS)  # comparison, loop
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_models(options.preset, write_rows(options.rows))
        for name in options.against:
            compare(name, options)


def compare(name: str, options: argparse.Namespace) -> None:
    """Launch the loops of a comparison in turn, and print the table."""
    ours = ["ours, FSDP1", "ours, FSDP2"] if name == "bare" else ["ours, ddp", "ours, FSDP1"]
    print(f"\n{SCRIPTS[name]}.py, {options.steps} steps in {options.rounds} launches\n")
    results: dict[str, list[dict]] = {}
    for _ in range(options.rounds):
        for loop in (*ours, name):
            words = [__file__, "--preset", options.preset, "--steps", options.steps]
            words += ["--worker", name, loop]
            if options.before and loop in OURS:
                before = launch(options.processes, *words, tree=options.before)
                results.setdefault(f"before: {loop}", []).append(before)
            results.setdefault(loop, []).append(launch(options.processes, *words))
    report(results)


if __name__ == "__main__":
    main()
