"""Hugging Face models in, a tensor at a time: no rank ever holds a model it need not hold.

Names no model. All ranks call a function together.
"""

import json
import os
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import empty as distributed_empty
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from . import hub, models, ranks, stored_tensors, trained
from .ranks import first_on_node, on_every_rank, on_rank_zero
from .screen import Progress
from .stored_tensors import Stored, StoredTensor

HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors calls them
FILES = ("*.safetensors", "*.json", "*.model", "*.spm", "*.txt", "*.jinja")  # of the hub's
Init = Callable[[nn.Module], None]  # gives a module on meta its storage and its weights


def model_directory(name: str, known: Iterable[str], patterns: Sequence[str] = FILES) -> Path:
    """The directory `name`, or that of the hub's model of this name, downloaded if need be.

    Call it under `first_on_node`. Raises ValueError, with the nearest of the names that are
    `known`, if there is no such model, or it cannot be had.
    """
    if Path(name).is_dir():
        return Path(name)
    what, refusal = f"--model-name {name}", hub.refusal("model", name)
    try:
        from_cache = refusal is not None
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=from_cache))
    except (OSError, ValueError) as error:
        if refusal is not None:
            raise ValueError(hub.explain(what, "model", name, refusal, known)) from None
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{what} has not come whole from the hub ({type(error).__name__}: {reason}): start "
            "again, which goes on with what has come, or give a directory with its files"
        ) from None


