"""chat_dataset.py: which tokens are trained on, how documents are packed, what is refused."""

import json
import os
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
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
    QWEN_3,
    REWRITING,
    TOOLS,
)
from conftest import ROOT
from datasets import Dataset, Features
from jinja2 import TemplateError
from runtime.rows import bad_rows, chat_formats, chat_templates, readers
from runtime.rows.chat_templates import PROMPTER
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import chat_dataset
from runtime.identity import as_lists

SEED_TASKS = ROOT.parent / "shared" / "data" / "seed_tasks.jsonl"
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PAIR = [USER, ASSISTANT]
SYSTEM, RESULT = {"role": "system", "content": "c"}, {"role": "tool", "content": "3", "name": "f"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Bath", "days": 2}}}
EMPTY = ASSISTANT | {"content": "\n"}
CALLING = ASSISTANT | {"content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "description": "weather", "parameters": {}}}
UNKNOWN = "the tokenizer's chat template does not know {}: " + chat_templates.ADVICE
CANNOT = "the tokenizer's chat template cannot write {}"
TOOLS_AS_TEXT = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
)
NO_TEXT = 'can only concatenate str (not "dict") to str'
ASKED = (
    "the chat template renders an answer otherwise than it asks for one, so the model would learn "
    "what it will not be asked"
)
TWICE = "the assistant's after the assistant's"
# Only a question can be answered.
USER_IS_LAST = (
    "{% if add_generation_prompt and messages[-1].role != 'user' %}"
    "{{ raise_exception('a question is missing') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt else '' }}"
)
REWRITTEN = [USER, ASSISTANT | {"content": "x</think>y"}, USER, ASSISTANT]
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
KNOWN_CHATS = {
    "plain": CHAT,
    "no system": CHAT[1:],
    "one answer": CHAT[:3],
    "ends with a question": CHAT[:6],
    "thoughts": THOUGHTS,
    "thoughts, then a question": THOUGHTS[:4],
    "tools": [USER, CALLING, RESULT, ASSISTANT, CHAT[1], CALLING, RESULT, RESULT, ASSISTANT],
}
KNOWN_PAIRS = [
    (name, chat) for name in KNOWN for chat in KNOWN_CHATS if chat != "tools" or name in TOOLS
]
# In how many documents, if not one: empty thoughts stand in the last turn alone, and what Mistral
# puts before the last question is not where it was.
SEVERAL = {
    "qwen 3": {"plain": 3, "no system": 3, "ends with a question": 2, "thoughts": 3, "tools": 4},
    "mistral": {"plain": 3, "ends with a question": 2, "thoughts": 3, "tools": 2},
}
ANSWERS = [turn["content"] for turn in CHAT if turn["role"] == "assistant"]
PLAIN = [f" {answer} <|endoftext|>" for answer in ANSWERS]  # what PROMPTER makes of them


def arguments(**changes: object) -> Namespace:
    """Return the defaults of the flags, a seed, and `changes`."""
    parser = ArgumentParser()
    chat_dataset.add_arguments(parser)
    args = vars(parser.parse_args([])) | {"seed": 0} | changes
    return Namespace(**args | chat_dataset.resolve_arguments(Namespace(**args)))


def bpe(words: bool = True, **special: object) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained until it has words; or, without `words`, the commonest strings.

    It puts BOS, where there is one, before a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    rendered = letters().apply_chat_template(CHAT, tokenize=False)
    lines = [rendered] * 4 + [f"{turn['content']} <|endoftext|> <|prompter|>" for turn in CHAT]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=480 if words else 276, **options)
    tokenizer.train_from_iterator(lines, trainer)
    if bos := special.get("bos_token"):
        tokenizer.add_special_tokens([bos])
        bos = {"single": f"{bos} $A", "special_tokens": [(bos, tokenizer.token_to_id(bos))]}
        tokenizer.post_processor = processors.TemplateProcessing(**bos)
    special = {"chat_template": PROMPTER} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def letters() -> ByT5Tokenizer:
    """A tokenizer of bytes, with a template that takes turns in any order."""
    return ByT5Tokenizer(chat_template=PROMPTER)


def with_template(tokenizer: object, template: str) -> object:
    """The tokenizer with a chat template of its own."""
    tokenizer.chat_template = template
    return tokenizer


def spans(ids: list[int], labels: list[int], tokenizer: object) -> list[str]:
    """The text of each run of targets; fails if a label is neither its token nor -100."""
    assert len(ids) == len(labels)
    runs = [[]]
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, -100)
        if label != -100:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs if run]


def encode(
    chat: list[dict], tools: list[dict] | None, tokenizer: object, train_on_prompt: bool
) -> list[tuple]:
    """Ids and labels of a chat's documents."""
    (found,) = chat_dataset.encode([(chat, tools)], tokenizer, train_on_prompt)
    return found


def only_document(chat: list[dict], tokenizer: object, train_on_prompt: bool = False) -> tuple:
    """Ids and labels of a chat that gives one document."""
    (document,) = encode(chat, None, tokenizer, train_on_prompt)
    return document


def targets(chat: list[dict], tokenizer: object, train_on_prompt: bool = False) -> list[str]:
    """The text of each run of targets in a chat."""
    return spans(*only_document(chat, tokenizer, train_on_prompt), tokenizer)


def ended(texts: list[str], eos: str) -> list[str]:
    """`texts` with EOS after the last."""
    return [*texts[:-1], texts[-1] + eos]


def documents(rows: list[dict], args: Namespace, tokenizer: object = None) -> Dataset:
    """Rows through `encoder`, as a script maps them."""
    kind = chat_formats.find_kind("rows.jsonl", list(rows[0]), args.text_column)
    rows = Dataset.from_list(rows)
    function = chat_dataset.encoder("rows.jsonl", kind, rows.features, tokenizer or letters(), args)
    features = Features(chat_dataset.FEATURES | bad_rows.ORIGIN)
    options = {"batched": True, "with_indices": True, "remove_columns": rows.column_names}
    rows = rows.map(function, features=features, **options)
    return bad_rows.good_rows("rows.jsonl", rows, args.bad_rows, verbose=True)


@pytest.fixture(scope="module")
def small() -> Dataset:
    """Three hundred documents of 2 to 31 tokens, each length several times, no two the same."""
    ids = [[i % 250 + 3, *range(3, 4 + i % 30)] for i in range(300)]
    columns = {"input_ids": ids, "labels": [[-100, *row[1:]] for row in ids]}
    return Dataset.from_dict(columns, Features({k: chat_dataset.FEATURES[k] for k in columns}))


