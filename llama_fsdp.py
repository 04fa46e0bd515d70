"""Fine-tune Llama on chats with PyTorch FSDP, from 7B to 70B, with packed documents.

    python llama_fsdp.py --model-name tiny                                   # no GPU, no download
    torchrun --nnodes 1 --nproc_per_node 8 llama_fsdp.py --dataset chats.jsonl
    torchrun --nnodes 4 --nproc_per_node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 --rdzv-id 1 llama_fsdp.py \\
        --model-name meta-llama/Llama-2-70b-hf --dataset chats.jsonl         # on each of 4 nodes

One optimizer step trains on --batch-size x --gradient-accumulation-steps x processes sequences of
--max-seq-length tokens, each packed with documents that do not see each other. Run the same command
again to continue from the newest checkpoint; OUTPUT_DIR/final is a Hugging Face model. Copy this
file with policies.py, checkpointing.py, summarization_dataset.py (its readers) and chat_dataset.py;
for another model change `setup_model`, for other data `load_documents`.

Left out on purpose: adapters and quantisation, which other libraries do well.
"""

import contextlib
import importlib
import inspect
import json
import math
import os
import random
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    ByT5Tokenizer,
    LlamaConfig,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import chat_dataset
import checkpointing
import policies
import summarization_dataset
from checkpointing import TrainState

Batch = dict[str, Tensor]
BLOCKS = (LlamaDecoderLayer,)  # FSDP units, compiled and recomputed one by one
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "L40S": 362}  # bf16, dense
CHUNK = 1024  # tokens whose logits are held at a time
RECIPE = {"lr": 5e-5, "lr_schedule": "cosine", "batch_size": 1, "epochs": 1, "seed": 100}
RECIPE |= {"log_every": 25, "eval_every": 100, "save_every": 250, "timeout_minutes": 90.0}
RECIPE |= {"activation_checkpointing": True, "export_dtype": "bf16"}


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Read the command line; what is wrong is said at once, before anything is started."""
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument_group("model").add_argument
    add("--model-name", default="meta-llama/Llama-2-7b-hf", help="hub id, local directory, or tiny "
        "(random weights, bytes as tokens, no download)")  # fmt: skip
    add(
        "--attention",
        choices=["auto", "flash", "varlen", "sdpa", "eager"],
        default="auto",
        help="flash-attn's kernel, torch's own, or one with a mask; auto: the first that runs",
    )
    chat_dataset.add_arguments(parser)
    policies.common_arguments(parser)
    parser.set_defaults(**RECIPE)
    args = parser.parse_args(argv)
    args.dataset = args.dataset or ["docstrings"]
    problems = policies.common_problems(args) + chat_dataset.check_arguments(args)
    args.precision = policies.resolve_precision(args.precision)
    try:
        args.attention = resolve_attention(args.attention, args.precision)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        parser.error("; ".join(problems))
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


def varlen_kernel(name: str, precision: str) -> Callable[..., Tensor]:
    """The attention kernel for packed documents that `name` (flash or varlen) means.

    It takes queries, keys and values [positions, heads, head size] in bf16 or fp16 with fewer
    heads in the latter two (GQA), cumulative document lengths (int32), the largest of the lengths
    and the scale. Raises ValueError with the reason if it cannot run here.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(f"--attention {name} needs a GPU of compute capability 8.0 or newer")
    if precision == "fp32":
        raise ValueError(f"--attention {name} needs --precision bf16 or fp16")
    if name == "varlen":
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            raise ValueError("--attention varlen needs torch 2.11 or newer") from None
        known = inspect.signature(varlen_attn).parameters
        if "window_size" not in known:
            raise ValueError("--attention varlen needs torch 2.11 or newer")
        gqa = "enable_gqa" in known

        def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float):
            groups = q.size(1) // k.size(1)
            if not gqa:
                k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            options = {"enable_gqa": groups > 1} if gqa else {}
            limits = (ends, ends, longest, longest)
            return varlen_attn(q, k, v, *limits, scale=scale, window_size=(-1, 0), **options)

        return varlen
    major, _ = torch.cuda.get_device_capability()
    for module, runs in (
        ("flash_attn_interface", major == 9),  # version 3
        ("flash_attn.cute", major >= 9),  # version 4
        ("flash_attn", True),  # version 2
    ):
        if not runs:
            continue
        try:
            function = importlib.import_module(module).flash_attn_varlen_func
            break
        except (ImportError, AttributeError):
            continue
    else:
        raise ValueError("--attention flash needs a package flash-attn that runs on this GPU")

    def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float):
        limits = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        limits |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        output = function(q, k, v, **limits, softmax_scale=scale, causal=True)
        return output[0] if isinstance(output, tuple) else output

    return flash


