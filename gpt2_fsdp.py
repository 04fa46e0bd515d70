"""Train GPT-2 as a causal language model with PyTorch FSDP, and compare sharding strategies.

    python gpt2_fsdp.py --model-name tiny --dataset docstrings               # no GPU, no download
    torchrun --nnodes 1 --nproc_per_node 8 gpt2_fsdp.py                      # gpt2 on WikiText-2
    torchrun --nnodes 4 --nproc_per_node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 --rdzv-id 1 gpt2_fsdp.py \\
        --model-name openai-community/gpt2-xl --strategy hybrid_shard        # on each of 4 nodes

One optimizer step trains on --batch-size x --gradient-accumulation-steps x processes blocks.
Run the same command again to continue from the newest checkpoint; OUTPUT_DIR/final is a Hugging
Face model. Copy this file with policies.py, checkpointing.py and summarization_dataset.py; for
another model change `setup_model`, for other data `setup_data`.

Left out on purpose: attention that stops at document boundaries (see llama_fsdp.py).
"""

import contextlib
import functools
import inspect
import io
import json
import math
import os
import random
import subprocess
import sys
import time
import zlib
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Iterator
from datetime import timedelta
from glob import glob
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from datasets import Dataset, Features, List, Value, concatenate_datasets, disable_progress_bars
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, ByT5Tokenizer, GPT2Config
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import checkpointing
import policies
import summarization_dataset
from checkpointing import TrainState

Batch = dict[str, Tensor]
BLOCKS = (GPT2Block,)  # FSDP units, compiled and recomputed one by one
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "L40S": 362}  # bf16, dense
CHUNK = 1024  # tokens whose logits are held at a time


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Read the command line; what is wrong is said at once, before anything is started."""
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument_group("model").add_argument
    add("--model-name", default="openai-community/gpt2", help="hub id, local directory, or tiny "
        "(random weights, bytes as tokens, no download)")  # fmt: skip
    add("--from-scratch", action=BooleanOptionalAction, default=False, help="use only its config")
    add("--wrap", choices=["block", "size"], default="block", help="what becomes an FSDP unit")
    add("--min-num-params", type=int, default=0, help="smallest unit under --wrap size")
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="Salesforce/wikitext", help="hub id, or docstrings (no download)")
    add("--dataset-config", default="wikitext-2-raw-v1", help="configuration of a hub data set")
    add("--train-split", default="train", help="split of a hub data set")
    add("--val-split", default="validation", help="split of a hub data set")
    add("--train-file", nargs="+", help="text, JSONL or Parquet files or globs, for --dataset")
    add("--val-file", nargs="+", help="the same for validation")
    add("--text-column", default="text", help="column of a hub data set, JSONL or Parquet file")
    add("--block-size", type=int, default=1024, help="tokens in a sample")
    add("--num-train-samples", type=int, default=2000, help="training blocks (0: all)")
    add("--num-val-samples", type=int, default=500, help="validation blocks (0: all)")
    policies.common_arguments(parser)
    args = parser.parse_args(argv)
    problems = policies.common_problems(args)
    for name, low in {"block_size": 2, "num_train_samples": 0, "num_val_samples": 0}.items():
        if getattr(args, name) < low:
            problems.append(f"--{name.replace('_', '-')} must be {low} or more")
    if (args.wrap == "size") != (args.min_num_params > 0):
        problems.append("--wrap size and --min-num-params, a number above 0, need each other")
    if bool(args.train_file) != bool(args.val_file):
        problems.append("--train-file and --val-file need each other")
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


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats of the logits hidden @ weight.T, of which only a chunk is held.

    `hidden` is [positions, width], `weight` [vocabulary, width], `targets` int64 [positions], -100
    where nothing is predicted. Call it in the forward of the FSDP unit that owns the weight, which
    is whole nowhere else. Before torch 2.13 all the logits are held.

    Empty `targets` give the logits [positions, vocabulary], for `policies.check_head`.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if targets.numel() == 0:
        return F.linear(hidden, weight)
    if not hasattr(F, "linear_cross_entropy"):
        return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)
    # "sum" makes gradients on the way, and logits but once, but is in the dtype of `hidden`: three
    # digits in bf16, and too large for fp16.
    how = "sum" if hidden.dtype == torch.float32 else "none"
    losses = F.linear_cross_entropy(hidden, weight, targets, reduction=how, options=chunks)
    return losses.sum(dtype=torch.float32)


class GPT2LMHeadModel(transformers.GPT2LMHeadModel):
    """Hugging Face's, under its name for the export, with a forward that may end in the loss."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        targets: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As ever without `targets`; with them the summed loss in nats of the next tokens.

        `input_ids` and `targets` are int64 [batch, length], `targets[i, j]` follows
        `input_ids[i, j]` and is -100 where nothing does.
        """
        if targets is None:
            return super().forward(input_ids, attention_mask=attention_mask, **options)
        hidden = self.transformer(input_ids, use_cache=False).last_hidden_state
        return chunked_loss(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten())


def setup_model(
    args: Namespace, device: torch.device, pretrained: bool
) -> tuple[nn.Module, Tokenizer, str]:
    """The wrapped model with fp32 weights, its tokenizer, and a checksum of its shapes.

    Without `pretrained` a model from files is left empty, for a checkpoint to fill. Raises
    ValueError if the model cannot be had, is no GPT-2, or is too short for --block-size.
    """
    init = None
    if args.model_name == "tiny":
        tokenizer = ByT5Tokenizer()
        shape = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024}
        eos = tokenizer.eos_token_id
        config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=eos, eos_token_id=eos, **shape)
    else:
        directory = policies.first_on_node(checkpointing.model_directory, args.model_name)
        config = AutoConfig.from_pretrained(directory)
        if config.model_type != "gpt2":
            raise ValueError(f"--model-name {args.model_name} is a {config.model_type}, not a gpt2")
        tokenizer = checkpointing.load_tokenizer(directory, config.vocab_size)
    if args.block_size > config.n_positions:
        raise ValueError(
            f"--block-size {args.block_size} is above the model's {config.n_positions} positions"
        )
    if args.model_name == "tiny" or args.from_scratch:
        model = GPT2LMHeadModel(config)  # the seed is the same on all ranks
    else:
        model = checkpointing.meta_model(GPT2LMHeadModel, config, directory)
        init = checkpointing.streamed_init(model, directory if pretrained else None, device)
    shapes = checkpointing.checksum([(n, list(p.shape)) for n, p in model.named_parameters()])
    policy = policies.wrap_policy(BLOCKS)
    if args.wrap == "size":
        policy = policies.size_policy(model, args.min_num_params)
    if args.compile:
        policies.compile_blocks(model, BLOCKS)
    if args.strategy == "ddp":
        for module in list(model.modules()) if init else ():
            init(module)
        model = DDP(model.to(device), device_ids=[device] if device.type == "cuda" else None)
    else:
        model = FSDP(
            model,
            auto_wrap_policy=policy,
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


def read_file(path: Path, column: str) -> Dataset:
    """A file's texts, a row each: of a column, or the lines of a text file; raises ValueError."""
    if path.suffix.lower() in summarization_dataset.KINDS:
        return text_column(str(path), summarization_dataset.read_file(path, ()), column)
    checksum = summarization_dataset.check_content(path)
    text = path.read_text(encoding="utf-8").rstrip("\n")
    lines = list(io.StringIO(text, newline="\n")) or [""]  # splitlines knows other ends of lines
    if any("\0" in line for line in lines):
        raise ValueError(f"{path} is binary, not text")
    return Dataset.from_generator(
        lambda: ({"text": line} for line in lines),
        features=Features({"text": Value("string")}),
        fingerprint=summarization_dataset.fingerprint("lines", checksum),
    )


