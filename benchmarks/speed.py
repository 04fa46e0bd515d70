"""Compare the speed of the scripts with the trainers of TRL and Transformers, and with a bare loop.

    pip install -r requirements.txt -r benchmarks/requirements.txt
    python benchmarks/speed.py
    python benchmarks/speed.py --tasks seed_tasks.jsonl --articles xsum_200.jsonl
    python benchmarks/speed.py --preset gpu --processes 8 --against trainer

- trl: SFTTrainer with packing and assistant_only_loss against llama_fsdp.py, on chats.
- seq2seq: Seq2SeqTrainer, group_by_length and a padding collator against T5_training.py, on pairs.
- trainer: Trainer on grouped blocks, as in Transformers' run_clm.py, against gpt2_fsdp.py.
- bare: only forward, backward, clip and step on a Llama that Transformers has sharded by FSDP2,
  against llama_fsdp.py, on random tokens. The mean losses of all steps agree.

Programs of one comparison have the same weights, rows, global batch, precision and optimizer,
without dropout and recomputation. All are launched together and take turns, a step each, so that
what else the machine does slows all alike. Times are those of the steps after two others. On a CPU
the trainers use DistributedDataParallel, so compare them with ours under ddp. CPU seconds are those
of rank 0 and vary less than wall time. A target is a predicted token that is not padding. The loss
of a trainer's first step, as it reports it, is compared with that of the model alone, row by row.

Without --tasks (instructions of self-instruct) and --articles (`document` and `summary` in each
line), all train on the docstrings of Python's library.
"""

import importlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
import tyro
from common import ENDLESS, Steps, launch, load_with_transformers, parse, synchronize, train
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BatchEncoding

import chat_dataset
from core import ranks
from core.steps import MicroBatches, StepSampler
from tools import docstrings, memory_estimator

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{%
if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>'
}}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n'
}}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""
WARM_UP = 2  # steps that are not timed
TURN = Path("turn")  # has the name of the loop that makes a step
FAILED = "failed"
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
FLAGS = {  # our script in each comparison, and its flags
    "trl": "llama_fsdp --model-name ./llama --dataset chats.jsonl --val-dataset chats.jsonl "
    "--max-seq-length {pack} --batch-size 2 --activation-checkpointing none",
    "seq2seq": "T5_training --model-name ./t5 --dataset pairs.jsonl --val-dataset pairs.jsonl "
    "--source-column source --target-column target --batch-size 8",
    "trainer": "gpt2_fsdp --model-name ./gpt2 --dataset texts.jsonl --val-dataset texts.jsonl "
    "--block-size {block} --batch-size 8",
    "bare": "llama_fsdp --model-name ./bare --dataset texts.jsonl --max-seq-length {pack} "
    "--batch-size 1 --activation-checkpointing none --weight-decay 0",
}
START = Path.cwd()  # later the working directory is a temporary one
OURS = {
    "ours, ddp": ["--strategy", "ddp"],
    "ours, FSDP1": ["--fsdp", "1"],
    "ours, FSDP2": ["--fsdp", "2"],
}


@dataclass
class Args:
    """The flags."""

    preset: Literal[*PRESETS] = "cpu"  # sizes
    processes: int = 2  # ranks, one per GPU
    against: tuple[Literal[*FLAGS], ...] = tuple(FLAGS)  # comparisons
    rows: int = 800  # number of docstrings
    tasks: Path | None = None  # file of chats, in place of docstrings
    articles: Path | None = None  # file of pairs, in place of docstrings
    steps: int = 20  # timed steps of each loop
    worker: tuple[str, ...] = ()  # passed by this program: comparison, loop, all loops


def read_lines(path: Path) -> list[dict]:
    """Return the rows of a file of JSON lines."""
    return list(map(json.loads, (START / path).read_text().splitlines()))


