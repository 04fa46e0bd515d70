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
    read_row,
    target_texts,
    write,
)

import chat_dataset
from optional import chat_formats

ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
CALL = '{"name": "add", "arguments": {"x": 1}}'
ADD = {"type": "function", "function": {"name": "add"}}
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function | tojson }}{% endfor %}</s>{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
PAIR = "<user>q</s><assistant>«a</s>»"
TRAINED = {  # a row, and its document with targets in « »
    "stanford_alpaca": (
        {"instruction": "q", "input": "i", "output": "a"}, "<user>q i</s><assistant>«a</s>»"),
    "LLaMA-Factory alpaca": (
        {"instruction": "q", "input": "", "output": "a", "system": "s", "history": []},
        f"<system>s</s>{PAIR}"),
    "LLaMA-Factory sharegpt": (
        {"conversations": [HUMAN, {"from": "function_call", "value": CALL},
                           {"from": "observation", "value": "2"}, GPT],
         "system": "s", "tools": '[{"name": "add"}]'},
        f'[{{"name": "add"}}]<system>s</s><user>q</s><assistant>«!{CALL}</s>»<tool>2</s>'
        "<assistant>«a</s>»"),
    "ShareGPT": (
        {"id": "x", "conversations": [{"from": "system", "value": "s"}, HUMAN, GPT | {
            "markdown": None, "text": None}]},
        f"<system>s</s>{PAIR}"),
    "axolotl": (
        {"conversations": [HUMAN, GPT | {"train": False}, HUMAN, GPT | {"weight": 1}]},
        f"<user>q</s><assistant>a</s>{PAIR}"),
    "ms-swift messages": (
        {"messages": [ASK, ANSWER | {"loss": False}, ASK, ANSWER | {"loss": True}]},
        f"<user>q</s><assistant>a</s>{PAIR}"),
    "masks": (
        {"messages": [ASK, ANSWER | {"mask": 1}, ASK, ANSWER | {"mask": 0}]},
        f"<user>q</s><assistant>a</s>{PAIR}"),
    "ms-swift query": ({"system": "s", "query": "q", "response": "a"}, f"<system>s</s>{PAIR}"),
    "OpenAI": (
        {"messages": [
            ASK,
            {"role": "assistant", "content": None, "weight": 0, "tool_calls": [
                {"id": "c1", "type": "function", "function": {
                    "name": "add", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ANSWER | {"weight": 1, "refusal": None}],
         "tools": [ADD], "parallel_tool_calls": False},
        f"[{json.dumps(ADD)}]<user>q</s><assistant>!{CALL}</s><tool>2</s><assistant>«a</s>»"),
    "dolly": (
        {"instruction": "q", "context": "c", "response": "a", "category": "open_qa"},
        "<user>q c</s><assistant>«a</s>»"),
    "TRL prompt and completion": (
        {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]},
        f"<user>q</s><assistant>a</s>{PAIR}"),
    "parts of text": (
        {"messages": [ASK | {"content": [{"type": "text", "text": "q"}]}, ANSWER]}, PAIR),
    "chats as text": ({"messages": json.dumps([ASK, ANSWER])}, PAIR),
    "a dict of lists": (
        {"conversations": {"from": ["human", "gpt"], "value": ["q", "a"], "loss": [None, True]}},
        PAIR),
    "weights as text": ({"prompt": "q", "completion": "a", "weight": "1", "loss": "true"}, PAIR),
    "gsm8k": ({"question": "q", "answer": "a"}, PAIR),
    "torchtune instruct": ({"input": "q", "output": "a"}, PAIR),
    "OpenOrca": ({"system_prompt": "s", "question": "q", "response": "a"}, f"<system>s</s>{PAIR}"),
    "NuminaMath": ({"question_type": "l", "problem": "q", "solution": "a", "answer": "5"}, PAIR),
    "Flan": ({"inputs": "q", "targets": "a", "task": "t"}, PAIR),
    "medical-o1": ({"Question": "q", "Complex_CoT": "c", "Response": "a"}, PAIR),
    "classification": ({"instruction": "q", "output": "a", "label": False}, PAIR),
}  # fmt: skip


def marked(row: dict, **flags: object) -> str:
    """Return the document of a row, with its targets in « »."""
    tokenizer = byt5(TEMPLATE)
    [(ids, labels)] = chat_dataset.encode(read_row(row, **flags), tokenizer)
    return chat_dataset.mark_targets({"input_ids": ids, "labels": labels}, tokenizer)


@pytest.mark.parametrize("name", TRAINED)
def test_format_trains_without_a_flag(name):
    row, expected = TRAINED[name]
    assert marked(row) == expected


def test_chosen_answers_train_with_flags():
    """LLaMA-Factory's preferences: `chosen` is a turn. Those in `conversations` are context."""
    row = {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT | {"value": "b"}, "rejected": GPT}
    with pytest.raises(ValueError, match="preferences .chosen, rejected.. .*pass --prompt-column"):
        read_row(row)
    text = marked(row, prompt_column="conversations", completion_column="chosen")
    assert text == "<user>q</s><assistant>a</s><user>q</s><assistant>«b</s>»"


@pytest.mark.parametrize("row, line", [
    ({"question": "q", "choices": ["a", "b"], "answer": "a"}, "and answer; left out: choices"),
    ({"instruction": "q", "output": "a", "rationale": "r"}, "and output; left out: rationale"),
    ({"prompt": "q", "context": "c", "completion": "a"}, "and completion; left out: context"),
    ({"messages": [ASK, ANSWER], "response": "b", "id": 1}, "messages; left out: response, id\n"),
    ({"system_prompt": "s", "question": "q", "response": "a"}, "uses question and response\n"),
    ({"instruction": "q", "input": "i", "output": "a", "system": "s"}, None),
])  # fmt: skip
def test_text_that_is_left_out_of_a_pair_is_named(row, line, capfd):
    read_row(row)
    out = capfd.readouterr().out
    assert line in out if line else "uses" not in out


def test_answers_beside_plain_text_are_named(tmp_path, capfd):
    """The rows are read as documents, because the default of --text-column is content."""
    load_documents(write(tmp_path / "x.jsonl", [{"content": "c", "summary": "s", "id": 1}]))
    assert "x.jsonl: uses content; left out: summary, id\n" in capfd.readouterr().out


def test_label_that_is_an_answer_s_class_is_no_kto():
    row = {"prompt": "Is 3 even?", "response": "no", "label": False}
    assert marked(row) == "<user>Is 3 even?</s><assistant>«no</s>»"


def test_text_column_names_documents(tmp_path, capfd):
    path = write(tmp_path / "text.jsonl", [{"body": "a</s>", "input_ids": [5]}, {"body": " "}])
    [document] = load_documents(path, text_column="body", bad_rows="skip")
    assert "left out: input_ids" in capfd.readouterr().out
    assert document["input_ids"] == [*(byte + 3 for byte in b"a</s>"), 1]
    with pytest.raises(ValueError, match="text.jsonl, row 2: the document is ' ', not text"):
        load_documents(path, text_column="body")


@pytest.mark.parametrize("row, message", [
    ({"message_id": "1", "text": "q", "role": "prompter"}, "has a row per turn"),
    ({"title": "t", "question": "q", "answers": {"text": ["a"]}}, "no column messages. Its col"),
    ({"image": "a.png", "conversations": [HUMAN, GPT]}, "image would be ignored"),
    ({"messages": str([USER, ASSISTANT])}, "Python's repr of objects. Write JSON"),
    ({"messages": [USER | {"content": [{"type": "image"}]}]}, "the user's turn is .*, not text"),
    ({"messages": [USER, ASSISTANT | {"weight": 0.5}]}, "assistant's turn has weight 0.5. Use"),
    ({"messages": [USER, ASSISTANT | {"weight": 0}]}, "the chat has no assistant turn to"),
    ({"messages": [USER, ASSISTANT], "train": False}, "the row excludes all assistant turns"),
    ({"prompt": "a", "completion": "b", "weight": "0"}, "the row excludes all assistant turns"),
    ({"messages": [USER, ASSISTANT], "loss_scale": 0.5}, "the row has loss_scale 0.5. Use"),
    ({"conversations": [HUMAN, {"from": "tool_call", "value": "f"}]}, "call is not an object"),
    ({"messages": [USER, ASSISTANT | {"function_call": {"name": "f"}}]}, "has function_call, "),
    ({"messages": [USER, ASSISTANT], "functions": [TOOL]}, "functions would be ignored"),
    ({"messages": [USER, ASSISTANT | {"reasoning": "hm"}]}, "has reasoning, an unknown key"),
    ({"messages": [USER, CALL_TURN | {"tool_calls": [{"name": "f", "parameters": {"x": 1}}]}]},
     "the call to f has no name or no object `arguments`"),
    ({"messages": [USER, ASSISTANT | {"content": [
        {"type": "text", "text": "b"}, {"type": "text", "text": "c", "weight": 0}]}]},
     "the assistant's turn is .*, not text"),
    ({"messages": [ASK, ANSWER], "label": False}, "a bad example, for KTO"),
    ({"prompt": "a", "completion": "b", "label": "False"}, "a bad example, for KTO"),
    ({"conversations": [HUMAN, GPT], "kto_tag": "False"}, "a bad example, for KTO"),
    ({"query": "q", "response": "a", "kto_tag": 0}, "a bad example, for KTO"),
    ({"messages": [ASK, ANSWER], "rejected": "b"}, "rejected"),
    ({"messages": "User: hi\nAssistant: yo"}, "messages is empty or not a list of objects"),
    ({"conversations": [HUMAN, GPT], "label": False}, "a bad example, for KTO"),
    ({"prompt": "a", "completion": 5}, "completion is empty or not"),
    ({"prompt": str([ASK]), "completion": "b"}, "the turns are text. Write them"),
    ({"prompt": "a", "completion": json.dumps([ANSWER])}, "the turns are text"),
    ({"prompt": "a", "completion": [ASK, ANSWER]}, "completion does not start with the assist"),
    ({"messages": [ASK, ANSWER | {"recipient": "get_weather"}]}, "has recipient, an unknown key"),
    ({"messages": [USER, ASSISTANT | {"content": [{"text": "b", "title": "t"}]}]}, "not text"),
    ({"instruction": "a", "input": float("nan"), "output": "b"}, "expected str.*, float found"),
    ({"instruction": "a", "input": ["c"], "output": "b"}, "expected str.*, list found"),
])  # fmt: skip
def test_unusable_row_is_refused(row, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read_row(row)


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
    """Those that only the data module names are not removed, so it refuses them."""
    others = {*chat_dataset.UNREAD.split()} - {*chat_formats.COLUMNS}
    assert others >= {"functions", "history", "images"} and "chosen" not in others
    assert {*chat_formats.COLUMNS} < {*chat_dataset.UNREAD.split()}