def text_column(name: str, rows: Dataset, column: str) -> Dataset:
    """The given column alone, under the name text; raises ValueError if it is not there."""
    if column not in rows.column_names:
        found = ", ".join(rows.column_names)
        raise ValueError(f"{name} has columns {found}; --text-column {column} is not among them")
    return rows.select_columns([column]).rename_column(column, "text")


def read_texts(args: Namespace, split: str) -> Dataset:
    """The texts of split train or validation, a row each; raises ValueError.

    A row is a document, unless it ends in a newline: then the next row goes on with it, as do the
    lines of a text file, and the rows of WikiText.
    """
    patterns = args.train_file if split == "train" else args.val_file
    if patterns:
        paths = [Path(name) for pattern in patterns for name in sorted(glob(pattern)) or [pattern]]
        return concatenate_datasets([read_file(path, args.text_column) for path in paths])
    if args.dataset != "docstrings":
        parts = summarization_dataset.read_hub(args, ())
        name = args.train_split if split == "train" else args.val_split
        return text_column(args.dataset, parts[name], args.text_column)
    rows = summarization_dataset.docstring_rows()
    held_out = [zlib.crc32(module.encode()) % 8 == 0 for module in rows["module"]]
    return rows.select([i for i, out in enumerate(held_out) if out == (split != "train")])


