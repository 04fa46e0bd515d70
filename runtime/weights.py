"""Read Hugging Face files on rank 0, and send each tensor once to every rank.

Works with any model. All ranks call each function together unless its docstring says otherwise.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .ranks import explain_errors, first_on_node, on_rank_zero, say
from .screen import Progress

SETTINGS = ["*.json", "*.model", "*.spm", "*.txt", "*.jinja"]  # a directory without its weights
WEIGHTS = "model*.safetensors"
TEXT_PART = "language_model."  # prefix of the keys of a multimodal model's text part
IN_LAYER = re.compile(r"(\.\d+\.).*")  # the layer number in a tensor's name, and the rest
# Buffers in files of older Transformers versions, which compute them now.
OLD_BUFFERS = re.compile(
    r"\.(attn|attention)\.(masked_)?bias$|inv_freq$|position_ids$|_float_tensor$"
    r"|coder\.version$|embed_positions\.weights$|\.causal_mask$"
)
ADAPTER = ".lora_"  # in the names of adapters
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")

Init = Callable[[nn.Module], None]  # allocates a module on meta and loads its weights
Place = tuple[str, nn.Module, str]  # a tensor's name, its module, and its key there
Source = dict[str, Tensor]  # rank 0's tensors by name, tied ones under each name; empty on others


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside FSDP1 or DDP; FSDP2 does not wrap it."""
    return model.module if isinstance(model, FSDP | DDP) else model


def plain_name(name: str) -> str:
    """Return a tensor's name as it was before wrapping and adding adapters."""
    return WRAPPERS.sub("", name).replace(".base_layer.", ".")


def whole_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters by name, before packing into 4 bits."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if hasattr(module, "quantize"):
            shapes[f"{path}.weight"] = torch.Size([module.out_features, module.in_features])
    return shapes


def library_class(kind: type[nn.Module]) -> type[PreTrainedModel]:
    """Return the Transformers class that a script's or FSDP2's class extends. Only for its own
    classes does Transformers rename and stack the tensors of files."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's parameters and buffers, tied ones under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return a dict from each parameter or buffer name to the first name of its (tied) tensor."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in tensors_of(model)}


def open_model(
    name: str, model_class: type[PreTrainedModel]
) -> tuple[Path, PretrainedConfig, PreTrainedTokenizerBase]:
    """Return the directory, the config and the tokenizer of the model `name`.

    Only rank 0's node downloads weights. Raise ValueError if the model cannot be found, is not a
    `model_class`, is quantized, or has no suitable tokenizer.
    """
    patterns = [*SETTINGS, WEIGHTS] if dist.get_rank() == 0 else SETTINGS
    directory = first_on_node(find_directory, name, patterns)
    if not (directory / "config.json").is_file():
        if (directory / "status").is_file():
            raise ValueError(f"--model-name {name} is a run. Pass its model: {name}/final")
        raise ValueError(
            f"--model-name {name} has no config.json. Pass a model; for adapters the one that they "
            "were trained on, with their --output-dir and --lora-rank, or export with --merge."
        )
    # Python code in a directory is never run.
    with explain_errors(f"--model-name {name} has an invalid config.json"):
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"--model-name {name} is quantized. Pass its weights in 16 or 32 bits.")
    config = text_config(config, model_class, name)
    for key in ("output_router_logits", "z_loss_coefficient"):
        if getattr(config, key, None):
            raise ValueError(f"--model-name {name} has {key}, but no auxiliary loss is added here. "
                             "Remove it from config.json.")  # fmt: skip
    return directory, config, load_tokenizer(directory)


def find_directory(name: str, patterns: list[str]) -> Path:
    """Return the directory `name`, or download files with these `patterns` from the hub. Raise
    ValueError if neither exists. Any process may call this."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError:
        problem = f"is gated. Accept its license at https://huggingface.co/{name}, and set HF_TOKEN"
    except (RepositoryNotFoundError, HFValidationError):
        problem = "is neither a directory nor a model on the hub. If it is private, set HF_TOKEN"
    except OSError as error:  # also of the hub and its cache, which may be read-only
        reason = error.__cause__ or error
        problem = f"is not cached, and the hub cannot be reached ({reason!r}). Set HF_HOME"
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (OSError, HFValidationError) as error:
        # Incomplete: the cache may still have all files that are needed.
        if path := getattr(error, "snapshot_path", None):
            return Path(path)
    raise ValueError(f"--model-name {name} {problem}, or pass a directory that contains the model.")


