"""The data rules of summarization_dataset.py, tested on small files in the real formats."""

import csv
import hashlib
import json
import pickle
import random
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

import summarization_dataset as sd
from core.ranks import Problem

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ByT5Tokenizer()
LONG = "A text that is long enough to keep the headline below three quarters of it, by far. "
COLUMNS = {"source_column": "document", "target_column": "summary"}
ROWS = [
    {"document": f'{i}: one,\ntwo\tand "three" caf\xe9', "id": i, "summary": f"{i}00"}
    for i in range(200)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def arguments(**changes):
    """Return the default flags, updated to use all rows and long texts, and with `changes`."""
    everything = {"num_train_samples": 0, "num_val_samples": 0, "source_length": 4000}
    args = sd.Data(**everything | {"source_prefix": "", "target_length": 1000} | changes)
    if isinstance(args.dataset, str):
        args.dataset = (args.dataset,)
    return args


def load(evaluate_only=False, **changes):
    """Return (text, summary) pairs of the training set and the first validation set."""
    train, val = sd.load(arguments(**changes), TOKENIZER, evaluate_only)
    sets = [train, next(iter(val.values()))]
    return [
        [(decode(row["input_ids"]), decode(row["labels"])) for row in rows or []] for rows in sets
    ]


def decode(ids):
    ids = [int(i) for i in ids]
    assert ids[-1] == TOKENIZER.eos_token_id
    return bytes(i - 3 for i in ids[:-1]).decode()


def write_csv(path, header, rows, **options):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([header, *rows])
    return path


def wikihow_all(folder, rows):
    """Write wikihowAll.csv of (title, headline, text) rows."""
    rows = [(headline, title, text) for title, headline, text in rows]
    return write_csv(folder / "wikihowAll.csv", ("headline", "title", "text"), rows)


def wikihow_sep(folder, rows):
    """Write wikihowSep.csv of (title, headline, text) rows."""
    rows = [("An overview", headline, text, "Steps", title) for title, headline, text in rows]
    header = "overview", "headline", "text", "sectionLabel", "title"
    return write_csv(folder / "wikihowSep.csv", header, rows)


def articles(number):
    return [(f"How to {i}", f"Do {i}.", f"{i}: {LONG}") for i in range(number)]


def wikihow_splits(**changes):
    """Return the (text, summary) pairs of WikiHow by split."""
    parts = sd.load_rows("wikihow", arguments(**changes), TOKENIZER)
    return {split: [(row["text"], row["summary"]) for row in rows] for split, rows in parts.items()}


def test_wikihow_rows_are_cleaned_and_counted(tmp_path, capsys):
    wikihow_all(
        tmp_path,
        [
            (
                "How to Greet",
                '\nBe "nice", always.,\nGo home.,\n',
                'Say "hello", first...\n\n\n,Then go.\r\n,Rest\nwell.\n\nBye.,' + LONG,
            ),
            ("How to Number", "123", LONG),
            ("How to Null", "null", LONG + "NA"),
            ("How to Be Short", "x" * 74, "y" * 100),
            ("How to Fail", "x" * 75, "y" * 100),  # must be shorter than 0.75 of the text
            ("How to Be Empty", "  \n", LONG),
            ("How to Be Emptier", "Do it.", ""),
            ("", "A headline without title.", LONG),
            *articles(300),
        ],
    )
    splits = wikihow_splits(data_dir=tmp_path)
    texts = {summary: text for rows in splits.values() for text, summary in rows}
    assert {key: text for key, text in texts.items() if not key.startswith("Do ")} == {
        'Be "nice", always. Go home.': 'Say "hello", first. Then go. Rest well. Bye.,'
        + LONG.rstrip(),
        "123": LONG.rstrip(),
        "null": LONG + "NA",
        "x" * 74: "y" * 100,
        "A headline without title.": LONG.rstrip(),
    }
    train, val = load(data_dir=tmp_path)
    assert (sorted(train), val) == (sorted(splits["train"]), splits["validation"])
    out = capsys.readouterr().out
    assert "wikihow: 305 samples of 308 rows" in out
    assert f"train {len(splits['train'])}, validation {len(val)}, test " in out


def test_paragraphs_of_an_article_stay_in_one_split(tmp_path):
    rows = [(title, f"{title}: {part}", LONG) for title, _, _ in articles(300) for part in "abc"]
    random.Random(0).shuffle(rows)
    wikihow_sep(tmp_path, rows)
    splits = wikihow_splits(data_dir=tmp_path, wikihow_part="sep")
    titles = {split: {s.split(":")[0] for _, s in rows} for split, rows in splits.items()}
    assert set(titles) == {"train", "validation", "test"}
    assert sum(map(len, titles.values())) == 300  # no title is in two splits
    assert sum(map(len, splits.values())) == 900
    for title, _, _ in articles(300):  # pins the rule, so that no version changes it
        bucket = sd.stable_hash(title.replace(" ", "")) % 100
        split = "train" if bucket < 98 else "validation" if bucket < 99 else "test"
        assert title in titles[split]


def test_title_lists_define_the_splits(tmp_path, capsys):
    eyes = [(f"{t} Cat's  Eyes, Quickly{i}", h, x) for i, (t, h, x) in enumerate(articles(9))]
    wikihow_all(tmp_path, eyes)
    keys = [f"Howto{i}CatsEyesQuickly{i}" for i in range(9)]  # as in the real lists
    lists = {"train": keys[:4], "val": keys[4:6] + keys[3:4], "test": keys[6:7]}
    for name, titles in lists.items():
        (tmp_path / f"all_{name}.txt").write_text("".join(f"{title}\n" for title in titles))
    train, val = load(data_dir=tmp_path)
    assert [summary for _, summary in train] == ["Do 0.", "Do 1.", "Do 2."]
    assert [summary for _, summary in val] == ["Do 3.", "Do 4.", "Do 5."]  # 3 is in both lists
    out = capsys.readouterr().out
    assert "wikihow: 7 samples of 9 rows" in out
    assert "train 3, validation 3, test 1" in out


def test_wikihow_errors_are_one_message(tmp_path):
    flags = {"data_dir": tmp_path}
    with pytest.raises(Problem, match="mahnazkoupaee/WikiHow-Dataset, or pass a --dataset"):
        load(**flags)
    wikihow_all(tmp_path, articles(1) * 3)
    with pytest.raises(Problem, match="too few different rows: train 3, validation 0"):
        load(**flags)
    wikihow_all(tmp_path, articles(4))
    (tmp_path / "all_train.txt").write_text("Howto0\n")
    (tmp_path / "all_val.txt").write_text("Howto77\n")
    with pytest.raises(Problem, match="too few different rows: train 1, validation 0"):
        load(**flags)
    write_csv(tmp_path / "wikihowAll.csv", ("headline", "text"), [("a", "b")])
    with pytest.raises(Problem, match="has no column title. Its columns are: headline, text"):
        load(**flags)


def test_wikihow_splits_and_slices_can_be_selected(tmp_path):
    wikihow_all(tmp_path, articles(300))
    splits = wikihow_splits(data_dir=tmp_path)
    flags = {"data_dir": tmp_path, "val_dataset": ("wikihow:test",)}
    train, val = load(dataset="wikihow:train[:10]", **flags)
    assert train == splits["train"][:10] and val == splits["test"]
    assert load(evaluate_only=True, **flags) == [[], splits["test"]]
    with pytest.raises(Problem, match='Unknown split "dev"'):
        load(dataset="wikihow:dev", data_dir=tmp_path)


def write_rows(path, rows):
    if path.suffix == ".csv":
        return write_csv(path, list(rows[0]), [x.values() for x in rows])
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_all_file_formats_give_the_same_pairs(tmp_path):
    """The texts with the lowest hashes are held out."""
    hashes = sorted(hashlib.blake2b(x["document"].encode(), digest_size=6).digest() for x in ROWS)
    expected = [], []
    for row in ROWS:
        number = hashlib.blake2b(row["document"].encode(), digest_size=6).digest()
        expected[number < hashes[10]].append((row["document"], row["summary"]))
    for suffix in (".csv", ".jsonl", ".parquet"):
        path = write_rows(tmp_path / f"x{suffix}", ROWS)
        assert tuple(load(dataset=str(path), **COLUMNS)) == expected


def test_several_data_sets_are_validated_separately(tmp_path):
    """A glob is one data set, two arguments are two. Each has its own validation set."""
    parts = [ROWS[:100], ROWS[100:], ROWS[:50]]
    paths = [str(write_rows(tmp_path / f"{i}.jsonl", part)) for i, part in enumerate(parts)]
    glob = str(tmp_path / "[01].jsonl")
    train, val = sd.load(arguments(dataset=(glob, paths[2]), **COLUMNS), TOKENIZER)
    assert list(val) == [glob, paths[2]] and len(train) + sum(map(len, val.values())) == 250
    (tmp_path / "1.jsonl").write_text(
        '{"document": "a", "summary": "b"}\n{"document": "", "summary": ""}\n'
    )
    with pytest.raises(Problem, match=r"01\].jsonl, row 102: the text or the summary is empty"):
        load(dataset=glob, **COLUMNS)


def test_usual_columns_are_read(tmp_path, capsys):
    """A line says so. Other columns, and flags that name missing ones, are an error."""
    path = str(write_rows(tmp_path / "x.jsonl", ROWS))
    assert load(dataset=path) == load(dataset=path, **COLUMNS)
    assert f"{path}: uses document and summary; left out: id\n" in capsys.readouterr().out
    lists = "has no column body. Its columns are: document, id, summary. Pass --source-column and"
    with pytest.raises(Problem, match=lists):
        load(dataset=path, source_column="body", target_column="summary")
    path = str(write_rows(tmp_path / "y.jsonl", [{"a": "1", "b": "2"}]))
    with pytest.raises(Problem, match="has no column text or headline. Its columns are: a, b."):
        load(dataset=path)


def test_column_flags_are_for_data_sets_that_have_the_columns(tmp_path):
    paths = [str(write_rows(tmp_path / f"{i}.jsonl", ROWS)) for i in "ab"]
    write_rows(Path(paths[1]), [{"a": "x", "b": str(i)} for i in range(40)])
    train, _ = load(dataset=tuple(paths), source_column="b", target_column="a")
    assert len(train) == 190 + 38 and train[0] in load(dataset=paths[0])[0]
    assert train[-1][1] == "x"
    assert sd.Data(source_column="a", target_column="a").problems(None)


def test_lost_line_breaks_are_counted(tmp_path, capsys):
    rows = [{"text": "a\nb", "headline": "b"}] * 3 + [{"text": "c", "headline": "d"}] * 37
    path = str(write_rows(tmp_path / "x.jsonl", rows))
    for tokenizer in (words_tokenizer(), TOKENIZER):
        train, _ = sd.load(arguments(dataset=path, val_dataset=(path,)), tokenizer)
    out = capsys.readouterr().out
    assert out.count("train: the tokenizer loses the line breaks of 3 rows") == 1
    assert "«b</s>» from a\nb" in out


def test_tokenized_rows_are_read(tmp_path):
    """Rows of an exact length stay as they are; longer ones and unknown tokens are errors."""
    rows = [{"input_ids": [5, i + 4, 1], "labels": [i + 4, 1]} for i in range(40)]
    path = str(tmp_path / "tokens")
    datasets.Dataset.from_list(rows).save_to_disk(path)
    train, val = sd.load(arguments(dataset=path), TOKENIZER)
    read = [(x["input_ids"].tolist(), x["labels"].tolist()) for x in [*train, *val[path]]]
    assert sorted(read) == [(row["input_ids"], row["labels"]) for row in rows]
    assert set(train["length"][:]) == {3}
    with pytest.raises(Problem, match="row 1: 3 tokens, but --source-length allows 2. Correct it"):
        load(dataset=path, source_length=2)
    with pytest.raises(Problem, match="has no usable rows among 40"):
        load(dataset=path, target_length=1, bad_rows="skip")


def words_tokenizer(template=True, vocabulary="abcdefgh", eos_token="</s>"):
    tokens = ["<pad>", "</s>", "<unk>", ":", "summarize", *vocabulary]
    words = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        special = [("</s>", 1)]
        backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


@pytest.mark.parametrize("template", [True, False])
def test_encoded_texts_end_with_eos(tmp_path, template):
    rows = [{"text": "a b c d e f g h", "headline": "h g f e"}, {"text": "b", "headline": "a"}]
    path = str(write_rows(tmp_path / "x.jsonl", rows))
    args = arguments(dataset=path, source_length=6, target_length=3, source_prefix="summarize: ")
    train, val = sd.load(args, words_tokenizer(template))
    rows = [*train, *val[path]]
    pairs = sorted((row["input_ids"].tolist(), row["labels"].tolist()) for row in rows)
    assert pairs == [([4, 3, 5, 6, 7, 1], [12, 11, 1]), ([4, 3, 6, 1], [5, 1])]
    assert all(row["length"] == len(row["input_ids"]) for row in rows)


@pytest.mark.parametrize("count", [0, 2])
def test_unknown_target_tokens_are_counted(count, tmp_path, capsys):
    """A warning needs more than 1 in 100 tokens; each of the 40 targets has four and EOS."""
    rows = [{"text": "a", "headline": "b c d e"}] * (40 - count)
    rows += [{"text": "b", "headline": "b { } e"}] * count
    path = str(write_rows(tmp_path / "x.jsonl", rows))
    sd.load(arguments(dataset=path, val_dataset=(path,)), words_tokenizer())
    warning = "Warning: 2% of the target tokens are <unk>"
    assert (warning in capsys.readouterr().out) == bool(count)


def test_collate_pads_to_a_multiple_of_8_on_a_gpu(monkeypatch):
    examples = [{"input_ids": [5] * 9, "labels": [6, 1]}, {"input_ids": [7, 1], "labels": [8] * 8}]
    assert sd.collate(examples, 0, 2)["input_ids"].tolist() == [[5] * 9, [7, 1] + [0] * 7]
    monkeypatch.setattr(sd.torch.accelerator, "is_available", lambda: True)
    collate = partial(sd.collate, pad_token_id=0, decoder_start_token_id=2)
    collate = pickle.loads(pickle.dumps(collate))
    batch = collate(examples)
    assert (batch.pop("targets"), batch.pop("tokens")) == (10, 21)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((2, 16), torch.int64),
        "attention_mask": ((2, 16), torch.int64),
        "labels": ((2, 8), torch.int64),
        "decoder_input_ids": ((2, 8), torch.int64),
        "decoder_attention_mask": ((2, 8), torch.int64),
    }
    assert batch["input_ids"].tolist() == [[5] * 9 + [0] * 7, [7, 1] + [0] * 14]
    assert batch["attention_mask"].tolist() == [[1] * 9 + [0] * 7, [1, 1] + [0] * 14]
    assert batch["labels"].tolist() == [[6, 1] + [-100] * 6, [8] * 8]
    assert batch["decoder_input_ids"].tolist() == [[2, 6, 1] + [0] * 5, [2] + [8] * 7]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1] + [0] * 6, [1] * 8]


