"""Test this copy on a CPU: run `pytest test_copy.py` after each change, about a minute.

Two processes with FSDP have the losses of the plain model, a killed run resumes as if it had not
been, and final/ reloads with the same loss.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = "gpt2_fsdp"  # the script to test
FLAGS = {  # those that the script has
    "model_name": "tiny",
    "max_steps": 10,
    "log_every": 1,
    "save_every": 2,
    "eval_every": 0,
    "batch_size": 2,
    "precision": "fp32",
    "rouge_samples": 0,
    "dataset": "docstrings.jsonl",
    "export_dtype": "fp32",
}
FLAGS |= {"num_train_samples": 64, "num_val_samples": 8}  # optional: prepare
FLAGS |= {"block_size": 64, "max_seq_length": 128}  # optional: prepare
FLAGS |= {"source_length": 64, "target_length": 16}  # optional: prepare
FOLDER = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main(kind: str, output: str, flags: list[str]) -> None:
    """Run the script without dropout, so that losses do not depend on the number of processes. If
    `kind` is plain, train the model itself, without FSDP; if it is killed, end by kill -9 after the
    first save."""
    script = importlib.import_module(SCRIPT)
    from core import ranks, weights

    def load(args: Any, device: Any, model: Any, blocks: Any, initial: Any) -> Any:
        return model.apply(weights.Initializer(model, initial, device).fill)

    def save_and_die(*args: Any, **options: Any) -> None:
        save(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    save = script.save
    for name, value in script.MODEL.config_class().to_dict().items():
        if "drop" in name and isinstance(value, float):
            script.TINY_CONFIG[name] = 0.0
    if kind == "plain":
        script.wrap_model = load
    if kind == "killed":
        script.save = save_and_die
    names = []
    for section in vars(script.TINY).values():
        names += vars(section)
    sys.argv[1:] = ["--output-dir", output]
    for name in FLAGS.keys() & set(names):
        sys.argv += [f"--{name.replace('_', '-')}", str(FLAGS[name])]
    sys.argv += flags
    ranks.run(script.fsdp_main, script.parse_args())


def run(processes: int, kind: str, output: Path, *flags: str, fails: bool = False) -> None:
    """Run this file in a number of processes; fail with its output unless it ends as expected."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    result = subprocess.run(
        [sys.executable, *launcher, __file__, kind, str(output), *flags],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=FOLDER,
    )
    assert (result.returncode != 0) == fails, result.stdout + result.stderr


def losses(output: Path, event: str = "train") -> dict[int, float]:
    """Return the losses in metrics.jsonl by step."""
    text = (output / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["event"] == event}


def test_copy_equals_the_plain_model_resumes_and_reloads(tmp_path):
    """Ten steps on two processes, killed and resumed, equal those of the model without FSDP."""
    words = [sys.executable, "tools/docstrings.py", "docstrings.jsonl"]  # optional: prepare
    subprocess.run(words, cwd=FOLDER, check=True)  # optional: prepare
    run(2, "fsdp", tmp_path / "whole")
    expected = losses(tmp_path / "whole")
    assert list(expected) == list(range(1, 11))

    run(1, "plain", tmp_path / "plain", "--batch-size", "4")
    plain = losses(tmp_path / "plain")
    assert all(abs(plain[step] - loss) < 1e-4 for step, loss in expected.items())

    run(2, "killed", tmp_path / "killed", fails=True)
    assert list(losses(tmp_path / "killed")) == [1, 2]
    run(2, "fsdp", tmp_path / "killed")
    assert losses(tmp_path / "killed") == expected

    final = str(tmp_path / "whole/final")
    run(1, "fsdp", tmp_path / "again", "--max-steps", "1", "--model-name", final)
    last = losses(tmp_path / "whole", "val")[10]
    assert abs(losses(tmp_path / "again", "val")[0] - last) < 1e-4


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
