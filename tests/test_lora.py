"""Compare adapters of llama_fsdp.py on weights in 32, 16 and 4 bits with single-process peft."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import (
    ROOT,
    WIDE,
    check_equal_weights,
    error_lines,
    launch,
    losses,
    metrics,
    weights,
)
from copied import edited_script
from in_process import start
from parity import HYBRID, check_parity, held_out_loss, plain_steps, run_worker, val_rows
from safetensors.torch import save_file
from ten_steps import COMPILED, parse_args
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaConfig, LlamaForCausalLM

import llama_fsdp
from core.ranks import Problem
from optional import lora
from prepare import templates

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

LORA = ["--lora-rank", "4", "--lora-alpha", "8"]
NF4 = [*LORA, "--load-in-4bit"]
ACCUMULATE = ["--batch-size", "2", "--gradient-accumulation-steps", "2", "--accumulate-no-sync"]
TWO_TARGETS = ["--lora-targets", "q_proj", "down_proj"]
ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {  # by number of ranks
    2: {
        "lora": LORA,
        "lora_accumulate_no_sync": [*LORA, *ACCUMULATE],
        "lora_bf16": [*LORA, "--precision", "bf16"],
        "lora_targets": [*LORA, *TWO_TARGETS],
        "nf4": NF4,
        "nf4_recomputed": [*NF4, "--activation-checkpointing", "blocks"],
        "nf4_compile": [*NF4, *COMPILED],
        "nf4_shard_grad_op": [*NF4, "--strategy", "shard_grad_op"],
        "nf4_bf16": [*NF4, "--precision", "bf16"],
    },
    3: {"lora": LORA, "nf4": NF4},
    4: {"lora": [*LORA, *HYBRID], "nf4": [*NF4, *HYBRID]},
}
CASES = [(n, name) for n, names in VARIANTS.items() for name in names if "bf16" not in name]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, wide_llama: Path, chats: Path) -> dict:
    """Return results by number of ranks and variant."""
    directory = tmp_path_factory.mktemp("results")
    return {
        ranks: run_worker(ranks, directory / f"{ranks}.pt", wide_llama, [chats], variants)
        for ranks, variants in VARIANTS.items()
    }


def load_base(directory: Path, in_4bit: bool) -> LlamaForCausalLM:
    """Return the base model as Transformers and bitsandbytes load it."""
    options = {"dtype": torch.float32, "device_map": "cpu"}
    if in_4bit:
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, **nf4)
        options["quantization_config"] = config
    model = LlamaForCausalLM.from_pretrained(directory, **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes would compute in bf16
            module.support_avx512bf16_for_cpu = False
    return model


def reference(result: dict, directory: Path, in_4bit: bool, targets: list[str]) -> dict:
    """Run the same steps with Transformers and peft in one process, one document at a time."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    model = peft.get_peft_model(load_base(directory, in_4bit), config).train()
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    initial = {f"base_model.model.{n}": x for n, x in result["initial_adapters"].items()}
    assert adapters.keys() == initial.keys()
    for name, tensor in initial.items():
        adapters[name].data.copy_(tensor)
    groups = [{"params": list(adapters.values()), "weight_decay": 0.1}]
    steps = plain_steps(model, groups, result["rows"])
    gradient = steps["gradient"].items()
    return steps | {"gradient": {n.removeprefix("base_model.model."): g for n, g in gradient}}


@pytest.mark.parametrize("ranks, variant", CASES)
def test_ten_steps_equal_peft(ranks, variant, results, wide_llama):
    result = results[ranks][variant]
    targets = TWO_TARGETS[1:] if variant == "lora_targets" else ALL_TARGETS
    expected = reference(result, wide_llama, variant.startswith("nf4"), targets)
    check_parity(result, expected)
    assert all(x.any() for name, x in expected["gradient"].items() if "lora_B" in name)


@pytest.mark.parametrize("variant", ["lora", "lora_bf16", "nf4", "nf4_bf16"])
def test_rank_holds_a_shard_of_the_base_and_of_the_adapters(variant, results):
    """Base weights are in the compute dtype or 4 bits. Only the adapters have gradients and
    moments, in fp32."""
    result = results[2][variant]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, **WIDE))
    projections = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, nn.Linear))
    others = sum(parameter.numel() for parameter in model.parameters()) - projections
    itemsize = 2 if "bf16" in variant else 4
    base = itemsize * others + (0.5 if "nf4" in variant else itemsize) * projections
    adapters = sum(tensor.nbytes for tensor in result["initial_adapters"].values())
    assert result["parameter_bytes"] == (base + adapters) / 2
    assert result["gradient_bytes"] == adapters / 2
    assert result["optimizer_bytes"] == adapters


