"""Fine-tune T5 to summarize articles with PyTorch FSDP.

    python tools/docstrings.py docstrings.jsonl  # data
    python T5_training.py --model-name tiny --dataset docstrings.jsonl  # no GPU
    torchrun --nnodes 1 --nproc_per_node 8 T5_training.py  # t5-base on WikiHow
    sbatch --nodes 4 launch.slurm T5_training.py

Run the same command again to resume. OUTPUT_DIR/final is a Hugging Face model. Everything that
learns is in `train`. To make your own script, copy this one with `tools/copy_script.py`. Any
encoder-decoder in Transformers can be trained by its --model-name; for one of your own, replace
MODEL, BLOCKS and NORMS. Lines that end in `# optional: NAME` and optional/NAME.py can be deleted.
"""

from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.t5 import modeling_t5

import optional.checksums as checksums  # optional: checksums
import optional.fused_norms as fused_norms  # optional: fused_norms
import optional.lock as lock  # optional: lock
import optional.rouge as rouge  # optional: rouge
import optional.safe_checkpoint as safe_checkpoint  # optional: safe_checkpoint
import optional.startup_checks as checks  # optional: startup_checks
import optional.trackers as trackers  # optional: trackers
import optional.watchdog as watchdog  # optional: watchdog
import policies
import summarization_dataset
from core import checkpoint, ranks, weights
from core.args import Optim, Run, checked, parse
from core.export import export_model
from core.log import Log, open_directory, progress, write_results, write_status
from core.ranks import STOPPED, Batch, Problem, Stopped, StopRequest, print0, to_device
from core.steps import MicroBatches, StepSampler, ordered_loader, parameter_groups, schedule

MODEL = transformers.T5ForConditionalGeneration
OTHER = "llama_fsdp.py trains decoders."
BLOCKS = (modeling_t5.T5Block,)  # FSDP units, each compiled and recomputed separately
NORMS = (modeling_t5.T5LayerNorm,)  # optional: fused_norms
TINY_CONFIG = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4,
               "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}  # fmt: skip


@dataclass
class Model:
    """What is trained."""

    model_name: str = "google-t5/t5-base"
    """hub id, directory, or tiny (random, no download)"""


@dataclass
class Args:
    model: Model = field(default_factory=Model)
    data: summarization_dataset.Data = field(default_factory=summarization_dataset.Data)
    optim: Optim = field(default_factory=Optim)
    sharding: policies.Sharding = field(default_factory=policies.Sharding)
    run: Run = field(default_factory=lambda: Run(output_dir=Path("output/T5_training")))
    summaries: rouge.Rouge = field(default_factory=rouge.Rouge)  # optional: rouge
    track: trackers.Track = field(default_factory=trackers.Track)  # optional: trackers


TINY = Args(  # the defaults of --model-name tiny
    data=summarization_dataset.Data(source_length=256, target_length=64, num_train_samples=600),
    optim=Optim(epochs=1),
)


def parse_args() -> Args:
    """Return the arguments of sys.argv, or exit with a message for all that is wrong."""
    return checked(parse(Args, __doc__, TINY))


