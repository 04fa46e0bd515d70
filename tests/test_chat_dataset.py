"""Test chat_dataset: which tokens are targets and how documents are packed."""

import json
import random
from itertools import groupby
from pathlib import Path

import pytest
import torch
from chat_templates import ASKS_FOR_THOUGHTS, CHATML, KNOWN, MERGES, PROMPTER, TOOLS
from datasets import Dataset, load_dataset
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import chat_dataset
from core import reading
from core.ranks import Problem

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM, RESULT = {"role": "system", "content": "c"}, {"role": "tool", "content": "3", "name": "f"}
ARGUMENTS = {"day": "2024-05-01", "n": 12345678901234567890, "none": None}
ARGUMENTS |= {"of": {"b": 2.5, "a": [None]}}
CALL = {"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CALL_TURN = ASSISTANT | {"content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote Emma?"},
    {"role": "assistant", "content": "Jane Austen wrote it."},
    {"role": "user", "content": "And Ulysses?"},
    {"role": "assistant", "content": "  James Joyce,\nin Trieste – among others.  "},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]
THINK = "<think>\nHm.\n</think>\n\n"
THOUGHTS = [t | {"content": THINK * (t["role"] == "assistant") + t["content"]} for t in CHAT]
CHATS = {
    "plain": CHAT,
    "no system": CHAT[1:],
    "ends with a question": CHAT[:6],
    "thoughts": THOUGHTS,
    "tools": [USER, CALL_TURN, RESULT, ASSISTANT, CHAT[1], CALL_TURN, RESULT, RESULT, ASSISTANT],
}
PAIRS = [(name, chat) for name in KNOWN for chat in CHATS if chat != "tools" or name in TOOLS]
DOCUMENT_COUNTS = {  # documents of a chat, where there are several
    "qwen 3": {"plain": 3, "no system": 3, "ends with a question": 2, "thoughts": 3, "tools": 4},
    "mistral": {"plain": 3, "ends with a question": 2, "thoughts": 3, "tools": 2},
}


def bpe(words: bool = True, **special: object) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on CHAT. Without `words`, tokens may span several words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|> <|prompter|>" if words else "</s> [/INST]<think>\n\n</think>\n\n  x"
    lines = [f"{turn['content']} {end}" for turn in CHAT] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=480 if words else 400, **options)
    tokenizer.train_from_iterator(lines, trainer)
    if bos := special.get("bos_token"):
        tokenizer.add_special_tokens([bos])
        bos = {"single": f"{bos} $A", "special_tokens": [(bos, tokenizer.token_to_id(bos))]}
        tokenizer.post_processor = processors.TemplateProcessing(**bos)
    special = {"chat_template": PROMPTER} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def known_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template and the special tokens of a model family in KNOWN."""
    template, bos, eos, special = KNOWN[name]
    special = {"bos_token": bos, "eos_token": eos, "additional_special_tokens": special}
    return bpe(chat_template=template, **special)


def byt5(template: str = PROMPTER) -> ByT5Tokenizer:
    """Return a byte tokenizer, which reports no offsets."""
    return ByT5Tokenizer(chat_template=template)


def encode(chat: list[dict], tokenizer: object, tools: list[dict] | None = None) -> list[tuple]:
    """Return the ids and labels of each document of a chat."""
    return chat_dataset.encode((chat, tools), tokenizer)


def target_texts(ids: list[int], labels: list[int], tokenizer: object) -> list[str]:
    """Return the text of each run of targets; fail if a label is neither the token nor -100."""
    pairs = list(zip(ids, labels, strict=True))
    assert all(label in (token, -100) for token, label in pairs)
    runs = groupby(pairs, key=lambda pair: pair[1] != -100)
    return [tokenizer.decode([x for x, _ in run]) for is_target, run in runs if is_target]


def read_row(row: dict, **flags: object) -> chat_dataset.Chat:
    """Return the chat in a row of a data set, given the flags of the data module."""
    form = chat_dataset.chat_columns("rows", row, chat_dataset.Data(**flags))
    return chat_dataset.read_chat(row, form)


def write(path: Path, rows: list[dict]) -> str:
    """Write a JSONL file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_documents(path: str, tokenizer: object = None, **flags: object) -> Dataset:
    """Return all documents of a data set with all columns."""
    args = chat_dataset.Data(**flags)
    return chat_dataset.load_documents(path, tokenizer or byt5(), args)["train"]