def test_collate_builds_the_decoder_inputs_of_t5():
    config = T5Config(
        vocab_size=32,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    batch = sd.collate([{"input_ids": [5, 1], "labels": [9, 8, 1]}], 0, 0)
    assert (batch.pop("targets"), batch.pop("tokens")) == (3, 5)
    assert torch.equal(batch["decoder_input_ids"], model._shift_right(batch["labels"]))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert torch.equal(model(**batch).logits, model(**inputs).logits)

    empty = sd.collate([], 0, 0)
    assert (empty.pop("targets"), empty.pop("tokens")) == (0, 1)
    assert {name: tuple(t.shape) for name, t in empty.items()} == dict.fromkeys(batch, (1, 1))
    assert (empty["labels"] == -100).all() and empty["attention_mask"].sum() == 1
    labels = empty.pop("labels")
    logits = model(**empty).logits
    loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    loss.backward()
    assert logits.isfinite().all() and loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("start", [None, -1, 32, [0]])
def test_decoder_needs_a_start_token(start):
    """T5Gemma has its BOS token in the decoder's config."""
    shape = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))
    assert sd.collator(model).keywords == {"pad_token_id": 0, "decoder_start_token_id": 0}
    model.config.decoder_start_token_id = start
    with pytest.raises(Problem, match=r"token is .* Set decoder_start_token_id .* in its"):
        sd.collator(model)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}  # fmt: skip
    config = T5GemmaConfig(encoder=dict(shape), decoder=dict(shape))
    keywords = sd.collator(T5GemmaForConditionalGeneration(config)).keywords
    assert keywords["decoder_start_token_id"] == config.decoder.bos_token_id == 2


def test_changed_flags_or_tokenizer_miss_the_cache(tmp_path):
    rows = [{"text": t * 2, "headline": t} for t in ("a b", "c")]
    path = str(write_rows(tmp_path / "x.jsonl", rows))

    def encode(tokenizer, **changes):
        train, val = sd.load(arguments(dataset=path, **changes), tokenizer)
        return sorted(row["input_ids"].tolist() for row in (*train, *val[path]))

    base = encode(words_tokenizer())
    assert encode(words_tokenizer(), source_length=2) != base
    assert encode(words_tokenizer(vocabulary="hgfedcba")) != base
    assert encode(words_tokenizer(), source_prefix="summarize: ") != base
    assert encode(words_tokenizer()) == base
    write_rows(Path(path), [rows[0], rows[1] | {"text": "d"}])
    assert encode(words_tokenizer()) != base
