"""Fine-tune Llama on chats with PyTorch FSDP, from 7B to 70B, with packed documents.

    python llama_fsdp.py --model-name tiny                                   # no GPU, no download
    torchrun --nnodes 1 --nproc_per_node 8 llama_fsdp.py --dataset chats.jsonl
    torchrun --nnodes 4 --nproc_per_node 8 --rdzv-backend c10d \\
        --rdzv-endpoint HOST:29500 --rdzv-id 1 llama_fsdp.py \\
        --model-name meta-llama/Llama-2-70b-hf --dataset chats.jsonl         # on each of 4 nodes

One optimizer step trains on --batch-size x --gradient-accumulation-steps x processes sequences of
--max-seq-length tokens, each packed with documents that do not see each other. Run the same command
again to continue from the newest checkpoint; OUTPUT_DIR/final is a Hugging Face model. To make a
script of your own, copy this one with policies.py, chat_dataset.py and the folder runtime/, and
change, in this order: the import of LlamaDecoderLayer, BLOCKS, MODEL and TINY, which is all for
another model of its kind, such as Qwen 3; `load_model`, `setup_data`, `forward`.
"""

import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import chat_dataset
import policies
from runtime import (
    adapters,
    arguments,
    attention,
    batches,
    checkpoints,
    hf_weights,
    identities,
    optimization,
    ranks,
)
from runtime.checkpoints import TrainState
from runtime.model_checks import check_logits, fit_config, flops_per_token, logit_scale_and_cap
from runtime.run import Run, launch

