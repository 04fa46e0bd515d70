"""The data rules of summarization_dataset.py, tested on small files in the real formats."""

import csv
import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

import summarization_dataset as sd
from core.ranks import Problem

TOKENIZER = ByT5Tokenizer()
LONG = "A text that is long enough to keep the headline below three quarters of it, by far. "
COLUMNS = {"source_column": "document", "target_column": "summary"}
ROWS = [
    {"document": f'{i}: one,\ntwo\tand "three" caf\xe9', "id": i, "summary": f"{i}00"}
    for i in range(200)
]
T5 = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}


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
    sets = [train or [], next(iter(val.values()))]
    return [[(decode(row["input_ids"]), decode(row["labels"])) for row in rows] for rows in sets]


def decode(ids):
    assert ids[-1] == TOKENIZER.eos_token_id
    return bytes(int(i) - 3 for i in ids[:-1]).decode()


def write_rows(path, rows):
    """Write dicts to a CSV or JSONL file and return its path as text."""
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_wikihow(folder, rows, part="All"):
    """Write WikiHow's file of (title, headline, text) rows."""
    rows = [dict(zip(("title", "headline", "text"), row, strict=True)) for row in rows]
    write_rows(folder / f"wikihow{part}.csv", [{"overview": "An overview"} | row for row in rows])


def articles(number):
    return [(f"How to {i}", f"Do {i}.", f"{i}: {LONG}") for i in range(number)]


def wikihow_splits(**changes):
    """Return the (text, summary) pairs of WikiHow by split."""
    parts = sd.load_wikihow(arguments(**changes))
    return {split: [(row["text"], row["summary"]) for row in rows] for split, rows in parts.items()}


def test_wikihow_rows_are_cleaned_and_counted(tmp_path, capsys):
    greeting = 'Say "hello", first...\n\n\n,Then go.\r\n,Rest\nwell.\n\nBye.,' + LONG
    rows = [
        ("How to Greet", '\nBe "nice", always.,\nGo home.,\n', greeting),
        ("How to Number", "123", LONG),
        ("How to Null", "null", LONG + "NA"),
        ("How to Be Short", "x" * 74, "y" * 100),
        ("How to Fail", "x" * 75, "y" * 100),  # must be shorter than 0.75 of the text
        ("How to Be Empty", "  \n", LONG),
        ("How to Be Emptier", "Do it.", ""),
        ("", "A headline without title.", LONG),
    ]
    write_wikihow(tmp_path, rows + articles(300))
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
    write_wikihow(tmp_path, rows, "Sep")
    splits = wikihow_splits(data_dir=tmp_path, wikihow_part="sep")
    titles = {split: {s.split(":")[0] for _, s in rows} for split, rows in splits.items()}
    assert set(titles) == {"train", "validation", "test"}
    assert sum(map(len, titles.values())) == 300  # no title is in two splits
    assert sum(map(len, splits.values())) == 900
    for title, _, _ in articles(300):  # pins the rule, so that no version changes it
        bucket = sd.stable_hash(title.replace(" ", "")) % 100
        split = "train" if bucket < 98 else "validation" if bucket < 99 else "test"
        assert title in titles[split]


def test_wikihow_errors_are_one_message(tmp_path):
    with pytest.raises(Problem, match="mahnazkoupaee/WikiHow-Dataset"):
        load(data_dir=tmp_path)
    write_wikihow(tmp_path, articles(1) * 3)
    with pytest.raises(Problem, match="wikihow has no usable rows among 0"):
        load(data_dir=tmp_path)
    write_rows(tmp_path / "wikihowAll.csv", [{"headline": "a", "text": "b"}])
    with pytest.raises(Problem, match="wikihow, row 1: 'NoneType' object"):
        load(data_dir=tmp_path)


def test_wikihow_splits_and_slices_can_be_selected(tmp_path):
    write_wikihow(tmp_path, articles(300))
    splits = wikihow_splits(data_dir=tmp_path)
    flags = {"data_dir": tmp_path, "val_dataset": ("wikihow:test",)}
    train, val = load(dataset="wikihow:train[:10]", **flags)
    assert train == splits["train"][:10] and val == splits["test"]
    assert load(evaluate_only=True, **flags) == [[], splits["test"]]
    with pytest.raises(ValueError, match='Unknown split "dev"'):
        load(dataset="wikihow:dev", data_dir=tmp_path)