def text_config(
    config: PretrainedConfig, model_class: type[PreTrainedModel], name: str
) -> PretrainedConfig:
    """Return the config of the model `name` or, if it is multimodal, of its text part. Raise
    ValueError if it does not belong to `model_class`."""
    wanted = model_class.config_class.model_type
    for candidate in (config, getattr(config, "text_config", config)):
        if candidate.model_type == wanted:
            return candidate
    raise ValueError(
        f"--model-name {name} is a {config.model_type}, not a {wanted}. Pass a {wanted}, or change "
        "MODEL and BLOCKS in the script."
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a directory; raise ValueError if it cannot be used."""
    with explain_errors(f"{directory} has no valid tokenizer", "Save one."):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # Without their files, Transformers creates some tokenizers with an empty vocabulary.
    files = tokenizer.vocab_files_names.values()  # empty if bytes are tokens
    if files and not any((directory / name).is_file() for name in ("tokenizer.json", *files)):
        raise ValueError(f"{directory} has no tokenizer: its vocabulary is missing. Save one.")
    languages = [getattr(tokenizer, x, "") for x in ("src_lang", "tgt_lang")]
    if languages[0] != "":
        text = f"The tokenizer has src_lang {languages[0]} and tgt_lang {languages[1]}."
        if None in languages:
            text += " Set both in its tokenizer_config.json, to codes of its vocabulary."
            raise ValueError(f"{directory}: {text}")
        say(text)  # of all rows, even if the languages are equal
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{directory} has a tokenizer without an EOS token. Set its eos_token.")
    return tokenizer


class _Stored(Tensor):
    """A tensor read from a file. Its `to` does nothing, because Transformers would cast it, and a
    cast copies, even on meta."""

    def to(self, *_: Any, **__: Any) -> "_Stored":
        """Return the tensor itself, without a cast or copy."""
        return self


def _open_files(directory: Path, reads_layers: bool) -> Source:
    """Map a directory's safetensors files; return their tensors by key.

    If `reads_layers` is false, only tensors outside of numbered layers have values, which determine
    the tied weights. Raise OSError if a file cannot be read.
    """
    path = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    paths = [path]
    tensors: Source = {}
    try:
        if index.is_file() and not path.is_file():
            path = index
            names = json.loads(path.read_text())["weight_map"].values()
            paths = sorted({directory / name for name in names})
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is not a dict)
                    tensor = file.get_tensor(key)
                    if not reads_layers and IN_LAYER.search(key):
                        tensor = tensor.to("meta")
                    tensors[key] = tensor.as_subclass(_Stored)
    except Exception as error:  # of any type, because an index may contain any JSON
        raise OSError(
            f"{path} cannot be read ({error!r}). Download it again, or convert other formats with "
            "from_pretrained and save_pretrained."
        ) from None
    return tensors


def read_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, directory: Path, reads_layers: bool
) -> PreTrainedModel:
    """Load a directory as `from_pretrained(dtype=float32)` does, but leave each weight in the dtype
    of its file.

    Weights that need no conversion are views of the mapped files. Only the text part of a
    multimodal model is read. Rank 0 only. Raise ValueError if the files lack a part of the model.
    """
    tensors = _open_files(directory, reads_layers)
    text = {k.removeprefix(TEXT_PART): x for k, x in tensors.items() if k.startswith(TEXT_PART)}
    transformers.logging.disable_progress_bar()
    # The report lists shapes that do not match.
    options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, report = library_class(kind).from_pretrained(
        None, config=config, state_dict=text or tensors, dtype=torch.float32, **options
    )
    unexpected = [key for key in report["unexpected_keys"] if not OLD_BUFFERS.search(key)]
    dtypes = {name: x.dtype for name, x in model.named_parameters()}
    quantized = [n for n, x in dtypes.items() if not x.is_floating_point or x.itemsize < 2]
    report = report | {"unexpected_keys": unexpected, "quantized_keys": quantized}
    problems = "; ".join(f"{name}: {sorted(keys)[:9]}" for name, keys in report.items() if keys)
    if problems:
        raise ValueError(f"{directory} does not contain this model; {problems}. Check its files.")
    return model


def new_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, directory: Path | None,
    needs_weights: bool = True,
) -> tuple[PreTrainedModel, Source]:  # fmt: skip
    """Return a model on meta and, on rank 0, its tensors: from `directory`, or random ones.

    Weights are tied as in Transformers' model, because T5's config does not show whether its head
    is tied. Without `needs_weights`, before a checkpoint is loaded, only buffers have values. Raise
    ValueError or OSError on all ranks if the files do not contain the model.
    """
    with torch.device("meta"):
        model = kind(config)
    model.to("meta")  # DiffLlama creates some parameters on the CPU
    source: Source = {}

    def read() -> dict[str, str]:
        if directory is None:
            loaded = kind(config)
        else:
            loaded = read_model(kind, config, directory, needs_weights)
            model._weight_conversions = loaded._weight_conversions  # exports revert them
        for name, tensor in tensors_of(loaded):
            if needs_weights or not isinstance(tensor, nn.Parameter):
                source[name] = tensor.detach().as_subclass(Tensor)
        return first_names(loaded)

    firsts = on_rank_zero(read)
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, first in first_names(model).items():
        if firsts[name] != first and name in names:  # rank 0's model has every name
            module, _, key = name.rpartition(".")
            if firsts[name] == name:
                names[name] = nn.Parameter(torch.empty_like(names[name]))
            setattr(model.get_submodule(module), key, names[firsts[name]])
    if directory is not None:
        model.config.name_or_path = str(directory)  # exports keep the form of its files
        load, options = transformers.GenerationConfig.from_pretrained, {}
        if not (directory / "generation_config.json").is_file():  # an older model
            # Private, because from_model_config takes a config, which drops these settings.
            options = {"config_file_name": "config.json", "_from_model_config": True}
        with explain_errors(f"{directory} has invalid settings for generation"):
            model.generation_config = load(directory, **options)
    return model, source


class Loader:
    """Load the tensors of a meta model on `device`, in the dtypes of the meta tensors.

    FSDP1 takes `fill` as `param_init_fn`. Call `model.apply(fill)` after sharding by FSDP2, and
    before wrapping in DDP. Rank 0 broadcasts each tensor in the dtype of its file, and each rank
    casts it on the device and keeps its shard. Tensors without a source are only allocated.
    """

    def __init__(
        self, model: nn.Module, source: Source, device: torch.device, cpu_offload: bool
    ) -> None:
        self.device = device
        self.shard_device = torch.device("cpu") if cpu_offload else device  # of DTensors
        self.source = source
        self.stored = on_rank_zero(dict, {n: (x.shape, x.dtype) for n, x in source.items()})
        # All places of each tensor: more than one if it is tied.
        self.places: dict[tuple[nn.Module, str], list[Place]] = {}
        tied: dict[str, list[Place]] = defaultdict(list)
        for name, first in first_names(model).items():
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            tied[first].append((plain_name(name), module, key))
            self.places[module, key] = tied[first]
        self.progress = Progress("load", len(tied), "tensor")

    def fill(self, module: nn.Module) -> None:
        """Load the tensors of a module, without its submodules; all ranks, in the same order."""
        for key, meta in (module._parameters | module._buffers).items():
            if meta is None or not meta.is_meta:
                continue
            places = self.places[module, key]
            tensor = self._receive(module, meta, places[0][0])
            if isinstance(meta, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
            for name, owner, key_there in places:
                setattr(owner, key_there, tensor)
                self.source.pop(name, None)  # to free it
            self.progress.update()

    def _receive(self, module: nn.Module, meta: Tensor, name: str) -> Tensor:
        """Return this rank's part of rank 0's tensor `name`, to replace a module's `meta`."""
        device = self.shard_device if isinstance(meta, DTensor) else self.device
        if name not in self.stored:
            return torch.empty_like(meta, device=device)
        tensor = self.broadcast(name)
        if hasattr(module, "quantize") and meta is module.weight:
            tensor = module.quantize(tensor.float())
        if isinstance(meta, DTensor):
            for dim, placement in enumerate(meta.placements):
                if placement.is_shard():  # distribute_tensor would copy the rows before the cast
                    rows = -(-len(tensor) // meta.device_mesh.size(dim))
                    tensor = tensor[meta.device_mesh.get_local_rank(dim) * rows :][:rows]
        received = torch.empty_like(meta, device=device)
        (received.to_local() if isinstance(meta, DTensor) else received).copy_(tensor)  # casts
        return received

    def broadcast(self, name: str) -> Tensor:
        """Return rank 0's tensor `name`, whole and on the device."""
        if dist.get_rank() == 0:
            tensor = self.source[name].to(self.device).contiguous()
        else:
            shape, dtype = self.stored[name]
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=0)
        return tensor
