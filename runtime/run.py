"""A run as its script sees it: what it begins from, logs, saves and exports."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase as Tokenizer

from . import arguments, checkpoints, hf_export, identity, models, output, ranks, screen
from .batches import Batch
from .checkpoints import SaveError, Saver
from .life import Life, launch
from .metrics import Metrics, last_start
from .state import TrainState
from .steps import Step, Steps
from .stops import Stopped

__all__ = ["Run", "launch"]
Loaders = dict[str, DataLoader]  # of the validation sets, by name
BEST = "validation.json"  # in best/: the step and the loss of its weights


class Run(Life):
    """The run in a script's hands; all ranks call a method together.

    A training calls `describe`, `restore` and `begin`, then iterates over `steps`, and `export`s.
    --export-only, --prepare-only and --evaluate-only have a method each.
    """

    state: TrainState  # since `restore`
    metrics: Metrics  # since `begin`
    _identity: dict[str, Any] | None = None  # since `describe`
    _tokenizer: Tokenizer  # since `describe`

    def describe(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Print a model's size; note its identity, the shapes that wrapping hides, and the
        tokenizer for best/. Call it before wrapping.

        Raises ValueError if the nodes have different models.
        """
        sizes = [models.whole_shape(parameter).numel() for parameter in model.parameters()]
        trainable = [x.numel() for x in model.parameters() if x.requires_grad]
        ranks.say(f"{self.args.model_name}: {sum(sizes):,} parameters, {sum(trainable):,} trained")
        model.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._tokenizer = tokenizer
        model_identity = identity.of_model(self.args, self.script, model, tokenizer)
        self._identity = identity.compare_ranks(model_identity)

    def restore(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        scaler: Any,
        loader: DataLoader,
        val_loaders: Loaders,
        **others: Any,
    ) -> None:
        """Take all that is trained, as the checkpoint left it if there is one, and seed dropout.

        `others` are whatever else the script trains, such as `ema=...`: each has `state_dict` and
        `load_state_dict`, whose tensors and numbers are saved and restored. DTensors are sharded;
        plain tensors are each rank's own, and want the same number of ranks again.

        Raises ValueError if the ranks have different data, or the checkpoint is of another run.
        """
        args = self.args
        if self._identity is None:
            raise RuntimeError("Call run.describe(model, tokenizer) before wrapping the model.")
        whole = self._identity | identity.of_data(args, loader, val_loaders)
        whole["optimizer"] = type(optimizer).__name__.removeprefix("Paged")  # it has AdamW's state
        whole["run.restore's further arguments"] = sorted(others)
        sampler = loader.batch_sampler
        total = args.max_steps or args.epochs * sampler.steps_per_epoch
        self.state = TrainState(
            model, optimizer, scheduler, scaler, self.device, total, whole, others
        )
        ranks.set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
        self._loader = loader
        if self.checkpoint:
            checkpoints.load_checkpoint(self.checkpoint, self.state, args)
            self._check_best()

    def _check_best(self) -> None:
        """Forget the best step unless best/ holds its weights: a run that resumes from an older
        checkpoint, or that has lost best/, exports again."""
        state = self.state
        if self.args.save_best and ranks.on_rank_zero(self._best_step) != state.best_step:
            state.best_loss, state.best_step = float("inf"), 0

    def _best_step(self) -> int:
        try:
            return json.loads((self.directory / "best" / BEST).read_text())["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def begin(self) -> bool:
        """Begin the training, in status and metrics; return False if no steps are left."""
        args, state = self.args, self.state
        if state.step > state.total_steps:
            raise ValueError(
                f"the run has reached step {state.step}, and --max-steps or --epochs now end it at "
                f"{state.total_steps}: give at least that many, or another --output-dir"
            )
        if self._was_finished and self._is_done():
            return False
        if self.checkpoint is not None:
            ranks.say(
                f"going on at step {state.step} of {state.total_steps}, from {self.checkpoint.name}"
            )
        if not args.ignore_free_space:
            from . import free_space

            free_space.require(state, args)
        self._start_training(self._new_saver())
        self.metrics = self._stack.enter_context(Metrics(args, self.directory, self.script, state))
        self.metrics.log_start(self._loader)
        self.metrics.log_memory("load")
        self.metrics.log_first_forward()
        return True

    def _is_done(self) -> bool:
        """Say that a finished run has no steps left, if so. Raises ValueError if it has some, but
        no checkpoint to train them from."""
        state = self.state
        if self.checkpoint is not None:
            if state.step < state.total_steps:
                return False
            ranks.say(f"{self.directory} is finished, raise --max-steps or --epochs to train on")
            return True
        lost = f"{self.directory} is finished, and its checkpoints are gone"
        start = ranks.on_rank_zero(last_start, self.directory)
        had = start.get("identity", state.identity)
        identity.compare(self.directory, had, state.identity)
        step = ranks.on_rank_zero(output.saved_step, self.directory)
        if state.total_steps > step:
            raise ValueError(
                f"{lost}: it cannot go on from step {step} to {state.total_steps}; another "
                "--output-dir begins anew"
            )
        ranks.say(f"{lost}: another --output-dir begins anew")
        return True

    def _new_saver(self) -> Saver:
        """Return what saves the state as the arguments say."""
        args = self.args
        group = None
        if args.async_save:
            limit = timedelta(minutes=args.timeout_minutes)
            group = dist.new_group(backend="gloo", timeout=limit)
        full = args.checkpoint_type == "full"
        keep, step = args.keep_checkpoints, self.state.step
        return Saver(self.directory, self.state, keep, full, group, saved_step=step)

    @property
    def needs_validation(self) -> bool:
        """True if a validation is due before the next step: of nothing trained, or cut short."""
        return self.state.step == 0 or self.state.validation_due

    def steps(self, loader: DataLoader) -> Iterator[Step]:
        """Yield each step that is left; `with step:` does what must happen around it.

        Raises Stopped, on all ranks, if one was asked to stop.
        """
        return iter(Steps(self.args, self.state, loader, self.metrics, self.stop, self.watchdog))

    def progress(self, loader: DataLoader, text: str) -> Iterator[Batch]:
        """Yield the batches of a validation, as many on all ranks, with a progress bar.

        Raises Stopped, on all ranks, if one was asked to stop: the validation is made when the run
        goes on.
        """
        for batch in screen.progress(loader, text):
            if ranks.true_on_any(self.stop.begin_step()):
                self.state.validation_due = True
                raise Stopped
            yield batch
            self.stop.end_step()

    def log_step(self, **values: float) -> None:
        """Log the step that is done, with the speed since the last call."""
        self._lock.check()
        self.metrics.log("train", **values, **self.metrics.speed())

    def log_validation(self, results: dict[str, Any]) -> None:
        """Log a validation, and export best/ if its `loss` is the lowest so far, unless nothing is
        trained yet.

        Raises Stopped, on all ranks, if one was asked to stop before the export.
        """
        self._lock.check()
        state = self.state
        self.metrics.log("val", **results)
        state.validation_due = False
        if state.step and results["loss"] < state.best_loss:
            if self.args.save_best:
                self._export_best(results["loss"])
            else:
                state.best_loss, state.best_step = results["loss"], state.step

    def _export_best(self, loss: float) -> None:
        state, path = self.state, self.directory / "best"
        if ranks.true_on_any(self.stop.begin_step()):
            state.validation_due = True
            raise Stopped
        self.stop.end_step()
        start = time.perf_counter()
        self.watchdog.phase(f"the export of best/ after step {state.step}")
        try:
            self._export(state.model, self._tokenizer, path)
            text = json.dumps({"step": state.step, "loss": loss})
            ranks.on_rank_zero((path / BEST).write_text, text)
        except OSError as error:
            ranks.say(f"{error} The best weights before stay.")
        else:
            state.best_loss, state.best_step = loss, state.step
            ranks.say(
                f"best/ is of step {state.step}, exported in {time.perf_counter() - start:.1f} s"
            )
        self.watchdog.phase(None)

    def save(self) -> None:
        """Save a checkpoint that a run can continue from. After the last step it is complete."""
        self._save()
        if self.state.step == self.state.total_steps:
            self.saver.wait()
            if not self.saver.failures:
                self.stop.set_nothing_to_lose(True)

    def _save(self) -> bool:
        start = time.perf_counter()
        saved = super()._save()
        if saved:
            self.metrics.log("save", seconds=time.perf_counter() - start)
        return saved

    def export(self, model: nn.Module, tokenizer: Tokenizer, **results: float) -> None:
        """Write final/, as a copy of best/ if that is of the last step; log `results` as the
        end's."""
        state = self.state
        final, best = self.directory / "final", self.directory / "best"
        if self.args.save_best and state.best_step == state.step:
            hf_export.copy_export(best, final)
        else:
            self._export(model, tokenizer, final)
        text = f"Last model: {final}"
        if self.args.save_best:
            text += f", of the lowest validation loss: {best}"
        ranks.say(text)
        ends = {"best_loss": state.best_loss, "best_step": state.best_step}
        self.metrics.log("done", **ends, **self.metrics.memory(), **results)

    def _export(self, model: nn.Module, tokenizer: Tokenizer, path: Path) -> None:
        self._lock.check()
        adapters = getattr(models.unwrapped(model), "adapters", None)
        export = adapters.export if adapters else hf_export.export_model
        try:
            export(model, tokenizer, path, self.args)
        except (OSError, SafetensorError) as error:
            raise SaveError(f"{path} could not be written ({error}). Is the disk full?") from None

    def export_checkpoint(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Write final/ from the newest checkpoint, at any world size."""
        if self.checkpoint is None:
            raise ValueError(f"--export-only finds no checkpoint in {self.directory}")
        saved = json.loads((self.checkpoint / checkpoints.STATE).read_text())
        identity.compare(self.checkpoint, saved["identity"], self._identity)
        checkpoints.load_weights(self.checkpoint, model)
        self._export(model, tokenizer, self.directory / "final")
        ranks.say(f"{self.checkpoint.name} is written to {self.directory / 'final'}")

    def load_evaluated(self, model: nn.Module, val_loaders: Loaders) -> None:
        """Load the newest checkpoint's adapters, with --lora-rank. Raises ValueError if there is
        none, or if nodes have different data."""
        identity.of_data(self.args, None, val_loaders)
        if self.checkpoint:
            checkpoints.load_weights(self.checkpoint, model)
        elif getattr(self.args, "lora_rank", 0):
            raise ValueError(f"--evaluate-only with --lora-rank finds no checkpoint in "
                             f"{self.directory}: pass --output-dir")  # fmt: skip
        self.watchdog.phase(None)
        ranks.say(f"evaluating {self.checkpoint or self.args.model_name}, without training")

    def write_evaluation(
        self,
        loaders: Loaders,
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
            ranks.say(f"{name}: loss {loss:.6g} of {found['samples'][name]:,} samples")
        numbers = [f"{key} {value:.6g}" for key, value in results.items() if key != "losses"]
        ranks.say("  ".join([*numbers, f"in {self.directory / 'evaluation.json'}"]))

    def write_prepared(
        self, train_set: Any, val_sets: dict[str, Any], tokenizer: Tokenizer
    ) -> None:
        """Write the samples to OUTPUT_DIR/prepared, a data set that needs no tokenizer."""
        from .rows import tokens  # a copy may leave it out

        if len(val_sets) > 1:
            raise ValueError("--prepare-only writes one validation set: give one --dataset, or "
                             "one --val-dataset")  # fmt: skip
        sets = [rows.dataset for rows in (train_set, *val_sets.values())]
        path = self.directory / tokens.PREPARED
        made_from = {"script": self.script, "arguments": vars(self.args)}
        ranks.on_rank_zero(tokens.save, path, *sets, tokenizer, made_from)
        ranks.say(f"the tokens are in {path}: --dataset {path}")