def check_documents(chat: list[dict], tools: list | None, tokenizer: object) -> int:
    """Check that each answer is a target once, and that the tokens before it are those of its
    prompt alone, as in generation. Return the number of documents."""

    def render(length: int, is_prompt: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": is_prompt, "tools": tools}
        text = tokenizer.apply_chat_template(chat[:length], **options)
        return text if is_prompt else text.rstrip()

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    documents = encode(chat, tokenizer, tools)
    answers = iter([i for i, turn in enumerate(chat) if turn["role"] == "assistant"])
    for ids, labels in documents:
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        end, expected = 0, []
        for is_target, run in groupby(label != -100 for label in labels):
            start, end = end, end + len([*run])
            if not is_target:
                continue
            i = next(answers)
            prompt, text = render(i, True), render(i + 1, False)
            expected = tokenize(text)
            if expected[:start] != tokenize(prompt):  # a token spans the end of the prompt
                expected = tokenize(prompt) + tokenize(text[len(prompt) :])
            if end == len(ids) and expected[-1] != tokenizer.eos_token_id:
                expected.append(tokenizer.eos_token_id)
            assert ids[:end] == expected and start == len(tokenize(prompt))
        assert ids in (expected, tokenize(render(len(chat), False)))  # with turns after the answers
    assert not [*answers]
    return len(documents)


@pytest.mark.parametrize("name, chat", PAIRS)
def test_labels_are_exactly_the_answers(name, chat):
    tools = [TOOL] if chat == "tools" else None
    count = check_documents(CHATS[chat], tools, known_tokenizer(name))
    assert count == DOCUMENT_COUNTS.get(name, {}).get(chat, 1)


def random_chats(seed: int, count: int) -> list[list[dict]]:
    """Return random chats of up to 20 turns: words, spaces, other scripts, special tokens."""
    draw = random.Random(seed)
    pieces = [*"ab \n\t-\u00a0é日ﬁ", "  ", "\n\n", "Emma", " wrote it", "e\u0301", "👩‍🔬", "[INST]"]
    pieces += ["<s>", "</s>", "[/INST]", "<|eot_id|>", "<|endoftext|>", "<|im", "_end|>"]
    pieces += ["<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<end_of_turn>"]
    result = []
    for _ in range(count):
        roles = (["user", "assistant"] * 10)[: draw.randint(2, 20)]
        turns = []
        for role in ["system", *roles] if draw.random() < 0.3 else roles:
            text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
            is_empty = role == "assistant" and not text.strip()
            turns.append({"role": role, "content": text + "x" * is_empty})
        result.append(turns)
    return result


@pytest.mark.parametrize("count", [20, pytest.param(1700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KNOWN)
def test_labels_of_random_chats_are_exactly_the_answers(name, count):
    tokenizer = known_tokenizer(name)
    accepted_count = 0
    for chat in random_chats(len(name), count):
        try:
            check_documents(chat, None, tokenizer)
            accepted_count += 1
        except ValueError as error:
            assert "drops" in str(error)
    assert accepted_count > 0.6 * count


def test_answer_whose_only_letter_merges_after_a_special_token_is_a_target():
    """Metaspace puts a space before a text, whose offsets are those of the first letter."""
    scores = {"<unk>": 0.0, "</s>": 0.0, "▁": -1.0, "a": -3.0, "b": -3.0, "ab": -1.0}
    tokenizer = Tokenizer(models.Unigram([*scores.items()], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    [(ids, labels)] = chat_dataset.tokenize("</s>ab", [(4, 5)], tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == ["</s>", "▁", "a"]
    assert labels == [-100, *ids[1:]]
    with pytest.raises(ValueError, match="a token spans the end of the prompt"):
        chat_dataset.tokenize(
            "</s>ab", [(5, 6)], tokenizer
        )  # on its own, "b" would begin with a space


@pytest.mark.parametrize("template", MERGES)
def test_token_that_spans_the_end_of_a_prompt_or_an_answer_is_cut(template):
    tokenizer = bpe(words=False, eos_token="</s>", chat_template=MERGES[template])
    chats = [CHAT, *random_chats(3, 40)]
    assert max(check_documents(chat, None, tokenizer) for chat in chats) > 1


def test_tokens_that_strip_the_text_after_them_keep_the_indentation_of_answers():
    tokenizer = bpe(eos_token="</s>", chat_template=CHATML.replace("im_start", "a"))
    strips = AddedToken("assistant", rstrip=True, special=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [strips, "<|im_end|>"]})
    code = ASSISTANT | {"content": "    return\n  b"}
    documents = encode([USER, code, USER, code, USER], tokenizer)
    texts = [target_texts(ids, labels, tokenizer) for ids, labels in documents]
    assert texts == 2 * [["    return\n  b<|im_end|></s>"]]
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert documents[0][0][: len(ids)] == ids and documents[0][1][len(ids)] != -100


def test_last_answer_gets_one_eos():
    answers = [f" {turn['content']} <|endoftext|>" for turn in CHAT[2::2]]
    tokenizer = byt5()
    for length, expected in ((7, [*answers[:2], answers[2] + "</s>"]), (4, answers[:1])):
        [(ids, labels)] = encode(CHAT[:length], tokenizer)
        assert target_texts(ids, labels, tokenizer) == expected
    tokenizer = bpe(eos_token="<|endoftext|>")
    [(ids, labels)] = encode([CHAT[2] | {"train": False}, *CHAT[3:5]], tokenizer)
    assert target_texts(ids, labels, tokenizer) == [answers[1]]


def test_each_answer_without_an_end_marker_is_a_document_that_ends_in_eos():
    """As with GLM-4's template."""
    tokenizer = byt5("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
                     "{{ '<|assistant|>' if add_generation_prompt }}")  # fmt: skip
    for chat in (CHAT[1:5], CHAT[1:6]):
        texts = [target_texts(*pair, tokenizer) for pair in encode(chat, tokenizer)]
        assert texts == [[turn["content"].rstrip() + "</s>"] for turn in CHAT[2:5:2]]


def test_thoughts_are_targets_once():
    tokenizer = known_tokenizer("qwen 3")
    pairs = encode(THOUGHTS[:5], tokenizer)
    texts = [target_texts(ids, labels, tokenizer) for ids, labels in pairs]
    assert texts == [[turn["content"] + "<|im_end|>"] for turn in THOUGHTS[2:5:2]]
    separate = [USER, ASSISTANT | {"reasoning_content": "Hm."}]
    inline = [USER, ASSISTANT | {"content": THINK + "b"}]
    assert encode(separate, tokenizer) == encode(inline, tokenizer)
    with pytest.raises(ValueError, match="drops 'Well.' of the assistant's turn"):
        encode([USER, ASSISTANT | {"content": "Well." + THINK + "b"}], tokenizer)
    context = [USER, separate[1] | {"train": False}, USER, ASSISTANT]
    assert "Hm." not in tokenizer.decode(encode(context, tokenizer)[0][0])
    tokenizer = known_tokenizer("our chatml")
    [(ids, labels)] = encode([USER, ASSISTANT | {"thinking": "Hm."}], tokenizer)
    assert target_texts(ids, labels, tokenizer) == [THINK + "b<|im_end|>"]


@pytest.mark.parametrize("template, chat, message", [
    (chat_dataset.LLAMA_2, [USER, USER, ASSISTANT], "user and assistant must alternate"),
    ("{{ messages + 1 }}", [USER, ASSISTANT], "rejects the chat: can only concatenate"),
    (PROMPTER, [ASSISTANT, USER, ASSISTANT], "rejects the chat: Cannot apply .* to an empty"),
    (ASKS_FOR_THOUGHTS, [USER, ASSISTANT], "start the answer with its gen.*-template chatml"),
    (CHATML.replace("if add", "if messages[-1].role != 'tool' and add"),
     [USER, ASSISTANT, RESULT, ASSISTANT], "after a tool's turn lacks the answer's header"),
    (CHATML, [USER, CALL_TURN], "drops 'f' of the assistant's turn"),
    (CHATML, [USER, ASSISTANT | {"thinking": "hm"}], "drops 'hm' of the assistant's turn"),
    (CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
     [USER, ASSISTANT | {"content": "<think>hm</think>b"}], "drops 'hm' of the assistant's turn"),
    (CHATML.replace("m.content", "('</think>' if m.role == 'assistant') ~ m.content"),
     [USER, ASSISTANT | {"content": "hm</think>b"}], "adds </think>"),
    (CHATML.replace("m.content", "m.content ~ (m.tool_calls or '')"), [USER, CALL_TURN],
     "writes calls in Python, not in JSON: {'day': '2024"),
    (CHATML.replace("}}<", "}}{% for call in m.tool_calls or [] %}f{% for key, x in call.function."
                    "arguments | items %} {{ key }} {{ x }}{% endfor %}{% endfor %}<"),
     [USER, CALL_TURN], "not in JSON: None. Pass"),
    (CHATML.replace("m.content", "m.content ~ ('f day n none of' if m.tool_calls)"),
     [USER, CALL_TURN], "drops '2024-05-01' of the assistant's turn"),
])  # fmt: skip
def test_template_that_drops_content_is_refused(template, chat, message):
    tokenizer = bpe(bos_token="<s>", eos_token="</s>", chat_template=template)
    with pytest.raises(ValueError, match=message):
        encode(chat, tokenizer)


def test_template_that_rejects_calls_is_no_fault_of_a_row():
    """--bad-rows skip would drop all rows with calls."""
    tokenizer = bpe(chat_template="{{ messages[1].tool_calls[0].arguments + '' }}")
    with pytest.raises(Problem, match="rejects the chat"):
        encode([USER, CALL_TURN, RESULT, ASSISTANT], tokenizer)


@pytest.mark.parametrize("template", [CHATML, "{{ tools[0] | tojson if tools }}" + CHATML])
def test_template_that_drops_a_tool_is_refused(template):
    """The question has the name of the tool."""
    tools = [{"name": "g"}, TOOL]
    with pytest.raises(ValueError, match="drops a tool"):
        encode([USER | {"content": "f"}, ASSISTANT], bpe(chat_template=template), tools)


STOCK = {"function": {"name": "stock_of", "arguments": {"item": 3}}}
CONTEXT = [
    USER | {"content": "How many?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [STOCK, STOCK]},
]
CONTEXT += [RESULT, RESULT | {"content": "41"}, ASSISTANT | {"content": "42"}]


@pytest.mark.parametrize("old, new, message", [
    ("m.tool_calls or []", "[]", "drops '.*' of the assistant's turn"),
    ("m.tool_calls or []", "(m.tool_calls or [])[:1]", "drops '.*' of the assistant's"),
    ("assistant\n{{ m.content }}", "assistant\n{{ m.content if not m.tool_calls }}",
     "drops 'Let me see.' of the assistant's"),
    ("<tool_response>\n{{ m.content }}", "<tool_response>\n", "drops '41' of the tool's"),
])  # fmt: skip
@pytest.mark.parametrize("tools", [None, [{"function": {"name": "stock_of", "x": "item"}}]])
def test_template_that_drops_context_is_refused(tools, old, new, message):
    """A call is not found in the list of tools, and a second one not in the first."""
    tokenizer = known_tokenizer("qwen 2.5")
    chat = [turn | {"train": False} if turn is CONTEXT[1] else turn for turn in CONTEXT]
    assert "".join(target_texts(*encode(chat, tokenizer, tools)[0], tokenizer)) == "42<|im_end|>"
    assert tokenizer.chat_template.count(old) == 1
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    with pytest.raises(ValueError, match=message):
        encode(chat, tokenizer, tools)


def test_chat_template_flag_replaces_the_template(tmp_path, capfd):
    (tmp_path / "own.jinja").write_text(CHATML, encoding="utf-8-sig")
    for original, flag, template, message in (
        (None, None, chat_dataset.LLAMA_2, "The chat template is llama-2"),
        (PROMPTER, None, PROMPTER, ""),
        (PROMPTER, "chatml", chat_dataset.TEMPLATES["chatml"], "The chat template is chatml"),
        (None, str(tmp_path / "own.jinja"), CHATML, "own.jinja, in best/ and final/ too"),
    ):
        tokenizer = bpe(chat_template=original)
        chat_dataset.set_chat_template(tokenizer, flag)
        assert tokenizer.chat_template == template and message in capfd.readouterr().out
    with pytest.raises(ValueError, match="is no file, nor llama-2 or chatml"):
        chat_dataset.set_chat_template(tokenizer, "chatlm")


def test_template_always_writes_the_same_date():
    for form, expected in (("'%-d %b %Y'", "26 Jul 2024"), ("'%Y' + '-%m-%d'", "2024-07-26")):
        tokenizer = byt5("{% set f = " + form + " %}{{ strftime_now(f) }}" + PROMPTER)
        [(ids, _)] = encode(CHAT, tokenizer)
        assert tokenizer.decode(ids).startswith(f"{expected}<|system|>")


@pytest.mark.parametrize("form", ["a file", "JSON in a data set"])
def test_tools_and_arguments_equal_the_file(form, tmp_path):
    values = [ARGUMENTS, {}, {"b": None, "a": 1}]
    rows = []
    for arguments in values:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [USER, CALL_TURN | {"tool_calls": [call]}, RESULT, ASSISTANT]
        rows.append({"messages": turns, "tools": [TOOL]})
    tokenizer = known_tokenizer("qwen 2.5")
    path = write(tmp_path / "rows.jsonl", rows)
    if form != "a file":
        load_dataset("json", data_files=path, split="train").save_to_disk(tmp_path / "saved")
        path = str(tmp_path / "saved")
    documents = load_documents(path, tokenizer)
    for ids, arguments in zip(documents["input_ids"], values, strict=True):
        text = tokenizer.decode(ids)
        assert f'{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>' in text
        # All rows have the same tools, so `datasets` stores these as objects.
        assert form != "a file" or f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text


def test_hold_out_keeps_equal_prompts_together(tmp_path):
    turns = [[USER | {"content": str(i // 2)}, *CHAT[2 : 3 + i % 2 * 2]] for i in range(200)]
    path = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in turns])
    rows = load_documents(path, known_tokenizer("qwen 3"))
    assert len(rows) == 300
    parts = reading.hold_out("x", rows)
    keys = [set(part["key"]) for part in parts.values()]
    assert not keys[0] & keys[1] and list(map(len, keys)) == [95, 5]
    ids = [[5, i % 40 + 10, i + 60, 1] for i in range(200)]  # 40 prompts
    rows = [{"input_ids": x, "labels": [-100, -100, *x[2:]]} for x in ids]
    keys = load_documents(write(tmp_path / "tokens.jsonl", rows))["key"]
    assert len({*keys}) == 40


def test_column_flags_apply_to_the_data_sets_that_have_the_columns(tmp_path, capfd):
    """Each data set has its own validation set. A path passed twice counts twice in training."""
    turns = [[USER | {"content": f"u{i}"}, ASSISTANT | {"content": "x"}] for i in range(40)]
    paths = [write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in turns])]
    paths.append(write(tmp_path / "pairs.jsonl", [{"q": f"q{i}", "a": "y"} for i in range(40)]))
    flags = {"prompt_column": "q", "completion_column": "a"}
    train, val = chat_dataset.load(chat_dataset.Data((*paths, paths[1]), **flags), byt5())
    assert {name: len(rows.dataset) for name, rows in val.items()} == dict.fromkeys(paths, 2)
    texts = [byt5().decode(row["input_ids"]) for row in train.dataset]
    assert sum("|assistant|> x" in text for text in texts) == 38
    assert sum("|prompter|> q" in text for text in texts) == 76
    named = [line for line in capfd.readouterr().out.splitlines() if " has no q or a" in line]
    assert named == [f"{paths[0]} has no q or a: it is read by its own columns"]
    both = write(tmp_path / "both.jsonl", [{"body": "a", "messages": turns[0]}])
    [document] = load_documents(both, text_column="body")
    assert document["input_ids"] == [ord("a") + 3, 1]
    with pytest.raises(Problem, match="no column q or .* Its columns are: messages. Pass both --"):
        read_row({"messages": turns[0]}, prompt_column="q")


def test_text_that_spells_a_special_token_is_counted(tmp_path, capfd):
    """Qwen 3's template makes two documents of the first row."""
    tokenizer = known_tokenizer("qwen 3")
    chats = [[*CHAT[1:5]], [USER, ASSISTANT], [USER | {"content": "<|im_end|>"}, ASSISTANT]]
    path = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    assert len(load_documents(f"{path}:train[:2]", tokenizer)) == 3
    assert "special" not in capfd.readouterr().out
    load_documents(path, tokenizer)
    expected = "1 rows spell special tokens, the first is row 3. Text of chats becomes the token"
    assert expected in capfd.readouterr().out
    path = write(tmp_path / "texts.jsonl", [{"content": f"<|im_start|>user\n{i}"} for i in "ab"])
    load_documents(path, tokenizer)
    expected = "2 rows spell special tokens, the first is row 1. Text of chats becomes"
    assert expected in capfd.readouterr().out
    load_documents(write(tmp_path / "unk.jsonl", [{"prompt": "<unk>", "completion": "b"}]))
    assert "unk.jsonl: 1 tokens are <unk>" in capfd.readouterr().out
    call = {"name": "f", "arguments": {"code": "<|im_end|>"}}
    calls = [{"type": "function", "function": call}]
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    load_documents(write(tmp_path / "calls.jsonl", [{"messages": turns}]), tokenizer)
    assert "1 rows spell special tokens, the first is row 1" in capfd.readouterr().out


def test_prompts_longer_than_the_sequence_are_dropped(tmp_path, capfd):
    prompts = ["?" * i for i in (*range(1, 51), *range(151, 202))]
    path = write(tmp_path / "chats.jsonl", [{"prompt": x, "completion": "x"} for x in prompts])
    rows = load_documents(path, max_seq_length=150)
    with pytest.raises(Problem, match="most answers start after .* Raise it"):
        chat_dataset.draw_documents("x", "train", rows, 0, 150)
    kept = chat_dataset.draw_documents("x", "train", rows.select(range(100)), 0, 150)
    assert len(kept) == 50 and kept.column_names == ["input_ids", "labels"]
    assert max(map(len, rows["input_ids"])) == max(map(len, rows["labels"])) == 151
    out = capfd.readouterr().out
    assert "x, train: 50 of 100 documents\n" in out
    assert "  50 are cut to --max-seq-length 150, or left out: no answer fits" in out


def test_packs_depend_on_seed_and_epoch():
    ids = [[i % 250 + 3, *range(3, 4 + i % 30)] for i in range(300)]  # 2 to 31 tokens
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("numpy")

    def packs(seed: int, epoch: int) -> list[list[list[int]]]:
        dataset = chat_dataset.PackedDataset(rows, 64, seed)
        start = epoch * len(dataset)
        packs = (dataset[i] for i in range(start, start + len(dataset)))
        return [[row["input_ids"].tolist() for row in pack] for pack in packs]

    first = packs(0, 0)
    assert first == packs(0, 0)
    for other in packs(0, 1), packs(1, 0):
        assert other != first and len(other) == len(first)
        assert sorted(sum(other, [])) == sorted(ids)


def test_pack_takes_the_longest_document_that_fits():
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 5, 8, 2, 5, 11, 7]
    packs = [[lengths[i] for i in pack] for pack in chat_dataset.pack(lengths, 10, generator)]
    assert packs == [[11], [8, 2], [7, 3], [5, 5]]
    assert len(chat_dataset.pack(lengths, 0, generator)) == 7


def document(*ids: int, prompt: int = 1) -> dict[str, list[int]]:
    """Return a document whose first `prompt` tokens are not targets."""
    return {"input_ids": list(ids), "labels": [-100] * prompt + list(ids[prompt:])}


def test_collate_predicts_nothing_across_documents():
    rows = [[document(3, 4, 5, 6), document(7, 8, 9, 10, 11, prompt=3)], [document(*range(20, 29))]]
    batch = chat_dataset.collate(rows)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert (batch["targets"], batch["tokens"], batch["max_seqlen"]) == (13, 15, 8)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": [[3, 4, 5, 7, 8, 9, 10, 0], [20, 21, 22, 23, 24, 25, 26, 27]],
        "labels": [[4, 5, 6, -100, -100, 10, 11, -100], [21, 22, 23, 24, 25, 26, 27, 28]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]],
        "cu_seqlens": [0, 3, 7, 8, 16],
        "target_positions": [0, 1, 2, 5, 6, *range(8, 16)],
    }
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    assert types.pop("cu_seqlens") == torch.int32 and set(types.values()) == {torch.int64}
    wide = chat_dataset.collate([[document(*range(3, 13))], [document(3, 4)]])
    assert wide["cu_seqlens"].tolist() == [0, 9, 16, 17, 32] and wide["max_seqlen"] == 15


def test_empty_batch_has_no_targets():
    batch = chat_dataset.collate([])
    assert batch["input_ids"].tolist() == batch["position_ids"].tolist() == [[0] * 8]
    assert batch["labels"].tolist() == [[-100] * 8]
    assert batch["tokens"] == batch["targets"] == 0


@pytest.fixture
def without_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes of optional/chat_formats.py."""
    monkeypatch.setattr(chat_dataset.chat_formats, "normalize", lambda row, form: row)
    monkeypatch.setattr(chat_dataset.chat_formats, "find_columns", lambda name, x, form, args: form)


@pytest.mark.parametrize("row, message", [
    ({"instruction": "a", "output": "b"}, "has no column messages. Its columns are: instru"),
    ({"messages": [{"from": "human", "value": "a"}]}, "the role None is not one of"),
    ({"messages": [USER, ASSISTANT | {"weight": 0}]}, "turn has weight, an unknown key"),
    ({"messages": [USER, ASSISTANT | {"train": "false"}]}, "has train 'false'. Use true or"),
    ({"messages": [USER, ASSISTANT | {"content": None}]}, "turn is None, not text"),
    ({"messages": [USER, ASSISTANT | {"content": "\n"}]}, "the assistant's turn is empty"),
    ({"messages": json.dumps([ASSISTANT])}, "messages is empty or not a list of objects"),
    ({"messages": [USER, ASSISTANT], "train": False}, "train would be ignored"),
    ({"prompt": "a", "completion": "b", "rejected": "c"}, "rejected would be ignored"),
    ({"messages": [SYSTEM, USER, ASSISTANT], "system": "x"}, "a system column and a system turn"),
    ({"messages": [USER, ASSISTANT], "tools": "[]"}, "tools is empty or not a list"),
    ({"messages": [USER, CALL_TURN | {"tool_calls": [{"arguments": {}}]}]}, "call to None has no"),
    ({"messages": [USER, CALL_TURN | {"tool_calls": [{"name": "f", "arguments": "{}"}]}]},
     "the call to f has no name or no object `arguments`"),
])  # fmt: skip
def test_rows_are_refused_without_the_optional_formats(row, message, without_formats):
    with pytest.raises(ValueError, match=message):
        read_row(row)


@pytest.mark.parametrize("row", [
    {"messages": [SYSTEM, USER, ASSISTANT], "id": 1},
    {"prompt": "a", "completion": "b", "system": "c"},
    {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
    {"q": "a", "r": "b", "system": "c"},
])  # fmt: skip
def test_messages_and_pairs_train_without_the_optional_formats(row, without_formats):
    flags = {"prompt_column": "q", "completion_column": "r"} if "q" in row else {}
    assert read_row(row, **flags) == ([SYSTEM, USER, ASSISTANT], None)


def test_tokenized_rows_are_read(tmp_path):
    rows = [{"input_ids": [5 + i, 6, 1], "labels": [-100, 6, 1]} for i in range(60)]
    path = str(tmp_path / "rows.parquet")
    Dataset.from_list(rows).to_parquet(path)
    train, val = chat_dataset.load(chat_dataset.Data(dataset=(path,)), byt5())
    samples = [*train.dataset, *val[path].dataset]
    assert sorted(row["input_ids"][0] for row in samples) == list(range(5, 65))
    assert all(row["labels"].tolist() == [-100, 6, 1] for row in samples)
    without_labels = {"input_ids": [5, 6, 1]}
    assert chat_dataset.read_tokens(without_labels, 3, byt5()) == ([5, 6, 1], [-100, 6, 1])
    path = write(tmp_path / "rows.jsonl", [{"input_ids": [5] * count} for count in (2, 9, 300)])
    with pytest.raises(Problem, match="jsonl, row 3: 300 tokens, but --max-seq-length allows 129"):
        load_documents(path, max_seq_length=128)


@pytest.mark.parametrize(("labels", "message"), [
    *[(x, "labels must be one per token") for x in ([5], [5, 9, 1], [-100] * 3, [-100, 6.0, 1.0])],
    ([-100, 6, -100], "labels exclude the EOS after a target"),
])  # fmt: skip
def test_labels_that_are_not_the_tokens_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        chat_dataset.read_tokens({"input_ids": [5, 6, 1], "labels": labels}, 129, byt5())