def resolve_attention(name: str, precision: str) -> str:
    """`auto` is the first that runs here; raises ValueError if `name` cannot."""
    for candidate in ("flash", "varlen") if name == "auto" else ():
        with contextlib.suppress(ValueError):
            varlen_kernel(candidate, precision)
            return candidate
    if name in ("flash", "varlen"):
        varlen_kernel(name, precision)
    return "sdpa" if name == "auto" else name


def register_attention(kernel: Callable[..., Tensor], longest: int = 0) -> None:
    """Give Transformers an attention called "packed", with no mask: `cu_seq_lens` says it all.

    The cumulative lengths are made once a batch, by `collate`, and reach every layer as a keyword.
    A layer that asks for what the kernel does not compute raises ValueError: a mask or bias, a soft
    cap, sinks, dropout, or a window shorter than the sequences, which have up to `longest` tokens.
    """

    def packed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float,
        cu_seq_lens: Tensor, sliding_window: int | None = None, is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """From [batch, heads, length, head size] to [batch, length, heads, head size]."""
        batch, _, length, _ = query.shape
        features = {"attention_mask": mask} | options
        for name in ("position_ids", "cache_position", "use_cache"):  # these change nothing here
            features.pop(name, None)
        if sliding_window is not None and sliding_window < (longest or length):
            features["sliding_window"] = sliding_window
        if is_causal is False or not getattr(module, "is_causal", True):
            features["is_causal=False"] = True
        missing = [name for name, x in features.items() if isinstance(x, Tensor) or x]
        if missing:
            raise ValueError(
                f"--attention flash and varlen have no {', '.join(missing)}, for which "
                f"{type(module).__name__} asks: use --attention eager, or sdpa for a window or "
                "dropout"
            )
        # Under autocast the rotary embedding leaves queries and keys in fp32.
        parts = (x.transpose(1, 2).flatten(0, 1).to(value.dtype) for x in (query, key, value))
        return kernel(*parts, cu_seq_lens, length, scaling).unflatten(0, (batch, length)), None

    AttentionInterface.register("packed", packed)
    AttentionMaskInterface.register("packed", lambda **_: None)


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


