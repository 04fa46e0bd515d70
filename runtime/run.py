"""A run: who holds its directory, what it says and logs, when it saves, and how it ends."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase as Tokenizer

from . import (
    adapters,
    arguments,
    checkpoints,
    free_space,
    hf_weights,
    identities,
    output,
    profiling,
    ranks,
    tokens,
)
from .checkpoints import SaveError, Saver, TrainState
from .events import last_start
from .optimization import HostCopy, StepCheck
from .stops import Stopped, StopRequest, kill_forked
from .trackers import Trackers
from .watchdog import Watchdog

STOPPED = 75  # exit code of a run that stopped on request, and goes on when it is started again
PEAK_TFLOPS = {  # of a GPU whose name has this, in bf16, dense, as NVIDIA's data sheets have it
    "H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835,
    "A100": 312, "H100": 989, "H200": 989, "L40S": 362,
}  # fmt: skip
SHORT = {"grad_norm": "norm", "tokens_per_second": "tokens/s", "mfu": "MFU"}  # on the screen
UNSAID = {"tokens_per_second_per_rank", "assumed_peak_tflops"}


def peak_memory(device: torch.device) -> dict[str, float]:
    """This process's peak in 10^6 bytes: allocated and reserved on a GPU, or RSS (on Linux)."""
    if device.type == "cpu":
        return {"peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3}
    return {
        "peak_memory_mb": torch.accelerator.max_memory_allocated() / 1e6,
        "peak_reserved_mb": torch.accelerator.max_memory_reserved() / 1e6,
    }


def speed(state: TrainState, tokens: int, seconds: float) -> dict[str, float]:
    """Tokens per second, of all ranks and of one.

    Where the model's FLOPs are known, on GPUs: TFLOP/s of one, and the share of its peak (MFU).
    """
    per_rank = tokens / seconds / dist.get_world_size()
    values = {"tokens_per_second": tokens / seconds, "tokens_per_second_per_rank": per_rank}
    if state.device.type != "cpu" and state.flops_per_token:
        values["tflops_per_gpu"] = per_rank * state.flops_per_token / 1e12
        peak = peak_tflops(ranks.device_name(state.device))
        if peak:
            values["mfu"] = values["tflops_per_gpu"] / peak
            values["assumed_peak_tflops"] = peak
    return values


def peak_tflops(device_name: str) -> int | None:
    """Of a GPU in bf16; None if it is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def export_model(model: nn.Module, tokenizer: Tokenizer, path: Path, args: Namespace) -> None:
    """Write a wrapped model, or its adapters, as a Hugging Face directory."""
    export = hf_weights.export_model
    if adapters.has_adapters(model):
        export = adapters.export
    with _told(path):
        export(model, tokenizer, path, args)


def copy_export(source: Path, path: Path) -> None:
    """Write the same directory once more, without a second copy of its weights."""
    with _told(path):
        hf_weights.copy_export(source, path)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """An error in writing `path` is told as one of a save."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{path} could not be written, is the disk full? ({error})") from None


