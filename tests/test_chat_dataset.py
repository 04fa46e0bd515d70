"""Test chat_dataset: which tokens are targets and how documents are packed."""

import json
import random
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch
from chat_templates import (
    ASKS_FOR_THOUGHTS,
    CHATML,
    FORGETS_THE_SYSTEM,
    KNOWN,
    LLAMA_2,
    PROMPTER,
    TOOLS,
)
from datasets import Dataset, Features
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import chat_dataset
from core import reading
from core.ranks import Problem
from optional.chat_formats import CHATML as OUR_CHATML

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
THOUGHTS = [
    turn | {"content": f"<think>\nHm, {i}.\n</think>\n\n{turn['content']}"}
    if turn["role"] == "assistant"
    else turn
    for i, turn in enumerate(CHAT)
]
CHATS = {
    "plain": CHAT,
    "no system": CHAT[1:],
    "ends with a question": CHAT[:6],
    "thoughts": THOUGHTS,
    "tools": [USER, CALL_TURN, RESULT, ASSISTANT, CHAT[1], CALL_TURN, RESULT, RESULT, ASSISTANT],
}
PAIRS = [
    (name, chat)
    for name in KNOWN
    for chat in CHATS
    if (chat != "tools" or name in TOOLS) and (chat == "no system" or name != "gemma")
]
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


def known_tokenizer(name: str, make: Callable = bpe) -> object:
    """Return a tokenizer with the template and the special tokens of a model family in KNOWN."""
    template, bos, eos, special = KNOWN[name]
    options = {"eos_token": eos, "additional_special_tokens": special, "chat_template": template}
    options |= {"extra_ids": 0} if make is ByT5Tokenizer else {"bos_token": bos}
    return make(**options)


def byt5(template: str = PROMPTER) -> ByT5Tokenizer:
    """Return a byte tokenizer, which reports no offsets."""
    return ByT5Tokenizer(chat_template=template)


def encode(chat: list[dict], tokenizer: object, tools: list[dict] | None = None) -> list[tuple]:
    """Return the ids and labels of each document of a chat."""
    return chat_dataset.encode((chat, tools), chat_dataset.AnswerTokens(tokenizer))


def target_texts(ids: list[int], labels: list[int], tokenizer: object) -> list[str]:
    """Return the text of each run of targets; fail if a label is neither the token nor -100."""
    pairs = list(zip(ids, labels, strict=True))
    assert all(label in (token, -100) for token, label in pairs)
    runs = groupby(pairs, key=lambda pair: pair[1] != -100)
    return [tokenizer.decode([x for x, _ in run]) for is_target, run in runs if is_target]