@pytest.mark.parametrize("variant", ["lora", "nf4"])
def test_bf16_losses_are_near_fp32(variant, results):
    near, exact = results[2][f"{variant}_bf16"], results[2][variant]
    assert near["losses"] == pytest.approx(exact["losses"], abs=0.05)
    assert near["losses"] != pytest.approx(exact["losses"], abs=1e-6)


@pytest.fixture(scope="module")
def flags(wide_llama: Path, chats: Path) -> list[str]:
    """Return flags for eight steps with a global batch of 4 and dropout in the adapters."""
    return ["--model-name", str(wide_llama), "--dataset", str(chats), "--max-seq-length", "96",
            "--num-train-samples", "20", "--max-steps", "8", "--log-every", "1", "--eval-every",
            "4", "--save-every", "2", "--save-best", "--lr", "1e-2", *NF4,
            "--lora-dropout", "0.1"]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """Return a finished run of two ranks."""
    output = tmp_path_factory.mktemp("run") / "uninterrupted"
    launch(2, "llama_fsdp.py", *flags, "--batch-size", "2", "--output-dir", output)
    return output


def test_peft_loads_exports_with_the_same_loss(uninterrupted, flags, wide_llama):
    [documents] = val_rows("llama_fsdp", flags).values()
    val = losses(uninterrupted, "val")
    for name, expected in (("final", val[8]), ("best", min(val.values()))):
        model = peft.PeftModel.from_pretrained(load_base(wide_llama, True), uninterrupted / name)
        assert held_out_loss(model.eval(), documents) == pytest.approx(expected, rel=1e-5)
    config = json.loads((uninterrupted / "final/adapter_config.json").read_text())
    assert config["target_modules"] == sorted(ALL_TARGETS)  # equal runs export equal bytes
    settings = json.loads((uninterrupted / "final/generation_config.json").read_text())
    assert settings["eos_token_id"] == 1
    adapters = weights(uninterrupted / "final")
    assert len(adapters) == 2 * 2 * len(ALL_TARGETS)
    assert all(tensor.any() and tensor.dtype == torch.float32 for tensor in adapters.values())
    size = sum(tensor.nbytes for tensor in adapters.values())
    path = uninterrupted / "checkpoints/step-00000008"
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = [entry for name, entry in entries.items() if not name.startswith("random.")]
    checkpoint_size = sum(math.prod(x.size) * x.properties.dtype.itemsize for x in tensors)
    assert 3 * size <= checkpoint_size <= 3 * size + 4 * len(tensors)  # the step counts of AdamW


@pytest.mark.slow  # make test covers runs without adapters
def test_killed_run_with_dropout_resumes_bit_for_bit(uninterrupted, flags, tmp_path):
    command = [*flags, "--batch-size", "2", "--output-dir", str(tmp_path)]
    killed = ["llama_fsdp", 1, 6, *command]
    assert launch(2, "tests/workers/killed.py", *killed, check=False).returncode
    launch(2, "llama_fsdp.py", *command)
    assert [line["step"] for line in metrics(tmp_path, "start")] == [0, 4]
    for event in ("train", "val"):
        assert losses(tmp_path, event) == losses(uninterrupted, event)
    for name in ("final", "best"):
        check_equal_weights(tmp_path / name, uninterrupted / name)


def test_evaluation_reads_base_and_adapters(uninterrupted, flags, tmp_path, capfd):
    run = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    command = [*flags, "--evaluate-only", "--output-dir", run]
    assert start(llama_fsdp, *command) == 0
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["loss"] == pytest.approx(losses(run, "val")[8], rel=1e-6)
    for extra, message in (
        (["--lora-alpha", "9"], "--lora-alpha is 9.0, was 8.0."),
        (["--output-dir", tmp_path / "nothing"], "no checkpoint in --output-dir"),
        (
            ["--model-name", run / "final"],
            "final has adapters. Pass a merged model, or the",
        ),
    ):
        assert start(llama_fsdp, *command, *extra) == 1
        assert message in capfd.readouterr().err


