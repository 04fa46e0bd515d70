"""Hugging Face files in: rank 0 reads them, and every rank receives each tensor once.

Names no model. All ranks call a function together unless it says otherwise.
"""

import functools
import json
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .ranks import first_on_node, on_rank_zero
from .screen import Progress

SETTINGS = ["*.json", "*.model", "*.spm", "*.txt", "*.jinja"]  # of a directory: all but the weights
WEIGHTS = "model*.safetensors"
TEXT_PART = "language_model."  # of a key in the files of a multimodal model
LISTED = 10  # problems at most that an error lists
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
IN_LAYER = re.compile(r"\.\d+\.")  # in the key of a tensor of a numbered layer
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")

Init = Callable[[nn.Module], None]  # gives a module on meta its storage and its weights
Source = dict[str, Tensor]  # rank 0's tensors by name, tied ones under each name; elsewhere empty


# --- Names and shapes, whatever wraps the model


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside FSDP1 or DDP; FSDP2 does not wrap it."""
    if isinstance(model, FSDP | DDP):
        return model.module
    return model


def plain_name(name: str) -> str:
    """Return a tensor's name before wrapping, and without the adapter beside it."""
    return WRAPPERS.sub("", name).replace(".base_layer.", ".")


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's shape before wrapping, of packed 4 bits that of the weights in them."""
    return torch.Size(getattr(parameter, "whole_shape", parameter.shape))


def note_shapes(model: nn.Module) -> None:
    """Set `model.shapes`, of each parameter by name. Call it before wrapping: FSDP1's shards are
    flat."""
    model.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the attention that an unwrapped model computes, with the kernel's."""
    return getattr(model, "attention_kernel", None) or model.config._attn_implementation


def library_class(model_class: type) -> type[PreTrainedModel]:
    """Return the class of Transformers that a script's, or FSDP2's, extends.

    Transformers renames and stacks the tensors of files for its own classes only.
    """
    return next(kind for kind in model_class.__mro__ if kind.__module__.startswith("transformers."))


# --- A directory: configuration and tokenizer


def open_model(
    name: str, model_class: type[PreTrainedModel]
) -> tuple[Path, PretrainedConfig, PreTrainedTokenizerBase]:
    """Return the directory of the model `name`, its configuration and its tokenizer.

    Only rank 0's node downloads weights. Raises ValueError if the model cannot be had, is not a
    `model_class`, or has no tokenizer that fits.
    """
    patterns = SETTINGS
    if dist.get_rank() == 0:
        patterns = [*SETTINGS, WEIGHTS]
    directory = first_on_node(find_directory, name, patterns)
    config = load_config(directory, model_class, name)
    return directory, config, load_tokenizer(directory, config.vocab_size)


def find_directory(name: str, patterns: Sequence[str]) -> Path:
    """Return the directory `name`, or download those files of the hub's model of this name.

    Raises ValueError if there is none. Any process may call it.
    """
    if Path(name).is_dir():
        return Path(name)
    what = f"--model-name {name}"
    instead = "or pass a directory that contains the model"
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError:
        page = f"{constants.ENDPOINT}/{name}"
        reason = f"{what} is gated. Accept its licence on {page} and set HF_TOKEN, {instead}."
    except RepositoryNotFoundError:
        reason = (
            f"{what} is neither a directory nor a public model on the hub. Check the name, set "
            f"HF_TOKEN for a private model, {instead}."
        )
    except HFValidationError:
        reason = f"{what} is neither a directory nor a valid name on the hub. Check the path."
    except LocalEntryNotFoundError:
        reason = (
            f"{what} is not a directory, not in the cache {constants.HF_HUB_CACHE}, and the hub "
            f"cannot be reached. Unset HF_HUB_OFFLINE if it is set, set HF_HOME to another cache, "
            f"{instead}."
        )
    except HfHubHTTPError as error:
        reason = f"{what} could not be downloaded ({error}). Run the same command again, {instead}."
    raise ValueError(reason)


