"""Chats for supervised fine-tuning: rows to documents with exact targets. Any rank may call it."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

import prepare.chat_formats as chat_formats  # optional: chat_formats
import prepare.template_checks as checks  # optional: template_checks
from core.ranks import Problem, print0
from prepare import columns, losses, read, sets, tables, tokens
from prepare.columns import CHAT, MORE, PAIR, Form, forms_of
from prepare.rows import print_cut, stable_hash
from prepare.sets import Parts
from prepare.templates import answer_ends as answer_ends
from prepare.templates import ids_of, markers_of, text_of
from prepare.templates import set_chat_template as set_chat_template

IDS = List(Value("int32"))
NUMBER = Value("int64")
FEATURES = {
    "input_ids": IDS,
    "labels": IDS,
    "has_target": Value("bool"),
    "lost": NUMBER,
    "key": NUMBER,
}
ROLES = ("system", "user", "assistant", "tool")
TURN_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content",
             "thinking", "train")  # fmt: skip
# What stands for a call or for tools, which are read from tool_calls and the column tools.
OTHER_CALLS = ("function_call", "functions", "tools")
TEXT = "--text-column {}"
FORMS = forms_of(CHAT, "messages", *MORE) + forms_of(PAIR, "prompt completion", *MORE)
FORMS = chat_formats.FORMS  # optional: chat_formats
FORMS = FORMS + forms_of(TEXT, "content") + forms_of(TEXT, "input_ids", "labels")


@dataclass
class Rendered:
    """A document of a chat as text, with the turn, start and end of each answer that is a target.
    `is_ended`: whether a marker ends the last one."""

    text: str
    answers: list
    is_ended: bool


def draw_documents(
    name: str, split: str, documents: Dataset, limit: int, tokenizer: Tokenizer, args: Any
) -> Dataset:
    """Return `limit` random documents (0: all), without those whose first answer starts after
    --max-seq-length. Raise Problem if these are more than half."""
    documents = sets.sample(name, split, documents, limit)
    length = args.max_seq_length
    print_cut(f"{name}, {split}", "--max-seq-length", length, documents["lost"][:])
    kept = np.flatnonzero(documents["has_target"][:])
    counts = f"{len(kept):,} of {len(documents):,} documents have an answer within that"
    if 2 * len(kept) < len(documents):
        raise Problem(f"{name}: {counts}, --max-seq-length {length}. Raise it.")
    if len(kept) < len(documents):
        print0(f"{name}, {split}: {counts}, and the others are left out")
    return documents.select(kept).select_columns(["input_ids", "labels"])


def load_documents(spec: str, tokenizer: Tokenizer, args: Any) -> Parts:
    """Return the documents of one --dataset argument by split: those that its rows are or contain,
    with FEATURES and at most --max-seq-length + 1 tokens."""
    length = args.max_seq_length + 1
    parts = {}
    for part, table in read.read(spec, args.dataset_config).items():
        forms = forms_for(table.columns, args)
        form = columns.find_form(spec, table.columns, forms, args)
        encode_row = encode_text if form.flags == TEXT else encode_chat
        if form.columns == ("input_ids",):
            encode_row = encode_tokens
        function = partial(encode_row, form=form, tokenizer=tokenizer, length=length)
        parts[part] = tables.map_rows(spec, table, function, FEATURES, args)
    return parts


def forms_for(names: list, args: Any) -> list:
    """Return the FORMS of a data set with the columns `names`: without those of pairs if it has
    chats, too, unless flags name the pairs."""
    if args.completion_column in names:
        return FORMS
    has_chats = any(form.flags == CHAT and form.columns[0] in names for form in FORMS)
    return [form for form in FORMS if not (has_chats and form.flags == PAIR)]


def samples_of(documents: list, prompt: Any, length: int, **notes: Any) -> list:
    """Return documents, ids and labels, as samples of at most `length` tokens, with `notes` about
    their row. Rows with one `prompt`, which is all before the first answer, are in one split."""
    key = stable_hash(repr(prompt), size=7)
    samples = []
    for ids, labels in documents:
        sample = {
            "input_ids": ids[:length],
            "labels": labels[:length],
            "has_target": {*labels[:length]} != {-100},
            "lost": max(0, len(ids) - length),
            "key": key,
        }
        samples.append(sample | notes)
    return samples


def encode_tokens(row: dict, form: Form, tokenizer: Tokenizer, length: int) -> list:
    """Return the sample that a tokenized row is. Raise ValueError if it cannot be trained on."""
    ids = tokens.check_tokens(row, "input_ids", "--max-seq-length", length, tokenizer)
    labels = [-100, *row.get("labels", ids)[1:]]
    if len(labels) != len(ids) or {*labels} == {-100}:
        raise ValueError("labels must be one per token, and not all -100")
    before = -100
    for token, label in zip(ids, labels, strict=True):
        if str(label) not in (str(token), "-100"):  # True is not 1
            raise ValueError(f"labels must be -100 or the token, not {label} for {token}")
        # Other tools take EOS for padding.
        if token == tokenizer.eos_token_id and label == -100 != before:
            raise ValueError("labels exclude the EOS after a target: the model would not stop")
        before = label
    first = np.argmax(np.array(labels) != -100)  # target
    return samples_of([(ids, labels)], ids[:first] if first > 1 else ids, length)


def encode_text(row: dict, form: Form, tokenizer: Tokenizer, length: int) -> list:
    """Return the sample of a plain document: BOS if the tokenizer adds it, text, EOS. Raise
    ValueError if it is empty, not text, or a chat."""
    check_columns(row, form, tokenizer)
    text = row.get(*form.columns)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the document is {text!r}, not text")
    chat_formats.check_text(text)  # optional: chat_formats
    ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    change = losses.find_change(text, ids, tokenizer)
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return samples_of(
        [(ids, [-100, *ids[1:]])],
        text,
        length,
        mark=losses.find_mark(text, tokenizer),
        change=change,
    )


def encode_chat(row: dict, form: Form, tokenizer: Tokenizer, length: int) -> list:
    """Return the documents of a chat as samples, and add the values of its turns that are not read
    to the row. Raise ValueError if the row is unusable."""
    check_columns(row, form, tokenizer)
    chat, whole_turns = read_chat(row, form)
    for key, values in columns.values_of(whole_turns, TURN_KEYS).items():
        row[f"{key} of turns"] = {*values}
    documents, rendered = encode(chat, tokenizer)
    ids, _ = documents[-1]
    change = losses.find_change(rendered, ids, tokenizer, is_rendered=True)
    turns, _ = chat
    first = [turn["role"] for turn in turns].index("assistant")
    return samples_of(
        documents,
        turns[:first] or turns,
        length,
        mark=losses.find_mark(str(chat), tokenizer),
        change=change,
    )


def check_columns(row: dict, form: Form, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a text of a row has the header of answers, as a rendered chat has."""
    header = markers_of(tokenizer).header
    for column in form.columns:
        value = row.get(column)
        if header and isinstance(value, str) and header in value:
            raise ValueError(f"{column} has a rendered chat ({header!r} in it). Write messages")


