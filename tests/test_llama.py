"""llama_fsdp.py against plain single-process PyTorch: loading, packing, loss and bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import launch
from safetensors.torch import load_file, save_file
from ten_steps import (
    COMPILED,
    CORE_VARIANTS,
    PAGED,
    check_going_on,
    check_nothing_waits,
    check_recomputation,
)
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import chat_dataset
import llama_fsdp
from runtime.attention import automatic, per_document, register
from runtime.chunked_loss import LossHead

TWO_RANKS = CORE_VARIANTS | {
    "compile": COMPILED,
    "padded": ["--no-packing"],
    "eager": ["--attention", "eager"],
    "bf16": ["--precision", "bf16"],
    "ddp_bf16": ["--precision", "bf16", "--strategy", "ddp"],
    "fsdp2_bf16": ["--fsdp", "2", "--precision", "bf16"],
    "fsdp2_compile": ["--fsdp", "2", *COMPILED],
    "fsdp2_compile_attention_kept": [
        "--fsdp",
        "2",
        *COMPILED,
        "--activation-checkpointing",
        "attention",
        "--attention",
        "sdpa",
    ],
    **PAGED,
}
HYBRID = ["--strategy", "hybrid_shard", "--shard-group-size", "2"]
FOUR_RANKS = {"hybrid_shard": HYBRID, "fsdp2_hybrid_shard": ["--fsdp", "2", *HYBRID]}

NAMES = ("frequencies", "index", "missing file", "truncated", "absent tensor", "vocabulary", "fp16",
         "bin", "gpt2")  # fmt: skip


def index_of(directory: Path) -> dict:
    """The map from tensors to files."""
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, llama_directory: Path) -> dict[str, str]:
    """Copies of the model, each with a fault of its own."""
    root, found = tmp_path_factory.mktemp("wrong"), {}
    head = index_of(llama_directory)["lm_head.weight"]
    for name in NAMES:
        path = found[name] = root / name
        shutil.copytree(llama_directory, path)
        config = json.loads((path / "config.json").read_text())
        if name == "missing file":
            (path / head).unlink()
        elif name == "truncated":
            (path / head).write_bytes((path / head).read_bytes()[:-100])
        elif name == "absent tensor":
            tensors = load_file(path / head)
            del tensors["lm_head.weight"]
            save_file(tensors | {"other": torch.zeros(1)}, path / head)
        elif name == "vocabulary":
            config["vocab_size"] += 16
        elif name == "fp16":
            for file in path.glob("*.safetensors"):
                save_file({k: t.half() for k, t in load_file(file).items()}, file)
        elif name == "bin":
            for file in path.glob("model*"):
                file.unlink()
            (path / "pytorch_model.bin").touch()
        elif name == "frequencies":
            key = "model.layers.0.self_attn.rotary_emb.inv_freq"
            save_file(load_file(path / head) | {key: torch.ones(4)}, path / head)
        elif name == "index":
            (path / "model.safetensors.index.json").write_text("{")
        else:
            config["model_type"] = "gpt2"
        (path / "config.json").write_text(json.dumps(config))
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, llama_directory: Path, chats: Path, wrong: dict
) -> dict:
    """Results of two ranks by variant, at a global batch of 8 sequences."""
    path = tmp_path_factory.mktemp("results") / "two.pt"
    arguments = (path, llama_directory, chats, 4, json.dumps(TWO_RANKS), json.dumps(wrong))
    launch(2, "tests/workers/llama_worker.py", *arguments)
    return torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def four_ranks(
    tmp_path_factory: pytest.TempPathFactory, llama_directory: Path, chats: Path
) -> dict:
    """The same of four ranks."""
    path = tmp_path_factory.mktemp("results") / "four.pt"
    arguments = (path, llama_directory, chats, 2, json.dumps(FOUR_RANKS), "{}")
    launch(4, "tests/workers/llama_worker.py", *arguments)
    return torch.load(path, weights_only=False)


def reference(result: dict, llama_directory: Path) -> dict:
    """The global batches of `result` in a plain training loop, a document at a time."""
    model = transformers.LlamaForCausalLM.from_pretrained(llama_directory, dtype=torch.float32)
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return plain_steps(model, groups, result["rows"])


def plain_steps(model: torch.nn.Module, groups: list[dict], steps: list[list]) -> dict:
    """Losses of ten steps on these rows, and the first gradient of what is trained."""
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    cosine = [(1 + torch.tensor(torch.pi * step / 9).cos().item()) / 2 for step in range(10)]
    rates = [0.5, *cosine]  # one step of warm-up
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    found: dict = {"losses": []}
    for rows in steps:
        loss, count = torch.zeros(()), 0
        for document in (document for row in rows for document in row):
            labels = torch.tensor(document["labels"][1:])
            if (labels == -100).all():
                continue
            logits = model(torch.tensor([document["input_ids"][:-1]]), use_cache=False).logits[0]
            loss = loss + F.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        loss = loss / count
        loss.backward()
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found.setdefault("gradient", {n: p.grad.clone() for n, p in trained})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found["losses"].append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found


@pytest.fixture(scope="module")
def plain(two_ranks: dict, llama_directory: Path) -> dict:
    """The reference of all packed variants, which see the same documents."""
    return reference(two_ranks["full_shard"], llama_directory)


def check_parity(result: dict, expected: dict) -> None:
    """Losses to 1e-5, the first gradient to 1e-5 of its norm."""
    assert len(result["losses"]) == 10
    assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert result["gradient"].keys() == expected["gradient"].keys()
    whole = torch.cat([grad.flatten() for grad in expected["gradient"].values()])
    ours = torch.cat([result["gradient"][name].flatten() for name in expected["gradient"]])
    assert (ours - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("variant", [x for x in TWO_RANKS if "bf16" not in x and x != "padded"])
def test_ten_steps_on_two_ranks(variant: str, two_ranks: dict, plain: dict) -> None:
    """Packed, against separate documents; with steps that the ranks cannot share out evenly."""
    check_parity(two_ranks[variant], plain)


@pytest.mark.parametrize("variant", PAGED)
def test_a_paged_optimizer_goes_on(variant: str, two_ranks: dict) -> None:
    """From its checkpoint, and PyTorch's AdamW from it too; the ten steps are above."""
    pytest.importorskip("bitsandbytes")
    check_going_on(two_ranks[variant]["going on"])