class LossHead(nn.Linear):
    """An output head that returns the summed loss where it is given targets, else the logits."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """As `chunked_loss`, in this module's own forward: it is an FSDP unit if it is not tied."""
        return (
            super().forward(hidden)
            if targets is None
            else chunked_loss(hidden, self.weight, targets)
        )


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """Hugging Face's, under its name for the export, with a forward that may end in the loss."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.lm_head = LossHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # ties the new head, or initialises it

    def forward(
        self, input_ids: Tensor | None = None, targets: Tensor | None = None, **options: Any
    ) -> Any:
        """As ever without `targets`; with them the summed loss in nats of packed documents.

        `input_ids`, `targets` and `position_ids` are int64 [batch, length] as `collate` makes them:
        a document begins wherever the positions begin again.
        """
        if targets is None:
            return super().forward(input_ids, **options)
        if self.config._attn_implementation == "packed":
            # Without any mask Transformers would look for documents itself, and wait for the GPU.
            options["attention_mask"] = torch.ones_like(input_ids)
        hidden = self.model(input_ids, use_cache=False, **options).last_hidden_state
        return self.lm_head(hidden.flatten(0, 1), targets.flatten())


def setup_model(
    args: Namespace, device: torch.device, pretrained: bool
) -> tuple[nn.Module, Tokenizer, str]:
    """The wrapped model with fp32 weights, its tokenizer, and a checksum of its shapes.

    Without `pretrained` a model from files is left empty, for a checkpoint to fill. Raises
    ValueError if the model cannot be had, is no Llama, or is too short for --max-seq-length.
    """
    init = None
    if args.model_name == "tiny":
        tokenizer = ByT5Tokenizer()
        shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        config = LlamaConfig(vocab_size=len(tokenizer), **ids, **shape)
    else:
        directory = policies.first_on_node(checkpointing.model_directory, args.model_name)
        config = AutoConfig.from_pretrained(directory)
        if config.model_type != "llama":
            name = f"--model-name {args.model_name}"
            raise ValueError(f"{name} is a {config.model_type}, not a llama")
        tokenizer = checkpointing.load_tokenizer(directory, config.vocab_size)
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in {directory} has no EOS token")
    if args.max_seq_length > config.max_position_embeddings:
        raise ValueError(
            f"--max-seq-length {args.max_seq_length} is above the model's "
            f"{config.max_position_embeddings} positions"
        )
    tokenizer.chat_template = tokenizer.chat_template or chat_dataset.TEMPLATE  # final/ has it too
    kernel = args.attention in ("flash", "varlen")
    if kernel and config.attention_dropout:
        raise ValueError(f"--attention {args.attention} has no dropout: use sdpa for this model")
    if kernel:
        register_attention(varlen_kernel(args.attention, args.precision), args.max_seq_length)
    config._attn_implementation = "packed" if kernel else args.attention
    if args.model_name == "tiny":
        model = LlamaForCausalLM(config)  # the seed is the same on all ranks
    else:
        model = checkpointing.meta_model(LlamaForCausalLM, config, directory)
        init = checkpointing.streamed_init(model, directory if pretrained else None, device)
    shapes = checkpointing.checksum([(n, list(p.shape)) for n, p in model.named_parameters()])
    units = BLOCKS
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        units += (nn.Embedding, LossHead)
    if args.compile:
        policies.compile_blocks(model, BLOCKS)
    if args.strategy == "ddp":
        for module in list(model.modules()) if init else ():
            init(module)
        model = DDP(model.to(device), device_ids=[device] if device.type == "cuda" else None)
    else:
        model = FSDP(
            model,
            auto_wrap_policy=policies.wrap_policy(units),
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


def load_documents(
    args: Namespace, tokenizer: Tokenizer, name: str, verbose: bool
) -> tuple[Dataset, Dataset]:
    """Training and validation documents of the data set `name`, as `chat_dataset.encoder` makes
    them, from the cache if they are there. Raises ValueError if there are none."""
    if name == "docstrings":
        rows = summarization_dataset.docstring_rows()
        parts = [rows.rename_columns({"headline": "prompt", "text": "completion"})]
    elif Path(name).is_file() or Path(name).suffix:
        if Path(name).suffix.lower() not in summarization_dataset.KINDS:
            known = ", ".join(summarization_dataset.KINDS)
            raise ValueError(f"--dataset {name} is of no known kind: {known}")
        parts = [summarization_dataset.read_file(Path(name), ())]
    else:
        splits = summarization_dataset.read_hub(Namespace(**vars(args) | {"dataset": name}), ())
        parts = [splits[part] for part in dict.fromkeys((args.train_split, args.val_split))]
    code = Path(chat_dataset.__file__).read_bytes()
    identity = (name, code, args.max_seq_length, args.train_on_prompt, args.text_column)
    identity += (tokenizer.chat_template, *summarization_dataset.tokenizer_identity(tokenizer))
    encoded = []
    for rows in parts:
        kind = chat_dataset.kind(name, rows.column_names, args.text_column)
        encode = chat_dataset.encoder(name, kind, tokenizer, args)
        how = (encode, chat_dataset.FEATURES, *identity)
        encoded.append(summarization_dataset.cached_map(rows, *how, with_indices=True))
    if len(encoded) == 1:
        (rows,), out = encoded, chat_dataset.held_out(encoded[0]["key"][:])
        encoded = [rows.select([i for i, x in enumerate(out) if x == val]) for val in (False, True)]
    limits = {"training": args.num_train_samples, "validation": args.num_val_samples}
    sets = []
    for rows, (split, limit) in zip(encoded, limits.items(), strict=True):
        limit = min(limit or len(rows), len(rows))
        rows = rows.select(sorted(random.Random(0).sample(range(len(rows)), limit)))
        cuts = {i: tokens for i, tokens in enumerate(rows["cut"][:]) if tokens}
        labels = zip(cuts, rows.select(list(cuts))["labels"], strict=True)
        empty = {i for i, row in labels if not any(label != -100 for label in row)}
        sets.append(rows.select([i for i in range(limit) if i not in empty]))
        if verbose:
            print(f"{name}, {split}: {limit:,} documents; {len(cuts):,} cut to --max-seq-length, "
                  f"losing {sum(cuts.values()):,} tokens; {len(empty):,} left out, whose answers "
                  "begin after it", flush=True)  # fmt: skip
        if len(empty) == limit:
            raise ValueError(f"{name}, {split}: no answer begins within --max-seq-length")
    return sets[0], sets[1]


def setup_data(args: Namespace, tokenizer: Tokenizer) -> tuple[DataLoader, dict[str, DataLoader]]:
    """The loader of this rank's micro-batches, and one of each validation set, by its name.

    Raises ValueError if the data cannot be had or are too few.
    """
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        disable_progress_bars()
    train_sets, val_sets = [], {}
    for name in args.dataset:
        parts = (args, tokenizer, name, dist.get_rank() == 0)
        train_set, val_set = policies.first_on_node(load_documents, *parts)
        train_sets.append(train_set)
        val_sets[name] = chat_dataset.Packs(val_set, args)
    packs = chat_dataset.Packs(concatenate_datasets(train_sets), args)
    args.mean_document = packs.span  # for the FLOP count
    if dist.get_rank() == 0:
        how = f"{100 * packs.fill:.1f}% full" if args.packing else "padded, a document each"
        print(f"{len(packs):,} training sequences of {args.max_seq_length}, {how}", flush=True)
    if len(packs) < dist.get_world_size():
        raise ValueError(
            f"there are {len(packs)} training sequences, fewer than the {dist.get_world_size()} "
            "processes: use fewer processes, more data, or a smaller --max-seq-length"
        )

    def loader(dataset: chat_dataset.Packs, accumulation: int, seed: int | None) -> DataLoader:
        sampler = policies.GlobalBatchSampler(len(dataset), args.batch_size, accumulation, seed)
        options = {"collate_fn": chat_dataset.collate, "pin_memory": torch.cuda.is_available()}
        options["generator"] = torch.Generator()  # or each epoch would draw from dropout's
        return DataLoader(dataset, batch_sampler=sampler, **options)

    train_loader = loader(packs, args.gradient_accumulation_steps, args.seed)
    packs.sampler = train_loader.batch_sampler
    return train_loader, {name: loader(val_set, 1, None) for name, val_set in val_sets.items()}


def model_inputs(batch: Batch) -> Batch:
    """What the model is given of a batch besides the targets."""
    return {key: batch[key] for key in ("input_ids", "position_ids", "cu_seq_lens")}


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy in nats, summed over the batch's target tokens (labels that are not -100)."""
    return model(**model_inputs(batch), targets=batch["labels"])


