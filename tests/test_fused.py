"""`policies.fuse`: RMS norms use one kernel, without changing what a model computes."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

import policies

WIDTH = 64


class ClampedNorm(LlamaRMSNorm):
    """A norm that differs from Llama's only for large values."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the norm of clamped values."""
        return super().forward(hidden.clamp(-50, 50))


class OtherEpsilon(LlamaRMSNorm):
    """A norm that does not use the epsilon in its attribute."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the norm, computed with another epsilon."""
        scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * (hidden.float() * scale).to(hidden.dtype)


def fused(norm: nn.Module) -> nn.Module:
    """Return a fused copy of a norm with random weights."""
    torch.manual_seed(0)
    norm.weight.data = torch.randn(WIDTH)
    copied = copy.deepcopy(norm)
    policies.fuse(copied)
    return copied


def is_fused(module: nn.Module) -> bool:
    """Return whether a module has the class of a fused norm."""
    return type(module).__module__ == "policies"


def run(norm: nn.Module, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of a norm, and the gradients of its input and weight."""
    values = values.clone().requires_grad_()
    output = norm(values)
    loss = (output * torch.linspace(-1, 1, WIDTH)).sum()
    return [output.detach(), *torch.autograd.grad(loss, (values, norm.weight))]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_fused_norm_computes_the_same(kind, eps):
    norm = kind(WIDTH, eps)
    other = fused(norm)
    assert is_fused(other)
    values = 3 * torch.randn(5, 7, WIDTH) + 1
    for result, expected in zip(run(other, values), run(norm, values), strict=True):
        torch.testing.assert_close(
            result, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item()
        )
    # In bf16 it is no farther from the result in float64.
    low, low_other = copy.deepcopy(norm).bfloat16(), copy.deepcopy(other).bfloat16()
    values = values.bfloat16()
    x, weight = values.double(), low.weight.double()
    exact = weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    assert low_other(values).dtype == torch.bfloat16
    assert (low_other(values) - exact).norm() <= (low(values) - exact).norm()


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32),
                                    (torch.float32, torch.bfloat16)])  # fmt: skip
def test_mixed_dtypes_use_the_original_forward(kind, dtypes):
    norm = kind(WIDTH)
    other = fused(norm).to(dtypes[0])
    values = torch.randn(3, WIDTH, dtype=dtypes[1])
    torch.testing.assert_close(other(values), norm.to(dtypes[0])(values), rtol=0, atol=0)


@pytest.mark.parametrize(
    "norm", [GemmaRMSNorm(WIDTH), MambaRMSNormGated(WIDTH, 8), ClampedNorm(WIDTH),
             OtherEpsilon(WIDTH), nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH)]
)  # fmt: skip
def test_other_norms_are_left_alone(norm):
    assert not is_fused(fused(norm))


def test_fused_copy_uses_its_own_weight():
    other = copy.deepcopy(fused(LlamaRMSNorm(WIDTH)))
    values = torch.randn(3, WIDTH)
    other.weight.data.zero_()
    assert not other(values).any()


def test_fuse_on_meta_draws_no_random_numbers():
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=99)
        model = transformers.LlamaForCausalLM(config)
    before = torch.get_rng_state()
    policies.fuse(model)
    assert torch.equal(before, torch.get_rng_state())
    assert sum(map(is_fused, model.modules())) == 3


def test_fused_norm_compiles_into_one_graph():
    norm = fused(LlamaRMSNorm(WIDTH))
    values = torch.randn(3, WIDTH)
    compiled = torch.compile(nn.Sequential(norm), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(values), norm(values))
