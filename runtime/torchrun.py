"""torchrun, whose exit code says whether to start it again: what a pod or a node of a cloud runs.

    python -m runtime.torchrun --nnodes 2 --nproc-per-node 8 ... llama_fsdp.py --output-dir DIR

Torchrun's own code is 1 after every end but a good one. This is

- 0: the script has finished, now or in an earlier start of the same job (the variable JOB_ID);
- 75: start it again, on all nodes: a request to stop, or a process or another node that is lost;
- 1: do not, because the script failed, or two starts in a row have not saved a step.
"""

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from .stops import STOPPED


class Start(NamedTuple):
    """The status in OUTPUT_DIR, as this job's last start left it."""

    word: str = ""
    saved_nothing: bool = False
    written: int = 0


def last_start(directory: str) -> Start:
    """Read the status; of another job it says nothing."""
    path = Path(directory, "status")
    with contextlib.suppress(FileNotFoundError, ValueError):  # torn, or not yet there
        word, job, began, saved = path.read_text().splitlines()
        if job == f"job {os.environ.get('JOB_ID')}.0":
            is_same = began.split()[-1] == saved.split()[-1]
            return Start(word, is_same, path.stat().st_mtime_ns)
    return Start()


nodes_waiting = DynamicRendezvousHandler.num_nodes_waiting


def end_if_replaced(handler: DynamicRendezvousHandler) -> int:
    """End this torchrun if another node waits: it has come for one that is lost, perhaps unnoticed.

    Torchrun itself meets it in a new round, and both can wait there for ever.
    """
    if nodes_waiting(handler):
        raise RendezvousError("a new node has come in place of one that is lost")
    return 0


def run_node(words: list[str]) -> int:
    """Run torchrun; return 0, STOPPED or 1."""
    DynamicRendezvousHandler.num_nodes_waiting = end_if_replaced
    try:
        run.main(words)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        codes = [failure.exitcode for failure in error.failures.values()]
        return STOPPED if all(code == STOPPED or code < 0 for code in codes) else 1  # < 0: a signal
    except ValueError:  # in torchrun's own flags
        raise
    except Exception as error:  # SIGTERM, or the torchrun of another node has gone or not come
        print(f"torchrun has ended: {error!r}", file=sys.stderr)
        return STOPPED
    return 0


def main(words: list[str]) -> int:
    """Run torchrun with these words; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # process 1 would ignore it
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output-dir", default="output")
    directory = parser.parse_known_args(words)[0].output_dir
    before = last_start(directory)
    if before.word == "finished":
        print(f"this job has finished {directory}")
        return 0
    code = run_node(words)
    after = last_start(directory)
    began_anew = after.written > before.written  # else it has not come as far as to train
    if code == STOPPED and began_anew and before.saved_nothing and after.saved_nothing:
        print("no step was saved in two starts in a row: the job is not started again")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