def read_chat(row: dict, form: Form) -> tuple:
    """Return the chat in one or two columns of a row, and its turns with all their keys. A turn is
    not a target if its `train` is False. Raise ValueError if the row is unusable."""
    check_preferences(row, form)
    row = chat_formats.normalize(row, form)  # optional: chat_formats
    turns = (as_objects if len(form.columns) == 1 else read_pair)(row, *form.columns)
    for column in ("system", "system_prompt"):
        turns = with_system(turns, column, row.get(column))
    read = []
    for turn in turns:
        check_turn(turn)
        read.append({key: turn[key] for key in turn if key in TURN_KEYS})
    if not any(map(is_target, read)):
        raise ValueError(
            "the chat has no assistant turn to train on (if it is in another column, pass "
            "--prompt-column and --completion-column)"
        )
    tools = as_objects(row, "tools") if row.get("tools") else None
    return (read, tools), turns


def check_preferences(row: dict, form: Form) -> None:
    """Raise Problem for unpaired preferences, whose answers may be bad ones, unless flags name the
    columns that are read."""
    tag = row.get("kto_tag")
    if tag is None and (form.flags == CHAT or "completion" in form.columns):
        tag = row.get("label")  # beside other pairs, it is the class of an answer
    if str(tag).lower() in ("true", "false") and not form.is_named:
        raise Problem(
            f"label or kto_tag is {tag}, as in unpaired preferences. Delete the rows where it is "
            f"false, and pass {form.flags.format(*form.columns)}"
        )


