"""Fine-tune Llama, up to 70B, on packed chats with FSDP.

    python tools/docstrings.py docstrings.jsonl  # data
    python llama_fsdp.py --model-name tiny --dataset docstrings.jsonl  # no GPU
    torchrun --nnodes 1 --nproc_per_node 8 llama_fsdp.py --dataset chats.jsonl
    sbatch --nodes 4 launch.slurm llama_fsdp.py --dataset chats.jsonl

Run the same command again to resume. OUTPUT_DIR/final is a Hugging Face model. Everything that
learns is in `train`. Most causal models in Transformers can be trained by --model-name; for one of
your own, replace MODEL and BLOCKS.
To copy this script, and for lines marked `# optional`, see README.md.
"""

import os
import sys

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("Importing PyTorch and Transformers ...", file=sys.stderr, flush=True)

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.llama import modeling_llama

import chat_dataset
import optional.async_save as async_save  # optional: async_save
import optional.base_files as base_files  # optional: base_files
import optional.checksums as checksums  # optional: checksums
import optional.flag_advice as flag_advice  # optional: flag_advice
import optional.fused_norms as fused_norms  # optional: fused_norms
import optional.global_batch as global_batch  # optional: global_batch
import optional.lock as lock  # optional: lock
import optional.lora as lora  # optional: lora
import optional.no_training as no_training  # optional: no_training
import optional.packed_attention as packed  # optional: packed_attention
import optional.paged as paged  # optional: paged
import optional.safe_checkpoint as safe_checkpoint  # optional: safe_checkpoint
import optional.save_best as save_best  # optional: save_best
import optional.startup_checks as checks  # optional: startup_checks
import optional.trackers as trackers  # optional: trackers
import optional.watchdog as watchdog  # optional: watchdog
import policies
from core import checkpoint, export, ranks, weights
from core.args import Model, Optim, Run, flags_of, parse
from core.checkpoint import State, save, snapshot
from core.chunked_loss import LossHead
from core.log import Log, mean_losses, open_directory, progress
from core.ranks import STOPPED, Batch, Problem, Stopped, StopRequest, print0
from core.steps import (
    MicroBatches,
    StepSampler,
    due_steps,
    ordered_loader,
    parameter_groups,
    schedule,
)

MODEL = transformers.LlamaForCausalLM
BLOCKS = (modeling_llama.LlamaDecoderLayer,)  # FSDP units, each compiled and recomputed separately
TINY_CONFIG = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
               "num_attention_heads": 4, "num_key_value_heads": 2,
               "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
# The recipe of Llama 2 70B.
OPTIM = Optim(
    lr=5e-5,
    lr_schedule="cosine",
    batch_size=1,
    epochs=1,
    seed=100,
)
RUN = Run(
    output_dir=Path("output/llama_fsdp"),
    log_every=25,
    eval_every=100,
    save_every=250,
    export_dtype="bf16",
    timeout_minutes=90.0,
)
NO_BEST = partial(save_best.Best, save_best=False)  # optional: save_best
RECOMPUTING = policies.Sharding(activation_checkpointing="blocks")
export_model = export.export_model
export_model = lora.export_model  # optional: lora
export_model = base_files.keep(export_model)  # optional: base_files
save = checksums.with_sums(save)  # optional: checksums
saver = async_save.Saver(snapshot, save)  # optional: async_save
snapshot = saver.snapshot  # optional: async_save
save = saver.save  # optional: async_save


@dataclass
class Args:
    model: Model = field(default_factory=lambda: Model("meta-llama/Llama-2-7b-hf"))
    attention: packed.Kernel = field(default_factory=packed.Kernel)  # optional: packed_attention
    adapters: lora.Lora = field(default_factory=lora.Lora)  # optional: lora
    data: chat_dataset.Data = field(default_factory=chat_dataset.Data)
    optim: Optim = field(default_factory=lambda: replace(OPTIM))
    optimizer: paged.Paged = field(default_factory=paged.Paged)  # optional: paged
    total: global_batch.Total = field(default_factory=global_batch.Total)  # optional: global_batch
    sharding: policies.Sharding = field(default_factory=lambda: replace(RECOMPUTING))
    run: Run = field(default_factory=lambda: replace(RUN))
    only: no_training.Only = field(default_factory=no_training.Only)  # optional: no_training
    best: save_best.Best = field(default_factory=NO_BEST)  # optional: save_best
    saving: async_save.Saves = field(default_factory=async_save.Saves)  # optional: async_save
    tracking: trackers.Track = field(default_factory=trackers.Track)  # optional: trackers


