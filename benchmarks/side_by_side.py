"""Compare the speed of the scripts with the trainers of TRL and Transformers.

    pip install -r requirements.txt -r benchmarks/requirements.txt trl==1.16.0
    python benchmarks/side_by_side.py --tasks seed_tasks.jsonl --articles xsum_200.jsonl
    python benchmarks/side_by_side.py --preset gpu --processes 8
    python benchmarks/side_by_side.py --before ../before --pairs 3    # a worktree of another commit

- trl: SFTTrainer with packing and assistant_only_loss against llama_fsdp.py, on chats.
- seq2seq: Seq2SeqTrainer, group_by_length and a padding collator against T5_training.py, on pairs.
- trainer: Trainer on grouped blocks, as in Transformers' run_clm.py, against gpt2_fsdp.py.

Both programs of a pair have the same weights, rows, global batch, precision and optimizer, without
dropout and recomputation. Each loop runs in its own thread. It waits while the others make one step
(on GPUs ten), after a barrier of all ranks. On a CPU the trainers have no FSDP and use
DistributedDataParallel, so compare them with ours under ddp. CPU seconds are those of rank 0 and
vary less than wall time. A target is a predicted token that is not padding. The loss that a trainer
reports for its first step is compared with that of the model alone, one sample at a time.

`--before` measures whether a change of a step made it slower: launches of this program in another
tree and in this one take turns, on the same rows and models, with all loops.

Without `--tasks` (instructions of self-instruct) and `--articles` (`document` and `summary` in each
line), the programs train on Python's docstrings.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from common import ENDLESS, Loop, Steps, launch, parse, relay, train, trainer_options
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

import block_dataset
import chat_dataset
import gpt2_fsdp
import llama_fsdp
import summarization_dataset
import T5_training
from core import ranks
from tools import docstrings

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{%
if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>'
}}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n'
}}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""
VOCABULARY = 8192
IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
SHAPES = {
    "cpu": {
        "llama": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6,
                  "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": VOCABULARY},
        "t5": {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 6, "num_heads": 4,
               "vocab_size": VOCABULARY},
        "gpt2": {"n_embd": 320, "n_layer": 8, "n_head": 5, "vocab_size": VOCABULARY},
    },
    "gpu": {  # TinyLlama's 1.1B, T5 large, GPT-2 large
        "llama": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                  "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32_000},
        "t5": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16,
               "vocab_size": 32_128},
        "gpt2": {"n_embd": 1280, "n_layer": 36, "n_head": 20, "vocab_size": 50_257},
    },
}  # fmt: skip
LENGTHS = {"cpu": {"pack": 1024, "block": 256}, "gpu": {"pack": 2048, "block": 1024}}


def write_rows(options: argparse.Namespace, directory: Path) -> list[str]:
    """Write chats.jsonl, pairs.jsonl and texts.jsonl, and files with the first eight rows of each.
    Return all texts."""
    documented = [(row["text"], row["headline"]) for row in docstrings.rows()]
    pairs = documented[: options.rows]
    turns = [(headline, text) for text, headline in pairs]
    if options.tasks:
        turns = list(instances(options.tasks))
    if options.articles:
        lines = map(json.loads, options.articles.read_text().splitlines())
        pairs = [(line["document"], line["summary"]) for line in lines]
    texts = [text for text, _ in documented]
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in turns
    ]
    rows = {
        "chats": [{"messages": chat} for chat in chats],
        "pairs": [{"source": source, "target": target} for source, target in pairs],
        "texts": [{"text": text} for text in texts[: options.rows]],
    }
    for name, records in rows.items():
        for path, part in ((f"{name}.jsonl", records), (f"{name}-few.jsonl", records[:8])):
            lines = [json.dumps(row) + "\n" for row in part]
            directory.joinpath(path).write_text("".join(lines))
    return texts + [text for turn in turns for text in turn] + [text for text, _ in pairs]


def write_models(preset: str, texts: list[str], directory: Path) -> None:
    """Write a random Llama, T5 and GPT-2, with a byte-level BPE tokenizer trained on `texts`."""
    bpe = ByteLevelBPETokenizer()
    special = ["<pad>", "<|im_end|>", "<|im_start|>", "<unk>"]
    bpe.train_from_iterator(texts, VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<|im_end|>",
        unk_token="<unk>", chat_template=CHATML,
    )  # fmt: skip
    shapes = SHAPES[preset]
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    configs = {
        transformers.LlamaForCausalLM: transformers.LlamaConfig(**IDS, **shapes["llama"]),
        transformers.T5ForConditionalGeneration: transformers.T5Config(
            decoder_start_token_id=0, dropout_rate=0.0, **IDS, **shapes["t5"]
        ),
        transformers.GPT2LMHeadModel: transformers.GPT2Config(
            **IDS, **no_dropout, **shapes["gpt2"]
        ),
    }
    for model_class, config in configs.items():
        model_class(config).save_pretrained(directory / config.model_type)
        tokenizer.save_pretrained(directory / config.model_type)


def instances(tasks: Path) -> Iterator[tuple[str, str]]:
    """Yield prompt and output of each self-instruct task instance that has an output."""
    for task in map(json.loads, tasks.read_text().splitlines()):
        for instance in task["instances"]:
            if instance["output"].strip():
                prompt = f"{task['instruction']}\n{instance['input']}".strip()
                yield prompt, instance["output"]


class Turns:
    """The callback of a loop after each step, and the targets of this rank in each step."""

    def __init__(self, end_of_step: Callable[[], None]):
        self.end_of_step = end_of_step
        self.targets: list[int | Tensor] = []

    def steps(self, loader: Steps) -> Steps:
        """Yield the steps of one of our scripts."""
        for batches in loader:
            self.targets.append(sum(batch["targets"] for batch in batches))
            yield batches
            self.end_of_step()


def watched(trainer_class: type, turns: Turns) -> type:
    """Return a trainer that takes turns, and keeps its first batch and its first reported loss."""

    class Watched(trainer_class):
        first_batch: dict[str, Tensor] | None = None
        first_loss: float | None = None

        def compute_loss(self, model: torch.nn.Module, inputs: dict, *args, **options):
            if self.first_batch is None:
                self.first_batch = dict(inputs)
            turns.targets.append(count_targets(self.model, inputs["labels"]))
            return super().compute_loss(model, inputs, *args, **options)

        def log(self, logs: dict[str, float], *args) -> None:
            if self.first_loss is None:
                self.first_loss = logs["loss"]

    class EndOfStep(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **options: object) -> None:
            turns.end_of_step()

    def build(*args, **options) -> transformers.Trainer:
        trainer = Watched(*args, **options, callbacks=[EndOfStep()])
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    return build


def count_targets(model: torch.nn.Module, labels: Tensor) -> Tensor:
    """Return the number of predicted labels; a causal model does not predict the first of a row."""
    if not model.config.is_encoder_decoder:
        labels = labels[:, 1:]
    return (labels != -100).sum()


def samples(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield each sample of a batch without padding: the documents of a pack, pairs, or
    blocks."""
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
    """Return the model's mean loss per target over the batches of all ranks, computed one sample at
    a time."""
    total = torch.zeros(2, dtype=torch.float64)
    for sample in samples(batch):
        count = count_targets(model, sample["labels"])
        if count > 0:
            on_cpu = {name: value.cpu() for name, value in sample.items()}
            total += torch.stack([model(**on_cpu).loss.double() * count.cpu(), count.cpu()])
    total = total.to(batch["labels"].device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def trl_trainer(args: Any, turns: Turns) -> transformers.Trainer:
    """Return TRL's SFTTrainer on packed chats."""
    import trl

    attention = "sdpa"
    if torch.cuda.is_available() and transformers.utils.is_flash_attn_2_available():
        attention = "flash_attention_2"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model.model_name, dtype=torch.float32, attn_implementation=attention
    )
    config = trl.SFTConfig(
        packing=True, assistant_only_loss=True, max_length=args.data.max_seq_length,
        **trainer_options(args, "LlamaDecoderLayer"),
    )  # fmt: skip
    rows = Dataset.from_json(args.data.dataset[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model.model_name)
    build = watched(trl.SFTTrainer, turns)
    return build(model, config, train_dataset=rows, processing_class=tokenizer)


def seq2seq_trainer(args: Any, turns: Turns) -> transformers.Trainer:
    """Return the Seq2SeqTrainer of Transformers' run_summarization.py, with group_by_length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model.model_name)
    model = transformers.T5ForConditionalGeneration.from_pretrained(
        args.model.model_name, dtype=torch.float32
    )

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        inputs = tokenizer(
            [f"summarize: {text}{tokenizer.eos_token}" for text in batch["source"]],
            truncation=True, max_length=args.data.source_length, return_token_type_ids=False,
        )  # fmt: skip
        targets = [text + tokenizer.eos_token for text in batch["target"]]
        length = args.data.target_length
        labels = tokenizer(text_target=targets, truncation=True, max_length=length)
        return {**inputs, "labels": labels["input_ids"]}

    rows = Dataset.from_json(args.data.dataset[0])
    rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)
    options = transformers.Seq2SeqTrainingArguments(
        train_sampling_strategy="group_by_length", **trainer_options(args, "T5Block")
    )
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    build = watched(transformers.Seq2SeqTrainer, turns)
    return build(model, options, train_dataset=rows, data_collator=collator)


def clm_trainer(args: Any, turns: Turns) -> transformers.Trainer:
    """Return the Trainer of Transformers' run_clm.py, on joined texts in blocks of one length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model.model_name)
    model = transformers.GPT2LMHeadModel.from_pretrained(args.model.model_name, dtype=torch.float32)
    texts = [text + tokenizer.eos_token for text in Dataset.from_json(args.data.dataset[0])["text"]]
    ids = [x for row in tokenizer(texts)["input_ids"] for x in row]
    starts = range(0, len(ids) - args.data.block_size + 1, args.data.block_size)
    blocks = [ids[start : start + args.data.block_size] for start in starts]
    rows = Dataset.from_dict({"input_ids": blocks, "labels": blocks})
    options = transformers.TrainingArguments(**trainer_options(args, "GPT2Block"))
    build = watched(transformers.Trainer, turns)
    collator = transformers.default_data_collator
    return build(model, options, train_dataset=rows, data_collator=collator)


class Peer(NamedTuple):
    """A script with its model and flags, and the trainer to compare it with."""

    script: ModuleType
    data: ModuleType
    model: str
    flags: str
    trainer: Callable[[Any, Turns], transformers.Trainer] | None


BLOCKS = "--dataset texts.jsonl --val-dataset texts-few.jsonl --block-size {block} --batch-size 8"
PEERS = {
    "trl": Peer(
        llama_fsdp,
        chat_dataset,
        "llama",
        "--dataset chats.jsonl --val-dataset chats-few.jsonl --max-seq-length {pack} "
        "--batch-size 2 --no-activation-checkpointing",
        trl_trainer,
    ),
    "seq2seq": Peer(
        T5_training,
        summarization_dataset,
        "t5",
        "--dataset pairs.jsonl --val-dataset pairs-few.jsonl --source-column source "
        "--target-column target --batch-size 8",
        seq2seq_trainer,
    ),
    "trainer": Peer(gpt2_fsdp, block_dataset, "gpt2", BLOCKS, clm_trainer),
}
OURS = {
    "cpu": {"ours, ddp": ["--strategy", "ddp"], "ours, full_shard": []},
    "gpu": {"ours, full_shard": []},
}


def worker(options: argparse.Namespace) -> None:
    """Run ours and a peer in turn on this rank; rank 0 prints the measurements as JSON."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    peer = PEERS[options.worker]
    flags = [*peer.flags.format(**LENGTHS[options.preset]).split(), *ENDLESS]
    flags += ["--model-name", f"./{peer.model}"]
    args = parse(peer.script, *flags)
    device = ranks.setup(args.run.timeout_minutes)
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"./{peer.model}")
    if peer.data is chat_dataset:
        chat_dataset.set_chat_template(tokenizer, args.data)
    train_set, _ = ranks.local_main_process_first(peer.data.load, args.data, tokenizer)
    turns: dict[str, Turns] = {}
    trainers = []

    def our_loop(name: str, more: list[str], end_of_step: Callable[[], None]) -> None:
        turns[name] = Turns(end_of_step)
        own = parse(peer.script, *flags, *more, "--output-dir", f"output/{name}")
        train(peer.script, own, device, turns[name].steps, train_set)

    def theirs(end_of_step: Callable[[], None]) -> None:
        turns[options.worker] = Turns(end_of_step)
        trainers.append(peer.trainer(args, turns[options.worker]))
        trainers[0].train()

    loops: dict[str, Loop] = {
        name: partial(our_loop, name, more) for name, more in OURS[options.preset].items()
    }
    global_batch = args.optim.batch_size * dist.get_world_size()
    if peer.trainer:
        loops[options.worker] = theirs
    at_once = 10 if device.type == "cuda" else 1
    steps = math.ceil(len(train_set) / global_batch)
    count = math.ceil(options.epochs * steps / at_once)
    timings = relay(loops, count, device, at_once)
    result = {"rows": {}, "steps": count * at_once}
    timed = slice(at_once, at_once * (count + 1))
    for name in loops:
        targets = torch.tensor([int(x) for x in turns[name].targets[timed]], device=device)
        dist.all_reduce(targets)
        result["rows"][name] = {
            "targets": targets.sum().item(),
            "seconds": sum(timings[name]["seconds"]) * at_once,
            "cpu": sum(timings[name]["cpu_seconds"]) / count,
        }
    for trainer in trainers:
        whole = type(trainer.model).from_pretrained(args.model.model_name, dtype=torch.float32)
        result["wrapped"] = type(trainer.model_wrapped).__name__
        result["reported"] = trainer.first_loss
        result["plain"] = plain_loss(whole.eval(), trainer.first_batch)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    ranks.leave(0)


def report(name: str, stats: dict) -> None:
    """Print the results of the comparison with the peer `name`."""
    script = PEERS[name].script.__name__
    print(f"\n{script}.py, {stats['steps']} steps of each in turn; {name} wraps the model in "
          f"{stats['wrapped']}\n")  # fmt: skip
    rows = stats["rows"]
    base_name, base = next(iter(rows.items()))
    print(f"| loop | targets | s | targets/s | of {base_name} | CPU s a step | of {base_name} |")
    print("|---|---|---|---|---|---|---|")
    for loop, row in rows.items():
        speed = row["targets"] / row["seconds"]
        share = speed / (base["targets"] / base["seconds"])
        print(f"| {loop} | {row['targets']:,.0f} | {row['seconds']:.1f} | {speed:,.0f} "
              f"| {share:.2f} | {row['cpu']:.3f} | {row['cpu'] / base['cpu']:.2f} |")  # fmt: skip
    if "plain" in stats:
        print(f"\n{name} reports a loss of {stats['reported']:.6f} for its first step; the model "
              f"alone has {stats['plain']:.6f}", flush=True)  # fmt: skip


def launch_pairs(options: argparse.Namespace, flags: list) -> list[tuple[dict, dict]]:
    """Return the loops' results of `--before` and of this tree, launched in turn."""
    old = Path(options.before, "benchmarks", Path(__file__).name)
    pairs = []
    for _ in range(options.pairs):
        before = launch(options.processes, old, *flags)
        now = launch(options.processes, Path(__file__), *flags)
        pairs.append((before["rows"], now["rows"]))
    return pairs


def report_pairs(pairs: list[tuple[dict, dict]]) -> None:
    """Print medians of targets/s, and the times of a step here relative to those before."""
    print("\n| loop | targets/s before | now | s, now / before | CPU s, now / before | of pairs |")
    print("|---|---|---|---|---|---|")
    for loop in pairs[0][0]:
        rows = [(before[loop], now[loop]) for before, now in pairs]
        speeds = []
        for tree in (0, 1):
            values = [row[tree]["targets"] / row[tree]["seconds"] for row in rows]
            speeds.append(f"{statistics.median(values):,.0f}")
        seconds = statistics.median(now["seconds"] / before["seconds"] for before, now in rows)
        ratios = sorted(now["cpu"] / before["cpu"] for before, now in rows)
        print(f"| {loop} | {' | '.join(speeds)} | {seconds:.2f} | {statistics.median(ratios):.2f} "
              f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |", flush=True)  # fmt: skip


def main() -> None:
    """Write the data and models, and print a table for each peer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(SHAPES), default="cpu", help="sizes")
    parser.add_argument("--processes", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="which",
        default=["trl", "seq2seq", "trainer"])  # fmt: skip
    parser.add_argument("--tasks", type=Path, help="a JSONL file of self-instruct")
    parser.add_argument("--articles", type=Path, help="JSONL of document and summary")
    parser.add_argument("--rows", type=int, default=800, help="number of docstrings, if used")
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs of our script")
    parser.add_argument("--before", type=os.path.abspath, help="another tree to compare")
    parser.add_argument("--pairs", type=int, default=3, help="launches of each of the two trees")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # a peer
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        texts = write_rows(options, directory)
        write_models(options.preset, texts, directory)
        os.chdir(directory)
        for name in options.peers:
            if name == "trl" and not importlib.util.find_spec("trl"):
                print("\ntrl is not installed and is skipped.")
                continue
            flags = ["--worker", name, "--preset", options.preset, "--epochs", options.epochs]
            if options.before:
                report_pairs(launch_pairs(options, flags))
            else:
                report(name, launch(options.processes, Path(__file__), *flags))


if __name__ == "__main__":
    main()