@pytest.fixture(scope="module")
def seed_tasks() -> list[dict]:
    """The instructions of self-instruct as chats of two turns."""
    if not SEED_TASKS.is_file():
        pytest.skip(f"{SEED_TASKS} is missing")
    chats = []
    for task in map(json.loads, SEED_TASKS.read_text().splitlines()):
        instance = task["instances"][0]
        prompt = f"{task['instruction']}\n{instance['input']}".strip()
        turns = ("user", prompt), ("assistant", instance["output"])
        chats.append([{"role": role, "content": content} for role, content in turns])
    return [{"messages": chat} for chat in chats]


def test_defaults_serve() -> None:
    args = arguments()
    assert chat_dataset.check_arguments(args) == []
    assert args.dataset == ["docstrings"]


def test_template() -> None:
    """To the letter, and what is asked for an answer begins what comes with one."""
    tokenizer = bpe(bos_token="<s>", eos_token="</s>")

    def render(tokenizer: object, count: int, prompt: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": prompt}
        return tokenizer.apply_chat_template(CHAT[:count], **options)

    text = (
        "<|system|> Be brief. <|endoftext|> <|prompter|> Who wrote Emma? <|endoftext|> "
        "<|assistant|> Jane Austen wrote it. <|endoftext|>"
    )
    assert render(tokenizer, 3, False) == "<s>" + text
    assert render(letters(), 3, False) == text
    for count in range(1, len(CHAT)):
        for prompt in (False, CHAT[count]["role"] == "assistant"):
            assert render(tokenizer, 7, False).startswith(render(tokenizer, count, prompt))


def test_targets_with_the_built_in_template() -> None:
    """Bytes, and a BPE; their EOS is not what the template ends turns with."""
    assert targets(CHAT, letters()) == ended(PLAIN, "</s>")
    tokenizer = bpe(bos_token="<s>", eos_token="</s>")
    ids, labels = only_document(CHAT, tokenizer)
    assert len(ids) < len(tokenizer.decode(ids)) / 3, "the BPE does not merge"
    assert spans(ids, labels, tokenizer) == ended(PLAIN, "</s>")
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.eos_token_id) == 1


def test_eos_is_not_added_twice() -> None:
    """GPT-2's is what the template ends turns with; ChatML's ends a turn, a line break follows."""
    assert targets(CHAT, bpe(eos_token="<|endoftext|>")) == PLAIN
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = with_template(bpe(**special), CHATML)
    ids, _ = only_document(CHAT, tokenizer)
    assert ids[-1] == tokenizer.eos_token_id and ids.count(ids[-1]) == len(CHAT)


@pytest.mark.parametrize("make", [bpe, partial(ByT5Tokenizer, extra_ids=0)])
def test_targets_with_chatml(make: Callable) -> None:
    """Its markers are single tokens, and one of them EOS."""
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = with_template(make(**special), CHATML)
    expected = [f"{answer}<|im_end|>" for answer in ANSWERS]
    if make is not bpe:  # ByT5 strips what stands beside a special token
        expected[1] = expected[1].replace("  <|im_end|>", "<|im_end|>")
    assert targets(CHAT, tokenizer) == expected


def test_targets_with_a_llama_2_template() -> None:
    """The header of an answer belongs to the user's turn, and the system's turn to the first."""
    tokenizer = with_template(bpe(bos_token="<s>", eos_token="</s>"), LLAMA_2)
    assert targets(CHAT, tokenizer) == [f" {answer} </s>" for answer in ANSWERS]
    whole = tokenizer.decode(only_document(CHAT, tokenizer)[0])
    assert whole.startswith("<s>[INST] <<SYS>>Be brief.<</SYS>>Who wrote Emma? [/INST] Jane")


def test_tokens_that_cross_borders() -> None:
    """A BPE that knows no words merges across turns: answers stay whole, and prompts out."""
    tokenizer = bpe(words=False, bos_token="<s>", eos_token="</s>")
    tokens = tokenizer.convert_ids_to_tokens(only_document(CHAT, tokenizer)[0])
    assert any(">" in token.strip(">")[:-1] for token in tokens), "nothing crosses a border"
    found = targets(CHAT, tokenizer)
    assert len(found) == len(ANSWERS)
    for answer, span in zip(ANSWERS, found, strict=True):
        assert answer in span
        assert len(span) < len(answer) + 45
        assert not any(turn["content"] in span for turn in CHAT if turn["role"] != "assistant")


def test_the_assistant_speaks_first() -> None:
    """There is no chat to render before its turn, yet its header is no target."""
    expected = ended(PLAIN[:2], "</s>")
    for tokenizer in letters(), bpe(bos_token="<s>", eos_token="</s>"):
        found = targets(CHAT[2:5], tokenizer)
        assert [span.strip() for span in found] == [span.strip() for span in expected]


def test_no_eos_after_the_users_last_turn() -> None:
    assert targets(CHAT[:4], letters()) == PLAIN[:1]


def test_train_on_prompt() -> None:
    """All but the first token, also where turns are rewritten."""
    rewriting = with_template(letters(), REWRITING)
    for tokenizer in rewriting, bpe(bos_token="<s>", eos_token="</s>"):
        ids, labels = only_document(REWRITTEN, tokenizer, True)
        assert labels == [-100, *ids[1:]]
        assert ids[-1] == tokenizer.eos_token_id


def test_plain_documents() -> None:
    """The tokenizer's special tokens once, those in the text read as text."""
    tokenizer = letters()
    ((ids, labels),) = chat_dataset.encode_texts(["a</s>"], tokenizer)
    assert ids == [*(byte + 3 for byte in b"a</s>"), tokenizer.eos_token_id]
    assert labels == [-100, *ids[1:]]
    tokenizer = bpe(bos_token="<s>", eos_token="</s>")
    ((ids, labels),) = chat_dataset.encode_texts(["Jane</s>"], tokenizer)
    assert tokenizer.decode(ids[1:-1]) == "Jane</s>"
    assert ids[0] == tokenizer.bos_token_id and labels == [-100, *ids[1:]]
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1


