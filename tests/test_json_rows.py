"""What a JSON file says is what is learned: nulls, order, numbers, dates; lines that are none."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, Value
from test_chat_dataset import arguments, known_tokenizer, letters
from transformers import ByT5Tokenizer

import chat_dataset
from runtime.rows import json_rows, readers

GIVEN = [  # the arguments of a call in each row
    {"a": None, "b": 2},
    {"b": 2.5, "a": {"z": None, "y": [None, 1]}},
    {"when": "2024-05-01", "n": 123456789012345678901234567890},
    {},
]


def chat(number: int, given: dict) -> list[dict]:
    """Return a chat in which a tool is called."""
    call = {"type": "function", "id": None, "function": {"name": "f", "arguments": given}}
    return [
        {"role": "user", "content": f"{number}?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "2024-05-01"},
    ]


def tool(number: int) -> dict:
    """Return a tool's schema, which is another in each row."""
    properties = {f"p{number}": {"default": None, "enum": [None, number]}}
    return {"type": "function", "function": {"name": "f", "parameters": properties}}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_tools_are_learned_as_the_file_has_them(name: str, tmp_path: Path) -> None:
    """Although Arrow would give all rows the same members, in one order, and read dates."""
    rows = [{"messages": chat(i, x), "tools": [tool(i)]} for i, x in enumerate(GIVEN)]
    path = tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(lines if name == "rows.jsonl" else json.dumps(rows, indent=2))
    tokenizer = known_tokenizer("qwen 2.5", ByT5Tokenizer)
    args = arguments(train_split="train", num_val_samples=1)
    sets = chat_dataset.load_documents(args, tokenizer, str(path), False)
    found = [row["input_ids"] for part in sets for row in part]
    texts = [tokenizer.decode(ids) for ids in found]
    assert len(texts) == len(GIVEN)
    for number, given in enumerate(GIVEN):
        (text,) = [text for text in texts if f"{number}?" in text]
        assert f'{{"name": "f", "arguments": {json.dumps(given)}}}\n</tool_call>' in text
        assert f"<tools>\n{json.dumps(tool(number))}\n</tools>" in text
        assert "2024-05-01<|im_end|>" in text
    # Of Parquet's structs, which have all members in all rows, the nulls are left out.
    Dataset.from_list(
        [row | {"messages": chat(0, {"a": None, "b": 2})} for row in rows[:1]]
    ).to_parquet(tmp_path / "rows.parquet")
    function = chat_dataset.encoder(
        "x", "messages", readers.read_file(tmp_path / "rows.parquet").features, tokenizer, args
    )
    batch = readers.read_file(tmp_path / "rows.parquet")[:]
    text = tokenizer.decode(function(batch, [0])["input_ids"][0])
    assert '"arguments": {"b": 2}' in text


def test_dates_are_text(tmp_path: Path) -> None:
    """Also where all are dates at the beginning; and where a column is null at first."""
    path = tmp_path / "dates.jsonl"
    dates = [f"2024-05-{day:02}" for day in range(1, 29)]
    rows = [{"prompt": str(i), "completion": date, "n": None} for i, date in enumerate(dates)]
    for extra in ([], [{"prompt": "x", "completion": "no date", "n": 3}]):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows + extra))
        found = readers.read_file(path)
        assert found["completion"][:] == [row["completion"] for row in rows + extra]
        assert readers.is_text(found.features["completion"])


def test_a_column_of_all_kinds_is_not_text(tmp_path: Path) -> None:
    """It is JSON, which nobody should learn by mistake."""
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"content": "a"}\n{"content": {"b": 1}}\n{"content": null}\n')
    rows = readers.read_file(path)
    assert rows["content"][:] == ['"a"', '{"b": 1}', None]
    with pytest.raises(ValueError, match="column content does not hold text"):
        readers.text_column("x", rows, "content")
    rows = [{"ids": [1, 2], "n": 5, "text": "a", "of": [{"x": 1}]}, {"ids": [], "n": 2**63}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = readers.read_file(path)
    kinds = {name: feature.id for name, feature in found.features.items()}
    assert kinds == {"ids": None, "n": json_rows.JSON, "text": None, "of": json_rows.JSON}
    assert found["ids"][:] == [[1, 2], []] and found.features["text"] == Value("string")


def test_a_line_that_is_no_json(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """It is a bad row like others, named by its line, and left out and counted."""
    path = tmp_path / "pairs.jsonl"
    lines = [json.dumps({"prompt": f"{i} + 1", "completion": str(i + 1)}) for i in range(9)]
    path.write_text("\n".join([*lines[:3], '{"prompt": "b}', "", "[1]", *lines[3:], ""]))
    with pytest.raises(
        ValueError, match="pairs.jsonl, line 4: it cannot be read as JSON: .* at column"
    ):
        chat_dataset.load_documents(arguments(), letters(), str(path), False)
    skip = arguments(bad_rows="skip")
    found = chat_dataset.load_documents(skip, letters(), str(path), True)
    said = capfd.readouterr().out
    assert "2 of 11 rows left out" in said
    assert "  1: it is no JSON object (line 6)\n" in said and "row 5" not in said
    (tmp_path / "good").mkdir()
    (tmp_path / "good/pairs.jsonl").write_text("\n".join(lines))
    good = str(tmp_path / "good/pairs.jsonl")
    expected = chat_dataset.load_documents(arguments(), letters(), good, False)
    assert [list(part) for part in found] == [list(part) for part in expected]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "list.json", "rows.csv"])
def test_where_a_row_stands(name: str, tmp_path: Path) -> None:
    """On a line of its own, blank ones counted, or else by its number."""
    rows = [json.dumps({"prompt": "a", "completion": text}) for text in ("b", "c", "")]
    text = f"\n{rows[0]}\n\n{rows[1]}\n \n{rows[2]}\n"
    said = "line 6"
    if name == "list.json":
        text, said = f"[\n{', '.join(rows)}]", "row 3"
    if name == "rows.csv":
        text, said = 'prompt,completion\n"a\n",b\na,c\na,\n', "row 3"
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        chat_dataset.load_documents(arguments(), letters(), str(path), False)
    assert str(error.value).startswith(f"{path}, {said}: the assistant's turn is empty (")
    assert json_rows.place(str(path), 99) == "row 99"
    assert json_rows.place("someone/set", 3) == "row 3"


def test_the_sum_of_rows_is_that_of_their_content(tmp_path: Path) -> None:
    """It knows order and bounds; it does not know files, chunks or choices."""
    rows = [{"input_ids": [i, i + 1] * (i % 3), "cut": i % 2} for i in range(50)]
    whole = Dataset.from_list(rows)
    expected = readers.content_sum(whole)
    whole.to_parquet(tmp_path / "rows.parquet", batch_size=7)
    assert readers.content_sum(readers.read_file(tmp_path / "rows.parquet")) == expected
    more = Dataset.from_list(rows[::-1] + rows).select(range(50, 100))
    assert readers.content_sum(more) == expected
    moved = [*rows[:20], rows[21], rows[20], *rows[22:]]
    bounds = [row | {"input_ids": list(row["input_ids"])} for row in rows]
    bounds[10]["input_ids"], bounds[11]["input_ids"] = [10], [11, *rows[11]["input_ids"]]
    for other in (moved, bounds, [*rows[:49], rows[49] | {"cut": 7}]):
        assert readers.content_sum(Dataset.from_list(other)) != expected