def test_nothing_waits_for_the_device(two_ranks: dict) -> None:
    """Not in ours, in FSDP or in the optimizer."""
    check_nothing_waits(two_ranks, ["full_shard", "fsdp2", "ddp", "accumulate"])


@pytest.mark.parametrize("variant", ["compile", "fsdp2_compile", "fsdp2_compile_attention_kept"])
def test_compiled_blocks_are_compiled(variant: str, two_ranks: dict) -> None:
    """In whole graphs, for several lengths; the losses are above, those of plain PyTorch."""
    compiled = two_ranks[variant]
    assert compiled["graphs"] > 1 and not compiled["graph_breaks"]
    assert len({length for _, length in compiled["shapes"]}) > 1
    assert not two_ranks["full_shard"]["graphs"]


def test_recomputation_changes_nothing(two_ranks: dict) -> None:
    """Of blocks, or of all of them but their attention, which is computed a document at a time or,
    in compiled blocks, at once."""
    check_recomputation(
        two_ranks,
        activation_checkpointing="full_shard",
        attention_kept="full_shard",
        fsdp2_compile_attention_kept="fsdp2_compile",
    )


def test_ten_steps_padded(two_ranks: dict, llama_directory: Path) -> None:
    """A document a sequence."""
    assert all(len(row) == 1 for rows in two_ranks["padded"]["rows"] for row in rows)
    check_parity(two_ranks["padded"], reference(two_ranks["padded"], llama_directory))


@pytest.mark.parametrize("variant", FOUR_RANKS)
def test_ten_steps_on_four_ranks(variant: str, four_ranks: dict, plain: dict) -> None:
    """HYBRID_SHARD as 2 x 2."""
    check_parity(four_ranks[variant], plain)