@record
def fsdp_main(args: Args) -> None:
    """Train from pretrained weights or a checkpoint, then export, and end this process."""
    run, output = args.run, args.run.output_dir
    device = ranks.setup(run.timeout_minutes)
    ranks.compare_ranks(vars(args.optim) | vars(args.sharding) | vars(run) | {"output_dir": ""})
    lock.hold(output)  # optional: lock
    open_directory(output)
    torch.manual_seed(args.optim.seed)
    newest = None
    if not run.evaluate_only:
        newest = ranks.on_rank_zero(checkpoint.find_newest, output)
        newest = newest and checksums.find_intact(newest.parent)  # optional: checksums
        safe_checkpoint.check(newest)  # optional: safe_checkpoint
    model, blocks, tokenizer, source = load_model(args, needs_weights=newest is None)
    shapes = weights.whole_shapes(model)
    if run.export_only or run.evaluate_only:
        model = wrap_model(args, device, model, blocks, source)
        run_without_training(args, device, model, tokenizer, shapes, newest)
        ranks.leave(0)
    data = ranks.local_main_process_first(summarization_dataset.load, args.data, tokenizer)
    model = wrap_model(args, device, model, blocks, source)
    write_status(output, "running")
    is_finished = train(args, device, model, tokenizer, *data, shapes, newest)
    if is_finished:
        export_model(model, tokenizer, output / "final", run.export_dtype)
    write_status(output, "finished" if is_finished else "stopped")
    trackers.finish()  # optional: trackers
    ranks.leave(0 if is_finished else STOPPED)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over the targets, int64 [positions], that are not
    -100. `logits` are fp32 [positions, vocabulary]."""
    return F.cross_entropy(logits, targets, reduction="sum")


def load_model(args: Args, needs_weights: bool) -> tuple[Any, ...]:
    """Return the model on meta, the classes of its layers, the tokenizer, and rank 0's weights."""
    if args.model.model_name == "tiny":
        directory, kind, tokenizer = None, MODEL, ByT5Tokenizer()
        config = MODEL.config_class(vocab_size=len(tokenizer), **TINY_CONFIG)
    else:
        directory, config, kind, tokenizer = weights.open_model(args.model.model_name, MODEL, OTHER)
    checks.check_length(args.data, "source_length", config)  # optional: startup_checks
    checks.check_length(args.data, "target_length", config)  # optional: startup_checks
    if args.sharding.precision == "fp32" and not torch.accelerator.is_available():
        config._attn_implementation = "eager"  # on a CPU, sdpa with a position bias is slower
    model, source = weights.new_model(kind, config, directory, needs_weights)
    fused_norms.fuse(model, MODEL, NORMS)  # optional: fused_norms
    blocks = policies.layer_classes(model, MODEL, BLOCKS)
    return model, blocks, tokenizer, source