def write(path: Path, rows: list[dict]) -> str:
    """Write a JSONL file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_documents(path: str, tokenizer: object = None, **flags: object) -> Dataset:
    """Return all documents of a data set with all columns."""
    args = chat_dataset.Data(**flags)
    return chat_dataset.load_documents(path, tokenizer or byt5(), args)["train"]


def render(chat: list[dict], tools: list | None, tokenizer: object, prompt: bool) -> str:
    """Return the text of a chat or, with `prompt`, of the prompt for its next answer."""
    options = {"tokenize": False, "add_generation_prompt": prompt, "tools": tools}
    text = tokenizer.apply_chat_template(chat, **options)
    return text if prompt else text.rstrip()


def token_bytes(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[bytes]:
    """Return the bytes of each token of a byte-level BPE."""
    value = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = {number: str(x) for number, x in tokenizer.added_tokens_decoder.items()}
    result = []
    for number, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        is_special = number in special
        result.append(token.encode() if is_special else bytes(value[letter] for letter in token))
    return result


def check_documents(chat: list[dict], tools: list | None, tokenizer: object) -> int:
    """Check that the targets are exactly the answers, each of them once and after its prompt.

    Compare bytes: a token is a target if it ends within an answer. Return the number of
    documents.
    """
    pairs = encode(chat, tokenizer, tools)
    answers = [i for i, turn in enumerate(chat) if turn["role"] == "assistant"]
    for ids, labels in pairs:
        parts = token_bytes(tokenizer, ids)
        text = b"".join(parts)
        expected = [False] * len(ids)
        while answers:
            start = render(chat[: answers[0]], tools, tokenizer, True).encode()
            end = render(chat[: answers[0] + 1], tools, tokenizer, False).encode()
            if not text.startswith(end):
                break
            answers.pop(0)
            position = 0
            for i, part in enumerate(parts):
                position += len(part)
                expected[i] |= len(start) < position <= len(end)
        closing = tokenizer.eos_token.encode()
        if ids[-1] == tokenizer.eos_token_id and labels[-1] != -100:
            expected[-1] = True
        full_chat = text if text.decode() == render(chat, tools, tokenizer, False) else b""
        assert full_chat or any(
            text in (end, end + closing)
            for end in (
                render(chat[:n], tools, tokenizer, False).encode() for n in range(len(chat) + 1)[1:]
            )
        )
        assert [label != -100 for label in labels] == expected
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        expected_ids = tokenizer(text.decode(), add_special_tokens=False)["input_ids"]
        assert ids == expected_ids
    assert not answers
    return len(pairs)


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
        roles = (["user", "assistant"] * 10)[: 2 * draw.randint(1, 10) - draw.randint(0, 1)]
        if draw.random() < 0.3:
            roles = ["system", *roles]
        texts = ["".join(draw.choices(pieces, k=draw.randint(0, 12))) for _ in roles]
        turns = [{"role": x, "content": text} for x, text in zip(roles, texts, strict=True)]
        for turn in turns:
            turn["content"] += (
                "x" if turn["role"] == "assistant" and not turn["content"].strip() else ""
            )
        result.append(turns if "assistant" in roles else [*turns, ASSISTANT])
    return result


@pytest.mark.parametrize("count", [20, pytest.param(1700, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["our llama 2", "llama 3", "our chatml", "mistral", "qwen 3", "gemma"]
)
def test_labels_of_random_chats_are_exactly_the_answers(name, count):
    tokenizer = known_tokenizer(name)
    accepted_count = 0
    for chat in random_chats(len(name), count):
        try:
            encode(chat, tokenizer)
        except ValueError as error:  # Gemma's template refuses system turns
            assert name == "gemma" or "drops" in str(error), error
            continue
        check_documents(chat, None, tokenizer)
        accepted_count += 1
    assert accepted_count > 0.6 * count


def metaspace_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """Return a Unigram tokenizer that prefers `words` to letters and puts a space before a text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((x, -3.0) for x in "ab\n")]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((x, -1.0) for x in words)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_answer_whose_only_letter_merges_after_a_special_token_is_a_target():
    """Metaspace's "▁" before it has the offsets of the letter."""
    tokenizer = metaspace_tokenizer("ab")
    [(ids, labels)] = chat_dataset.AnswerTokens(tokenizer).encode("</s>ab", [(4, 5)])
    assert tokenizer.convert_ids_to_tokens(ids) == ["</s>", "▁", "a"]
    assert labels == [-100, *ids[1:]]


def test_answer_that_cannot_be_tokenized_on_its_own_is_refused():
    """It would begin with a space after its prompt."""
    tokens = chat_dataset.AnswerTokens(metaspace_tokenizer("ab"))
    with pytest.raises(ValueError, match="a token spans the end of the prompt"):
        tokens.encode("</s>ab", [(5, 6)])


MERGES = {  # templates whose tokens merge at the start of an answer, or at its end
    "think": "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m.content }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}",
    "plain": "{% for m in messages %}{{ '[INST] ' if m.role != 'assistant' }}{{ m.content }}"
    "{{ ' </s> ' if m.role == 'assistant' else ' [/INST] ' }}{% endfor %}",
    "prompter": PROMPTER,
}