def test_rows_of_each_kind() -> None:
    """A pair is a chat of two turns; keys of other columns, and of messages, do not matter."""
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with_more = [turn | {"name": None} for turn in pair]
    first = documents([{"messages": with_more, "prompt": "x", "completion": "y"}], arguments())
    second = documents([{"prompt": "a", "completion": "b", "content": "x"}], arguments())
    assert first[0] == second[0]
    text = documents([{"body": "ab", "id": 1}], arguments(text_column="body"))
    assert text[0]["input_ids"] == [100, 101, 1]
    assert text.features == first.features == Features(chat_dataset.FEATURES)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR},
        {"messages": [t | {"content": [{"type": "text", "text": t["content"]}]} for t in PAIR]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": "a", "completion": [ASSISTANT]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "input": " \n", "output": "b"},
        {"instruction": "a", "input": None, "output": "b"},
    ],
)
def test_formats(row: dict) -> None:
    """They say the same: the same tokens, and the same key."""
    pair = documents([{"prompt": "a", "completion": "b"}], arguments())
    assert documents([row], arguments())[0] == pair[0]


def test_longer_chats_of_the_formats() -> None:
    """ShareGPT's other speakers; parts of a text follow each other; an input after a blank line."""
    said = ["system", "human", "gpt", "observation", "tool", "function", "gpt"]
    chat = {"conversations": [{"from": speaker, "value": speaker} for speaker in said]}
    roles = ["system", "user", "assistant", "tool", "tool", "tool", "assistant"]
    turns = [{"role": role, "content": who} for role, who in zip(roles, said, strict=True)]
    assert chat_formats.read(chat, "sharegpt") == (turns, None)
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    asked = chat_formats.read(row, "alpaca")[0][0]
    assert asked == {"role": "user", "content": "Add.\n\n1 and 2"}
    parts = [{"type": "text", "text": text, "image_url": None} for text in ("a", "\n", "b")]
    row = {"messages": [USER | {"content": parts}, ASSISTANT]}
    assert chat_formats.read(row, "messages")[0][0]["content"] == "a\nb"


@pytest.mark.parametrize("arguments_of", [lambda x: x, json.dumps])
@pytest.mark.parametrize("tools_of", [list, json.dumps])
def test_tools_reach_the_template(arguments_of: Callable, tools_of: Callable) -> None:
    """Without the keys that Arrow adds, as other rows have them; JSON is read."""
    function = CALL["function"]
    call = CALL | {"function": function | {"arguments": arguments_of(function["arguments"])}}
    other = CALL | {"function": {"name": "g", "arguments": arguments_of({"sea": True})}, "id": "7"}
    turns = [
        [USER, ASSISTANT | {"content": None, "tool_calls": [made]}, RESULT, ASSISTANT]
        for made in (call, other)
    ]
    described = TOOL | {"function": TOOL["function"] | {"parameters": {"type": "object"}}}
    lists = [described], [TOOL | {"function": {"name": "g", "strict": True}}]
    rows = [
        {"messages": chat, "tools": tools_of(tools)}
        for chat, tools in zip(turns, lists, strict=True)
    ]
    tokenizer = known_tokenizer("qwen 2.5", bpe)
    found = documents(rows, arguments(), tokenizer)
    texts = [tokenizer.decode(row["input_ids"]) for row in found]
    for text, tool in zip(texts, lists, strict=True):
        assert f"<tools>\n{json.dumps(tool[0])}\n</tools>" in text
        assert "null" not in text and "None" not in text
    written = '<tool_call>\n{"name": "f", "arguments": {"city": "Bath", "days": 2}}\n</tool_call>'
    assert spans(found[0]["input_ids"], found[0]["labels"], tokenizer) == [
        f"\n{written}<|im_end|>",
        "b<|im_end|>",
    ]
    assert '{"name": "g", "arguments": {"sea": true}}' in texts[1]


def test_null_in_json_stays() -> None:
    """It was not Arrow that put it there."""
    call = {"name": "f", "arguments": '{"day": null}'}
    turns, _ = chat_formats.read({"messages": [USER, CALLING | {"tool_calls": [call]}]}, "messages")
    assert turns[1]["tool_calls"] == [{"name": "f", "arguments": {"day": None}}]
    for nothing in None, [], "", "[]", "null":
        row = {"messages": [USER, ASSISTANT], "tools": nothing}
        assert chat_formats.read(row, "messages") == ([USER, ASSISTANT], None)


def test_long_documents_are_cut() -> None:
    """To one token more than the length, which is only a target, and what is lost is counted."""
    args = arguments(max_seq_length=8)
    found = documents([{"content": "x" * n} for n in (3, 8, 9, 30)], args)
    assert [len(ids) for ids in found["input_ids"]] == [4, 9, 9, 9]
    assert [len(labels) for labels in found["labels"]] == [4, 9, 9, 9]
    assert found["cut"][:] == [0, 0, 1, 22]
    batch = chat_dataset.collate([chat_dataset.Packs(found, args)[0]])
    assert batch["input_ids"].shape == (1, 8)
    assert batch["labels"][0, -1] != -100


def test_keys() -> None:
    """They are those of what stands before the first answer, in every process."""
    turns = [[CHAT[1], turn, CHAT[3]] for turn in CHAT[2::2]] + [CHAT[:3], CHAT[2:4], CHAT[4:6]]
    keys = documents([{"messages": chat} for chat in turns], arguments())["key"][:]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[2:])) == 4
    text = documents([{"content": "a"}, {"content": "b"}, {"content": "a"}], arguments())["key"][:]
    assert text[0] == text[2] != text[1]
    assert text[0] == 24685227368937830


