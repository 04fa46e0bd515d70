"""Helpers and fixtures for the tests: launches on several CPU processes, small models and data."""

import contextlib
import importlib
import itertools
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    ByT5Tokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CACHE = tempfile.TemporaryDirectory()  # `datasets` reads the variable when imported
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=CACHE.name)
# Rows for runs of the scripts, written once: processes that the tests start inherit the variable.
DOCSTRINGS = os.environ.setdefault("DOCSTRINGS", f"{CACHE.name}/docstrings.jsonl")
WORKER_PATHS = (".", "tests", "tests/helpers", "docs/examples")  # where tests/workers import from
huggingface_hub.constants.HF_HUB_OFFLINE = True  # already imported
if not Path(DOCSTRINGS).exists():
    from tools import docstrings

    lines = [json.dumps(row) + "\n" for row in itertools.islice(docstrings.rows(), 1000)]
    Path(DOCSTRINGS).write_text("".join(lines))

# `make test` runs these files, and these tests of other files. `make test-ci` runs the others.
QUICK_FILES = {"test_args", "test_block_dataset", "test_chat_dataset", "test_layout",
               "test_data", "test_summarization_dataset", "test_weight"}  # fmt: skip
QUICK_TESTS = {
    "test_checkpoint": ["test_damaged_checkpoint_is_skipped",
                        "test_truncated_file_makes_a_checkpoint_incomplete",
                        "test_train_state_is_complete_or_absent",
                        "test_flipped_bits_of_train_state_are_noticed",
                        "test_prune_keeps_the_newest_complete_checkpoints",
                        "test_each_rank_resumes_its_loss_sum_and_other_ranks_share_them",
                        "test_dropout_is_reseeded_by_seed_step_and_rank_for_other_processes"],
    "test_chunked_loss": ["test_chunked_loss_equals_plain_loss",
                          "test_chunked_gradients_equal_plain_ones"],
    "test_export": ["test_exports_without_the_base_s_files_reload_with_equal_logits",
                    "test_tensors_that_transformers_keeps_in_fp32_stay_so",
                    "test_buffers_of_the_files_are_exported",
                    "test_settings_go_out_as_they_came_in",
                    "test_complete_export_replaces_the_target_of_a_link"],
    "test_lock": ["test_lock_is_refused_while_its_process_lives"],
    "test_log": ["test_events_that_will_be_repeated_and_broken_lines_are_deleted",
                 "test_validation_loss_is_the_mean_over_the_target_tokens_of_all_data_sets"],
    "test_memory_estimator": ["test_tables_say_what_fits"],
    "test_optimizers": ["test_schedules_follow_their_formulas"],
    "test_parity": ["test_ten_steps_equal_plain_pytorch"],
    "test_policies": ["test_all_optimizers_skip_a_step_that_is_bad_for_one",
                      "test_norm_that_is_not_finite_ends_the_run_unless_fp16_can_lower_its_scale"],
    "test_ranks": ["test_signals_are_remembered_until_they_are_forgotten"],
    "test_readme": ["test_every_command_is_marked_or_run_by_a_test", "test_commands_parse",
                    "test_links_resolve", "test_files_named_in_docs_exist"],
    "test_runs": ["test_damaged_checkpoint_is_skipped_and_replaced",
                  "test_signal_without_torchrun_saves_and_exits_with_75",
                  "test_stopped_run_resumes_bit_for_bit_between_two_lines_of_its_log",
                  "test_validation_asks_for_a_stop_at_every_eighth_batch"],
    "test_safe_checkpoint": ["test_code_of_a_model_is_never_run"],
    "test_startup_checks": ["test_edit_is_refused_with_its_message"],
    "test_steps": ["test_epochs_of_packs_have_indices_of_their_own",
                   "test_every_sample_occurs_once_per_epoch_at_any_world_size",
                   "test_order_is_a_function_of_seed_and_epoch",
                   "test_due_steps_are_every_n_and_the_ends_of_epochs_and_of_the_run",
                   "test_length_groups_keep_every_sample_at_any_world_size",
                   "test_step_has_as_many_micro_batches_as_asked_for",
                   "test_random_numbers_in_collate_depend_on_seed_rank_and_step_alone",
                   "test_validation_batches_contain_each_sample_once",
                   "test_dropout_differs_between_ranks",
                   "test_weight_decay_excludes_biases_and_norms"],
    "test_weights": ["test_all_problems_of_weights_are_one_error"],
    "test_whole_runs": ["test_killed_run_resumes_bit_for_bit",
                        "test_exports_reload_with_the_same_loss",
                        "test_bad_input_exits_with_one_message"],
}  # fmt: skip
# They take minutes, some of them waiting, so they start first: a worker has whole files.
LONG_FILES = {"test_any_model", "test_benchmarks", "test_change_a_script", "test_checkpoint",
              "test_copies", "test_kill_it_three_times", "test_lesson", "test_lora",
              "test_parity", "test_policies", "test_ranks", "test_readme", "test_runs",
              "test_simulated_device", "test_slurm", "test_steps", "test_whole_runs"}  # fmt: skip