@pytest.mark.parametrize("change, message", [
    (["--lora-rank", "2", "--lora-alpha", "9", "--lora-targets", "q_proj", "--no-load-in-4bit"],
     "--lora-rank is 2, was 4."),
    (["--lora-targets", "q_proj"], "--lora-targets is ['q_proj'], was ['down_proj', "),
    (["--no-load-in-4bit"], "--load-in-4bit is False, was True."),
    (["--model-name", "OTHER"], "the base is "),
    (["ALL WEIGHTS"], "--lora-rank is 0, was 4."),
])  # fmt: skip
def test_resume_rejects_changed_adapters_or_base(
    change, message, uninterrupted, flags, wide_llama, tmp_path, capfd
):
    """OTHER has the same shapes as the base model, but different values."""
    shutil.copytree(wide_llama, tmp_path / "OTHER")
    tensors = weights(wide_llama)
    tensors["model.layers.1.mlp.up_proj.weight"] += 1
    save_file(tensors, tmp_path / "OTHER/model.safetensors", metadata={"format": "pt"})
    if change == ["ALL WEIGHTS"]:
        flags, change = flags[: flags.index("--lora-rank")], []
    change = [word.replace("OTHER", str(tmp_path / "OTHER")) for word in change]
    shutil.copytree(uninterrupted, tmp_path / "run")
    output = ["--batch-size", "4", "--output-dir", str(tmp_path / "run"), "--max-steps", "9"]
    assert start(llama_fsdp, *flags, *output, *change) == 1
    (error,) = error_lines(capfd.readouterr().err)
    assert message in error


def test_one_rank_resumes_two(flags, wide_llama, tmp_path, capfd):
    common = [*flags, "--no-load-in-4bit", "--lora-dropout", "0"]
    one = [*common, "--batch-size", "4"]
    one_run, resumed_run = tmp_path / "whole", tmp_path / "parts"
    assert start(llama_fsdp, *one, "--output-dir", one_run) == 0
    two = [*common, "--batch-size", "2", "--checkpoint-type", "full"]
    killed = ["llama_fsdp", 0, 7, *two, "--output-dir", resumed_run]
    assert launch(2, "tests/workers/killed.py", *killed, check=False).returncode
    capfd.readouterr()
    assert start(llama_fsdp, *one, "--output-dir", resumed_run) == 0
    changed = [line for line in capfd.readouterr().out.splitlines() if ", was " in line]
    assert changed == ["--batch-size is 4, was 2."]
    for event in ("train", "val"):
        assert losses(resumed_run, event) == pytest.approx(losses(one_run, event), abs=1e-5)
    model = peft.PeftModel.from_pretrained(load_base(wide_llama, False), resumed_run / "final")
    merged = model.merge_and_unload()
    [documents] = val_rows("llama_fsdp", flags).values()
    assert held_out_loss(merged, documents) == pytest.approx(losses(one_run, "val")[8], rel=1e-5)


