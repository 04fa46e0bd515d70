"""Train GPT-2 with PyTorch FSDP, and compare sharding strategies.

    python gpt2_fsdp.py --model-name tiny --dataset docstrings  # no GPU
    torchrun --nnodes 1 --nproc_per_node 8 gpt2_fsdp.py  # gpt2 on WikiText-2
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 --rdzv-id 1 gpt2_fsdp.py \\
        --model-name openai-community/gpt2-xl --strategy hybrid_shard

One optimizer step trains on --batch-size x --gradient-accumulation-steps x processes blocks.
Run the same command again to resume. OUTPUT_DIR/final is a Hugging Face model. To make your own
script, copy this one with `tools/copy_script.py`. For another causal model, such as OPT,
replace the import of GPT2Block, and MODEL, BLOCKS and TINY. Next, change `load_data`, `token_loss`,
and in `train` the optimizer, the schedule and the step.

Attention crosses document boundaries here. In llama_fsdp.py it does not.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from runtime.options import flag  # isort: skip (checks the versions first)
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AttentionInterface, ByT5Tokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import block_dataset as data
import policies
from runtime import batches, options, ranks, readers, weights
from runtime.batches import Batch
from runtime.checks import check_model, fit_config
from runtime.chunked_loss import LossHead
from runtime.run import Loaders, Output, launch
from runtime.state import Facts, State

# Change these to train another model. tools/memory_estimator.py reads them too.
MODEL = transformers.GPT2LMHeadModel
BLOCKS = (GPT2Block,)  # FSDP units, each compiled and recomputed separately
TINY = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024}  # config fields
TINY_TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": None}
SCRIPT = Path(__file__).stem


def unit_size(text: str) -> int:
    """Return NUMBER from the --wrap value size:NUMBER, or 0 from block; else raise ValueError."""
    return 0 if text == "block" else int(text.removeprefix("size:"))


@dataclass
class Options(data.Options, options.Run, options.Optimization, policies.Options):
    """model"""

    model_name: str = flag("openai-community/gpt2", options.MODEL_NAME)
    output_dir: str = f"output/{SCRIPT}"
    from_scratch: bool = flag(False, "use the model's config, not its weights")
    wrap: int = flag(0, "FSDP units: blocks, or modules with at least NUMBER parameters (default: "
        "block)", convert=unit_size, metavar="block|size:NUMBER")  # fmt: skip

    def problems(self) -> list[str]:
        """Return a message if --wrap cannot be used."""
        return ["--wrap size:NUMBER needs --fsdp 1."] if self.wrap and self.fsdp == 2 else []


@dataclass
class TinyOptions(Options):
    """Defaults of --model-name tiny."""

    block_size: int = 256
    num_train_samples: int = 800
    num_val_samples: int = 100
    epochs: int = 1


@record
def fsdp_main(args: Options) -> int:
    """Train from pretrained weights or a checkpoint, then export; return the exit code."""
    device = setup(args)
    try:
        with Output(args, device, SCRIPT) as output:  # locks OUTPUT_DIR, finds its checkpoint
            model, facts, init = load_model(args, device, output.checkpoint)
            output.describe(model, facts)
            if args.prepare_only or args.export_only or args.evaluate_only:
                run_without_training(args, model, facts, init, output)
            else:
                train_set, val_sets = load_data(args, facts.tokenizer)
                model = wrap_model(args, device, model, init)
                val_loaders = batches.val_loaders(val_sets, args.batch_size, data.collate)
                if train(args, model, facts, train_set, val_loaders, output):
                    output.export(model, facts)
        return output.exit_code
    finally:
        cleanup()


def setup(args: Options) -> torch.device:
    """Join the process group (nccl on GPUs, gloo on CPUs); return this process's device."""
    device = ranks.local_device()
    timeout = timedelta(minutes=args.timeout_minutes)
    with ranks.rendezvous(timeout) as group_args:  # store, rank, world_size; adds a gloo group
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
            **group_args,
        )
    ranks.set_seed(args.seed)
    if args.cpu_offload:
        ranks.use_all_cores()  # because the optimizer runs on the CPU
    return device