TINY = Args(data=chat_dataset.Data(max_seq_length=512, num_train_samples=600, num_val_samples=60))


def parse_args() -> Args:
    """Return the arguments of sys.argv, or exit with a message for all that is wrong."""
    flag_advice.check(TINY)  # optional: flag_advice
    return parse(Args, __doc__, TINY)


@record
def fsdp_main(args: Args) -> None:
    """Train from pretrained weights or a checkpoint, and end this process."""
    run = args.run
    output = run.output_dir
    watchdog.watch_start()  # optional: watchdog
    device = ranks.setup(run.timeout_minutes)
    # Nodes may have other paths to the model, the data and the output.
    sections = [section for name, section in vars(args).items() if name not in ("model", "data")]
    flags = flags_of(*sections)
    del flags["--output-dir"]
    ranks.compare_ranks(flags)
    lock.hold(output)  # optional: lock
    open_directory(output)
    torch.manual_seed(args.optim.seed)
    newest = ranks.on_rank_zero(checkpoint.find_newest, output)
    newest = newest and checksums.find_intact(newest.parent)  # optional: checksums
    safe_checkpoint.check(newest)  # optional: safe_checkpoint
    newest = no_training.choose_checkpoint(args, newest)  # optional: no_training
    model, blocks, tokenizer, initial = load_model(args, newest is None)
    shapes = weights.whole_shapes(model)
    collate = chat_dataset.collate
    load = partial(chat_dataset.load, args.data, tokenizer, args.optim.seed)
    load = no_training.choose_data(args.only, load)  # optional: no_training
    data = ranks.local_main_process_first(load)
    model = wrap_model(args, device, model, blocks, initial)
    more = more_identity(model, tokenizer)  # optional: no_training
    no_training.load(args, newest, model, shapes, more)  # optional: no_training
    evaluated = args, device, model, tokenizer, collate, data[1]  # optional: no_training
    no_training.run(sys.modules[__name__], *evaluated)  # optional: no_training
    checkpoint.write_status(output, "running")
    is_finished = train(args, device, model, tokenizer, collate, *data, shapes, newest)
    checkpoint.write_status(output, "finished" if is_finished else "stopped")
    trackers.finish()  # optional: trackers
    ranks.finish(code=0 if is_finished else STOPPED)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over the targets, int64 [positions], that are not
    -100. `logits` are fp32 [positions, vocabulary]."""
    return F.cross_entropy(logits, targets, reduction="sum")


class LossModel:
    """Added to a Hugging Face class: its forward returns the summed loss if it gets `targets`."""

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        super().__init__(config)
        self.set_output_embeddings(LossHead(self.get_output_embeddings(), config, token_loss))
        self.post_init()  # ties or initializes the weights of the new head

    def forward(
        self,
        input_ids: Tensor | None = None,
        targets: Tensor | None = None,
        target_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the sum of `token_loss` or, without `targets`, Hugging Face's own output. The
        arguments are those of `chat_dataset.collate`, where `targets` are called labels."""
        if self.config._attn_implementation not in ("eager", "sdpa"):  # they use position_ids
            options |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            options |= {"max_length_q": max_seqlen, "max_length_k": max_seqlen}
        if targets is None:
            return super().forward(input_ids, **options)
        hidden = getattr(self, "model", self.base_model)(input_ids, use_cache=False, **options)
        hidden = hidden.last_hidden_state.flatten(0, 1)
        targets = targets.flatten()
        if target_positions is not None:  # because most of a chat is the prompt
            hidden = hidden[target_positions]
            targets = targets[target_positions]
        return self.get_output_embeddings()(hidden, targets)