SCRIPTS = ("T5_training", "gpt2_fsdp", "llama_fsdp")
TINY = ["--model-name", "tiny", "--dataset", DOCSTRINGS, "--log-every", "1"]
SHORT = {  # flags for texts that take little time
    "T5_training": ["--source-length", "32", "--target-length", "8"],
    "gpt2_fsdp": ["--block-size", "32"],
    "llama_fsdp": ["--max-seq-length", "256", "--no-packing"],
}
# A wait of more than SLOWDOWN times the seconds that a quiet machine needs is a hang. No test has a
# time limit of its own, because an earlier failure may only mean that the machine is busy.
SLOWDOWN = 10
LAUNCH_SECONDS = 90  # that the longest launch of a script needs on a quiet machine
WIDE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128}  # fmt: skip


def hang_message(quiet_seconds: float) -> str:
    """Return what to say about a wait of more than SLOWDOWN times `quiet_seconds`."""
    return (
        f"Not over after {SLOWDOWN * quiet_seconds:.0f} s, {SLOWDOWN} times what a quiet machine "
        f"needs: a hang, or a very busy machine (load {os.getloadavg()[0]:.0f})."
    )


def finish(
    process: subprocess.Popen, quiet_seconds: float = LAUNCH_SECONDS, stdin: str | None = None
) -> subprocess.CompletedProcess:
    """Wait for the end of a process, which takes `quiet_seconds` on a quiet machine. Return its
    exit code and output."""
    try:
        output, error = process.communicate(stdin, timeout=SLOWDOWN * quiet_seconds)
    except subprocess.TimeoutExpired as expired:
        process.kill()
        written = b"\n".join(filter(None, [expired.output, expired.stderr]))
        pytest.fail(f"{hang_message(quiet_seconds)}\n{written.decode()[-6000:]}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, error)


def wait_until(
    condition: Callable[[], object], quiet_seconds: float = 20, report: Callable[[], str] = str
) -> None:
    """Wait until `condition` holds, which takes at most `quiet_seconds` on a quiet machine. Add
    the text of `report` to the failure of a wait that hangs."""
    end = time.monotonic() + SLOWDOWN * quiet_seconds
    while not condition():
        assert time.monotonic() < end, f"{hang_message(quiet_seconds)}\n{report()}"
        time.sleep(0.05)


def start_fork_server() -> subprocess.Popen:
    """Start tests/helpers/fork_server.py, and name its socket in FORK_SERVER. It ends with its
    input."""
    path = os.environ["FORK_SERVER"] = f"{CACHE.name}/fork_server"
    command = [sys.executable, ROOT / "tests/helpers/fork_server.py", path]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def pytest_configure(config: pytest.Config) -> None:
    """Start tests/helpers/fork_server.py, unless this is a worker of pytest-xdist, or another
    process that inherits FORK_SERVER."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.add_cleanup(lambda: print_result(config))
    if "FORK_SERVER" not in os.environ:
        config.add_cleanup(start_fork_server().communicate)  # ends it, before the line above


def skip_reasons(config: pytest.Config) -> Counter[str]:
    """Return how often each reason to skip a test was given."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return Counter(report.longrepr[2].removeprefix("Skipped: ")
                   for report in reporter.getreports("skipped"))  # fmt: skip


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped for a reason that the regular expression ALLOWED_SKIPS, if set,
    does not match."""
    allowed = os.environ.get("ALLOWED_SKIPS", "")
    if not all(re.search(allowed, reason) for reason in skip_reasons(session.config)):
        session.exitstatus = session.exitstatus or 1


def print_result(config: pytest.Config) -> None:
    """Print the counts, why tests were skipped, and the CPU time of all processes, in one line."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    words = [f"{len(reporter.getreports(x))} {x}" for x in ("passed", "failed", "error", "xfailed")]
    skips = skip_reasons(config)
    reasons = "; ".join(f"{count} {reason}" for reason, count in skips.items())
    words.append(f"{skips.total()} skipped ({reasons})" if skips else "0 skipped")
    usages = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(f"{', '.join(words)}, {seconds:,.0f} CPU seconds")