class Run:
    """Owns OUTPUT_DIR while it is entered: lock, status, metrics, saves, and how the run ends.

    Entering finds the checkpoint to go on from (`checkpoint`; None: from the start). `begin` starts
    the training. Leaving waits for the last save and writes how it went into the file status:

    - finished;
    - stopped, with `exit_code` 75, if `exchange` or `progress` raised Stopped: then a checkpoint is
      saved first. Until the first step is done, and from the last save on, a request to stop ends
      the process at once, with the same word and exit code;
    - failed, after an error. An OSError or ValueError before `begin`, and a SaveError, are the
      user's: they become one sentence and exit code 1.

    With --evaluate-only `load_evaluated` and `write_evaluation` take the place of `begin`, and what
    a training has left stays as it is.

    All ranks call a method together.
    """

    def __init__(self, args: Namespace, device: torch.device, script: str) -> None:
        self.args = args
        self.device = device
        self.script = script
        self.directory = Path(args.output_dir)
        self.exit_code = 0
        self.checkpoint: Path | None = None
        self._status = ""  # that an earlier start left
        self.state: TrainState | None = None  # once the training has begun
        self.stop = StopRequest(self._end_at_once)
        self._lock = output.Lock(self.directory)
        self._watchdog = Watchdog(args.stall_minutes)
        self._stack = ExitStack()
        self._counts: HostCopy | None = None  # of the step under way: targets, tokens, who stops
        self._unchecked: list[StepCheck] = []
        self._stops = False  # so the ranks agreed
        self._epoch_samples = 0
        self._seconds = 0.0  # of the steps since the last speed
        self._tokens = 0  # at the last speed
        self._steps_done = 0  # by this process

    def __enter__(self) -> "Run":
        try:
            self._stack.enter_context(self.stop)
            self._stack.enter_context(self._lock)
            self._open_output()
        except (OSError, ValueError) as error:
            ranks.tell_failure()
            self._stack.close()
            ranks.exit_with(error)
        if self.args.profile:
            profiling.record_memory(self.device)
        self._stack.enter_context(self._watchdog)
        self._watchdog.phase("the load of model and data")
        return self

    def _open_output(self) -> None:
        args = self.args
        identities.check_flags(args)
        if args.evaluate_only:
            self.checkpoint = output.find_evaluated(self.directory, args.resume, args.model_name)
        else:
            found = output.open_output(self.directory, args.resume, self.script)
            self.checkpoint, self._status = found
        finished = self.directory if self._status == "finished" else None
        args.began = ranks.on_rank_zero(identities.began, self.checkpoint, finished)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        with self._stack:  # gives back the lock at last
            if self.args.profile:
                profiling.write_memory(self.directory, error)
            if self.state is None:
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
        """Returns whether all went well; else `error` goes on."""
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
        if self.state is not None:
            self._write_status("failed")
        rank = dist.get_rank()
        text = f"rank {rank} has lost another rank: see that one's error"
        print(text, f"({error})", file=sys.stderr, flush=True)
        if not (may_stop or self.stop.terminated):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(ranks.GRACE_SECONDS)
        os._exit(1)

    def _end_at_once(self, why: str) -> NoReturn:
        """End this process on request, whatever its main thread does."""
        failed = ranks.failure_told()  # then torchrun asks, which ends all when it sees one's end
        if dist.get_rank() == 0 and self._lock.is_held():
            if not failed:
                print(f"{why}: the same command goes on", flush=True)
                self._write_status("stopped")
            elif self.state is not None:
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
        step, total_steps = self.state.step, self.state.total_steps
        self.say(f"saved at step {step} of {total_steps}: the same command goes on")
        dist.barrier(group=ranks.cpu_group())  # a launcher may end all once one has left

    def begin(self, state: TrainState, loader: DataLoader) -> bool:
        """Start training `state`. Returns False if the run was finished, and no steps are left."""
        if self._status == "finished" and self._is_done(state):
            return False
        if not self.args.ignore_free_space:
            free_space.check(state, self.args)
        self._watchdog.phase(None)
        self.saver = self.new_saver(state)
        self.state = state
        self._write_status("running")
        self._log_start(loader)
        self._tokens = state.tokens
        self._epoch_samples = len(loader.dataset)
        self._show_bar()
        self._stack.callback(self._bar.close)
        self._log_memory("load")
        if self.args.track_memory:
            self._first_forward = state.model.register_forward_hook(self._after_first_forward)
        return True

    def _is_done(self, state: TrainState) -> bool:
        """Say that a finished run has no steps left, if so. Raises ValueError if it has some, but
        no checkpoint to train them from."""
        if self.checkpoint is not None:
            is_done = state.step >= state.total_steps
            if is_done:
                self.say(f"{self.directory} is finished, raise --max-steps or --epochs to train on")
            return is_done
        lost = f"{self.directory} is finished, and its checkpoints are gone"
        start = ranks.on_rank_zero(last_start, self.directory)
        had = start.get("identity", state.identity)
        identities.compare(f"{lost}: it is a run", had, state.identity, self.directory, self.args)
        step = ranks.on_rank_zero(output.saved_step, self.directory)
        if state.total_steps > step:
            raise ValueError(
                f"{lost}: it cannot go on from step {step} to {state.total_steps}; another "
                "--output-dir begins anew"
            )
        self.say(f"{lost}: another --output-dir begins anew")
        return True

    def new_saver(self, state: TrainState) -> Saver:
        """What saves `state` as the arguments say."""
        args = self.args
        group = None
        if args.async_save:
            limit = timedelta(minutes=args.timeout_minutes)
            group = dist.new_group(backend="gloo", timeout=limit)
        full = args.checkpoint_type == "full"
        return Saver(
            self.directory, state, args.keep_checkpoints, full, group, saved_step=state.step
        )

    def _show_bar(self) -> None:
        total, done = self.state.total_steps, self.state.step
        self._bar = tqdm(total=total, initial=done, unit="step", disable=ranks.hide_bar())

    def exchange(self, counts: list[tuple[int, int]]) -> Tensor:
        """The number of target tokens in the step, of all ranks: int64 [], on the device.

        `counts` are the targets and the tokens of each micro-batch of this rank. Call it where a
        step begins: it raises Stopped, on all ranks, if one was asked to stop before the last step.
        """
        if self._stops:
            self.check_steps()
            raise Stopped
        targets, tokens = (sum(column) for column in zip(*counts, strict=True))
        asked = int(self.stop.begin_step())
        on_host = torch.tensor([targets, tokens, asked], pin_memory=self.device.type != "cpu")
        sums = on_host.to(self.device, non_blocking=True)
        dist.all_reduce(sums)
        self._counts = HostCopy(sums)
        return sums[0]

    def check_later(
        self, state: TrainState, samples: list[int], loss: Tensor, grad_norm: Tensor
    ) -> None:
        """Have the step under way checked once the next one is, or before something that is due:
        the host does not wait for the device. `samples` are of all ranks, `loss` of this one."""
        self._unchecked.append(StepCheck(state, samples, self._counts, loss, grad_norm))

    def check_steps(self, waiting: int = 0) -> None:
        """Check all steps but the last few, which are `waiting`; the run ends if one was bad."""
        while len(self._unchecked) > waiting:
            self._unchecked.pop(0).check()

    def progress(self, loader: DataLoader, text: str) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of a validation, with a progress bar. All ranks have the same number of them.

        Raises Stopped, on all ranks, if one was asked to stop: the validation is made when the run
        goes on.
        """
        for batch in ranks.progress(loader, text):
            if ranks.true_on_any(self.stop.begin_step()):
                self.state.validation_due = True
                raise Stopped
            yield batch
            self.stop.end_step()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around an optimizer step, and the reading of its micro-batches."""
        start = time.perf_counter()
        number = self.state.step + 1
        self._watchdog.phase(f"step {number}")
        profile = contextlib.nullcontext()
        if number == self.args.profile:
            profile = profiling.trace(self.directory, number)
        with profile:
            yield
            _, tokens, stops = self._counts.read()  # when the device has begun the step
            self.state.tokens += tokens
            self._stops = stops > 0
            self.check_steps(waiting=0 if self._is_read_at_once() else 1)
        self._watchdog.phase(None)
        self.stop.end_step()
        self._seconds += time.perf_counter() - start
        self._bar.update()
        if self._steps_done == 0:
            dist.barrier(group=ranks.cpu_group())  # or one might save when another ends at once
            self.stop.set_nothing_to_lose(False)
            self._log_memory("first step")
        self._steps_done += 1

    def _is_read_at_once(self) -> bool:
        """Whether the host needs to know how the last step went before the next one begins."""
        args = self.args
        is_due = any(map(self.due, (args.log_every, args.eval_every, args.save_every)))
        return is_due or self._steps_done == 0 or self.state.scaler.is_enabled()

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps (0: never) is due after this one. All
        is at the end of an epoch and of the run."""
        state = self.state
        if state.step == state.total_steps or state.consumed == self._epoch_samples:
            return True
        return every > 0 and state.step % every == 0

    def say(self, text: str) -> None:
        """Print a line, on rank 0, above the progress bar."""
        if dist.get_rank() == 0:
            tqdm.write(text)

    def log(self, event: str, **values: Any) -> None:
        """Append an event to metrics.jsonl, and print its numbers; rank 0 does it."""
        state = self.state
        if dist.get_rank() != 0:
            return
        line = {"event": event, "step": state.step, "epoch": state.epoch, **values}
        try:
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk is no reason to end
            self.say(f"metrics.jsonl could not be written ({error.strerror})")
        words = []
        for key, value in values.items():
            if type(value) is float and key not in UNSAID:
                words.append(f"{SHORT.get(key, key)} {value:.4g}")
        if words:
            self.say("  ".join([f"{event:5} step {state.step}/{state.total_steps}", *words]))
        if event != "start":  # whose values they have as the run's configuration
            self._trackers.log(event, state.step, values)
        if event == "train":
            self._bar.set_postfix(loss=f"{values['loss']:.3g}")

    def speed(self) -> dict[str, float]:
        """Tokens so far, the `speed` since the last call, and peak memory if it is tracked."""
        state = self.state
        values = speed(state, state.tokens - self._tokens, self._seconds)
        self._tokens = state.tokens
        self._seconds = 0.0
        return {"tokens": state.tokens} | values | self._memory()

    def save(self) -> None:
        """Save a checkpoint that a run can continue from. After the last step it is complete."""
        self._save()
        if self.state.step == self.state.total_steps:
            self.saver.wait()
            if not self.saver.failures:
                self.stop.set_nothing_to_lose(True)

    def _save(self) -> None:
        start = time.perf_counter()
        self._watchdog.phase(f"the save after step {self.state.step}")
        if self.saver.save():
            self.log("save", seconds=time.perf_counter() - start)
        self._watchdog.phase(None)

    def log_validation(self, metrics: dict[str, Any]) -> None:
        """Log a validation, and save the weights if its `loss` is the lowest so far, unless nothing
        is trained yet."""
        self.log("val", **metrics)
        self.state.validation_due = False
        if self.state.step and metrics["loss"] < self.state.best_loss:
            self.saver.save_best(metrics["loss"])

    def export(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write final/ and, with the weights of the best step, best/. The model has those then.

        Returns what the event "done" says of them.
        """
        state = self.state
        final, best = self.directory / "final", self.directory / "best"
        export_model(state.model, tokenizer, final, self.args)
        # 0: no validation followed on a checkpoint taken from elsewhere.
        if state.best_step in (0, state.step):
            copy_export(final, best)
        else:
            checkpoints.load_weights(checkpoints.best_path(self.directory, state), state.model)
            export_model(state.model, tokenizer, best, self.args)
        self.say(f"last model: {final}, of lowest validation loss: {best}")
        return {"best_loss": state.best_loss, "best_step": state.best_step} | self._memory()

    def export_checkpoint(
        self, model: nn.Module, tokenizer: Tokenizer, identity: dict[str, Any]
    ) -> None:
        """Write final/ from the newest checkpoint, at any world size."""
        if self.checkpoint is None:
            raise ValueError(f"--export-only finds no checkpoint in {self.directory}")
        self._load_checkpoint(model, identity)
        export_model(model, tokenizer, self.directory / "final", self.args)
        self.say(f"{self.checkpoint.name} is written to {self.directory / 'final'}")

    def load_evaluated(
        self, model: nn.Module, identity: dict[str, Any], val_loaders: dict[str, DataLoader]
    ) -> None:
        """Give the model the weights that --evaluate-only means, if they are a checkpoint's; raises
        ValueError if not all ranks have the same data."""
        identities.of_data(self.args, None, val_loaders)
        if self.checkpoint:
            self._load_checkpoint(model, identity)
        self._watchdog.phase(None)
        self.say(f"evaluating {self.checkpoint or self.args.model_name}, without training")

    def _load_checkpoint(self, model: nn.Module, identity: dict[str, Any]) -> None:
        identities.check(self.checkpoint, identity, self.args)
        checkpoints.load_weights(self.checkpoint, model)

    def write_evaluation(
        self,
        loaders: dict[str, DataLoader],
        results: dict[str, Any],
        triples: list[tuple[str, str, str]] | None = None,
    ) -> None:
        """Print what `validation` and the like found, and write it to evaluation.json.

        `loaders` are those of the data sets, by name. `triples`, of source, reference and generated
        text, go to predictions.jsonl.
        """
        found = {
            "evaluated": str(self.checkpoint or self.args.model_name),
            "step": self.checkpoint and checkpoints.step_of(self.checkpoint),
            **results,
            "samples": {name: len(loader.dataset) for name, loader in loaders.items()},
            "script": self.script,
            "world_size": dist.get_world_size(),
            "arguments": arguments.without_training(self.args),
        }
        ranks.on_rank_zero(output.write_evaluation, self.directory, found, triples)
        for name, loss in results["losses"].items():
            self.say(f"{name}: loss {loss:.6g} of {found['samples'][name]:,} samples")
        numbers = [f"{key} {value:.6g}" for key, value in results.items() if key != "losses"]
        self.say("  ".join([*numbers, f"in {self.directory / 'evaluation.json'}"]))

    def write_prepared(
        self, loader: DataLoader, val_loaders: dict[str, DataLoader], tokenizer: Tokenizer
    ) -> None:
        """Write the samples to OUTPUT_DIR/prepared, a data set that needs no tokenizer."""
        if len(val_loaders) > 1:
            raise ValueError("--prepare-only writes one validation set: give one --dataset, or "
                             "one --val-dataset")  # fmt: skip
        sets = (loader.dataset.dataset, *(other.dataset.dataset for other in val_loaders.values()))
        path = self.directory / tokens.PREPARED
        made_from = {"script": self.script, "arguments": vars(self.args)}
        ranks.on_rank_zero(tokens.save, path, *sets, tokenizer, made_from)
        self.say(f"the tokens are in {path}: --dataset {path}")

    def _memory(self) -> dict[str, float]:
        if self.args.track_memory:
            return peak_memory(self.device)
        return {}

    def _log_memory(self, phase: str) -> None:
        """With --track-memory log the peak of a phase; on a GPU the next one counts anew."""
        if self.args.track_memory:
            self.log("memory", phase=phase, **peak_memory(self.device))
            if self.device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats()

    def _after_first_forward(self, *_: object) -> None:
        if torch.is_grad_enabled():  # not in validation
            self._first_forward.remove()
            self._log_memory("first forward")

    def _write_status(self, word: str) -> None:
        is_training = not (self.args.evaluate_only or self.args.prepare_only)
        if dist.get_rank() != 0 or not is_training:  # the status is that of a training
            return
        try:
            began = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
            output.write_status(self.directory, word, began)
        except OSError as error:
            self.say(f"status could not become {word} ({error.strerror})")

    def _log_start(self, loader: DataLoader) -> None:
        """Cut metrics.jsonl to the restored step, and say what this run is."""
        load_memory = ranks.on_every_rank(peak_memory, self.device)
        if dist.get_rank() != 0:
            return
        args = self.args
        state = self.state
        output.truncate_metrics(self.directory, state.step, without_val=state.validation_due)
        trackers = Trackers(args, self.directory, self.script, state.step)
        self._trackers = self._stack.enter_context(trackers)
        device = ranks.device_name(self.device)
        git = subprocess.run(
            "git rev-parse HEAD",
            shell=True,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
        self.log(
            "start",
            script=self.script,
            world_size=dist.get_world_size(),
            device=device,
            torch=torch.__version__,
            transformers=transformers.__version__,
            git=git.stdout.strip() or None,
            identity=state.identity,
            load_memory=load_memory,
            directory=str(Path.cwd()),
            arguments=vars(args),
        )
        how = args.strategy
        if args.fsdp == 2:
            how += " (FSDP2)"
        how += f", {args.precision}"
        if hasattr(args, "attention_kernel"):
            how += f", attention {args.attention_kernel}"
        self.say(f"{dist.get_world_size()} x {device}, {how}")
        self.say(
            f"{len(loader.dataset):,} training samples, {state.identity['global batch']:,} in a "
            f"step (global batch): {loader.batch_sampler.steps_per_epoch:,} steps in an epoch, "
            f"{state.total_steps:,} in all"
        )


def launch(main: Callable[[Namespace], int], args: Namespace) -> None:
    """Run a script's main function, and leave with its exit code, or 1 after an uncaught exception.

    Python's own exit can hang or abort: NCCL's communicators are aborted there while other ranks
    may be gone, and under FSDP gloo's threads outlive their group.
    """
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's, which names the rank
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
