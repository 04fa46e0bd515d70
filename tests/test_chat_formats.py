"""Test optional/chat_formats: rows of published data sets train, or are refused."""

import json

import pytest
from chat_templates import QWEN_2_5
from test_chat_dataset import (
    ASSISTANT,
    CALL_TURN,
    RESULT,
    SYSTEM,
    TOOL,
    USER,
    bpe,
    byt5,
    encode,
    load_documents,
    target_texts,
    write,
)

import chat_dataset
from optional import chat_formats

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
        {"instruction": "q", "input": "", "output": "a", "system": "s", "history": []},
        "<system>s</s><user>q</s><assistant>«a</s>»",
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
        {"system": "s", "query": "q", "response": "a"},
        "<system>s</s><user>q</s><assistant>«a</s>»",
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
    "parts of text": (
        {"messages": [ASK | {"content": [{"type": "text", "text": "q"}], "name": None}, ANSWER]},
        "<user>q</s><assistant>«a</s>»",
    ),
    "chats as text": ({"messages": json.dumps([ASK, ANSWER])}, "<user>q</s><assistant>«a</s>»"),
    "Belle": (
        {"id": 1, "conversations": [HUMAN, {"from": "assistant", "value": "a"}]},
        "<user>q</s><assistant>«a</s>»",
    ),
    "gsm8k": ({"question": "q", "answer": "a"}, "<user>q</s><assistant>«a</s>»"),
    "torchtune instruct": ({"input": "q", "output": "a"}, "<user>q</s><assistant>«a</s>»"),
    "OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        "<system>s</s><user>q</s><assistant>«a</s>»",
    ),
    "NuminaMath": (
        {"question_type": "long", "problem": "q", "solution": "a", "answer": "5"},
        "<user>q</s><assistant>«a</s>»",
    ),
    "Flan": (
        {"inputs": "q", "targets": "a", "task": "t"}, "<user>q</s><assistant>«a</s>»",
    ),
    "medical-o1": (
        {"Question": "q", "Complex_CoT": "c", "Response": "a"}, "<user>q</s><assistant>«a</s>»",
    ),
    "classification": (
        {"instruction": "q", "output": "a", "label": False}, "<user>q</s><assistant>«a</s>»",
    ),
}  # fmt: skip
REFUSED = {
    "OASST": (
        {"message_id": "1", "parent_id": None, "text": "q", "role": "prompter"},
        "Write each path from a prompt to an answer as one row of messages",
    ),
    "a turn on each line": (
        {"role": "user", "content": "q"},
        "Write each path from a prompt to an answer as one row of messages",
    ),
    "LLaMA-Factory KTO": (
        {"messages": [ASK, ANSWER], "label": False},
        "label false, so its answer is a bad example .*Delete such rows, or the column.$",
    ),
    "ShareGPT KTO": (
        {"conversations": [HUMAN, GPT], "kto_tag": "False"},
        "kto_tag false, so its answer is a",
    ),
    "TRL text": ({"text": "q"}, "Its columns are: text. Write messages, or pass .* --text-column"),
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
        "Its columns are: title, context, question, answers. Write messages",
    ),
    "Nectar": ({"prompt": "q", "answers": [{"answer": "a"}]}, "has no chats that can be read"),
    "implicit preferences": (
        {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]},
        "has preferences .chosen, rejected., which need another loss",
    ),
}


def marked(path: str, **flags: object) -> str:
    """Return the first document of a file, with its targets in « »."""
    tokenizer = byt5(TEMPLATE)
    document = load_documents(path, tokenizer, **flags)[0]
    assert target_texts(document["input_ids"], document["labels"], tokenizer)
    text = chat_dataset.mark_targets(document, tokenizer)
    return text


@pytest.mark.parametrize("name", TRAINED)
def test_format_trains_without_a_flag(name, tmp_path):
    row, expected = TRAINED[name]
    path = write(tmp_path / "rows.jsonl", [row] * 3)
    assert marked(path) == " ".join(expected.split())