def blocks(rows: Dataset, size: int) -> Iterator[dict[str, list[int]]]:
    """Cut the joined documents into blocks; each ends with the token that the next begins with,
    so that every token but the first is predicted once. The last block is what is left."""
    pending: list[int] = []
    for row in rows:
        pending += row["input_ids"]
        while len(pending) > size:
            yield {"input_ids": pending[: size + 1]}
            del pending[:size]
    if len(pending) > 1:
        yield {"input_ids": pending}


def load_blocks(
    args: Namespace, tokenizer: Tokenizer, split: str, number: int, verbose: bool
) -> Dataset:
    """`number` blocks (0: all) of a split in a column input_ids, from the cache if they are there.

    Raises ValueError if there is none.
    """

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text or "" for text in batch["text"]]
        plain = {"add_special_tokens": False, "split_special_tokens": True}  # "<unk>" is text here
        ids = tokenizer(texts, **plain, verbose=False)["input_ids"]
        eos = [tokenizer.eos_token_id]
        ends = [bool(text) and not text.endswith("\n") for text in texts]
        return {"input_ids": [x + eos * end for x, end in zip(ids, ends, strict=True)]}

    code = inspect.getsource(load_blocks) + inspect.getsource(blocks)
    features = {"input_ids": List(Value("int32"))}
    identity = (code, *summarization_dataset.tokenizer_identity(tokenizer))
    rows = read_texts(args, split)
    rows = summarization_dataset.cached_map(rows, encode, features, *identity)
    if next(blocks(rows, args.block_size), None) is None:
        raise ValueError(f"the {split} texts give no block: they have fewer than two tokens")
    cut = Dataset.from_generator(
        functools.partial(blocks, rows, args.block_size),
        features=Features(features),
        fingerprint=summarization_dataset.fingerprint(rows._fingerprint, args.block_size, code),
    )
    number = min(number or len(cut), len(cut))
    if verbose:
        print(f"{split}: {len(cut):,} blocks, {number:,} used", flush=True)
    return cut.select(sorted(random.Random(0).sample(range(len(cut)), number)))


def collate(examples: list[dict[str, list[int]]]) -> Batch:
    """int64 input_ids and labels, the tokens that follow, [batch, length]; -100 past a block's end.

    No examples give one without labels, for a rank that has none left.
    """
    rows = [example["input_ids"] for example in examples] or [[0]]
    width = max(8, *(len(row) - 1 for row in rows))
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full_like(input_ids, -100)
    for row, ids, target in zip(rows, input_ids, labels, strict=True):
        ids[: len(row) - 1] = torch.tensor(row[:-1])
        target[: len(row) - 1] = torch.tensor(row[1:])
    return {"input_ids": input_ids, "labels": labels}


def setup_data(args: Namespace, tokenizer: Tokenizer) -> tuple[DataLoader, dict[str, DataLoader]]:
    """The loader of this rank's micro-batches, and one of each validation set, by its name.

    Raises ValueError if the data cannot be had or are too few.
    """
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        disable_progress_bars()

    def load(split: str, number: int) -> Dataset:
        parts = (args, tokenizer, split, number, dist.get_rank() == 0)
        return policies.first_on_node(load_blocks, *parts)

    train_set, val_set = (
        load("train", args.num_train_samples),
        load("validation", args.num_val_samples),
    )
    if len(train_set) < dist.get_world_size():
        raise ValueError(
            f"there are {len(train_set)} training blocks, fewer than the {dist.get_world_size()} "
            "processes: use fewer processes, more data, or a smaller --block-size"
        )

    def loader(dataset: Dataset, accumulation: int, seed: int | None) -> DataLoader:
        sampler = policies.GlobalBatchSampler(len(dataset), args.batch_size, accumulation, seed)
        options = {"collate_fn": collate, "pin_memory": torch.cuda.is_available()}
        options["generator"] = torch.Generator()  # or each epoch would draw from dropout's
        return DataLoader(dataset, batch_sampler=sampler, **options)

    train_loader = loader(train_set, args.gradient_accumulation_steps, args.seed)
    return train_loader, {"validation": loader(val_set, 1, None)}


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy in nats, summed over the batch's target tokens (labels that are not -100)."""
    return model(input_ids=batch["input_ids"], targets=batch["labels"])


def count_tokens(batch: Batch) -> tuple[int, int]:
    """Number of target tokens, and of all tokens that are not padding: the same here."""
    targets = int((batch["labels"] != -100).sum())
    return targets, targets


