"""A run: OUTPUT_DIR with its lock and status, its log, saves, exports and end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import SoftFileLease, Timeout
from torch import nn
from torch.utils.data import DataLoader

from . import checkpoints, export, ranks, readers, screen, weights
from .batches import Batch
from .checkpoints import Saver
from .metrics import Metrics
from .state import Facts, State
from .steps import Step, Steps, Stopped, StopRequest, signal_at_end_of_parent

STOPPED = 75  # exit code of a run that stopped on request: the same command resumes it
Loaders = dict[str, DataLoader]  # of the validation sets, by name


class Output:
    """A context that owns OUTPUT_DIR during a script's run. All ranks call its methods together.

    Entering it finds the `checkpoint` to resume (None: a new run). `restore` returns the Run that
    trains. Leaving it writes the file status: finished, failed, or stopped on request, after a
    save, with `exit_code` 75. An OSError, and a ValueError before training, become a message and
    exit code 1.
    """

    def __init__(self, args: Namespace, device: torch.device, script: str) -> None:
        self.args = args
        self.device = device
        self.script = script
        self.directory = Path(args.output_dir)
        self.exit_code = 0
        self.results: dict[str, float] = {}  # logged at the end of the run
        self.checkpoint: Path | None = None
        self.lock = Lock(self.directory)
        self.run: Run | None = None  # while it trains
        self._is_finished = False  # by an earlier start
        self._stack = contextlib.ExitStack()  # closed at the end

    def __enter__(self) -> "Output":
        args = self.args
        try:
            self._stack.enter_context(self.lock)
            if not all(ranks.on_every_rank((self.directory / "lock").exists)):
                text = "is not on a file system that all nodes share. Pass a shared directory."
                raise ValueError(f"--output-dir {self.directory} {text}")
            checkpoints.compare_ranks(checkpoints.flags_identity(vars(args)))
            if not args.evaluate_only:
                self._is_finished = ranks.on_rank_zero(prepare_directory, self.directory)
            # Evaluation uses --model-name and, with adapters, the newest ones.
            if not args.evaluate_only or vars(args).get("lora_rank"):
                self.checkpoint = checkpoints.find_newest(self.directory)
        except (OSError, ValueError) as error:
            self._stack.close()
            if isinstance(error, OSError):
                error = f"--output-dir {self.directory} cannot be used ({error}). Pass another one."
            ranks.exit_with(error)
        name = f"stacks-rank-{dist.get_rank()}.txt"
        seconds = args.timeout_minutes * 20  # a third of the time-out
        self._stack.enter_context(screen.watchdog(self.directory / name, seconds))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        with self._stack:
            try:
                if isinstance(error, Stopped):
                    self.run.end_stopped()
                    self.exit_code = STOPPED
                elif error is not None:
                    raise error
                elif self.run is not None:
                    self.run.end_finished(self.results)
            except BaseException as failure:
                self._fail(failure)
                raise
        return True

    def _fail(self, error: BaseException) -> None:
        """Report a failure. Exit with a message if it is an error that the user can fix."""
        is_training = self.run is not None
        if is_training:
            self.run.stop.forget()
            self.write_status("failed")
        ranks.report_failure()
        if isinstance(error, RuntimeError):
            # Another rank may have failed first. Then torchrun soon stops this rank too, and this
            # traceback would hide the other one.
            time.sleep(5)
        if isinstance(error, OSError) or (isinstance(error, ValueError) and not is_training):
            ranks.exit_with(error)

    def write_status(self, word: str) -> None:
        """Write `word` and the step of the newest checkpoint to OUTPUT_DIR/status."""
        if dist.get_rank() != 0:
            return
        paths = checkpoints.list_checkpoints(self.directory / "checkpoints").items()
        steps = [step for step, path in paths if (path / checkpoints.STATE).exists()]
        with contextlib.suppress(OSError):  # do not hide the reason for the end
            text = f"{word}\nsaved step {max(steps, default=0)}\n"
            (self.directory / "status").write_text(text)

    def describe(self, model: nn.Module, facts: Facts) -> None:
        """Print a model's size, before it is loaded. Raise ValueError if nodes differ."""
        size, trained = facts.size, facts.trained_size
        ranks.say(f"{self.args.model_name}: {size:,} parameters, {trained:,} trained")
        self._identity(model, facts)

    def _identity(self, model: nn.Module, facts: Facts) -> dict[str, Any]:
        config = weights.unwrapped(model).config
        values = checkpoints.model_identity(self.script, config, facts)
        return checkpoints.compare_ranks(values)

    def restore(
        self, state: State, loader: DataLoader, val_loaders: Loaders, check: Callable[[], None]
    ) -> "Run | None":
        """Load the checkpoint, if there is one, into `state`, seed dropout, and call `check`, which
        may reject the model. Return the run, or None if no steps are left.

        Raise ValueError if the ranks' data differ or a different run saved the checkpoint.
        """
        args, facts = self.args, state.facts
        values = self._identity(state.model, facts)
        values |= checkpoints.data_identity(args, loader, val_loaders)
        values["optimizer"] = type(state.optimizer).__name__.removeprefix("Paged")  # same state
        values["others in State"] = sorted(state.others)
        rows = weights.unwrapped(state.model).config.get_text_config().vocab_size
        for dataset in (loader.dataset, *(x.dataset for x in val_loaders.values())):
            readers.check_embedded(dataset, rows, facts.tokenizer)
        ranks.set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
        if self.checkpoint:
            checkpoints.load_checkpoint(self.checkpoint, state, values, args.seed)
        check()
        total = state.total_steps
        # Without its checkpoints a finished run would start over, and replace its exports.
        if state.step > total or (self._is_finished and (state.step == 0 or state.is_last_step)):
            advice = "To train longer, raise --max-steps or --epochs. This needs its checkpoints."
            ranks.say(
                f"{self.directory} is finished at {min(state.step or total, total)} steps. {advice}"
            )
            return None
        if self.checkpoint:
            ranks.say(f"Resuming at step {state.step} of {total} from {self.checkpoint.name}")
        self.write_status("running")
        self.run = Run(self, state, loader, values)
        self._stack.callback(self.run.metrics.close)
        return self.run

    def progress(self, loader: DataLoader, text: str) -> Iterator[Batch]:
        """Yield the batches of a validation loader, with a progress bar. Before every eighth, raise
        Stopped on all ranks if one was asked to stop; a resume repeats the validation."""
        for number, batch in enumerate(screen.progress(loader, text)):
            if number % 8 == 0:
                self._stop_if_asked()
            screen.touch()
            yield batch

    def _stop_if_asked(self) -> None:
        """Raise Stopped on all ranks if one was asked to stop during a validation or export."""
        screen.touch()
        if self.run is not None and ranks.true_on_any(self.run.stop.is_asked):
            self.run.state.validation_due = True
            raise Stopped

    def export(self, model: nn.Module, facts: Facts, name: str = "final") -> None:
        """Write the model, or its adapters, to OUTPUT_DIR/final."""
        self.lock.check()
        write = facts.adapters.export if facts.adapters else export.export_model
        dtype = export.EXPORT_DTYPES[self.args.export_dtype]
        write(model, facts.tokenizer, self.directory / name, dtype, self._stop_if_asked)

    def export_checkpoint(self, model: nn.Module, facts: Facts) -> None:
        """Write final/ from the newest checkpoint, which any world size may have saved."""
        if self.checkpoint is None:
            raise ValueError(f"--export-only needs a checkpoint in --output-dir {self.directory}.")
        self._load_weights(model, facts)
        self.export(model, facts)

    def _load_weights(self, model: nn.Module, facts: Facts) -> None:
        """Load the checkpoint's weights. Raise ValueError if they belong to another model."""
        saved = json.loads((self.checkpoint / checkpoints.STATE).read_text())
        here = self._identity(model, facts)
        checkpoints.compare_starts(self.checkpoint, saved["identity"], here)
        checkpoints.load_weights(self.checkpoint, model)

    def load_evaluated(self, model: nn.Module, facts: Facts) -> None:
        """If there are adapters, load the newest ones; raise ValueError if none were saved."""
        if self.checkpoint:
            self._load_weights(model, facts)
        elif facts.adapters:
            raise ValueError(f"--evaluate-only needs adapters in --output-dir {self.directory}.")
        ranks.say(f"Evaluating {self.checkpoint or self.args.model_name}")

    def write_evaluation(self, results: dict[str, Any]) -> None:
        """Print `results`, and write them with the arguments to evaluation.json."""
        path = self.directory / "evaluation.json"
        text = json.dumps(results | {"arguments": vars(self.args)}, indent=1)
        ranks.on_rank_zero(path.write_text, text)
        ranks.say(f"{json.dumps(results, indent=1)}\nThe results are in {path}")


