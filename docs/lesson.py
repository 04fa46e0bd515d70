"""FSDP in one file, on CPUs, without a download. docs/sharding.md explains its five steps.

export OMP_NUM_THREADS=1
torchrun --nproc_per_node 2 docs/lesson.py           # trains six steps, saves after the third
torchrun --nproc_per_node 4 docs/lesson.py --resume  # repeats steps 4 to 6 on four processes
python docs/lesson.py --plain                        # the same training without sharding
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

CHECKPOINT = "output/lesson"
CONFIG = GPT2Config(
    vocab_size=128, n_positions=32, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0,
    tie_word_embeddings=False,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip


def megabytes(tensors):
    """Return the MB (10^6 bytes) that this rank stores of tensors. On meta they have no data."""
    shards = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.nbytes for x in shards if not x.is_meta) / 1e6


def documents(step):
    """Return inputs and targets of four documents that count upwards, int64 [4, 32]. They have
    different lengths: targets after the end of a document are -100."""
    generator = torch.Generator().manual_seed(step)  # equal on all ranks
    first, lengths = torch.randint(8, 33, (2, 4, 1), generator=generator)
    tokens = first + torch.arange(33)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(32) >= lengths, -100)


is_plain = "--plain" in sys.argv
# CommDebugMode and FSDP warn that hooks miss outputs that are views or no tensors. None is used.
warnings.simplefilter("ignore")
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank = dist.get_rank()
size = dist.get_world_size()
print0 = (lambda text: None) if rank else print

# 2. Nobody holds the whole model: it has no data until each rank allocates its shards.
with torch.device("meta"):
    model = GPT2LMHeadModel(CONFIG)
print0(f"MB per rank: {megabytes(model.parameters()):.2f} before sharding")
mesh = init_device_mesh("cpu", (size,))
if not is_plain:
    # Each block is a unit; the last unit is the rest of the model.
    for unit in [*model.transformer.h, model]:
        # 3. Free or keep: None frees a block's weights after its forward pass.
        fully_shard(unit, mesh=mesh, reshard_after_forward=None)
model.to_empty(device="cpu")
torch.manual_seed(0)  # equal on all ranks
for name, parameter in model.named_parameters():  # one at a time is whole
    whole = torch.full(parameter.shape, float(name.endswith("weight")))  # biases are 0
    if parameter.ndim == 2:
        whole.normal_(std=0.02)
    if not is_plain:  # keep this rank's rows; rank 0 sends nothing
        whole = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
    parameter.detach().copy_(whole)
optimizer = AdamW(model.parameters(), lr=5e-4)  # after sharding: of shards
torch.manual_seed(rank)  # ranks would draw different dropout

# 5. Sharded checkpoints: each rank reads its own part here, and writes it below.
start = 0
if "--resume" in sys.argv:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=CHECKPOINT)  # fills the tensors of `state`
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    start = state["step"]

for step in range(start + 1, 7):
    batch = [tokens[rank::size] for tokens in documents(step)]
    # 4. A correct step: the loss is the mean over the targets of all ranks.
    targets = (batch[1] != -100).sum()
    dist.all_reduce(targets)
    total = 0
    for inputs, labels in [batch]:  # one micro-batch
        with CommDebugMode() as communication:
            logits = model(inputs, use_cache=False).logits.flatten(0, 1)
            gathered = megabytes(model.parameters())
            loss = cross_entropy(logits, labels.flatten(), reduction="sum") / targets
            # FSDP averages gradients over ranks, hence the factor.
            (loss * size).backward()
        total += loss.detach()
    gradients = [parameter.grad for parameter in model.parameters()]
    if is_plain:
        with communication:
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= size
    norm = get_total_norm(gradients)  # of all ranks' shards
    clip_grads_with_norm_(model.parameters(), 0.5, norm)
    optimizer.step()
    dist.all_reduce(total)
    print0(f"step {step}: loss {total:.6f}, norm {norm.item():.5f}")
    if step == 1:
        # 1. What uses the memory.
        moments = [x for state in optimizer.state.values() for x in state.values()]
        print0(f"MB per rank: weights {megabytes(model.parameters()):.2f}, after the forward pass "
               f"{gathered:.2f}, gradients {megabytes(gradients):.2f}, moments "
               f"{megabytes(moments):.2f}")  # fmt: skip
        print0({str(name): n for name, n in communication.get_comm_counts().items()})
    optimizer.zero_grad()
    if step == 3:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=CHECKPOINT)

sys.stdout.flush()
os._exit(0)  # Python's own exit can abort in gloo's threads
