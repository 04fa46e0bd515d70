"""A run: OUTPUT_DIR, its lock and status, its log, saves, exports and end."""

import contextlib
import inspect
import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import set_seed

from . import checkpoints, export, identity, ranks, screen, watchdog, weights
from .batches import Batch
from .checkpoints import Saver
from .lock import Lock
from .metrics import Metrics, product_weights
from .state import TrainState
from .steps import Step, Steps
from .stops import STOPPED, Stopped, StopRequest, kill_forked

Loaders = dict[str, DataLoader]  # of the validation sets, by name


class Run:
    """A context that owns OUTPUT_DIR during a script's run. All ranks call its methods together.

    Entering it finds the `checkpoint` to resume (None: a new run). Training calls `describe`,
    `restore` and `begin`, iterates over `steps`, and calls `export`. Leaving it writes the file
    status: finished, failed, or stopped on request, after a save, with `exit_code` 75. Before the
    end of the first step and after the last save, a request ends the process at once. An OSError,
    and a ValueError before training, become a message and exit code 1.
    """

    def __init__(self, args: Namespace, device: torch.device, script: str) -> None:
        self.args = args
        self.device = device
        self.script = script
        self.directory = Path(args.output_dir)
        self.exit_code = 0
        self.results: dict[str, float] = {}  # logged at the end of the run
        self.checkpoint: Path | None = None
        self.stop = StopRequest(self._end_at_once)
        self.lock = Lock(self.directory)
        self.state: TrainState | None = None  # set by `restore`
        self.metrics: Metrics | None = None  # set by `begin`
        self.saver: Saver | None = None  # set by `begin`
        self._identity: dict[str, Any] | None = None  # set by `describe`
        self._is_finished = False  # by an earlier start
        self._stack = contextlib.ExitStack()  # closed at the end of the run

    def __enter__(self) -> "Run":
        args = self.args
        try:
            self._stack.enter_context(self.stop)
            self._stack.enter_context(self.lock)
            identity.compare_ranks(identity.of_flags(args))
            if not args.evaluate_only:
                self._is_finished = ranks.on_rank_zero(prepare_directory, self.directory)
            # Evaluation uses --model-name and, with --lora-rank, the newest adapters.
            if not args.evaluate_only or getattr(args, "lora_rank", 0):
                self.checkpoint = checkpoints.find_newest(self.directory)
        except (OSError, ValueError) as error:
            self._stack.close()
            ranks.exit_with(error)
        name = f"stacks-rank-{dist.get_rank()}.txt"
        watchdog.start(self.directory / name, args.timeout_minutes * 20)  # a third of the time-out
        self._stack.callback(watchdog.stop)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        with self._stack:
            try:
                if isinstance(error, Stopped):
                    self._end_stopped()
                elif error is not None:
                    raise error
                else:
                    self._end_finished()
            except BaseException as failure:
                self._fail(failure)
                raise
        return True

    def _end_finished(self) -> None:
        self.stop.set_nothing_to_lose(False)  # from here on, ignore requests
        if self.saver is not None:
            self.saver.finish()
            best = {"best_loss": self.state.best_loss, "best_step": self.state.best_step}
            self.metrics.log("done", **best, **self.results)
            self._write_status("finished")

    def _end_stopped(self) -> None:
        self._save()
        self.saver.finish()
        self._write_status("stopped")
        self.exit_code = STOPPED
        ranks.report_end(f"Saved at step {self.state.step}. Run the same command to resume.")
        dist.barrier(group=ranks.cpu_group())  # a launcher may end all ranks when one exits

    def _fail(self, error: BaseException) -> None:
        """Report a failure. Exit with a message if it is an error that the user can fix."""
        if self.saver is not None:
            self._write_status("failed")
        if isinstance(error, RuntimeError):
            # Another rank may have failed or stopped first. Then torchrun soon stops this rank too,
            # and this traceback would hide the other one.
            if not self.stop.nothing_to_lose:
                ranks.report_failure()
                self.stop.set_nothing_to_lose(True)
            time.sleep(5)
        ranks.report_failure()
        if isinstance(error, OSError) or (self.saver is None and isinstance(error, ValueError)):
            ranks.exit_with(error)

    def _end_at_once(self, request: str) -> NoReturn:
        """End this process on request; called from the thread that watches for requests."""
        has_failed = ranks.has_failed()
        if self.lock.lease.is_locked:  # on rank 0
            if not has_failed:
                self._write_status("stopped")
                ranks.report_end(f"{request}: nothing to save. Run the same command to resume.")
            elif self.saver is not None:
                self._write_status("failed")
            self.lock.lease.release()
        watchdog.stop()
        kill_forked()
        os._exit(1 if has_failed else STOPPED)

    def _write_status(self, word: str) -> None:
        """Write `word` and the step of the newest checkpoint to OUTPUT_DIR/status."""
        args = self.args
        is_training = not (args.evaluate_only or args.prepare_only or args.export_only)
        if dist.get_rank() == 0 and is_training:
            paths = checkpoints.list_checkpoints(self.directory / "checkpoints")
            steps = [checkpoints.step_of(x) for x in paths if (x / checkpoints.STATE).exists()]
            with contextlib.suppress(OSError):  # do not hide the reason for the end
                text = f"{word}\nsaved step {max(steps, default=0)}\n"
                (self.directory / "status").write_text(text)

    def describe(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Print a model's size, and store its identity, the shapes that wrapping hides, and the
        tokenizer for best/. Call this before wrapping. Raise ValueError if nodes differ."""
        size = sum(weights.whole_shape(parameter).numel() for parameter in model.parameters())
        trained_size = sum(x.numel() for x in model.parameters() if x.requires_grad)
        ranks.say(f"{self.args.model_name}: {size:,} parameters, {trained_size:,} trained")
        model.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        model.product_weights = product_weights(model)
        self._tokenizer = tokenizer
        model_identity = identity.of_model(self.args, self.script, model, tokenizer)
        self._identity = identity.compare_ranks(model_identity)

    def restore(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, scaler: Any,
        loader: DataLoader, val_loaders: Loaders, **others: Any,
    ) -> None:  # fmt: skip
        """Register the state to save, load the checkpoint if there is one, and seed dropout.

        `others` are other objects with state, such as `ema=...`: tensors and numbers in their
        `state_dict` are saved. DTensors are sharded, and plain tensors belong to each rank. Raise
        ValueError if the ranks' data differ or a different run saved the checkpoint.
        """
        args = self.args
        if self._identity is None:
            raise RuntimeError("Call run.describe(model, tokenizer) before wrapping the model.")
        try:
            inspect.signature(type(optimizer).step).bind(optimizer, closure=None)
        except TypeError:
            text = f"{type(optimizer).__name__}.step needs an argument closure=None"
            raise RuntimeError(f"{text}, which PyTorch passes when a run resumes.") from None
        values = self._identity | identity.of_data(args, loader, val_loaders)
        values["optimizer"] = type(optimizer).__name__.removeprefix("Paged")  # its state is AdamW's
        values["run.restore's further arguments"] = sorted(others)
        total = args.max_steps or args.epochs * loader.batch_sampler.steps_per_epoch
        objects = (model, optimizer, scheduler, scaler)
        self.state = TrainState(*objects, self.device, total, values, others)
        self._loader = loader
        set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
        if self.checkpoint:
            checkpoints.load_checkpoint(self.checkpoint, self.state, args)

    def begin(self) -> bool:
        """Start saving and logging; return False if no steps are left."""
        if self.state is None:
            raise RuntimeError("Call run.restore(...) before run.begin().")
        args, state, total = self.args, self.state, self.state.total_steps
        # Without its checkpoints a finished run would start over, and replace its exports.
        if state.step > total or (self._is_finished and state.step in (0, total)):
            advice = "To train longer, raise --max-steps or --epochs. This needs its checkpoints."
            ranks.say(f"{self.directory} is finished at {total} steps. {advice}")
            return False
        if self.checkpoint is not None:
            ranks.say(f"Resuming at step {state.step} of {total} from {self.checkpoint.name}")
        self.saver = Saver(args, self.directory, state, saved_step=state.step)
        self._write_status("running")
        self.metrics = Metrics(args, self.directory, self.script, state)
        self._stack.callback(self.metrics.close)
        self.metrics.log_start(self._loader)
        return True

    @property
    def needs_validation(self) -> bool:
        """True if a validation is due before the next step: the first, or an interrupted one."""
        self._check_begun()
        return self.state.step == 0 or self.state.validation_due

    def steps(self, loader: DataLoader) -> Iterator[Step]:
        """Yield a Step per optimizer step left. All raise Stopped if a rank was asked to stop."""
        self._check_begun()
        return iter(Steps(self.args, self.state, loader, self.metrics, self.stop))

    def _check_begun(self) -> None:
        if self.metrics is None:
            raise RuntimeError("Call run.begin() after run.restore(...). Train if it returns True.")

    def progress(self, loader: DataLoader, text: str) -> Iterator[Batch]:
        """Yield the batches of a validation loader, with a progress bar. Raise Stopped on all ranks
        if one was asked to stop; a resume repeats the validation."""
        for batch in screen.progress(loader, text):
            self._stop_if_asked()
            yield batch

    def _stop_if_asked(self) -> None:
        watchdog.touch()
        if ranks.true_on_any(self.stop.is_asked):
            self.state.validation_due = True
            raise Stopped

    def log_step(self, **values: Any) -> None:
        """Log the `values` of the last step, and the speed since the last call."""
        self.metrics.log("train", **values, **self.metrics.speed())

    def log_validation(self, results: dict[str, Any]) -> None:
        """Export best/ if the validation's `loss` is the lowest so far, then log `results`. Raise
        Stopped on all ranks if one was asked to stop before the export is complete."""
        state = self.state
        is_best = state.step > 0 and results["loss"] < state.best_loss
        if is_best and self._export_best():
            state.best_loss, state.best_step = results["loss"], state.step
        state.validation_due = False
        self.metrics.log("val", **results)

    def _export_best(self) -> bool:
        """With --save-best, export best/. Return False if that fails and best/ is unchanged."""
        if self.args.save_best:
            try:
                self._export(self.state.model, self._tokenizer, self.directory / "best")
            except OSError as error:
                ranks.say(f"best/ could not be written ({error}).")
                return False
        return True

    def save(self) -> None:
        """Save a checkpoint. After the last step, wait until it is complete."""
        self._save()
        if self.state.step == self.state.total_steps:
            self.saver.finish()
            self.stop.set_nothing_to_lose(True)

    def _save(self) -> None:
        self.lock.check()
        start = time.perf_counter()
        if self.saver.save():
            self._write_status("running")  # with the step, in case this process is killed
            self.metrics.log("save", seconds=time.perf_counter() - start)
        watchdog.touch()

    def export(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Write final/ after the last step."""
        self._export(model, tokenizer, self.directory / "final")

    def _export(self, model: nn.Module, tokenizer: Tokenizer, path: Path) -> None:
        self.lock.check()
        adapters = getattr(weights.unwrapped(model), "adapters", None)
        write = adapters.export if adapters else export.export_model
        write(model, tokenizer, path, self.args, self._stop_if_asked)

    def export_checkpoint(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Write final/ from the newest checkpoint, which any world size may have saved."""
        if self.checkpoint is None:
            raise ValueError(f"--export-only needs a checkpoint in --output-dir {self.directory}.")
        saved = json.loads((self.checkpoint / checkpoints.STATE).read_text())
        identity.compare(self.checkpoint, saved["identity"], self._identity)
        checkpoints.load_weights(self.checkpoint, model)
        self.export(model, tokenizer)

    def load_evaluated(self, model: nn.Module) -> None:
        """With --lora-rank, load the newest adapters; raise ValueError if there are none."""
        if self.checkpoint:
            checkpoints.load_weights(self.checkpoint, model)
        elif getattr(self.args, "lora_rank", 0):
            raise ValueError(f"--evaluate-only needs adapters in --output-dir {self.directory}.")
        ranks.say(f"Evaluating {self.checkpoint or self.args.model_name}")

    def write_evaluation(self, results: dict[str, Any]) -> None:
        """Print `results`, and write them with the arguments to evaluation.json."""
        path = self.directory / "evaluation.json"
        text = json.dumps(results | {"arguments": vars(self.args)}, indent=1)
        ranks.on_rank_zero(path.write_text, text)
        ranks.say(f"{json.dumps(results, indent=1)}\nThe results are in {path}")


def prepare_directory(directory: Path) -> bool:
    """Delete unfinished exports; return whether the directory's run is finished; rank 0 only. Raise
    ValueError if there are exports but no run, or best/ or final/ links to other files."""
    status = directory / "status"
    names = {path.name for path in directory.glob("*")}
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
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's, which names the rank
        code = 1
    sys.stdout.flush()
    os._exit(code)