def _own_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers that files hold, by their plain names."""
    own = model.state_dict(keep_vars=True).items()
    part = trained.of(model)
    return {models.plain_name(name): x for name, x in own if part.is_in_files(name)}


def _stored_tensors(model: PreTrainedModel, directory: Path) -> dict[str, Stored]:
    """Return what a directory's files hold, by the names that `from_pretrained` would give it.

    That renames what was called otherwise in older models, adds or drops the base model's prefix,
    and stacks experts; of a multimodal model it also finds the text part. The model keeps the
    conversions that were of use, for an export to undo.

    Raises ValueError if a tensor needs more than another name, or than to be a row of another.
    """
    conversions = models.conversions(model, add_legacy=True)
    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    converters = [step for step in conversions if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
    prefix = model.base_model_prefix
    own = _own_tensors(model)
    stored: dict[str, Stored] = {}
    to_stack: dict[str, dict[str, list[StoredTensor]]] = {}  # by name and source pattern
    for header in sorted(
        stored_tensors.headers(directory), key=lambda header: dot_natural_key(header.key)
    ):
        name, pattern = rename_source_key(header.key, renamings, converters, prefix, own)
        if name not in own and header.key in own:  # the rename was not meant for it
            name, pattern = rename_source_key(header.key, [], [], prefix, own)
        if name not in own:
            key = models.text_key(header.key)
            name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own or pattern is None:
            stored[name] = header
        elif stored_tensors.stacks_rows(by_pattern[pattern]):
            to_stack.setdefault(name, {}).setdefault(pattern, []).append(header)
        else:
            raise ValueError(
                f"{directory} holds {header.key}, and to make {name} of it takes more than another "
                "name or a stack of rows, which is all that is done here: convert it once with "
                "from_pretrained and save_pretrained(..., save_original_format=False)"
            )
    for name, sources in to_stack.items():
        stored[name] = stored_tensors.stacked_tensor(
            by_pattern[next(iter(sources))], sources, directory, name
        )
    model._weight_conversions = [step for step in conversions if step.was_used()]
    return stored


def _find_weights(model: PreTrainedModel, directory: Path) -> dict[str, Stored]:
    """Find where each parameter and persistent buffer stands, by its first name in the model.

    Tied parameters may stand under any of their names. What the model declares as dispensable may
    be missing: a line says so, and it is left out. Raises ValueError with all that is wrong.
    """
    own = _own_tensors(model)
    first_name: dict[torch.Tensor, str] = {}
    for name, tensor in own.items():
        first_name.setdefault(tensor, name)
    # Files of Llama 2 hold its rotary frequencies, once a layer, which are computed now.
    known = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or [])]
    ignored = re.compile("|".join(known))
    found, problems, dtypes = {}, [], set()
    left_out: Counter[str] = Counter()
    all_stored = _stored_tensors(model, directory)
    text_parts = any(models.TEXT_PART.search(stored.key) for stored in all_stored.values())
    of_multimodal = text_parts and not hasattr(model.config, "text_config")
    for name, stored in all_stored.items():
        if name in own:
            tensor = own[name]
            found[first_name[tensor]] = stored
            if tensor.is_floating_point():
                dtypes.add(stored.dtype)
            shape = list(models.whole_shape(tensor))
            if stored.shape != shape:
                problems.append(f"{stored.key} has shape {stored.shape}, not {shape}")
        elif of_multimodal and not models.TEXT_PART.search(stored.key):
            left_out[re.match(r"(model\.)?\w+", stored.key)[0]] += 1
        elif not ignored.search(name):
            problems.append(f"{stored.key} is not the model's")
    dispensable = model._keys_to_ignore_on_load_missing or []
    for name in first_name.values():
        if name in found:
            continue
        if any(re.search(pattern, name) for pattern in dispensable):
            print(f"{directory} does not hold {name}: it is as in a new model", flush=True)
        else:
            problems.append(f"{name} is missing")
    if problems:
        raise ValueError(f"{directory} does not hold this model: {'; '.join(problems)}")
    if left_out:
        parts = ", ".join(f"{count} tensors of {part}" for part, count in left_out.items())
        print(f"{directory}: of a multimodal model the text part; left out are {parts}", flush=True)
    held = "trained as fp32"
    if trained.of(model).is_part:
        names = {str(parameter.dtype).removeprefix("torch.") for parameter in own.values()}
        held = f"frozen as {' and '.join(sorted(names))}".replace("uint8", "4 bits")
    if dtypes != {"F32"}:
        print(f"{directory}: stored as {', '.join(sorted(dtypes))}, {held}", flush=True)
    return found


def meta_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, directory: Path
) -> PreTrainedModel:
    """The model in `directory` on meta, without weights, with its settings for generation.

    What the files hold apart is untied: newer T5s have a head of their own, whatever their config.
    Rank 0's has `stored_tensors`: where each tensor stands, by name. Raises ValueError, on all
    ranks, if a file cannot be read, or needs more than renamed keys and stacked experts.
    """
    with torch.device("meta"):
        model = model_class(config)
    for tensor in model.state_dict(keep_vars=True).values():
        if not tensor.is_meta:  # as DiffLlama's: torch.normal(0.0, 1.0, size) heeds no device
            on_meta = torch.empty_like(tensor, device="meta").as_subclass(type(tensor))
            torch.utils.swap_tensors(tensor, on_meta.requires_grad_(tensor.requires_grad))
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)

    def names_to_untie() -> list[str]:
        stored = _stored_tensors(model, directory)
        own = model.state_dict()
        model.stored_tensors = {name: stored[name] for name in own if name in stored}
        first_name = {parameter: name for name, parameter in model.named_parameters()}
        differing = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = first_name[parameter]
            if name != first and name in stored and first in stored:
                one, other = stored[first].read(), stored[name].read()
                if not torch.equal(one, other):
                    differing.append(name)
        return differing

    for name in on_rank_zero(names_to_untie):
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, nn.Parameter(model.get_parameter(name).clone()))
    return model


def load_config(directory: Path, model_class: type[PreTrainedModel], name: str) -> PretrainedConfig:
    """A directory's configuration, of a multimodal model that of the text part.

    Raises ValueError unless it is one of `model_class`, or if it asks for what is not done here.
    """
    if (directory / "adapter_config.json").is_file() and not (directory / "config.json").is_file():
        raise ValueError(
            f"--model-name {name} holds adapters, not a model: name the one below them, with the "
            "training's --output-dir and --lora-rank, or export a whole model with --merge"
        )
    config = _load_without_code(AutoConfig, directory)
    check_type(config, model_class, name)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise ValueError(
            f"--model-name {name} is stored quantized ({quantization.get('quant_method')}), which "
            "is not read here: give a directory with its weights in 16 or 32 bits"
        )
    config = text_part(config, model_class)
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"--model-name {name} has output_router_logits: the router's auxiliary loss is not "
            "added here, as it is no mean over tokens and would differ with the number of "
            "processes; give a local directory whose config.json sets it to false"
        )
    return config


def _load_without_code(kind: type, directory: Path) -> Any:
    """Call `kind.from_pretrained` on a directory whose own Python code is never run."""
    try:
        return kind.from_pretrained(directory, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(f"{directory} needs its own code, which is never run here") from None


def text_part(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """The part of a multimodal model's configuration that is one of `model_class`, else all."""
    text = getattr(config, "text_config", None)
    if text is not None and text.model_type == model_class.config_class.model_type:
        return text
    return config