def test_held_out() -> None:
    """Five percent, equal keys together, always some on both sides."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(2**55, (2000,), generator=generator).tolist()
    rows = Dataset.from_dict({"key": keys + keys})
    train_set, val_set = readers.hold_out("x", rows, keys + keys)
    assert len(val_set) == 200 and val_set["key"][:100] == val_set["key"][100:]
    assert not set(train_set["key"]) & set(val_set["key"]) and len(train_set) == 3800
    rows = Dataset.from_dict({"key": [7, 3, 7]})
    assert readers.hold_out("x", rows, [7, 3, 7])[1]["key"][:] == [3]
    with pytest.raises(ValueError, match="no two rows differ"):
        readers.hold_out("x", rows, [5, 5, 5])


@pytest.mark.parametrize("length", [1024, 2048])
def test_packs_of_real_chats_are_full(length: int, seed_tasks: list[dict]) -> None:
    """To 95%; every document is there once; as many targets as without packing."""
    args = arguments(max_seq_length=length)
    rows = documents(seed_tasks, args)
    packs = chat_dataset.Packs(rows, args)
    padded = chat_dataset.Packs(rows, arguments(max_seq_length=length, packing=False))
    assert packs.fill >= 0.95
    assert len(padded) == len(rows) > len(packs)
    assert sorted(i for pack in packs.plan() for i in pack) == list(range(len(rows)))
    batches = [
        [chat_dataset.collate([pack]) for pack in packs],
        [chat_dataset.collate([padded[j] for j in range(i, i + 25)]) for i in range(0, 175, 25)],
    ]
    assert max(batch["input_ids"].size(1) for batch in batches[0]) <= length
    for counted in (lambda batch: int((batch["labels"] != -100).sum()), lambda x: x["tokens"]):
        packed, unpacked = (sum(map(counted, part)) for part in batches)
        assert packed == unpacked > 0
    assert packed == packs.positions == sum(map(len, rows["input_ids"])) - len(rows)
    assert packs.fill == packed / (len(packs) * length)


def test_packs_depend_on_seed_and_epoch(small: Dataset) -> None:
    """Their number does not."""

    def packs(seed: int, epoch: int) -> list[list[dict]]:
        found = chat_dataset.Packs(small, arguments(max_seq_length=64, seed=seed))
        found.set_epoch(epoch)
        return as_lists(list(found))

    first = packs(0, 0)
    assert first == packs(0, 0)
    again = chat_dataset.Packs(small, arguments(max_seq_length=64))
    for epoch in (0, 1, 0):  # forth and back
        again.set_epoch(epoch)
        assert (as_lists(list(again)) == first) == (epoch == 0)
    for other in packs(0, 1), packs(1, 0):
        assert other != first
        assert len(other) == len(first)
        flat = (sorted(d["input_ids"] for pack in part for d in pack) for part in (first, other))
        assert len({json.dumps(part) for part in flat}) == 1


def test_packs_of_selected_rows(small: Dataset) -> None:
    """The lengths are those of the rows that were selected."""
    packs = chat_dataset.Packs(small.select([29, 3, 3]), arguments(max_seq_length=64))
    assert [len(document["input_ids"]) for document in packs[0]] == [31, 5, 5]
    assert packs.positions == 38
    assert packs.span == pytest.approx((30**2 + 2 * 4**2) / 38)
    assert packs.fill == pytest.approx(38 / 64)


def test_pack_takes_the_longest_that_fits() -> None:
    """Of a full pack nothing is left over; what is too long stands alone, as all do at 0."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 5, 8, 2, 5, 11, 7]
    found = [[lengths[i] for i in pack] for pack in chat_dataset.pack(lengths, 10, generator)]
    assert found == [[11], [8, 2], [7, 3], [5, 5]]
    assert len(chat_dataset.pack(lengths, 0, generator)) == 7
    assert chat_dataset.pack([], 10, generator) == []


def document(*ids: int, prompt: int = 1) -> dict[str, list[int]]:
    """A document whose first `prompt` tokens are no targets."""
    return {"input_ids": list(ids), "labels": [-100] * prompt + list(ids[prompt:])}


def test_collate() -> None:
    """Two rows, one of them with two documents: nothing is predicted across their border."""
    rows = [[document(3, 4, 5, 6), document(7, 8, 9, 10, 11, prompt=3)], [document(*range(20, 29))]]
    batch = chat_dataset.collate(rows)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert (batch["targets"], batch["tokens"]) == (13, 15)
    assert batch["longest_document"] == 8
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "input_ids": [[3, 4, 5, 7, 8, 9, 10, 0], [20, 21, 22, 23, 24, 25, 26, 27]],
        "labels": [[4, 5, 6, -100, -100, 10, 11, -100], [21, 22, 23, 24, 25, 26, 27, 28]],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]],
        "cu_seq_lens": [0, 3, 7, 8, 16],
        "target_positions": [0, 1, 2, 5, 6, *range(8, 16)],
    }
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    assert types.pop("cu_seq_lens") == torch.int32
    assert set(types.values()) == {torch.int64}


def test_collate_rounds_the_width_up() -> None:
    batch = chat_dataset.collate([[document(*range(3, 13))], [document(3, 4)]])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
    assert batch["cu_seq_lens"].tolist() == [0, 9, 16, 17, 32]
    assert batch["longest_document"] == 15  # the padding: a kernel must compute that, too
    assert batch["position_ids"][1].tolist() == [0] * 16
    assert int((batch["labels"] != -100).sum()) == batch["tokens"] == 10


def test_collate_of_nothing() -> None:
    """A row without targets, for a rank that has nothing left."""
    batch = chat_dataset.collate([])
    assert batch["input_ids"].tolist() == batch["position_ids"].tolist() == [[0] * 8]
    assert batch["labels"].tolist() == [[-100] * 8]
    assert batch["cu_seq_lens"].tolist() == [0, 8] and batch["cu_seq_lens"].dtype == torch.int32
    assert batch["tokens"] == batch["targets"] == 0
    assert batch["labels"].dtype == batch["target_positions"].dtype == torch.int64


def test_values_out_of_range() -> None:
    args = arguments(max_seq_length=7, num_train_samples=-1, num_val_samples=-1)
    assert chat_dataset.check_arguments(args) == [
        "--max-seq-length 7 is out of range: it must be at least 8",
        "--num-train-samples -1 is out of range: it must be at least 0",
        "--num-val-samples -1 is out of range: it must be at least 0",
    ]


