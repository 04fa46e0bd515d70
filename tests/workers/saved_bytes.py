"""Save a model twice on the simulated device: saved_bytes.py OUTPUT.json DIRECTORY.

For FSDP1, FSDP2 and DDP, OUTPUT.json has what the saves hold on rank 0 beside what is trained, in
bytes per parameter of the shard: pinned and other host memory at most, and pinned memory after
them; and whether the second checkpoint has the weights of the model.
"""

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import simdev
import torch
import torch.distributed as dist
from ten_steps import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import policies
from core import checkpoint, ranks
from core.args import Run

WIDTH = 512
BLOCKS = 16


def wrapped(kind: str) -> nn.Module:
    """Return a model of equal layers on the device, sharded by layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))).to("sim")
    mesh = init_device_mesh("sim", (dist.get_world_size(),))
    if kind == "ddp":
        return policies.DDP(model, **policies.DDP_OPTIONS)
    if kind == "fsdp1":
        policy = policies.wrap_policy((nn.Linear,))
        options = {
            "device_mesh": mesh,
            "device_id": torch.device("sim", torch.sim.current_device()),
        }
        return policies.FSDP(model, auto_wrap_policy=policy, use_orig_params=True, **options)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measure(kind: str, directory: Path) -> dict[str, float | bool]:
    """Return what the saves of a wrapped model hold."""
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    names = {f"{i}.weight" for i in range(BLOCKS)}
    state = checkpoint.State({}, checkpoint.hyperparameters([optimizer]))
    log = SimpleNamespace(write=lambda *_, **__: None)
    shards = 1 if kind == "ddp" else dist.get_world_size()
    count = BLOCKS * WIDTH**2 / shards
    for state.step in (1, 2):
        model(torch.ones(2, WIDTH, device="sim")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        torch.sim.host_reset_peak()
        torch.sim.pinned_reset_peak()
        host = torch.sim.host_memory()
        tensors = checkpoint.snapshot(model, names, [optimizer], state)
        checkpoint.save(Run(directory / kind), tensors, state, log)
        peaks = torch.sim.host_peak() - host, torch.sim.pinned_peak()
        del tensors
    trained = checkpoint.model_weights(model, names)
    expected = {name: whole(tensor).cpu() for name, tensor in trained.items()}
    loaded = {name: torch.zeros(WIDTH, WIDTH) for name in names}
    checkpoint.read(directory / kind / "checkpoints/step-00000002", {"model": loaded})
    return {
        "host": peaks[0] / count,
        "pinned": peaks[1] / count,
        "kept": torch.sim.pinned_memory() / count,
        "equal": all(torch.equal(loaded[name], expected[name]) for name in names),
    }


if __name__ == "__main__":
    dist.init_process_group(simdev.BACKEND)
    torch.sim.set_device(dist.get_rank())
    ranks.cpu_group = dist.new_group(backend="gloo")
    output, directory = map(Path, sys.argv[1:])
    results = {kind: measure(kind, directory) for kind in ("fsdp1", "fsdp2", "ddp")}
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    ranks.finish()
