"""Code shared by the benchmarks: training, models, data, and launches that print JSON."""

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    ByT5Tokenizer,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

import block_dataset
import chat_dataset
import policies
import summarization_dataset
from core import ranks, weights
from core.ranks import Batch
from optional import lora
from tools import memory_estimator

Steps = Iterable[list[Batch]]  # the micro-batches of each step, of this rank
Loop = Callable[[Callable[[], None]], None]  # a training loop that calls its argument after a step
GPT2 = {  # width, layers, heads, vocabulary of the published models and of small ones
    "tiny": (128, 4, 4, 384),
    "30M": (512, 8, 8, 8192),
    "300M": (1024, 24, 16, 384),
    "gpt2": (768, 12, 12, 50257),
    "gpt2-medium": (1024, 24, 16, 50257),
    "gpt2-large": (1280, 36, 20, 50257),
    "gpt2-xl": (1600, 48, 25, 50257),
}
LLAMAS = {  # width, feed-forward width, layers, heads, key-value heads, vocabulary
    "tiny": (64, 128, 2, 4, 4, 512),
    "41M": (768, 2048, 4, 12, 12, 8192),
    "98M": (768, 2048, 12, 12, 12, 8192),
    "254M": (1024, 2816, 16, 16, 16, 16_384),
    "1.1B": (2048, 5632, 22, 32, 4, 32_000),  # TinyLlama's
}
LENGTH = {  # the flag for tokens in a sequence of each script
    "T5_training": "--source-length",
    "gpt2_fsdp": "--block-size",
    "llama_fsdp": "--max-seq-length",
}
NO_DATA = [{"input_ids": [0]}] * 4096  # for `train`, if its `steps` do not use the loader
ENDLESS = ["--max-steps", "1000000", "--save-every", "0"]


class NoRequest:
    """A StopRequest that lets signals end the process. Only the main thread may handle them."""

    is_set = False

    def listen(self) -> None:
        """Do nothing."""

    check = forget = listen


def parse(script: ModuleType, *flags: object) -> Any:
    """Return a script's arguments for flags."""
    with mock.patch("sys.argv", [script.__name__, *map(str, flags)]):
        return script.parse_args()


def load(
    script: ModuleType, args: Any, device: torch.device, needs_weights: bool = True
) -> tuple[torch.nn.Module, Any, dict[str, torch.Size]]:
    """Return a script's wrapped model, the tokenizer, and the shapes of parameters."""
    model, blocks, tokenizer, initial = script.load_model(args, needs_weights)
    shapes = weights.whole_shapes(model)
    return script.wrap_model(args, device, model, blocks, initial), tokenizer, shapes


def train(
    script: ModuleType, args: Any, device: torch.device, steps: Callable[[Steps], Steps],
    train_set: Any = NO_DATA,
) -> torch.nn.Module:  # fmt: skip
    """Run a script's own `train`, without validations, and return its model.

    It makes a step for each list that the generator `steps` yields. The generator gets those of the
    script's loader, and goes on when a step is done. Several threads may call this.
    """
    model, tokenizer, shapes = load(script, args, device)
    _here.steps = steps
    script.progress, script.StopRequest = _own_steps, NoRequest
    script.evaluate = lambda *_: False
    args.run.output_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(StepsDone):
        script.train(args, device, model, tokenizer, train_set, {}, shapes, None)
    return model


class StepsDone(Exception):
    """Raised in the loop of a script to leave it before what it does at its end."""


_here = threading.local()


def _own_steps(items: Steps, *_: Any) -> Steps:
    """Stand in for the script's `progress`, through which its loop gets all steps."""
    yield from _here.steps(items)
    raise StepsDone


def setup_first_rank(world_size: int) -> torch.device:
    """Join torch's fake process group as rank 0 of `world_size`, in nodes of 8; return the device.
    Call this before a script's arguments are parsed."""
    node = math.gcd(world_size, 8)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size),
                   "LOCAL_WORLD_SIZE": str(node)}  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    ranks.cpu_group = None
    if torch.__version__ < (2, 13):
        dist.reduce_scatter_tensor = keep_own_part
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")


def keep_own_part(output: torch.Tensor, input: torch.Tensor, **_: Any) -> None:
    """Write the first part of a reduce-scatter's input, as torch 2.13's fake group does. That of
    2.11 leaves the output uninitialized, and AdamW skips a step with a NaN."""
    output.copy_(input.flatten()[: output.numel()].view_as(output))