def load_config(directory: Path, model_class: type[PreTrainedModel], name: str) -> PretrainedConfig:
    """Return a directory's configuration; of a multimodal model that of the text part.

    Raises ValueError if it is not one of `model_class`, or the weights are quantized.
    """
    if (directory / "adapter_config.json").is_file() and not (directory / "config.json").is_file():
        raise ValueError(
            f"--model-name {name} contains adapters, not a model. Pass the model that they were "
            "trained on, with the training's --output-dir and --lora-rank, or export a whole model "
            "with --merge."
        )
    config = _load_without_code(AutoConfig, directory)
    check_type(config, model_class, name)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise ValueError(
            f"--model-name {name} is quantized ({quantization.get('quant_method')}). Pass a "
            "directory with its weights in 16 or 32 bits."
        )
    return text_part(config, model_class)


def _load_without_code(kind: type, directory: Path) -> Any:
    """Call `kind.from_pretrained` on a directory without running Python code in it."""
    try:
        return kind.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{directory} needs its own Python code, which is never run here. Pass a model whose "
            "type Transformers contains."
        ) from None


def text_part(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """Return the part of a multimodal model's configuration that is one of `model_class`, else
    all of it."""
    text = getattr(config, "text_config", None)
    if text is not None and text.model_type == model_class.config_class.model_type:
        return text
    return config


def check_type(config: PretrainedConfig, model_class: type[PreTrainedModel], name: str) -> None:
    """Raise ValueError unless the configuration of the model `name` is one of `model_class`, a
    class of text models."""
    wanted = model_class.config_class.model_type
    config = text_part(config, model_class)
    if config.model_type != wanted:
        raise ValueError(
            f"--model-name {name} is a {config.model_type}, not a {wanted}. Pass a {wanted}, or "
            "change MODEL and BLOCKS in the script."
        )
    if not hasattr(config, "vocab_size"):
        raise ValueError(
            f"{model_class.__name__} consists of several models. Set MODEL to the class of its "
            "text part, such as Gemma3ForCausalLM for Gemma3ForConditionalGeneration."
        )


def load_tokenizer(directory: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a directory's tokenizer; raise ValueError if none fits a vocabulary of this size."""
    try:
        tokenizer = _load_without_code(AutoTokenizer, directory)
    except (OSError, KeyError, ValueError) as error:
        if "never run here" in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{directory} has no tokenizer that Transformers can load ({reason}). Save one there "
            "with save_pretrained."
        ) from None
    # Without its files Transformers makes some classes of tokenizers with an empty vocabulary.
    files = tokenizer.vocab_files_names.values()  # none where bytes are tokens
    if files and not any((directory / name).is_file() for name in ("tokenizer.json", *files)):
        raise ValueError(
            f"{directory} has no vocabulary for a {type(tokenizer).__name__}, such as "
            "tokenizer.json. Save a tokenizer there with save_pretrained."
        )
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has {len(tokenizer)} tokens, the model only {vocab_size}"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {directory} has no EOS token")
    return tokenizer


# --- The model on rank 0


class _Unread:
    """A tensor of a file whose values are not needed. Transformers turns it into a meta tensor.

    It reads the values of `state_dict=` by these two calls, as it does a slice of a file.
    """

    def __init__(self, stored: Any) -> None:
        self.stored = stored

    def __getitem__(self, _: Any) -> "_Unread":
        return self

    def to(self, dtype: torch.dtype, **_: Any) -> Tensor:
        """Return the tensor on meta."""
        return torch.empty(self.stored.get_shape(), dtype=dtype, device="meta")