def test_texts_with_the_lowest_hashes_are_held_out(tmp_path):
    texts = [row["document"] for row in ROWS]
    hashes = [hashlib.blake2b(text.encode(), digest_size=6).digest() for text in texts]
    expected = [], []
    for row, number in zip(ROWS, hashes, strict=True):
        expected[number < sorted(hashes)[10]].append((row["document"], row["summary"]))
    for name in ("x.csv", "x.jsonl"):
        assert tuple(load(dataset=write_rows(tmp_path / name, ROWS), **COLUMNS)) == expected


def test_usual_columns_are_read(tmp_path, capsys):
    path = write_rows(tmp_path / "x.jsonl", ROWS)
    assert load(dataset=path) == load(dataset=path, **COLUMNS)
    assert f"{path}: uses document and summary; left out: id\n" in capsys.readouterr().out
    lists = "has no column body. Its columns are: document, id, summary. Pass --source-column and"
    with pytest.raises(Problem, match=lists):
        load(dataset=path, source_column="body", target_column="summary")
    other = write_rows(tmp_path / "y.jsonl", [{"a": "x", "b": str(i)} for i in range(40)])
    with pytest.raises(Problem, match="has no column text or headline. Its columns are: a, b."):
        load(dataset=other)
    # With several data sets, the flags are for those that have the columns.
    flags = {"source_column": "b", "target_column": "a"}
    train, val = sd.load(arguments(dataset=(path, other), **flags), TOKENIZER)
    assert (len(train), [len(rows) for rows in val.values()]) == (190 + 38, [10, 2])
    assert decode(train[0]["labels"]) == ROWS[1]["summary"] and decode(train[-1]["labels"]) == "x"
    assert sd.Data(source_column="a", target_column="a").problems(None)