@pytest.mark.parametrize("variant", ["bf16", "ddp_bf16", "fsdp2_bf16"])
def test_bf16_is_near_and_frequencies_stay_fp32(variant: str, two_ranks: dict, plain: dict) -> None:
    """The policy is in force, but not on the rotary buffers."""
    losses = two_ranks[variant]["losses"]
    assert losses == pytest.approx(plain["losses"], abs=0.05)
    assert losses != pytest.approx(plain["losses"], abs=1e-5)
    frequencies = two_ranks[variant]["frequencies"]
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, 10000 ** -(torch.arange(0, 8, 2) / 8))


def test_loaded_as_by_from_pretrained(two_ranks: dict, llama_directory: Path) -> None:
    """Tensor by tensor; blocks, embedding, head and the root are units."""
    model = transformers.LlamaForCausalLM.from_pretrained(llama_directory)
    there = dict(model.named_parameters())
    assert two_ranks["loaded"].keys() == there.keys()
    assert all(torch.equal(tensor, there[name]) for name, tensor in two_ranks["loaded"].items())
    assert two_ranks["full_shard"]["units"] == 3 + 3
    assert two_ranks["ddp"]["units"] == 0


@pytest.mark.parametrize("name, said", [
    ("frequencies", "loaded"),
    ("index", "model.safetensors.index.json cannot be read"),
    ("missing file", "No such file"),
    ("truncated", "cannot be read"),
    ("absent tensor", "missing_keys: ['lm_head.weight']; unexpected_keys: ['other']"),
    ("vocabulary", "('lm_head.weight', torch.Size([384, 32]), torch.Size([400, 32]))"),
    ("bin", "convert other formats"),
    ("gpt2", "is a gpt2, not a llama"),
    ("fp16", "loaded as torch.float32"),
])  # fmt: skip
def test_wrong_checkpoints(name: str, said: str, two_ranks: dict) -> None:
    """Told on both ranks, and soon; fp16 is loaded into fp32."""
    everyone, seconds = two_ranks["refused"][name]
    assert all(said in sentence for sentence in everyone)
    assert "\n" not in everyone[0] and seconds < 10
    if name == "vocabulary":
        assert "('model.embed_tokens.weight', torch.Size([384, 32])" in everyone[0]


def documents(count: int) -> list[dict]:
    """Documents of 2 to 12 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 13, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


def test_the_loss_is_summed_in_fp32() -> None:
    """From bf16 within 1e-3 over 4,000 tokens, where a sum in bf16 has three digits."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4000, 32), torch.randn(300, 32)
    targets = torch.randint(0, 300, (4000,))
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum").item()
    for dtype in (torch.bfloat16, torch.float16):
        head = LossHead(torch.nn.Linear(32, 300, bias=False), LlamaConfig(), llama_fsdp.token_loss)
        head.weight.data = weight.to(dtype)
        loss = head(hidden.to(dtype), targets)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(plain, rel=1e-3)


