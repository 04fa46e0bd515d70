"""Read Hugging Face files on rank 0, and send each tensor once to every rank. All ranks call each
function together unless its docstring differs."""

import json
import re
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .ranks import Problem, local_main_process_first, on_rank_zero, print0

SETTINGS = ["*.json", "*.model", "*.spm", "*.txt", "*.jinja"]  # a directory without its weights
TEXT_PART = "language_model."  # in the keys of a multimodal model's text part
IN_LAYER = re.compile(r"(\.\d+\.).*")  # the layer number in a tensor's name, and the rest
# Buffers in files of older Transformers versions, which compute them now.
OLD_BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|embed_positions\.weights$|"
                         r"(inv_freq|position_ids|_float_tensor|version|causal_mask)$|"
                         r"EncDecAttention\.relative_attention_bias\.weight$")  # fmt: skip
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|base_layer)\.")
# Config fields that training changes; exports keep the base's values. SWITCHED_OFF are suffixes: of
# a field that lets ranks skip different layers, and of one that makes validation divide weights.
ACTIVATIONS = ("activation_function", "dense_act_fn")
SWITCHED_OFF = ("layerdrop", "rescale_every")

Source = dict[str, Tensor]  # rank 0's tensors by name, tied ones once; empty on other ranks


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside FSDP1 or DDP; FSDP2 does not wrap it. Any rank."""
    return getattr(model, "module", model)


def plain_name(name: str) -> str:
    """Return a tensor's name as it was before wrapping the model or layer. Any rank."""
    return WRAPPERS.sub("", name)


def whole_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return a model's parameter shapes by name, before packing. Wrapping hides them. Any rank."""
    parameters = model.named_parameters()
    return {name: getattr(x, "whole_shape", x.shape) for name, x in parameters}


def library_class(kind: type[nn.Module]) -> type[PreTrainedModel]:
    """Return the Transformers class that a script's or FSDP2's class extends. Only for its own
    classes does Transformers rename and stack the tensors of files. Any rank."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of the (tied) tensor of each parameter or buffer name. Any rank."""
    first: dict[Tensor, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: first.setdefault(x, name) for name, x in [*parameters, *buffers]}


def open_model(
    name: str, own: type[PreTrainedModel], others: str
) -> tuple[Path, PretrainedConfig, type[PreTrainedModel], Tokenizer]:
    """Return directory, config, class and tokenizer of the model `name`, a directory or hub id. The
    class is `own`, or the one that Transformers' Auto class has for the config. Raise Problem if
    there is none; `others` is a sentence on models of another kind. Only rank 0's node downloads
    weights."""
    patterns = [*SETTINGS, "model*.safetensors"] if dist.get_rank() == 0 else SETTINGS
    directory = local_main_process_first(find_directory, name, patterns)
    if (directory / "adapter_config.json").is_file():
        raise Problem(f"{name} has adapters, which are not read. Pass a merged model.")
    if not (directory / "config.json").is_file():
        raise Problem(f"{directory} has no config.json. Pass a model: final/ (see --export-only).")
    # Python code of a model is never run.
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise Problem(f"{name} is quantized. Pass its weights in 16 or 32 bits.")
    config, kind = model_class(config, own)
    if kind is None:
        raise Problem(f"{name} is a {config.model_type}, which this script cannot train. {others}")
    config.name_or_path = str(directory)  # exports keep its settings
    tokenizer = load_tokenizer(directory)
    if len(tokenizer) > (rows := getattr(config, "vocab_size", len(tokenizer))):
        print0(f"Tokens from {rows:,} of {len(tokenizer):,} would fail: the embedding lacks them.")
    return directory, config, kind, tokenizer