def with_system(turns: list, column: str, system: Any) -> list:
    """Return turns with the `system` text of a column first. Raise ValueError if they have another
    one."""
    if system and turns[0].get("role") != "system":
        turns = [{"role": "system", "content": system}, *turns]
    if system and turns[0].get("content") != system:
        raise ValueError(f"the column {column} is not the system turn, or another system column")
    return turns


def read_pair(row: dict, first: str, completion: str) -> list:
    """Return the turns of a prompt, a text or a list of turns, and of its completion. In a prompt,
    the assistant's turns are no targets unless they say so."""
    turns = []
    for turn in as_objects(row, first, "user"):
        is_answer = turn.get("role") == "assistant"
        turns.append({"train": False} | turn if is_answer else turn)
    answers = as_objects(row, completion, "assistant")
    if answers[0].get("role") != "assistant":
        way = CHAT.format(completion)
        raise ValueError(f"{completion} is no answer. If it has chats, pass only {way}")
    return turns + answers


def as_objects(row: dict, key: str, role: str = "") -> list:
    """Return the list of objects in `row[key]`; with `role`, another value is the content of a
    turn. Raise ValueError if there is no such list, or an empty one."""
    value = row.get(key)
    if role and not isinstance(value, list):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{key} is no list of objects. Turns are objects with role and content")
    return value


def check_turn(turn: dict) -> None:
    """Raise ValueError unless a turn has a known role, text and complete calls."""
    role, content, calls = turn.get("role"), turn.get("content"), turn.get("tool_calls")
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {ROLES}")
    if not isinstance(content, str):
        raise ValueError(f"the {role}'s turn is {content!r}, not text")
    if role == "assistant" and not (calls or content.strip()):
        raise ValueError("the assistant's turn is empty")
    for key in OTHER_CALLS:
        if turn.get(key):
            raise ValueError(f"{key} of a turn is not read. Write tool_calls, or a column tools")
    for call in as_objects(turn, "tool_calls") if calls else ():
        function = call.get("function", call)
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"the call {function} has no name or no object `arguments`")


def is_target(turn: dict) -> bool:
    """Return whether a turn is trained on."""
    return turn["role"] == "assistant" and turn.get("train", True) is True


def encode(chat: tuple, tokenizer: Tokenizer) -> tuple:
    """Return the documents of a chat, and the text of the last. Raise an error if the template is
    not fit for it. Targets are the tokens of the assistant's turns, from after the header through
    the end marker. A first token is none: nothing predicts it. EOS is appended to an answer that
    ends a document."""
    rendered = render(chat, tokenizer)
    checks.check_chat(chat, rendered, tokenizer)  # optional: template_checks
    documents = []
    for document in rendered:
        documents += tokenize(document.text, document.answers, tokenizer)
    eos = tokenizer.eos_token_id
    for ids, labels in documents:
        labels[0] = -100
        if labels[-1] != -100 and ids[-1] != eos:
            ids.append(eos)
            labels.append(eos)
    return documents, rendered[-1].text


