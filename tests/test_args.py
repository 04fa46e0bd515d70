"""Flags: parsing, help, suggestions, ranges, and how the global batch is cut."""

import importlib
import itertools
import re
from dataclasses import field, make_dataclass, replace
from functools import partial
from typing import Any

import docstring_parser
import pytest
from conftest import SCRIPTS, error_lines, launch
from in_process import refusal, start
from ten_steps import parse_args

import gpt2_fsdp
import llama_fsdp
import T5_training
from optional import flag_advice


def parse(script: Any, *flags: object) -> Any:
    """Return the script's arguments for a tiny model and these flags."""
    return parse_args(script, ["--model-name", "tiny", *flags])


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_fits_80_columns_and_shows_defaults(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as end:
        parse_args(script, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not end.value.code and max(map(len, lines)) <= 80 and len(lines) <= 260
    text = " ".join("".join(x if x.isascii() else " " for x in " ".join(lines)).split())
    for words in (
        script.__doc__.partition("\n")[0].split(",")[0],
        f"torchrun --nnodes 1 --nproc_per_node 8 {name}.py",
        "--lr FLOAT",
        f"peak learning rate (default: {script.Args().optim.lr})",
        "linear or cosine to 0 or --min-lr-ratio",
    ):
        assert words in text
    assert "optional:" not in text  # comments are no help
    assert "(default: )" not in text
    for title in ("kernel", "paging", "saves", "track"):
        assert f" {title} options" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_a_flag_is_one_paragraph(name):
    """tyro would keep the line breaks of a longer docstring."""
    script = importlib.import_module(name)
    sections = [type(section) for section in vars(script.Args()).values()]
    for section in sections:
        for flag in docstring_parser.parse_from_object(section).params:
            assert "\n" not in flag.description, flag.arg_name


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_without_effect_are_flags_of_the_script(name):
    fields = [vars(section) for section in vars(importlib.import_module(name).Args()).values()]
    flags = {"--" + field.replace("_", "-") for section in fields for field in section}
    for text in itertools.chain(*flag_advice.NO_EFFECT.items()):
        assert set(re.findall(r"--[a-z-]+", text)) <= flags, text


def test_repeated_values_of_betas_are_accepted():
    assert parse(gpt2_fsdp, "--betas", "0.9", "0.9").optim.betas == (0.9, 0.9)


@pytest.mark.parametrize("flags, note", [
    (["--gamma", 0.5], "--gamma has no effect with --lr-schedule linear."),
    (["--gamma", 0.5, "--lr-schedule", "step"], ""),
    (["--warmup-steps", 9, "--lr_schedule=step"],
     "--warmup-steps has no effect with --lr-schedule step."),
    (["--warmup-steps", 9], ""),
    (["--warmup-steps", 9, "--warmup-ratio", 0],
     "--warmup-ratio has no effect with --warmup-steps 9."),
    (["--warmup-steps", 0, "--warmup-ratio", 0.1], ""),
    (["--min-lr-ratio", 0.1, "--lr-schedule", "constant"],
     "--min-lr-ratio has no effect with --lr-schedule constant."),
    (["--min-lr-ratio", 0.1], ""),
    (["--epochs", 3, "--max-steps", 9], "--epochs has no effect with --max-steps 9."),
    (["--shard-group-size", 2], "--shard-group-size has no effect with --strategy full_shard."),
    (["--lr", 1, "--epochs", 3, "--lr=2", "--no-save-best", "--save-best"], ""),
    (["--dataset", "a.txt", "b.txt", "--betas", 0.9, 0.9], ""),
    (["--dataset", "a.csv", "--dataset-config", "b"],
     "--dataset-config has no effect with --dataset a.csv."),
])  # fmt: skip
def test_flag_without_effect_is_one_line(flags, note, capsys):
    assert not refusal(gpt2_fsdp, *flags)
    assert capsys.readouterr().out == (note and f"{note}\n")


@pytest.mark.parametrize("flags, message", [
    (["--batch-sze", "3"], "--batch-size INT"),
    (["--lr-schedul", "linear"], "--lr-schedule {linear,cosine,constant,step}"),
    (["--lr", "high"], "Error parsing --lr: could not convert string to float: 'high'"),
    (["--strategy", "ful_shard"], "invalid choice 'ful_shard' for argument '--strategy'"),
    (["--min-lr", "6e-5"], "--min-lr-ratio FLOAT"),
    (["--learning-rate", "1e-4"], "Unrecognized options: --learning-rate"),
    (["--compile", "false"], "Unrecognized options: false"),
])  # fmt: skip
def test_typing_errors_get_a_suggestion(flags, message, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert message in refusal(gpt2_fsdp, *flags)


def test_values_out_of_range_are_one_message_and_then_combinations():
    """Combinations are judged with valid numbers only: a wrong one has no second message."""
    numbers = ["--batch-size", "0", "--lr", "1e30", "--warmup-ratio", "1", "--weight-decay", "nan"]
    flags = ["--strategy", "ddp", "--fsdp", "2", "--wrap", "size"]
    assert refusal(gpt2_fsdp, *numbers, *flags) == (
        "--batch-size is 0, but must be at least 1, below 2,147,483,648. "
        "--lr is 1e+30, but must be at least 1e-12, below 10. "
        "--warmup-ratio is 1.0, but must be at least 0, below 1. "
        "--weight-decay is nan, but must be at least 0, below 2,147,483,648."
    )
    assert refusal(gpt2_fsdp, *flags) == (
        "--strategy ddp needs --fsdp 1, without --cpu-offload. "
        "--wrap size is neither block nor size:N."
    )


@pytest.mark.parametrize("flags, number", [
    (["--lora-rank", 4, "--lora-dropout", 1.5], "--lora-dropout is 1.5"),
    (["--lora-rank", -4, "--lora-alpha", 8], "--lora-rank is -4"),
    (["--global-batch-size", 6, "--batch-size", 0], "--batch-size is 0"),
    (["--strategy", "hybrid_shard", "--shard-group-size", -2], "--shard-group-size is -2"),
])  # fmt: skip
def test_number_out_of_range_is_the_only_message(flags, number):
    message = refusal(llama_fsdp, *flags)
    assert message.startswith(f"{number}, but must be at least ") and ". " not in message


@pytest.mark.parametrize("flags", [
    ["--dataset", "docstrings", "--dataset", "other"], ["--val_dataset=a", "--val-dataset", "b"],
])  # fmt: skip
def test_repeated_list_is_refused(flags):
    """tyro would keep only the last one."""
    assert "dataset once, with all its values" in refusal(llama_fsdp, *flags)


def test_only_rank_0_prints_and_the_exit_code_is_1():
    result = launch(2, "gpt2_fsdp.py", "--model-name", "tiny", "--lr", "1e30", check=False)
    (error,) = error_lines(result.stderr)
    assert result.returncode == 1 and "--lr is 1e+30" in error


def test_output_directory_that_cannot_be_created_is_refused(tmp_path, capfd):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/run", tmp_path / ("x" * 300)):
        assert start(gpt2_fsdp, "--model-name", "tiny", "--output-dir", path) == 1
        message = capfd.readouterr().err
        assert message.startswith("error: [Errno ") and message.endswith(f": '{path}'\n")
        assert message.count("\n") == 1


@pytest.mark.parametrize("flags", [["--output-dir", ""], ["--output_dir="]])
def test_empty_output_directory_is_refused(flags):
    """An unset variable; the current directory may be chosen as `.`."""
    message = "--output-dir is empty. Pass a value, or leave it out."
    assert refusal(gpt2_fsdp, *flags, "--lr", "1e-4") == message
    assert refusal(gpt2_fsdp, *flags) and not refusal(gpt2_fsdp, "--output-dir", ".")


@pytest.mark.parametrize("flags", [
    ["--dataset"], ["--dataset", ""], ["--dataset="], ["--val-dataset"],
    ["--model-name", ""], ["--dataset-config", ""], ["--lora-targets"], ["--chat-template="],
])  # fmt: skip
def test_empty_value_is_refused(flags):
    flag = flags[0].rstrip("=")
    message = f"{flag} is empty. Pass a value, or leave it out."
    assert refusal(llama_fsdp, *flags, "--lr", "1e-4") == message
    assert not refusal(T5_training, "--source-prefix", "")


def test_flags_resolve_in_any_order_of_the_sections(monkeypatch):
    """Adapters choose FSDP2, which has other limits, precision is chosen, and batches are cut."""
    flags = ["--lora-rank", "8", "--cpu-offload", "--precision", "fp16", "--global-batch-size", "6"]
    message = "--cpu-offload with --precision fp16 needs --fsdp 1."
    assert refusal(llama_fsdp, *flags) == message
    sections = [(name, type(section), field(default_factory=partial(replace, section)))
                for name, section in vars(llama_fsdp.Args()).items()]  # fmt: skip
    monkeypatch.setattr(llama_fsdp, "Args", make_dataclass("Args", sections[::-1]))
    monkeypatch.setattr(llama_fsdp, "TINY", llama_fsdp.Args())
    assert refusal(llama_fsdp, *flags) == message


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
     "8 is not a multiple of 8 processes, or is passed beside --gradient-accumulation-steps"),
])  # fmt: skip
def test_impossible_batches_are_refused(flags, message, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert message in refusal(llama_fsdp, *flags)
