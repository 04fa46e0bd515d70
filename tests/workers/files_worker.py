"""Load and export models of several families under torchrun, for test_weights.py.

    files_worker.py MODELS RESULT.json

MODELS is a folder of directories. Each model is loaded under FSDP1, FSDP2 and DDP and compared with
the one that Transformers loads in fp32, then exported and compared with Transformers' own export.
Rank 0 writes a list of differences for each model and wrapper.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from conftest import weights as stored
from ten_steps import parse_args, strategy_flags
from torch import nn
from transformers import AutoConfig, ByT5Tokenizer, GPT2LMHeadModel, T5ForConditionalGeneration

import gpt2_fsdp
import policies
from core import export, ranks, weights

WAYS = ("full_shard", "fsdp2", "ddp")
IDS = torch.arange(5, 37)[None]


def load(kind: type, config: object, directory: Path, way: str) -> nn.Module:
    """Return the model in a directory, with a class derived and wrapped as in the scripts."""
    subclass = type("LossModel", (kind,), {"__module__": __name__})
    model, initial = weights.new_model(subclass, config, directory)
    blocks = policies.layer_classes(model, GPT2LMHeadModel, gpt2_fsdp.BLOCKS)
    args = parse_args(gpt2_fsdp, strategy_flags(way))
    model = gpt2_fsdp.wrap_model(args, torch.device("cpu"), model, blocks, initial)
    assert not initial, "rank 0 still holds the weights that it read"
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    """Return the model's logits for IDS."""
    is_seq2seq = weights.unwrapped(model).config.is_encoder_decoder
    inputs = {"decoder_input_ids": IDS} if is_seq2seq else {}
    return model(input_ids=IDS, use_cache=False, **inputs).logits


def differences(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    """Return the keys of tensors that differ in dtype or value, or that only one side has."""
    problems = sorted(ones.keys() ^ others.keys())
    for key in ones.keys() & others.keys():
        if ones[key].dtype != others[key].dtype or not torch.equal(ones[key], others[key]):
            problems.append(key)
    return problems


def frozen(model: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained."""
    parameters = model.named_parameters()
    return {weights.plain_name(name) for name, x in parameters if not x.requires_grad}


def check(directory: Path, way: str, output: Path) -> list[str]:
    """Load and export a model. Return the problems; those of the files only on rank 0."""
    config = AutoConfig.from_pretrained(directory)
    own = T5ForConditionalGeneration if config.is_encoder_decoder else GPT2LMHeadModel
    config, kind = weights.choose_class(config, own)
    weights.prepare_config(config)
    mapping = {r"^language_model\.": ""}  # the text part of a multimodal model
    options = {"key_mapping": mapping} if "text part" in directory.name else {}
    expected = kind.from_pretrained(directory, config=config, dtype=torch.float32, **options).eval()
    model = load(kind, config, directory, way)
    problems = [] if torch.equal(logits(model), logits(expected)) else ["logits"]
    inner = weights.unwrapped(model)
    problems += differences(dict(inner.named_buffers()), dict(expected.named_buffers()))
    problems += frozen(inner) ^ frozen(kind(config))
    for dtype in ("fp32", "bf16"):
        ours, theirs = output / f"ours-{dtype}", output / f"theirs-{dtype}"
        export.export_model(model, ByT5Tokenizer(), ours, dtype)
        if dist.get_rank() == 0:
            expected.to(export.EXPORT_DTYPES[dtype]).save_pretrained(theirs)
            tensors = stored(theirs)  # Transformers restores the prefix of a text part
            tensors = {key.removeprefix("language_model."): x for key, x in tensors.items()}
            problems += differences(stored(ours), tensors)
            _, report = kind.from_pretrained(ours, output_loading_info=True)
            problems += [str(part) for part in report.values() if part]
            assert len(list(ours.glob("*.safetensors"))) > 1
    return problems


def main() -> None:
    """Check all models in one process group."""
    models, result = map(Path, sys.argv[1:])
    ranks.setup(7)
    export.FILE_BYTES = 20_000
    problems = {}
    for directory in sorted(models.iterdir()):
        for way in WAYS:
            output = result.parent / f"{result.stem} {directory.name} {way}"
            problems[f"{directory.name} {way}"] = check(directory, way, output)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(problems))
    ranks.finish()


if __name__ == "__main__":
    main()