def ddp_without_communication(*args: Any, **options: Any) -> DDP:
    """Return DistributedDataParallel that keeps this rank's gradients, because its own all-reduce
    fails in a fake process group."""
    model = DDP(*args, **options)
    model.register_comm_hook(None, own_gradients)
    return model


def own_gradients(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return a bucket as it is: a communication hook of DistributedDataParallel."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def limit_memory(device: torch.device, gigabytes: float) -> None:
    """Limit this process's memory on a GPU (0: no limit)."""
    if device.type == "cuda" and gigabytes:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total)


def write_config(name: str, directory: str | Path) -> None:
    """Write the config of a built-in name of the estimator, and a byte tokenizer."""
    memory_estimator.load_config(name).save_pretrained(directory)
    ByT5Tokenizer().save_pretrained(directory)


def write_gpt2(name: str, directory: str | Path, positions: int = 1024) -> None:
    """Write a GPT-2 config and a byte tokenizer to a directory, for --from-scratch."""
    width, layers, heads, vocabulary = GPT2[name]
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary}
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    GPT2Config(n_positions=max(1024, positions), **shape, **ids).save_pretrained(directory)
    ByT5Tokenizer().save_pretrained(directory)


def write_llama(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a random Llama, in files of 1 GB, and a byte tokenizer to a directory."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "vocab_size")  # fmt: skip
    torch.manual_seed(0)
    shape = dict(zip(keys, LLAMAS[name], strict=True))
    config = LlamaConfig(**shape, max_position_embeddings=4096)
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory, max_shard_size="1GB")
    ByT5Tokenizer().save_pretrained(directory)


class RandomTensors(dict):
    """Shapes and dtypes by name, looked up as random tensors on this process's device."""

    def pop(self, name: str) -> torch.Tensor:
        """Return a random tensor of the shape and dtype under a name."""
        shape, dtype = self.get(name)
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        return torch.randn(shape, device=device).mul_(0.02).to(dtype)


class RandomWeights(weights.Initializer):
    """A loader that needs only a config: rank 0 draws each tensor when it broadcasts it."""

    def __init__(self, model: PreTrainedModel, *options: Any) -> None:
        super().__init__(model, *options)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.stored[name] = tensor.shape, tensor.dtype
        for path, module in model.named_modules():
            if isinstance(module, lora.Linear4bit):  # its weight is packed
                shape = torch.Size([module.out_features, module.in_features])
                self.stored[f"{path}.weight"] = shape, torch.float32
        self.initial = RandomTensors(self.stored)


def use_random_weights() -> None:
    """Make the scripts use random weights for a model directory that has only a config."""

    def new_model(model_class: type, config: PretrainedConfig, *_: object) -> tuple:
        weights.prepare_config(config)
        with torch.device("meta"):
            return model_class(config), {}

    weights.new_model, weights.Initializer = new_model, RandomWeights


def random_batch(script: ModuleType, args: Any) -> Batch:
    """Return a random micro-batch for a script, on the CPU, of full length without padding."""
    size = args.optim.batch_size

    def ids(length: int) -> list[list[int]]:
        return torch.randint(3, 256, (size, length)).tolist()

    if script.__name__ == "gpt2_fsdp":
        return block_dataset.collate([{"input_ids": row} for row in ids(args.data.block_size + 1)])
    if script.__name__ == "llama_fsdp":
        rows = ids(args.data.max_seq_length + 1)
        return chat_dataset.collate([[{"input_ids": row, "labels": row}] for row in rows])
    pairs = zip(ids(args.data.source_length), ids(args.data.target_length), strict=True)
    rows = [{"input_ids": source, "labels": target} for source, target in pairs]
    return summarization_dataset.collate(rows, pad_token_id=0, decoder_start_token_id=0)


