"""Seconds and memory until the first batch of a large data set, for each script's data.

    python benchmarks/large_data.py                     # 5 million rows of Parquet
    python benchmarks/large_data.py --rows 1000000 --scripts llama

Rows are sentences of Python's docstrings, numbered, so that no two are the same. A loader runs in a
process of its own, with an empty cache, and gives one batch; then again, from the cache. Memory is
the peak of that process, with the files that it maps, and of the largest process that tokenises.
Tokens are bytes, made by a Python tokenizer: a fast one takes less time.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa
import pyarrow.parquet as pq
from driven import collate_of

import gpt2_fsdp
import llama_fsdp
import T5_training
from runtime import batches
from runtime.rows import readers

SCRIPTS = {"T5": T5_training, "gpt2": gpt2_fsdp, "llama": llama_fsdp}
CHUNK = 250_000  # rows written together


def write_rows(path: Path, rows: int) -> None:
    """Write columns text and headline, and prompt and completion, of some 60 and 20 bytes."""
    sentences = [row["headline"][:40] for row in readers.docstring_rows()]
    writer = None
    for start in range(0, rows, CHUNK):
        numbers = range(start, min(rows, start + CHUNK))
        texts = [f"{i}: {sentences[i % len(sentences)]}" for i in numbers]
        answers = [sentences[(7 * i + 3) % len(sentences)][:20] for i in numbers]
        columns = {"text": texts, "headline": answers, "prompt": texts, "completion": answers}
        table = pa.table(columns)
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def load(script: str, path: Path) -> dict[str, float]:
    """Measure the first batch in this process: seconds, its peak and that of others, in MB."""
    module = SCRIPTS[script]
    flags = ["--model-name", "tiny", "--dataset", str(path)]
    if script == "gpt2":
        flags = ["--model-name", "tiny", "--train-file", str(path), "--val-file", str(path)]
    args = module.parse_args(flags)
    device = module.setup(args)
    model, tokenizer, _ = module.load_model(args, device)
    collate = collate_of(module, model)
    before = peak(resource.RUSAGE_SELF)
    start = time.perf_counter()
    train_set, _ = module.load_data(args, tokenizer)
    lengths = module.data.source_lengths(args, train_set) if script == "T5" else None
    samples = next(iter(batches.train_sampler(args, train_set, lengths)))
    batch = collate([train_set[i] for i in samples])
    found = {"seconds": time.perf_counter() - start, "before": before}
    found |= {"own": peak(resource.RUSAGE_SELF), "others": peak(resource.RUSAGE_CHILDREN)}
    found |= {"samples": len(train_set), "batch": batch["tokens"]}
    module.cleanup()
    return found


def peak(who: int) -> float:
    """Return the largest resident memory so far, in MB."""
    return resource.getrusage(who).ru_maxrss * 1.024e-3


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_000_000, help="of the Parquet file")
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        script, path = options.worker
        print(json.dumps(load(script, Path(path))))
        return
    print(
        "| script | cache | samples | s | s per million rows | MB, of which by then | others' MB |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows.parquet")
        write_rows(path, options.rows)
        environment = os.environ | {"HF_DATASETS_CACHE": directory, "OMP_NUM_THREADS": "1"}
        for script in options.scripts:
            for cache in ("empty", "full"):
                command = [sys.executable, __file__, "--worker", script, path]
                run = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                )
                found = json.loads(run.stdout.splitlines()[-1])
                each = found["seconds"] / options.rows * 1e6
                print(
                    f"| {script} | {cache} | {found['samples']:,} | {found['seconds']:.0f} | "
                    f"{each:.1f} | {found['own']:,.0f} - {found['before']:,.0f} | "
                    f"{found['others']:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