def check_type(config: PretrainedConfig, model_class: type[PreTrainedModel], name: str) -> None:
    """Raise ValueError unless the configuration of the model `name` is one of `model_class`, which
    is a text model alone."""
    wanted = model_class.config_class.model_type
    found = text_part(config, model_class)
    if found.model_type != wanted:
        raise ValueError(f"--model-name {name} is a {config.model_type}, not a {wanted}")
    if not hasattr(found, "vocab_size"):
        raise ValueError(
            f"{model_class.__name__} is made of several models: give MODEL the class of its text "
            "part, such as Gemma3ForCausalLM for Gemma3ForConditionalGeneration"
        )


def materialize(model: nn.Module, init: Init | None) -> None:
    """Give all modules of a model on meta their weights, as FSDP does unit by unit."""
    if init is not None:
        for module in list(model.modules()):
            init(module)


def load_tokenizer(directory: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """A directory's tokenizer; raises ValueError if there is none that serves this vocabulary."""
    names = ("tokenizer*", "vocab.*", "*.model", "*.spm")
    if not any(list(directory.glob(name)) for name in names):
        raise ValueError(f"{directory} has no tokenizer, such as tokenizer.json")
    try:
        tokenizer = _load_without_code(AutoTokenizer, directory)
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory}: a file of its tokenizer is no JSON ({error})") from None
    except ValueError as error:
        if "backend tokenizer" not in str(error):
            raise
        raise ValueError(
            f"{directory} has no tokenizer.json, and no other file that its tokenizer is read from"
        ) from None
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has {len(tokenizer)} tokens, the model only {vocab_size}"
        )
    # Some types of models have a class that Transformers takes whatever the directory says, and
    # without their files some classes make of every text the token for what is unknown.
    files = tokenizer.vocab_files_names.values()  # none where bytes are tokens
    empty = files and not any((directory / name).is_file() for name in ("tokenizer.json", *files))
    if empty or not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"the tokenizer in {directory} makes no tokens of a text: Transformers reads it as "
            f"{type(tokenizer).__name__}, so save one of that class there, with its tokenizer.json"
        )
    return tokenizer


def open_model(
    name: str, model_class: type[PreTrainedModel], recipe: dict[str, Any]
) -> tuple[Path, PretrainedConfig, PreTrainedTokenizerBase]:
    """The directory of the model `name`, its config and its tokenizer; all ranks.

    Raises ValueError if the model cannot be had, is no `model_class`, or its tokenizer has no EOS.
    If `name` is nearly tiny, or the one in the script's `recipe`, the sentence says so.
    """
    directory = first_on_node(model_directory, name, ("tiny", recipe.get("model_name", "tiny")))
    config = load_config(directory, model_class, name)
    tokenizer = load_tokenizer(directory, config.vocab_size)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {directory} has no EOS token")
    return directory, config, tokenizer