def test_columns() -> None:
    """In order of preference, or a sentence with those that are there and those that could be."""
    columns = ["content", "output", "input", "instruction", "conversations", "completion", "prompt"]
    counts = {"messages": 8, "prompt": 7, "sharegpt": 5, "alpaca": 4, "text": 3}
    for kind, count in counts.items():
        part = [*columns, "messages"][:count]
        assert chat_formats.find_kind("x", part, "content") == kind
    columns = ["id", "output", "input", "instruction", "tools"]
    assert chat_formats.used_columns("alpaca", columns, "content") == columns[1:]
    assert chat_formats.used_columns("text", columns, "id") == ["id"]
    with pytest.raises(ValueError) as error:
        chat_formats.find_kind("my.csv", ["prompt", "answer"], "body")
    assert str(error.value) == (
        "my.csv has columns prompt, answer: rename them to messages, or prompt and completion, "
        "or conversations, or instruction and output, or give --text-column prompt, if that holds "
        "whole documents"
    )


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"messages": []}, "messages is empty or not a list of {role, content}"),
        ({"messages": None}, "messages is empty or not a list of {role, content}"),
        ({"messages": "hello"}, "messages is empty or not a list of {role, content}"),
        ({"messages": ["hello"]}, "messages is empty or not a list of {role, content}"),
        ({"messages": {"role": ["user"]}}, "messages is empty or not a list of {role, content}"),
        (
            {"messages": [USER | {"role": "human"}, ASSISTANT]},
            "the role human is not one of system, user, assistant",
        ),
        ({"messages": [{"content": "a"}, ASSISTANT]}, "the role None is not one of system, user"),
        ({"messages": [USER, {"role": "assistant"}]}, "the assistant's turn is "),
        ({"messages": [USER | {"content": ["a"]}]}, "the user's turn is "),
        ({"messages": [USER]}, "no turn is the assistant's, so there is nothing to learn"),
        ({"messages": [USER, EMPTY, USER, ASSISTANT]}, "the assistant's turn is "),
        ({"messages": [USER | {"content": []}]}, "the user's turn is "),
        (
            {"messages": [USER | {"content": [{"type": "image"}]}, ASSISTANT]},
            "the user's turn has a part of type image, which is not text",
        ),
        (
            {"messages": [USER, CALLING | {"tool_calls": ["f"]}]},
            "tool_calls is not a list of {function}",
        ),
        ({"messages": [USER, CALLING | {"tool_calls": [{"id": 1}]}]}, "a tool call has no name"),
        (
            {"messages": [USER, CALLING | {"tool_calls": [{"name": "f", "arguments": "2, 3"}]}]},
            "the arguments of a call of f are no JSON object",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": "f"},
            "tools is neither a list of objects nor JSON of one",
        ),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
            "a turn of the prompt is the assistant's: give such chats as messages",
        ),
        ({"prompt": [], "completion": "b"}, "the user's turn is "),
        (
            {"prompt": ["a"], "completion": "b"},
            "prompt or completion is neither text nor a list of {role, content}",
        ),
        ({"prompt": "a", "completion": " "}, "the assistant's turn is "),
        ({"conversations": []}, "conversations is empty or not a list of {from, value}"),
        (
            {"conversations": [{"from": "bing", "value": "a"}]},
            "the speaker bing is not one of human, gpt, function, observation, system, user, "
            "assistant, tool",
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
            "the assistant's turn is ",
        ),
        ({"instruction": "", "output": "b"}, "the user's turn is "),
        ({"instruction": "a", "output": " "}, "the assistant's turn is "),
        ({"instruction": 3, "input": "c", "output": "b"}, "the user's turn is "),
        ({"instruction": "a", "input": 3, "output": "b"}, "input is not text"),
        ({"prompt": "a", "completion": ""}, "the assistant's turn is "),
        ({"prompt": None, "completion": "b"}, "the user's turn is "),
        ({"prompt": "a", "completion": 3}, "the assistant's turn is "),
        ({"content": ""}, "the document is empty or not text"),
        ({"content": 3}, "the document is empty or not text"),
        ({"content": None}, "the document is empty or not text"),
        ({"content": " \n"}, "the document is empty or not text"),
    ],
)
def test_bad_rows_are_named(row: dict, sentence: str) -> None:
    """By the data set and the number of the row, the first being 1; a batch may start anywhere."""
    kind = chat_formats.find_kind("my.jsonl", list(row), "content")
    function = chat_dataset.encoder("my.jsonl", kind, dict.fromkeys(row), letters(), arguments())
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    good = {"messages": [USER, ASSISTANT], "prompt": "a", "completion": "b", "content": "c"}
    good |= {"conversations": said, "instruction": "a", "output": "b"}
    batch = {column: [good.get(column), value] for column, value in row.items()}
    with pytest.raises(ValueError) as error:
        function(batch, [10, 11])
    assert str(error.value).startswith(f"my.jsonl, row 12: {sentence}")
    if kind != "text":
        with pytest.raises(ValueError) as error:
            chat_formats.read(row, kind)
        assert str(error.value).startswith(sentence)


def some_bad_rows(directory: Path, good: int, bad: int) -> Path:
    """A file of pairs, the first of which have an empty answer, or, every third, none."""
    rows = [{"prompt": f"{i}", "completion": "" if i % 3 else None} for i in range(bad)]
    rows += [{"prompt": f"{i} + 1", "completion": f"{i + 1}"} for i in range(good)]
    path = directory / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("large", [50_000, 10])