def load_model(args: Args, needs_weights: bool) -> tuple[Any, ...]:
    """Return the model on meta, the classes of its layers, the tokenizer, and rank 0's weights."""
    name = args.model.model_name
    directory, config, model_class, tokenizer = weights.open_model(name, MODEL, TINY_CONFIG)
    needs_weights |= args.adapters.lora_rank > 0  # optional: lora
    stops = chat_dataset.set_chat_template(tokenizer, args.data)  # in final/ too
    checks.check_length(args.data, "max_seq_length", config)  # optional: startup_checks
    packed.set_kernel(args, config, model_class)  # optional: packed_attention
    model_class = type("LossModel", (LossModel, model_class), {})
    model, initial = weights.new_model(model_class, config, directory, needs_weights)
    export.add_stops(model.generation_config, stops, tokenizer)
    fused_norms.fuse(model)  # optional: fused_norms
    blocks = policies.layer_classes(model, MODEL, BLOCKS)
    lora.add(args, model, initial, blocks, tokenizer)  # optional: lora
    return model, blocks, tokenizer, initial


def wrap_model(
    args: Args,
    device: torch.device,
    model: nn.Module,
    blocks: policies.Classes,
    initial: weights.Initial,
) -> nn.Module:
    """Return `model` in FSDP1, FSDP2 or DDP, with `initial` weights in fp32. Call on all ranks."""
    sharding = args.sharding
    mesh = policies.device_mesh(device, sharding, args.run.timeout_minutes)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    # Tied weights must stay in the root unit.
    policy = policies.wrap_policy(blocks if is_tied else (*blocks, nn.Embedding, LossHead))
    policies.checkpoint_blocks(model, blocks, sharding)
    if sharding.compile:  # each block separately, before FSDP wraps it
        policies.compile_blocks(model, blocks)
    checks.check_hooks(model)  # optional: startup_checks
    initializer = weights.Initializer(model, initial, device, sharding.cpu_offload)
    initializer.receive = lora.packing(initializer.receive, model)  # optional: lora
    init = initializer.fill
    if sharding.strategy == "ddp":
        model.apply(init)
        model = DDP(model.to(device), **policies.DDP_OPTIONS)
    elif sharding.fsdp == 2:
        options = policies.fsdp2_options(sharding)
        for module in policies.fsdp2_units(model, policy):  # inner ones first, the root last
            fully_shard(module, mesh=mesh, **options)
        model.apply(init)  # each rank keeps its rows
        policies.set_prefetch(model)
        if not is_tied:  # the backward pass begins with the head, and needs no embeddings
            model.get_output_embeddings().set_reshard_after_forward(False)
            model.get_input_embeddings().set_unshard_in_backward(False)
    else:
        model = FSDP(
            model,
            device_mesh=mesh,
            device_id=device,
            auto_wrap_policy=policy,
            param_init_fn=init,
            mixed_precision=policies.PRECISIONS[sharding.precision],
            sharding_strategy=policies.STRATEGIES[sharding.strategy],
            cpu_offload=CPUOffload(offload_params=sharding.cpu_offload),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            use_orig_params=True,
        )
    return model


