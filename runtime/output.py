"""OUTPUT_DIR: the checkpoints that an earlier start has left there, and its status."""

import json
import os
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import checkpoints, ranks
from .arguments import did_you_mean
from .metrics import last_start, read_events, replace_text


def open_output(directory: Path, resume: str, script: str) -> tuple[Path | None, str]:
    """Clear what an interrupted save left in the output directory; all ranks.

    Returns the checkpoint that --resume means (auto: the newest whole one) and the last status: it
    may be "finished" without a checkpoint. Damaged checkpoints are set aside. Raises ValueError, on
    all ranks, where going on would mix two runs or lose one.
    """
    candidates, status = ranks.on_rank_zero(_prepare_directory, directory, resume, script)
    given = Path(resume).resolve()
    for path in candidates:
        try:
            ranks.on_every_rank(_check_visible, path)
            ranks.on_every_rank(checkpoints.check_files, path)
            return path, status
        except ValueError as error:
            if path == given:
                raise
            if dist.get_rank() == 0:
                _set_aside(path, error, is_last=path == candidates[-1])

    def any_damaged() -> bool:
        return bool(checkpoints.named(directory / "checkpoints", checkpoints.DAMAGED))

    if candidates or ranks.on_rank_zero(any_damaged):
        raise ValueError(f"no checkpoint in {directory} is whole{_what_is_left(directory)}: give "
                         "another --output-dir")  # fmt: skip
    return None, status


def _what_is_left(directory: Path) -> str:
    """Say what can be used of a run whose checkpoints are all damaged."""
    weights = checkpoints.named(directory / "checkpoints", checkpoints.BEST)
    found = [f"; {path.name} has weights alone, from which no run goes on" for path in weights[-1:]]
    if (directory / "best").is_dir():
        found.append(f"; --model-name {directory / 'best'} begins with what it has exported")
    return "".join(found)


def _prepare_directory(directory: Path, resume: str, script: str) -> tuple[list[Path], str]:
    """Check whose directory it is and clear it; rank 0 alone. Returns the checkpoints that may be
    meant, the best guess first, and the last status."""
    exports = [directory / "final", directory / "best"]
    for path in exports:
        if path.is_symlink() or path.is_file():
            raise ValueError(f"{path} is a link or a file, where the run writes a directory: "
                             "move it away, or give another --output-dir")  # fmt: skip
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    found = _find_checkpoints(directory)
    status = _read_status(directory)
    if not (status or found) and any(path.exists() for path in exports):
        raise ValueError(f"--output-dir {directory} holds a final/ or best/ of something else")
    events, others = read_events(directory)
    if others and not (events or status or found):
        path = directory / "metrics.jsonl"
        raise ValueError(f"{path} is of something else: move it, or give another --output-dir")
    owners = [event["script"] for _, event in events if "script" in event]
    if owners and owners[0] != script:
        raise ValueError(f"--output-dir {directory} holds a run of {owners[0]}, not of {script}")
    ours = r"tmp-(shards-)?(step|best)-\d{8,}"
    exporting = checkpoints.named(directory, r"tmp-(final|best)-\d+")
    for path in (*exporting, *checkpoints.named(directory / "checkpoints", ours)):
        shutil.rmtree(path, ignore_errors=True)
    word, *_ = [*status.split(), ""]
    if word == "finished" and not found:
        return [], word
    return _choose_checkpoints(directory, resume, found), word


def _read_status(directory: Path) -> str:
    """Return the text of the file status; "" if there is none. What is unreadable in it is lost."""
    path = directory / "status"
    return path.read_text(errors="replace") if path.exists() else ""


def saved_step(directory: Path) -> int:
    """Return the step of the last save that the file status knows of; 0 if it knows none."""
    found = re.search(r"^saved step (\d+)$", _read_status(directory), re.MULTILINE)
    return int(found[1]) if found else 0


def _find_checkpoints(directory: Path) -> list[Path]:
    """Return the run's own checkpoints, the newest first; rank 0 alone.

    Names those that hold another step than their name says, which are left alone. Raises ValueError
    if there are no others.
    """
    found, misnamed = checkpoints.find(directory / "checkpoints")
    for path in misnamed:
        text = f"{path} {checkpoints.right_name(path, checkpoints.held_step(path))}"
        if not found:
            raise ValueError(f"there is no checkpoint but {text}")
        print(f"left alone: {text}", flush=True)
    for path in found:
        checkpoints.check_format(path)
    return found[::-1]


