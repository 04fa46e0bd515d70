"""Hugging Face files out: all ranks gather one tensor at a time, and rank 0 writes it.

Names no model. All ranks call a function together unless it says otherwise.
"""

import contextlib
import copy
import itertools
import json
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from .ranks import on_rank_zero
from .watchdog import touch
from .weights import IN_LAYER, first_names, library_class, plain_name, unwrapped

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 5e9  # of a file at most; rank 0 holds two


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace,
    before_each: Callable[[], None] = touch,
) -> None:  # fmt: skip
    """Write a wrapped model as a Hugging Face directory that `from_pretrained` loads.

    It replaces the one before when it is complete. Floating-point tensors are in --export-dtype,
    under `save_pretrained`'s keys. `before_each`, called before each tensor, may raise to end it.
    """
    tensors = whole_tensors(model, EXPORT_DTYPES[args.export_dtype], before_each)
    with new_directory(path) as temporary:
        write_model(unwrapped(model), tensors, tokenizer, temporary, args)


def whole_tensors(
    model: nn.Module, dtype: torch.dtype, before_each: Callable[[], None] = touch
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each parameter and persistent buffer of a model, tied ones once.
    Floating-point values are cast to `dtype` before they are gathered."""
    # FSDP1 copies its shards, to the host as for a checkpoint; FSDP2 and DDP copy nothing.
    options = StateDictOptions(cpu_offload=isinstance(model, FSDP))
    state_dict = get_model_state_dict(model, options=options)
    firsts = {plain_name(n): plain_name(x) for n, x in first_names(unwrapped(model)).items()}
    for name in list(state_dict):
        tensor = state_dict.pop(name)
        if firsts[name] == name:
            before_each()
            yield name, gather(tensor, dtype)


def gather(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor, or all of a DTensor, gathered on the device though it is offloaded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to(tensor.device_mesh.device_type)
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_model(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase, directory: Path, args: Namespace,
) -> None:  # fmt: skip
    """Write the tensors that rank 0 gets from `tensors`, by name, with configuration and tokenizer.

    A thread writes each file while the tensors of the next one arrive.
    """
    # Transformers looks its conversions up by class, and knows its own alone.
    with torch.device("meta"):
        like = library_class(type(model))(model.config)
    like._weight_conversions = getattr(model, "_weight_conversions", None)
    files: list[Future] = []
    with ThreadPoolExecutor(1) as thread:
        for content in _contents(tensors):
            wait(files)
            files.append(thread.submit(_save, like, content, directory / f"{len(files):05d}"))

    def finish() -> None:
        _name_files([file.result() for file in files], directory)
        config = copy.deepcopy(model.config)
        config.architectures = [library_class(type(model)).__name__]
        config.dtype = EXPORT_DTYPES[args.export_dtype]
        config.save_pretrained(directory)
        generation = model.generation_config.to_json_string()  # save_pretrained may refuse it
        (directory / "generation_config.json").write_text(generation)
        tokenizer.save_pretrained(directory)

    on_rank_zero(finish)


def _contents(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield on rank 0 the tensors of each file, in host memory.

    A layer is not divided among files, as a conversion may need all of it.
    """
    held: dict[str, Tensor] = {}
    size = 0
    for _, group in itertools.groupby(tensors, lambda item: IN_LAYER.sub(r"\1", item[0])):
        # The tensors are copied on rank 0 alone; all ranks gather them.
        layer = {name: x.to("cpu", copy=True) for name, x in group if dist.get_rank() == 0}
        nbytes = sum(tensor.nbytes for tensor in layer.values())
        if held and size + nbytes > FILE_BYTES:
            yield held
            held, size = {}, 0
        held |= layer
        size += nbytes
    if held:
        yield held


def _save(model: PreTrainedModel, tensors: dict[str, Tensor], path: Path) -> list[str]:
    """Write tensors by name as `save_pretrained` does; return their keys."""
    stored = revert_weight_conversion(model, tensors)
    stored = {key: tensor.contiguous() for key, tensor in stored.items()}
    try:
        save_file(stored, path, {"format": "pt"})
    except SafetensorError as error:  # such as of a full disk
        raise OSError(str(error)) from None
    return list(stored)


def _name_files(keys: list[list[str]], directory: Path) -> None:
    """Name the files that `_save` wrote, and write their index."""
    weight_map = {}
    for number, own in enumerate(keys):
        name = f"model-{number + 1:05d}-of-{len(keys):05d}.safetensors"
        if len(keys) == 1:
            name = "model.safetensors"
        (directory / f"{number:05d}").rename(directory / name)
        weight_map |= dict.fromkeys(own, name)
    if len(keys) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory of rank 0's that replaces `path` on leaving, or goes after an error."""
    # No name is used twice: a node with NFS may for a minute take the new one for the old one.
    temporary = path.with_name(f"tmp-{path.name}-{time.time_ns()}")
    on_rank_zero(lambda: temporary.mkdir(parents=True))
    try:
        yield temporary
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise

    def replace() -> None:
        for file in temporary.glob("*.safetensors"):  # safetensors makes them for one user
            shutil.copymode(temporary / "tokenizer_config.json", file)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)

    on_rank_zero(replace)  # the others wait for it
