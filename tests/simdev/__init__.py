"""A simulated accelerator, the device "sim": its memory is host memory that is counted apart.

`import simdev` makes the device, torch.sim and the process group backend "simcc", which goes
through gloo. Tensors of the host and of the device do not mix, and past SIM_BYTES bytes of a device
torch.OutOfMemoryError is raised. It shows placement, bytes of state dicts and whole scripts (see
run.py); not speed, missing synchronisation, NCCL or fragmentation. Random numbers are the CPU's.
"""

import contextlib
import os
import sys
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d  # where pybind11 keeps the class of `Backend.Options`

from .build import load

LIMIT = int(float(os.environ.get("SIM_BYTES", "0")))  # bytes of a device; 0: no limit
COUNT = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
HOST, PINNED = -1, -2  # pools of memory beside those of the devices
BACKEND = "cpu:gloo,sim:simcc"

extension = load()
torch.utils.rename_privateuse1_backend("sim")
extension.init(COUNT)
extension.set_limit(LIMIT)


def index_of(device: Any = None) -> int:
    """Return the index of a device; of the current one for None or "sim"."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return extension.get_device() if index is None else index


class Stream(torch.Stream):
    """A stream of the device, which does nothing: the host waits for each kernel."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> torch.Stream:
        if "stream_id" not in options:
            options["device"] = torch.device("sim", index_of(device))
        return super().__new__(cls, priority=priority, **options)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> torch.Event:
        return super().__new__(cls, device="sim", enable_timing=enable_timing)


class Device(contextlib.ContextDecorator):
    """Makes a device the current one; None changes nothing."""

    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None else index_of(device)

    def __enter__(self) -> None:
        self.previous = extension.get_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        extension.set_device(self.previous)


@contextlib.contextmanager
def use_stream(stream: torch.Stream | None) -> Any:
    """Make a stream the current one."""
    previous = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream or previous)
    yield
    torch.accelerator.set_stream(previous)


def set_device(device: Any) -> None:
    """Make a device the current one, unless its index is negative."""
    if index_of(device) >= 0:
        extension.set_device(index_of(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the statistics that torch.cuda would have: bytes and numbers of calls."""
    now, peak, total, calls = extension.pool(index_of(device))
    stats = {"allocation.all.allocated": calls, "allocated_bytes.all.allocated": total}
    for kind in ("allocated", "reserved", "active"):
        stats |= {f"{kind}_bytes.all.current": now, f"{kind}_bytes.all.peak": peak}
    return stats | {"num_alloc_retries": 0, "num_ooms": 0}


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and all bytes of a device."""
    capacity = LIMIT or 80 << 30
    return capacity - extension.pool(index_of(device))[0], capacity


def properties(_: Any = None) -> types.SimpleNamespace:
    """Return what torch.cuda.get_device_properties returns, as far as scripts ask for it."""
    return types.SimpleNamespace(
        name="sim", total_memory=mem_get_info()[1], multi_processor_count=1
    )


def default_stream(device: Any = None) -> torch.Stream:
    """Return the stream 0 of a device."""
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)  # no public name of that number
    return Stream(stream_id=0, device_index=index_of(device), device_type=kind)


def new_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    """Return a backend of gloo for tensors on the device."""
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("sim/", store), rank, size, timeout)
    return extension.make_backend(gloo)


module = types.ModuleType("torch.sim")
vars(module).update(
    Stream=Stream,
    Event=Event,
    device=Device,
    stream=use_stream,
    StreamContext=use_stream,
    set_device=set_device,
    is_available=lambda: True,
    is_initialized=lambda: True,
    init=lambda: None,
    _lazy_init=lambda: None,
    _is_in_bad_fork=lambda: False,
    is_current_stream_capturing=lambda: False,
    device_count=lambda: COUNT,
    current_device=extension.get_device,
    synchronize=lambda _=None: None,
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    current_stream=lambda device=None: torch.accelerator.current_stream(
        torch.device("sim", index_of(device))
    ),
    default_stream=default_stream,
    set_stream=torch.accelerator.set_stream,
    memory_allocated=lambda device=None: extension.pool(index_of(device))[0],
    max_memory_allocated=lambda device=None: extension.pool(index_of(device))[1],
    memory_reserved=lambda device=None: extension.pool(index_of(device))[0],
    max_memory_reserved=lambda device=None: extension.pool(index_of(device))[1],
    reset_peak_memory_stats=lambda device=None: extension.reset_peak(index_of(device)),
    reset_accumulated_memory_stats=lambda _=None: None,
    memory_stats=memory_stats,
    mem_get_info=mem_get_info,
    memory_summary=lambda *_, **__: str(memory_stats()),
    host_memory=lambda: extension.pool(HOST)[0],
    host_peak=lambda: extension.pool(HOST)[1],
    host_reset_peak=lambda: extension.reset_peak(HOST),
    pinned_memory=lambda: extension.pool(PINNED)[0],
    pinned_peak=lambda: extension.pool(PINNED)[1],
    pinned_reset_peak=lambda: extension.reset_peak(PINNED),
    get_rng_state=lambda _=None: torch.get_rng_state(),
    set_rng_state=lambda state, _=None: torch.set_rng_state(state),
    get_rng_state_all=lambda: [torch.get_rng_state()],
    set_rng_state_all=lambda states: torch.set_rng_state(states[0]),
    manual_seed=lambda _: None,
    manual_seed_all=lambda _: None,
    seed=lambda: None,
    seed_all=lambda: None,
    initial_seed=torch.initial_seed,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
    is_bf16_supported=lambda *_, **__: True,
    get_device_name=lambda _=None: "sim",
    get_device_capability=lambda _=None: (7, 5),
    get_device_properties=properties,
    OutOfMemoryError=torch.OutOfMemoryError,
)
torch._register_device_module("sim", module)  # documented for backends outside of torch
sys.modules["torch.sim"] = module
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_storage=True
)
dist.Backend.register_backend("simcc", new_backend, devices=["sim"])
Base = _distributed_c10d.Backend
if not hasattr(Base, "options"):  # for DeviceMesh
    Base.options = property(extension.options)
Base.Options.__deepcopy__ = lambda options, _: Base.Options(options.backend, options._timeout)
dist.Backend.backend_capability["gloo"].append("sim")  # a gloo group has a barrier there too