@pytest.mark.parametrize("template", MERGES)
def test_context_of_each_answer_is_exactly_its_prompt(template):
    """Tokens that span the end of a prompt or of an answer are cut, so that training sees what
    generation produces."""
    tokenizer = bpe(words=False, eos_token="</s>", chat_template=MERGES[template])
    options = {"add_special_tokens": False}
    cut = 0
    for chat in [CHAT, *random_chats(3, 40)]:
        if chat[0]["role"] == "assistant":
            continue
        pairs = encode(chat, tokenizer)
        starts = []  # the tokens before each run of targets
        for ids, labels in pairs:
            runs = groupby(range(len(ids)), key=lambda i, labels=labels: labels[i] != -100)
            starts += [ids[: next(run)] for is_target, run in runs if is_target]
            assert all(label in (-100, x) for label, x in zip(labels, ids, strict=True))
        answers = [i for i, turn in enumerate(chat) if turn["role"] == "assistant"]
        prompts = [render(chat[:i], None, tokenizer, True) for i in answers]
        assert starts == [tokenizer(text, **options)["input_ids"] for text in prompts]
        whole = tokenizer(render(chat, None, tokenizer, False), **options)["input_ids"]
        cut += pairs[0][0][: len(whole)] != whole
        end = render(chat[: answers[-1] + 1], None, tokenizer, False).removesuffix("</s>")
        assert tokenizer.decode(pairs[-1][0]).startswith(end)
    assert cut


def test_last_answer_gets_one_eos():
    answers = [f" {turn['content']} <|endoftext|>" for turn in CHAT[2::2]]
    tokenizer = byt5()
    ((ids, labels),) = encode(CHAT, tokenizer)
    assert target_texts(ids, labels, tokenizer) == [*answers[:2], answers[2] + "</s>"]
    ((ids, labels),) = encode(CHAT[:4], tokenizer)
    assert target_texts(ids, labels, tokenizer) == answers[:1]
    tokenizer = bpe(eos_token="<|endoftext|>")
    with pytest.raises(ValueError, match="starts with an answer"):
        encode(CHAT[2:5], tokenizer)
    ((ids, labels),) = encode([CHAT[2] | {"train": False}, *CHAT[3:5]], tokenizer)
    assert target_texts(ids, labels, tokenizer) == [f"{answers[1]}"]


def test_thoughts_are_targets_once():
    tokenizer = known_tokenizer("qwen 3")
    pairs = encode(THOUGHTS[:5], tokenizer)
    texts = [target_texts(ids, labels, tokenizer) for ids, labels in pairs]
    assert texts == [[turn["content"] + "<|im_end|>"] for turn in THOUGHTS[2:5:2]]
    separate = [USER, ASSISTANT | {"reasoning_content": "Hm."}]
    inline = [USER, ASSISTANT | {"content": "<think>\nHm.\n</think>\n\nb"}]
    assert encode(separate, tokenizer) == encode(inline, tokenizer)


@pytest.mark.parametrize(
    "template, chat, message",
    [
        (LLAMA_2, [USER, USER, ASSISTANT], "rejects the chat: roles must alternate"),
        (chat_dataset.LLAMA_2, [ASSISTANT, USER], "user and assistant alternate"),
        (ASKS_FOR_THOUGHTS, [USER, ASSISTANT], "does not start the answer with its generation"),
        (FORGETS_THE_SYSTEM, [SYSTEM, USER, ASSISTANT], "does not start the answer with its"),
        (CHATML, [USER, CALL_TURN], "drops 'f' of the assistant's turn"),
        (CHATML, [USER, ASSISTANT | {"thinking": "hm"}], "drops 'hm' of the assistant's turn"),
        (
            CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
            [USER, ASSISTANT | {"content": "<think>hm</think>b"}],
            "drops 'hm' of the assistant's turn",
        ),
        (
            CHATML.replace("m.content", "('</think>' if m.role == 'assistant') ~ m.content"),
            [USER, ASSISTANT | {"content": "hm</think>b"}],
            "adds </think> to an answer that has one",
        ),
        (
            CHATML.replace("m.content", "m.content ~ (m.tool_calls or '')"),
            [USER, CALL_TURN],
            "writes calls in Python",
        ),
        (
            CHATML.replace("m.content", "m.content ~ ('f day n none of' if m.tool_calls)"),
            [USER, CALL_TURN],
            "drops '2024-05-01' of the assistant's turn",
        ),
        ("{{ messages + 1 }}", [USER, ASSISTANT], "rejects the chat: can only concatenate"),
    ],
)
def test_template_that_drops_content_is_refused(template, chat, message):
    tokenizer = bpe(bos_token="<s>", eos_token="</s>", chat_template=template)
    with pytest.raises(ValueError, match=message):
        encode(chat, tokenizer)
    for question, message in ((USER, "drops 'f' of the tools"), ("the f", "drops the tools")):
        turn = question if question is USER else USER | {"content": question}
        with pytest.raises(ValueError, match=message):
            encode([turn, ASSISTANT], known_tokenizer("chatml"), [TOOL])