def test_chosen_answers_train_with_flags(tmp_path):
    """LLaMA-Factory's preferences: `chosen` is a turn. Those in `conversations` are context."""
    row = {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT | {"value": "b"}, "rejected": GPT}
    path = write(tmp_path / "rows.jsonl", [row] * 3)
    with pytest.raises(ValueError, match="pass --prompt-column and --completion-column"):
        load_documents(path)
    text = marked(path, prompt_column="conversations", completion_column="chosen")
    assert text == "<user>q</s><assistant>a</s><user>q</s><assistant>«b</s>»"


@pytest.mark.parametrize("name", REFUSED)
def test_format_is_refused_with_advice(name, tmp_path):
    row, advice = REFUSED[name]
    with pytest.raises(ValueError, match=advice):
        load_documents(write(tmp_path / "rows.jsonl", [row] * 3))


def test_one_of_two_columns_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}])
    for flags in ({"completion_column": "reply"}, {}):
        with pytest.raises(ValueError, match="columns are: question, answer. Pass both --prompt-c"):
            load_documents(path, prompt_column="question", **flags)


@pytest.mark.parametrize("row, line", [
    ({"question": "q", "choices": ["a", "b"], "answer": "a"}, "and answer; left out: choices"),
    ({"instruction": "q", "output": "a", "rationale": "r"}, "and output; left out: rationale"),
    ({"prompt": "q", "context": "c", "completion": "a"}, "and completion; left out: context"),
    ({"messages": [ASK, ANSWER], "documents": ["d"], "id": "1"}, "messages; left out: documents\n"),
    ({"instruction": "q", "input": "i", "output": "a", "score": 3}, None),
])  # fmt: skip
def test_text_that_is_left_out_of_a_pair_is_named(row, line, tmp_path, capfd):
    load_documents(write(tmp_path / "rows.jsonl", [row] * 3))
    out = capfd.readouterr().out
    assert line in out if line else "uses" not in out


def test_text_column_names_documents(tmp_path):
    path = write(tmp_path / "text.jsonl", [{"body": "a</s>", "id": 1}])
    document = load_documents(path, text_column="body")[0]
    assert document["input_ids"] == [*(byte + 3 for byte in b"a</s>"), 1]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": []}, "messages is empty or not a list of objects"),
        ({"messages": str([USER, ASSISTANT])}, "Python's repr of objects. Write JSON"),
        ({"messages": [USER | {"role": "bot"}]}, "the role bot is not one of system, user"),
        ({"messages": [USER]}, "the chat has no assistant turn to train on"),
        ({"messages": [USER, ASSISTANT | {"content": "\n"}]}, "the assistant's turn is empty"),
        (
            {"messages": [USER | {"content": [{"type": "image"}]}]},
            "the user's turn is .*, not text",
        ),
        ({"messages": [USER, ASSISTANT | {"weight": 0.5}]}, "assistant's turn has weight 0.5. Use"),
        ({"messages": [USER, ASSISTANT | {"weight": 0}]}, "the chat has no assistant turn to"),
        ({"messages": [USER, ASSISTANT], "train": False}, "the row excludes all assistant turns"),
        ({"messages": [USER, ASSISTANT], "loss_scale": 0.5}, "the row has loss_scale 0.5. Use"),
        ({"conversations": [HUMAN, {"from": "tool_call", "value": "f"}]}, "call is not an object"),
        ({"messages": [USER, ASSISTANT | {"function_call": {"name": "f"}}]}, "has function_call, "),
        ({"messages": [USER, ASSISTANT], "functions": [TOOL]}, "functions would be ignored"),
        ({"messages": [USER, ASSISTANT | {"reasoning": "hm"}]}, "has reasoning, an unknown key"),
        ({"messages": [USER, ASSISTANT], "history": [["a", "b"]]}, "history would be ignored"),
        ({"messages": [USER, ASSISTANT], "images": ["x.png"]}, "the row has images, and"),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "x"}, "a system column and a system"),
        (
            {
                "messages": [
                    USER,
                    CALL_TURN | {"tool_calls": [{"name": "f", "parameters": {"x": 1}}]},
                ]
            },
            "the call to f has no object `arguments`",
        ),
        (
            {
                "messages": [
                    USER,
                    ASSISTANT
                    | {
                        "content": [
                            {"type": "text", "text": "b"},
                            {"type": "text", "text": "c", "weight": 0},
                        ]
                    },
                ]
            },
            "the assistant's turn is .*, not text",
        ),
        ({"prompt": "a", "completion": "b", "label": False}, "label false, so its answer is a bad"),
        (
            {"prompt": "a", "completion": "b", "label": "False"},
            "label false, so its answer is a bad",
        ),
        ({"prompt": "a", "completion": 5}, "completion is empty or not"),
        ({"instruction": "a", "input": float("nan"), "output": "b"}, "input is nan, not text"),
        ({"instruction": "a", "input": ["c"], "output": "b"}, r"input is \['c'\], not text"),
    ],
)
def test_unusable_chats_are_refused(row, message):
    args = chat_dataset.Data()
    form = chat_formats.find_columns("rows", row, (), args)
    with pytest.raises((ValueError, TypeError), match=message):
        chat_dataset.read_chat(row, form)


