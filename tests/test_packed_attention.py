"""Test which kernel computes attention over packed documents, the arguments it receives, and that
documents do not attend to each other, with optional/packed_attention.py or without."""

import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import WIDE
from copied import llama_as
from plain import loss_class
from test_startup_checks import arguments, check, device, problem  # noqa: F401
from torch._dynamo.utils import counters
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, modeling_flash_attention_utils

import chat_dataset
import llama_fsdp
import policies
from core.ranks import Problem
from optional import packed_attention
from optional.packed_attention import Kernel
from policies import Sharding

KERNEL = """
calls = []
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    deterministic,
):
    calls.append((q, k, v, max_seqlen_q, max_seqlen_k, softmax_scale, causal, deterministic))
    return q, None
"""
BROKEN = "raise RuntimeError('built for another torch')"


@pytest.mark.parametrize("capability, modules, origin", [
    (8, {"flash_attn": KERNEL, "flash_attn_interface": BROKEN}, "flash_attn"),
    (9, {"flash_attn": BROKEN, "flash_attn_interface": KERNEL}, "flash_attn_interface"),
    (9, {"flash_attn": KERNEL}, "flash_attn"),
    (10, {"flash_attn": BROKEN}, None),
])  # fmt: skip
@mock.patch.dict(sys.modules)
def test_newest_flash_attn_is_used(capability, modules, origin, tmp_path, monkeypatch, capsys):
    """It obeys torch's switch for deterministic kernels. If it is broken, auto says why."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    if origin is None:
        reason = "flash_attn cannot be imported: built for another torch"
        with pytest.raises(Problem, match=reason):
            packed_attention.varlen_kernel("flash", "bf16")
        assert choose("Llama", "auto", {}) == "packed" and reason in capsys.readouterr().out
        return
    kernel = packed_attention.varlen_kernel("flash", "bf16")
    tensors = [torch.randn(8, 2, 4) for _ in "qkv"]
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    assert kernel(*tensors, ends, 5, 0.5) is tensors[0]
    (call,) = importlib.import_module(origin).calls
    assert call == (*tensors, 5, 5, 0.5, True, False)
    with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
        kernel(*tensors, ends, 5, 0.5)
    assert importlib.import_module(origin).calls[-1][-1] is True


@pytest.mark.parametrize("has_flag", [False, True])
def test_varlen_kernels_of_torch_2_11_get_no_flag_for_grouped_heads(has_flag, monkeypatch):
    def old(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size):
        return {}

    def new(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa=False):
        return {"enable_gqa": enable_gqa}

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(varlen, "varlen_attn", new if has_flag else old)
    kernel = packed_attention.varlen_kernel("varlen", "bf16")
    query = torch.randn(8, 4, 2)
    for heads in (2, 4):
        key = query[:, :heads]
        options = kernel(query, key, key, torch.tensor([0, 8]), 8, 1.0)
        assert options == ({"enable_gqa": heads < 4} if has_flag else {})


class Created(TorchDispatchMode):
    """A context that counts the elements of all tensors that operations return."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        self.elements += sum(x.numel() for x in tensors)
        return output


def attention_of_documents(lengths: list[int], kernel: Callable) -> tuple[list, int]:
    """Return the output and gradients of queries, keys and values, and how many elements the
    backward pass created."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(sum(lengths), 2, 8, generator=generator) for _ in "qkv"]
    parts = [part.requires_grad_() for part in parts]
    ends = torch.tensor([0, *itertools.accumulate(lengths)])
    output = kernel(*parts, ends, max(lengths), 0.3)
    loss = output.square().sum()
    with Created() as created:
        loss.backward()
    return [output, *(part.grad for part in parts)], created.elements


def slices(q, k, v, ends: torch.Tensor, longest: int, scale: float) -> torch.Tensor:
    """Return the attention of each document, computed on slices of the pack."""
    outputs = []
    for start, end in itertools.pairwise(ends.tolist()):
        document = [x[None, start:end].transpose(1, 2) for x in (q, k, v)]
        output = F.scaled_dot_product_attention(*document, is_causal=True, scale=scale)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def test_backward_pass_of_many_documents_creates_no_tensors_of_the_whole_pack_for_each():
    """The results are bitwise those of slices, whose gradients are zeros outside the document."""
    lengths = [5, 1, 12, 7, 9] * 20
    tensors, elements = attention_of_documents(lengths, packed_attention.per_document)
    expected, sliced_elements = attention_of_documents(lengths, slices)
    assert all(map(torch.equal, tensors, expected))
    pack = 3 * sum(lengths) * 2 * 8
    assert elements < 10 * pack
    assert sliced_elements > len(lengths) * pack


def packed(*rows: list[int]) -> list[list[dict]]:
    """Return rows of random documents with as many targets as `rows` say."""
    generator = torch.Generator().manual_seed(1)
    documents = []
    for lengths in rows:
        ids = [torch.randint(3, 300, (n + 1,), generator=generator).tolist() for n in lengths]
        documents.append([{"input_ids": row, "labels": row} for row in ids])
    return documents


def logits(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Return the logits of a packed batch, computed from the loss head's input."""
    hidden: list = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    with torch.no_grad():
        llama_fsdp.summed_loss(model, batch)
        handle.remove()
        return model.lm_head(hidden[0])


