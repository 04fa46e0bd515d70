"""Tests that need a GPU, with one process per GPU: one, two or, on four GPUs or more, four.

    python -m pytest -n 8 tests/test_gpu.py -k "not resumes"     # first: all other tests
    python -m pytest -n 8 tests/test_gpu.py -k resumes           # then: each script with each flag

On one H200 with 16 cores, the first half took one minute (without the slow cases, which compile),
and the second three (with -n 14).
"""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, error_lines, launch, losses, metrics, weights
from in_process import start
from plain import loss_class
from ten_steps import local
from test_chunked_loss import head_gradient_error
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import BatchEncoding, ByT5Tokenizer, LlamaConfig

import chat_dataset
import gpt2_fsdp
import llama_fsdp
from optional.packed_attention import register, varlen_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPUS = torch.cuda.device_count()
RANKS = 4 if GPUS >= 4 else min(2, GPUS)
four_gpus = pytest.mark.skipif(GPUS < 4, reason="fewer than four GPUs")


def run_flags(data: list, output: Path, *flags: str) -> list:
    """Return the flags of a run on `data`, a model and flags, that saves every twenty steps."""
    return ["--model-name", *data, "--output-dir", output, "--lr", "3e-3", "--log-every", "1",
            "--save-every", "20", *flags]  # fmt: skip


def run(script: str, data: list, output: Path, *flags: str) -> None:
    """Train a small model for forty steps and resume it after twenty."""
    command = run_flags(data, output, *flags)
    for steps in (20, 40):
        launch(RANKS, f"{script}.py", *command, "--max-steps", steps)
    check_run(output)


def check_run(output: Path) -> None:
    """Check that each of forty steps is logged once, the loss fell and the weights are
    finite."""
    loss_by_step = losses(output)
    assert list(loss_by_step) == list(range(1, 41))
    assert loss_by_step[40] < 0.9 * loss_by_step[1]
    assert all(tensor.isfinite().all() for tensor in weights(output / "final").values())
    assert metrics(output, "train")[-1]["peak_memory_mb"] > 0


FLAGS = [
    ["--precision", "auto"],
    ["--precision", "bf16-fp32-reduce", "--activation-checkpointing", "blocks"],
    ["--precision", "fp16"],
    ["--precision", "bf16", "--strategy", "shard_grad_op"],
    ["--precision", "bf16", "--strategy", "ddp"],
    ["--precision", "fp16", "--strategy", "ddp"],
    ["--precision", "bf16", "--fsdp", "2"],
    ["--precision", "fp16", "--fsdp", "2"],
    ["--precision", "bf16", "--fsdp", "2", "--cpu-offload"],
    ["--precision", "bf16", "--fsdp", "2", "--activation-checkpointing", "blocks"],
    ["--precision", "bf16", "--gradient-accumulation-steps", "2", "--accumulate-no-sync"],
    ["--precision", "bf16", "--gradient-accumulation-steps", "2"],
    ["--precision", "bf16", "--gradient-accumulation-steps", "2", "--fsdp", "2"],
]
if torch.__version__ >= (2, 13):  # 2.11's stager ends with the first save
    FLAGS += [["--precision", "bf16", "--async-save", "--fsdp", "2"]]
if RANKS > 1:
    FLAGS += [["--precision", "bf16", "--cpu-offload"], ["--precision", "fp16", "--cpu-offload"]]
HYBRID = ["--strategy", "hybrid_shard", "--shard-group-size", "2", "--precision", "bf16"]
CASES = FLAGS + [pytest.param(x, marks=four_gpus) for x in (HYBRID, [*HYBRID, "--fsdp", "2"])]


@pytest.fixture
def data(t5_directory, pairs, gpt2_directory, texts, llama_directory, chats) -> dict[str, list]:
    """Return the flags of model and data for each script."""
    return {
        "T5_training": [t5_directory, "--dataset", pairs, "--num-train-samples", "0",
                        "--rouge-samples", "3", "--target-length", "16"],
        "gpt2_fsdp": [gpt2_directory, "--dataset", texts[0], "--val-dataset", texts[1],
                      "--block-size", "32"],
        "llama_fsdp": [llama_directory, "--dataset", chats, "--max-seq-length", "128",
                       "--batch-size", "2"],
    }  # fmt: skip


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_resumes(script, flags, data, tmp_path):
    run(script, data[script], tmp_path, *flags)