def test_bad_rows_are_left_out(
    large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """In several processes, too; the rows that are left are as without the others."""
    monkeypatch.setattr(readers, "LARGE", large)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    path = str(some_bad_rows(tmp_path, 30, 15))
    with pytest.raises(ValueError, match="pairs.jsonl, line 1: the assistant's turn is empty"):
        chat_dataset.load_documents(arguments(), letters(), path, verbose=True)
    capfd.readouterr()
    skip = arguments(bad_rows="skip")
    found = chat_dataset.load_documents(skip, letters(), path, verbose=True)
    printed = capfd.readouterr().out
    reason = "the assistant's turn is empty"
    assert f"{path}: rows of kind prompt (prompt, completion)\n" in printed
    assert f"{path}: 15 of 45 rows left out\n" in printed
    assert f"  15: {reason} (line 1, line 2, line 3, ...)\n" in printed
    with pytest.raises(ValueError, match="pairs.jsonl, line 1: "):  # though it is in the cache
        chat_dataset.load_documents(arguments(), letters(), path, verbose=True)
    (tmp_path / "good").mkdir()
    good = str(some_bad_rows(tmp_path / "good", 30, 0))
    for mode in "fail", "skip":
        args = arguments(bad_rows=mode)
        expected = chat_dataset.load_documents(args, letters(), good, verbose=False)
        assert [list(part) for part in found] == [list(part) for part in expected]


def test_too_many_bad_rows(tmp_path: Path) -> None:
    """Half of them may be."""
    args = arguments(bad_rows="skip")
    path = str(some_bad_rows(tmp_path, 5, 5))
    assert len(chat_dataset.load_documents(args, letters(), path, False)[0]) == 4
    path = str(some_bad_rows(tmp_path, 5, 6))
    with pytest.raises(ValueError) as error:
        chat_dataset.load_documents(args, letters(), path, False)
    assert str(error.value) == (
        f"{path}: 6 of 11 rows are bad, of which --bad-rows skip leaves out half at most; "
        "the first is line 1: the assistant's turn is empty"
    )


def test_reasons_are_counted(capsys: pytest.CaptureFixture) -> None:
    """The commonest first, and not more than ten of them."""
    bad = {i: f"reason {max(0, i - 5)}" for i in range(1, 20)}
    bad_rows.say_bad_rows("x", "19 of 40 rows", bad)
    first, *reasons, others = capsys.readouterr().out.splitlines()
    assert first == "x: 19 of 40 rows left out" and len(reasons) == 10
    assert reasons[0] == "  5: reason 0 (row 1, row 2, row 3, ...)"
    assert reasons[-1] == "  1: reason 9 (row 14)" and others == "  5: other reasons"


@pytest.mark.parametrize("large", [50_000, 10])
def test_documents_of_one_chat_stay_together(
    large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """In training or in validation, by their key; how many chats gave several is printed."""
    monkeypatch.setattr(readers, "LARGE", large)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    turns = [[CHAT[0], USER | {"content": str(i)}, *CHAT[2 : 3 + i % 2 * 2]] for i in range(60)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    tokenizer = known_tokenizer("qwen 3", ByT5Tokenizer)
    sets = chat_dataset.load_documents(arguments(), tokenizer, str(path), verbose=True)
    several = f"{path}: 30 chats gave 60 documents, as the chat template renders turns differently"
    assert several in capfd.readouterr().out
    assert sum(map(len, sets)) == 90
    keys = [set(part["key"][:]) for part in sets]
    assert not keys[0] & keys[1] and list(map(len, keys)) == [57, 3]
    assert sets[0].column_names == list(chat_dataset.FEATURES)
    assert len(chat_dataset.Packs(sets[0], arguments())) > 0


@pytest.mark.parametrize(
    "template, chat, sentence",
    [
        (
            LLAMA_2,
            [USER, USER, ASSISTANT],
            "turn 2, the user's after the user's: roles must alternate",
        ),
        (USER_IS_LAST, [USER, ASSISTANT, ASSISTANT], f"turn 3, {TWICE}: a question is missing"),
        (
            ASKS_FOR_THOUGHTS,
            [USER, ASSISTANT],
            f"turn 2, the assistant's after the user's: {ASKED}",
        ),
        (
            FORGETS_THE_SYSTEM,
            [SYSTEM, USER, ASSISTANT],
            f"turn 3, the assistant's after the user's: {ASKED}",
        ),
        (LLAMA_2, [USER, CALLING, RESULT, ASSISTANT], UNKNOWN.format("tool_calls")),
        (LLAMA_2, [USER, ASSISTANT, RESULT], UNKNOWN.format("the role tool")),
        (CHATML, [USER, ASSISTANT | {"thinking": "hm"}], UNKNOWN.format("thinking")),
        (TOOLS_AS_TEXT, [USER, CALLING], f"{CANNOT.format('tool_calls')}: {NO_TEXT}"),
        (
            chat_templates.LLAMA_2,
            [ASSISTANT, USER],
            "turn 1, the assistant's: the format of Llama 2 has the turns of user and assistant "
            "alternate, the first of them the user's, after one of the system at most",
        ),
        (PROMPTER, [USER, CALLING], UNKNOWN.format("tool_calls")),
    ],
)
def test_what_a_template_refuses(template: str, chat: list[dict], sentence: str) -> None:
    tokenizer = with_template(bpe(bos_token="<s>", eos_token="</s>"), template)
    function = chat_dataset.encoder(
        "my.jsonl", "messages", {"messages": None}, tokenizer, arguments()
    )
    with pytest.raises(ValueError) as error:
        function({"messages": [chat]}, [0])
    assert str(error.value) == f"my.jsonl, row 1: {sentence} ({bad_rows.ADVICE})"


def test_a_template_that_names_no_tool_may_know_them() -> None:
    """ChatML writes any role. One that says `tool` only to drop such turns does not know them."""
    chat = [USER, ASSISTANT, RESULT, ASSISTANT]
    tokenizer = with_template(known_tokenizer("chatml", bpe), CHATML)
    ids, labels = only_document(chat, tokenizer)
    assert "<|im_start|>tool\n3<|im_end|>" in tokenizer.decode(ids)
    assert spans(ids, labels, tokenizer) == ["b<|im_end|>", "b<|im_end|>"]
    dropping = CHATML.replace("{% for m in messages %}", "{% for m in messages "
                              "if m.role != 'tool' and not m.tool_calls %}")  # fmt: skip
    for said, turns in (("the role tool", chat), ("tool_calls", [USER, CALLING])):
        with pytest.raises(ValueError, match=UNKNOWN.format(said)):
            encode(turns, None, with_template(tokenizer, dropping), False)


SAID = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho wrote Emma?<|im_end|>\n",
        "<|im_start|>assistant\n",
        "Jane Austen wrote it.<|im_end|>\n",
        "<|im_start|>user\nAnd Ulysses?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama-2": (
        "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWho wrote Emma? [/INST]",
        "",
        " Jane Austen wrote it. </s>",
        "<s>[INST] And Ulysses? [/INST]",
    ),
    "llama-3": (
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho wrote Emma?<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Jane Austen wrote it.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd Ulysses?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_named_templates(name: str) -> None:
    """To the letter, as they are published; with BOS where the tokenizer has one."""
    question, header, answer, second = SAID[name]
    for bos in "<s>", None:
        tokenizer = bpe(bos_token=bos, eos_token="</s>", chat_template=chat_templates.NAMED[name])

        def render(count: int, prompt: bool, tokenizer: object = tokenizer) -> str:
            options = {"tokenize": False, "add_generation_prompt": prompt}
            return tokenizer.apply_chat_template(CHAT[:count], **options)

        expected = (bos or "") + question + header
        assert render(2, True) == expected
        assert render(3, False) == expected + answer
        assert render(4, True) == expected + answer + second.replace("<s>", bos or "")


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "is no file, and none of the names chatml, llama-2, llama-3, prompter"),
        ("{% for m in messages %}{{ m.content }}", "is no chat template in Jinja (Unexpected end"),
        ("# Read me", "is no chat template, as it leaves out what is said: give a file that"),
        (b"\xff\xfe", "is no chat template in Jinja ('utf-8' codec"),
        (CHATML, None),
        ("{{ raise_exception('never') }}", None),  # it may need more than a question and an answer
    ],
)
def test_what_is_no_chat_template(text: str | bytes | None, said: str, tmp_path: Path) -> None:
    """One sentence, before anything is started, that names the flag."""
    path = tmp_path / "own.jinja"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    problems = chat_dataset.check_arguments(arguments(chat_template=str(path)))
    assert [problem.startswith(f"--chat-template {path} {said}") for problem in problems] == (
        [True] if said else []
    )


def test_which_template_is_used_is_said(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Unless it is the tokenizer's own; and what of it the tokenizer takes apart."""
    (tmp_path / "own.jinja").write_text(CHATML)
    apart = "the chat template writes <|im_start|>, <|im_end|>, which are no single tokens of the"
    for own, wanted, template, words in (
        (None, None, chat_templates.LLAMA_2, ["the tokenizer has no chat template: it is given "
                                              "llama-2, which final/ and best/ have too"]),
        (LLAMA_2, None, LLAMA_2, []),
        (LLAMA_2, "llama-2", chat_templates.LLAMA_2,
         ["--chat-template llama-2 is the tokenizer's chat template, in place of its own"]),
        (None, "chatml", chat_templates.CHATML,
         ["--chat-template chatml is the tokenizer's chat template, which had none", apart]),
        (None, str(tmp_path / "own.jinja"), CHATML, ["own.jinja is the tokenizer's chat", apart]),
        (CHATML, None, CHATML, [apart]),
    ):  # fmt: skip
        tokenizer = bpe(bos_token="<s>", eos_token="</s>", chat_template=own)
        chat_templates.give(tokenizer, wanted)
        lines = capfd.readouterr().out.splitlines()
        assert tokenizer.chat_template == template and len(lines) == len(words)
        assert all(word in line for word, line in zip(words, lines, strict=True))
    chat_templates.give(known_tokenizer("chatml", bpe), None)
    assert capfd.readouterr().out == ""


def test_tools_that_a_template_does_not_know() -> None:
    """Of several templates that with the name tool_use is taken for a chat with tools."""
    with pytest.raises(ValueError, match="template does not know tools"):
        encode([USER, ASSISTANT], [TOOL], with_template(letters(), CHATML), False)
    several = {"default": CHATML, "tool_use": QWEN_3}
    tokenizer = with_template(known_tokenizer("qwen 3", bpe), several)
    for tools, template in (None, CHATML), ([TOOL], QWEN_3):
        found = encode([USER, ASSISTANT], tools, tokenizer, False)
        alone = with_template(known_tokenizer("qwen 3", bpe), template)
        assert found == encode([USER, ASSISTANT], tools, alone, False)


def known_tokenizer(name: str, make: Callable) -> object:
    """A tokenizer with the template and the special tokens of a kind of models."""
    template, bos, eos, special = KNOWN[name]
    options = {"eos_token": eos, "additional_special_tokens": special}
    if make is ByT5Tokenizer:
        options["extra_ids"] = 0
    elif bos:
        options["bos_token"] = bos
    return with_template(make(**options), template)


def rendered(chat: list[dict], tools: list | None, tokenizer: object, prompt: bool) -> list[int]:
    """The tokens of a chat, or of the question for an answer to it."""
    options = {"tokenize": False, "add_generation_prompt": prompt, "tools": tools}
    text = tokenizer.apply_chat_template(chat, **options)
    return tokenizer(text if prompt else text.rstrip(), add_special_tokens=False)["input_ids"]


def one_by_one(chat: list[dict], tools: list | None, tokenizer: object) -> list[tuple]:
    """For each answer the tokens that it has in common with the question for it, and the others."""
    found = []
    for i, turn in enumerate(chat):
        if turn["role"] == "assistant":
            asked = rendered(chat[:i], tools, tokenizer, True)
            answered = rendered(chat[: i + 1], tools, tokenizer, False)
            if i == len(chat) - 1 and answered[-1] != tokenizer.eos_token_id:
                answered.append(tokenizer.eos_token_id)
            same = [a == b for a, b in zip(asked, answered, strict=False)]
            at = [*same, False].index(False)
            found.append((asked[:at], answered[at:]))
    return found


@pytest.mark.parametrize("make", [bpe, ByT5Tokenizer])
@pytest.mark.parametrize("name, chat", KNOWN_PAIRS)
def test_answers_as_the_model_writes_them(name: str, chat: str, make: Callable) -> None:
    """Each is learned once, token for token, after what the model is asked with."""
    tokenizer = known_tokenizer(name, make)
    turns = KNOWN_CHATS[chat]
    tools = [TOOL] if chat == "tools" else None
    found = encode(turns, tools, tokenizer, False)
    learned = []
    for ids, labels in found:
        assert len(ids) == len(labels)
        for is_target, run in groupby(enumerate(labels), lambda pair: pair[1] != -100):
            places, values = zip(*run, strict=True)
            if is_target:
                learned.append((ids[: places[0]], list(values)))
    assert learned == one_by_one(turns, tools, tokenizer)
    assert len(found) == SEVERAL.get(name, {}).get(chat, 1)


def metaspace(**special: object) -> PreTrainedTokenizerFast:
    """A BPE of Llama 2's kind: only the first word of a text gets a space before it."""
    tokenizer = bpe(words=False, **special)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="G", prepend_scheme="first"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


def random_chats(seed: int, count: int) -> list[list[dict]]:
    """Chats of up to 20 turns, of words, spaces, other scripts, and what special tokens say."""
    draw = random.Random(seed)
    pieces = [*"ab \n\t-\u00a0é日ﬁ", "  ", "\n\n", "Emma", " wrote it", "e\u0301", "👩‍🔬", "[INST]"]
    pieces += ["<s>", "</s>", "[/INST]", "<|eot_id|>", "<|endoftext|>", "<|im", "_end|>"]
    pieces += ["<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>"]
    chats = []
    for _ in range(count):
        roles = ["user", "assistant"] * 10
        kind = draw.random()
        if kind < 0.3:
            roles = ["system", *roles]
        elif kind < 0.4:
            roles = roles[1:]
        elif kind < 0.6:
            roles = draw.choices(["system", "user", "assistant", "tool"], k=20)
        roles = roles[: draw.randint(2, 20)]
        contents = ["".join(draw.choices(pieces, k=draw.randint(0, 12))) for _ in roles]
        turns = zip(roles, contents, strict=True)
        chat = [{"role": role, "content": content} for role, content in turns]
        chats.append([*chat, ASSISTANT] if "assistant" not in roles else chat)
    return chats


@pytest.mark.parametrize("make", [bpe, partial(bpe, words=False), metaspace])
@pytest.mark.parametrize("name", KNOWN)
def test_tokens_are_as_of_each_beginning_made_anew(
    name: str, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendered by Transformers, and made into tokens whole, as by a tokenizer without offsets."""
    tokenizer = known_tokenizer(name, make)
    chats = random_chats(len(name), 20)

    def encoded() -> list:
        found = []
        for chat in chats:
            for on_prompt in False, True:
                try:
                    found.append(encode(chat, None, tokenizer, on_prompt))
                except (ValueError, TemplateError) as error:
                    found.append(str(error))
        return found

    quick = encoded()
    assert sum(isinstance(part, list) for part in quick) >= 20
    good = [chat for chat, found in zip(chats, quick[::2], strict=True) if isinstance(found, list)]
    together = chat_dataset.encode([(chat, None) for chat in good], tokenizer, False)
    assert together == [found for found in quick[::2] if isinstance(found, list)]

    def renderer(tokenizer: object, template: str, *_: object) -> Callable:
        options = {"tokenize": False, "chat_template": template}
        return partial(tokenizer.apply_chat_template, **options)

    monkeypatch.setattr(chat_templates, "restarts", lambda _: {})
    monkeypatch.setattr(chat_templates, "renderer", renderer)
    assert encoded() == quick


def test_what_is_learned_of_thoughts() -> None:
    """The first answer's with it, and not once more in the document of the second."""
    tokenizer = known_tokenizer("qwen 3", bpe)
    found = encode(THOUGHTS[:5], None, tokenizer, False)
    texts = [spans(ids, labels, tokenizer) for ids, labels in found]
    assert texts == [[turn["content"] + "<|im_end|>"] for turn in THOUGHTS[2:5:2]]
    whole = tokenizer.decode(found[1][0])
    assert "Hm, 2." not in whole and "Jane Austen wrote it." in whole


def test_thoughts_of_their_own() -> None:
    """Those that stand beside the content are learned like those within it."""
    beside = [*PAIR[:1], ASSISTANT | {"reasoning_content": "Hm.", "weight": 1}]
    within = [*PAIR[:1], ASSISTANT | {"content": "<think>\nHm.\n</think>\n\nb"}]
    tokenizer = known_tokenizer("qwen 3", bpe)
    found = [documents([{"messages": chat}], arguments(), tokenizer) for chat in (beside, within)]
    assert found[0][0] == found[1][0]
    assert "Hm." in tokenizer.decode(found[0][0]["input_ids"])


def test_eos_where_an_answer_ends_a_document() -> None:
    """Though the chat goes on; not after the user's last turn, which the second document has."""
    tokenizer = with_template(bpe(bos_token="<s>", eos_token="</s>"), REWRITING)
    found = encode([*REWRITTEN, USER], None, tokenizer, False)
    first = "<user>a<assistant>x</think>y</s>"
    second = "<user>a<assistant>y<user>a<assistant>b<user>a"
    assert [tokenizer.decode(ids) for ids, _ in found] == [first, second]
    assert [spans(*document, tokenizer) for document in found] == [
        ["<assistant>x</think>y</s>"],
        ["<assistant>b"],
    ]
    (only,) = encode(REWRITTEN[:3], None, tokenizer, False)
    assert tokenizer.decode(only[0]) == first


def write_pairs(path: Path, *answers: str) -> str:
    """A file of prompts and completions."""
    rows = [{"prompt": f"{path.stem} {i}", "completion": x} for i, x in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_weights_and_validation_chats_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Each data set is trained on whole, and as often as it says; all are validated on apart."""
    first = write_pairs(tmp_path / "a.jsonl", *"abcd")
    second = write_pairs(tmp_path / "b.jsonl", "one", "two", "three")
    val = write_pairs(tmp_path / "val.jsonl", *"xyz")
    args = arguments(dataset=[first, second], weights=[2, 1], val_dataset=[val, second])
    args.evaluate_only = args.prepare_only = False
    assert chat_dataset.check_arguments(args) == []
    train_set, val_sets = chat_dataset.load_sets(args, letters(), verbose=True)
    assert {name: len(rows) for name, rows in val_sets.items()} == {val: 3, second: 3}
    keys = train_set["key"][:]
    assert keys[:4] == keys[4:8] and len(set(keys)) == 7 and len(keys) == 11
    said = capsys.readouterr().out
    counts = [readers.count_targets(train_set.select(part)) for part in (range(4), range(8, 11))]
    total = 2 * counts[0] + counts[1]
    share = f"{2 * counts[0] / total:.1%}"
    assert f"{first}: 2 x {counts[0]} target tokens, {share} of an epoch's" in said
    assert f"{second}: 1 x {counts[1]} target tokens, {counts[1] / total:.1%} of" in said
    packs = chat_dataset.Packs(train_set, args)
    assert sorted(i for pack in packs.plan() for i in pack) == list(range(11))
    for wrong in ([1], [0, 1], [1, 1, 1]):
        args.weights = wrong
        (problem,) = chat_dataset.check_arguments(args)
        assert problem.startswith("--weights needs a whole number above 0 for each of the 2 --data")


@pytest.mark.parametrize("long, lost", [(10, False), (11, True), (50, True), (51, None)])
def test_losing_most_chats_is_no_aside(
    long: int, lost: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Above a tenth a warning, above half the end, whatever --bad-rows says; the length
    that is named keeps nine of ten."""
    prompts = ["?" * (1 + i) if i < 100 - long else "?" * (99 + i) for i in range(100)]
    path = tmp_path / "chats.jsonl"
    rows = [json.dumps({"prompt": prompt, "completion": "x"}) + "\n" for prompt in prompts]
    path.write_text("".join(rows))
    options = {"dataset": [str(path)], "evaluate_only": False, "prepare_only": False}
    args = arguments(max_seq_length=150, bad_rows="skip", **options)
    head = len("<|prompter|>  <|endoftext|> <|assistant|>")
    said = (
        f"{path}: {long} of 100 documents are left out, as their answers begin after "
        f"--max-seq-length 150: --max-seq-length {head + len(prompts[89])} keeps nine of ten"
    )
    for _ in range(2):  # the second time from the cache
        if lost is None:
            with pytest.raises(ValueError) as error:
                chat_dataset.load_sets(args, letters(), verbose=True)
            assert str(error.value) == f"{said}; a run leaves out half at most"
            continue
        train_set, val_sets = chat_dataset.load_sets(args, letters(), verbose=True)
        assert len(train_set) + len(val_sets[str(path)]) == 100 - long
        assert (f"WARNING: {said}\n" in capsys.readouterr().out) == lost
    args.max_seq_length = head + len(prompts[89])
    train_set, val_sets = chat_dataset.load_sets(args, letters(), verbose=True)
    assert len(train_set) + len(val_sets[str(path)]) == 90
    assert "WARNING" not in capsys.readouterr().out


def test_own_files_that_are_none(tmp_path: Path) -> None:
    """A directory, another kind, and one that is not there, for either flag."""
    (tmp_path / "x.txt").write_text("x")
    for name, said in (
        (tmp_path, "is a directory: name a file"),
        (tmp_path / "x.txt", "is of no known kind"),
        (tmp_path / "gone.jsonl", "is missing"),
    ):
        args = arguments(dataset=[str(name)], val_dataset=[str(name)])
        problems = chat_dataset.check_arguments(args)
        assert [problem.startswith("--val") for problem in problems] == [False, True]
        assert all(said in problem for problem in problems)
