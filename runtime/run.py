"""A run: who holds its directory, what it says and logs, when it saves, and how it ends."""

import contextlib
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from . import adapters, checkpoints, free_space, hf_weights, ranks
from .checkpoints import SaveError, Saver, TrainState
from .trackers import Trackers
from .watchdog import Watchdog

STOPPED = 75  # exit code of a run that stopped on request, and goes on when it is started again
LOCK_SECONDS = 60  # without a heartbeat until a lock counts as left behind
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "L40S": 362}  # of a GPU in bf16, dense
SHORT = {"grad_norm": "norm", "tokens_per_second": "tokens/s", "mfu": "MFU"}  # on the screen
UNSAID = {"tokens_per_second_per_rank", "assumed_peak_tflops"}
PARENT = os.getppid()  # torchrun, if there is one
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


class Stopped(Exception):
    """A rank was asked to stop. Raised on all ranks, before anything of the step is done."""


class StopRequest:
    """While entered, knows whether this process was asked to stop: by SIGTERM, SIGINT or SIGUSR1,
    or by the end of its torchrun, which leaves its workers running when it is killed.

    Python runs a signal's handler between bytecodes, so not in a rank that waits in a collective
    for another that is gone. A thread that reads the wakeup descriptor can: after SIGTERM in a step
    it sets an alarm that ends the process, unless the step ends before.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False
        self.terminated = False
        self.in_step = False
        self.lock = threading.Lock()  # of `in_step` and the alarm, which belong together
        self.slowest = 0.0  # seconds of a step
        self.began = time.monotonic()

    def __enter__(self) -> "StopRequest":
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.before = [signal.signal(number, self._ignore) for number in self.SIGNALS]
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        for number, handler in zip(self.SIGNALS, self.before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self.writer)

    @staticmethod
    def _ignore(*_: object) -> None:
        """The thread sees the signal."""

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if not self.asked and int(os.environ.get("RANK", 0)) == 0:
                name = signal.Signals(number[0]).name
                tqdm.write(f"{name}: stopping where the next step would begin")
            self.asked = True
            if number[0] == signal.SIGTERM:
                self.terminated = True
            with self.lock:
                self._set_alarm()
        os.close(reader)

    def _set_alarm(self) -> None:
        seconds = 0
        if self.terminated and self.in_step:
            seconds = math.ceil(5 + 2 * self.slowest)
        signal.alarm(seconds)

    def begin_step(self) -> bool:
        """Whether this rank was asked to stop."""
        with self.lock:
            self.in_step = True
            self.began = time.monotonic()
            self._set_alarm()
        torchrun_is_gone = UNDER_TORCHRUN and os.getppid() != PARENT
        return self.asked or torchrun_is_gone

    def end_step(self) -> None:
        """The step is over: a save, a validation or an export may take its time."""
        with self.lock:
            self.in_step = False
            self.slowest = max(self.slowest, time.monotonic() - self.began)
            self._set_alarm()


def pid_namespace() -> str:
    """What tells a machine since its start, and on it a container, in which a pid is one process.

    Containers may have one host name, and each a process of the same number.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class Lock:
    """OUTPUT_DIR/lock, held while entered by rank 0 for all, so that no other run writes there.

    The lock of a run that is gone is taken over: of a dead process of this host, of the same job
    (a restart), or one without a heartbeat while this start waited, for at most LOCK_SECONDS.
    Entering raises ValueError if another run holds it, OSError if nothing can be written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "lock"
        self.new_beat = directory / "lock-beat"
        self.left = threading.Event()
        self.job = os.environ.get("SLURM_JOB_ID")  # not torchrun's run id, often the same
        self.mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pids": pid_namespace(),
            "job": self.job,
        }

    def __enter__(self) -> "Lock":
        ranks.on_rank_zero(self._acquire)
        if dist.get_rank() == 0:
            self.heart = threading.Thread(target=self._beat, daemon=True)
            self.heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        if dist.get_rank() != 0:
            return
        self.left.set()
        self.heart.join()
        if self._is_mine():
            self.path.unlink()
            self.new_beat.unlink(missing_ok=True)

    def _text(self) -> str:
        return json.dumps(self.mine | {"heartbeat": time.time()})

    def _holder(self) -> tuple[dict[str, Any], tuple[str, int]]:
        """Who holds the lock, and the file's text and time, which change with each heartbeat."""
        text = self.path.read_text()
        holder = {}
        with contextlib.suppress(ValueError):  # torn
            holder = json.loads(text)
        return holder, (text, self.path.stat().st_mtime_ns)

    def _is_gone(self, holder: dict[str, Any]) -> bool:
        pids = holder.get("pids", self.mine["pids"])
        if (holder.get("host"), pids) != (self.mine["host"], self.mine["pids"]):
            return self.job is not None and holder.get("job") == self.job
        return holder["pid"] == self.mine["pid"] or not Path(f"/proc/{holder['pid']}").exists()

    def _acquire(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + LOCK_SECONDS
        first_seen = None
        while not self._create():
            with contextlib.suppress(FileNotFoundError):  # given back meanwhile
                holder, seen = self._holder()
                too_late = time.monotonic() > deadline
                who = f"process {holder.get('pid')} on {holder.get('host')}"
                if self._is_gone(holder) or (too_late and seen == first_seen):
                    self.path.unlink()
                elif too_late:
                    raise ValueError(f"--output-dir {self.directory} is in use by {who}")
                elif first_seen is None:
                    print(f"waiting for {who}, which uses {self.directory}", flush=True)
                    first_seen = seen
            time.sleep(0.2)

    def _create(self) -> bool:
        """Whether the lock was free, and is taken now."""
        try:
            with self.path.open("x") as file:
                try:
                    file.write(self._text())
                    file.flush()
                except OSError:
                    self.path.unlink()
                    raise
        except FileExistsError:
            return False
        return True

    def _is_mine(self) -> bool:
        with contextlib.suppress(OSError):
            holder, _ = self._holder()
            return holder.items() >= self.mine.items()
        return False

    def _beat(self) -> None:
        while not self.left.wait(LOCK_SECONDS / 6):
            if not self._is_mine():
                continue
            try:
                self.new_beat.write_text(self._text())
                self.new_beat.replace(self.path)
            except OSError:  # a full disk
                with contextlib.suppress(OSError):
                    os.utime(self.path)


def open_output(directory: Path, resume: str, script: str) -> tuple[Path | None, str]:
    """Clear what an interrupted save left in the output directory; all ranks.

    Returns the checkpoint that --resume means (auto: the newest whole one) and the last status.
    Damaged ones are set aside. Raises ValueError, on all ranks, where going on would mix two runs
    or lose one, OSError where nothing can be written.
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
                _set_aside(path, error)

    def any_damaged() -> bool:
        return any(directory.glob("checkpoints/damaged-*"))

    if candidates or ranks.on_rank_zero(any_damaged):
        raise ValueError(f"no checkpoint in {directory} is whole: give another --output-dir")
    return None, status


def _prepare_directory(directory: Path, resume: str, script: str) -> tuple[list[Path], str]:
    """Check whose directory it is and clear it; rank 0 alone. Returns the checkpoints that may be
    meant, the best guess first, and the last status."""
    status = directory / "status"
    if not status.exists() and ((directory / "final").exists() or (directory / "best").exists()):
        raise ValueError(f"--output-dir {directory} holds a final/ or best/ of something else")
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    status.open("a").close()
    with (directory / "metrics.jsonl").open("a+") as file:
        file.seek(0)
        owner = script
        with contextlib.suppress(ValueError):  # torn, or not yet there
            owner = json.loads(file.readline()).get("script", script)
    if owner != script:
        raise ValueError(f"--output-dir {directory} holds a run of {owner}, not of {script}")
    rubbish = [directory / "tmp-final", directory / "tmp-best"]
    for path in (*rubbish, *directory.glob("checkpoints/tmp-*")):
        shutil.rmtree(path, ignore_errors=True)
    found = sorted(directory.glob("checkpoints/step-*"), reverse=True)
    return _choose_checkpoints(directory, resume, found), status.read_text().strip()


def _choose_checkpoints(directory: Path, resume: str, found: list[Path]) -> list[Path]:
    """Those that --resume may mean, of the ones `found` in `directory`, the newest first."""
    newest = found[0] if found else None
    if resume == "none" and newest:
        raise ValueError(f"--resume none would start over {newest}: give another --output-dir")
    if resume in ("auto", "none"):
        return found
    path = Path(resume).resolve()
    elsewhere = newest and path.parent != newest.parent.resolve()
    if elsewhere or (newest and path.name < newest.name and _last_resume(directory) == resume):
        print(f"{directory} has begun with --resume {resume} and goes on at {newest.name}")
        return found
    if not (path.name.startswith("step-") and path.is_dir()):
        raise ValueError(f"--resume {resume} is not a checkpoint, a directory step-N")
    if newest and path.name < newest.name:
        raise ValueError(f"--resume {resume} would go back behind {newest}: delete that first")
    return [path]


def _last_resume(directory: Path) -> str | None:
    """What --resume the last start of a run in `directory` had: a requeued job has the same."""
    last = None
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError):  # torn, or another event
            last = json.loads(line)["arguments"]["resume"]
    return last


def _check_visible(path: Path) -> None:
    if not path.is_dir():
        raise OSError(f"rank {dist.get_rank()} does not see {path}: do all nodes share it?")


def _set_aside(path: Path, error: ValueError) -> None:
    aside = path.with_name(f"damaged-{path.name}")
    print(f"{error}: it is set aside as {aside.name}, and the one before is used")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines after `step` (0: all lines), and torn ones; rank 0 alone."""
    kept = []
    if step and path.exists():
        for line in path.read_text().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                if line.endswith("\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
    temporary = path.with_name("metrics.tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


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
        name = ranks.device_name(state.device)
        for part, peak in PEAK_TFLOPS.items():
            if part in name:
                values["mfu"] = values["tflops_per_gpu"] / peak
                values["assumed_peak_tflops"] = peak
    return values


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, path: Path, args: Namespace
) -> None:
    """Write a wrapped model, or its adapters, as a Hugging Face directory."""
    if adapters.has_adapters(model):
        adapters.export(model, tokenizer, path, args)
    else:
        hf_weights.export_model(model, tokenizer, path, args)


class Run:
    """Owns OUTPUT_DIR while it is entered: lock, status, metrics, saves, and how the run ends.

    Entering finds the checkpoint to go on from (`checkpoint`; None: from the start). `begin` starts
    the training. Leaving waits for the last save and writes how it went into the file status:

    - finished;
    - stopped, with `exit_code` 75, if `exchange` raised Stopped: then a checkpoint is saved first;
    - failed, after an error. An OSError or ValueError before `begin`, and a SaveError, are the
      user's: they become one sentence and exit code 1.

    All ranks call a method together.
    """

    def __init__(self, args: Namespace, device: torch.device, script: str) -> None:
        self.args = args
        self.device = device
        self.script = script
        self.directory = Path(args.output_dir)
        self.exit_code = 0
        self.checkpoint: Path | None = None
        self.state: TrainState | None = None  # once the training has begun
        self.stop = StopRequest()
        self._watchdog = Watchdog(args.stall_minutes)
        self._stack = ExitStack()
        self._seconds = 0.0  # of the steps since the last speed
        self._tokens = 0  # at the last speed
        self._steps_done = 0  # by this process

    def __enter__(self) -> "Run":
        try:
            self._stack.enter_context(Lock(self.directory))
            self.checkpoint, self._status = open_output(
                self.directory, self.args.resume, self.script
            )
        except (OSError, ValueError) as error:
            self._stack.close()
            ranks.exit_with(error)
        self._stack.enter_context(self._watchdog)
        self._watchdog.phase("the load of model and data")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        with self._stack:  # gives back the lock at last
            if self.state is None:
                self._end_before_training(error)
                return False
            return self._end_training(error)

    def _end_before_training(self, error: BaseException | None) -> None:
        if isinstance(error, OSError | ValueError):
            ranks.exit_with(error)
        if isinstance(error, RuntimeError):
            ranks.exit_if_peer_lost(error)

    def _end_training(self, error: BaseException | None) -> bool:
        """Returns whether all went well; else `error` goes on."""
        if error is not None and not isinstance(error, Stopped):
            self._fail(error)
            return False
        try:
            if error is None:
                self.saver.finish()
                self._write_status("finished")
            else:
                self._end_stopped()
        except BaseException as failure:
            self._fail(failure)
            raise
        return True

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, SystemExit):  # of all ranks: the save under way is still good
            with contextlib.suppress(OSError):
                self.saver.wait()
        self._write_status("failed")
        if isinstance(error, SaveError):
            ranks.exit_with(error)
        if isinstance(error, RuntimeError):
            ranks.exit_if_peer_lost(error)

    def _end_stopped(self) -> None:
        self.stop.end_step()
        self.save()
        self.saver.finish()
        self._write_status("stopped")
        self.exit_code = STOPPED
        step, total_steps = self.state.step, self.state.total_steps
        self.say(f"saved at step {step} of {total_steps}: the same command goes on")
        dist.barrier(group=ranks.cpu_group())  # a launcher may end all once one has left

    def begin(self, state: TrainState, loader: DataLoader) -> bool:
        """Start training `state`. Returns False if the run was finished, and no steps are left."""
        finished = self._status == "finished"
        if finished and state.step >= state.total_steps:
            self.say(f"{self.directory} is finished, raise --max-steps or --epochs to train on")
            return False
        if not self.args.ignore_free_space:
            free_space.check(state, self.args)
        self._watchdog.phase(None)
        self.saver = self.new_saver(state)
        self._stack.enter_context(self.stop)
        self.state = state
        self._write_status("running")
        self._log_start(loader)
        self._tokens = state.tokens
        self._show_bar()
        self._stack.callback(self._bar.close)
        self._log_memory("load")
        if self.args.track_memory:
            self._first_forward = state.model.register_forward_hook(self._after_first_forward)
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

    def exchange(self, counts: list[tuple[int, ...]]) -> list[int]:
        """The sums of each column of `counts`, over its rows and all ranks.

        Call it where a step begins: it raises Stopped, on all ranks, if one was asked to stop.
        """
        columns = zip(*counts, strict=True)
        asked = int(self.stop.begin_step())
        sums = torch.tensor([*map(sum, columns), asked])
        dist.all_reduce(sums, group=ranks.cpu_group())
        *totals, stops = sums.tolist()
        if stops:
            raise Stopped
        return totals

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around an optimizer step, and the reading of its micro-batches."""
        start = time.perf_counter()
        self._watchdog.phase(f"step {self.state.step + 1}")
        yield
        self._watchdog.phase(None)
        self.stop.end_step()
        self._seconds += time.perf_counter() - start
        self._bar.update()
        if self._steps_done == 0:
            self._log_memory("first step")
        self._steps_done += 1

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps (0: never) is due at this one."""
        return every > 0 and self.state.step % every == 0

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
        """Save a checkpoint that a run can continue from."""
        start = time.perf_counter()
        self._watchdog.phase(f"the save after step {self.state.step}")
        if self.saver.save():
            self.log("save", seconds=time.perf_counter() - start)
        self._watchdog.phase(None)

    def save_if_best(self, loss: float) -> None:
        """Save the weights if this validation loss is the lowest so far."""
        if loss < self.state.best_loss:
            self.saver.save_best(loss)

    def export(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Write final/ and, with the weights of the best step, best/. The model has those then.

        Returns what the event "done" says of them.
        """
        state = self.state
        export_model(state.model, tokenizer, self.directory / "final", self.args)
        if state.best_step:  # or no validation followed on a checkpoint taken from elsewhere
            best = checkpoints.best_path(self.directory, state)
            checkpoints.load_weights(best, state.model)
        export_model(state.model, tokenizer, self.directory / "best", self.args)
        self.say(
            f"last model: {self.directory / 'final'}, of lowest validation loss: "
            f"{self.directory / 'best'}"
        )
        return {"best_loss": state.best_loss, "best_step": state.best_step} | self._memory()

    def export_checkpoint(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, identity: dict[str, Any]
    ) -> None:
        """Write final/ from the newest checkpoint, at any world size."""
        if self.checkpoint is None:
            raise ValueError(f"--export-only finds no checkpoint in {self.directory}")
        checkpoints.check_identity(self.checkpoint, identity)
        checkpoints.load_weights(self.checkpoint, model)
        export_model(model, tokenizer, self.directory / "final", self.args)
        self.say(f"{self.checkpoint.name} is written to {self.directory / 'final'}")

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
        if dist.get_rank() != 0:
            return
        try:  # not cut before it is written: the disk may be full
            with (self.directory / "status").open("r+") as file:
                file.write(word + "\n")
                file.truncate()
        except OSError as error:
            self.say(f"status could not become {word} ({error.strerror})")

    def _log_start(self, loader: DataLoader) -> None:
        """Cut metrics.jsonl to the restored step, and say what this run is."""
        load_memory = ranks.on_every_rank(peak_memory, self.device)
        if dist.get_rank() != 0:
            return
        args = self.args
        state = self.state
        truncate_metrics(self.directory / "metrics.jsonl", state.step)
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
            arguments=vars(args),
        )
        how = args.strategy
        if args.fsdp == 2:
            how += " (FSDP2)"
        self.say(f"{dist.get_world_size()} x {device}, {how}, {args.precision}")
        self.say(
            f"{len(loader.dataset):,} training samples, {state.identity['global batch']:,} in a "
            f"step (global batch): {loader.batch_sampler.steps_per_epoch:,} steps in an epoch, "
            f"{state.total_steps:,} in all"
        )


def launch(main: Callable[[Namespace], int], args: Namespace) -> None:
    """Run a script's main function, and leave with its exit code.

    Under FSDP gloo's threads outlive its group, and now and then abort another exit.
    """
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    os._exit(code)