class WeightLoader:
    """Gives the modules of a model on meta their storage on `device`, and their weights.

    FSDP1 takes `fill` as `param_init_fn`: it calls it for the modules of a unit and then shards the
    unit, so no rank ever holds more than its shard and one unit. Rank 0 reads a tensor from the
    safetensors files in `directory` and broadcasts it; on a single node, whose ranks share what the
    disk has given, each reads it. Under DDP call it for every module before wrapping. Under FSDP2
    call it for every module after sharding: each rank then gets its rows, on the CPU with
    --cpu-offload.

    What is stored in 16 bits goes to the device so, and is cast there.

    Given a `checkpoint` that is loaded next, it only allocates what that will fill. Tied parameters
    stay one tensor, frozen ones stay frozen. Persistent buffers are treated as parameters are, in
    their own dtype. What is in no file, such as rotary frequencies, is computed anew, in fp32.

    To make one raises ValueError on all ranks, before any weight is read, if the files do not fit
    the model.
    """

    def __init__(
        self, args: Namespace, model: PreTrainedModel, directory: Path, device: torch.device,
        checkpoint: Path | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.part = trained.of(model)
        # A checkpoint of adapters holds nothing of the weights below them.
        needs_files = self.part.is_part or checkpoint is None
        self.directory = directory if needs_files and not args.prepare_only else None
        self.device = device
        self.keeps_tensors = args.strategy == "ddp"  # FSDP1 copies them into its flat parameters
        self.shard_device = device  # of what FSDP2 shards
        if args.cpu_offload:
            self.shard_device = torch.device("cpu")
        self.found: dict[str, Stored] = {}
        self.everyone_reads = False
        if self.directory:
            found = on_rank_zero(_find_weights, model, directory)
            self.found = {name: stored.under(directory) for name, stored in found.items()}
            one_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == dist.get_world_size()
            if args.fsdp == 2 or one_node:
                self.everyone_reads = _everyone_sees(self.found, directory)
        self.names = _names_of_places(model)
        self.uses = Counter(self.names.values())
        self.tied: dict[str, torch.Tensor] = {}  # those that have their storage, by name
        self.progress = Progress("load", len(self.found), " tensors")

    def fill(self, module: nn.Module) -> None:
        """Fill a module, without those inside it; all ranks."""
        parameters = list(module.named_parameters(recurse=False))
        buffers = list(module.named_buffers(recurse=False))
        to_compute = {}
        for key, meta in parameters + buffers:
            name = self.names.get((module, key))
            if not meta.is_meta:
                continue
            if name in self.tied:
                setattr(module, key, self.tied[name])
            elif name in self.found:
                tensor = self._take(module, key, meta)
                setattr(module, key, tensor)
                tensor._is_hf_initialized = True  # `_init_weights` leaves it alone then
            elif name and not self.directory:  # a checkpoint fills it
                setattr(module, key, self._allocate(meta))
            else:  # the files need not hold it, or no state dict does
                to_compute[key] = meta
        if to_compute:
            self._compute(module, to_compute)
        for key, _ in parameters + buffers:
            name = self.names.get((module, key))
            if self.uses[name] > 1:
                self.tied[name] = getattr(module, key)

    def _take(self, module: nn.Module, key: str, meta: torch.Tensor) -> torch.Tensor:
        """Return what the files have of a module under a key, in place of `meta`."""
        stored = self.found[self.names[module, key]]
        self.progress.update()
        if self.everyone_reads and not isinstance(meta, DTensor):
            return self._read(meta, stored)
        tensor = self._allocate(meta)
        if hasattr(module, "quantize") and key == "weight":
            self._quantize(module, tensor, stored)
        else:
            self._load(tensor, stored)
        return tensor

    def _read(self, meta: torch.Tensor, stored: Stored) -> torch.Tensor:
        """Return this rank's own reading. On a CPU it may be a part of the mapped file."""
        tensor = stored.read().to(self.device).to(meta.dtype)
        if not isinstance(meta, nn.Parameter):
            return tensor.clone()
        if self.keeps_tensors:
            tensor = tensor.clone()
        return nn.Parameter(tensor, requires_grad=meta.requires_grad)

    def _allocate(self, meta: torch.Tensor) -> torch.Tensor:
        device = self.device
        if isinstance(meta, DTensor):
            device = self.shard_device
        tensor = torch.empty_like(meta, device=device)
        if isinstance(meta, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=meta.requires_grad)
        return tensor

    def _load(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        """Read a tensor; of a DTensor each rank its rows, or rank 0 scatters.

        No rank holds more beside its shard than one tensor.
        """
        if isinstance(tensor, DTensor) and self.everyone_reads:
            _load_rows(tensor, stored)
            return
        whole = tensor.data
        dtype = HALVES.get(stored.dtype, tensor.dtype)
        if isinstance(tensor, DTensor) or dtype != tensor.dtype:
            whole = torch.empty(tensor.shape, dtype=dtype, device=self.device)
        if dist.get_rank() == 0:
            whole.copy_(stored.read())
        if isinstance(tensor, DTensor):
            _scatter(whole, tensor)
        else:
            dist.broadcast(whole, src=0)
            if whole.dtype != tensor.dtype:
                tensor.data.copy_(whole)

    def _compute(self, module: nn.Module, metas: dict[str, torch.Tensor]) -> None:
        """Have the model initialise what `metas` has of a module; sharded only afterwards."""
        for key, meta in metas.items():
            whole = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            if isinstance(meta, nn.Parameter):
                whole = nn.Parameter(whole, requires_grad=meta.requires_grad)
            setattr(module, key, whole)
        self.part.initialize(self.model, module, self.names.get((module, "weight"), ""))
        for key, meta in metas.items():
            whole = getattr(module, key).data
            dist.broadcast(whole, src=0)  # random values would differ between ranks
            if isinstance(meta, DTensor):
                sharded = self._allocate(meta)
                _scatter(whole, sharded)
                setattr(module, key, sharded)

    def _quantize(self, module: nn.Module, packed: DTensor, stored: StoredTensor) -> None:
        """Each rank is given the whole tensor, fp32 [outputs, width], has the module quantise it,
        and keeps its rows of the bytes, [outputs * width / 2, 1]."""
        mesh, placements = packed.device_mesh, packed.placements
        if self.everyone_reads:
            sharded = distributed_empty(stored.shape, device_mesh=mesh, placements=placements)
            self._load(sharded, stored)
            tensor = sharded.full_tensor()
        else:
            tensor = torch.empty(stored.shape, device=self.device)
            self._load(tensor, stored)
        quantized = module.quantize(tensor)
        shape, offset = compute_local_shape_and_global_offset(packed.shape, mesh, placements)
        packed.to_local().copy_(quantized[offset[0] : offset[0] + shape[0]])


def _names_of_places(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """The first name in a state dict of what stands in a module under a key.

    Tied tensors have one name in all their places. What no state dict holds has none.
    """
    first_name: dict[torch.Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_name.setdefault(tensor, models.plain_name(name))
    names = {}
    for module in model.modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, tensor in tensors:
            if tensor in first_name:
                names[module, key] = first_name[tensor]
    return names


def _everyone_sees(found: dict[str, Stored], directory: Path) -> bool:
    """Return whether every rank's `directory` has the files that rank 0 has `found`.

    A row of each tensor is compared. Rank 0 says what follows; all ranks.
    """

    def checksum_of_rows() -> int | None:
        try:
            return stored_tensors.sum_of_rows(found.values())
        except (OSError, SafetensorError):
            return None

    sums = on_every_rank(checksum_of_rows)
    everyone = len(set(sums)) == 1
    how = "each rank reads"
    if not everyone:
        how = "rank 0 reads for all, as not every rank sees the same files"
    if len(sums) > 1:
        ranks.say(f"{directory}: {how}")
    return everyone


def _load_rows(tensor: DTensor, stored: Stored) -> None:
    """Fill this rank's shard of a DTensor from the files."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if shape[0]:  # small tensors may have no row for this rank
        rows = stored.read_rows(offset[0], offset[0] + shape[0])
        local = tensor.to_local().data
        local.copy_(rows.to(local.device))


def _scatter(whole: torch.Tensor, tensor: DTensor) -> None:
    """Fill a DTensor from what is `whole` on rank 0; all ranks."""
    sharded = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
    tensor.to_local().data.copy_(sharded.to_local())