def wrap_model(
    args: Args, device: torch.device, model: nn.Module, blocks: policies.Classes,
    source: weights.Source,
) -> nn.Module:  # fmt: skip
    """Return `model` in FSDP1, FSDP2 or DDP, with fp32 weights from `source`. Call on all ranks."""
    sharding = args.sharding
    init = weights.Loader(model, source, device).fill
    mesh = policies.device_mesh(device, sharding, args.run.timeout_minutes)
    policy = policies.wrap_policy(blocks)
    if sharding.compile:  # each block separately, before FSDP wraps it
        policies.compile_blocks(model, blocks)
    if sharding.strategy == "ddp":
        model.apply(init)
        model = DDP(model, gradient_as_bucket_view=True)  # one copy of the gradients
    elif sharding.fsdp == 2:
        options = policies.fsdp2_options(sharding)
        for module in policies.fsdp2_units(model, policy):  # inner ones first, the root last
            fully_shard(module.apply(init), mesh=mesh, **options)  # each rank keeps its rows
        policies.set_prefetch(model)
    else:
        model = FSDP(
            model,
            auto_wrap_policy=policy,
            mixed_precision=policies.PRECISIONS[sharding.precision],
            sharding_strategy=policies.STRATEGIES[sharding.strategy],
            cpu_offload=CPUOffload(offload_params=sharding.cpu_offload),
            device_mesh=mesh,
            device_id=device,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            use_orig_params=True,
            param_init_fn=init,
        )
    if sharding.activation_checkpointing:  # after FSDP, so that FSDP is the outer wrapper
        checkpoint_wrapper.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, blocks)
        )
    return model


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Run the model on a batch; return the sum of `token_loss` over its targets, fp32 []."""
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "targets", "tokens")}
    logits = model(**inputs, use_cache=False).logits
    return token_loss(logits.flatten(0, 1).float(), batch["labels"].flatten())


def train(
    args: Args, device: torch.device, model: nn.Module, tokenizer: Tokenizer, train_set: Any,
    val_sets: dict[str, Any], shapes: dict[str, torch.Size], newest: Path | None
) -> bool:  # fmt: skip
    """Train from the checkpoint `newest`, or from step 0, to the last step. Return False if a stop
    was asked for before it: a checkpoint is saved. Call on all ranks."""
    # 1. Data, optimizer and schedule.
    run, optim, output = args.run, args.optim, args.run.output_dir
    rank, world_size, precision = dist.get_rank(), dist.get_world_size(), args.sharding.precision
    micro = optim.batch_size, optim.gradient_accumulation_steps
    collate = summarization_dataset.collator(model)
    sampler = StepSampler(len(train_set), *micro, optim.seed)  # the same order on any ranks
    if args.data.group_by_length:
        sampler = summarization_dataset.LengthSampler(train_set, *micro, optim.seed)
    loader = DataLoader(  # of steps: each item is a list of micro-batches
        train_set, batch_sampler=sampler, collate_fn=MicroBatches(collate, *micro),
        num_workers=optim.num_workers, worker_init_fn=ranks.block_stops,
        pin_memory=device.type != "cpu",
        generator=torch.Generator(),  # or it would draw from dropout's
    )  # fmt: skip
    epoch_steps = sampler.steps_per_epoch
    total_steps = optim.max_steps or optim.epochs * epoch_steps
    warmup_steps = optim.warmup_steps or ceil(optim.warmup_ratio * total_steps)
    factor = schedule(optim.lr_schedule, total_steps, warmup_steps, epoch_steps, optim.gamma)
    groups = parameter_groups(model, shapes, optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, fused=True)
    scaler = policies.gradient_scaler(model, device, precision, optimizer)  # only fp16 needs it
    autocast = policies.autocast(model, device, precision)  # only DDP needs it

    # 2. Resume. All that a step depends on is in `state`, the model and the optimizer.
    sets = train_set, *val_sets.values()
    state = checkpoint.new_state(__file__, model, shapes, sets, optimizer, sampler, args)
    state["identity"] |= ranks.compare_ranks({"--group-by-length": args.data.group_by_length})
    torch.manual_seed(optim.seed + rank)  # so that dropout differs between ranks
    save = checkpoint.save
    save = checksums.save  # optional: checksums
    if newest:
        state |= checkpoint.load(newest, model, optimizer, state)
        scaler.load_state_dict(state["scaler"] or scaler.state_dict())
    start = state["step"]
    if start >= total_steps:
        print0(f"{output} is finished at {start} steps. To train longer, raise --max-steps.")
    probe = checks.pairs(), collate  # optional: startup_checks
    checks.check_model(args, device, model, summed_loss, *probe)  # optional: startup_checks
    checks.check_optimizer(model, optimizer)  # optional: startup_checks
    log = Log(output, state, total_steps)
    log = trackers.follow(log, args, Path(__file__).stem, start)  # optional: trackers
    sizes = {"samples": sampler.num_samples, "global_batch": sampler.global_batch}
    sizes |= {"world_size": world_size, "device": device.type, "epoch_steps": epoch_steps}
    log.write("start", start, **sizes, arguments=asdict(args))
    stop = StopRequest()
    if state["eval_due"]:  # at step 0, or because a stop interrupted it
        evaluate(args, device, model, tokenizer, val_sets, state, log, stop)

    sampler.start, sampler.stop = start, total_steps
    eval_every = epoch_steps if run.eval_every is None else run.eval_every
    intervals = run.log_every, eval_every, run.save_every
    sums = state["loss_sums"]  # of the ranks that saved them
    own_sum = sums[rank] if len(sums) == world_size else sum(sums) / world_size
    loss_sum = torch.tensor(own_sum, device=device)
    bad_step = torch.zeros((), dtype=torch.int64, device=device)  # 0: none
    # Fused optimizers skip a step by themselves, and so does the scaler. For others the host waits.
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    skips, failed_saves = scaler.is_enabled() or is_fused, 0
    for step, batches in enumerate(progress(loader, "step", total_steps, start), start + 1):
        watchdog.restart(output, run.timeout_minutes)  # optional: watchdog
        # 3. Count over ranks and micro-batches. Hosts wait for hosts, but not for the device.
        counts = sum(x["targets"] for x in batches), sum(x["tokens"] for x in batches), stop.is_set
        targets, tokens, is_stopping = ranks.host_sums(counts)
        if targets == 0:
            samples = sampler.samples(step - 1).tolist()
            raise Problem(f"Step {step} has no target tokens, in samples {samples}. Check them.")

        # 4. Forward and backward: the loss is the mean over all target tokens of the step.
        for i, batch in enumerate(batches, start=1):
            syncs = i == len(batches) or world_size == 1 or not optim.accumulate_no_sync
            with policies.gradient_sync(model, syncs):
                with autocast:
                    loss = summed_loss(model, to_device(batch, device)) / targets
                # FSDP and DDP average gradients over ranks, hence the factor.
                scaler.scale(loss * world_size).backward()
            loss_sum += loss.detach()

        # 5. Update. `bad_step` is the first step whose norm is not finite. From then on the fused
        # AdamW changes nothing. In fp16 the scaler skips such a step.
        scaler.unscale_(optimizer)
        grad_norm = policies.clip_gradients(model, optim.max_grad_norm)
        if not scaler.is_enabled():
            bad_step += (~grad_norm.isfinite() & (bad_step == 0)) * step
            if is_fused:
                optimizer.found_inf = (bad_step > 0).float().to(groups[0]["params"][0].device)
        lr = optim.lr * factor(step - 1)  # of the step alone, so no scheduler has to be saved
        for group in optimizer.param_groups:
            group["lr"] = lr
        if skips or bad_step == 0:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state |= {"step": step, "tokens": state["tokens"] + tokens}
        if step == start + 1:  # from now on there is something to lose
            dist.barrier(group=ranks.cpu_group)
            stop.listen()

        # 6. Every N steps, after each epoch, at the end, and on request. The host waits only here.
        is_last, ends_epoch = step == total_steps, step % epoch_steps == 0
        log_due, eval_due, save_due = (
            is_last or (every > 0 and (ends_epoch or step % every == 0)) for every in intervals
        )
        if not (log_due or eval_due or save_due or is_stopping or not skips):
            continue
        if bad_step > 0 or scaler.get_scale() < 1:
            bad = bad_step.item() or step
            raise Problem(f"The gradient norm of step {bad} is not finite, in samples "
                f"{sampler.samples(bad - 1).tolist()}. Check them, or lower --lr.")  # fmt: skip
        if log_due:
            dist.all_reduce(loss_sum)
            loss = loss_sum / (step - state["logged_step"])  # the mean since the last line
            log.write("train", step, state["tokens"], loss=loss, lr=lr, grad_norm=grad_norm)
            loss_sum.zero_()
            state["logged_step"] = step
        state["eval_due"] = eval_due
        if eval_due and not is_stopping:
            is_stopping = evaluate(args, device, model, tokenizer, val_sets, state, log, stop)
        if save_due or is_stopping:
            state["loss_sums"] = ranks.on_every_rank(loss_sum.item)
            state["scaler"] = scaler.state_dict()
            path = output / "checkpoints" / f"step-{step:08d}"
            try:
                with log.pause():
                    is_full = run.checkpoint_type == "full"
                    save(path, checkpoint.snapshot(model, optimizer, state), state, is_full)
                    ranks.on_rank_zero(checkpoint.prune, path.parent, run.keep_checkpoints, path)
                write_status(output, "running")
                log.write("save", step)
                failed_saves = 0
            except OSError as error:
                failed_saves += 1
                if failed_saves == 2 or is_last or is_stopping:
                    raise
                print0(f"{error} The next save tries again.")
        if is_stopping and (not is_last or state["eval_due"]):
            print0(f"Saved at step {step}. Run the same command to resume.")
            return False
    stop.forget()
    watchdog.stop()  # optional: watchdog
    results = {"best_loss": state["best_loss"], "best_step": state["best_step"]}
    triples = rouge.summarize(args, device, model, tokenizer, collate, val_sets)  # optional: rouge
    print0(rouge.format_triples(triples[:3]))  # optional: rouge
    results |= rouge.score(triples)  # optional: rouge
    log.write("done", state["step"], **results)
    return True


def evaluate(
    args: Args, device: torch.device, model: nn.Module, tokenizer: Tokenizer,
    val_sets: dict[str, Any], state: dict[str, Any], log: Log, stop: StopRequest,
) -> bool:  # fmt: skip
    """Validate, log the results, and export best/ if the loss is the lowest so far. Return True if
    a rank was asked to stop, which a resume repeats. Call on all ranks."""
    try:
        with log.pause():
            results = validation(args, device, model, val_sets, stop)
            is_best = results["loss"] < state["best_loss"]
            if is_best and args.run.save_best:
                path = args.run.output_dir / "best"
                try:
                    export_model(model, tokenizer, path, args.run.export_dtype, stop.check)
                except OSError as error:
                    print0(f"best/ could not be written ({error}).")
                    is_best = False
    except Stopped:
        return True
    if is_best:
        state |= {"best_loss": results["loss"], "best_step": state["step"]}
    state["eval_due"] = False
    log.write("val", state["step"], **results)
    return False


@torch.no_grad()
def validation(
    args: Args, device: torch.device, model: nn.Module, val_sets: dict[str, Any], stop: StopRequest
) -> dict[str, Any]:
    """Return a dict: mean `loss` per token, `perplexity`, `losses` by data set. Every example
    counts once. Call on all ranks; all raise Stopped if one was asked to stop."""
    collate = summarization_dataset.collator(model)
    totals = torch.zeros(len(val_sets), 2, dtype=torch.float64, device=device)
    precision = args.sharding.precision
    with policies.evaluation(model), policies.autocast(model, device, precision):
        for total, (name, samples) in zip(totals, val_sets.items(), strict=True):
            loader = ordered_loader(samples, args.optim.batch_size, collate, device)
            for batch in progress(loader, f"validation on {name}", len(loader)):
                stop.check()
                total[0] += summed_loss(model, to_device(batch, device))
                total[1] += batch["targets"]
    dist.all_reduce(totals)
    loss = totals[:, 0].sum() / totals[:, 1].sum()
    losses = dict(zip(val_sets, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
    return {"loss": loss.item(), "perplexity": loss.exp().item(), "losses": losses}


def run_without_training(
    args: Args, device: torch.device, model: nn.Module, tokenizer: Tokenizer,
    shapes: dict[str, torch.Size], newest: Path | None,
) -> None:  # fmt: skip
    """Write final/ for --export-only, evaluation.json for --evaluate-only. Call on all ranks."""
    output = args.run.output_dir
    if args.run.export_only:
        checkpoint.compare_runs(newest, {"model": checkpoint.model_identity(model, shapes)})
        checkpoint.load_weights(newest, model)
        export_model(model, tokenizer, output / "final", args.run.export_dtype)
        return
    checkpoint.check_evaluated(output, args.model.model_name)
    data = summarization_dataset.load, args.data, tokenizer, True
    _, val_sets = ranks.local_main_process_first(*data)
    collate = summarization_dataset.collator(model)  # optional: rouge
    probe = checks.pairs(), summarization_dataset.collator(model)  # optional: startup_checks
    checks.check_model(args, device, model, summed_loss, *probe)  # optional: startup_checks
    results = validation(args, device, model, val_sets, StopRequest())
    triples = rouge.summarize(args, device, model, tokenizer, collate, val_sets)  # optional: rouge
    ranks.on_rank_zero(rouge.write, output / "predictions.jsonl", triples)  # optional: rouge
    results |= rouge.score(triples)  # optional: rouge
    write_results(output / "evaluation.json", results, asdict(args))


if __name__ == "__main__":
    ranks.run(fsdp_main, parse_args())
