"""Memory and time of loading a Llama into FSDP: streamed, against others' ways.

    python benchmarks/load_memory.py                     # 1.1B parameters, fp32, 2 CPU processes
    python benchmarks/load_memory.py --model DIRECTORY --processes 8

`streamed` is this repository's: rank 0 reads and broadcasts a tensor at a time, as FSDP comes to a
unit. `ddp` is the same under DistributedDataParallel. `rows` and `scattered` are FSDP2's: each rank
reads its rows, or rank 0 reads a tensor and scatters it; `nf4` is --load-in-4bit. In `whole` rank 0
holds the whole model and broadcasts from it, in `every` each rank loads it all, and on GPUs
`accelerate` is Accelerate's RAM-efficient loading. Each runs in a torchrun of its own, because
peaks never fall. Then `export` writes the model again in files of 500 MB.

Files of fp32 are mapped, not read, by Transformers, so that to load them whole costs little; but
models on the hub are in 16 bits: `--stored-dtype bfloat16`.

The last line is one JSON object; MB are 10^6 bytes. The exit code is 1 if a bound is missed: for
`streamed`, rank 0's peak is at most 1.05 times that of rank 1, and rises by at most its shard, two
of the largest unit, and 250 MB; by `export` it rises by at most a file, the largest unit, and
250 MB; and the weights are those of `from_pretrained`. For FSDP2 anonymous memory counts, without
the mapped pages of the files: it rises by at most 1.02 times the shard, one tensor where each rank
reads, and two on rank 0 where it scatters. For `nf4`, 4 bits, by 1.1 times what stays (half a byte
a parameter in the blocks, the scales, and fp32 for the rest), one block in 16 bits, and on a CPU
what bitsandbytes' own quantiser takes for the largest layer, measured.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from common import launch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from transformers import ByT5Tokenizer, LlamaConfig

import llama_fsdp
from runtime import hf_export, hf_load, models, stored_tensors

FSDP2 = {"rows": 1, "scattered": 2}  # how many tensors rank 0 may hold beside its shard
VARIANTS = ["streamed", "ddp", *FSDP2, "whole", "every"]
if importlib.util.find_spec("peft") and importlib.util.find_spec("bitsandbytes"):
    VARIANTS.append("nf4")
if torch.cuda.is_available():
    VARIANTS += ["accelerate"]  # has no FSDP on a CPU
SLACK, FILE = 250, 500  # MB


def memory(peak: bool) -> float:
    """Return the resident memory of this process in MB, or its peak, on the CPU."""
    lines = Path("/proc/self/status").read_text().splitlines()
    key = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1.024e-3


class AnonymousMemory(threading.Thread):
    """A thread that measures this process's anonymous memory in MB every millisecond, while
    entered."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = self.now()
        self.over = False

    @staticmethod
    def now() -> float:
        """Return RssAnon of /proc/self/status, in MB."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1.024e-3

    def run(self) -> None:
        """Measure the peak until the context is left."""
        while not self.over:
            self.peak = max(self.peak, self.now())
            time.sleep(1e-3)

    def __enter__(self) -> "AnonymousMemory":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.join()


def make_model(directory: Path, dtype: torch.dtype) -> None:
    """Write a random Llama of 1.1B parameters, in files of 1 GB."""
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32_000}
    model = transformers.LlamaForCausalLM(LlamaConfig(**shape)).to(dtype)
    model.save_pretrained(directory, max_shard_size="1GB")
    ByT5Tokenizer().save_pretrained(directory)


def read_files(directory: Path) -> float:
    """Read all tensors once; return the seconds."""
    start = time.perf_counter()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                file.get_tensor(key).sum()
    return time.perf_counter() - start


class EveryRank:
    """A loader that has each rank load the whole model, before it is sharded."""

    fill = None

    def __init__(self, args: argparse.Namespace, model: transformers.PreTrainedModel, *_: object):
        whole = type(model).from_pretrained(args.model_name, dtype=torch.float32)
        model.load_state_dict(whole.state_dict(), assign=True)
        model.model.rotary_emb = whole.model.rotary_emb


def load(variant: str, args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """Load the model as `variant` does; return it wrapped."""
    if variant == "scattered":
        hf_load._everyone_sees = lambda *_: False
    if variant == "whole" and dist.get_rank() == 0:
        whole = transformers.LlamaForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
        tensors = dict(whole.named_parameters())
        del whole
        stored_tensors.read = lambda path, key: tensors.pop(key).data
    if variant == "every":
        hf_load.WeightLoader = EveryRank
    if variant == "accelerate":
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        # With these from_pretrained leaves the model empty on every rank but the first.
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            cpu_ram_efficient_loading=True,
            sync_module_states=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        whole = transformers.LlamaForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
        return Accelerator(fsdp_plugin=plugin).prepare(whole)
    model, _, init = llama_fsdp.load_model(args, device)
    return llama_fsdp.wrap_model(args, device, model, init)


def quantizer_mb(block: torch.nn.Module) -> float:
    """Measure the MB that bitsandbytes takes on the CPU to quantise a block's largest matrix,
    beside the matrix."""
    from bitsandbytes.functional import quantize_4bit

    shape = max((p.shape for p in block.parameters() if p.ndim == 2), key=lambda s: s.numel())
    matrix = torch.randn(shape)
    how = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
    quantize_4bit(matrix[:1], **how)  # a warm-up, whose memory is kept
    with AnonymousMemory() as anonymous:
        quantize_4bit(matrix, **how)
    return anonymous.peak - anonymous.first


def export(model: FSDP, directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """Export the model; return memory and seconds of this rank."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    baseline, start = memory(peak=False), time.perf_counter()
    hf_export.export_model(model, ByT5Tokenizer(), directory / "export", args)
    seconds = time.perf_counter() - start
    return {"baseline_mb": baseline, "peak_mb": memory(peak=True), "seconds": seconds}


