"""--activation-checkpointing: what is kept, what is computed again, and what is refused.

Ten steps with it are in test_gpt2.py and test_llama.py, its bytes in test_memory_estimator.py.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from ten_steps import compile_without_compiler, local
from torch.utils._python_dispatch import TorchDispatchMode

import llama_fsdp
import policies

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
IDS = torch.arange(48).reshape(2, 24)
ATTENTION = ["--activation-checkpointing", "attention"]
STRATEGIES = {"ddp": ["--strategy", "ddp"], "fsdp1": ["--fsdp", "1"], "fsdp2": ["--fsdp", "2"]}


class Operators(TorchDispatchMode):
    """Counts the operators that are computed, inside compiled graphs too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have torch.compile go on as if this were not here."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        """Count the operator, and call it."""
        self.calls[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Yield the device of a process group of one, where --compile runs each operator as it
    stands."""
    monkeypatch.setattr(torch.nn.Module, "compile", torch.nn.Module.compile)
    compile_without_compiler()
    yield llama_fsdp.setup(llama_fsdp.parse_args(["--model-name", "tiny"]))
    llama_fsdp.cleanup()
    torch._dynamo.reset()


def backward_pass(device: torch.device, *flags: str) -> tuple[Counter, torch.Tensor]:
    """Return the operators of a tiny Llama's backward pass, and the gradient."""
    args = ["--model-name", "tiny", "--attention", "sdpa", "--precision", "fp32", *flags]
    args = llama_fsdp.parse_args(args)
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, _, init = llama_fsdp.load_model(args, device)
    model = llama_fsdp.wrap_model(args, device, model, init)
    loss = model(input_ids=IDS, targets=IDS)
    with Operators() as operators:
        loss.backward()
    trained = [local(p.grad).flatten() for p in model.parameters() if p.requires_grad]
    return operators.calls, torch.cat(trained)


@pytest.mark.parametrize("more", [[], ["--compile"]], ids=["eager", "compile"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kept_attention_is_not_recomputed(strategy, more, device):
    """The projections of all blocks are recomputed, except the last, whose result nothing needs."""
    flags = [*STRATEGIES[strategy], *more]
    plain, expected = backward_pass(device, *flags, "--no-activation-checkpointing")
    blocks, of_blocks = backward_pass(device, *flags)  # the script's default
    attention, found = backward_pass(device, *flags, *ATTENTION)
    assert (plain[FORWARD], blocks[FORWARD], attention[FORWARD]) == (0, 4, 0)
    assert plain[f"{FORWARD}_backward"] == attention[f"{FORWARD}_backward"] == 4
    assert attention["mm"] - plain["mm"] in (4 * 6, 4 * 7)
    assert torch.equal(found, expected) and torch.equal(of_blocks, expected)


@pytest.mark.parametrize("more", [[], ["--compile"]], ids=["eager", "compile"])
def test_kept_attention_trains_adapters_in_4_bits(more, device):
    """The attention's weights are frozen, so no gradient needs its result."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    flags = ["--lora-rank", "2", "--lora-targets", "gate_proj", "--load-in-4bit", *more]
    _, expected = backward_pass(device, *flags, "--no-activation-checkpointing")
    operators, found = backward_pass(device, *flags, *ATTENTION)
    assert operators[FORWARD] == 0 and found.norm() > 0
    assert torch.equal(found, expected)


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_inductor_does_not_reuse_kept_memory():
    """The attention's weights are frozen, so only the recomputation still needs its result."""
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    gradients = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = ".mlp." in name
        if compiles:
            policies.compile_blocks(model, llama_fsdp.BLOCKS)
            policies.checkpoint_activations(model, llama_fsdp.BLOCKS, "attention")
        model(IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    torch._dynamo.reset()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_attention_that_draws_random_numbers_is_refused(capsys):
    """If it were kept, the recomputation would draw its numbers for the layers after it."""
    library = torch.library.Library("flash_attn_of_a_test", "DEF")
    library.define("forward(Tensor x, float dropout_p) -> Tensor")
    library.impl("forward", lambda x, dropout_p: x * 2, "CompositeExplicitAutograd")

    class Block(torch.nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.dropout = dropout

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.flash_attn_of_a_test.forward(x, self.dropout) + x

    for dropout in (0.0, 0.1):
        model = torch.nn.Sequential(Block(dropout))
        policies.checkpoint_activations(model, (Block,), "attention")
        if not dropout:
            model(torch.ones(2, requires_grad=True))
    with pytest.raises(SystemExit):
        model(torch.ones(2, requires_grad=True))
    assert "needs attention without dropout" in capsys.readouterr().err
