"""Read Hugging Face files on rank 0, and send each tensor once to every rank.

All ranks call each function together unless its docstring differs.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .ranks import Problem, local_main_process_first, on_rank_zero, print0

SETTINGS = ["*.json", "*.model", "*.spm", "*.txt", "*.jinja"]  # a directory without its weights
WEIGHTS = "model*.safetensors"
TEXT_PART = "language_model."  # prefix of the keys of a multimodal model's text part
IN_LAYER = re.compile(r"(\.\d+\.).*")  # the layer number in a tensor's name, and the rest
# Buffers in files of older Transformers versions, which compute them now.
OLD_BUFFERS = re.compile(
    r"\.(attn|attention)\.(masked_)?bias$|inv_freq$|position_ids$|_float_tensor$"
    r"|coder\.version$|embed_positions\.weights$|\.causal_mask$"
)
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|base_layer)\.")
# Suffixes of config fields that are set to 0. With layerdrop, ranks would skip different layers and
# wait for each other forever. With rescale_every, validation would permanently divide weights.
SWITCHED_OFF = ("layerdrop", "rescale_every")
ACTIVATIONS = ("activation_function", "dense_act_fn")
# What training needs instead of what a config.json may say. Exports keep the base's values.
FOR_TRAINING = {"return_dict": True, "output_attentions": False, "output_hidden_states": False,
                "torchscript": False, "use_cache": False,
                "gradient_checkpointing": False}  # fmt: skip

Source = dict[str, Tensor]  # rank 0's tensors by name, tied ones under each; empty on other ranks
Place = tuple[str, nn.Module, str]  # a tensor's name, its module, and its key there


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside FSDP1 or DDP; FSDP2 does not wrap it. Any rank."""
    return model.module if isinstance(model, FSDP | DDP) else model


def plain_name(name: str) -> str:
    """Return a tensor's name as it was before wrapping the model or layer. Any rank."""
    return WRAPPERS.sub("", name)


def whole_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return a model's parameter shapes by name, before packing. Wrapping hides them. Any rank."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if hasattr(module, "quantize"):
            shapes[f"{path}.weight"] = torch.Size([module.out_features, module.in_features])
    return shapes


def library_class(kind: type[nn.Module]) -> type[PreTrainedModel]:
    """Return the Transformers class that a script's or FSDP2's class extends. Only for its own
    classes does Transformers rename and stack the tensors of files. Any rank."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of the (tied) tensor of each parameter or buffer name. Any rank."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in _tensors_of(model)}


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def open_model(
    name: str, own: type[PreTrainedModel], others: str
) -> tuple[Path, PretrainedConfig, type[PreTrainedModel], Tokenizer]:
    """Return the directory, config, class and tokenizer of the model `name`, a directory or hub id.

    The class is `own`, or the one that Transformers' Auto class has for the config. Only rank 0's
    node downloads weights. Raise Problem if the model cannot be trained; `others` is a sentence on
    models of another kind.
    """
    patterns = [*SETTINGS, WEIGHTS] if dist.get_rank() == 0 else SETTINGS
    directory = local_main_process_first(find_directory, name, patterns)
    if not (directory / "config.json").is_file():
        raise Problem(f"{directory} has no config.json. Pass a model's directory, such as a run's "
                      "final/ (from --export-only; adapters: --merge), or a hub id.")  # fmt: skip
    # Python code of a model is never run.
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise Problem(f"{name} is quantized. Pass its weights in 16 or 32 bits.")
    config, kind = model_class(config, own)
    if kind is None:
        raise Problem(f"{name} is a {config.model_type}, which this script cannot train. {others}")
    config.name_or_path = str(directory)  # exports keep its settings
    if "flash" in (config._attn_implementation or ""):  # it may not be installed
        config._attn_implementation = None
    return directory, config, kind, load_tokenizer(directory)


def find_directory(name: str, patterns: list[str]) -> Path:
    """Return the directory `name`, or that of a hub model, with files of `patterns`. Any rank."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # also of the hub, and of names that it does not allow
        if path := getattr(error, "snapshot_path", None):  # cached, but not all of its files
            return Path(path)
        reason = " ".join(str(error).split())
        raise Problem(f"{name} is not a directory, and not available: {reason}") from None