@pytest.mark.parametrize("script", SCRIPTS)
def test_offload_of_fsdp2_in_fp16_is_refused(script, data, tmp_path):
    """PyTorch would unscale offloaded gradients by a factor that is still being copied."""
    flags = run_flags(data[script], tmp_path, "--precision", "fp16", "--fsdp", "2", "--cpu-offload")
    result = launch(1, f"{script}.py", *flags, check=False)
    assert result.returncode == 1
    (message,) = error_lines(result.stderr)
    assert "--cpu-offload" in message and "fp16" in message


@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_accumulation_with_and_without_synchronization_gives_the_same_losses(fsdp, data, tmp_path):
    """Micro-batches add up to those of a step without accumulation."""
    runs = []
    for name, flags in {
        "whole": ["--batch-size", "4"],
        "synchronized": ["--batch-size", "2", "--gradient-accumulation-steps", "2"],
        "kept": ["--batch-size", "2", "--gradient-accumulation-steps", "2", "--accumulate-no-sync"],
    }.items():
        flags = [*flags, "--fsdp", fsdp, "--precision", "fp32", "--max-steps", "5"]
        launch(RANKS, "gpt2_fsdp.py", *run_flags(data["gpt2_fsdp"], tmp_path / name, *flags))
        runs.append(losses(tmp_path / name))
    assert list(runs[0]) == [1, 2, 3, 4, 5]
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[2] == pytest.approx(runs[0], rel=1e-4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_resume_on_gpu_equals_an_uninterrupted_run(deterministic, data, tmp_path, monkeypatch):
    """Bitwise with deterministic algorithms, otherwise up to rounding."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport torch, llama_fsdp\n"
        f"torch.use_deterministic_algorithms({deterministic})\n"
        "llama_fsdp.ranks.run(llama_fsdp.fsdp_main, llama_fsdp.parse_args())\n"
    )
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, stops in ("whole", ["8"]), ("resumed", ["4", "8"]):
        flags = run_flags(data["llama_fsdp"], tmp_path / name, "--lr-schedule", "constant")
        for stop in stops:
            launch(RANKS, worker, *flags, "--max-steps", stop)
    whole, resumed = (losses(tmp_path / name) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    if deterministic:
        assert whole == resumed
    else:
        assert list(whole.values()) == pytest.approx(list(resumed.values()), rel=1e-2)


@pytest.mark.parametrize("in_4bit", [[], ["--load-in-4bit"]], ids=["lora", "qlora"])
def test_adapter_run_resumes(in_4bit, wide_llama, data, tmp_path):
    pytest.importorskip("peft")
    if in_4bit:
        pytest.importorskip("bitsandbytes")
    # Adapters alone cannot lower the loss by much under a frozen head whose logits are near 0.
    model = llama_fsdp.MODEL.from_pretrained(wide_llama, dtype="auto")
    model.lm_head.weight.data *= 5
    model.save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    llama = [tmp_path / "model", *data["llama_fsdp"][1:], "--precision", "bf16"]
    run("llama_fsdp", llama, tmp_path, "--lr-schedule", "constant", "--lora-rank", "8", *in_4bit)
    assert all(".lora_" in name for name in weights(tmp_path / "final"))


@pytest.mark.parametrize("strategy", ["full_shard", "ddp"])
def test_paged_optimizer_resumes(strategy, data, tmp_path):
    pytest.importorskip("bitsandbytes")
    flags = ["--precision", "bf16", "--optimizer", "paged_adamw_32bit", "--strategy", strategy]
    run("llama_fsdp", data["llama_fsdp"], tmp_path, *flags)


@pytest.mark.parametrize("fsdp", ["1", "2"])
def test_killed_run_continues(fsdp, data, tmp_path):
    flags = ["--save-every", "4", "--fsdp", fsdp, "--precision", "bf16"]
    command = [*run_flags(data["gpt2_fsdp"], tmp_path, *flags), "--max-steps", "40"]
    killed = ["tests/workers/killed.py", "gpt2_fsdp", 0, 26, *command]
    assert launch(RANKS, *killed, check=False).returncode
    launch(RANKS, "gpt2_fsdp.py", *command)
    assert metrics(tmp_path, "start")[-1]["step"] == 24
    check_run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", ["1", "2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_compiled_losses_are_near_eager(script, fsdp, data, tmp_path):
    flags = ["--model-name", *data[script], "--max-steps", "5", "--log-every", "1"]
    runs = []
    for flag in ("--no-compile", "--compile"):
        more = ["--precision", "bf16", "--fsdp", fsdp, flag, "--output-dir", tmp_path / flag]
        launch(RANKS, f"{script}.py", *flags, *more)
        runs.append(list(losses(tmp_path / flag).values()))
    assert runs[0] == pytest.approx(runs[1], abs=0.05)


def test_head_gradient_in_bf16_is_within_one_percent():
    assert head_gradient_error("cuda") < 0.01


@pytest.mark.parametrize("flags", [["--fsdp", "1"], ["--fsdp", "2"], ["--strategy", "ddp"]])
def test_nan_step_leaves_weights_and_moments(flags, data, tmp_path, monkeypatch, capfd):
    states: list[list[torch.Tensor]] = []  # after each step

    def keep_state(optimizer: torch.optim.Optimizer, *_: object) -> None:
        moments = [x for each in optimizer.state.values() for x in each.values()]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        states.append([local(x.detach()).clone() for x in [*held, *moments]])

    def third_is_nan(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        loss = summed_loss(model, batch)
        return loss * torch.nan if model.training and len(states) == 2 else loss

    summed_loss = gpt2_fsdp.summed_loss
    monkeypatch.setattr(gpt2_fsdp, "summed_loss", third_is_nan)
    command = run_flags(data["gpt2_fsdp"], tmp_path, "--precision", "bf16", *flags)
    hook = register_optimizer_step_post_hook(keep_state)
    assert start(gpt2_fsdp, *command, "--max-steps", "5") == 1
    hook.remove()
    assert "The gradient norm of step 3 is not finite" in capfd.readouterr().err
    first, before, after = states
    assert not any(map(torch.equal, first, before))
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("attention", ["flash", "varlen"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_kernels_agree_with_sdpa(attention, head_size):
    """The tolerance is twice the error of bf16 against fp32."""
    try:
        kernel = varlen_kernel(attention, "bf16")
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    shape = {"hidden_size": 4 * head_size, "intermediate_size": 512, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384}
    config = LlamaConfig(head_dim=head_size, **shape)
    model = loss_class(llama_fsdp)(config).cuda().train()
    packs = []
    for lengths in ([300, 17, 2], [90, 64, 65]):  # in tokens, of the documents in a pack
        rows = [torch.randint(3, 300, (length,)).tolist() for length in lengths]
        packs.append([{"input_ids": row, "labels": row} for row in rows])
    batch = BatchEncoding(chat_dataset.collate(packs)).to("cuda").data
    register(kernel, 320)
    results = {}
    for name, dtype in (("sdpa", torch.float32), ("sdpa", torch.bfloat16),
                        ("packed", torch.bfloat16)):  # fmt: skip
        model.set_attn_implementation(name)
        model.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = llama_fsdp.summed_loss(model, batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results[name, dtype] = loss.item(), gradient
    exact, sdpa = results["sdpa", torch.float32], results["sdpa", torch.bfloat16]
    varlen = results["packed", torch.bfloat16]
    for index in (0, 1):
        error = torch.as_tensor(sdpa[index] - exact[index]).norm()
        assert torch.as_tensor(varlen[index] - exact[index]).norm() < 2 * error + 1e-3
