"""The rules in docs/fsdp1-or-2.md are those of the parser."""

import pytest
import torch
from conftest import ROOT

import gpt2_fsdp
import llama_fsdp
from benchmarks.driven import parse_flags

ROWS = {}  # the cells for FSDP1 and FSDP2 by the text of the first cell
for line in (ROOT / "docs/fsdp1-or-2.md").read_text().splitlines():
    if line.startswith("| "):
        feature, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        ROWS[feature] = cells
ACCUMULATE = ["--gradient-accumulation-steps", "2"]
RULES = {  # script, processes and flags of each row that is a rule
    "LoRA and QLoRA": (llama_fsdp, 2, ["--lora-rank", "4"]),
    "`--strategy no_shard`": (gpt2_fsdp, 2, ["--strategy", "no_shard"]),
    "size-based wrapping (`gpt2_fsdp.py`)": (gpt2_fsdp, 2, ["--wrap", "size:1000"]),
    "`--optimizer paged_adamw_32bit`": (llama_fsdp, 2, ["--optimizer", "paged_adamw_32bit"]),
    "`--cpu-offload` on one GPU": (gpt2_fsdp, 1, ["--cpu-offload"]),
    "`--cpu-offload` with gradient accumulation": (gpt2_fsdp, 2, ["--cpu-offload", *ACCUMULATE]),
    "`--cpu-offload` with fp16": (gpt2_fsdp, 2, ["--cpu-offload", "--precision", "fp16"]),
    "`--compile` with gradient accumulation": (gpt2_fsdp, 2, ["--compile", *ACCUMULATE]),
}


def is_accepted(module, flags: list[str]) -> bool:
    """Return whether the script's parser accepts the flags."""
    try:
        parse_flags(module, ["--model-name", "tiny", "--dataset", "docstrings", *flags])
    except SystemExit:
        return False
    return True


def test_every_rule_of_the_table_is_tested():
    rules = {
        row
        for row, cells in ROWS.items()
        if cells[0].split(":")[0] in ("yes", "no") or "only" in cells[0]
    }
    assert rules == RULES.keys()


@pytest.mark.parametrize("row", RULES)
@pytest.mark.parametrize("fsdp", [1, 2])
def test_parser_follows_the_table(row, fsdp, monkeypatch):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    module, processes, flags = RULES[row]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    cell = ROWS[row][fsdp - 1]
    flags = [*flags, "--fsdp", str(fsdp)]
    assert is_accepted(module, flags) == (cell == "yes")
    if cell.startswith("only with"):
        assert is_accepted(module, [*flags, cell.removeprefix("only with ").strip("`")])


def test_offload_of_fp16_is_refused_on_one_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert not is_accepted(gpt2_fsdp, ["--fsdp", "2", "--cpu-offload", "--precision", "fp16"])
    assert "--cpu-offload with --precision fp16 needs --fsdp 1." in capsys.readouterr().err
