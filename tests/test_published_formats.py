"""Small files in the formats of published data sets, which train or are refused with advice."""

import json
from pathlib import Path

import pytest
from test_chat_dataset import arguments, byt5, load_documents, target_texts

import chat_dataset

ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
CALL = '{"name": "add", "arguments": {"x": 1}}'
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}</s>{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
# (row, the document with targets in « »)
TRAINED = {
    "stanford_alpaca": (
        {"instruction": "q", "input": "i", "output": "a"},
        "<user>q\n\ni</s><assistant>«a</s>»",
    ),
    "LLaMA-Factory alpaca": (
        {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["h", "b"]]},
        "<system>s</s><user>h</s><assistant>«b</s>»<user>q</s><assistant>«a</s>»",
    ),
    "LLaMA-Factory sharegpt": (
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": CALL},
                {"from": "observation", "value": "2"},
                GPT,
            ],
            "system": "s",
            "tools": '[{"name": "add"}]',
        },
        '[{"name": "add"}]<system>s</s><user>q</s><assistant>«{"name": "add", "arguments": '
        '{"x": 1}}</s>»<tool>2</s><assistant>«a</s>»',
    ),
    "LLaMA-Factory openai": (
        {"messages": [{"role": "system", "content": "s"}, ASK, ANSWER]},
        "<system>s</s><user>q</s><assistant>«a</s>»",
    ),
    "ShareGPT": (
        {"id": "x", "conversations": [{"from": "system", "value": "s"}, HUMAN, GPT | {
            "markdown": None, "text": None}]},
        "<system>s</s><user>q</s><assistant>«a</s>»",
    ),
    "axolotl": (
        {"conversations": [
            HUMAN, GPT | {"value": "b", "train": False}, HUMAN, GPT | {"weight": 1}]},
        "<user>q</s><assistant>b</s><user>q</s><assistant>«a</s>»",
    ),
    "ms-swift messages": (
        {"messages": [ASK, ANSWER | {"loss": False}, ASK, ANSWER | {"loss": True}]},
        "<user>q</s><assistant>a</s><user>q</s><assistant>«a</s>»",
    ),
    "ms-swift query": (
        {"system": "s", "query": "q", "response": "a", "history": [["h", "b"]]},
        "<system>s</s><user>h</s><assistant>«b</s>»<user>q</s><assistant>«a</s>»",
    ),
    "OpenAI": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "weight": 0, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {
                        "name": "add", "arguments": '{"x": 1}'}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                ANSWER | {"weight": 1, "refusal": None},
            ],
            "tools": [{"type": "function", "function": {"name": "add"}}],
            "parallel_tool_calls": False,
        },
        '[{"type": "function", "function": {"name": "add"}}]<user>q</s><assistant>{"name": "add", '
        '"arguments": {"x": 1}}</s><tool>2</s><assistant>«a</s>»',
    ),
    "dolly": (
        {"instruction": "q", "context": "c", "response": "a", "category": "open_qa"},
        "<user>q\n\nc</s><assistant>«a</s>»",
    ),
    "TRL messages": ({"messages": [ASK, ANSWER]}, "<user>q</s><assistant>«a</s>»"),
    "TRL prompt and completion": (
        {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER | {"content": "b"}]},
        "<user>q</s><assistant>a</s><user>q</s><assistant>«b</s>»",
    ),
    "torchtune chat": ({"conversations": [HUMAN, GPT]}, "<user>q</s><assistant>«a</s>»"),
    "chats as text": ({"messages": json.dumps([ASK, ANSWER])}, "<user>q</s><assistant>«a</s>»"),
    "Belle": (
        {"id": 1, "conversations": [HUMAN, {"from": "assistant", "value": "a"}]},
        "<user>q</s><assistant>«a</s>»",
    ),
    "litgpt": (
        {"instruction": "q", "input": "", "output": "a"},
        "<user>q</s><assistant>«a</s>»",
    ),
}  # fmt: skip
# (row, the flags that the message names or its advice, the document with these flags)
ADVISED = {
    "gsm8k": (
        {"question": "q", "answer": "a"},
        "--prompt-column question --completion-column answer",
        "<user>q</s><assistant>«a</s>»",
    ),
    "torchtune instruct": (
        {"input": "q", "output": "a"},
        "--prompt-column input --completion-column output",
        "<user>q</s><assistant>«a</s>»",
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        "--prompt-column question --completion-column response",
        "<system>s</s><user>q</s><assistant>«a</s>»",
    ),
    "TRL text": ({"text": "q"}, "--text-column text", "q«</s>»"),
    "TRL preferences": (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        "--prompt-column prompt --completion-column chosen",
        "<user>q</s><assistant>«a</s>»",
    ),
    "NuminaMath": (
        {"question_type": "long", "problem": "q", "solution": "a", "answer": "5"},
        "--prompt-column problem --completion-column solution",
        "<user>q</s><assistant>«a</s>»",
    ),
    "Flan": (
        {"inputs": "q", "targets": "a", "task": "t"},
        "--prompt-column inputs --completion-column targets",
        "<user>q</s><assistant>«a</s>»",
    ),
    "medical-o1": (
        {"Question": "q", "Complex_CoT": "c", "Response": "a"},
        "--prompt-column Question --completion-column Response",
        "<user>q</s><assistant>«a</s>»",
    ),
    "LLaMA-Factory preferences": (
        {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT | {"value": "b"}, "rejected": GPT},
        "--prompt-column conversations --completion-column chosen",
        "<user>q</s><assistant>a</s><user>q</s><assistant>«b</s>»",
    ),
}
REFUSED = {
    "OASST": (
        {"message_id": "1", "parent_id": None, "text": "q", "role": "prompter"},
        "Write each path from a prompt to an answer as one row of messages",
    ),
    "a turn on each line": (
        {"role": "user", "content": "q"},
        "Write each path from a prompt to an answer as one row of messages",
    ),
    "OASST trees": (
        {"message_tree_id": "1", "prompt": {"text": "q", "replies": []}},
        "Write each path from a prompt to an answer as one row of messages",
    ),
    "LLaMA-Factory KTO": (
        {"messages": [ASK, ANSWER], "label": False},
        "label is false, so the answer is a bad example .*pass --bad-rows skip",
    ),
    "vision": (
        {"messages": [ASK, ANSWER], "images": ["a.png"]},
        "the row has images, and this script trains on text only",
    ),
    "LLaVA": (
        {"image": "a.png", "conversations": [HUMAN | {"value": "<image>\nq"}, GPT]},
        "the row has image, and this script trains on text only",
    ),
    "SQuAD": (
        {"title": "t", "context": "c", "question": "q", "answers": {"text": ["a"]}},
        "Write each chat as a row of messages",
    ),
    "Nectar": ({"prompt": "q", "answers": [{"answer": "a"}]}, "Write each chat as a row of"),
    "UltraFeedback": (
        {"prompt": "q", "chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER], "messages": [ASK]},
        "To train on the chosen answers, write them as rows of messages",
    ),
    "implicit preferences": (
        {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]},
        "To train on the chosen answers, write them as rows of messages",
    ),
}


