"""block_dataset.py: texts become blocks, without a token lost, changed or invented."""

import json
import random
from pathlib import Path

import pytest
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import block_dataset
from block_dataset import Data
from core import reading
from core.ranks import Problem

TOKENIZER = ByT5Tokenizer()
BODIES = [{"body": "four\n"}, {"body": ""}, {"body": "five \n"}, {"body": "six"}]
WORDS = ["It's", "the", "House", "42", "naïve", "日本", "x=1;", "end.", "-"]
GAPS = [" ", " ", " ", "  ", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", "\n    ", " \n", "\t"]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"GPT-2": None, "Llama 3": LLAMA_3, "Qwen": LLAMA_3.replace("{1,3}", "")}


def load(path: object, tokenizer: object = TOKENIZER, **fields: object) -> Dataset:
    """Return the training blocks of one --dataset argument."""
    args = Data(**{"block_size": 16} | fields)
    return block_dataset.load_blocks(str(path), tokenizer, args)["train"]


def ids_of(rows: Dataset) -> list[int]:
    """Return the tokens of consecutive blocks."""
    return [rows[0]["input_ids"][0], *(i for row in rows for i in row["input_ids"][1:])]


def decode(rows: Dataset) -> str:
    """Return the text of consecutive blocks."""
    return TOKENIZER.decode(ids_of(rows))


def write_rows(path: Path, rows: list) -> Path:
    """Write a JSONL file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_blocks_predict_every_token_once():
    rows = [{"input_ids": list(range(10))}, {"input_ids": []}, {"input_ids": list(range(10, 23))}]
    blocks = [block["input_ids"] for block in block_dataset.blocks(rows, 5, -1, [])]
    assert [len(block) for block in blocks] == [6, 6, 6, 6, 3]
    assert [token for block in blocks for token in block[1:]] == list(range(1, 23))
    batch = block_dataset.collate([{"input_ids": blocks[0]}, {"input_ids": blocks[-1]}])
    assert batch["labels"].tolist()[0] == [1, 2, 3, 4, 5, -100, -100, -100]
    assert batch["labels"].tolist()[1] == [21, 22] + [-100] * 6
    assert batch["input_ids"].tolist()[1][:2] == [20, 21]
    assert batch["targets"] == batch["tokens"] == 7
    empty = block_dataset.collate([])
    assert (empty["labels"] == -100).all() and empty["targets"] == 0


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv", "rows", "wikitext.csv"])
def test_rows_are_joined_with_eos(name, tmp_path):
    """Lines of WikiText are not documents."""
    write = {".jsonl": Dataset.to_json, ".parquet": Dataset.to_parquet, ".csv": Dataset.to_csv}
    path = tmp_path / name
    write.get(path.suffix, Dataset.save_to_disk)(Dataset.from_list(BODIES), path)
    end = "" if name == "wikitext.csv" else "</s>"
    expected = f"four\n</s>five \n{end}six</s>"
    assert decode(load(path, text_column="body")) == expected


def test_files_are_joined_with_eos(tmp_path):
    for name, text in (("a.txt", "one\u2028\x85 <unk> \ntwo\n"), ("b.txt", "three")):
        (tmp_path / name).write_text(text)
    expected = "one\u2028\x85 <unk> \ntwo</s>three</s>"
    assert decode(load(tmp_path)) == decode(load(f"{tmp_path}/*.txt")) == expected
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16-le"))
    with pytest.raises(Problem, match="a.txt cannot be read: it is not text.* zero byte"):
        load(tmp_path / "a.txt")


def test_text_of_eos_ends_a_document_in_text_files_only(tmp_path, capfd):
    (tmp_path / "a.txt").write_text("</s>one</s>two\n</s></s>three</s>\n")
    assert decode(load(tmp_path / "a.txt")) == "one</s>two\n</s>three</s>"
    assert "a.txt: 5 times, </s> ends a document" in capfd.readouterr().out
    tokenizer = small_tokenizer(None)
    for text, is_named in (("<s>user", False), ("a</s>b", True), ("caf\xe9</s>", True)):
        rows = load(write_rows(tmp_path / "x.jsonl", [{"text": "b"}, {"text": text}]), tokenizer)
        assert ids_of(rows).count(tokenizer.eos_token_id) == 2
        line = "the texts spell </s>, which stay plain text"
        assert (line in capfd.readouterr().out) == is_named
    load(write_rows(tmp_path / "x.jsonl", [{"text": "of GPT-2<|endoftext|>"}]))
    assert "spell <|endoftext|>, which stay plain text" in capfd.readouterr().out
    (tmp_path / "a.txt").write_text("\n")
    with pytest.raises(Problem, match="a.txt has no text"):
        load(tmp_path / "a.txt")


def test_eos_between_pieces_of_a_text_file_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(block_dataset, "PIECE", 16)
    tokenizer = small_tokenizer(None)
    (tmp_path / "x.txt").write_text("\n</s>\n".join(["a"] * 200))
    assert ids_of(load(tmp_path / "x.txt", tokenizer)).count(tokenizer.eos_token_id) == 200


def test_columns_are_found_or_named(tmp_path, capfd):
    path = write_rows(tmp_path / "x.jsonl", [{"id": 1, "content": "seven"}])
    assert decode(load(path)) == "seven</s>"
    assert "x.jsonl: uses content; left out: id" in capfd.readouterr().out
    with pytest.raises(Problem, match="no column x. Its columns are: id, content. Pass --text-col"):
        load(path, text_column="x")
    write_rows(path, [{"content": "a", "text": "eight", "input_ids": [5]}])
    assert decode(load(path)) == "eight</s>"
    assert "x.jsonl: uses text; left out: content, input_ids" in capfd.readouterr().out
    write_rows(path, [{"text": "a"}, {"text": 8}])
    with pytest.raises(Problem, match="x.jsonl, row 2: text is 8, not text. Correct it"):
        load(path)
    assert decode(load(path, bad_rows="skip")) == "a</s>"


def test_column_flag_is_for_data_sets_that_have_the_column(tmp_path):
    paths = [str(write_rows(tmp_path / "a.jsonl", [{"body": "one", "text": "x"}])),
             str(tmp_path / "b.txt")]  # fmt: skip
    Path(paths[1]).write_text("two")
    args = Data(dataset=tuple(paths), val_dataset=(paths[0],), text_column="body")
    train_set, _ = block_dataset.load(args, TOKENIZER)
    assert [decode([row]) for row in train_set.with_format(None)] == ["one</s>", "two</s>"]
    args.val_dataset = ("gone.jsonl",)
    with pytest.raises(Problem, match="^--val-dataset: Data set gone.jsonl is not a file"):
        block_dataset.load(args, TOKENIZER)


def test_end_is_held_out_without_validation_data(texts, tmp_path):
    path = tmp_path / "all.txt"
    path.write_text(texts[0].read_text() * 3)
    args = Data(dataset=(str(path),), block_size=16)
    train_set, val_sets = block_dataset.load(args, TOKENIZER)
    rows = [part.with_format(None) for part in (train_set, val_sets[str(path)])]
    blocks = load(path)
    assert len(rows[1]) == len(blocks) // 20 and [*rows[0], *rows[1]] == [*blocks]
    assert decode(blocks) == path.read_text().rstrip("\n") + "</s>"
    train_set, val_sets = block_dataset.load(args, TOKENIZER, evaluate_only=True)
    assert train_set is None
    assert list(val_sets[str(path)].with_format(None)) == list(rows[1])
    path.write_text("short")
    with pytest.raises(Problem, match="has 1 blocks. Pass --val-dataset"):
        block_dataset.load(args, TOKENIZER)


def test_validation_data_replace_the_hold_out(texts):
    train, val = map(str, texts)
    args = Data(dataset=(train, f"{train}:train[:1]"), val_dataset=(val,), block_size=32)
    train_set, val_sets = block_dataset.load(args, TOKENIZER)
    sizes = {name: len(rows) for name, rows in val_sets.items()}
    assert (len(train_set), sizes) == (2 * len(load(train, block_size=32)), {val: 5})
    args.num_train_samples, args.num_val_samples = 3, 2
    train_set, val_sets = block_dataset.load(args, TOKENIZER)
    assert (len(train_set), len(val_sets[val])) == (6, 2)
    args.dataset = ("gone.jsonl",)  # which an evaluation does not read
    assert block_dataset.load(args, TOKENIZER, evaluate_only=True)[0] is None


def random_text(seed: int, count: int) -> str:
    """Return words with blank lines, indentation and other gaps."""
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(count))


def small_tokenizer(pattern: str | None) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with the pre-tokenizer of a model family."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = level
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    options = {"special_tokens": ["</s>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=level.alphabet(), **options)
    tokenizer.train_from_iterator([random_text(9, 3000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize("family", PATTERNS)
def test_text_file_has_the_tokens_of_the_whole_text(family, tmp_path, monkeypatch):
    monkeypatch.setattr(block_dataset, "PIECE", 64)
    tokenizer = small_tokenizer(PATTERNS[family])
    for seed, ending in enumerate(("", "\n", "x", "\n\n", "\r\n")):
        text = random_text(seed, 2000) + ending
        path = tmp_path / f"{seed}.txt"
        path.write_bytes(text.encode())
        pieces = reading.read(str(path), None, block_dataset.text_pieces)["train"]
        assert len(pieces) > 50 and max(map(len, pieces[reading.LINE])) < 2000
        rows = load(path, tokenizer, block_size=64)
        assert ids_of(rows) == [*tokenizer(text.rstrip("\r\n"))["input_ids"], 0]


def test_text_without_spaces_is_cut_too(tmp_path):
    (tmp_path / "x.txt").write_text("é" * 3_000_000)
    with (tmp_path / "x.txt").open() as file:
        pieces = [piece["text"] for piece in block_dataset.text_pieces(file)]
    assert max(map(len, pieces)) <= 65 * block_dataset.PIECE and "".join(pieces) == "é" * 3_000_000


def test_unknown_characters_are_counted(tmp_path, capfd):
    words = Tokenizer(models.WordLevel({"</s>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    load(write_rows(tmp_path / "x.jsonl", [{"text": "é"}, {"text": "a"}]), tokenizer)
    assert "x.jsonl: 1 tokens are <unk>, for unknown characters" in capfd.readouterr().out


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_bos_precedes_each_document_if_the_tokenizer_adds_it(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(block_dataset, "PIECE", 64)
    tokenizer = small_tokenizer(PATTERNS["GPT-2"])
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    single = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.backend_tokenizer.post_processor = single
    texts = [random_text(seed, 300).strip() for seed in range(3)]
    path = write_rows(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    if suffix == ".txt":
        path = tmp_path / "x.txt"
        path.write_text("</s>".join(texts))
    rows = load(path, tokenizer, block_size=64)
    assert ids_of(rows) == [token for text in texts for token in [*tokenizer(text)["input_ids"], 0]]