def render(chat: tuple, tokenizer: Tokenizer) -> list:
    """Return a chat's documents as texts, with the answers in each. Each answer is a target in one
    text, rendered without the turns after it: some templates drop reasoning before the last
    question. Raise Problem if an answer does not start with its generation prompt."""
    turns, _ = chat
    documents = []
    for i, turn in enumerate(turns):
        if not is_target(turn):
            continue
        prompt = text_of(chat, i, tokenizer, is_prompt=True)
        text = text_of(chat, i + 1, tokenizer)
        if not text.startswith(prompt):
            raise Problem(
                f"turn {i + 1}: the chat template does not start the answer with its generation "
                "prompt. Pass --chat-template chatml, or add reasoning_content to the answers if "
                "the template renders it"
            )
        spans = []
        if documents and documents[-1].is_ended and text.startswith(documents[-1].text):
            spans = documents.pop().answers
        spans = [*spans, (i, len(prompt), len(text))]
        tail = markers_of(tokenizer).tails["tool_calls" in turn]
        documents.append(Rendered(text, spans, tail != ""))
    return documents


def tokenize(text: str, answers: list, tokenizer: Tokenizer) -> list:
    """Return the documents of a text as ids and labels, given the answers in it. The tokens before
    each answer are those of its prompt alone.

    A token of the whole text may span the end of a prompt, or of an answer. Generation produces no
    such token, so each answer then gets a document of its own, cut there. Between the brackets are
    tokens, and the prompt ends after the first line break:

        together  [<assistant>] [\\n\\n] [2] [</s>]
        prompt    [<assistant>] [\\n]
        answer                       [\\n] [2] [</s>]
        ids       [<assistant>] [\\n] [\\n] [2] [</s>]    labels: -100 -100 \\n 2 </s>
    """
    ends = set()
    for _, start, end in answers:
        ends |= {start, end}
    prefixes = tokenize_prefixes(text, ends, tokenizer)
    documents = []
    for _, start, end in answers:
        prompt = prefixes[start]
        ids = join_answer(prompt, text[start:end], prefixes[end], tokenizer)
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        if documents:
            before, known = documents[-1]
            if prompt[: len(before)] == before:
                labels[: len(before)] = known
                documents.pop()
        documents.append((ids, labels))
    return documents


def join_answer(prompt: list, answer: str, together: list, tokenizer: Tokenizer) -> list:
    """Return the tokens of a prompt and its answer: `together`, or separately if a token spans the
    end of the prompt, or if its last token would strip the answer's spaces."""
    is_stripped = False
    if prompt and answer[:1].isspace():
        last = tokenizer.added_tokens_decoder.get(prompt[-1])
        is_stripped = last is not None and last.rstrip
    if together[: len(prompt)] == prompt and not is_stripped:
        return together
    separate = prompt + ids_of(answer, tokenizer)
    if not is_stripped and tokenizer.decode(separate) != tokenizer.decode(together):
        raise ValueError("a token spans the end of the prompt of an answer")
    return separate


def tokenize_prefixes(text: str, ends: set, tokenizer: Tokenizer) -> dict:
    """Return the tokens of text[:end] by end. The tokens from a special token do not depend on the
    text before it, so each text between these is tokenized once."""
    marks = [match.start() for match in losses.special_tokens(tokenizer).finditer(text)]
    pieces = {}
    for end in ends:
        places = [0, *(mark for mark in marks if 0 < mark < end), end]
        pieces[end] = [text[start:stop] for start, stop in itertools.pairwise(places)]
    texts = [*{*itertools.chain(*pieces.values())}]
    ids = dict(zip(texts, ids_of(texts, tokenizer), strict=True))
    return {end: [*itertools.chain(*map(ids.get, pieces[end]))] for end in ends}


load = partial(sets.load_sets, load_parts=load_documents, draw=draw_documents)