def model_class(
    config: PretrainedConfig, own: type[PreTrainedModel]
) -> tuple[PretrainedConfig, type[PreTrainedModel] | None]:
    """Return the config and class of a model or, if it is multimodal, of its text part: `own` if it
    fits, else that of the Auto class, else None. Any rank."""
    text = getattr(config, "text_config", config)
    for part in (text, config):
        if part.model_type == own.config_class.model_type:
            return part, own
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if own.config_class().is_encoder_decoder:
        classes = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    elif text.is_encoder_decoder:  # BART has causal classes too
        classes = {}
    for part in (text, config):
        if type(part) in classes:
            return part, classes[type(part)]
    return config, None


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer in a directory; raise Problem if it cannot be used. Any rank."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # Without their files, Transformers creates some tokenizers with an empty vocabulary.
    files = tokenizer.vocab_files_names.values()  # empty if bytes are tokens
    if files and not any((directory / x).is_file() for x in ("tokenizer.json", *files)):
        raise Problem(f"{directory} has no tokenizer: its vocabulary is missing. Save one.")
    if tokenizer.eos_token_id is None:
        raise Problem(f"{directory} has a tokenizer without an EOS token. Set its eos_token.")
    if None in (getattr(tokenizer, "src_lang", ""), getattr(tokenizer, "tgt_lang", "")):
        raise Problem(f"Set src_lang and tgt_lang in {directory}/tokenizer_config.json.")
    return tokenizer


def check_length(flag: str, length: int, config: PretrainedConfig) -> None:
    """Raise Problem if a model has fewer positions than `length`; relative ones are no limit."""
    positions = getattr(config, "max_position_embeddings", None) or length
    if 0 < positions < length:  # XLNet has -1, which is no limit
        raise Problem(f"{flag} {length} is above the model's {positions} positions. Lower it.")


def prepare_config(config: PretrainedConfig) -> None:
    """Set a config's fields for training; `new_model` calls this. Raise Problem if a model with it
    cannot be trained. Any rank."""
    for name, value in config.to_dict().items():
        if name in ("output_router_logits", "z_loss_coefficient") and value:
            raise Problem(f"The model has {name}, but no auxiliary loss is added here. Remove it.")
        if name in FOR_TRAINING:
            setattr(config, name, FOR_TRAINING[name])
        elif name in ACTIVATIONS and value == "gelu_new":
            setattr(config, name, "gelu_pytorch_tanh")  # equal, in one kernel
        elif name.endswith(SWITCHED_OFF) and value:
            setattr(config, name, type(value)(0))
            print0(f"{name} is set to 0 (the model has {value}).")
    has_cap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if has_cap and config._attn_implementation in (None, "sdpa"):
        config._attn_implementation = "eager"  # some versions of sdpa drop the cap in silence
    padding = getattr(config, "pad_token_id", None) or 0
    if not 0 <= padding < getattr(config, "vocab_size", padding + 1):
        # The embedding has no such row. Only encoder-decoders need one, and they mask it.
        end = config.eos_token_id if config.is_encoder_decoder else None
        config.pad_token_id = end[0] if isinstance(end, list) else end


class _Stored(Tensor):
    """A tensor that Transformers cannot cast to fp32 when it loads a file: a cast copies."""

    def to(self, *_: Any, **__: Any) -> "_Stored":
        """Return the tensor itself, without a cast or copy."""
        return self


def _open_files(directory: Path, reads_layers: bool) -> Source:
    """Map a directory's safetensors files; return their tensors by key, on meta those in numbered
    layers unless `reads_layers`. Raise OSError if a file cannot be read. Rank 0 only."""
    path = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    names = {path.name}
    tensors: Source = {}
    try:
        if index.is_file() and not path.is_file():
            path = index
            names = set(json.loads(index.read_text())["weight_map"].values())
        for path in sorted(directory / name for name in names):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is not a dict)
                    device = "cpu" if reads_layers or not IN_LAYER.search(key) else "meta"
                    tensors[key] = file.get_tensor(key).to(device).as_subclass(_Stored)
    except Exception as error:  # of any type, because an index may contain any JSON
        text = "Download it again, or convert other formats to safetensors."
        raise OSError(f"{path} cannot be read ({error!r}). {text}") from None
    return tensors