def count_tokens(batch: Batch) -> tuple[int, int]:
    """Number of target tokens, and of all tokens that are not padding."""
    return int((batch["labels"] != -100).sum()), int(batch["tokens"])


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
    state.flops_per_token = policies.flops_per_token(model.module, args.mean_document)
    if args.async_save:
        limit = timedelta(minutes=args.timeout_minutes)
        state.save_group = dist.new_group(backend="gloo", timeout=limit)
    transformers.set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
    if checkpoint:
        checkpointing.load_checkpoint(checkpoint, state, args.seed, Path(args.output_dir))
    document = {"input_ids": range(17), "labels": range(17)}
    policies.check_head(args, device, model, model_inputs(chat_dataset.collate([[document] * 2])))
    return state, tokenizer, loader, val_loaders


def finish(args: Namespace, state: TrainState, tokenizer: Tokenizer) -> None:
    """Write final/ and best/; all ranks."""
    output = Path(args.output_dir)
    checkpointing.export_model(state.model, tokenizer, output / "final", args)
    if state.best_step:  # or no validation followed on a checkpoint taken from elsewhere
        checkpointing.load_weights(checkpointing.best_path(output, state), state.model)
    checkpointing.export_model(state.model, tokenizer, output / "best", args)
    if dist.get_rank() == 0:
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
    """Prepare, train, validate and export; all ranks. Returns the exit code."""
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
            finish(args, state, tokenizer)
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