def plain_save(directory: Path) -> float:
    """Return the seconds in which rank 0 alone writes the same tensors from its memory by
    `save_file`."""
    seconds = 0.0
    if dist.get_rank() == 0:
        whole = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tensors = {name: tensor.detach().clone() for name, tensor in whole.named_parameters()}
        start = time.perf_counter()
        save_file(tensors, directory / "plain.safetensors")
        seconds = time.perf_counter() - start
        (directory / "plain.safetensors").unlink()
    return seconds


def equal_tensors(directory: Path) -> int:
    """Count the exported tensors that equal those of `from_pretrained`; -1 if one does not."""
    tensors = []
    for path in (directory, directory / "export"):
        loaded = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        tensors.append(dict(loaded.named_parameters()))
    plain, exported = tensors
    same = [torch.equal(tensor, exported[name]) for name, tensor in plain.items()]
    return len(same) if all(same) else -1


def worker(variant: str, directory: Path) -> None:
    """Load, and print the figures of all ranks as JSON on rank 0."""
    flags = ["--precision", "fp32", "--max-shard-size", str(FILE / 1e3), "--export-dtype", "fp32"]
    if variant in FSDP2:
        flags += ["--fsdp", "2"]
    if variant == "nf4":
        flags += ["--lora-rank", "16", "--load-in-4bit"]
    if variant == "ddp":
        flags += ["--strategy", "ddp"]
    args = llama_fsdp.parse_args(["--model-name", str(directory), *flags])
    device = llama_fsdp.setup(args)
    dist.barrier()
    baseline, start = memory(peak=False), time.perf_counter()
    with AnonymousMemory() as anonymous:
        model = load(variant, args, device)
    dist.barrier()
    seconds = time.perf_counter() - start
    flat = [m._flat_param for m in model.modules() if isinstance(m, FSDP)]
    sizes = [p._unpadded_unsharded_size.numel() for p in flat]
    with torch.device("meta"):
        block = llama_fsdp.LlamaDecoderLayer(models.unwrapped(model).config, 0)
    parameters = list(model.parameters())
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    for module in model.modules():
        if hasattr(module, "quant_state"):
            shards += [module.quant_state.absmax, module.quant_state.state2.absmax]
    mine = {
        "baseline_mb": baseline,
        "peak_mb": memory(peak=True),
        "anonymous_rise_mb": anonymous.peak - anonymous.first,
        "seconds": seconds,
        "shard_mb": sum(p.nbytes for p in flat or shards) / 1e6,
        "largest_unit_mb": max(sizes, default=0) * 4e-6,
        "block_mb": sum(p.numel() for p in block.parameters()) * 2e-6,
        "largest_tensor_mb": max(p.numel() for p in parameters) * 4e-6,
    }
    if variant == "nf4" and device.type == "cpu":
        mine["quantizer_mb"] = quantizer_mb(block)
    if variant in ("streamed", *FSDP2):
        mine["export"] = export(model, directory, args)
        mine["equal_tensors"] = equal_tensors(directory) if dist.get_rank() == 0 else 0
        mine["plain_save_seconds"] = plain_save(directory)
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        print(json.dumps(ranks), flush=True)
    llama_fsdp.cleanup()


