"""Code shared by the benchmarks: a script's own `train`, models, and launches that print JSON."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers

from core import weights
from core.ranks import PR_SET_PDEATHSIG, Batch

TREE = Path(__file__).resolve().parents[1]
Steps = Iterable[list[Batch]]  # the micro-batches of each step, of this rank
NO_DATA = [{"input_ids": [0]}] * 4096  # for `train`, if its `steps` do not use the loader
OUT_OF_MEMORY = 3  # exit code of a rank
ENDLESS = ["--max-steps", "1000000", "--save-every", "0", "--lr-schedule", "step", "--gamma", "1"]
LLAMAS = {  # lines as in memory_estimator.SIZES
    "tiny": "llama tiny 64 128 2 4 4 512",
    "98M": "llama 98M 768 2048 12 12 12 8192",
    "239M": "llama 239M 1024 2816 16 16 16 16384",
    "1.1B": "llama 1.1B 2048 5632 22 32 4 32000",
}


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
    if hasattr(script, "checks"):  # an optional module
        script.checks.check_data = lambda *_: None  # NO_DATA is not read
    return script.wrap_model(args, device, model, blocks, initial), tokenizer, shapes


class StepsDone(Exception):
    """Raised in the loop of a script to leave it before what it does at its end."""


def train(
    script: ModuleType, args: Any, device: torch.device, steps: Callable[..., Steps],
    train_set: Any = NO_DATA,
) -> None:  # fmt: skip
    """Run a script's own `train`, without validations. It makes a step for each list that the
    generator `steps` yields. The generator gets those of the script's loader, and the model."""

    def own_steps(items: Steps, *_: Any) -> Steps:
        yield from steps(items, model)
        raise StepsDone

    model, tokenizer, shapes = load(script, args, device)
    data = sys.modules[type(args.data).__module__]
    collate = data.collator(model) if hasattr(data, "collator") else data.collate
    script.progress = own_steps  # the script's loop gets all steps through it
    script.evaluate = lambda *_: False
    script.StopRequest.listen = lambda _: None  # SIGTERM ends this process, without a save
    args.run.output_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(StepsDone):
        script.train(args, device, model, tokenizer, collate, train_set, {}, shapes, None)


def load_with_transformers(args: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a Llama that Transformers shards by FSDP2, and AdamW with the settings of a script."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(
        fsdp_size=dist.get_world_size(), fsdp_mixed_precision=args.sharding.precision == "bf16"
    )
    model = transformers.LlamaForCausalLM.from_pretrained(
        args.model.model_name, dtype=torch.float32, distributed_config=config
    )
    decay = args.optim.weight_decay
    return model, torch.optim.AdamW(
        model.parameters(), args.optim.lr, weight_decay=decay, fused=True
    )


def synchronize() -> None:
    """Wait for the GPU, if there is one, because its work ends later than the calls."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def launch(
    processes: int, *command: object, report: Callable[[dict], None] = lambda _: None
) -> dict | None:
    """Run a program under torchrun. Call `report` with the JSON in each such line of its output.
    Return the last, or None if the memory did not suffice for one; exit if the program fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*torchrun, "--nproc-per-node", str(processes), *map(str, command)]
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | os.environ
    environment["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # else glibc would keep freed tensors
    result = None
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        # torchrun ends with this process, also if that is killed.
        pipes["preexec_fn"] = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
        with subprocess.Popen(words, env=environment, **pipes) as run:
            for line in run.stdout:
                if line.startswith('{"'):  # a trainer prints dicts of Python
                    result = json.loads(line)
                    report(result)
        errors.seek(0)
        text = errors.read()
    if run.returncode and f"exitcode  : {OUT_OF_MEMORY}" not in text:
        sys.exit(f"{' '.join(words)} failed:\n{text[-9000:]}")
    return result