def tasks(path: Path) -> list[tuple[str, str]]:
    """Return prompt and output of each instance of self-instruct's tasks that has an output."""
    turns = []
    for task in read_lines(path):
        for instance in task["instances"]:
            prompt = f"{task['instruction']}\n{instance['input']}".strip()
            if instance["output"].strip():
                turns.append((prompt, instance["output"]))
    return turns


def write_rows(options: Args) -> list[str]:
    """Write chats, pairs and texts to files in the working directory. Return the docstrings."""
    rows = list(docstrings.rows())
    pairs = [(row["text"], row["headline"]) for row in rows[: options.rows]]
    turns = [(headline, text) for text, headline in pairs]
    texts = [row["text"] for row in rows]
    if options.tasks:
        turns = tasks(options.tasks)
    if options.articles:
        pairs = [(row["document"], row["summary"]) for row in read_lines(options.articles)]
    chats = []
    for question, answer in turns:
        asked = {"role": "user", "content": question}
        chats.append({"messages": [asked, {"role": "assistant", "content": answer}]})
    files = {
        "chats": chats,
        "pairs": [{"source": source, "target": target} for source, target in pairs],
        "texts": [{"text": text} for text in texts[: options.rows]],
    }
    for name, records in files.items():
        Dataset.from_list(records).to_json(f"{name}.jsonl")
    return texts


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
    """The turns of a loop, which makes a step in each, their times, and this rank's targets."""

    def __init__(self, loop: str, loops: list[str], steps: int):
        self.loop, self.next = loop, loops[loops.index(loop) - 1]
        self.last = WARM_UP + steps + 1  # in the last, which is not timed, other loops have ended
        self.seconds = []
        self.cpu_seconds = []
        self.targets = []

    def wait(self) -> None:
        """Wait for the turn of this loop, on all ranks; exit if another loop has failed."""
        while (turn := TURN.read_text()) != self.loop:
            if turn == FAILED:
                os._exit(1)
            time.sleep(1e-3)
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_train_begin(self, *_: object, **options: object) -> None:
        """Wait for the first turn. A trainer calls this itself, and the following method."""
        self.wait()

    def on_step_end(self, *_: object, **options: object) -> None:
        """Note the time of a step, give the turn to the next loop, and wait for another."""
        synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        self.cpu_seconds.append(time.process_time() - self.cpu_start)
        dist.barrier(group=ranks.cpu_group)
        if dist.get_rank() == 0:
            TURN.write_text(self.next)
        if len(self.seconds) < self.last:
            self.wait()

    def result(self) -> dict[str, float]:
        """Return the measurements: the targets are those of all ranks, the times of this one."""
        timed = slice(WARM_UP, self.last - 1)
        (targets,) = ranks.host_sums([sum(self.targets[timed])])
        return {
            "targets/s": targets / sum(self.seconds[timed]),
            "s": median(self.seconds[timed]),
            "CPU s": median(self.cpu_seconds[timed]),
        }


def run_ours(script: Any, args: Any, device: torch.device, rows: Any, clock: Clock) -> dict:
    """Run `train` of a script, from the end of one step to the next: data, token count, forward,
    backward, clip, optimizer and schedule. Return the measurements."""

    def steps(loader: Steps, _: torch.nn.Module) -> Steps:
        clock.wait()
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
    batches = MicroBatches(rows, sampler, chat_dataset.collate, args.optim)
    losses = []
    model.train()
    clock.wait()
    for (batch,) in DataLoader(batches, sampler=range(clock.last), batch_size=None):
        clock.targets.append(batch["targets"])
        batch = BatchEncoding(batch).to(device, non_blocking=True)
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
    """Return the Seq2SeqTrainer of Transformers' run_summarization.py, with group_by_length, on the
    tokens of T5_training.py."""
    model = load_whole(args, transformers.T5ForConditionalGeneration)
    options = transformers.Seq2SeqTrainingArguments(
        train_sampling_strategy="group_by_length",
        **trainer_options(args, "T5Block", steps),
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model.model_name)
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    rows = read_rows(args)
    return transformers.Seq2SeqTrainer(model, options, train_dataset=rows, data_collator=collator)


