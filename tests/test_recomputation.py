"""Activation checkpointing: gradients with dropout, and what selective recomputation keeps."""

from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # registers its operator
from torch import Tensor
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import policies
from optional import selective


@torch.library.custom_op("tests::fused_attention", mutates_args=())
def fused_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Return the attention and its dropout mask. It draws numbers as GPUs' kernels do; of PyTorch's
    for CPUs, none does."""
    kept = torch.ones(*q.shape[:-1], k.shape[-2])
    if dropout_p:
        kept = (torch.rand_like(kept) >= dropout_p).float() / (1 - dropout_p)
    return attend(q, k, v, kept), kept


def attend(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) * kept) @ v


def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])


def backward(context: Any, gradient: Tensor, _: Any) -> tuple:
    *tensors, kept = context.saved_tensors
    with torch.enable_grad():
        parts = [x.detach().requires_grad_() for x in tensors]
        output = attend(*parts, kept)
    return *torch.autograd.grad(output, parts, gradient), None


fused_attention.register_autograd(backward, setup_context=setup_context)
KERNELS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
    torch.ops.tests.fused_attention.default,
]


def attention(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **__: Any
) -> tuple[Tensor, None]:
    """Return attention as Transformers expects it of a kernel."""
    return fused_attention(query, key, value, dropout)[0].transpose(1, 2), None


def gradient(kind: str, attention_dropout: float) -> Tensor:
    """Return all gradients of a small GPT-2 with dropout after its layers."""
    AttentionInterface.register("drawing", attention)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.1,
        embd_pdrop=0.0, attn_pdrop=attention_dropout, attn_implementation="drawing",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if kind != "none":
        args = policies.Sharding(activation_checkpointing=kind)
        policies.checkpoint_blocks(model, (GPT2Block,), args)
    torch.manual_seed(1)
    ids = torch.randint(64, (2, 32))
    model(ids, labels=ids, use_cache=False).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("attention_dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["blocks", "selective"])
def test_gradients_do_not_change_if_an_attention_kernel_draws(kind, attention_dropout):
    expected = gradient("none", attention_dropout)
    assert torch.equal(gradient(kind, attention_dropout), expected)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_kernels_with_dropout_are_told_from_those_without(kernel):
    names = [argument.name for argument in kernel._schema.arguments]
    inputs = [torch.zeros(1)] * len(names)
    for rate in (0.0, 0.1):
        inputs[names.index("dropout_p")] = rate
        assert selective.has_dropout(kernel, tuple(inputs), {}) == (rate > 0)
        assert selective.has_dropout(kernel, (), {"dropout_p": rate}) == (rate > 0)
    assert not selective.has_dropout(kernel, (), {})


def test_kernel_for_packed_documents_has_no_dropout():
    kernel = torch.ops.torch_attn._varlen_attn.default
    assert not selective.has_dropout(kernel, (torch.zeros(1),) * 6 + (True,), {})


@pytest.mark.parametrize("names, kept", [
    ("q k v o gate up down", "q v o up"),  # Llama
    ("qkv o gate_up down", "qkv gate_up"),  # GPT-2, or Llama with fused projections
    ("q k v o wi wo", "q v wi"),  # T5's encoder
    ("q k v o q2 k2 v2 o2 wi_0 wi_1 wo", "q v q2 k2 o2 wi_1"),  # T5's decoder
    ("qkv o gate up down", "qkv up"),
])  # fmt: skip
def test_last_product_of_a_block_is_not_kept(names, kept):
    products = names.split()
    numbers = range(1, len(products) + 1)
    are_kept = [selective.is_product_kept(number, len(products)) for number in numbers]
    assert [x for x, is_kept in zip(products, are_kept, strict=True) if is_kept] == kept.split()
