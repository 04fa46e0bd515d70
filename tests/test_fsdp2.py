"""--fsdp 2: loads, compared with FSDP1 and DDP, and resumes across strategies.

Each script's own tests compare ten FSDP2 steps with plain PyTorch.
"""

import json
from pathlib import Path

import pytest
import torch
from conftest import launch, losses, metrics, weights
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import gpt2_fsdp
from benchmarks.driven import parse_flags

WAYS = {"1-D mesh": 4, "2-D mesh": 2, "FSDP1": 4, "DDP": 1}  # ranks per copy of the model


@pytest.fixture(scope="module")
def loads(
    t5_directory: Path, gpt2_directory: Path, llama_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict:  # fmt: skip
    """Return the results of fsdp2_load_worker.py on four ranks, the output directory and the
    models. Llama's files are in bf16."""
    directory = tmp_path_factory.mktemp("loads")
    llama = AutoModelForCausalLM.from_pretrained(llama_directory)
    llama.to(torch.bfloat16).save_pretrained(directory / "llama")
    AutoTokenizer.from_pretrained(llama_directory).save_pretrained(directory / "llama")
    models = {
        "T5_training": str(t5_directory),
        "gpt2_fsdp": str(gpt2_directory),
        "llama_fsdp": str(directory / "llama"),
    }
    result = directory / "result.json"
    worker = ["tests/workers/fsdp2_load_worker.py", result, directory, json.dumps(models)]
    launch(4, *worker)
    return {"directory": directory, "models": models} | json.loads(result.read_text())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", ["T5_training", "gpt2_fsdp", "llama_fsdp"])
def test_loaded_weights_equal_the_files(script, way, loads):
    path = loads["directory"] / script / way
    kind = AutoModelForSeq2SeqLM if script == "T5_training" else AutoModelForCausalLM
    ours = kind.from_pretrained(path)
    theirs = kind.from_pretrained(loads["models"][script], dtype=torch.float32)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.equal(expected[name]), name
    assert json.loads((path / "config.json").read_text())["architectures"] == [type(ours).__name__]
    ranks = loads[f"{script}, {way}"]
    size = 4 * sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(rank["bytes"] for rank in ranks) == size * 4 // WAYS[way]
    assert all(rank["sharded"] == way.endswith("mesh") for rank in ranks)
    assert {rank["tied"] for rank in ranks} == {theirs.config.tie_word_embeddings}


def test_checkpoints_cross_strategies_and_world_sizes(gpt2_directory, texts, tmp_path):
    """A run is killed under FSDP1 on 2 ranks, FSDP2 on 4 and FSDP1 on 2, then ends under DDP on 1.
    It uses sharded, full and asynchronous saves."""
    common = ["--model-name", str(gpt2_directory), "--dataset", str(texts[0]), "--val-dataset",
              str(texts[1]), "--block-size", "32", "--num-train-samples", "35",
              "--num-val-samples", "0", "--max-steps", "8", "--log-every", "1", "--eval-every", "3",
              "--save-every", "2", "--lr", "1e-3"]  # fmt: skip
    whole = [*common, "--fsdp", "2", "--batch-size", "8", "--output-dir", str(tmp_path / "whole")]
    gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, whole))
    output = tmp_path / "parts"
    common += ["--output-dir", str(output)]
    one = ["--fsdp", "1", "--batch-size", "4"]
    two = ["--fsdp", "2", "--batch-size", "2", "--checkpoint-type", "full", "--async-save"]
    hybrid = ["--strategy", "hybrid_shard", "--shard-group-size", "2"]
    for processes, step, flags in ((2, 3, one), (4, 7, [*two, *hybrid]), (2, 8, one)):
        killed = ["tests/workers/killed.py", "gpt2_fsdp", 0, step, *common, *flags]
        assert launch(processes, *killed, check=False).returncode
    last = [*common, "--strategy", "ddp", "--batch-size", "8"]
    gpt2_fsdp.fsdp_main(parse_flags(gpt2_fsdp, last))
    starts = [line["step"] for line in metrics(output, "start")]
    assert starts in ([0, 2, 5, 6], [0, 2, 6, 6])  # the pending save may be lost
    for event in ("train", "val"):
        expected = losses(tmp_path / "whole", event)
        assert losses(output, event) == pytest.approx(expected, abs=1e-5)
    for name in ("final", "best"):
        expected = weights(tmp_path / "whole" / name)
        for key, tensor in weights(output / name).items():
            assert tensor.sub(expected[key]).abs().max() < 1e-4
    before = weights(output / "final")
    args = parse_flags(gpt2_fsdp, [*common, "--batch-size", "8", "--fsdp", "2", "--export-only"])
    gpt2_fsdp.fsdp_main(args)
    assert all(tensor.equal(before[key]) for key, tensor in weights(output / "final").items())