class Run:
    """The training of `state` until its last step. All ranks call its methods together."""

    def __init__(
        self, output: Output, state: State, loader: DataLoader, identity: dict[str, Any]
    ) -> None:
        self.output = output
        self.args = output.args
        self.state = state
        self.stop = StopRequest()
        self.saver = Saver(self.args, output.directory, state, identity, state.step)
        self.metrics = Metrics(self.args, output.directory, output.script, state, loader)

    @property
    def needs_validation(self) -> bool:
        """True if a validation is due before the next step: the first, or an interrupted one."""
        return self.state.step == 0 or self.state.validation_due

    def steps(self, loader: DataLoader) -> Iterator[Step]:
        """Yield a Step per optimizer step left. All raise Stopped if a rank was asked to stop."""
        return iter(Steps(self.args, self.state, loader, self.metrics, self.stop))

    def log_step(self, **values: Any) -> None:
        """Log the `values` of the last step; the speed and mean loss since the last call."""
        self.metrics.log("train", **values, **self.metrics.speed())

    def end_early(self) -> None:
        """Make this step the last one: it is saved, and final/ is exported."""
        self.state.ended_of = self.state.total_steps

    def log_validation(self, results: dict[str, Any], best_by: str = "loss") -> None:
        """Export best/ if the number `best_by` in `results` is the lowest so far, then log them.
        Raise Stopped on all ranks if one was asked to stop before the export is complete."""
        state = self.state
        is_best = state.step > 0 and results[best_by] < state.best_loss
        if is_best and self._export_best():
            state.best_loss, state.best_step = results[best_by], state.step
        state.validation_due = False
        self.metrics.log("val", **results)

    def _export_best(self) -> bool:
        """With --save-best, export best/. Return False if that fails and best/ is unchanged."""
        if self.args.save_best:
            try:
                self.output.export(self.state.model, self.state.facts, "best")
            except OSError as error:
                ranks.say(f"best/ could not be written ({error}).")
                return False
        return True

    def save(self) -> None:
        """Save a checkpoint. After the last step, wait until it is complete."""
        self._save()
        if self.state.is_last_step:
            self.saver.finish()
            self.stop.end_process()

    def _save(self) -> None:
        self.output.lock.check()
        start = time.perf_counter()
        if self.saver.save():
            self.output.write_status("running")  # with the step, in case this process is killed
            self.metrics.log("save", seconds=time.perf_counter() - start)
        screen.touch()

    def end_finished(self, results: dict[str, float]) -> None:
        """Log the end of the run, with `results`."""
        self.saver.finish()
        state = self.state
        self.metrics.log("done", best_loss=state.best_loss, best_step=state.best_step, **results)
        self.output.write_status("finished")

    def end_stopped(self) -> None:
        """Save the last step of a run that was asked to stop."""
        self._save()
        self.saver.finish()
        self.output.write_status("stopped")
        ranks.report_end(f"Saved at step {self.state.step}. Run the same command to resume.")
        dist.barrier(group=ranks.cpu_group())  # a launcher may end all ranks when one exits


