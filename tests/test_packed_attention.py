"""Test which kernel computes attention over packed documents, the arguments it receives, and that
documents do not attend to each other, with optional/packed_attention.py or without."""

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from copied import llama_as
from plain import loss_class
from test_startup_checks import LEAK, OTHER_LOGITS, arguments, check, device  # noqa: F401
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, modeling_flash_attention_utils

import chat_dataset
import llama_fsdp
from core.ranks import Problem
from optional import packed_attention
from optional.packed_attention import Kernel
from policies import Sharding

KERNEL = """
calls = []
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
):
    calls.append((q, k, v, max_seqlen_q, max_seqlen_k, softmax_scale, causal))
    return q, None
"""
BROKEN = "raise RuntimeError('built for another torch')"


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory from which modules can be imported, and pretend that there is a GPU."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield tmp_path
    for name in ("flash_attn", "flash_attn_interface"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("capability, modules, origin", [
    (8, {"flash_attn": KERNEL, "flash_attn_interface": BROKEN}, "flash_attn"),
    (9, {"flash_attn": BROKEN, "flash_attn_interface": KERNEL}, "flash_attn_interface"),
    (9, {"flash_attn": KERNEL}, "flash_attn"),
    (10, {"flash_attn": BROKEN}, None),
])  # fmt: skip
def test_newest_flash_attn_is_used(capability, modules, origin, site_packages, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    for name, text in modules.items():
        (site_packages / f"{name}.py").write_text(text)
    if origin is None:
        with pytest.raises(Problem, match="needs flash_attn .built for another torch"):
            packed_attention.varlen_kernel("flash", "bf16")
        return
    kernel = packed_attention.varlen_kernel("flash", "bf16")
    tensors = [torch.randn(8, 2, 4) for _ in "qkv"]
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    assert kernel(*tensors, ends, 5, 0.5) is tensors[0]
    (call,) = importlib.import_module(origin).calls
    assert call == (*tensors, 5, 5, 0.5, True)


def script_arguments(attention: str, length: int, sharding: Sharding) -> llama_fsdp.Args:
    """Return arguments of llama_fsdp.py."""
    data = chat_dataset.Data(max_seq_length=length)
    return llama_fsdp.Args(kernel=Kernel(attention), data=data, sharding=sharding)


@pytest.mark.parametrize("compiles, shape, expected", [
    (False, {}, "varlen"),
    (True, {}, "sdpa"),
    (False, {"sliding_window": 9}, "sdpa"),
    (False, {"sliding_window": 9, "use_sliding_window": False}, "varlen"),
    (False, {"sliding_window": 4096}, "varlen"),
    (False, {"attention_dropout": 0.1}, "sdpa"),
])  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_avoids_kernels_that_cannot_run(compiles, shape, expected, capsys):
    sharding = Sharding(compile=compiles, precision="fp32")
    args = script_arguments("auto", 2048, sharding)
    packed_attention.set_kernel(args, LlamaConfig(**shape), LlamaForCausalLM)
    assert capsys.readouterr().out.startswith(f"attention: {expected}")
    args.kernel.attention = "flash"
    with pytest.raises(Problem, match="needs (a GPU of compute|a mask, dropout)"):
        packed_attention.set_kernel(args, LlamaConfig(**shape), LlamaForCausalLM)


def documents(count: int) -> list[dict]:
    """Return `count` documents of 2 to 12 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 13, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


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


@pytest.mark.parametrize("attention", [None, "sdpa", "eager", "packed", "flash_attention_2"])
def test_packed_documents_do_not_attend_to_each_other(attention, llama_directory, monkeypatch):
    """None is what a script without optional/packed_attention.py uses. With two rows, Transformers'
    flash_attention_2 needs the lengths of documents, because it reads no boundaries in positions.
    """
    packed_attention.register(packed_attention.per_document)
    model = loss_class(llama_fsdp).from_pretrained(llama_directory).train()
    if attention == "flash_attention_2":
        monkeypatch.setattr(
            modeling_flash_attention_utils, "lazy_import_flash_attention", flash_functions
        )
    if attention:
        model.config._attn_implementation = attention
    packs = [documents(8)[:5], documents(8)[5:]]
    batch = chat_dataset.collate(packs)
    packed = logits(model, batch).split(batch["input_ids"].size(1))
    plain = LlamaForCausalLM.from_pretrained(llama_directory)
    for row, pack in zip(packed, packs, strict=True):
        start = 0
        for ids in (document["input_ids"][:-1] for document in pack):
            expected = plain(torch.tensor([ids]), use_cache=False).logits[0]
            assert (row[start : start + len(ids)] - expected).abs().max() < 1e-5
            start += len(ids)
    first = len(packs[0][0]["input_ids"]) - 1
    batch["input_ids"][0, first] += 1  # the second document's first token
    changed = (logits(model, batch) - torch.cat(packed)).abs().amax(dim=1).nonzero().flatten()
    assert changed.min() == first
    assert changed.max() < first + len(packs[0][1]["input_ids"]) - 1


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


def count_graphs(monkeypatch: pytest.MonkeyPatch, batches: list[dict]) -> int:
    """Return how many graphs are compiled for these batches by two compiled blocks of Llama."""
    backend = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", backend)
    torch._dynamo.reset()
    counters.clear()
    shape = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = loss_class(llama_fsdp)(LlamaConfig(**shape))
    packed_attention.register(kernel)
    model.config._attn_implementation = "packed"
    torch.compiler.config.recompile_limit = 64
    for module in model.modules():
        if isinstance(module, llama_fsdp.BLOCKS):
            module.compile()
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
    packed_attention.register(packed_attention.per_document)
    option = {"module_is_causal": "is_causal"}.get(name, name)
    with pytest.raises(Problem, match=f"varlen lack {option}.*needs. Pass --attention eager"):
        attend(**{name: value})
    with pytest.raises(Problem, match="does not pass on. Pass --attention sdpa"):
        attend(cu_seq_lens_q=None)


def test_disabled_features_are_accepted():
    packed_attention.register(packed_attention.per_document)
    unset = {"dropout": 0.0, "softcap": None, "s_aux": None, "use_cache": False, "is_causal": None}
    assert attend(**unset, sliding_window=16, position_ids=torch.arange(16)).shape == (1, 16, 2, 8)
    packed_attention.register(packed_attention.per_document, longest=32)
    attend(sliding_window=32)
    with pytest.raises(Problem, match="varlen lack sliding_window"):
        attend(sliding_window=16)


NEEDS_MASK = "{} needs a mask, dropout or attention of its own. Pass --attention sdpa or eager."
CHOICES = [  # class, --attention, config, and the attention or the end of the message
    ("GptOss", "auto", {}, "eager"),
    ("GptOss", "sdpa", {}, "GptOssForCausalLM lacks it. Pass eager."),
    ("Gemma2", "sdpa", {}, "Gemma2ForCausalLM lacks it. Pass eager."),
    ("Falcon", "auto", {}, "sdpa"),
    ("StableLm", "auto", {}, "sdpa"),
    ("GPTJ", "auto", {}, "eager"),
    ("GPTJ", "varlen", {}, NEEDS_MASK.format("GPTJForCausalLM")),
    ("Lfm2", "auto", {}, "packed"),  # its config has no attention_dropout
    ("Llama4", "auto", {"attention_chunk_size": 64}, "packed"),
    ("Llama4", "auto", {"attention_chunk_size": 63}, "sdpa"),
    ("Llama4", "varlen", {"attention_chunk_size": 63},
     NEEDS_MASK.format("Llama4ForCausalLM")),
    ("DeepseekV32", "auto", {}, "sdpa"),  # its layers select keys
    ("Phimoe", "auto", {"sliding_window": 63}, "sdpa"),
    ("Phimoe", "varlen", {"sliding_window": 63},  # layers do not pass it on
     NEEDS_MASK.format("PhimoeForCausalLM")),
]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name, attention, config, expected", CHOICES)
def test_attention_fits_the_model(name, attention, config, expected):
    """Sequences have at most 64 tokens."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = kind.config_class(**config)
    try:
        args = script_arguments(attention, 64, Sharding(precision="bf16"))
        packed_attention.set_kernel(args, config, kind)
        assert config._attn_implementation == expected
    except Problem as problem:
        assert str(problem).endswith(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen"])
@pytest.mark.parametrize("name, config, messages", [
    ("Llama", {}, {}),
    ("Granite", {"logits_scaling": 8.0}, {}),
    ("Llama", {"logit_scale": 0.5}, dict.fromkeys(("sdpa", "eager", "varlen"), OTHER_LOGITS)),
    ("Mistral", {"sliding_window": 8}, {"varlen": "needs a mask, .*attention sdpa"}),
    ("Gemma2", {"initializer_range": 1.0},
     {"varlen": "varlen lack softcap|needs a mask", "sdpa": "lacks it. Pass eager"}),
    ("GptOss", {"num_local_experts": 4, "head_dim": 32},
     {"sdpa": "lacks it. Pass eager", "eager": LEAK, "varlen": "varlen lack s_aux"}),
    ("Nemotron", {}, {"varlen": "NemotronAttention does not pass on"}),
])  # fmt: skip
def test_startup_checks_pass_with_each_attention(name, config, messages, attention, device):  # noqa: F811
    script = llama_as(name, "gpt_oss" if name == "GptOss" else "", **config)
    args = arguments(script, precision="bf16", max_seq_length=64, attention=attention)
    if attention not in messages:
        check(script, args, device)
        return
    with pytest.raises(Problem, match=messages[attention]):
        check(script, args, device)