def write(path: Path, row: dict, suffix: str = ".jsonl") -> str:
    """Write a file with three equal rows and return its path."""
    lines = [json.dumps(row)] * 3
    path = path / f"rows{suffix}"
    path.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    return str(path)


def marked(path: str, **flags: object) -> str:
    """Return the first document of a file, with its targets in « »."""
    tokenizer = byt5(TEMPLATE)
    document = load_documents(path, tokenizer, **flags)[0]
    assert target_texts(document["input_ids"], document["labels"], tokenizer)
    text = chat_dataset.mark_targets(document, tokenizer)
    return text


def parsed(flags: str) -> dict[str, str]:
    """Return the values of flags by the names of their fields."""
    words = flags.split()
    return {x[2:].replace("-", "_"): y for x, y in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.parametrize("name", TRAINED)
def test_format_trains_without_a_flag(name, tmp_path):
    row, expected = TRAINED[name]
    for suffix in (".jsonl", ".json"):
        assert marked(write(tmp_path, row, suffix)) == " ".join(expected.split())


@pytest.mark.parametrize("name", ADVISED)
def test_flags_in_the_message_train_the_format(name, tmp_path):
    row, flags, expected = ADVISED[name]
    path = write(tmp_path, row)
    with pytest.raises(ValueError, match=f"pass {flags}\\.$|Pass {flags}\\.$"):
        load_documents(path)
    assert marked(path, **parsed(flags)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_format_is_refused_with_advice(name, tmp_path):
    row, advice = REFUSED[name]
    with pytest.raises(ValueError, match=advice):
        load_documents(write(tmp_path, row))


def test_one_of_two_columns_is_refused(tmp_path):
    path = write(tmp_path, {"question": "q", "answer": "a"})
    with pytest.raises(ValueError, match="has no column reply. Its columns are: question, answer"):
        load_documents(path, prompt_column="question", completion_column="reply")
    options = chat_dataset.Options(prompt_column="question")
    assert options.problems() == ["Pass both --prompt-column and --completion-column."]
    assert not arguments().prompt_column