def _weight_files(directory: Path) -> list[Path]:
    """Return a directory's safetensors files; raise ValueError if there are none."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    raise ValueError(
        f"{directory} has no model.safetensors. Convert weights of other formats once with "
        "from_pretrained and save_pretrained."
    )


def _open_files(directory: Path, reads_layers: bool) -> tuple[dict[str, Any], torch.dtype]:
    """Map a directory's safetensors files; return the tensors by key and the widest dtype.

    If `reads_layers` is false, only tensors outside of numbered layers have values: those decide
    which weights are tied. Raises ValueError if a file cannot be read.
    """
    tensors: dict[str, Any] = {}
    dtypes = set()
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is not a dict)
                    stored = file.get_slice(key)
                    dtypes.add(DTYPES.get(stored.get_dtype()))
                    if reads_layers or not IN_LAYER.search(key):
                        tensors[key] = file.get_tensor(key)
                    else:
                        tensors[key] = _Unread(stored)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}). Download it again.") from None
    floating = dtypes - {None} or {torch.float32}
    return tensors, functools.reduce(torch.promote_types, floating)


def read_model(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    directory: Path,
    reads_layers: bool = True,
) -> PreTrainedModel:
    """Return the model in a directory as Transformers loads it, in the dtype of its files.

    Weights that need no conversion are views of the mapped files. Rank 0 alone calls it. Raises
    ValueError if the files cannot be read or do not contain this model.
    """
    tensors, dtype = _open_files(directory, reads_layers)
    is_text_part = any(key.startswith(TEXT_PART) for key in tensors)
    tensors = {key.removeprefix(TEXT_PART): tensor for key, tensor in tensors.items()}
    model, report = _from_tensors(model_class, config, tensors, dtype)
    problems = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    for name, stored, shape in report["mismatched_keys"]:
        problems.append(f"{name} has shape {list(stored)}, not {list(shape)}")
    unexpected = sorted(report["unexpected_keys"])
    if is_text_part:
        print(f"{directory}: {len(unexpected)} tensors of other parts than text are left out")
    else:
        problems += [f"{name} is not the model's" for name in unexpected]
    if problems:
        listed = "; ".join(problems[:LISTED])
        if len(problems) > LISTED:
            listed += f"; and {len(problems) - LISTED} more"
        raise ValueError(
            f"{directory} does not contain this model: {listed}. Check config.json and the files."
        )
    print(f"{directory}: stored as {str(dtype).removeprefix('torch.')}", flush=True)
    return model


def _from_tensors(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    tensors: dict[str, Any],
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model that Transformers makes of tensors by key, and its report."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # the caller reports what is wrong
    transformers.logging.disable_progress_bar()
    try:
        model, report = library_class(model_class).from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # they are in the report
            output_loading_info=True,
        )
    except RuntimeError as error:
        raise ValueError(f"Transformers cannot convert the weights: {error}") from None
    finally:
        transformers.logging.set_verbosity(level)
    if dtype != torch.float32:
        _compute_buffers(model)
    return model, report


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file contains in fp32: Transformers makes some of them, such as
    Gemma's scale of embeddings, in the dtype of the files."""
    for module in model.modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers[key]
            if buffer is not None and buffer.is_floating_point():
                module._buffers[key] = torch.empty_like(buffer, dtype=torch.float32)
        if module._non_persistent_buffers_set:
            model._init_weights(module)  # does not touch what was loaded


def first_names(model: nn.Module) -> dict[str, str]:
    """Return for each name in a state dict the first name of the same tensor."""
    first: dict[Tensor, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}