BLOCKS = (LlamaDecoderLayer,)  # FSDP units, compiled and recomputed one by one
MODEL = transformers.LlamaForCausalLM
TINY = {  # the names that its config has; few experts, and token ids below 384
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RECIPE = {  # of Llama-2 70B
    "lr": 5e-5,
    "lr_schedule": "cosine",
    "batch_size": 1,
    "epochs": 1,
    "seed": 100,
    "log_every": 25,
    "eval_every": 100,
    "save_every": 250,
    "timeout_minutes": 90.0,
    "activation_checkpointing": True,
    "export_dtype": "bf16",
}
CHUNK = 1024  # tokens whose logits are held at a time
SCRIPT = Path(__file__).stem
Batch = dict[str, Tensor | int]  # as `collate` makes it
Loaders = dict[str, DataLoader]  # of the validation sets, by name


@record
def fsdp_main(args: Namespace) -> int:
    """Join the other processes, train, leave; returns the exit code. Run says how it can end."""
    device = setup(args)
    try:
        with Run(args, device, SCRIPT) as run:
            if args.export_only or args.prepare_only or args.evaluate_only:
                run_without_training(args, device, run)
            else:
                train_and_export(args, device, run)
        return run.exit_code
    finally:
        cleanup()


def train_and_export(args: Namespace, device: torch.device, run: Run) -> None:
    """From the pretrained weights, or a checkpoint, to OUTPUT_DIR/final and best; all ranks."""
    state, tokenizer, loader, val_loaders = prepare(args, device, run.checkpoint)
    if not run.begin(state, loader):
        return
    if state.step == 0 or state.validation_due:
        run.log_validation(validation(args, state.model, val_loaders, run))
    train(args, state, loader, val_loaders, run)
    run.log("done", **run.export(tokenizer))


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Read the command line; what is wrong is said at once, before anything is started."""
    parser = arguments.Parser(__doc__)
    add = arguments.add_model(parser, "meta-llama/Llama-2-7b-hf")
    add("--attention", choices=attention.CHOICES, default="auto", help=attention.HELP)
    chat_dataset.add_arguments(parser)
    adapters.add_arguments(parser)
    arguments.add_common(parser)
    parser.set_defaults(**RECIPE)
    args = parser.parse_args(argv)
    problems = chat_dataset.check_arguments(args) + adapters.check_arguments(args)
    problems += attention.check_arguments(args, arguments.resolve_precision(args.precision))
    return arguments.checked(args, problems)


def setup(args: Namespace) -> torch.device:
    """Join the process group, of nccl on GPUs and gloo on CPUs; return the device."""
    device = ranks.local_device()
    timeout = timedelta(minutes=args.timeout_minutes)
    with ranks.rendezvous(timeout) as place:  # store, rank and world_size; adds gloo for CPUs
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
            **place,
        )
    ranks.set_seed(args.seed)
    return device


def cleanup() -> None:
    """Leave the process group; not after an error with nccl, which would wait for absent ranks."""
    if sys.exc_info()[0] is None or dist.get_backend() == "gloo":
        dist.destroy_process_group()


def chunked_loss(hidden: Tensor, head: nn.Module, targets: Tensor, config: Any) -> Tensor:
    """Sum the cross-entropy, in nats, of logits of which only a chunk is held.

    `hidden` is [positions, width], `targets` int64 [positions], -100 where nothing is predicted.
    `config` says whether the logits that `head` makes are scaled or capped. Call it in the forward
    of the FSDP unit that owns the head, for FSDP gathers its weight only inside that.

    Empty `targets` give the logits [positions, vocabulary], for `check_logits`.
    """
    weight, bias = head.weight, head.bias
    scale, cap = logit_scale_and_cap(config)

    def logits(part: Tensor) -> Tensor:
        found = F.linear(part, weight, bias).float() * scale
        return found if cap is None else cap * torch.tanh(found / cap)

    def summed(part: Tensor, part_targets: Tensor) -> Tensor:
        return F.cross_entropy(logits(part), part_targets, reduction="sum")

    if targets.numel() == 0:
        return logits(hidden)
    if scale != 1 or cap is not None or not hasattr(F, "linear_cross_entropy"):
        return policies.recomputed_sum(summed, CHUNK, hidden, targets)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)
    # "sum" computes gradients in the forward pass, and logits only once, but returns the dtype of
    # `hidden`, which keeps three digits in bf16 and overflows in fp16. So 16 bits take "none".
    how = {"reduction": "sum" if hidden.dtype == torch.float32 else "none", "options": chunks}
    losses = F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, **how)
    return losses.sum(dtype=torch.float32)


class LossHead(nn.Linear):
    """An output head that returns the summed loss where it is given targets, else the logits."""

    def __init__(self, head: nn.Linear, config: transformers.PretrainedConfig):
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None)
        self.config = config

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """As `chunked_loss`, in this module's own forward: it is an FSDP unit if it is not tied."""
        if targets is None:
            return super().forward(hidden)
        return chunked_loss(hidden, self, targets, self.config)


class LossModel(MODEL):
    """Hugging Face's model, with a forward that may end in the loss."""

    def __init__(self, config: transformers.PretrainedConfig):
        super().__init__(config)
        self.lm_head = LossHead(self.lm_head, config)
        self.post_init()  # ties the new head, or initialises it

    def forward(
        self,
        input_ids: Tensor | None = None,
        targets: Tensor | None = None,
        target_positions: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Hugging Face's forward; given `targets`, returns their summed cross-entropy in nats.

        `input_ids`, `targets` and `position_ids` are int64 [batch, length] as `collate` makes them:
        a document begins wherever the positions begin again. `target_positions`, int64, are those
        in the flattened batch that the head is used at: most of a chat is prompt.
        """
        if targets is None:
            return super().forward(input_ids, **options)
        if self.config._attn_implementation == "packed":
            # Without any mask Transformers would look for documents itself, and wait for the GPU.
            options["attention_mask"] = torch.ones_like(input_ids)
        hidden = self.model(input_ids, use_cache=False, **options).last_hidden_state
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if target_positions is not None and targets.numel() > 0:
            hidden, targets = hidden[target_positions], targets[target_positions]
        return self.lm_head(hidden, targets)


LossModel.__name__ = MODEL.__name__  # which is written into config.json


def load_model(
    args: Namespace, device: torch.device, pretrained: bool
) -> tuple[nn.Module, Tokenizer, hf_weights.Init | None]:
    """The model, its tokenizer, and if it is on meta the function that gives FSDP its weights.

    Without `pretrained` the weights are only allocated, for a checkpoint to fill. Raises ValueError
    if the model cannot be had, is of another type, or too short.
    """
    if args.model_name == "tiny":
        tokenizer = ByT5Tokenizer()
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        config = MODEL.config_class(vocab_size=len(tokenizer), **ids, **TINY)
    else:
        directory, config, tokenizer = hf_weights.open_model(args.model_name, MODEL)
    fit_config(args, LossModel, config, "max_seq_length")
    tokenizer.chat_template = tokenizer.chat_template or chat_dataset.TEMPLATE  # final/ has it too
    attention.choose(args, config, MODEL)
    if args.model_name == "tiny":
        model = LossModel(config)  # the seed is the same on all ranks
    else:
        model = hf_weights.meta_model(LossModel, config, directory)
    if args.lora_rank:
        adapters.add(args, model, BLOCKS, policies.PRECISIONS[args.precision].param_dtype, device)
    if args.model_name == "tiny":
        return model, tokenizer, None
    source = directory if pretrained else None
    return model, tokenizer, hf_weights.WeightLoader(args, model, source, device).fill


def units(model: nn.Module) -> policies.Classes:
    """The classes of its FSDP units: tied, the embeddings and the head stay in the root."""
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        return BLOCKS
    return (*BLOCKS, nn.Embedding, LossHead)


def wrap_model(
    args: Namespace, device: torch.device, model: nn.Module, init: hf_weights.Init | None
) -> nn.Module:
    """The model under FSDP1, FSDP2 or DDP, on `device` with fp32 weights; all ranks."""
    policies.fuse_gelu(model)
    optimization.note_decay(model)
    policy = policies.wrap_policy(units(model))
    if args.compile:
        policies.compile_blocks(model, BLOCKS)
    if args.strategy == "ddp":
        hf_weights.materialize(model, init)
        model = DDP(model.to(device), gradient_as_bucket_view=True)  # one copy of the gradients
    elif args.fsdp == 2:
        model = policies.fully_shard_units(args, device, model, policy)
        hf_weights.materialize(model, init)
    else:
        model = FSDP(
            model,
            auto_wrap_policy=policy,
            mixed_precision=policies.PRECISIONS[args.precision],
            sharding_strategy=policies.STRATEGIES[args.strategy],
            cpu_offload=CPUOffload(offload_params=args.cpu_offload),
            device_mesh=policies.device_mesh(args, device),
            device_id=device,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=True,
            use_orig_params=True,
            param_init_fn=init,
        )
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if args.activation_checkpointing:
        policies.checkpoint_activations(model, BLOCKS)
    return model


def setup_model(
    args: Namespace, device: torch.device, pretrained: bool
) -> tuple[nn.Module, Tokenizer, dict[str, Any]]:
    """The wrapped model, its tokenizer, and what tells its kind from others; all ranks."""
    model, tokenizer, init = load_model(args, device, pretrained)
    hf_weights.say_size(args.model_name, model)
    identity = identities.of_model(args, SCRIPT, model)
    return wrap_model(args, device, model, init), tokenizer, identity


def setup_data(args: Namespace, tokenizer: Tokenizer) -> tuple[DataLoader | None, Loaders]:
    """The loader of this rank's micro-batches, and one of each validation set, by its name.

    With --evaluate-only the first is None. A data set of your own needs len() and [i], which gives
    what `collate` takes. Raises ValueError if the data cannot be had or are too few.
    """
    load = chat_dataset.load_sets
    train_set, val_sets = ranks.first_on_node(load, args, tokenizer, dist.get_rank() == 0)
    val_loaders = {}
    for name, documents in val_sets.items():
        packs = chat_dataset.Packs(documents, args)
        val_loaders[name] = batches.val_loader(args, packs, chat_dataset.collate)
    if args.evaluate_only:
        return None, val_loaders
    packs = chat_dataset.Packs(train_set, args)
    return batches.train_loader(args, packs, chat_dataset.collate), val_loaders


def prepare(
    args: Namespace, device: torch.device, checkpoint: Path | None
) -> tuple[TrainState, Tokenizer, DataLoader, Loaders]:
    """Model, data and optimizer, as `checkpoint` left them if there is one; all ranks."""
    # A checkpoint of adapters holds nothing of the weights below them.
    pretrained = checkpoint is None or args.lora_rank > 0
    model, tokenizer, identity = setup_model(args, device, pretrained)
    loader, val_loaders = setup_data(args, tokenizer)
    epoch_steps = loader.batch_sampler.steps_per_epoch
    total_steps = args.max_steps or args.epochs * epoch_steps
    groups = optimization.parameter_groups(model, args.weight_decay)
    optimizer = optimization.new_optimizer(args, groups)
    scheduler = optimization.lr_schedule(args, optimizer, total_steps, epoch_steps)
    scaler = policies.gradient_scaler(args, device, optimizer)
    identity |= identities.of_data(args, loader, val_loaders)
    state = TrainState(model, optimizer, scheduler, scaler, device, total_steps, identity)
    if device.type != "cpu":  # for the share of a GPU's peak
        state.flops_per_token = flops_per_token(policies.unwrapped(model), loader.dataset.span)
    ranks.set_seed(args.seed + dist.get_rank())  # so that dropout differs between ranks
    if checkpoint:
        checkpoints.load_checkpoint(checkpoint, state, args)
    check_loss(args, device, model)
    return state, tokenizer, loader, val_loaders


def model_inputs(batch: Batch) -> Batch:
    """What the model is given of a batch besides the targets."""
    names = ("input_ids", "position_ids", "cu_seq_lens", "longest_document", "target_positions")
    return {name: batch[name] for name in names}


def check_loss(args: Namespace, device: torch.device, model: nn.Module) -> None:
    """Raise ValueError unless the loss is the model's own and documents are apart; all ranks."""
    few_tokens = model_inputs(chat_dataset.collate(chat_dataset.examples(args)))
    dtype = policies.PRECISIONS[args.precision].param_dtype
    with policies.evaluation(model), policies.autocast(args, device):
        check_logits(model, few_tokens, device, dtype, args.packing)


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy in nats, summed over the batch's target tokens (labels that are not -100)."""
    return model(**model_inputs(batch), targets=batch["labels"])


def train(
    args: Namespace, state: TrainState, loader: DataLoader, val_loaders: Loaders, run: Run
) -> None:
    """Train from where `state` is to its last step; all ranks."""
    for micro_batches, samples in batches.steps(loader, state):
        lr = state.scheduler.get_last_lr()[0]
        with run.step():
            loss, grad_norm = train_step(args, state, list(micro_batches), samples, run)
        if run.due(args.log_every):
            dist.all_reduce(loss)
            run.log("train", loss=loss.item(), lr=lr, grad_norm=grad_norm.item(), **run.speed())
        if run.due(args.eval_every):
            run.log_validation(validation(args, state.model, val_loaders, run))
        if run.due(args.save_every):
            run.save()


def train_step(
    args: Namespace, state: TrainState, micro_batches: list[Batch], samples: list[int], run: Run
) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's micro-batches of the step's `samples`; all ranks.

    The loss is the mean over the target tokens of all ranks and micro-batches. FSDP and DDP
    average gradients over ranks, hence the factor of the world size. Returns this rank's share
    of the loss, to be summed over ranks, and the global gradient norm before clipping.
    """
    counts = [(batch["targets"], batch["tokens"]) for batch in micro_batches]
    targets = run.exchange(counts)  # of all ranks; or all stop, if one was asked to
    loss = torch.zeros((), device=state.device)
    for number, batch in enumerate(micro_batches, start=1):
        batch = batches.to_device(batch, state.device)
        with policies.gradient_sync(args, state.model, last=number == len(micro_batches)):
            with policies.autocast(args, state.device):
                share = summed_loss(state.model, batch) / targets
            state.scaler.scale(share * dist.get_world_size()).backward()
        loss += share.detach()

    state.scaler.unscale_(state.optimizer)
    grad_norm = policies.clip_gradients(state.model, args.max_grad_norm)
    state.optimizer_step(good=grad_norm.isfinite() & (targets > 0))
    run.check_later(state, samples, loss, grad_norm)  # all end if it was not good
    state.step += 1
    state.consumed += len(samples)
    return loss, grad_norm


@torch.no_grad()
def validation(
    args: Namespace, model: nn.Module, loaders: Loaders, run: Run
) -> dict[str, float | dict]:
    """Mean loss over the target tokens of all validation sets, and of each; all ranks.

    Every example counts once, whatever the number of ranks: a rank that is out of examples is
    given batches without targets, so that all make the same number of forward passes.
    """
    totals = torch.zeros(len(loaders), 2, dtype=torch.float64, device=run.device)
    with policies.evaluation(model), policies.autocast(args, run.device):
        for total, (name, loader) in zip(totals, loaders.items(), strict=True):
            for batch in run.progress(loader, f"validation on {name}"):
                total[0] += summed_loss(model, batches.to_device(batch, run.device))
                total[1] += batch["targets"]
    dist.all_reduce(totals)
    losses = (totals[:, 0] / totals[:, 1]).tolist()
    loss = totals[:, 0].sum() / totals[:, 1].sum()
    return {
        "loss": loss.item(),
        "perplexity": loss.exp().item(),
        "losses": dict(zip(loaders, losses, strict=True)),
    }


def run_without_training(args: Namespace, device: torch.device, run: Run) -> None:
    """What --export-only, --prepare-only and --evaluate-only ask for; all ranks."""
    if args.export_only:
        run.export_checkpoint(*setup_model(args, device, pretrained=False))
    elif args.prepare_only:
        _, tokenizer, _ = load_model(args, device, pretrained=False)
        run.write_prepared(*setup_data(args, tokenizer), tokenizer)
    else:
        pretrained = run.checkpoint is None or args.lora_rank > 0  # as in `prepare`
        model, tokenizer, identity = setup_model(args, device, pretrained)
        _, val_loaders = setup_data(args, tokenizer)
        run.load_evaluated(model, identity, val_loaders)
        check_loss(args, device, model)
        run.write_evaluation(val_loaders, validation(args, model, val_loaders, run))


if __name__ == "__main__":
    launch(fsdp_main, parse_args())