def _choose_checkpoints(directory: Path, resume: str, found: list[Path]) -> list[Path]:
    """Return those that --resume may mean, of the ones `found` in `directory`, newest first."""
    newest = found[0] if found else None
    if resume == "none" and newest:
        raise ValueError(f"--resume none would start over {newest}: give another --output-dir")
    if resume in ("auto", "none"):
        return found
    path = Path(resume).resolve()
    began = last_start(directory).get("began_from")
    if newest and began == str(path):  # as a requeued job has it again; it may be gone
        print(f"the run in {directory} has begun from --resume {resume}")
        return found
    checkpoint = _given_checkpoint(resume)
    if newest and path.parent != newest.parent.resolve():
        raise ValueError(
            f"--resume {resume} is not where the run in {directory} began, which was "
            f"{began or 'the pretrained weights'}: leave --resume out to go on from {newest.name}, "
            "or give another --output-dir"
        )
    if newest and path.name < newest.name:
        raise ValueError(f"--resume {resume} would go back behind {newest}: delete that first")
    return [checkpoint]


def began_from(directory: Path, resume: str) -> str | None:
    """Return the checkpoint that the run in `directory` began from by --resume, if any."""
    if resume in ("auto", "none"):
        return last_start(directory).get("began_from")
    return str(Path(resume).resolve())


def _given_checkpoint(resume: str) -> Path:
    path = Path(resume).resolve()
    if not (re.fullmatch(checkpoints.STEP, path.name) and path.is_dir()):
        inside = [*checkpoints.find(path)[0], *checkpoints.find(path / "checkpoints")[0]]
        near = did_you_mean(resume, ["auto", "none"])
        if inside:
            near = f" (did you mean {inside[-1]}?)"
        raise ValueError(f"--resume {resume} is not a checkpoint, a directory such as "
                         f"step-00000100{near}")  # fmt: skip
    checkpoints.check_format(path)
    return path


def _check_visible(path: Path) -> None:
    if not path.is_dir():
        raise OSError(f"rank {dist.get_rank()} does not see {path}: do all nodes share it?")


def _set_aside(path: Path, error: ValueError, is_last: bool) -> None:
    aside = path.with_name(f"damaged-{path.name}")
    before = "" if is_last else ", and the one before is used"
    print(f"{error}: it is set aside as {aside.name}{before}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def find_evaluated(directory: Path, args: Namespace) -> Path | None:
    """Return the checkpoint that --evaluate-only means; None: the model itself. All ranks.

    It is that of --resume, else the newest in `directory`, unless that is the run of another
    --model-name: this is refused. Nothing in the directory changes: a damaged checkpoint raises
    ValueError, and stays.
    """
    path = ranks.on_rank_zero(_choose_evaluated, directory, args)
    if path is not None:
        ranks.on_every_rank(_check_visible, path)
        ranks.on_every_rank(checkpoints.check_files, path)
    return path


def _choose_evaluated(directory: Path, args: Namespace) -> Path | None:
    if args.resume == "none":
        return None
    if args.resume != "auto":
        return _given_checkpoint(args.resume)
    newest = next(iter(_find_checkpoints(directory)), None)
    if newest is not None:
        start = last_start(directory)
        here = _resolved(Path.cwd(), args.model_name)
        trained = start["arguments"].get("model_name", args.model_name)
        if _resolved(Path(start.get("directory", "")), trained) != here:
            raise ValueError(
                f"--model-name {args.model_name} is not {trained}, which the run in {directory} "
                "trains: --resume none evaluates it"
            )
    return newest


def _resolved(place: Path, name: str) -> str:
    """Return the name of a model, or the whole path of its directory, given from `place`."""
    path = place / name
    return str(path.resolve()) if path.is_dir() else name


def write_status(directory: Path, word: str, began: int) -> None:
    """Write the file status; rank 0 alone. Raises OSError if it cannot be written.

    It holds the word (running, stopped, finished or failed), the job (Slurm's, or JOB_ID) with the
    number of its restarts, the step that this start `began` at, and that of the newest checkpoint.
    launch.slurm and torchrun.py read all of it.
    """
    found, _ = checkpoints.find(directory / "checkpoints")
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("JOB_ID", "none")
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    saved = max([began, *map(checkpoints.step_of, found)])
    text = f"{word}\njob {job}.{restart}\nbegan at step {began}\nsaved step {saved}\n"
    path = directory / "status"
    path.touch()
    with path.open("r+") as file:  # not cut first: the disk may be full
        file.write(text)
        file.truncate()


def write_evaluation(
    directory: Path, found: dict[str, Any], triples: list[tuple[str, str, str]] | None
) -> None:
    """Write evaluation.json, and predictions.jsonl if there are `triples`; rank 0 alone."""
    if triples is not None:
        lines = []
        for source, reference, generated in triples:
            line = {"source": source, "reference": reference, "generated": generated}
            lines.append(json.dumps(line) + "\n")
        replace_text(directory / "predictions.jsonl", "".join(lines))
    replace_text(directory / "evaluation.json", json.dumps(found, indent=1) + "\n")