def throughput(args: Namespace, state: TrainState, tokens: int, seconds: float) -> dict[str, float]:
    """Tokens/s, of one rank too; on GPUs the model's TFLOP/s of one and what share of its peak."""
    speed = tokens / seconds
    rates = {
        "tokens_per_second": speed,
        "tokens_per_second_per_rank": speed / dist.get_world_size(),
    }
    if state.device.type == "cuda" and state.flops_per_token:
        flops = rates["tokens_per_second_per_rank"] * state.flops_per_token
        rates["tflops_per_gpu"] = flops / 1e12
        name = torch.cuda.get_device_name()
        for peak in (peak for part, peak in PEAK_TFLOPS.items() if part in name):
            rates |= {"mfu": rates["tflops_per_gpu"] / peak, "assumed_peak_tflops": peak}
    return rates


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


def log_phases(args: Namespace, state: TrainState) -> None:
    """With --track-memory log the peaks of loading, the first forward and the first step; the
    peaks in the training metrics after it are the steady ones (but RSS never falls)."""

    def peak_of(phase: str) -> None:
        log(args, state, "memory", phase=phase, **policies.peak_memory(args, state.device))
        if state.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def first_forward(*_: Any) -> None:
        if torch.is_grad_enabled():  # not in validation
            forward.remove()
            peak_of("first forward")

    def first_step(*_: Any) -> None:
        step.remove()
        peak_of("first step")

    if args.track_memory:
        peak_of("load")
        forward = state.model.register_forward_hook(first_forward)
        step = state.optimizer.register_step_post_hook(first_step)


@torch.no_grad()
def continue_prompts(
    args: Namespace, state: TrainState, tokenizer: Tokenizer, dataset: Dataset
) -> list[tuple[str, str]]:
    """The beginnings of three blocks and how the model goes on, greedily; all ranks.

    Generation runs outside the root's forward, so FSDP's root is gathered around it; the blocks
    gather themselves, and `synced_gpus` keeps the ranks at one number of forward passes.
    """
    root, dtype = contextlib.nullcontext(), policies.PRECISIONS[args.precision].param_dtype
    if isinstance(state.model, FSDP):
        root = FSDP.summon_full_params(state.model, recurse=False, writeback=False)
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
    options["synced_gpus"] = dist.get_world_size() > 1
    texts = []
    state.model.eval()
    with root, torch.autocast(state.device.type, dtype, enabled=dtype != torch.float32):
        for index in range(min(3, len(dataset))):
            prompt = torch.tensor([dataset[index]["input_ids"][:32]], device=state.device)
            mask = torch.ones_like(prompt)
            (output,) = state.model.module.generate(prompt, attention_mask=mask, **options)
            parts = output[: prompt.size(1)], output[prompt.size(1) :]
            texts.append(tuple(tokenizer.decode(part) for part in parts))
    state.model.train()
    return texts


def prepare(
    args: Namespace, device: torch.device, checkpoint: Path | None
) -> tuple[TrainState, Tokenizer, DataLoader, dict[str, DataLoader]]:
    """What is trained, as `checkpoint` left it, and the data; all ranks."""
    with checkpointing.report_memory(device):
        model, tokenizer, shapes = setup_model(args, device, pretrained=checkpoint is None)
    loader, val_loaders = setup_data(args, tokenizer)
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
        "global batch": sampler.global_batch,
        "seed": args.seed,
    }
    stop = policies.StopRequest()
    state = TrainState(model, optimizer, scheduler, scaler, device, identity, total_steps, stop)
    state.flops_per_token = policies.flops_per_token(model.module, args.block_size)
    if args.async_save:
        limit = timedelta(minutes=args.timeout_minutes)
        state.save_group = dist.new_group(backend="gloo", timeout=limit)
    transformers.set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
    if checkpoint:
        checkpointing.load_checkpoint(checkpoint, state, args.seed, Path(args.output_dir))
    policies.check_head(args, device, model, {"input_ids": torch.arange(32)[None]})
    return state, tokenizer, loader, val_loaders


def finish(args: Namespace, state: TrainState, tokenizer: Tokenizer, loader: DataLoader) -> None:
    """Continue three prompts and write final/ and best/; all ranks."""
    output = Path(args.output_dir)
    texts = continue_prompts(args, state, tokenizer, loader.dataset)
    checkpointing.export_model(state.model, tokenizer, output / "final", args)
    if state.best_step:  # or no validation followed on a checkpoint taken from elsewhere
        checkpointing.load_weights(checkpointing.best_path(output, state), state.model)
    checkpointing.export_model(state.model, tokenizer, output / "best", args)
    if dist.get_rank() == 0:
        for prompt, text in texts:
            print(f"   prompt: {prompt!r}\ncontinued: {text!r}")
        values = {"best_loss": state.best_loss} | policies.peak_memory(args, state.device)
        log(args, state, "done", best_step=state.best_step, **values)
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
            log_phases(args, state)
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