def flash_functions(*_: object) -> tuple[tuple, tuple]:
    """Return what Transformers imports from flash-attn: here, its function for packed documents on
    a CPU, and the function that selects its arguments."""

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale):
        assert torch.equal(cu_seqlens_k, cu_seqlens_q)
        arguments = cu_seqlens_q, max_seqlen_q, softmax_scale
        return packed_attention.per_document(q, k, v, *arguments)

    def select(is_causal, softmax_scale, max_seqlen_q, dropout, sliding_window, **_):
        assert is_causal and not dropout and not sliding_window
        return {"softmax_scale": softmax_scale, "max_seqlen_q": max_seqlen_q}

    return (None, varlen, None, None, None), (select, None)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "packed", "flash_attention_2"])
def test_packed_documents_do_not_attend_to_each_other(attention, llama_directory, monkeypatch):
    """A script without optional/packed_attention.py uses sdpa. With two rows, flash_attention_2
    needs the lengths of documents, because it reads no boundaries in positions."""
    packed_attention.register(packed_attention.per_document, 16)
    model = loss_class(llama_fsdp).from_pretrained(llama_directory).train()
    if attention == "flash_attention_2":
        monkeypatch.setattr(
            modeling_flash_attention_utils, "lazy_import_flash_attention", flash_functions
        )
    model.config._attn_implementation = attention
    packs = packed([6, 1, 11, 4, 10], [9, 2, 8])  # the first row has no padding
    batch = chat_dataset.collate(packs)
    rows = logits(model, batch).split(batch["input_ids"].size(1))
    plain = LlamaForCausalLM.from_pretrained(llama_directory)
    for row, pack in zip(rows, packs, strict=True):
        start = 0
        for ids in (document["input_ids"][:-1] for document in pack):
            expected = plain(torch.tensor([ids]), use_cache=False).logits[0]
            assert (row[start : start + len(ids)] - expected).abs().max() < 1e-5
            start += len(ids)
    batch["input_ids"][0, 7] += 1  # the first token of the third document
    changed = (logits(model, batch) - torch.cat(rows)).abs().amax(dim=1).nonzero().flatten()
    assert changed.min() == 7 and changed.max() < 18


@torch.library.custom_op("tests::documents", mutates_args=())
def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Replace a GPU kernel, which torch.compile does not trace either."""
    assert isinstance(longest, int)
    longest_lengths.append((longest, ends.diff().max().item()))
    return packed_attention.per_document(q, k, v, ends, longest, scale)


longest_lengths: list[tuple[int, int]] = []  # received and actual length of the longest document
kernel.register_fake(lambda q, k, v, ends, longest, scale: torch.empty_like(q))


def count_graphs(monkeypatch: pytest.MonkeyPatch, batches: list[tuple]) -> int:
    """Return how many graphs two compiled blocks of Llama have after batches of documents of these
    lengths, a list for each row."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    longest_lengths.clear()
    model = loss_class(llama_fsdp)(LlamaConfig(vocab_size=384, **WIDE))
    packed_attention.register(kernel, 64)
    model.config._attn_implementation = "packed"
    policies.compile_blocks(model, llama_fsdp.BLOCKS)
    with torch.no_grad():
        for rows in batches:
            batch = chat_dataset.collate(packed(*rows))
            assert llama_fsdp.summed_loss(model, batch).isfinite()
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def test_kernel_receives_the_longest_length(monkeypatch):
    """Padding counts as a document. New lengths do not recompile."""
    lengths = [[40, 24], [20, 44], [30, 34], [50, 14], [63, 1], [61, 3], [33, 31]]
    initial = count_graphs(monkeypatch, [([40, 24], [24, 40])] * 2)
    assert count_graphs(monkeypatch, [(row, row[::-1]) for row in lengths]) == initial + 1
    assert longest_lengths == [(max(row),) * 2 for row in lengths for _ in range(2)]  # per block
    batches = [([64],), ([9, 9],), ([20, 30, 9], [4]), ([],), ([50, 14],)]
    assert count_graphs(monkeypatch, batches) <= initial + 4
    assert [longest for longest, _ in longest_lengths[::2]] == [64, 9, 60, 8, 50]


def attend(**options: object) -> torch.Tensor:
    """Call packed attention on a row with two documents of 8 tokens, with extra `options`."""
    query = torch.randn(1, 2, 16, 8)
    ends = torch.tensor([0, 8, 16], dtype=torch.int32)
    inputs = {"attention_mask": None, "scaling": 1.0, "cu_seq_lens_q": ends, "max_length_q": 8}
    inputs |= options
    module = SimpleNamespace(is_causal=inputs.pop("module_is_causal", True))
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["packed"]
    return function(module, query, query, query, **inputs)[0]