def missed(ranks: list[dict]) -> list[str]:
    """Return the bounds that the streamed variant misses, a sentence each."""
    first, second = ranks[0], ranks[-1]
    rise, written = first["peak_mb"] - first["baseline_mb"], first["export"]
    export_rise = written["peak_mb"] - written["baseline_mb"]
    most = first["shard_mb"] + 2 * first["largest_unit_mb"] + SLACK
    export_most = SLACK  # fp32 shards are written as they are
    share = first["peak_mb"] / second["peak_mb"]
    found = {
        f"rank 0's peak is {share:.3f} times rank 1's, more than 1.05": share > 1.05,
        f"rank 0 rises by {rise:,.0f} MB, more than {most:,.0f}": rise > most,
        f"export rises by {export_rise:,.0f} MB, more than {export_most:,.0f}": export_rise
        > export_most,
        "the weights are not those of from_pretrained": first["equal_tensors"] < 0,
    }
    return [sentence for sentence, is_so in found.items() if is_so]


def missed_by_fsdp2(variant: str, ranks: list[dict]) -> list[str]:
    """Return the bounds that a variant of FSDP2 misses, a sentence each."""
    found = []
    for rank, mine in enumerate(ranks):
        tensors = FSDP2[variant] if rank == 0 else 1
        most = 1.02 * mine["shard_mb"] + tensors * mine["largest_tensor_mb"]
        rise = mine["anonymous_rise_mb"]
        if rise > most:
            found.append(f"{variant}: rank {rank} rises by {rise:,.0f} MB, more than {most:,.0f}")
        if mine["equal_tensors"] < 0 and rank == 0:
            found.append(f"{variant}: the weights are not those of from_pretrained")
    return found


def missed_by_nf4(ranks: list[dict]) -> list[str]:
    """Return the bounds that weights in 4 bits miss, a sentence for each rank."""
    found = []
    for rank, mine in enumerate(ranks):
        most = 1.1 * mine["shard_mb"] + mine["block_mb"] + mine.get("quantizer_mb", 0.0)
        rise = mine["anonymous_rise_mb"]
        if rise > most:
            found.append(f"nf4: rank {rank} rises by {rise:,.0f} MB, more than {most:,.0f}")
    return found


def main() -> int:
    """Print a table and a JSON object; return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a Llama's directory (default: random, 1.1B)")
    parser.add_argument("--processes", type=int, default=2, help="ranks")
    parser.add_argument("--stored-dtype", choices=["float32", "bfloat16"], default="float32",
        help="of the random model's files; the weights are fp32")  # fmt: skip
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.model)
        return 0
    results: dict = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.model or Path(temporary, "model")
        if not args.model:
            make_model(directory, getattr(torch, args.stored_dtype))
        os.sync()  # else these files are still being written when the first variant runs
        read_seconds = read_files(directory)
        for variant in VARIANTS:
            command = [__file__, "--worker", variant, "--model", directory]
            results[variant] = launch(args.processes, *command)
    print("| variant | rank | s | MB before | MB at the peak | rise | anonymous | shard |")
    print("|---|---|---|---|---|---|---|---|")
    rows = [(name, rank, r) for name, ranks in results.items() for rank, r in enumerate(ranks)]
    rows += [("export", rank, r["export"]) for rank, r in enumerate(results["streamed"])]
    for name, rank, r in rows:
        before, peak = r["baseline_mb"], r["peak_mb"]
        numbers = f"{before:,.0f} | {peak:,.0f} | {peak - before:,.0f}"
        for key in ("anonymous_rise_mb", "shard_mb"):
            numbers += f" | {r[key]:,.0f}" if key in r else " | "
        print(f"| {name} | {rank} | {r['seconds']:.1f} | {numbers} |")
    problems = missed(results["streamed"])
    if "nf4" in results:
        problems += missed_by_nf4(results["nf4"])
    for variant in FSDP2:
        problems += missed_by_fsdp2(variant, results[variant])
    plain = results["streamed"][0]["plain_save_seconds"]
    print(
        f"\nthe files are read once in {read_seconds:.1f} s, written by save_file in {plain:.1f} s"
    )
    print(f"bounds missed: {problems or 'none'}")
    print(json.dumps({"read_seconds": read_seconds, "variants": results, "missed": problems}))
    return len(problems) > 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as `launch` of runtime/run.py, which says why