class AnonymousMemory(threading.Thread):
    """A context with a thread that measures this process's anonymous memory in MB every
    millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = self.now()
        self.is_over = False

    @staticmethod
    def now() -> float:
        """Return RssAnon of /proc/self/status, in MB."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1.024e-3

    def run(self) -> None:
        """Measure the peak until the context is left."""
        while not self.is_over:
            self.peak = max(self.peak, self.now())
            time.sleep(1e-3)

    def __enter__(self) -> "AnonymousMemory":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        self.join()


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes on this rank of the storages of these tensors, each counted once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    storages = [t.untyped_storage() for t in local if t.numel()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Held:
    """This rank's bytes of parameters, gradients and AdamW's moments, measured in each step of
    `train` in this process. The scales of 4-bit weights count as parameters."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._clip = policies.clip_gradients
        policies.clip_gradients = self._measure
        register_optimizer_step_post_hook(self._measure_moments)

    def _measure(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        held = list(model.parameters())
        self.bytes["gradient_bytes"] = storage_bytes(p.grad for p in held)
        for module in model.modules():
            if scales := getattr(module, "quant_state", None):
                held += [scales.absmax, scales.state2.absmax, scales.offset, scales.code]
        self.bytes["parameter_bytes"] = storage_bytes(held)
        return self._clip(model, max_norm)

    def _measure_moments(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        moments = [x for values in optimizer.state.values() for x in values.values()]
        self.bytes["optimizer_bytes"] = storage_bytes(x for x in moments if x.ndim)


def trainer_options(args: Any, block: str) -> dict[str, object]:
    """Return arguments for a Transformers trainer that match ours. On GPUs it uses FSDP1 with units
    of the class named `block`, on a CPU DistributedDataParallel."""
    gpu, optim = torch.cuda.is_available(), args.optim
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {
        "version": 1, "transformer_layer_cls_to_wrap": [block], "use_orig_params": True,
        "backward_prefetch": "backward_pre",
    }} if gpu else {}  # fmt: skip
    return sharded | {
        "output_dir": f"{args.run.output_dir}/peer", "max_steps": 100_000,
        "learning_rate": optim.lr, "per_device_train_batch_size": optim.batch_size,
        "max_grad_norm": optim.max_grad_norm, "weight_decay": optim.weight_decay,
        "logging_steps": args.run.log_every,
        "logging_first_step": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": not gpu, "bf16": args.sharding.precision == "bf16", "optim": "adamw_torch_fused",
        "gradient_checkpointing": False, "ddp_find_unused_parameters": False,
    }  # fmt: skip


def add_peers(ours: Iterable[str], peers: Iterable[str], processes: int) -> list[str]:
    """Return the names in `ours` and, with two or more processes, those in `peers`, which shard."""
    return [*ours, *(peers if processes > 1 else ())]


def environment_for(processes: int) -> dict[str, str]:
    """Return an environment that divides the cores among processes and disables the hub."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | os.environ


def launch(processes: int, *command: str, python: str = sys.executable) -> dict | list:
    """Run a program under torchrun, and return the JSON in the last line of its output."""
    torchrun = [python, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(processes), *map(str, command)]
    environment = environment_for(processes)
    # Otherwise each thread of `relay` would keep its largest heap and the memory of freed tensors.
    environment |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    output = subprocess.run(
        torchrun, stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout
    return json.loads(output.strip().splitlines()[-1])


class TurnsDone(Exception):
    """Raised in a loop of `relay` to end it after its last turn."""


def relay(
    loops: dict[str, Loop], turns: int, device: torch.device, steps: int = 1
) -> dict[str, dict[str, list[float]]]:
    """Run the loops in turn. Return for each the `seconds` and `cpu_seconds` per step in its
    `turns` turns of `steps` steps. A loop calls its argument after each step. The GPU is only
    synchronized at the end of a turn."""
    names = list(loops)
    timings = {name: {"seconds": [], "cpu_seconds": []} for name in names}
    batons = {name: threading.Semaphore(0) for name in names}
    failed: list[BaseException] = []

    def run(name: str) -> None:
        following = batons[names[(names.index(name) + 1) % len(names)]]
        timing = timings[name]

        def begin() -> None:
            batons[name].acquire()
            if failed or len(timing["seconds"]) == turns + 1:
                raise TurnsDone
            dist.all_reduce(torch.zeros(1), group=ranks.cpu_group)
            starts[name] = time.perf_counter(), time.process_time()
            left[name] = steps

        def end_of_step() -> None:
            left[name] -= 1
            if left[name]:
                return
            if device.type == "cuda":
                torch.cuda.synchronize()
            start, cpu_start = starts[name]
            timing["seconds"].append((time.perf_counter() - start) / steps)
            timing["cpu_seconds"].append((time.process_time() - cpu_start) / steps)
            following.release()
            begin()

        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            begin()
            loops[name](end_of_step)
            raise RuntimeError(f"{name} ended before its {turns} turns")
        except TurnsDone:
            pass
        except BaseException as error:
            failed.append(error)
        following.release()

    starts: dict[str, tuple[float, float]] = {}
    left: dict[str, int] = {}
    batons[names[0]].release()
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(run, names))
    if failed:
        raise failed[0]
    for timing in timings.values():
        for values in timing.values():
            del values[0]  # the first turn is a warm-up
    return timings