def new_model(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    directory: Path | None,
    needs_weights: bool = True,
) -> tuple[PreTrainedModel, Source]:
    """Return a model on meta and, on rank 0, its tensors: from `directory`, or random ones.

    Weights are tied as in Transformers' model: T5's head may be stored apart whatever its config
    says. Without `needs_weights`, for a checkpoint that is loaded next, only buffers and the
    tensors outside of layers have values. Raises ValueError on all ranks if the files do not
    contain the model.
    """
    with torch.device("meta"):
        model = model_class(config)
    model.to("meta")  # DiffLlama makes some parameters on the CPU
    source: Source = {}

    def read() -> dict[str, str]:
        if directory is not None:
            loaded = read_model(model_class, config, directory, needs_weights)
            model._weight_conversions = loaded._weight_conversions  # an export reverts them
        elif needs_weights:
            loaded = model_class(config)
        else:
            firsts = {name for name, first in first_names(model).items() if name == first}
            tensors = {name: model.state_dict()[name] for name in firsts}
            loaded, _ = _from_tensors(model_class, config, tensors, torch.float32)
        for name, tensor in loaded.named_parameters(remove_duplicate=False):
            source[name] = tensor.detach() if needs_weights else tensor.to("meta")
        source.update(loaded.named_buffers(remove_duplicate=False))
        return first_names(loaded)

    names = on_rank_zero(read)
    if directory is not None and (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    own = first_names(model)
    added = own.keys() - names.keys()
    if added:
        raise ValueError(
            f"{model_class.__name__} has parameters that {library_class(model_class).__name__} "
            f"does not have: {', '.join(sorted(added))}. Add them after loading."
        )
    for name, first in own.items():
        if first != name and names[name] == name:
            module, _, key = name.rpartition(".")
            untied = nn.Parameter(torch.empty_like(model.get_parameter(name)))
            setattr(model.get_submodule(module), key, untied)
    return model, source


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of all parameters and buffers, tied ones under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


# --- The weights on all ranks


class Stored(NamedTuple):
    """A tensor as rank 0 has it."""

    shape: torch.Size
    dtype: torch.dtype
    has_values: bool


class Loader:
    """Gives the modules of a meta model their tensors on `device`, in the meta tensors' dtypes.

    FSDP1 takes `fill` as `param_init_fn`: it calls it for the modules of a unit and then shards the
    unit, so no rank ever holds more than its shards and one unit. Under FSDP2 call it for every
    module after sharding, under DDP before wrapping: `materialize` does so.

    Rank 0 broadcasts each tensor in the dtype of its file; each rank casts it on the device and
    keeps its shard, under --cpu-offload on the CPU. Tied parameters stay one tensor, frozen ones
    stay frozen. Tensors of the source that are on meta are only allocated.
    """

    def __init__(
        self, args: Namespace, model: nn.Module, source: Source, device: torch.device
    ) -> None:
        self.device = device
        self.shard_device = device  # of what FSDP2 shards
        if args.cpu_offload:
            self.shard_device = torch.device("cpu")
        self.source = source
        stored = {name: Stored(x.shape, x.dtype, not x.is_meta) for name, x in source.items()}
        self.stored: dict[str, Stored] = on_rank_zero(lambda: stored)
        self.modules = {module: name for name, module in model.named_modules()}
        first: dict[Tensor, str] = {}
        self.first = {plain_name(n): first.setdefault(x, n) for n, x in named_tensors(model)}
        self.places = Counter(self.first.values())  # that are not yet filled, by first name
        self.tied: dict[str, Tensor] = {}  # those that are not yet in all their places
        self.progress = Progress("load", len(first), " tensors")

    def fill(self, module: nn.Module) -> None:
        """Fill a module, without those inside it; all ranks, in the same order."""
        for tensors in (module._parameters, module._buffers):
            for key, meta in tensors.items():
                if meta is None or not meta.is_meta:
                    continue
                name = plain_name(f"{self.modules[module]}.{key}".removeprefix("."))
                mine = self.source.pop(name, None)  # is freed when it has been sent
                first = self.first[name]
                tensor = self.tied.pop(first, None)
                if tensor is None:
                    tensor = self._receive(module, key, self.stored[name], mine)
                    self.progress.update()
                tensors[key] = tensor
                self.places[first] -= 1
                if self.places[first]:
                    self.tied[first] = tensor

    def _receive(self, module: nn.Module, key: str, stored: Stored, mine: Tensor | None) -> Tensor:
        """Return the tensor that belongs in a module under a key; rank 0 has it as `mine`."""
        meta = getattr(module, key)
        if not stored.has_values:
            device = self.shard_device if isinstance(meta, DTensor) else self.device
            tensor = torch.empty_like(meta, device=device)
        else:
            tensor = self._broadcast(stored, mine)
            if key == "weight" and hasattr(module, "quantize"):
                tensor = module.quantize(tensor.float())
            tensor = tensor.to(meta.dtype)
            if isinstance(meta, DTensor):
                mesh, placements = meta.device_mesh, meta.placements
                tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
                tensor = tensor.to(self.shard_device)
        if isinstance(meta, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=meta.requires_grad)
        return tensor

    def _broadcast(self, stored: Stored, mine: Tensor | None) -> Tensor:
        """Return rank 0's tensor, on this rank's device."""
        if mine is None:
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        else:
            tensor = mine.to(self.device, copy=True).contiguous()
        dist.broadcast(tensor, src=0)
        return tensor


def materialize(model: nn.Module, init: Init) -> None:
    """Fill all modules of a model on meta, outer ones first."""
    for module in list(model.modules()):
        init(module)
