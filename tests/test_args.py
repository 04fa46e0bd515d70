"""Flags: parsing, help, suggestions, ranges, and how the global batch is cut."""

from typing import Any

import pytest
from conftest import error_lines, launch
from ten_steps import parse_args

import gpt2_fsdp
import llama_fsdp
import T5_training
from core import args as core_args

SCRIPTS = (T5_training, gpt2_fsdp, llama_fsdp)


class Refused(Exception):
    """A script has refused its flags with this message."""


@pytest.fixture(autouse=True)
def refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise Refused where a script would end the process."""

    def refuse(error: object) -> None:
        raise Refused(str(error))

    monkeypatch.setattr(core_args, "exit_with", refuse)


def parse(script: Any, *flags: object) -> Any:
    """Return the script's arguments for a tiny model and these flags."""
    return parse_args(script, ["--model-name", "tiny", *flags])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_help_fits_80_columns_and_shows_defaults(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        parse_args(script, ["--help"])
    text = capsys.readouterr().out
    assert not end.value.code and max(map(len, text.splitlines())) <= 80
    assert script.__doc__.partition("\n")[0].split(",")[0] in " ".join(text.split())
    for words in ("--lr FLOAT", "peak learning rate (default:", "linear or cosine to 0"):
        assert words in text
    assert "optional:" not in text  # comments are no help


@pytest.mark.parametrize("flags, message", [
    (["--batch-sze", "3"], "--batch-size INT"),
    (["--lr-schedul", "linear"], "--lr-schedule {linear,cosine,constant,step}"),
    (["--lr", "high"], "Error parsing --lr: could not convert string to float: 'high'"),
    (["--strategy", "ful_shard"], "invalid choice 'ful_shard' for argument '--strategy'"),
])  # fmt: skip
def test_typing_errors_get_a_suggestion(flags, message, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(Refused) as error:
        parse(gpt2_fsdp, *flags)
    assert message in str(error.value)


def test_values_out_of_range_and_combinations_are_one_message():
    flags = ["--batch-size", "0", "--lr", "1e30", "--warmup-ratio", "1", "--weight-decay", "nan"]
    with pytest.raises(Refused) as error:
        parse(gpt2_fsdp, *flags, "--strategy", "ddp", "--fsdp", "2", "--wrap", "size")
    assert str(error.value) == (
        "--batch-size is 0, but must be at least 1, below 2,147,483,648. "
        "--lr is 1e+30, but must be at least 1e-12, below 10. "
        "--warmup-ratio is 1.0, but must be at least 0, below 1. "
        "--weight-decay is nan, but must be at least 0, below 2,147,483,648. "
        "--wrap size is neither block nor size:N. --strategy ddp needs --fsdp 1."
    )


@pytest.mark.parametrize("flags", [
    ["--dataset", "docstrings", "--dataset", "other"], ["--val_dataset=a", "--val-dataset", "b"],
])  # fmt: skip
def test_repeated_list_is_refused(flags):
    """tyro would keep only the last one."""
    with pytest.raises(Refused, match="dataset once, with all its values"):
        parse(llama_fsdp, *flags)


@pytest.mark.parametrize("flags, message", [
    (["--lr", "1e30", "--batch-size", "0"], "--lr is 1e+30"), (["--bad", "1"], ""),
])  # fmt: skip
def test_only_rank_0_prints_and_the_exit_code_is_1(flags, message):
    result = launch(2, "gpt2_fsdp.py", "--model-name", "tiny", *flags, check=False)
    (error,) = error_lines(result.stderr)
    assert result.returncode == 1 and message in error


def test_values_of_tiny_are_defaults_only():
    args = parse(gpt2_fsdp)
    assert (args.data.block_size, args.optim.epochs) == (256, 1)
    assert parse(gpt2_fsdp, "--epochs", "3").optim.epochs == 3
    assert parse_args(gpt2_fsdp, []).data.block_size == gpt2_fsdp.Args().data.block_size != 256


@pytest.mark.parametrize("total, limit, processes, micro_batches", [
    (64, 8, 1, (8, 8)), (64, 64, 2, (32, 1)), (60, 8, 2, (6, 5)), (26, 8, 2, (1, 13)),
])  # fmt: skip
def test_micro_batches_keep_the_global_batch(total, limit, processes, micro_batches, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    args = parse(llama_fsdp, "--global-batch-size", total, "--batch-size", limit)
    assert (args.optim.batch_size, args.optim.gradient_accumulation_steps) == micro_batches


@pytest.mark.parametrize("flags, message", [
    (["--global-batch-size", 12], "12 is not a multiple of 8 processes"),
    (["--global-batch-size", 4], "4 is not a multiple of 8 processes"),
    (["--global-batch-size", 8, "--gradient-accumulation-steps", 2],
     "Pass --global-batch-size or --gradient-accumulation-steps, not both."),
])  # fmt: skip
def test_impossible_batches_are_refused(flags, message, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(Refused, match=message):
        parse(llama_fsdp, *flags)