def cleanup() -> None:
    """Leave the process group, except after an error: nccl would wait for the missing ranks."""
    if sys.exc_info()[0] is None or dist.get_backend() == "gloo":
        dist.destroy_process_group()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over the targets; a target of -100 does not count.

    `logits` are fp32 [positions, vocabulary], `targets` int64 [positions]. To train on more terms,
    or log more sums, return `torch.stack([cross_entropy, other])`, and index it where it is used.
    """
    return F.cross_entropy(logits, targets, reduction="sum")


class LossModel(MODEL):
    """The Hugging Face model, whose forward returns the summed loss when called with `targets`."""

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        super().__init__(config)
        head = LossHead(self.get_output_embeddings(), config, token_loss)
        self.set_output_embeddings(head)
        self.post_init()  # ties or initializes the weights of the new head

    def forward(
        self, input_ids: Tensor | None = None, targets: Tensor | None = None, **options: Any
    ) -> Any:
        """Return the sum of `token_loss` or, without `targets`, Hugging Face's own output.

        `input_ids` and `targets` are int64 [batch, length]. A target is the token after its input,
        or -100 where there is no loss.
        """
        if targets is None:
            return super().forward(input_ids, **options)
        hidden = self.base_model(input_ids, use_cache=False, **options).last_hidden_state
        return self.get_output_embeddings()(hidden.flatten(0, 1), targets.flatten())


LossModel.__name__ = MODEL.__name__  # the name in config.json


def load_model(
    args: Options, device: torch.device, checkpoint: Path | None = None
) -> tuple[nn.Module, Facts, weights.Init]:
    """Return the model on meta, what is known of it, and `init`, which gives a module its storage
    and, unless a checkpoint will be loaded, its weights. Raise ValueError if it does not fit."""
    if args.model_name == "tiny":
        tokenizer = ByT5Tokenizer()
        config = MODEL.config_class(vocab_size=len(tokenizer), **TINY_TOKEN_IDS, **TINY)
        directory = None
    else:
        directory, config, tokenizer = weights.open_model(args.model_name, MODEL)
    fit_config(args, LossModel, config, "block_size")
    if config.model_type == "gpt2" and config._attn_implementation is None:
        # sdpa without a mask function, which would wait for the device in each forward pass.
        AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
        config._attn_implementation = "sdpa_causal"
    if args.from_scratch:
        directory = None
    model, source = weights.new_model(LossModel, config, directory, checkpoint is None)
    init = weights.Loader(model, source, device, args.cpu_offload).fill
    return model, Facts.of(model, tokenizer), init


def unit_classes(model: nn.Module) -> policies.Classes:
    """Return the module classes that become FSDP units. Tied weights must stay in the root unit."""
    return BLOCKS


def size_policy(model: nn.Module, smallest: int) -> Callable[..., bool]:
    """Return an auto-wrap policy that makes modules of `smallest` parameters or more FSDP units,
    but not the head and an embedding tied to it: both uses of a weight must be in the root unit."""
    tied = model.get_output_embeddings().weight
    in_root = {module for module in model.modules() if tied in set(module.parameters())}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        is_large = size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, smallest)
        return is_large and (recurse or module not in in_root)

    return policy


def wrap_model(
    args: Options, device: torch.device, model: nn.Module, init: weights.Init
) -> nn.Module:
    """Return `model` in FSDP1, FSDP2 or DDP, with fp32 weights from `init`. Call on all ranks."""
    policies.check_blocks(model, BLOCKS)
    policies.fuse(model)
    shards, minutes = args.shard_group_size, args.timeout_minutes
    mesh = policies.device_mesh(device, args.strategy, shards, minutes)
    policy = policies.wrap_policy(unit_classes(model))
    if args.wrap:
        policy = size_policy(model, args.wrap)
    if args.compile:
        policies.compile_blocks(model, BLOCKS)
    if args.strategy == "ddp":
        model.apply(init)
        model = DDP(model, gradient_as_bucket_view=True)  # one copy of the gradients
    elif args.fsdp == 2:
        options = policies.fsdp2_options(args.strategy, args.precision, args.cpu_offload)
        for module in policies.fsdp2_units(model, policy):  # inner ones first, the root last
            fully_shard(module, mesh=mesh, **options)
        policies.plan_gathers(model)
        model.apply(init)  # each rank keeps its rows
    else:
        model = FSDP(
            model,
            auto_wrap_policy=policy,
            mixed_precision=policies.PRECISIONS[args.precision],
            sharding_strategy=policies.STRATEGIES[args.strategy],
            cpu_offload=CPUOffload(offload_params=args.cpu_offload),
            device_mesh=mesh,
            device_id=device,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            use_orig_params=True,
            param_init_fn=init,
        )
    if args.activation_checkpointing:  # after FSDP, so that FSDP is the outer wrapper
        policies.checkpoint_activations(model, BLOCKS)
    return model


def load_data(args: Options, tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
    """Return the training set (None with --evaluate-only) and the validation sets by name.

    Your own data set needs len() and [i], which returns a sample that `data.collate` accepts.
    """
    return ranks.first_on_node(data.load, args, tokenizer)


def model_inputs(batch: Batch) -> Batch:
    """Return the part of a batch that the model's forward takes, without the targets."""
    return {"input_ids": batch["input_ids"]}


