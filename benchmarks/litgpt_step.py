"""litgpt's part of side_by_side.py, in an environment with litgpt alone: its requirements differ.

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 litgpt==0.5.13
    python benchmarks/side_by_side.py --peers litgpt --litgpt ENV/bin/python

Trains with `fit` of litgpt's pretrain.py. litgpt has no learned positions, so its model is a GPT-2
with rotary ones, of the same widths, with the embedding as its head; it is not compiled.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import FSDPStrategy
from litgpt import GPT, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.model import Block
from litgpt.pretrain import fit, initialize_weights

WARM_UP = 2  # steps that are not timed


class Batches:
    """A rank's batches of `blocks` [number, length + 1], with the times of their first and last."""

    def __init__(self, blocks: torch.Tensor, batch_size: int, steps: int):
        self.blocks = blocks
        self.batch_size = batch_size
        self.steps = steps
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def look_at_clock(self) -> None:
        """Note the time, once the GPU is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        self.seconds.append(time.perf_counter())
        self.cpu_seconds.append(time.process_time())

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        order = torch.randint(len(self.blocks), (self.steps + 1, size, self.batch_size))
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        for step in range(self.steps + 1):
            if step in (WARM_UP, self.steps):
                self.look_at_clock()
            yield self.blocks[order[step, rank]].to(device)


def make_state(shape: dict[str, int], length: int) -> tuple[lightning.Fabric, dict]:
    """Return Fabric, and the state that `fit` trains: a model of GPT-2's `shape`, for `length`
    tokens."""
    config = Config(
        block_size=length, n_embd=shape["n_embd"], n_layer=shape["n_layer"],
        n_head=shape["n_head"], vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"], parallel_residual=False,
    )  # fmt: skip
    gpu = torch.cuda.is_available()
    sharded = FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="FULL_SHARD")
    fabric = lightning.Fabric(
        accelerator="auto" if gpu else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=sharded if gpu else "ddp",
        precision="bf16-mixed" if gpu else "32-true",
    )
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    with fabric.init_module(empty_init=True):
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    model.lm_head.weight = model.transformer.wte.weight
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    return fabric, {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}


def main() -> None:
    """Train, and print targets and seconds of the timed steps as JSON on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=Path, help="a tensor's file")
    parser.add_argument("--shape", type=json.loads, help="of GPT-2, as in its config")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    blocks = torch.load(args.blocks)
    length = blocks.shape[1] - 1
    fabric, state = make_state(args.shape, length)
    batches = Batches(blocks, args.batch_size, args.steps + WARM_UP)
    tokens = (args.steps + WARM_UP) * args.batch_size * fabric.world_size * length
    with tempfile.TemporaryDirectory() as directory:
        fit(
            fabric=fabric,
            devices=fabric.world_size,
            state=state,
            train_dataloader=batches,
            val_dataloader=[blocks[: args.batch_size].to(fabric.device)],
            out_dir=Path(directory),
            tokenizer_dir=None,
            train=TrainArgs(
                save_interval=None, log_interval=10, micro_batch_size=args.batch_size,
                global_batch_size=args.batch_size * fabric.world_size, max_tokens=tokens,
                lr_warmup_steps=10, max_norm=1.0, tie_embeddings=True,
            ),
            eval=EvalArgs(interval=10**9, initial_validation=False, final_validation=False),
        )  # fmt: skip
    if fabric.global_rank == 0:
        start, end = batches.seconds
        cpu_start, cpu_end = batches.cpu_seconds
        found = {
            "targets": args.steps * args.batch_size * fabric.world_size * length,
            "seconds": end - start,
            "cpu": (cpu_end - cpu_start) / args.steps,
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