def test_merged_model_has_the_settings_and_files_of_its_base(chats, llama_directory, tmp_path):
    """By the recipe in docs/adapters.md, for a base in the form of Transformers 4."""
    base = Path(shutil.copytree(llama_directory, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (base / "config.json").write_text(json.dumps(config))
    flags = ["--model-name", base, "--dataset", chats, "--max-seq-length", "64", *LORA]
    flags += ["--max-steps", "2", "--lr", "1e-2", "--output-dir", tmp_path / "run"]
    assert start(llama_fsdp, *flags) == 0
    document = (ROOT / "docs/adapters.md").read_text()
    (recipe,) = (text for text in document.split("```") if "merge_and_unload" in text)
    recipe = recipe.removeprefix("python").replace("output/qlora", str(tmp_path / "run"))
    exec(recipe, names := {})
    merged = json.loads((tmp_path / "run/merged/config.json").read_text())
    for key in merged.keys() | config.keys():
        is_equal = key in merged and merged[key] == config.get(key)
        assert is_equal or key in ("dtype", "torch_dtype", "transformers_version"), key
    for path in base.glob("*token*"):
        if path.name != "tokenizer_config.json":  # it gains the chat template
            assert (tmp_path / "run/merged" / path.name).read_bytes() == path.read_bytes()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "run/merged", dtype=torch.bfloat16)
    for name, tensor in names["model"].state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


RETURN = "    return model, blocks, tokenizer, initial\n"
T5_CHANGES = {  # add adapters to T5_training.py, with the lines of llama_fsdp.py
    "import policies\n": "import policies\nfrom optional import lora\n",
    "    model: Model = field": "    adapters: lora.Lora = field(default_factory=lora.Lora)\n"
    "    model: Model = field",
    RETURN: f"    lora.add(args, model, initial, blocks, tokenizer)\n{RETURN}",
    "export_model(": "lora.export_model(",
}


def test_t5_copy_trains_adapters(t5_directory, pairs, tmp_path):
    """Without a resume, for which `needs_weights` has to change too."""
    flags = ["--model-name", t5_directory, "--dataset", pairs, "--lora-rank", "4", "--lr", "1e-2",
             "--max-steps", "4", "--rouge-samples", "0", "--output-dir", tmp_path]  # fmt: skip
    assert start(edited_script("T5_training", T5_CHANGES), *flags) == 0
    first, *_, last = metrics(tmp_path, "val")
    assert abs(last["loss"] - first["loss"]) > 1e-3
    base = transformers.T5ForConditionalGeneration.from_pretrained(t5_directory)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "final").eval()
    [rows] = val_rows("T5_training", flags[:4]).values()
    assert held_out_loss(model, rows) == pytest.approx(last["loss"], abs=1e-5)


def test_routers_and_experts_get_no_adapters(process_group):
    """Llama 4's router is a Linear module. peft would adapt the experts too, so such targets
    are refused."""
    args = parse_args(llama_fsdp, ["--model-name", "tiny", *LORA])
    with torch.device("meta"):
        config = transformers.Llama4TextConfig(num_hidden_layers=2)
        router = transformers.Llama4ForCausalLM(config)
        config = transformers.DeepseekV3Config(num_hidden_layers=4)
        experts = transformers.DeepseekV3ForCausalLM(config)
    lora.add(args, router, {}, (type(router.model.layers[0]),), None)
    targets = [name for name, module in router.named_modules() if hasattr(module, "lora_A")]
    assert "model.layers.1.self_attn.q_proj" in targets
    assert not any(name.endswith("router") for name in targets)
    with pytest.raises(Problem, match="mlp.experts is not a projection of a block"):
        lora.add(args, experts, {}, (type(experts.model.layers[0]),), None)


@pytest.mark.parametrize("rows, markers", [
    ({"<|im_start|>": 0.0}, ["<|im_start|>"]),
    ({"<|im_start|>": 0.5, "<|im_end|>": 0.5}, ["<|im_start|>", "<|im_end|>"]),
    ({"<|im_start|>": 0.5, "<|im_end|>": 0.6}, []),
])  # fmt: skip
def test_untrained_chat_markers_are_named(rows, markers, process_group, capfd):
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = templates.TEMPLATES["chatml"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, **WIDE))
    source = dict(model.state_dict())
    for token, value in rows.items():
        source["model.embed_tokens.weight"][tokenizer.convert_tokens_to_ids(token)] = value
    lora.check_markers(model, source, tokenizer)
    out = capfd.readouterr().out
    assert f"no trained embeddings of {' '.join(markers)}, and" in out if markers else not out


@pytest.mark.parametrize("flags, message", [
    (["--fsdp", "1"], "--lora-rank needs --fsdp 2"),
    (["--strategy", "ddp"], "--lora-rank needs --fsdp 2, and not --strategy ddp"),
    (["--lora-rank", "0", "--load-in-4bit"], "--load-in-4bit need --lora-rank"),
    (["--lora-rank", "0", "--lora-targets", "q_proj"], "--load-in-4bit need --lora-rank"),
    (["--lora-targets", "q_proj", "fc1"], "--lora-targets fc1 is none of"),
    (["--load-in-4bit"], "is wrong for width 32 on a CPU"),
])  # fmt: skip
def test_bad_flags_are_refused(flags, message, llama_directory, chats, tmp_path, capfd):
    common = ["--model-name", llama_directory, "--dataset", chats, "--lora-rank", "4"]
    common += ["--max-seq-length", "64", "--output-dir", tmp_path / "run"]
    assert start(llama_fsdp, *common, *flags) == 1
    (error,) = error_lines(capfd.readouterr().err)
    assert message in error
