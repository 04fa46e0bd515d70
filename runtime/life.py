"""The life of a run: who holds OUTPUT_DIR, which checkpoint it goes on from, and how it ends."""

import contextlib
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from . import checkpoints, identity, output, ranks
from .checkpoints import SaveError, Saver
from .lock import Lock
from .stops import STOPPED, Stopped, StopRequest, kill_forked
from .watchdog import Watchdog


class Life:
    """Owns OUTPUT_DIR while it is entered.

    Entering finds the checkpoint to go on from (`checkpoint`; None: from the start). Leaving waits
    for the last save and writes how it went into the file status:

    - finished;
    - stopped, with `exit_code` 75, if Stopped was raised: then a checkpoint is saved first. Until
      the first step is done, and from the last save on, a request to stop ends the process at once,
      with the same word and exit code;
    - failed, after an error. An OSError or ValueError before the training begins, and a SaveError,
      are the user's: they become one sentence and exit code 1.

    What --evaluate-only and --prepare-only do leaves the status of a training as it is.
    """

    def __init__(self, args: Namespace, device: torch.device, script: str) -> None:
        self.args = args
        self.device = device
        self.script = script
        self.directory = Path(args.output_dir)
        self.exit_code = 0
        self.checkpoint: Path | None = None
        self.stop = StopRequest(self._end_at_once)
        self.watchdog = Watchdog(args.stall_minutes)
        self.saver: Saver | None = None  # once the training has begun
        self._was_finished = False  # so an earlier start left the run
        self._lock = Lock(self.directory)
        self._stack = ExitStack()  # of what is left with the run

    def __enter__(self) -> "Life":
        try:
            self._stack.enter_context(self.stop)
            self._stack.enter_context(self._lock)
            self._open_output()
        except (OSError, ValueError) as error:
            ranks.tell_failure()
            self._stack.close()
            if isinstance(error, OSError) and error.strerror:
                place = f"--output-dir {self.directory} cannot be used"
                error = f"{place} ({error.strerror}): name a directory to which you can write"
            ranks.exit_with(error)
        if self.args.profile:
            from . import profiling  # a copy may leave it out

            profiling.record_memory(self.device)
        self._stack.enter_context(self.watchdog)
        self.watchdog.phase("the load of model and data")
        return self

    def _open_output(self) -> None:
        args = self.args
        identity.compare_ranks(identity.of_flags(args))
        if not args.evaluate_only:
            status = ranks.on_rank_zero(output.prepare_directory, self.directory)
            self._was_finished = status == "finished"
        # An evaluation reads --model-name, except for adapters, which are beside its weights.
        if not args.evaluate_only or getattr(args, "lora_rank", 0):
            self.checkpoint = checkpoints.find_newest(self.directory)

    def _start_training(self, saver: Saver) -> None:
        """Have `saver` save what a stop would lose; errors are no user's mistakes from now on."""
        self.watchdog.phase(None)
        self.saver = saver
        self._write_status("running")

    def _save(self) -> bool:
        """Save a checkpoint if there is anything new; return whether it went well."""
        self._lock.check()
        self.watchdog.phase(f"the save after step {self.saver.state.step}")
        saved = self.saver.save()
        self.watchdog.phase(None)
        if saved:
            self._write_status("running")  # with the step, should this process be killed
        return saved

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        with self._stack:  # gives back the lock at last
            if self.args.profile:
                from . import profiling

                profiling.write_memory(self.directory, error)
            if self.saver is None:
                self._end_before_training(error)
                return False
            return self._end_training(error)

    def _end_before_training(self, error: BaseException | None) -> None:
        if error is None:
            self.stop.set_nothing_to_lose(False)
            return
        if ranks.peer_is_lost(error):
            self._end_without_peer(error)
        ranks.tell_failure()
        if isinstance(error, OSError | ValueError):
            ranks.exit_with(error)

    def _end_training(self, error: BaseException | None) -> bool:
        """Return whether all went well; else `error` goes on."""
        if error is not None and not isinstance(error, Stopped):
            self._fail(error)
            return False
        try:
            if error is None:
                self.saver.finish()
                self.stop.set_nothing_to_lose(False)
                self._write_status("finished")
            else:
                self._end_stopped()
        except BaseException as failure:
            self._fail(failure)
            raise
        return True

    def _fail(self, error: BaseException) -> None:
        if ranks.peer_is_lost(error):
            self._end_without_peer(error)
        ranks.tell_failure()
        if isinstance(error, SystemExit):  # of all ranks: the save under way is still good
            with contextlib.suppress(OSError):
                self.saver.wait()
        self._write_status("failed")
        if isinstance(error, SaveError):
            ranks.exit_with(error)

    def _end_without_peer(self, error: BaseException) -> NoReturn:
        """End quietly, as another rank is gone: that one's error counts.

        torchrun asks this rank to stop when it sees the other's end. Where there is nothing to
        lose, that one may have stopped on request, and this one does then.
        """
        may_stop = self.stop.nothing_to_lose
        if may_stop:
            time.sleep(ranks.GRACE_SECONDS)
        if self.saver is not None:
            self._write_status("failed")
        rank = dist.get_rank()
        text = f"rank {rank} has lost another rank: see that one's error"
        print(text, f"({error})", file=sys.stderr, flush=True)
        if not (may_stop or self.stop.terminated):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(ranks.GRACE_SECONDS)
        os._exit(1 if ranks.failure_told() else STOPPED)

    def _end_at_once(self, why: str) -> NoReturn:
        """End this process on request, whatever its main thread does."""
        failed = ranks.failure_told()  # then torchrun asks, which ends all when it sees one's end
        if dist.get_rank() == 0 and self._lock.is_held():
            if not failed:
                print(f"{why}: the same command goes on", flush=True)
                self._write_status("stopped")
            elif self.saver is not None:
                self._write_status("failed")
            self._lock.release()
        kill_forked()
        os._exit(1 if failed else STOPPED)

    def _end_stopped(self) -> None:
        self.stop.end_step()
        self._save()
        self.saver.finish()
        self._write_status("stopped")
        self.exit_code = STOPPED
        state = self.saver.state
        text = f"saved at step {state.step:,} of {state.total_steps:,}: the same command goes on"
        ranks.leave_to_torchrun(text)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            text += " (a traceback that follows is torchrun's way to end)"
        ranks.say(text)
        dist.barrier(group=ranks.cpu_group())  # a launcher may end all once one has left

    def _write_status(self, word: str) -> None:
        is_training = not (self.args.evaluate_only or self.args.prepare_only)
        if dist.get_rank() != 0 or not is_training:
            return
        try:
            began = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
            output.write_status(self.directory, word, began)
        except OSError as error:
            ranks.say(f"status could not become {word} ({error.strerror})")


def launch(main: Callable[[Namespace], int], args: Namespace) -> None:
    """Run a script's main function, and leave with its exit code, or 1 after an uncaught exception.

    Python's own exit can hang or abort: NCCL's communicators are aborted there while other ranks
    may be gone, and under FSDP gloo's threads outlive their group.
    """
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # torch's, which names the rank
        code = 1
        if ranks.peer_is_lost(error) or isinstance(
            error, dist.DistNetworkError | dist.DistStoreError
        ):
            code = STOPPED  # as nodes have not met, or one was lost before the run was entered
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