STOCK = {"function": {"name": "stock_of", "arguments": {"item": 3}}}
CONTEXT = [
    USER | {"content": "How many?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [STOCK, STOCK]},
]
CONTEXT += [RESULT, RESULT | {"content": "41"}, ASSISTANT | {"content": "42"}]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("m.tool_calls or []", "[]", "drops '.*' of the assistant's turn"),
        ("m.tool_calls or []", "(m.tool_calls or [])[:1]", "drops '.*' of the assistant's"),
        ("assistant\n{{ m.content }}", "assistant\n{{ m.content if not m.tool_calls }}",
         "drops 'Let me see.' of the assistant's"),
        ("<tool_response>\n{{ m.content }}", "<tool_response>\n", "drops '41' of the tool's"),
    ],
)  # fmt: skip
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


def test_reasoning_may_be_left_out_of_the_context():
    tokenizer = known_tokenizer("qwen 3")
    chat = [USER, ASSISTANT | {"reasoning_content": "Hm.", "train": False}, USER, ASSISTANT]
    ((ids, _),) = encode(chat, tokenizer)
    assert "Hm." not in tokenizer.decode(ids)


@pytest.mark.parametrize("chat", [CHAT, [USER, ASSISTANT | {"thinking": "Hm."}]])
def test_chat_trains_with_the_template_that_a_refusal_names(chat):
    tokenizer = bpe(bos_token="<s>", eos_token="</s>", chat_template=ASKS_FOR_THOUGHTS)
    with pytest.raises(ValueError, match="Or pass --chat-template chatml"):
        encode(chat, tokenizer)
    tokenizer.chat_template = OUR_CHATML
    [(ids, labels)] = encode(chat, tokenizer)
    thought = "<think>\nHm.\n</think>\n\n" if "thinking" in chat[-1] else ""
    answers = [turn["content"] + "<|im_end|>" for turn in chat if turn["role"] == "assistant"]
    assert "".join(target_texts(ids, labels, tokenizer)) == thought + "".join(answers) + "</s>"


def test_chat_template_flag_replaces_the_template(tmp_path, capfd):
    (tmp_path / "own.jinja").write_text(CHATML)
    for original, flag, template, message in (
        (None, None, chat_dataset.LLAMA_2, "The chat template is llama-2"),
        (PROMPTER, None, PROMPTER, ""),
        (PROMPTER, "chatml", OUR_CHATML, "The chat template is chatml"),
        (None, str(tmp_path / "own.jinja"), CHATML, "own.jinja, in best/ and final/ too"),
    ):
        tokenizer = bpe(chat_template=original)
        chat_dataset.set_chat_template(tokenizer, flag)
        assert tokenizer.chat_template == template and message in capfd.readouterr().out
    with pytest.raises(ValueError, match="is neither a file nor llama-2 or chatml"):
        chat_dataset.set_chat_template(tokenizer, "chatlm")