def test_tokenized_rows_are_not_cut(tmp_path, capsys):
    rows = [{"input_ids": [5, i + 4, 1], "labels": [i + 4, 1]} for i in range(40)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    flags = {"dataset": path, "source_length": 3, "target_length": 2}
    train, val = sd.load(arguments(**flags), TOKENIZER)
    read = [(x["input_ids"].tolist(), x["labels"].tolist()) for x in [*train, *val[path]]]
    assert sorted(read) == [(row["input_ids"], row["labels"]) for row in rows]
    with pytest.raises(Problem, match="row 1: 3 tokens, but --source-length allows 2. Correct it"):
        load(**flags | {"source_length": 2})
    with pytest.raises(Problem, match="has no usable rows among 40"):
        load(**flags | {"target_length": 1}, bad_rows="skip")
    write_rows(tmp_path / "x.jsonl", [{"input_ids": [5, 1], "labels": [5, 6]}])
    with pytest.raises(Problem, match="labels do not end in EOS"):
        load(**flags)
    line = "uses text and headline; left out: input_ids"
    assert line not in capsys.readouterr().out
    write_rows(tmp_path / "x.jsonl", [{"input_ids": [5, 1], "text": "a", "headline": "b"}] * 2)
    load(dataset=path, val_dataset=(path,))
    assert line in capsys.readouterr().out


def words_tokenizer(template=True, vocabulary="abcdefgh"):
    """Return a tokenizer of words of one letter, which adds EOS if it has a template."""
    tokens = ["<pad>", "</s>", "<unk>", ":", "summarize", *vocabulary]
    words = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        special = [("</s>", 1)]
        backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


@pytest.mark.parametrize("template", [True, False])
def test_encoded_texts_end_with_eos(tmp_path, template, capsys):
    rows = [{"text": "a b c d e f g h", "headline": "h g f e"}, {"text": "b", "headline": "a"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    args = arguments(dataset=path, source_length=6, target_length=3, source_prefix="summarize: ")
    train, val = sd.load(args, words_tokenizer(template))
    rows = [*train, *val[path]]
    pairs = sorted((row["input_ids"].tolist(), row["labels"].tolist()) for row in rows)
    assert pairs == [([4, 3, 5, 6, 7, 1], [12, 11, 1]), ([4, 3, 6, 1], [5, 1])]
    assert all(row["length"] == len(row["input_ids"]) for row in rows)
    lines = "drawn\n  1 reach --source-length 6, which cuts the rest\n  1 reach --target-length"
    assert lines in capsys.readouterr().out


def test_texts_that_the_tokenizer_changes_are_counted(tmp_path, capsys):
    """A row's braces are unknown to the first tokenizer."""
    rows = [{"text": "a\nb", "headline": "b { } e"}] * 2
    rows += [{"text": x, "headline": "b c d e"} for x in ("a </s> a", "a  a", "a\ta", *35 * "a")]
    path = write_rows(tmp_path / "x.jsonl", rows)
    for tokenizer, count in ((words_tokenizer(), 5), (TOKENIZER, 1)):
        sd.load(arguments(dataset=path, val_dataset=(path,)), tokenizer)
        out = capsys.readouterr().out
        line = f"in {count} rows, the tokenizer loses line breaks, spaces or characters"
        assert out.count(line) == 2
    assert "«b { } e</s>» from a\nb" in out


def test_collate_pads_to_a_multiple_of_8_on_a_gpu(monkeypatch):
    examples = [{"input_ids": [5] * 9, "labels": [6, 1]}, {"input_ids": [7, 1], "labels": [8] * 8}]
    assert sd.collate(examples, 0, 2)["input_ids"].tolist() == [[5] * 9, [7, 1] + [0] * 7]
    monkeypatch.setattr(sd.torch.accelerator, "is_available", lambda: True)
    batch = sd.collate(examples, pad_token_id=0, decoder_start_token_id=2)
    assert (batch.pop("targets"), batch.pop("tokens")) == (10, 21)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5] * 9 + [0] * 7, [7, 1] + [0] * 14],
        "attention_mask": [[1] * 9 + [0] * 7, [1, 1] + [0] * 14],
        "labels": [[6, 1] + [-100] * 6, [8] * 8],
        "decoder_input_ids": [[2, 6, 1] + [0] * 5, [2] + [8] * 7],
        "decoder_attention_mask": [[1, 1] + [0] * 6, [1] * 8],
    }


def test_collate_builds_the_decoder_inputs_of_t5():
    model = T5ForConditionalGeneration(T5Config(**T5, decoder_start_token_id=0)).eval()
    batch = sd.collate([{"input_ids": [5, 1], "labels": [9, 8, 1]}], 0, 0)
    assert (batch.pop("targets"), batch.pop("tokens")) == (3, 5)
    assert torch.equal(batch["decoder_input_ids"], model._shift_right(batch["labels"]))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert torch.equal(model(**batch).logits, model(**inputs).logits)

    padded = {"input_ids": [5, 1, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [9, 8, 1, -100]}
    other = sd.collate([padded], 0, 0)  # as other programs pad
    assert (other["targets"], other["tokens"]) == (3, 5)
    logits = model(**{name: other[name] for name in batch}).logits[:, :3]
    assert torch.allclose(logits, model(**batch).logits, atol=1e-5)

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
    model = T5ForConditionalGeneration(T5Config(**T5, decoder_start_token_id=0))
    assert sd.collator(model).keywords == {"pad_token_id": 0, "decoder_start_token_id": 0}
    model.config.decoder_start_token_id = start
    with pytest.raises(Problem, match="Set decoder_start_token_id .* to tokens"):
        sd.collator(model)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}  # fmt: skip
    config = transformers.T5GemmaConfig(encoder=dict(shape), decoder=dict(shape))
    keywords = sd.collator(transformers.T5GemmaForConditionalGeneration(config)).keywords
    assert keywords["decoder_start_token_id"] == config.decoder.bos_token_id == 2


def test_changed_flags_or_tokenizer_miss_the_cache(tmp_path):
    rows = [{"text": t * 2, "headline": t} for t in ("a b", "c")]
    path = write_rows(tmp_path / "x.jsonl", rows)

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