class Lock:
    """A context in which rank 0 holds OUTPUT_DIR/lock for all ranks. Entering it raises ValueError
    if another run holds the lock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "lock"
        self.lease = SoftFileLease(path, on_compromise=self._end, thread_local=False)

    def __enter__(self) -> None:
        ranks.on_rank_zero(self._acquire)

    def __exit__(self, *_: object) -> None:
        self.lease.release()

    def _acquire(self) -> None:
        if self.directory.is_file():
            raise ValueError(f"--output-dir {self.directory} is a file. Pass a directory.")
        self.directory.mkdir(parents=True, exist_ok=True)
        seconds, owner = 1.0, self.lease.owner
        who = f"another run (none? Delete {self.lease.lock_file})"
        if owner:
            who = f"process {owner.pid} on {owner.hostname}"
        # In a container, filelock appends the process namespace to the host name.
        host, namespace = socket.gethostname(), Path("/proc/self/ns/pid").stat().st_ino
        if owner and owner.hostname not in (host, f"{host}?pidns-{namespace:x}"):
            seconds = 35.0  # a lease without a heartbeat expires after 30 s
            ranks.say(f"{self.directory} is in use by {who}. Waiting 35 s in case it was killed.")
        try:
            self.lease.acquire(timeout=seconds)  # at once if its holder died on this host
        except Timeout:
            text = f"--output-dir {self.directory} is in use by {who}. Pass another one."
            raise ValueError(text) from None

    def check(self) -> None:
        """End this process if another run has taken over the lock, for example while this one was
        suspended. Call this before saving."""
        if self.lease.is_locked and not self.lease.is_lock_held_by_us:  # is_locked: only on rank 0
            time.sleep(1)  # a read may fail once on a network file system
            if not self.lease.is_lock_held_by_us:
                self._end()

    def _end(self, _: Any = None) -> None:
        text = f"error: Another run has taken over --output-dir {self.directory}. This one ends."
        print(text, file=sys.stderr, flush=True)
        os._exit(STOPPED)


def prepare_directory(directory: Path) -> bool:
    """Delete unfinished exports; return whether the directory's run is finished; rank 0 only. Raise
    ValueError if there are exports but no run, or best/ or final/ links to other files."""
    status = directory / "status"
    # Links to no files yet are there before the run.
    names = {x.name for x in directory.glob("*") if not x.is_symlink() or any(x.glob("*"))}
    if names & {"final", "best"} and not names & {"status", "checkpoints"}:
        raise ValueError(f"{directory} has final/ or best/ but no run. Pass another --output-dir.")
    for path in (directory / "best", directory / "final"):
        target = path.resolve()
        is_export = (target / "tokenizer_config.json").exists()
        if path.is_symlink() and any(target.glob("*")) and not is_export:
            raise ValueError(f"{path} is a link to {target}, which has other files. Empty it.")
        for unfinished in target.parent.glob(f"tmp-{target.name}-{19 * '[0-9]'}"):
            shutil.rmtree(unfinished, ignore_errors=True)
    return status.exists() and status.read_text(errors="replace").startswith("finished")


def launch(main: Callable[[Namespace], int], args: Namespace) -> None:
    """Run a script's main function, and exit with its exit code, or 1 after an uncaught exception.

    Use os._exit, because Python's own exit can hang or abort in threads of NCCL and gloo.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_at_end_of_parent(signal.SIGUSR1)  # if torchrun is killed
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):  # of sys.exit("message")
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        ranks.clear_bars()
        sys.excepthook(*sys.exc_info())  # torch's, which names the rank
        code = 1
    with contextlib.suppress(OSError, AttributeError):  # stdout may be full or closed
        sys.stdout.flush()
    os._exit(code)
