"""Test which kernel computes attention over packed documents, and the arguments it receives."""

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

import chat_dataset
import llama_fsdp
import policies
from runtime import attention

KERNEL = """
calls = []
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
):
    calls.append((q, k, v, max_seqlen_q, max_seqlen_k, softmax_scale, causal))
    return q, None
"""
MODULES = {
    "flash_attn_interface": KERNEL,
    "flash_attn": "__version__ = '2.8.3.post2'" + KERNEL,
}
BROKEN = "raise RuntimeError('built for another torch')"


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory from which modules can be imported, and pretend that there is a GPU."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("capability, changes, origin", [
    ((8, 0), {}, "flash_attn 2.8.3.post2"),
    ((9, 0), {}, "flash_attn_interface 3"),
    ((9, 0), {"flash_attn_interface": BROKEN}, "flash_attn 2.8.3.post2"),
    ((10, 0), {"flash_attn": BROKEN}, None),
])  # fmt: skip
def test_newest_flash_attn_that_imports_is_used(
    capability, changes, origin, site_packages, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for name, text in (MODULES | changes).items():
        (site_packages / f"{name}.py").write_text(text)
    if origin is None:
        with pytest.raises(ValueError, match="flash_attn: built for another torch"):
            attention.varlen_kernel("flash", "bf16")
        return
    kernel = attention.varlen_kernel("flash", "bf16")
    assert kernel.origin == origin
    tensors = [torch.randn(8, 2, 4) for _ in "qkv"]
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    assert kernel(*tensors, ends, 5, 0.5) is tensors[0]
    (call,) = importlib.import_module(origin.split()[0]).calls
    assert call == (*tensors, 5, 5, 0.5, True)


@torch.library.custom_op("tests::documents", mutates_args=())
def documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Replace a GPU kernel, which torch.compile does not trace either."""
    assert isinstance(longest, int)
    longest_lengths.append((longest, ends.diff().max().item()))
    return attention.per_document(q, k, v, ends, longest, scale)


longest_lengths: list[tuple[int, int]] = []  # received and actual length of the longest document
documents.register_fake(lambda q, k, v, ends, longest, scale: torch.empty_like(q))


def count_graphs(monkeypatch: pytest.MonkeyPatch, batches: list[dict]) -> int:
    """Return how many graphs are compiled for these batches by two compiled blocks of Llama."""
    backend = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", backend)
    torch._dynamo.reset()
    counters.clear()
    shape = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = llama_fsdp.LossModel(transformers.LlamaConfig(**shape))
    attention.register(documents)
    model.config._attn_implementation = "packed"
    policies.compile_blocks(model, llama_fsdp.BLOCKS)
    with torch.no_grad():
        for batch in batches:
            assert llama_fsdp.summed_loss(model, batch).isfinite()
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def packed(*rows: list[int]) -> dict[str, torch.Tensor | int]:
    """Return a packed batch of documents of these lengths, one list per row."""
    ids = {n: list(range(3, 4 + n)) for row in rows for n in row}
    return chat_dataset.collate(
        [[{"input_ids": ids[n], "labels": ids[n]} for n in row] for row in rows]
    )


def test_kernel_receives_the_longest_length(monkeypatch):
    """Padding counts as a document. New lengths do not recompile."""
    longest_lengths.clear()
    lengths = [[40, 24], [20, 44], [30, 34], [50, 14], [63, 1], [61, 3], [33, 31]]
    constant = [packed([40, 24], [24, 40])] * 2
    initial = count_graphs(monkeypatch, constant)
    longest_lengths.clear()
    assert count_graphs(monkeypatch, [packed(row, row[::-1]) for row in lengths]) == initial + 1
    assert longest_lengths == [(max(row),) * 2 for row in lengths for _ in range(2)]  # per block
    longest_lengths.clear()
    batches = [packed([64]), packed([9, 9]), packed([20, 30, 9], [4]), packed([]), packed([50, 14])]
    assert count_graphs(monkeypatch, batches) <= initial + 4
    assert [longest for longest, _ in longest_lengths[::2]] == [64, 9, 60, 8, 50]