def logits(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Of a packed batch, by way of the loss head's input."""
    kept: list = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        llama_fsdp.summed_loss(model, batch)
        handle.remove()
        return model.lm_head(kept[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager", "packed"])
def test_documents_do_not_see_each_other(attention: str, llama_directory: Path) -> None:
    """Packed logits are those of each document alone, whatever stands in the others."""
    register(per_document)
    model = llama_fsdp.LossModel.from_pretrained(
        llama_directory, attn_implementation=attention
    ).train()
    packs = [documents(8)[:5], documents(8)[5:]]
    batch = chat_dataset.collate(packs)
    found = logits(model, batch).split(batch["input_ids"].size(1))
    plain = transformers.LlamaForCausalLM.from_pretrained(llama_directory)
    for row, pack in zip(found, packs, strict=True):
        start = 0
        for ids in (document["input_ids"][:-1] for document in pack):
            alone = plain(torch.tensor([ids]), use_cache=False).logits[0]
            assert (row[start : start + len(ids)] - alone).abs().max() < 1e-5
            start += len(ids)
    first = len(packs[0][0]["input_ids"]) - 1
    batch["input_ids"][0, first] += 1  # the second document's first token
    changed = (logits(model, batch) - torch.cat(found)).abs().amax(dim=1).nonzero().flatten()
    assert changed.min() == first
    assert changed.max() < first + len(packs[0][1]["input_ids"]) - 1


def test_a_kernel_is_refused_where_it_cannot_run(capsys: pytest.CaptureFixture) -> None:
    """With the reason; auto takes torch's there."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        llama_fsdp.parse_args(["--model-name", "tiny", "--attention", "flash"])
    assert "--attention flash needs a GPU" in capsys.readouterr().err
    for flags, shape, expected in (
        ([], {}, "varlen"),
        (["--compile"], {}, "sdpa"),
        ([], {"sliding_window": 9}, "sdpa"),
        ([], {"sliding_window": 9, "use_sliding_window": False}, "varlen"),
        ([], {"sliding_window": 4096}, "varlen"),
        ([], {"attention_dropout": 0.1}, "sdpa"),
    ):
        args = llama_fsdp.parse_args(flags)
        assert automatic(args, LlamaConfig(**shape), LlamaForCausalLM) == expected


def test_new_head_is_initialised_or_tied() -> None:
    """As Hugging Face's own would be."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 500}
    config = LlamaConfig(num_attention_heads=2, **shape)
    head = llama_fsdp.LossModel(config).lm_head.weight
    assert head.std().item() == pytest.approx(config.initializer_range, rel=0.05)
    config.tie_word_embeddings = True
    tied = llama_fsdp.LossModel(config)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_the_template_goes_where_there_is_none(llama_directory: Path, tmp_path: Path) -> None:
    """So that final/ can be asked in the format it was trained in."""
    args = llama_fsdp.parse_args(["--model-name", str(llama_directory), "--max-seq-length", "64"])
    llama_fsdp.setup(args)
    try:
        tokenizer = llama_fsdp.load_model(args, torch.device("cpu"))[1]
    finally:
        llama_fsdp.cleanup()
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "a"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, **options)
    assert text == "[INST] a [/INST]"


@pytest.mark.parametrize("content, flags, said", [
    ('{"messages": [{"role": "user", "content": "a"}]}\n', [], "row 1: no turn is the assistant"),
    ('{"messages": []}\n', [], "row 1: messages is not a list"),
    ('{"messages": [{"role": "robot", "content": "a"}]}\n', [], "robot"),
    ('{"messages": [{"role": "user", "content": "a"}]}\n{"mess\n', [], "row 1"),
    ('{"question": "a", "answer": "b"}\n', [], "has columns question, answer"),
    ('{"content": "a"}\n', ["--max-seq-length", "9000"], "above the model's 2048 positions"),
    ('{"content": "a"}\n', ["--max-seq-length", "2"], "--max-seq-length 2 is out of range"),
    ('{"prompt": "long question", "completion": "a"}\n{"prompt": "another long", "completion": '
     '"b"}\n', ["--max-seq-length", "8"],
     "the answers of 1 of 1 documents begin after --max-seq-length 8"),
    ('{"content": "a"}\n{"content": "b"}\n', [], None),
    (None, [], "does not exist"),
])  # fmt: skip
def test_bad_input_is_one_sentence(
    content: str | None, flags: list, said: str | None, tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """Before training, with an exit code that is not 0."""
    file = tmp_path / "chats.jsonl"
    if content is not None:
        file.write_text(content)
    command = ["--model-name", "tiny", "--dataset", str(file), "--max-steps", "1", "--output-dir",
               str(tmp_path / "run"), *flags]  # fmt: skip
    if said is None:  # the smallest data there can be: a document to train on, one to validate on
        llama_fsdp.fsdp_main(llama_fsdp.parse_args(command))
        return
    with pytest.raises(SystemExit) as end:
        llama_fsdp.fsdp_main(llama_fsdp.parse_args(command))
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert end.value.code and error.startswith("error: ") and said in error
