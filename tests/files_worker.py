"""Run under torchrun by test_hf_files.py: persistent buffers and frozen parameters on ranks.

files_worker.py MODEL_DIRECTORY OUTPUT
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import ByT5Tokenizer, PegasusConfig, PegasusForConditionalGeneration
from transformers import initialization as init
from transformers.models.pegasus.modeling_pegasus import PegasusDecoderLayer, PegasusEncoderLayer

import policies
from runtime import checkpoints, hf_export, hf_load, models
from runtime.state import TrainState

CPU = torch.device("cpu")
EXPORT = Namespace(export_dtype="fp32", max_shard_size=2e-4)  # several files


class Counter(torch.nn.Module):
    """Persistent buffers that are no floating-point numbers, beside one that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("known", torch.zeros(384, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(3), persistent=False)


class CountingPegasus(PegasusForConditionalGeneration):
    """Has persistent buffers of three dtypes, and positions that are frozen parameters."""

    def __init__(self, config: PegasusConfig) -> None:
        super().__init__(config)
        self.counter = Counter()

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Counter):
            init.zeros_(module.seen)
            init.zeros_(module.known)
            init.ones_(module.scale)


def wrap(directory: Path, strategy: str, checkpoint: Path | None = None) -> torch.nn.Module:
    """Return the model in `directory` under a strategy, allocated only if a checkpoint fills it."""
    config = PegasusConfig.from_pretrained(directory)
    model = hf_load.meta_model(CountingPegasus, config, directory)
    model.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    args = Namespace(
        fsdp=1, cpu_offload=False, precision="fp32", strategy=strategy, prepare_only=False
    )
    if strategy == "fsdp2":
        args.fsdp, args.strategy = 2, "full_shard"
    fill = hf_load.WeightLoader(args, model, directory, CPU, checkpoint).fill
    blocks = (PegasusEncoderLayer, PegasusDecoderLayer)
    if strategy == "ddp":
        hf_load.materialize(model, fill)
        return DDP(model)
    if strategy == "fsdp2":
        for module in policies.fsdp2_units(model, policies.wrap_policy(blocks)):
            fully_shard(module, **policies.fsdp2_options(args, CPU))
        hf_load.materialize(model, fill)
        return model
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy(blocks),
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        device_id=CPU,
        use_orig_params=True,
        param_init_fn=fill,
    )


def train_state(model: torch.nn.Module) -> TrainState:
    """A new optimizer and schedule for the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, optimizer, schedule, scaler, CPU, 2, {})


def train(state: TrainState) -> None:
    """One step, which the model counts."""
    tokens = torch.arange(2, 34).view(2, 16)
    state.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()
    models.unwrapped(state.model).counter.seen += 1
    state.step += 1


def main() -> None:
    """Load, train and save under each strategy, and go on under the other one."""
    directory, output = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    for first, second in (("full_shard", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "full_shard")):
        path = output / first
        state = train_state(wrap(directory, first))
        hf_export.export_model(state.model, ByT5Tokenizer(), path / "loaded", EXPORT)
        train(state)
        checkpoints.Saver(path, state, keep=1, full=False).save()
        hf_export.export_model(state.model, ByT5Tokenizer(), path / "saved", EXPORT)
        train(state)
        hf_export.export_model(state.model, ByT5Tokenizer(), path / "trained", EXPORT)
        checkpoint = path / "checkpoints/step-00000001"
        state = train_state(wrap(directory, second, checkpoint))
        checkpoints.load_checkpoint(
            checkpoint,
            state,
            Namespace(seed=0),
        )
        hf_export.export_model(state.model, ByT5Tokenizer(), path / "resumed", EXPORT)
        train(state)
        hf_export.export_model(state.model, ByT5Tokenizer(), path / "continued", EXPORT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do, and why
