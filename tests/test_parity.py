"""Ten steps of each script, under every strategy that a CPU runs, equal plain single-process
PyTorch."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import losses
from parity import HYBRID, check_parity, reference, run_worker
from ten_steps import COMPILED, SHARED_VARIANTS

# GPT-2 runs all of them. The scripts share the text of the wrapping and the loop, as test_layout.py
# checks, so the other models run only the variants that depend on a model's own forward pass.
CORE = ("full_shard", "ddp", "accumulate", "activation_checkpointing", "selective",
        "fsdp2", "fsdp2_accumulate_no_sync")  # fmt: skip
BF16 = {
    "bf16": ["--precision", "bf16"],
    "fsdp2_bf16": ["--precision", "bf16", "--fsdp", "2"],
    "ddp_bf16": ["--precision", "bf16", "--strategy", "ddp"],
}
SHARED = {name: SHARED_VARIANTS[name] for name in CORE} | BF16 | {"compile": COMPILED}
HYBRIDS = {"hybrid_shard": HYBRID, "fsdp2_hybrid_shard": ["--fsdp", "2", *HYBRID]}
FOUR = HYBRIDS | {
    "full_shard": [],
    "shard_grad_op": ["--strategy", "shard_grad_op"],
    "ddp": ["--strategy", "ddp"],
    "fsdp2": ["--fsdp", "2"],
}
VARIANTS = {  # by script and number of ranks
    ("t5", 2): SHARED | {  # each length would be a graph
        "compile": [*COMPILED, "--no-group-by-length", "--num-train-samples", "36",
                    "--source-length", "40", "--target-length", "8"]},
    ("gpt2", 2): SHARED_VARIANTS | BF16 | {
        "size": ["--wrap", "size:3000"], "compile": ["--fsdp", "2", *COMPILED]},
    ("gpt2", 4): FOUR,
    ("llama", 2): SHARED | {
        "padded": ["--no-packing"], "eager": ["--attention", "eager"],
        "fsdp2_compile": ["--fsdp", "2", *COMPILED, "--activation-checkpointing", "selective"]},
    ("llama", 4): HYBRIDS,
}  # fmt: skip
CLASSES = {
    "t5": transformers.T5ForConditionalGeneration,
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
}
OTHER_SAMPLES = ("compile", "padded")  # than those of full_shard
IS_SLOW = ("gpt2", 4)  # Llama's are not
MODELS = pytest.mark.parametrize("model", CLASSES)


@pytest.fixture(scope="module")
def results(
    t5_directory, pairs, llama_directory, chats, gpt2_directory, texts, tmp_path_factory, request
) -> Callable[..., dict]:
    """Return a function that returns the results of a model by variant: of all variants, or those
    of the selected tests if only comparisons with plain PyTorch are selected."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = {"full_shard"}.union(*VARIANTS.values())
    if all(test.originalname == "test_ten_steps_equal_plain_pytorch" for test in tests):
        names = {"full_shard", *(test.callspec.params["variant"] for test in tests)}
    inputs = {"t5": (t5_directory, [pairs]), "llama": (llama_directory, [chats])}
    inputs["gpt2"] = gpt2_directory, texts

    @functools.cache
    def run(model: str, ranks: int) -> dict:
        path = tmp_path_factory.mktemp(model) / "results.pt"
        variants = {k: flags for k, flags in VARIANTS[model, ranks].items() if k in names}
        results = run_worker(ranks, path, *inputs[model], variants)
        results["overfitted"] = Path(f"{path}.overfitted")
        results["directory"] = inputs[model][0]
        return results

    return lambda model, ranks=2: run(model, ranks)


@pytest.fixture(scope="module")
def plain(results) -> Callable[[str], dict]:
    """Return a function that returns what plain PyTorch has for a model and the same samples."""

    @functools.cache
    def train(model: str, variant: str = "full_shard") -> dict:
        base = CLASSES[model].from_pretrained(results(model)["directory"], dtype=torch.float32)
        return reference(base, results(model)[variant]["rows"], is_linear=model != "llama")

    return train


def cases() -> list:
    """Return the model, ranks and variant of each comparison. `make test` runs those of Llama that
    compile nothing."""
    params = []
    for key, variants in VARIANTS.items():
        for variant in variants:
            is_quick = key[0] == "llama" and "compile" not in variant
            mark = pytest.mark.slow if key == IS_SLOW else pytest.mark.ci
            if "bf16" not in variant:
                params.append(pytest.param(*key, variant, marks=[] if is_quick else mark))
    return params


@pytest.mark.parametrize("model, ranks, variant", cases())
def test_ten_steps_equal_plain_pytorch(model, ranks, variant, results, plain):
    """Some global batches do not divide evenly among the ranks. Packs equal single documents."""
    result = results(model, ranks)[variant]
    check_parity(result, plain(model, variant if variant in OTHER_SAMPLES else "full_shard"))
    assert result["tied"] == (model != "llama")
    assert variant != "padded" or all(len(row) == 1 for rows in result["rows"] for row in rows)