def more_identity(model: nn.Module, tokenizer: Tokenizer) -> dict[str, str]:
    """Return what must stay the same in a resume, besides what all scripts compare."""
    identity = {"chat template": weights.digest(tokenizer.chat_template)[:8]}
    identity |= lora.identity(model)  # optional: lora
    return identity


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Run the model on a batch; return the sum of `token_loss` over its targets, fp32 []."""
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "targets", "tokens")}
    return model(**inputs, targets=batch["labels"])


@saver.during  # optional: async_save
@watchdog.watched  # optional: watchdog
def train(
    args: Args,
    device: torch.device,
    model: nn.Module,
    tokenizer: Tokenizer,
    collate: Callable,
    train_set: Any,
    val_sets: dict,
    shapes: weights.Shapes,
    newest: Path | None,
) -> bool:
    """Train from the checkpoint `newest`, or from step 0, to the last step, and export final/.
    Return False if a stop was asked for before it: a checkpoint is saved. Call on all ranks."""
    # 1. Data, optimizer and schedule.
    run = args.run
    optim = args.optim
    precision = args.sharding.precision
    world_size = dist.get_world_size()
    make_sampler = chat_dataset.PackSampler if hasattr(train_set, "set_epoch") else StepSampler
    sampler = make_sampler(len(train_set), optim)  # the same order on any ranks
    epoch_steps = sampler.steps_per_epoch
    total_steps = optim.max_steps or optim.epochs * epoch_steps
    factors = schedule(optim, total_steps, epoch_steps)  # learning rate / --lr, by step
    log_steps, eval_steps, save_steps = due_steps(run, total_steps, epoch_steps)
    groups = parameter_groups(model, shapes, optim.weight_decay)
    optimizers = [torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)]
    optimizers = paged.replace(args.optimizer, optimizers)  # optional: paged
    scaler = policies.gradient_scaler(model, device, precision, optimizers)  # only fp16 needs it
    autocast = policies.autocast(model, device, precision)  # only DDP needs it

    # 2. Resume. All that a step depends on is in `state`, the model and the optimizers.
    sets = train_set, *val_sets.values()
    checks.check_data(train_set, collate)  # optional: startup_checks
    more = more_identity(model, tokenizer)
    state = checkpoint.new_state(__file__, model, shapes, sets, optimizers, sampler, more)
    state.flags = flags_of(args.model, args.data, args.optim)
    state.flags |= flags_of(args.adapters)  # optional: lora
    names = weights.saved_names(model)
    names -= lora.frozen_names(model)  # optional: lora
    torch.manual_seed(optim.seed + dist.get_rank())  # so that dropout differs between ranks
    if newest:
        checkpoint.load(newest, model, names, optimizers, state)
        scaler.load_state_dict(state.scaler or scaler.state_dict())
        save_best.check(args, state, total_steps)  # optional: save_best
    start = state.step
    if start >= total_steps:
        print0(f"The run is finished at {start} steps. To train longer, raise --max-steps.")
        total_steps = start  # --max-steps may be lower
    probe = summed_loss, token_loss, collate  # optional: startup_checks
    checks.check_model(args, device, model, *probe)  # optional: startup_checks
    checks.check_parameters(model, optimizers)  # optional: startup_checks
    log = Log(run.output_dir, state, total_steps)
    log = trackers.follow(log, args, Path(__file__).stem)  # optional: trackers
    info = getattr(train_set, "info", None)  # if it is a Dataset
    log.write(
        "start",
        samples=len(train_set),
        global_batch=sampler.global_batch,
        world_size=world_size,
        epoch_steps=epoch_steps,
        device=device.type,
        arguments=asdict(args),
        data=getattr(info, "description", ""),
    )
    stop = StopRequest()
    model.tokenizer = tokenizer  # optional: save_best
    validated = args, device, model, collate, val_sets
    if state.needs_validation:  # at step 0, or because a stop interrupted it
        evaluate(*validated, state, log, stop)

    loss_sum = torch.tensor(state.own_loss_sum(), device=device)  # since the last line in the log
    norms: dict[int, Tensor] = {}  # by step: the host waits for them in part 6
    is_saved = True
    loader = DataLoader(  # each item is a step: a list of micro-batches
        MicroBatches(train_set, sampler, collate, optim),
        sampler=range(start, total_steps),
        batch_size=None,
        num_workers=optim.num_workers,
        worker_init_fn=ranks.block_stops,
        pin_memory=device.type != "cpu",
        generator=torch.Generator().manual_seed(dist.get_rank()),  # the default one is dropout's
    )
    steps = progress(loader, "step", total_steps, start)
    for step, batches in enumerate(steps, start + 1):
        watchdog.restart()  # optional: watchdog
        # 3. Count over ranks and micro-batches. Hosts wait for hosts, but not for the device.
        targets = sum(batch["targets"] for batch in batches)
        tokens = sum(batch["tokens"] for batch in batches)
        targets, tokens, stops = ranks.host_sums([targets, tokens, stop.is_set])
        is_stopping = stops > 0
        if is_stopping:
            print0("Stopping after this step.")
        if targets == 0:
            samples = sampler.samples(step - 1).tolist()
            raise Problem(f"Step {step} has no target tokens, in samples {samples}. Check them.")

        # 4. Forward and backward: the loss is the mean over all target tokens of the step.
        for i, batch in enumerate(batches, start=1):
            batch = BatchEncoding(batch).to(device, non_blocking=True)
            syncs = i == len(batches) or world_size == 1 or not optim.accumulate_no_sync
            with policies.gradient_sync(model, syncs):
                with autocast:
                    loss = summed_loss(model, batch) / targets
                # FSDP and DDP average gradients over ranks, hence the factor.
                scaler.scale(loss * world_size).backward()
            loss_sum += loss.detach()

        # 5. Clip and update. The rate depends on the step alone, so no scheduler has to be saved.
        is_last = step == total_steps
        log_due = step in log_steps
        eval_due = step in eval_steps
        save_due = step in save_steps
        lr = optim.lr * factors[step - 1]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            for group in optimizer.param_groups:
                group["lr"] = lr
        grad_norm = policies.clip_gradients(model, optim.max_grad_norm)
        norms[step] = grad_norm
        policies.skip_if_not_finite(optimizers, grad_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        state.step = step
        state.tokens += int(tokens)
        if step == start + 1:
            snapshot(model, names, optimizers, state)  # optional: startup_checks
            stop.listen()  # from now on, a stop saves a checkpoint

        # 6. Every N steps, after each epoch, at the end, and on request. The host waits only here.
        if not (log_due or eval_due or save_due or is_stopping):
            continue
        bad_step = policies.first_bad_step(norms, scaler)
        if bad_step:
            samples = sampler.samples(bad_step - 1).tolist()
            raise Problem(f"The gradient norm of step {bad_step} is not finite, in samples "
                          f"{samples}. Check them, or lower --lr.")  # fmt: skip
        norms.clear()
        if log_due:
            dist.all_reduce(loss_sum)
            log.write(
                "train",
                epoch=step / epoch_steps,
                loss=loss_sum / (step - state.logged_step),
                lr=lr,
                grad_norm=grad_norm,
            )
            loss_sum.zero_()
            state.logged_step = step
        state.needs_validation = eval_due
        if eval_due and not is_stopping:
            is_stopping = evaluate(*validated, state, log, stop)
        if save_due or is_stopping:
            state.loss_sums = ranks.on_every_rank(loss_sum.item)
            state.scaler = scaler.state_dict()
            must_succeed = is_last or is_stopping or not is_saved
            tensors = snapshot(model, names, optimizers, state)
            is_saved = save(run, tensors, state, log, must_succeed)
            del tensors  # FSDP1's are copies
        is_unfinished = not is_last or state.needs_validation
        if is_stopping and is_unfinished:
            print0(f"Saved at step {step}. Run the same command to resume.")
            return False
    stop.forget()
    watchdog.restart()  # optional: watchdog
    export_model(model, tokenizer, run.output_dir / "final", run.export_dtype)
    save_best.check_written(state)  # optional: save_best
    log.write("done", best_loss=state.best_loss, best_step=state.best_step)
    return True


def evaluate(
    args: Args,
    device: torch.device,
    model: nn.Module,
    collate: Callable,
    val_sets: dict,
    state: State,
    log: Log,
    stop: StopRequest,
) -> bool:
    """Validate and log the results. Return True if a rank was asked to stop: a resume repeats this
    then. Call on all ranks."""
    watchdog.restart()  # optional: watchdog
    try:
        results = validation(args, device, model, collate, val_sets, stop)
        loss = results["loss"]
        if state.step == 0 and not math.isfinite(loss):
            raise Problem(f"The validation loss before training is {loss}. The weights of "
                          "--model-name are not finite, or too large for --precision.")  # fmt: skip
        log.write("val", **results)
        state.needs_validation = False
        how = export_model, model, stop.check  # optional: save_best
        loss = save_best.write(args, state, loss, *how)  # optional: save_best
    except Stopped:
        return True
    if loss < state.best_loss:
        state.best_loss = loss
        state.best_step = state.step
    log.restart_clock()
    return False


@torch.no_grad()
def validation(
    args: Args,
    device: torch.device,
    model: nn.Module,
    collate: Callable,
    val_sets: dict,
    stop: StopRequest,
) -> dict:
    """Return a dict: mean `loss` per token, `perplexity`, `losses` by data set. Every example
    counts once. Call on all ranks; all raise Stopped if one was asked to stop."""
    totals = {}  # the summed loss and the number of targets, by data set
    autocast = policies.autocast(model, device, args.sharding.precision)
    with policies.evaluation(model), autocast:
        for name, samples in val_sets.items():
            loader = ordered_loader(samples, args.optim.batch_size, collate, device)
            total = torch.zeros(2, dtype=torch.float64, device=device)
            for i, batch in enumerate(progress(loader, f"validation on {name}", len(loader))):
                if i % 8 == 0:  # hosts wait for hosts
                    stop.check()
                total[0] += summed_loss(model, BatchEncoding(batch).to(device, non_blocking=True))
                total[1] += batch["targets"]
            dist.all_reduce(total)
            totals[name] = total
    return mean_losses(totals)


if __name__ == "__main__":
    ranks.run(fsdp_main, parse_args())
