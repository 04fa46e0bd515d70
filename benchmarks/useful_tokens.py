"""Useful tokens per second of T5: this repository's way against the tutorial's, in one run.

    python benchmarks/useful_tokens.py                               # docstrings, two CPU processes
    python benchmarks/useful_tokens.py --dataset articles.jsonl --source-column document \\
        --target-column summary

The tutorial's way: every rank tokenises a sample when it comes to it, pads it to the full 512 and
150 tokens, and reads the loss back in each step. Ours: tokenised once, batches of about one length,
padded to the longest. Both train the same FSDP-wrapped model on the same data set, alternating
after each step. A useful token is one that is not padding.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import Loop, launch, relay, without_files
from driven import TimedRun
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import ByT5Tokenizer

import memory_estimator
import policies
import T5_training


class Padded(Dataset):
    """A data set of texts that are tokenised and padded to the full length one at a time."""

    def __init__(self, rows: Dataset, tokenizer: object, lengths: tuple[int, int]):
        self.tokenizer, self.lengths = tokenizer, lengths
        decode = tokenizer.batch_decode
        self.sources = decode(rows["input_ids"][:], skip_special_tokens=True)
        self.targets = decode(rows["labels"][:], skip_special_tokens=True)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        how = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        source, target = (
            self.tokenizer(text, max_length=length, **how)
            for text, length in zip(
                (self.sources[index], self.targets[index]), self.lengths, strict=True
            )
        )
        names = ("input_ids", "attention_mask")
        return {name: source[name].squeeze(0) for name in names} | {
            "labels": target.input_ids.squeeze(0)
        }


def worker(options: argparse.Namespace, flags: list[str]) -> None:
    """Train both ways; rank 0 prints seconds and useful tokens of all ranks as JSON."""
    without_files()
    args = T5_training.parse_args([*flags, "--max-steps", "100000", "--num-train-samples", "0"])
    device = T5_training.setup(args)
    tokens = {"ours": [0], "tutorial": [0]}
    run = TimedRun(T5_training, args, device)
    rows = run.train_set.dataset
    model, tokenizer, init = T5_training.load_model(args, device)
    model = T5_training.wrap_model(args, device, model, init)

    def ours(end_of_step: Callable[[], None]) -> None:
        def count() -> None:
            tokens["ours"].append(run.state.tokens - sum(tokens["ours"]))
            end_of_step()

        run.loop(count)

    def tutorial(end_of_step: Callable[[], None]) -> None:
        pad, total = tokenizer.pad_token_id, torch.zeros(2, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        data = Padded(rows, tokenizer, (args.source_length, args.target_length))
        padded = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, shuffle=True))
        while True:
            for batch in padded:
                count = (batch["input_ids"] != pad).sum() + (batch["labels"] != pad).sum()
                batch = {key: value.to(device) for key, value in batch.items()}
                optimizer.zero_grad()
                with policies.autocast(args, device):
                    loss = model(**batch, use_cache=False).loss
                loss.backward()
                optimizer.step()
                total[0] += loss.item()
                total[1] += len(batch)
                tokens["tutorial"].append(count)
                end_of_step()

    loops: dict[str, Loop] = {"ours": ours, "tutorial": tutorial}
    seconds = relay(loops, options.steps, device)
    useful = torch.tensor([float(sum(tokens["tutorial"][2:]))])
    dist.all_reduce(useful)
    useful = {"ours": sum(tokens["ours"][2:]), "tutorial": useful.item()}
    if dist.get_rank() == 0:
        found = {n: {"seconds": sum(seconds[n]), "tokens": useful[n]} for n in loops}
        print(json.dumps(found | {"samples": len(rows)}))
    T5_training.cleanup()


def main() -> None:
    """Print one table and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--model", default="tiny-t5", help="a T5 of memory_estimator.py")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # flags of T5_training.py, as JSON
    options, flags = parser.parse_known_args()
    if options.worker:
        worker(options, json.loads(options.worker))
        return
    with tempfile.TemporaryDirectory() as directory:
        memory_estimator.load_config(options.model).save_pretrained(directory)
        ByT5Tokenizer().save_pretrained(directory)
        common = ["--model-name", directory, "--dataset", "docstrings"]
        common += ["--output-dir", f"{directory}/output"]
        found = launch(options.processes, __file__, "--steps", options.steps,
                       "--worker", json.dumps([*common, *flags]))  # fmt: skip
    print(f"{found['samples']:,} samples, {options.processes} processes\n")
    print("| way | steps | useful tokens | s | useful tokens/s |\n|---|---|---|---|---|")
    speed = {}
    for name in ("ours", "tutorial"):
        seconds, tokens = found[name]["seconds"], found[name]["tokens"]
        speed[name] = tokens / seconds
        print(f"| {name} | {options.steps} | {tokens:,.0f} | {seconds:.1f} | {speed[name]:,.0f} |")
    print(f"\nours / tutorial: {speed['ours'] / speed['tutorial']:.2f}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as `launch` of runtime/run.py, which says why