def test_template_always_writes_the_same_date():
    dated = "{{ strftime_now('%d %b %Y') }}" + PROMPTER
    ((ids, _),) = encode(CHAT, byt5(dated))
    assert byt5().decode(ids).startswith("26 Jul 2024<|system|>")
    ((ids, _),) = encode(CHAT, byt5("{% set f = '%Y-%m-%d' %}{{ strftime_now(f) }}" + PROMPTER))
    assert byt5().decode(ids).startswith("2024-07-26<|system|>")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_tool_arguments_equal_the_file(name, tmp_path):
    """Parquet stores all objects with the same keys."""
    expected = [ARGUMENTS, {}, {"b": None, "a": 1}]
    rows = []
    for i, values in enumerate(expected):
        call = {"type": "function", "function": {"name": "f", "arguments": values}}
        turns = [USER | {"content": f"{i}?"}, CALL_TURN | {"tool_calls": [call]}, RESULT, ASSISTANT]
        rows.append({"messages": turns, "tools": [TOOL]})
    path = tmp_path / name
    if name == "rows.parquet":
        rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"a": 7}
        expected = [{"a": 7}, {}, {"a": 1}]
        Dataset.from_list(rows).to_parquet(path)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text if name == "rows.jsonl" else json.dumps(rows, indent=2))
    tokenizer = known_tokenizer("qwen 2.5", ByT5Tokenizer)
    texts = [tokenizer.decode(ids) for ids in load_documents(str(path), tokenizer)["input_ids"]]
    for text, values in zip(texts, expected, strict=True):
        assert f'{{"name": "f", "arguments": {json.dumps(values)}}}\n</tool_call>' in text
        assert name == "rows.parquet" or f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text