def clm_trainer(args: Any, steps: int) -> transformers.Trainer:
    """Return the Trainer of Transformers' run_clm.py, on the blocks of gpt2_fsdp.py."""
    model = load_whole(args, transformers.GPT2LMHeadModel)
    options = transformers.TrainingArguments(**trainer_options(args, "GPT2Block", steps))
    # The Trainer's model shifts the labels, so its blocks have no further token.
    size = args.data.block_size
    blocks = [row["input_ids"][:size] for row in read_rows(args) if len(row["input_ids"]) > size]
    rows = Dataset.from_dict({"input_ids": blocks, "labels": blocks})
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


@torch.no_grad()
def plain_loss(model: torch.nn.Module, batch: dict[str, Any]) -> float:
    """Return the model's mean loss per target over the batches of all ranks, on the CPU."""
    targets = count_targets(model, batch["labels"])
    total, count = ranks.host_sums([model(**batch).loss.item() * targets, targets])
    return total / count


def worker(options: Args) -> None:
    """Run a loop of a comparison on this rank; rank 0 prints the measurements as JSON."""
    name, loop, *loops = options.worker
    script_name, *flags = FLAGS[name].format(**PRESETS[options.preset]).split()
    script = importlib.import_module(script_name)
    clock = Clock(loop, loops, options.steps)
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
        data.set_chat_template(tokenizer, args.data)
    return ranks.local_main_process_first(data.load, args.data, tokenizer)[0]


def random_rows(args: Any, steps: int) -> list:
    """Return random documents for llama_fsdp.py, in which every position is a target."""
    count = steps * args.optim.batch_size * dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8192, (count, args.data.max_seq_length + 1), generator=generator).numpy()
    return [[{"input_ids": row, "labels": row}] for row in ids]


def report(results: dict[str, dict]) -> None:
    """Print each loop, relative to the first."""
    print("| loop | targets/s | ratio | s a step | CPU s a step | ratio | mean loss |")
    print("|---|---|---|---|---|---|---|")
    first = next(iter(results.values()))
    for loop, row in results.items():
        speed = f"{row['targets/s']:,.0f} | {row['targets/s'] / first['targets/s']:.2f}"
        cpu = f"{row['CPU s']:.3f} | {row['CPU s'] / first['CPU s']:.2f}"
        print(f"| {loop} | {speed} | {row['s']:.3f} | {cpu} | {row.get('mean loss', '')} |")
        if "reported" in row:
            print(f"\n{loop} reports a loss of {row['reported']:.6f} for its first step; the model "
                  f"alone has {row['alone']:.6f}.")  # fmt: skip


def main() -> None:
    """Write the data and models, and print a table for each comparison."""
    options = tyro.cli(Args, description=__doc__)
    if options.worker:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_models(options.preset, write_rows(options))
        for name in options.against:
            compare(name, options)


def compare(name: str, options: Args) -> None:
    """Launch the loops of a comparison together, and print the table."""
    ours = ["ours, FSDP1", "ours, FSDP2"] if name == "bare" else ["ours, ddp", "ours, FSDP1"]
    loops = [*ours, name]
    print(f"\n{FLAGS[name].split()[0]}.py, {options.steps} steps in turn\n")
    TURN.write_text(loops[0])
    words = [__file__, "--preset", options.preset, "--steps", options.steps, "--worker", name]
    futures = {}
    with ThreadPoolExecutor(len(loops)) as pool:
        for loop in loops:
            futures[loop] = pool.submit(launch, options.processes, *words, loop, *loops)
        for future in as_completed(futures.values()):
            if error := future.exception():
                TURN.write_text(FAILED)  # ends the others
                raise error
    report({loop: future.result() for loop, future in futures.items()})


if __name__ == "__main__":
    main()