def test_bad_rows_are_named_or_skipped(tmp_path, capfd):
    good = {"prompt": "a", "completion": "b"}
    path = write(tmp_path / "rows.jsonl", [good, good, {"prompt": "a"}, good])
    with pytest.raises(ValueError, match="rows.jsonl, row 3: completion is empty or not a list"):
        load_documents(path)
    assert len(load_documents(path, bad_rows="skip")) == 3
    assert f"Skipped {path}, row 3: completion is empty" in capfd.readouterr().out
    path = write(tmp_path / "more.jsonl", [good | {"completion": ""}, {"prompt": "a"}])
    with pytest.raises(ValueError, match="more.jsonl has no usable rows"):
        load_documents(path, bad_rows="skip")
    path = write(tmp_path / "text.jsonl", [{"content": "a"}, {"content": " "}])
    with pytest.raises(ValueError, match="row 2: the document is ' ', not text"):
        load_documents(path)


def test_weights_in_csv_are_read(tmp_path):
    path = tmp_path / "chats.csv"
    path.write_text("prompt,completion,weight\nq,a,1\nq,b,true\nq,c,\n")
    assert len(load_documents(str(path))) == 3
    path.write_text("prompt,completion,weight\nq,a,1\nq,b,0\n")
    with pytest.raises(ValueError, match="row 2: the row excludes all assistant turns"):
        load_documents(str(path))


def test_chatml_renders_tools_like_hermes_and_qwen():
    """Except for Qwen's line break in front of a call without text."""
    ours = bpe(chat_template=chat_formats.CHATML, eos_token="<|im_end|>")
    calls = CALL_TURN["tool_calls"]
    chat = [SYSTEM, USER, CALL_TURN | {"tool_calls": calls * 2}, RESULT, RESULT, ASSISTANT]
    text = ours.apply_chat_template(chat, tools=[TOOL], tokenize=False)
    call = json.dumps({"name": "f", "arguments": calls[0]["function"]["arguments"]})
    assert text.startswith("<|im_start|>system\nc\n\n# Tools\n\nYou may call one or more functions")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.endswith(
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        f"<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    [(ids, labels)] = encode(chat, ours, [TOOL])
    assert target_texts(ids, labels, ours)[0].endswith("</tool_call><|im_end|>")
    for turns in ([USER, ASSISTANT], [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]):
        tokenizer = bpe(chat_template=QWEN_2_5, eos_token="<|im_end|>")
        expected = tokenizer.apply_chat_template([SYSTEM, *turns], tokenize=False)
        assert ours.apply_chat_template([SYSTEM, *turns], tokenize=False) == expected


def test_chatml_does_not_double_a_bos_that_is_its_marker():
    """As that of SmolLM2."""
    tokenizer = bpe(bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = chat_formats.CHATML
    text = tokenizer.apply_chat_template([USER], tokenize=False)
    assert text == "<|im_start|>user\na<|im_end|>\n"


def test_columns_that_the_data_module_refuses_are_read_or_refused_here():
    assert {*chat_dataset.UNREAD.split()} == {*chat_formats.COLUMNS, "functions", "history"}