@MODELS
def test_recomputation_changes_no_loss(model, results):
    for name, recomputed in {
        "full_shard": ("activation_checkpointing", "selective"),
        "ddp": ("ddp_activation_checkpointing",),
        "fsdp2": ("fsdp2_activation_checkpointing", "fsdp2_selective"),
    }.items():
        expected = results(model)[name]
        for result in (results(model)[x] for x in recomputed if x in results(model)):
            assert result["losses"] == expected["losses"]
            assert result["gradient"].keys() == expected["gradient"].keys()
            for path, gradient in expected["gradient"].items():
                assert torch.equal(result["gradient"][path], gradient), path


@MODELS
def test_step_never_waits_for_the_device(model, results):
    """A step and the fetch of its micro-batches read no tensor's value on the host, except for
    Transformers' check of its masks. A step has three collectives for each unit (two for the root,
    which stays gathered for the backward pass), one for the norm and one for the hosts' counts."""
    for name in ("full_shard", "fsdp2", "ddp"):
        result = results(model)[f"{name} without log"]
        assert result["waits"].keys() <= {"masking_utils.py"}, (name, result["waits"])
        if name != "ddp" and model == "gpt2":
            assert not result["waits"]
            assert result["collectives"] == 3 * result["units"] + 1


@pytest.mark.parametrize("name", ["full_shard", "fsdp2", "ddp"])
def test_bad_step_changes_nothing_and_is_reported(name, results):
    (error, changed), (empty_error, changed_by_empty) = results("gpt2")[name]["bad"]
    assert not changed and not changed_by_empty
    assert "The gradient norm of step 4 is not finite, in samples [" in error
    assert "Step 4 has no target tokens, in samples [" in empty_error


@pytest.mark.parametrize("name", ["Lion", "SGD", "AdamW", "ema 1", "ema 2"])
def test_edited_optimizers_resume_exactly(name, results):
    """Optimizers that are not fused, and an average of the weights."""
    (lines, weights), (resumed, resumed_weights) = results("gpt2")["edited"][name]
    for key in ("loss", "updates"):
        assert [line.get(key) for line in lines] == [line.get(key) for line in resumed]
    assert len(lines) == 6 and lines[-1].get("updates", 6) == 6
    assert all(map(torch.equal, weights, resumed_weights))


@MODELS
def test_blocks_compile_without_graph_breaks(model, results):
    compiled = results(model)["compile"]
    assert compiled["graphs"] > 1 and not compiled["graph_breaks"]
    assert len({length for _, length in compiled["shapes"]}) > 1
    assert not results(model)["full_shard"]["graphs"]


@pytest.mark.parametrize("variant", BF16)
@MODELS
def test_bf16_is_near_and_frequencies_stay_fp32(model, variant, results, plain):
    result = results(model)[variant]
    assert result["losses"] == pytest.approx(plain(model)["losses"], abs=0.05)
    assert result["losses"] != pytest.approx(plain(model)["losses"], abs=1e-5)
    frequencies = [x for name, x in result["buffers"].items() if name.endswith("inv_freq")]
    assert bool(frequencies) == (model == "llama")
    for x in frequencies:
        assert torch.equal(x, 10000 ** -(torch.arange(0, 8, 2) / 8)) and x.dtype == torch.float32


def test_units_are_blocks_and_root(results):
    """Wrapping by size makes more units, and none of them contains the tied embedding."""
    units = {name: results("gpt2")[name]["units"] for name in ("full_shard", "fsdp2", "ddp")}
    assert units == {"full_shard": 4, "fsdp2": 4, "ddp": 0}
    assert results("gpt2")["size"]["units"] > 4
    assert results("llama")["full_shard"]["units"] == 3 + 3  # and an untied embedding and head


@pytest.mark.slow
@pytest.mark.parametrize("strategy", FOUR)
def test_rank_holds_its_share_of_the_bytes(strategy, results, plain):
    share = {"hybrid_shard": 2, "fsdp2_hybrid_shard": 2, "ddp": 1}.get(strategy, 4)
    count = sum(grad.numel() for grad in plain("gpt2")["gradient"].values())
    result = results("gpt2", 4)[strategy]
    padding = 4 * 16 * 4  # 15 elements per unit, and rounding
    for kind, copies in (("parameter", 1), ("gradient", 1), ("optimizer", 2)):
        expected = copies * 4 * count / share
        assert abs(result[f"{kind}_bytes"] - expected) <= copies * padding


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generation_reproduces_overfitted_examples(precision, strategy, results):
    assert losses(results("t5")["overfitted"])[150] < 0.1
    triples = results("t5")["generated"][precision, strategy]
    plain = results("t5")["generated"]["fp32", "ddp"]
    assert [triple[:2] for triple in triples] == [triple[:2] for triple in plain]
    assert len(triples) == len(set(map(tuple, triples))) == 7
    assert sum(reference == generated for _, reference, generated in triples) >= 6
