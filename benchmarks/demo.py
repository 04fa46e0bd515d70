"""Teach a small T5 to read dates in six languages, and compare its answers before and after.

    python benchmarks/demo.py output/demo

The model has random weights and uses bytes as tokens. Its input is a date as people write it, such
as "le 3 mars 1987", and its target is 1987-03-03. It is tested on 300 dates that are not in the
training data. The program prints the commands that it runs. Run it again to resume, or to show the
result.
"""

import json
import os
import random
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import torch
import transformers
import tyro
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = "torchrun --nnodes 1 --nproc_per_node 2"
SHAPE = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
FIRST, DAYS = date(1950, 1, 1), 36525  # a hundred years
HELD_OUT = 300  # days in the test set
MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre "
    "diciembre",
    "it": "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre "
    "dicembre",
    "nl": "januari februari maart april mei juni juli augustus september oktober november december",
}
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
FORMS = (  # language and text
    ("en", "{month} {day}, {year}"),
    ("en", "the {ordinal} of {month} {year}"),
    ("en", "{weekday}, {month} {ordinal}, {year}"),
    ("en", "{short} {day} {year}"),
    ("de", "{day}. {month} {year}"),
    ("fr", "le {day} {month} {year}"),
    ("es", "{day} de {month} de {year}"),
    ("it", "{day} {month} {year}"),
    ("nl", "{day} {month} {year}"),
)


@dataclass
class Args:
    """The flags."""

    directory: Positional[Path]  # output directory
    epochs: int = 7  # passes over the dates
    rows: int = 12_000  # dates to train on


def ordinal(day: int) -> str:
    """Return the day of a month as an ordinal: 1st, 2nd, 3rd, 4th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{'th' if day in (11, 12, 13) else ending}"


def format_date(day: date, language: str, form: str) -> str:
    """Return a date as text, in one of the FORMS and its language."""
    month = MONTHS[language].split()[day.month - 1]
    return form.format(
        day=day.day,
        ordinal=ordinal(day.day),
        month=month,
        short=f"{month[:3]}.",
        year=day.year,
        weekday=WEEKDAYS.split()[day.weekday()],
    )


def make_rows(count: int) -> tuple[list[dict], list[dict]]:
    """Return `count` rows to train on and HELD_OUT to test on, the same each time. All dates
    differ."""
    draw = random.Random(0)
    rows = []
    for number in draw.sample(range(DAYS), HELD_OUT + count):
        day = FIRST + timedelta(days=number)
        rows.append({"text": format_date(day, *draw.choice(FORMS)), "date": day.isoformat()})
    return rows[HELD_OUT:], rows[:HELD_OUT]


def write_inputs(directory: Path, count: int) -> None:
    """Write a T5 with random weights, the same each time, dates.jsonl with `count` rows, and
    held_out.jsonl to the directory."""
    transformers.utils.logging.disable_progress_bar()
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(tokenizer), dropout_rate=0.0, **IDS, **SHAPE)
    T5ForConditionalGeneration(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    for name, rows in zip(("dates", "held_out"), make_rows(count), strict=True):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (directory / f"{name}.jsonl").write_text("".join(lines))


def run(flags: str) -> None:
    """Print a T5_training.py command and run it on two CPU processes; exit if it fails."""
    command = f"{TORCHRUN} T5_training.py {flags}"
    print(f"\n$ {command}", flush=True)
    torchrun = Path(sys.executable).parent / "torchrun"  # even if it is not on the PATH
    words = [str(torchrun), "--standalone", *shlex.split(command)[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = subprocess.run(words, cwd=ROOT, env=environment).returncode
    if code:
        sys.exit(code)


def read_predictions(directory: Path) -> list[dict]:
    """Return the rows of a predictions.jsonl."""
    return list(map(json.loads, (directory / "predictions.jsonl").read_text().splitlines()))


def accuracy(predictions: list[dict]) -> str:
    """Return the percentage of predictions that are exactly right, such as 99%."""
    count = sum(row["generated"] == row["reference"] for row in predictions)
    return f"{100 * count / len(predictions):.0f}%"


def show(directory: Path) -> None:
    """Print the accuracy and three examples before and after training, and plot the loss."""
    before, after = read_predictions(directory / "before"), read_predictions(directory)
    scores = f"{accuracy(before)} correct before training, {accuracy(after)} after"
    print(f"\n{len(after)} unseen dates: {scores}")
    for then, now in zip(before[:3], after[:3], strict=True):
        print(f"  given:  {now['source']}")
        print(f"  before: {then['generated'] or '(nothing)'}")
        print(f"  after:  {now['generated']}")
    words = [sys.executable, str(Path(__file__).with_name("plot_runs.py")), str(directory)]
    words += ["--panels", "loss", "lr", "--picture", str(directory / "losses.png")]
    words += ["--title", f"make demo: {accuracy(after)} of {len(after)} unseen dates are correct"]
    sys.exit(subprocess.run(words).returncode)


def main() -> None:
    """Run the steps of the demo that are not done yet, and show the result."""
    args = tyro.cli(Args, description=__doc__)
    directory = args.directory.resolve()
    if directory.is_relative_to(ROOT):
        directory = directory.relative_to(ROOT)  # for commands that can be typed again
    os.chdir(ROOT)
    data = (
        f"--dataset {directory}/dates.jsonl --val-dataset {directory}/held_out.jsonl "
        "--source-column text --target-column date --source-prefix '' "
        "--target-length 16 --batch-size 64"
    )
    if not (directory / "model").is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        write_inputs(directory, args.rows)
    commands = {  # by what they write
        "before/predictions.jsonl": f"--model-name {directory}/model {data} --evaluate-only "
        f"--output-dir {directory}/before",
        "final": f"--model-name {directory}/model {data} --epochs {args.epochs} --lr 3e-3 "
        "--warmup-ratio 0.1 --no-group-by-length --log-every 47 --save-every 94 "
        f"--output-dir {directory}",
        "predictions.jsonl": f"--model-name {directory}/final {data} --evaluate-only "
        f"--output-dir {directory}",
    }
    for name, flags in commands.items():
        if not (directory / name).exists():
            run(flags)
    show(directory)


if __name__ == "__main__":
    main()
