"""OUTPUT_DIR: the files that an earlier start left there, and the file status."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from . import checkpoints
from .metrics import replace_text


def prepare_directory(directory: Path) -> str:
    """Make OUTPUT_DIR, delete unfinished exports, and return the word in status; rank 0 only.

    Raises ValueError if it holds exports of something else.
    """
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    status = read_status(directory)
    exports = [directory / "final", directory / "best"]
    is_ours = status or checkpoints.list_checkpoints(directory / "checkpoints")
    if not is_ours and any(path.exists() for path in exports):
        raise ValueError(f"--output-dir {directory} holds a final/ or best/ of something else.")
    for path in directory.glob("tmp-*"):
        if re.fullmatch(r"tmp-(final|best)-\d+", path.name):
            shutil.rmtree(path, ignore_errors=True)
    word, *_ = [*status.split(), ""]
    return word


def read_status(directory: Path) -> str:
    """Return the text of the file status; "" if there is none."""
    path = directory / "status"
    return path.read_text(errors="replace") if path.exists() else ""


def saved_step(directory: Path) -> int:
    """Return the step of the last save that the file status names; 0 if it names none."""
    found = re.search(r"^saved step (\d+)$", read_status(directory), re.MULTILINE)
    return int(found[1]) if found else 0


def write_status(directory: Path, word: str, first_step: int) -> None:
    """Write the file status; rank 0 only. Raises OSError if it cannot be written.

    It holds the word (running, stopped, finished or failed), the job (Slurm's, or JOB_ID) with the
    number of its restarts, the step at which this start began, and that of the newest checkpoint.
    launch.slurm and torchrun.py read all of it.
    """
    complete = checkpoints.list_checkpoints(directory / "checkpoints")
    complete = [x for x in complete if (x / checkpoints.STATE).is_file()]
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("JOB_ID", "none")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    saved = max([first_step, *map(checkpoints.step_of, complete)])
    text = f"{word}\njob {job}.{restart}\nbegan at step {first_step}\nsaved step {saved}\n"
    path = directory / "status"
    path.touch()
    with path.open("r+") as file:  # not cut first: the disk may be full
        file.write(text)
        file.truncate()


def write_evaluation(
    directory: Path, results: dict[str, Any], triples: list[tuple[str, str, str]] | None
) -> None:
    """Write evaluation.json, and predictions.jsonl if there are `triples`; rank 0 only."""
    if triples is not None:
        lines = []
        for source, reference, generated in triples:
            line = {"source": source, "reference": reference, "generated": generated}
            lines.append(json.dumps(line) + "\n")
        replace_text(directory / "predictions.jsonl", "".join(lines))
    replace_text(directory / "evaluation.json", json.dumps(results, indent=1) + "\n")