def find_directory(name: str, patterns: list[str]) -> Path:
    """Return the directory `name`, or that of a hub model, with files of `patterns`. Any rank."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # other ranks could not unpickle the hub's errors
        if path := getattr(error, "snapshot_path", None):  # cached, but not all of its files
            return Path(path)
        raise Problem(f"{name} is not a directory, and not available: {error}") from None


def model_class(
    config: PretrainedConfig, own: type[PreTrainedModel]
) -> tuple[PretrainedConfig, type[PreTrainedModel] | None]:
    """Return the config and class of a model or, if it is multimodal, of its text part: `own` if it
    fits, else that of the Auto class, else None. Any rank."""
    is_seq2seq = own.config_class().is_encoder_decoder
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if is_seq2seq:
        classes = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    for part in (getattr(config, "text_config", config), config):
        if part.model_type == own.config_class.model_type:
            return part, own
        if type(part) in classes and part.is_encoder_decoder == is_seq2seq:  # not a causal BART
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
    return tokenizer


def prepare_config(config: PretrainedConfig) -> None:
    """Set a config's fields for training. Raise Problem if a model with it cannot be trained. Any
    rank."""
    config.use_cache = False
    for name, value in config.to_dict().items():
        if name in ("output_router_logits", "z_loss_coefficient") and value:
            raise Problem(f"The model has {name}, but no auxiliary loss is added here. Remove it.")
        if name in ACTIVATIONS and value == "gelu_new":
            setattr(config, name, "gelu_pytorch_tanh")  # equal, in one kernel
        elif name.endswith(SWITCHED_OFF) and value:
            setattr(config, name, 0 * value)
            print0(f"{name} is set to 0 (the model has {value}).")
    has_cap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    if has_cap and config._attn_implementation in (None, "sdpa"):
        config._attn_implementation = "eager"  # some versions of sdpa drop the cap in silence
    padding = getattr(config, "pad_token_id", None) or 0
    if not 0 <= padding < getattr(config, "vocab_size", padding + 1):
        # The embedding has no such row. Only encoder-decoders need one, and they mask it.
        config.pad_token_id = config.eos_token_id if config.is_encoder_decoder else None


class _Stored(Tensor):
    """A tensor that Transformers cannot cast to fp32 when it loads a file: a cast copies."""

    def to(self, *_: Any, **__: Any) -> "_Stored":
        """Return the tensor itself."""
        return self


def _read_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, directory: Path, needs_weights: bool
) -> PreTrainedModel:
    """Load a directory (of a multimodal model the text part) as `from_pretrained` does, but leave
    weights in their files' dtypes, and mapped if they need no conversion. Without `needs_weights`,
    those in layers are on meta. Rank 0 only."""
    names = {"model.safetensors"}
    index = directory / "model.safetensors.index.json"
    if index.is_file() and not (directory / "model.safetensors").is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise Problem(f"{directory} has no {min(missing)}. Save the model by save_pretrained().")
    tensors: Source = {}
    for name in sorted(names):
        file = safe_open(directory / name, framework="pt")
        for key in file.keys():  # noqa: SIM118 (it is not a dict)
            device = "cpu" if needs_weights or not IN_LAYER.search(key) else "meta"
            tensors[key] = file.get_tensor(key).to(device).as_subclass(_Stored)
    kept = TEXT_PART, f"model.{TEXT_PART}", "lm_head."
    if any(key.startswith(kept[:2]) for key in tensors):  # multimodal
        tensors = {k.replace(TEXT_PART, "", 1): x for k, x in tensors.items() if k.startswith(kept)}
    model, report = library_class(kind).from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32,
        ignore_mismatched_sizes=True, output_loading_info=True,  # they are in the report
    )  # fmt: skip
    report["unexpected_keys"] = [x for x in report["unexpected_keys"] if not OLD_BUFFERS.search(x)]
    problems = "; ".join(f"{name}: {sorted(keys)[:9]}" for name, keys in report.items() if keys)
    if problems:
        raise Problem(f"{directory} does not contain this model; {problems}. Check its files.")
    return model


def new_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, directory: Path | None,
    needs_weights: bool = True,
) -> tuple[PreTrainedModel, Source]:  # fmt: skip
    """Return a model on meta and, on rank 0, its tensors, from `directory` or random; without
    `needs_weights`, before a checkpoint is loaded, only buffers. Raise Problem or OSError on all
    ranks if the files do not contain the model."""
    prepare_config(config)
    with torch.device("meta"):
        model = kind(config)
    source: Source = {}

    def read() -> dict[str, str]:
        is_new = directory is None
        loaded = kind(config) if is_new else _read_model(kind, config, directory, needs_weights)
        model._weight_conversions = getattr(loaded, "_weight_conversions", None)  # for exports
        for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()]:
            if needs_weights or not isinstance(tensor, nn.Parameter):
                source[name] = tensor.detach().as_subclass(Tensor)
        return first_names(loaded)

    # Tie as the files do: T5's config does not show whether its head is tied.
    firsts = on_rank_zero(read)
    own = model.named_parameters(remove_duplicate=False)
    untied = {name: nn.Parameter(torch.empty_like(x, device="meta")) for name, x in own}
    tied = {name: untied[firsts[name]] for name in untied}
    model.load_state_dict(tied, strict=False, assign=True)
    if directory is not None and (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    else:
        model.generation_config.use_cache = True  # it has just copied the config for training
    return model, source


class Loader:
    """Load the tensors of a meta model on `device`, in the dtypes of the meta tensors.

    `fill` is FSDP1's `param_init_fn`. For FSDP2 and DDP, call `module.apply(fill)` before sharding
    the module or wrapping the model. Rank 0 broadcasts each tensor in the dtype of its file, and
    each rank casts it on the device. Tensors without a source are only allocated. A module of
    packed weights has a method `quantize`, which gets the whole weight in fp32.
    """

    def __init__(self, model: nn.Module, source: Source, device: torch.device) -> None:
        self.device = device
        self.source = source
        self.stored = on_rank_zero(dict, {n: (x.shape, x.dtype) for n, x in source.items()})
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.names = {tensor: plain_name(name) for name, tensor in tensors}
        self.loaded = WeakValueDictionary()  # tensors by name, for those that are tied

    def fill(self, module: nn.Module) -> None:
        """Load the tensors of a module, without its submodules; all ranks, in the same order."""
        for key, meta in (module._parameters | module._buffers).items():
            name = self.names.get(meta)
            if name is None:  # no tensor, or loaded
                continue
            tensor = self.loaded.get(name)
            if tensor is None:
                tensor = torch.empty_like(meta, device=self.device)
                if isinstance(meta, nn.Parameter):
                    tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
                if name in self.stored:
                    self._receive(name, module, tensor.detach())
                self.loaded[name] = tensor
            setattr(module, key, tensor)

    def _receive(self, name: str, module: nn.Module, target: Tensor) -> None:
        """Set a module's `target` to the value of rank 0's tensor `name`."""
        shape, dtype = self.stored[name]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if dist.get_rank() == 0:
            tensor.copy_(self.source.pop(name))
        dist.broadcast(tensor, src=0)
        if target.dtype == torch.uint8:
            tensor = module.quantize(tensor.float())
        target.copy_(tensor)  # casts