def test_hold_out_keeps_equal_prompts_together(tmp_path):
    turns = [[USER | {"content": str(i // 2)}, *CHAT[2 : 3 + i % 2 * 2]] for i in range(200)]
    path = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in turns])
    rows = load_documents(path, known_tokenizer("qwen 3"))
    assert len(rows) == 300
    parts = reading.hold_out("x", rows)
    keys = [set(part["key"]) for part in parts.values()]
    assert not keys[0] & keys[1] and list(map(len, keys)) == [95, 5]
    with pytest.raises(ValueError, match="has too few different rows"):
        reading.hold_out("x", rows.select([0, 0]))


def test_each_data_set_is_validated_on_its_own(tmp_path):
    """A path passed twice counts twice in training. --val-dataset replaces held-out samples."""
    paths = []
    for name in "abc":
        rows = [{"prompt": f"{name} {i}", "completion": str(i)} for i in range(40)]
        paths.append(write(tmp_path / f"{name}.jsonl", rows))
    train, val = chat_dataset.load(
        chat_dataset.Data(dataset=[paths[0], paths[1], paths[1]]), byt5()
    )
    assert {name: len(rows.dataset) for name, rows in val.items()} == {paths[0]: 2, paths[1]: 2}
    assert len(train.dataset) == 114
    args = chat_dataset.Data(dataset=[f"{paths[0]}:train[:10]"], val_dataset=paths[1:])
    train, val = chat_dataset.load(args, byt5())
    assert len(train.dataset) == 10
    assert [len(rows.dataset) for rows in val.values()] == [40, 40]
    args = chat_dataset.Data(dataset=paths[:1])
    assert chat_dataset.load(args, byt5(), evaluate_only=True)[0] is None


def test_column_flags_apply_to_the_data_sets_that_have_the_columns(tmp_path):
    turns = [[USER | {"content": f"u{i}"}, ASSISTANT | {"content": "x"}] for i in range(40)]
    chats = [{"messages": chat} for chat in turns]
    paths = [write(tmp_path / "chats.jsonl", chats), str(tmp_path / "pairs.csv")]
    Path(paths[1]).write_text("q,a\n" + "".join(f"q{i},y{i}\n" for i in range(40)))
    flags = {"prompt_column": "q", "completion_column": "a"}
    train, _ = chat_dataset.load(chat_dataset.Data(dataset=paths, **flags), byt5())
    texts = [byt5().decode(row["input_ids"]) for row in train.dataset]
    assert sum("|assistant|> x" in text for text in texts) == 38
    assert sum("|prompter|> q" in text for text in texts) == 38
    with pytest.raises(Problem, match="has no column q or a. Its columns are: messages"):
        chat_dataset.load(chat_dataset.Data(dataset=paths[:1], **flags), byt5())


def test_text_that_spells_a_special_token_is_counted(tmp_path, capfd):
    """Qwen 3's template makes two documents of the first row."""
    chats = [[*CHAT[1:5]], [USER, ASSISTANT], [USER | {"content": "<|im_end|>"}, ASSISTANT]]
    path = write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    assert len(load_documents(path, known_tokenizer("qwen 3"))) == 4
    expected = "1 chats have text that spells a special token, which it becomes, the first in row 3"
    assert expected in capfd.readouterr().out
    load_documents(f"{path}:train[:2]", known_tokenizer("qwen 3"))
    assert "special" not in capfd.readouterr().out
    path = write(tmp_path / "texts.jsonl", [{"content": f"<|im_start|>user\n{i}"} for i in "ab"])
    load_documents(path, known_tokenizer("qwen 3"))
    expected = "2 documents have text that spells a special token, which stays plain text, the fir"
    assert expected in capfd.readouterr().out


@pytest.mark.parametrize("count", [10, 50, 51])
def test_prompts_longer_than_the_sequence_are_dropped(count, tmp_path, capfd):
    """If more than half are too long, the error suggests a better length."""
    prompts = ["?" * (1 + i) if i < 100 - count else "?" * (99 + i) for i in range(100)]
    path = write(tmp_path / "chats.jsonl", [{"prompt": x, "completion": "x"} for x in prompts])
    rows = load_documents(path, max_seq_length=150)
    if count > 50:
        with pytest.raises(Problem, match="in 51 of 100 documents, the answers start after"):
            chat_dataset.draw_documents("x", "train", rows, 0, 150)
        return
    rows = chat_dataset.draw_documents("x", "train", rows, 0, 150)
    assert len(rows) == 100 - count and rows.column_names == ["input_ids", "labels"]
    assert f"  {count} are left out, because their answers start" in capfd.readouterr().out


@pytest.fixture(scope="module")
def small() -> Dataset:
    """Return 300 different documents of 2 to 31 tokens."""
    ids = [[i % 250 + 3, *range(3, 4 + i % 30)] for i in range(300)]
    columns = {"input_ids": ids, "labels": [[-100, *row[1:]] for row in ids]}
    features = Features({k: chat_dataset.FEATURES[k] for k in columns})
    return Dataset.from_dict(columns, features).with_format("numpy")


def test_packs_depend_on_seed_and_epoch(small):
    def packs(seed: int, epoch: int) -> list[list[list[int]]]:
        dataset = chat_dataset.PackedDataset(small, 64, seed)
        start = epoch * len(dataset)
        packs = (dataset[i] for i in range(start, start + len(dataset)))
        return [[row["input_ids"].tolist() for row in pack] for pack in packs]

    first = packs(0, 0)
    assert first == packs(0, 0)
    for other in packs(0, 1), packs(1, 0):
        assert other != first and len(other) == len(first)
        flat = (sorted(ids for pack in part for ids in pack) for part in (first, other))
        assert len({json.dumps(part) for part in flat}) == 1


def test_pack_takes_the_max_seqlen_that_fits():
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
    """A rank without samples left gets an empty batch."""
    batch = chat_dataset.collate([])
    assert batch["input_ids"].tolist() == batch["position_ids"].tolist() == [[0] * 8]
    assert batch["labels"].tolist() == [[-100] * 8]
    assert batch["tokens"] == batch["targets"] == 0


@pytest.mark.parametrize(
    "row, message",
    [
        ({"instruction": "a", "input": "c", "output": "b"}, "Its columns are: instruction, input"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "has no chats that can be read"),
        ({"messages": [{"from": "human", "value": "a"}]}, "the role None is not one of"),
        ({"messages": [USER, ASSISTANT | {"weight": 0}]}, "turn has weight, an unknown key"),
        ({"messages": [USER, ASSISTANT | {"train": "false"}]}, "has train 'false'. Use true or"),
        ({"messages": [USER, ASSISTANT], "train": False}, "train would be ignored"),
        ({"messages": [USER, ASSISTANT], "history": [["a", "b"]]}, "history would be ignored"),
        ({"prompt": "a", "completion": "b", "label": False}, "label would be ignored"),
        ({"prompt": "a", "completion": "b", "rejected": "c"}, "rejected would be ignored"),
        ({"messages": json.dumps([ASSISTANT])}, "the chat has no assistant turn to train on"),
        ({"messages": [USER, ASSISTANT], "tools": "[]"}, "tools is empty or not a list"),
        ({"messages": [USER, ASSISTANT | {"content": None}]}, "turn is None, not text"),
        (
            {"messages": [USER, CALL_TURN | {"tool_calls": [{"name": "f", "arguments": "{}"}]}]},
            "the call to f has no object `arguments`",
        ),
    ],
)
def test_rows_are_refused_without_the_optional_formats(row, message, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_dataset.chat_formats, "normalize", lambda row, form: row)
    monkeypatch.setattr(chat_dataset.chat_formats, "find_columns", lambda name, x, form, args: form)
    path = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(Problem, match=message):
        load_documents(path)


def test_messages_and_pairs_train_without_the_optional_formats(tmp_path, monkeypatch):
    chats = [
        {"messages": [SYSTEM, USER, ASSISTANT], "id": 1},
        {"prompt": "a", "completion": "b", "system": "c"},
        {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
        {"q": "a", "r": "b", "system": "c"},
    ]
    flags = {"prompt_column": "q", "completion_column": "r"}
    paths = [write(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate(chats)]
    expected = load_documents(paths[0])[:]
    monkeypatch.setattr(chat_dataset.chat_formats, "normalize", lambda row, form: row)
    monkeypatch.setattr(chat_dataset.chat_formats, "find_columns", lambda name, x, form, args: form)
    for path, row in zip(paths, chats, strict=True):
        assert load_documents(path, **(flags if "q" in row else {}))[:] == expected
    context = {"prompt": [USER, ASSISTANT, USER], "completion": "b"}
    document = load_documents(write(tmp_path / "context.jsonl", [context]))[0]
    assert len(target_texts(document["input_ids"], document["labels"], byt5())) == 1
    with pytest.raises(
        Problem, match="columns are: q, r, system. Write messages, or pass --prompt"
    ):
        load_documents(paths[3])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_tokenized_rows_are_read(suffix, tmp_path):
    rows = [{"input_ids": [5 + i, 6, 1], "labels": [-100, 6, 1]} for i in range(60)]
    path = tmp_path / f"rows{suffix}"
    save = {".jsonl": Dataset.to_json, ".parquet": Dataset.to_parquet, "": Dataset.save_to_disk}
    save[suffix](Dataset.from_list(rows), path)
    train, val = chat_dataset.load(chat_dataset.Data(dataset=[str(path)]), byt5())
    sets = [part.dataset.with_format(None) for part in (train, val[str(path)])]
    assert sorted(row["input_ids"] for part in sets for row in part) == sorted(
        row["input_ids"] for row in rows
    )
    assert all(row["labels"] == [-100, 6, 1] for part in sets for row in part)
    assert 1 <= len(sets[1]) <= 6


@pytest.mark.parametrize(
    "row, message",
    [
        ({"input_ids": [5, 385]}, "input_ids has other tokens than the tokenizer's 384"),
        ({"input_ids": [5] * 300}, "300 tokens, but --max-seq-length allows 129"),
        ({"input_ids": []}, "input_ids is empty or not a list of integers"),
        ({"labels": [5]}, "labels must be one per token"),
        ({"labels": [5, 9, 7]}, "labels must be one per token"),
        ({"labels": [-100] * 3}, "labels must be one per token"),
        ({"labels": [-100, 6.0, 7.0]}, "labels must be one per token"),
        ({"input_ids": [5, 6, 0]}, "the tokens end in padding"),
        ({"input_ids": [5, 1, 1]}, "the tokens end in padding"),
        ({"attention_mask": [0, 1, 1]}, "attention_mask excludes tokens"),
        ({"completion_mask": [0, 1, 1], "labels": None}, "completion_mask excludes tokens"),
    ],
)
def test_invalid_tokens_are_refused(row, message, tmp_path):
    good = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    bad = {key: x for key, x in (good | row).items() if x is not None}
    path = write(tmp_path / "rows.jsonl", [good, good, bad])
    with pytest.raises(Problem, match=f"rows.jsonl, row 3: {message}"):
        load_documents(path, max_seq_length=128)
