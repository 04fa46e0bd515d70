"""Load and export models of several families under torchrun, for test_weights.py.

    files_worker.py MODELS RESULT.json

MODELS is a folder of model directories. Each model is loaded under FSDP1, FSDP2 and DDP, compared
with the model that Transformers loads in fp32, exported and compared with Transformers' own export.
Rank 0 writes a list of differences for each model and wrapper.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
import transformers
from conftest import weights as stored
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoConfig, ByT5Tokenizer, PretrainedConfig, PreTrainedModel

from core import export, weights

CPU = torch.device("cpu")
WAYS = ("fsdp1", "fsdp2", "ddp")
IDS = torch.arange(5, 37)[None]


def wrap(model: nn.Module, fill: Callable[[nn.Module], None], way: str) -> nn.Module:
    """Return the model wrapped and with its weights. Under FSDP, each layer is a unit."""
    blocks = {type(layer) for layers in model.modules() if isinstance(layers, nn.ModuleList)
              for layer in layers if type(layer).__name__.endswith(("Block", "Layer"))}  # fmt: skip
    if way == "ddp":
        model.apply(fill)
        return DDP(model)
    if way == "fsdp2":
        for module in model.modules():
            if type(module) in blocks:
                fully_shard(module.apply(fill))
        return fully_shard(model.apply(fill))
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy(blocks),
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        device_id=CPU,
        use_orig_params=True,
        param_init_fn=fill,
    )


def load(
    kind: type, config: PretrainedConfig, directory: Path, way: str, needs_weights: bool = True
) -> nn.Module:
    """Return the model in a directory, with a class derived as in the scripts."""
    subclass = type("LossModel", (kind,), {"__module__": __name__})
    model, source = weights.new_model(subclass, config, directory, needs_weights)
    fill = weights.Loader(model, source, CPU).fill
    wrapped = wrap(model, fill, way).eval()
    assert not source, "rank 0 still holds the weights that it read"
    return wrapped


def logits(model: nn.Module) -> torch.Tensor:
    """Return the model's logits for IDS."""
    inputs = {"input_ids": IDS, "use_cache": False}
    if weights.unwrapped(model).config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS
    return model(**inputs).logits


def load_reference(kind: type, config: PretrainedConfig, directory: Path) -> PreTrainedModel:
    """Load the model with Transformers in fp32; of a multimodal model, only the text part."""
    full_config = AutoConfig.from_pretrained(directory)
    if type(full_config) is type(config):
        weights.prepare_config(config)
        return kind.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    mapping = {r"^language_model\.": ""}
    return kind.from_pretrained(directory, config=config, dtype=torch.float32, key_mapping=mapping)


def differences(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys of tensors that differ in dtype or value, or that only one side has."""
    problems = sorted(ones.keys() ^ others.keys())
    for key in ones.keys() & others.keys():
        if ones[key].dtype != others[key].dtype or not torch.equal(ones[key], others[key]):
            problems.append(key)
    return problems


def check(directory: Path, way: str, output: Path) -> list[str]:
    """Load and export a model. Return the problems; those of the files only on rank 0."""
    kind = getattr(transformers, json.loads((directory / "class.json").read_text()))
    config, _ = weights.model_class(AutoConfig.from_pretrained(directory), kind)
    expected = load_reference(kind, config, directory)
    model = load(kind, config, directory, way)
    problems = []
    if not torch.equal(logits(model), logits(expected)):
        problems.append("logits")
    inner = weights.unwrapped(model)
    problems += differences(dict(inner.named_buffers()), dict(expected.named_buffers()))
    expected_frozen = {name for name, x in kind(config).named_parameters() if not x.requires_grad}
    frozen = {
        weights.plain_name(name) for name, x in inner.named_parameters() if not x.requires_grad
    }
    problems += sorted(expected_frozen ^ frozen)
    for dtype in ("fp32", "bf16"):
        ours, theirs = output / f"ours-{dtype}", output / f"theirs-{dtype}"
        export.export_model(model, ByT5Tokenizer(), ours, export.EXPORT_DTYPES[dtype])
        if dist.get_rank() == 0:
            expected.to(export.EXPORT_DTYPES[dtype]).save_pretrained(theirs)
            tensors = stored(theirs)  # Transformers restores the prefix of a text part
            tensors = {key.removeprefix("language_model."): x for key, x in tensors.items()}
            problems += differences(stored(ours), tensors)
            _, report = kind.from_pretrained(ours, output_loading_info=True)
            problems += [str(part) for part in report.values() if part]
            assert len(list(ours.glob("*.safetensors"))) > 1
    resumed = load(kind, config, directory, way, needs_weights=False)
    empty = weights.unwrapped(resumed)
    problems += differences(dict(empty.named_buffers()), dict(inner.named_buffers()))
    export.export_model(resumed, ByT5Tokenizer(), output / "resumed", torch.bfloat16)
    if dist.get_rank() == 0:
        problems += sorted(stored(output / "resumed").keys() ^ tensors.keys())
    return problems


def main() -> None:
    """Check all models in one process group."""
    models, result = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    export.FILE_BYTES = 20e3
    problems = {}
    for directory in sorted(models.iterdir()):
        for way in WAYS:
            output = result.parent / f"{result.stem} {directory.name} {way}"
            problems[f"{directory.name} {way}"] = check(directory, way, output)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(problems))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the scripts do
