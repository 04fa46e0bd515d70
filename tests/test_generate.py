"""tools/generate.py: prompts from arguments, from standard input and from a terminal."""

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from conftest import ROOT, finish, launch


def generate(*args: object, lines: str = "") -> subprocess.CompletedProcess:
    """Run tools/generate.py with `lines` as standard input."""
    return launch(0, "tools/generate.py", *args, lines=lines, check=False)


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_each_line_is_a_prompt(kind, request):
    directory = request.getfixturevalue(f"{kind}_directory")
    lines = generate(directory, "--max-new-tokens", 5, lines="one\ntwo\n")
    assert lines.returncode == 0
    assert set(lines.stderr.splitlines()) <= {"The answer is empty."}  # the weights are random
    single = generate(directory, "one", "--max-new-tokens", 5)
    assert lines.stdout.count("\n") >= 2 and lines.stdout.startswith(single.stdout)


@pytest.fixture(scope="module")
def chat_directory(llama_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the Llama directory whose template writes the role and text of each turn."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(llama_directory, path)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'rejected' %}{{ raise_exception('No such turn') "
        "}}{% endif %}{{ m.role[0] + m.content }}{% endfor %}a"
    )
    return path


def greedy(directory: Path, text: str, special: bool = False) -> str:
    """Return the five most likely tokens after a text, with or without special tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer(text, add_special_tokens=special, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=5, do_sample=False)
    return tokenizer.decode(output[0, ids.size(1) :], skip_special_tokens=True)


FEW = ["--max-new-tokens", 5, "--temperature", 0]


def test_prompts_of_a_file_are_chats_of_one_turn(chat_directory):
    result = generate(chat_directory, *FEW, "--system", "be", lines="one\n\ntwo\n")
    answers = [greedy(chat_directory, f"sbeu{prompt}a") for prompt in ("one", "two")]
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert result.stderr == "Line 2 is blank and was skipped.\n"


def test_terminal_is_a_chat_of_several_turns(chat_directory):
    controller, terminal = pty.openpty()
    command = [sys.executable, str(ROOT / "tools/generate.py"), chat_directory, *map(str, FEW)]
    process = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, text=True)
    os.write(controller, b"one\n\ntwo\n\4")  # the last is Ctrl-D
    result = finish(process)
    os.close(controller)
    os.close(terminal)
    first = greedy(chat_directory, "uonea")
    second = greedy(chat_directory, f"uonea{first}utwoa")
    assert second != greedy(chat_directory, "utwoa")
    assert result.returncode == 0 and result.stdout == f"> {first}\n> > {second}\n> "


def test_empty_answer_is_reported(gpt2_directory, tmp_path):
    """It is on stderr, so that each prompt still has its line."""
    shutil.copytree(gpt2_directory, tmp_path / "model")
    eos = transformers.AutoTokenizer.from_pretrained(gpt2_directory).eos_token_id
    transformers.GenerationConfig(forced_eos_token_id=eos).save_pretrained(tmp_path / "model")
    result = generate(tmp_path / "model", "one", "--max-new-tokens", 1)
    assert (result.stdout, result.stderr) == ("\n", "The answer is empty.\n")


def test_top_p_and_temperature_change_the_sampling(gpt2_directory):
    """The share of the likeliest token alone is greedy, and a high temperature is not."""
    expected = greedy(gpt2_directory, "one", special=True) + "\n"
    hot = ["one", "--temperature", 50, "--max-new-tokens"]
    assert generate(gpt2_directory, *hot, 5, "--top-p", 1e-6).stdout == expected
    assert generate(gpt2_directory, *hot, 30).stdout != expected
    cold = ["--temperature", "0", "--max-new-tokens", 5, "one"]  # flags before the prompt
    assert generate(gpt2_directory, *cold).stdout == expected


def test_invalid_values_exit_with_one_message(chat_directory, gpt2_directory, tmp_path):
    for words, message in {
        (chat_directory, " "): "The prompt is blank.",
        (chat_directory, "one", "--top-p", 0): "--top-p above 0 and at most 1",
        (chat_directory, "one", "--temperature", "nan"): "--temperature must be from 0",
        (chat_directory, "one", "--system", "rejected"): "No such turn",
        (gpt2_directory, "one", "--system", "be"): "chat_template is not set",
        (tmp_path, "one"): f"{tmp_path} has no model. Pass the final/ of a run.",
    }.items():
        result = generate(*words)
        assert result.returncode == 1 and not result.stdout, words
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
        assert message in result.stderr