def _read_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, directory: Path, reads_layers: bool
) -> PreTrainedModel:
    """Load a directory (of a multimodal model the text part) as `from_pretrained` does, but leave
    weights in their files' dtypes, and mapped if they need no conversion. Rank 0 only."""
    tensors = _open_files(directory, reads_layers)
    text = {k.removeprefix(TEXT_PART): x for k, x in tensors.items() if k.startswith(TEXT_PART)}
    transformers.logging.disable_progress_bar()
    model, report = library_class(kind).from_pretrained(
        None, config=config, state_dict=text or tensors, dtype=torch.float32,
        ignore_mismatched_sizes=True, output_loading_info=True,  # they are in the report
    )  # fmt: skip
    unexpected = [key for key in report["unexpected_keys"] if not OLD_BUFFERS.search(key)]
    dtypes = {name: x.dtype for name, x in model.named_parameters()}
    quantized = [n for n, x in dtypes.items() if not x.is_floating_point or x.itemsize < 2]
    report = report | {"unexpected_keys": unexpected, "quantized_keys": quantized}
    problems = "; ".join(f"{name}: {sorted(keys)[:9]}" for name, keys in report.items() if keys)
    if problems:
        raise Problem(f"{directory} does not contain this model; {problems}. Check its files.")
    return model


def new_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, directory: Path | None,
    needs_weights: bool = True,
) -> tuple[PreTrainedModel, Source]:  # fmt: skip
    """Return a model on meta and, on rank 0, its tensors: from `directory`, or random ones.

    Without `needs_weights`, before a checkpoint is loaded, only buffers have values. Raise Problem
    or OSError on all ranks if the files do not contain the model.
    """
    prepare_config(config)
    with torch.device("meta"):
        model = kind(config)
    model.to("meta")  # DiffLlama creates some parameters on the CPU
    source: Source = {}

    def read() -> dict[str, str]:
        if directory is None:
            loaded = kind(config)
        else:
            loaded = _read_model(kind, config, directory, needs_weights)
            model._weight_conversions = loaded._weight_conversions  # exports revert them
        for name, tensor in _tensors_of(loaded):
            if needs_weights or not isinstance(tensor, nn.Parameter):
                source[name] = tensor.detach().as_subclass(Tensor)
        return first_names(loaded)

    # Tie as Transformers did: T5's config does not show whether its head is tied.
    firsts = on_rank_zero(read)
    names = dict(model.named_parameters(remove_duplicate=False))
    for name, first in first_names(model).items():
        if firsts[name] != first and name in names:  # rank 0's model has every name
            module, _, key = name.rpartition(".")
            if firsts[name] == name:
                names[name] = nn.Parameter(torch.empty_like(names[name]))
            setattr(model.get_submodule(module), key, names[firsts[name]])
    if directory is not None:
        options = {}
        if not (directory / "generation_config.json").is_file():  # an older model
            # Private, because from_model_config takes a config, which drops these settings.
            options = {"config_file_name": "config.json", "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(directory, **options)
    return model, source


class Loader:
    """Load the tensors of a meta model on `device`, in the dtypes of the meta tensors.

    FSDP1 takes `fill` as `param_init_fn`. Call `model.apply(fill)` after sharding by FSDP2, and
    before wrapping in DDP. Rank 0 broadcasts each tensor in the dtype of its file, and each rank
    casts it on the device and keeps its shard. Tensors without a source are only allocated. Modules
    that have a method `quantize` keep what it returns for the whole weight in fp32.
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

    def _receive(self, module: nn.Module, meta: Tensor, name: str) -> Tensor:
        """Return this rank's part of rank 0's tensor `name`, to replace a module's `meta`."""
        device = self.shard_device if isinstance(meta, DTensor) else self.device
        if name not in self.stored:
            return torch.empty_like(meta, device=device)
        if dist.get_rank() == 0:
            tensor = self.source[name].to(self.device).contiguous()
        else:
            shape, dtype = self.stored[name]
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=0)
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