@pytest.mark.parametrize("name, value", [
    ("sliding_window", 15),
    ("softcap", 50.0),
    ("s_aux", torch.zeros(2)),
    ("position_bias", torch.zeros(1, 2, 16, 16)),
    ("dropout", 0.1),
    ("attention_mask", torch.zeros(1, 1, 16, 16)),
    ("is_causal", False),
    ("module_is_causal", False),
    ("block_indices", torch.zeros(1)),
])  # fmt: skip
def test_features_that_kernels_lack_are_refused(name, value):
    packed_attention.register(packed_attention.per_document, 16)
    option = {"module_is_causal": "is_causal"}.get(name, name)
    with pytest.raises(Problem, match=f"needs {option}.*. Pass --attention eager"):
        attend(**{name: value})


def test_disabled_features_are_accepted():
    packed_attention.register(packed_attention.per_document, 16)
    unset = {"dropout": 0.0, "softcap": None, "s_aux": None, "use_cache": False, "is_causal": None}
    assert attend(**unset, sliding_window=16, position_ids=torch.arange(16)).shape == (1, 16, 2, 8)
    packed_attention.register(packed_attention.per_document, longest=32)
    attend(sliding_window=32)
    with pytest.raises(Problem, match="needs sliding_window"):
        attend(sliding_window=16)
    with pytest.raises(Problem, match="does not pass cu_seq_lens_q on. Pass --attention sdpa"):
        attend(cu_seq_lens_q=None)


CHOICES = [  # class, --attention, config, and the attention or the end of the message
    ("Llama", "auto", {}, "packed"),
    ("Llama", "auto", {"sliding_window": 9}, "sdpa"),
    ("Llama", "auto", {"sliding_window": 9, "use_sliding_window": False}, "packed"),
    ("Llama", "auto", {"sliding_window": 64}, "packed"),
    ("Llama", "auto", {"attention_dropout": 0.1}, "sdpa"),
    ("Llama", "flash", {}, "--precision bf16 or fp16."),
    ("GptOss", "auto", {}, "eager"),
    ("GptOss", "sdpa", {}, "GptOssForCausalLM lacks it. Pass eager."),
    ("Gemma2", "sdpa", {}, "Gemma2ForCausalLM lacks it. Pass eager."),
    ("StableLm", "auto", {}, "sdpa"),
    ("GPTJ", "varlen", {}, "varlen does not fit GPTJForCausalLM. Pass sdpa or eager."),
    ("Lfm2", "auto", {}, "packed"),  # its config has no attention_dropout
    ("Llama4", "auto", {"attention_chunk_size": 64}, "packed"),
    ("Llama4", "auto", {"attention_chunk_size": 63}, "sdpa"),
    ("DeepseekV32", "auto", {}, "sdpa"),  # its layers select keys
    ("Phimoe", "auto", {"sliding_window": 63}, "sdpa"),  # its layers do not pass it on
]  # fmt: skip


def choose(name: str, attention: str, config: dict, compiles: bool = False) -> str:
    """Return the attention of a model for sequences of 64 tokens, or the error message."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = kind.config_class(**config)
    data = chat_dataset.Data(max_seq_length=64)
    sharding = Sharding(compile=compiles, precision="bf16")
    args = llama_fsdp.Args(attention=Kernel(attention), data=data, sharding=sharding)
    try:
        packed_attention.set_kernel(args, config, kind)
    except Problem as problem:
        return str(problem)
    return config._attn_implementation


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name, attention, config, expected", CHOICES)
def test_attention_fits_the_model(name, attention, config, expected):
    assert choose(name, attention, config).endswith(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_avoids_kernels_that_break_the_graph(capsys):
    assert choose("Llama", "auto", {}, compiles=True) == "sdpa"
    assert capsys.readouterr().out == "attention: sdpa\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("attention, name, config, message", [
    ("sdpa", "Llama", {}, None),
    ("varlen", "Llama", {}, None),
    ("varlen", "Granite", {"logits_scaling": 8.0}, None),
    ("sdpa", "Mistral", {"sliding_window": 8}, None),
    ("varlen", "Gemma2", {}, "needs softcap|does not fit"),
    ("varlen", "GptOss", {"num_local_experts": 4, "head_dim": 32}, "needs s_aux"),
    ("varlen", "Nemotron", {}, "NemotronAttention does not pass"),
])  # fmt: skip
def test_startup_checks_with_kernels(attention, name, config, message, device):  # noqa: F811
    script = llama_as(name, "gpt_oss" if name == "GptOss" else "", **config)
    args = arguments(script, precision="bf16", max_seq_length=64, attention=attention)
    with problem(message):
        check(script, args, device)