def fork(
    processes: int, argv: list[str], quiet_seconds: float, lines: str | None, cwd: object,
    env: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess:  # fmt: skip
    """Run a script in forks of the fork server. Return its exit code and output as text."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as connection:
        files = {name: f"{directory}/{name}" for name in ("stdin", "stdout", "stderr")}
        for name, path in files.items():
            Path(path).write_text(lines or "" if name == "stdin" else "")
        request = {"processes": processes, "argv": argv, "cwd": str(cwd), "environment": dict(env)}
        wait_until(lambda: not connection.connect_ex(os.environ["FORK_SERVER"]))
        connection.sendall((json.dumps(request | files) + "\n").encode())
        connection.settimeout(SLOWDOWN * quiet_seconds)
        try:
            code = int(connection.recv(99))
        except TimeoutError:  # the server ends the ranks when this connection is closed
            pytest.fail(f"{hang_message(quiet_seconds)}\n{Path(files['stderr']).read_text()}")
        output, error = (Path(files[name]).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(argv, code, output, error)


@pytest.fixture(scope="module")
def real_torchrun() -> Iterator[None]:
    """Let `launch` start interpreters, by torchrun, in a file that is about signals or exits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORK_SERVER", "0")
        yield


def launch(
    processes: int, script: str | Path, *args: object, check: bool = True,
    quiet_seconds: float = LAUNCH_SECONDS, lines: str | None = None, torchrun: bool = False,
    **options: object,
) -> subprocess.CompletedProcess:  # fmt: skip
    """Run a script on `processes` ranks (0: without torchrun), with `lines` as its input. Return
    its exit code and output as text. The ranks are forks of a process with the libraries, unless
    `torchrun` is set or Popen gets options, such as variables that an interpreter reads first."""
    path = script if script in ("-m", "-c") else str(ROOT / script)
    argv = [path, *map(str, args)]
    is_forked = path.endswith(".py") and not torchrun and options.keys() <= {"cwd"}
    options = {"cwd": ROOT} | options
    if path.startswith(str(ROOT / "tests/workers")):
        paths = [*(str(ROOT / folder) for folder in WORKER_PATHS), *sys.path]
        options.setdefault("env", os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    if is_forked and os.environ.get("FORK_SERVER", "0") != "0":
        result = fork(processes, argv, quiet_seconds, lines, **options)
    else:
        command = [sys.executable]
        if processes:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(processes)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        pipes |= {"stdin": subprocess.PIPE} if lines else {}
        process = subprocess.Popen([*command, *argv], **pipes | options)
        result = finish(process, quiet_seconds, lines)
    if check:
        assert result.returncode == 0, f"{argv}\n{result.stdout}\n{result.stderr[-6000:]}"
    return result


def error_lines(stderr: str) -> list[str]:
    """Return the error messages of a script, without torchrun's report, which indents them."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def status(output: Path) -> str:
    """Return the first word of a run's status file."""
    return (output / "status").read_text().split()[0]


def metrics(output: Path, event: str) -> list[dict]:
    """Return the entries of one event in a run's metrics.jsonl."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def live_metrics(output: Path, event: str) -> list[dict]:
    """Return the entries of one event while the run is still writing metrics.jsonl."""
    with contextlib.suppress(OSError, ValueError):  # a line may be incomplete
        return metrics(output, event)
    return []


def wait_for_step(output: Path, step: int) -> None:
    """Wait until a run has logged the step."""
    wait_until(lambda: step in [line["step"] for line in live_metrics(output, "train")], 60)


def losses(output: Path, event: str = "train") -> dict[int, float]:
    """Return the loss by step; fail if no step is logged or a step is logged twice."""
    lines = metrics(output, event)
    loss_by_step = {line["step"]: line["loss"] for line in lines}
    assert loss_by_step and len(loss_by_step) == len(lines)
    return loss_by_step


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an exported model; fail if there are no files."""
    files = sorted(directory.glob("*.safetensors"))
    assert files, directory
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_equal_weights(first: Path, second: Path) -> None:
    """Check that two exported models are equal bit for bit."""
    tensors, others = weights(first), weights(second)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def check_equal_runs(output: Path, other: Path, exports: tuple = ("final",)) -> None:
    """Check that two runs have the same losses and exports, bit for bit, and that the first one
    has left no temporary files."""
    for event in ("train", "val"):
        assert losses(output, event) == losses(other, event)
    for name in exports:
        check_equal_weights(output / name, other / name)
    assert not list(output.rglob("tmp-*"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark with `ci` all tests that `make test` leaves out, and put LONG_FILES first."""
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)
    for item in items:
        file = item.path.stem
        if file not in QUICK_FILES and item.originalname not in QUICK_TESTS.get(file, []):
            item.add_marker(pytest.mark.ci)


@pytest.fixture
def process_group() -> Iterator[None]:
    """Initialize a process group with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save_model(path: Path, model_class: type, dtype: str = "float32", **config: object) -> Path:
    """Save a small random model, Llama's in several files, with a byte tokenizer; return path."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    model = model_class(model_class.config_class(vocab_size=len(tokenizer), **config))
    if path.name.startswith("llama"):
        model.generation_config.update(temperature=0.6, do_sample=True)
    size = "60KB" if path.name.startswith("llama") else "1GB"
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=size)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def t5_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Hugging Face directory of a small random T5 without dropout."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    others = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
    return save_model(tmp_path_factory.mktemp("t5"), T5ForConditionalGeneration, **shape, **others)


@pytest.fixture(scope="session")
def gpt2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Hugging Face directory of a small random GPT-2 without dropout."""
    shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    path = tmp_path_factory.mktemp("gpt2")
    return save_model(path, GPT2LMHeadModel, bos_token_id=1, eos_token_id=1, **rates, **shape)


@pytest.fixture(scope="session")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of `tiny` with dropout, which it lacks, of T5 and GPT-2 by script."""
    path = tmp_path_factory.mktemp("dropout")
    classes = {"T5_training": T5ForConditionalGeneration, "gpt2_fsdp": GPT2LMHeadModel}
    directories = {}
    for script, model_class in classes.items():
        config = importlib.import_module(script).TINY_CONFIG
        rates = {name: 0.1 for name in config if name.endswith(("pdrop", "dropout_rate"))}
        assert rates
        directories[script] = save_model(path / script, model_class, **config | rates)
    return directories


@pytest.fixture(scope="session")
def llama_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Hugging Face directory of a small random Llama with grouped queries, in several
    files."""
    shape = WIDE | {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3}
    path = tmp_path_factory.mktemp("llama")
    save_model(path, LlamaForCausalLM, bos_token_id=None, eos_token_id=1, **shape)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture(scope="session")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a small random Llama in bf16 whose widths are multiples of 64."""
    path = tmp_path_factory.mktemp("wide")
    options = {"bos_token_id": None, "eos_token_id": 1, "dtype": "bfloat16"}
    return save_model(path, LlamaForCausalLM, **options, **WIDE)


def save_rows(tmp_path_factory: pytest.TempPathFactory, name: str, rows: list[dict]) -> Path:
    """Write rows as lines of JSON to a file and return its path."""
    path = tmp_path_factory.mktemp(name) / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 40 pairs with targets of 1 to 29 bytes; about two are held out."""
    rows = [
        {"text": f"text {i}" + " ab cd" * (i % 7), "headline": chr(97 + i % 26) * (1 + 7 * i % 29)}
        for i in range(40)
    ]
    return save_rows(tmp_path_factory, "pairs", rows)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return files of training text (35 blocks of 32 bytes, of which the last is short) and
    validation text (5 blocks)."""
    path = tmp_path_factory.mktemp("texts")
    words = ["sum", "root", "cube", "half", "sine"]
    lines = [
        f"The {words[i % 5]} of {i * i} is {i % 7} times {words[i * i % 5]}.\n" for i in range(35)
    ]
    (path / "train.txt").write_text("".join(lines))
    (path / "val.txt").write_text("".join(lines[:5]))
    return path / "train.txt", path / "val.txt"


@pytest.fixture(scope="session")
def block_flags(texts: tuple[Path, Path], dropout: dict[str, Path]) -> list[str]:
    """Return flags to train a GPT-2 with dropout on all of `texts` with gpt2_fsdp.py."""
    return ["--dataset", str(texts[0]), "--val-dataset", str(texts[1]), "--block-size", "32",
            "--num-train-samples", "0", "--num-val-samples", "0", "--log-every", "1",
            "--model-name", str(dropout["gpt2_fsdp"])]  # fmt: skip


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 70 chats of two or four turns, some of which are truncated to 64 tokens."""
    rows = []
    for i in range(70):
        turns = [("user", f"{i}?"), ("assistant", chr(97 + i % 26) * (1 + 11 * i % 23))]
        turns = [*turns, ("user", "so?"), ("assistant", "!")] if i % 5 == 0 else turns
        rows.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    return save_rows(tmp_path_factory, "chats", rows)