def check_loss(args: Options, device: torch.device, model: nn.Module) -> None:
    """Raise ValueError unless the loss is a sum and uses the model's causal logits. All ranks."""
    rows = data.probe_batch()
    probe = [batches.to_device(data.collate(x), device) for x in (rows, *([row] for row in rows))]
    dtype = policies.PRECISIONS[args.precision].param_dtype
    with policies.evaluation(model), policies.autocast(model, args.precision):
        check_model(model, summed_loss, model_inputs, probe, dtype)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Run the model on a batch and return the sum of `token_loss` over its targets."""
    return model(**model_inputs(batch), targets=batch["labels"])


def train(
    args: Options, model: nn.Module, facts: Facts, train_set: Any, val_loaders: Loaders,
    output: Output,
) -> bool:  # fmt: skip
    """Train from the checkpoint, if any; return False if no steps are left. Call on all ranks."""
    device = output.device
    sampler = batches.GlobalBatchSampler(  # same order on any number of ranks
        len(train_set), args.batch_size, args.gradient_accumulation_steps, args.seed
    )
    loader = DataLoader(
        train_set, batch_sampler=sampler, collate_fn=data.collate, pin_memory=device.type != "cpu",
        num_workers=args.num_workers, worker_init_fn=batches.block_stops,
    )  # fmt: skip
    groups = batches.parameter_groups(model, facts.shapes, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    total_steps = args.max_steps or args.epochs * sampler.steps_per_epoch
    factor = batches.learning_rate(args, total_steps, sampler.steps_per_epoch)
    scheduler = LambdaLR(optimizer, factor)
    scaler = policies.gradient_scaler(model, args.precision, optimizer)  # only fp16 needs it
    state = State(model, facts, optimizer, scheduler, scaler, total_steps)
    check = partial(check_loss, args, device, model)
    run = output.restore(state, loader, val_loaders, check)  # from the checkpoint, if there is one
    if run is None:  # no steps are left
        return False
    if run.needs_validation:
        run.log_validation(validation(args, model, val_loaders, output))

    for step in run.steps(loader):  # to stop, `with step` raises Stopped: a checkpoint is saved
        lr = scheduler.get_last_lr()[0]
        with step:
            loss = 0.0
            for batch in policies.micro_batches(model, step, args.accumulate_no_sync):
                with policies.autocast(model, args.precision):
                    # The mean over the target tokens of all ranks and micro-batches.
                    share = summed_loss(model, batch) / step.targets
                # FSDP and DDP average gradients over ranks, hence the factor.
                scaler.scale(share * dist.get_world_size()).backward()
                loss += share.detach()
            scaler.unscale_(optimizer)
            grad_norm = policies.clip_gradients(model, args.max_grad_norm)
            step.guard(optimizer, loss, grad_norm)  # a NaN changes nothing and ends the run
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()  # in fp16, even if the scaler skipped the step
            optimizer.zero_grad()
        if step.due(args.log_every):
            dist.all_reduce(loss)
            run.log_step(loss=loss, lr=lr, grad_norm=grad_norm)
        if step.due(args.eval_every):
            run.log_validation(validation(args, model, val_loaders, output))
        if step.due(args.save_every):
            run.save()
    return True  # then fsdp_main exports final/


@torch.no_grad()
def validation(args: Options, model: nn.Module, loaders: Loaders, output: Output) -> dict[str, Any]:
    """Return a dict: mean `loss` per token, `perplexity`, `losses` by data set. Call on all ranks.

    Every example counts once: a rank that has no examples left gets batches without targets.
    """
    totals = torch.zeros(len(loaders), 2, dtype=torch.float64, device=output.device)
    with policies.evaluation(model), policies.autocast(model, args.precision):
        for total, (name, loader) in zip(totals, loaders.items(), strict=True):
            for batch in output.progress(loader, f"validation on {name}"):
                total[0] += summed_loss(model, batches.to_device(batch, output.device))
                total[1] += batch["targets"]
    dist.all_reduce(totals)
    loss = totals[:, 0].sum() / totals[:, 1].sum()
    losses = dict(zip(loaders, (totals[:, 0] / totals[:, 1]).tolist(), strict=True))
    return {"loss": loss.item(), "perplexity": loss.exp().item(), "losses": losses}


def run_without_training(
    args: Options, model: nn.Module, facts: Facts, init: weights.Init, output: Output
) -> None:
    """Write the files of --export-only, --prepare-only or --evaluate-only. Call on all ranks."""
    device = output.device
    if args.export_only:
        output.export_checkpoint(wrap_model(args, device, model, init), facts)
        return
    train_set, val_sets = load_data(args, facts.tokenizer)
    if args.prepare_only:
        origin = readers.token_origin(args, facts.tokenizer)
        readers.write_prepared(args.output_dir, train_set, val_sets, origin)
        return
    model = wrap_model(args, device, model, init)
    val_loaders = batches.val_loaders(val_sets, args.batch_size, data.collate)
    output.load_evaluated(model, facts)
    check_loss(args, device, model)
    output.write_evaluation(validation(args, model, val_loaders, output))


if __name__ == "__main__":
    launch(fsdp_main, options.parse(Options, tiny=TinyOptions))
