"""A run as its script sees it: what it begins from, logs, saves and exports."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase as Tokenizer

from . import arguments, checkpoints, export, identities, output, ranks, screen, weights
from .batches import Batch
from .checkpoints import Saver
from .life import Life, launch
from .metrics import Metrics, last_start
from .state import TrainState
from .steps import Step, Steps
from .stops import Stopped

__all__ = ["Run", "launch"]
Loaders = dict[str, DataLoader]  # of the validation sets, by name


class Run(Life):
    """The run in a script's hands; all ranks call a method together.

    A training calls `describe`, `restore` and `begin`, then iterates over `steps`, and `export`s.
    --export-only, --prepare-only and --evaluate-only have a method each.
    """

    state: TrainState  # since `restore`
    metrics: Metrics  # since `begin`
    _identity: dict[str, Any]  # since `describe`

    def describe(self, model: nn.Module) -> None:
        """Print a model's size, and note what it is; call it before wrapping.

        Raises ValueError if the nodes have different ones.
        """
        sizes = [weights.whole_shape(parameter).numel() for parameter in model.parameters()]
        trainable = [x.numel() for x in model.parameters() if x.requires_grad]
        ranks.say(f"{self.args.model_name}: {sum(sizes):,} parameters, {sum(trainable):,} trained")
        self._identity = identities.of_model(self.args, self.script, model)

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
        kind = type(optimizer).__name__.removeprefix("Paged")  # which has AdamW's state
        identity = self._identity | {"optimizer": kind}
        identity |= identities.of_data(args, loader, val_loaders)
        sampler = loader.batch_sampler
        total = args.max_steps or args.epochs * sampler.steps_per_epoch
        self.state = TrainState(
            model, optimizer, scheduler, scaler, self.device, total, identity, others
        )
        ranks.set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
        self._loader = loader
        if self.checkpoint:
            checkpoints.load_checkpoint(self.checkpoint, self.state, args)

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
        self.metrics.log_start(self._loader, self.began_from)
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
        identities.compare(f"{lost}: it is a run", had, state.identity, self.directory, self.args)
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

    def log_step(self, **values: Tensor | float) -> None:
        """Log the step that is done, with the speed since the last call."""
        self._lock.check()
        numbers = {name: float(value) for name, value in values.items()}
        self.metrics.log("train", **numbers, **self.metrics.speed())

    def log_validation(self, results: dict[str, Any]) -> None:
        """Log a validation, and save the weights if its `loss` is the lowest so far, unless nothing
        is trained yet."""
        self._lock.check()
        self.metrics.log("val", **results)
        self.state.validation_due = False
        if self.state.step and results["loss"] < self.state.best_loss:
            self.saver.save_best(results["loss"])

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
        """Write final/ and, with the weights of the best step, best/; log `results` as the end's.

        The model has the best weights then.
        """
        state = self.state
        final, best = self.directory / "final", self.directory / "best"
        self._export(model, tokenizer, final)
        # 0: no validation followed on a checkpoint taken from elsewhere.
        if state.best_step in (0, state.step):
            with checkpoints.told(best):
                export.copy_export(final, best)
        else:
            checkpoints.load_weights(checkpoints.best_path(self.directory, state), model)
            self._export(model, tokenizer, best)
        ranks.say(f"last model: {final}, of lowest validation loss: {best}")
        ends = {"best_loss": state.best_loss, "best_step": state.best_step}
        self.metrics.log("done", **ends, **self.metrics.memory(), **results)

    def _export(self, model: nn.Module, tokenizer: Tokenizer, path: Any) -> None:
        self._lock.check()
        with checkpoints.told(path):
            adapters = getattr(weights.unwrapped(model), "adapters", None)
            write = adapters.export if adapters else export.export_model
            write(model, tokenizer, path, self.args)

    def export_checkpoint(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        """Write final/ from the newest checkpoint, at any world size."""
        if self.checkpoint is None:
            raise ValueError(f"--export-only finds no checkpoint in {self.directory}")
        self._load_checkpoint(model)
        self._export(model, tokenizer, self.directory / "final")
        ranks.say(f"{self.checkpoint.name} is written to {self.directory / 'final'}")

    def _load_checkpoint(self, model: nn.Module) -> None:
        identities.compare_saved(self.checkpoint, self._identity, self.args)
        checkpoints.load_weights(self.checkpoint, model)

    def load_evaluated(self, model: nn.Module, val_loaders: Loaders) -> None:
        """Give the model the weights that --evaluate-only means, if they are a checkpoint's; raises
        ValueError if not all ranks have the same data."""
        identities.of_data(self.args, None, val_loaders)
        if self.checkpoint:
            self._load_checkpoint(model)
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
        from . import tokens  # a copy may leave it out

        if len(val_sets) > 1:
            raise ValueError(f"--prepare-only writes one validation set, not {len(val_sets)}. Pass "
                             "one --dataset, or one --val-dataset.")  # fmt: skip
        path = self.directory / tokens.PREPARED
        sets = train_set, *val_sets.values()
        ranks.on_rank_zero(tokens.save, path, *sets, tokenizer, self.args)
        ranks.say(f"the tokens are in {path}: --dataset {path}")
