"""Chats for supervised fine-tuning: rows to documents with exact targets, packed into sequences."""

import contextlib
import functools
import hashlib
import itertools
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow.compute
import torch
import tyro
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from core import reading
from core.args import Names, Range, Size
from core.ranks import Batch, Problem, print0
from optional import chat_formats  # optional: chat_formats

IDS, NUMBER = List(Value("int32")), Value("int64")
FEATURES = Features({"input_ids": IDS, "labels": IDS, "cut": NUMBER, "key": NUMBER,
                     "first_target": NUMBER, "spells": NUMBER})  # fmt: skip
# Instead of today's date, so that each start has the same texts.
FIXED_DATE = r"""{%- macro strftime_now(format) -%}{{- format | replace('%d', '26')
| replace('%-d', '26') | replace('%I', '12') | replace('%p', 'PM')
| replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024')
| replace('%y', '24') | replace('%a', 'Fri') | replace('%A', 'Friday') | replace('%H', '12')
| replace('%M', '00') | replace('%S', '00') -}}{%- endmacro %}"""
ROLES = ("system", "user", "assistant", "tool")
TURN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"}
TURN_KEYS |= {"thinking", "train"}
NO_ARGUMENTS = {"parameters", "args", "input"}  # names of arguments in other formats of calls
# Columns that change what a row teaches: a row that has them is refused.
UNREAD = """history input context functions label kto_tag chosen rejected rejected_response
rejected_messages images videos audios image video audio mask weight loss train training trainable
loss_mask loss_scale loss_weight"""
# Each question and its answer form a text from BOS to EOS. The markers are plain text.
LLAMA_2 = r"""{%- set turns, head = messages, '' -%}
{%- if turns and turns[0]['role'] == 'system' -%}
{%- set head = '<<SYS>>\n' + turns[0]['content'] | trim + '\n<</SYS>>\n\n' -%}
{%- set turns = turns[1:] -%}{%- endif -%}{%- for turn in turns -%}
{%- if turn['role'] != ('assistant' if loop.index0 % 2 else 'user') -%}
{{- raise_exception('in Llama 2\'s format user and assistant alternate, after at most one system '
'turn; --chat-template chatml takes any order, and tools') -}}
{%- elif turn['role'] == 'user' -%}
{{- (bos_token or '') + '[INST] ' + (head if loop.first else '') -}}
{{- turn['content'] | trim + ' [/INST]' -}}
{%- else -%}{{- ' ' + turn['content'] | trim + ' ' + (eos_token or '') -}}
{%- endif -%}{%- endfor -%}"""
TEMPLATES = {"llama-2": LLAMA_2}
TEMPLATES |= chat_formats.TEMPLATES  # optional: chat_formats
ADVICE = "Pass a --chat-template that renders it, such as chatml or Qwen 2.5's"

Row = dict[str, Any]
Turns = list[Row]
Chat = tuple[Turns, Turns | None]  # and tools
Spans = list[tuple[int, int]]  # the start and end characters of the assistant's turns in a text
Ids = list[int]
Document = tuple[Ids, Ids]  # ids, and labels: the ids of targets and otherwise -100


@dataclass
class Data:
    """NAME is a CSV, JSON, JSONL or Parquet file, a save_to_disk directory or a hub id;
    NAME:train[:1000] takes a split or a part."""

    dataset: Names = ("docstrings.jsonl",)
    """data to train on, joined"""
    val_dataset: Names = ()
    """data to validate on; none: validation splits, or 5% of each --dataset"""
    dataset_config: str | None = None
    """configuration of hub data sets"""
    text_column: str = "content"
    """column with plain documents"""
    prompt_column: str | None = None
    """column with prompts, for chats of two turns"""
    completion_column: str | None = None
    """column with their answers"""
    max_seq_length: Annotated[int, Range(8), tyro.conf.arg(metavar="N")] = 2048
    """tokens in a sequence; longer documents are truncated"""
    chat_template: str | None = None
    """name of a built-in one or a Jinja file; none: the tokenizer's, or llama-2 without one"""
    packing: bool = True
    """pack several documents into a sequence"""
    bad_rows: Literal["fail", "skip"] = "fail"
    """skip: drop unusable rows"""
    num_train_samples: Size = 0
    """documents per training set; 0: all"""
    num_val_samples: Size = 0
    """documents per validation set; 0: all"""


def load(
    args: Data, tokenizer: Tokenizer, seed: int = 0, evaluate_only: bool = False
) -> tuple["PackedDataset | None", dict[str, "PackedDataset"]]:
    """Return the training set, None with `evaluate_only`, and a validation set for each name: its
    split `validation` or 5% of it, or --val-dataset. Raise Problem if data cannot be used."""
    load_parts = functools.partial(load_documents, tokenizer=tokenizer, args=args)
    draw = functools.partial(draw_documents, length=args.max_seq_length)
    train_set, val_sets = reading.load_sets(args, load_parts, reading.hold_out, draw, evaluate_only)
    capacity = args.max_seq_length if args.packing else 0
    packs = {spec: PackedDataset(rows, capacity, seed) for spec, rows in val_sets.items()}
    if train_set is None:
        return None, packs
    print0(f"an example, with targets in « »: {mark_targets(train_set[0], tokenizer)}")
    return PackedDataset(train_set, capacity, seed), packs


def load_documents(spec: str, tokenizer: Tokenizer, args: Data) -> reading.Parts:
    """Return the documents of one --dataset argument by split: train, and maybe validation."""
    parts = reading.read(spec, args.dataset_config)
    return {part: encode_rows(spec, rows, tokenizer, args) for part, rows in parts.items()}


def encode_rows(name: str, rows: Dataset, tokenizer: Tokenizer, args: Data) -> Dataset:
    """Return the documents that the rows of data set `name` are or contain, with FEATURES and at
    most --max-seq-length + 1 tokens."""
    length = args.max_seq_length + 1
    columns = reading.first_row(name, rows)
    form = chat_columns(name, columns, args)
    if not form and tokenizer.chat_template == LLAMA_2:
        print0(f"{name}: not chats, so the chat template llama-2 in final/ will not fit the model")
    if not form and args.text_column in columns:
        reading.print_unread_tokens(name, columns)
    tokens = AnswerTokens(tokenizer)
    added = tokenizer.added_tokens_decoder.values()
    special = [str(token) for token in added if token.special]

    def convert(row: Row) -> list[Row]:
        contents = ""
        if form:
            turns, tools = read_chat(row, form)
            first = itertools.takewhile(lambda turn: turn["role"] != "assistant", turns)
            prompt = [*first] or turns
            documents = encode((turns, tools), tokens)
            contents = "\n".join(turn["content"] for turn in turns)
        elif args.text_column in columns:
            prompt = row.get(args.text_column)
            documents = [encode_text(prompt, tokenizer)]
            contents = prompt
        else:
            ids, labels = read_tokens(row, length, tokenizer)
            documents = [(ids, labels)]
            first = np.argmax(np.array(labels) != -100)
            prompt = ids[:first] if first > 1 else ids
        samples = [sample(prompt, *document, length) for document in documents]
        samples[0]["spells"] = int(any(token in contents for token in special))
        return samples

    key = [length, form, args.text_column, tokenizer.chat_template]
    key.append(reading.tokenizer_digest(tokenizer))
    key.append(reading.cache_key(chat_formats.find_columns))  # optional: chat_formats
    documents = reading.map_rows(name, rows, columns, convert, FEATURES, args.bad_rows, *key)
    reading.print_unknown(name, documents, tokenizer, "input_ids")
    spells = documents.with_format("numpy")["spells"][:]
    if (spells == 1).any():
        row = np.count_nonzero(spells[: spells.argmax() + 1] >= 0)
        kind, effect = ("chats", "it becomes") if form else ("documents", "stays plain text")
        print0(f"{name}: {np.count_nonzero(spells == 1):,} {kind} have text that spells a special "
               f"token, which {effect}, the first in row {row:,}")  # fmt: skip
    return documents


def chat_columns(name: str, columns: Row, args: Data) -> tuple[str, ...]:
    """Return the columns of a data set's chats: those of the flags if it has them, messages, or
    prompts and answers; () if its rows are texts or tokens. `columns` is its first row. Raise
    Problem if it has none of these."""
    form: tuple = ()
    pair = args.prompt_column, args.completion_column
    is_alone = len(args.dataset) + len(args.val_dataset) == 1
    if args.text_column != Data.text_column and args.text_column in columns:
        return ()
    if columns.keys() >= {*pair}:
        form = pair
    elif any(pair) and (is_alone or columns.keys() & {*pair}):
        advice = "Pass both --prompt-column and --completion-column."
        raise reading.no_columns(name, map(str, pair), columns, advice)
    elif "messages" in columns:
        form = ("messages",)
    elif "prompt" in columns and "completion" in columns:
        form = ("prompt", "completion")
    form = chat_formats.find_columns(name, columns, form, args)  # optional: chat_formats
    if not form and args.text_column not in columns and "input_ids" not in columns:
        raise Problem(f"Data set {name} has no chats that can be read. Its columns are: "
                      f"{', '.join(columns)}. Write messages, or pass --prompt-column and "
                      "--completion-column, or --text-column.")  # fmt: skip
    return form


def sample(prompt: object, ids: Ids, labels: Ids, length: int) -> Row:
    """Return a document with FEATURES and at most `length` tokens. `cut` counts those cut off,
    `key` is a hash of everything before the first answer, `first_target` that one's position.
    `spells` is 1 if the row's text spells special tokens, else 0, and -1 after its first document.
    """
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=7).hexdigest()
    is_target = np.array(labels) != -100
    return {
        "input_ids": ids[:length],
        "labels": labels[:length],
        "cut": max(0, len(ids) - length),
        "key": int(digest, 16),
        "first_target": is_target.argmax() if is_target.any() else len(ids),
        "spells": -1,
    }


def read_chat(row: Row, form: Sequence[str]) -> Chat:
    """Return the turns of the chat in the columns `form` of a row, and its tools or None. A turn is
    not a target if its `train` is False. Raise ValueError if the row is unusable."""
    row = chat_formats.normalize(row, form)  # optional: chat_formats
    for column in UNREAD.split():
        if row.get(column) not in (None, "", []) and column not in form:
            raise ValueError(f"{column} would be ignored, of columns {', '.join(row)}")
    turns = as_turns(row, form[0], "user")
    if len(form) == 2:
        turns = [as_context(turn) for turn in turns]
        answers = as_turns(row, form[1], "assistant")
        if answers[0].get("role") != "assistant":
            raise ValueError(f"{form[1]} does not start with the assistant. If it is a whole chat, "
                             "write it as messages")  # fmt: skip
        turns += answers
    system = row.get("system") or row.get("system_prompt")
    if system and system != turns[0].get("content"):
        if turns[0].get("role") == "system":
            raise ValueError("the row has a system column and a system turn")
        turns = [{"role": "system", "content": system}, *turns]
    for turn in turns:
        check_turn(turn)
    if not any(is_target(turn) for turn in turns):
        raise ValueError("the chat has no assistant turn to train on")
    tools = row.get("tools")
    return turns, as_objects(tools, "tools") if tools else None


def as_context(turn: Row) -> Row:
    """Return a turn of a prompt, which is not a target unless it says so."""
    return {"train": False} | turn if turn.get("role") == "assistant" else turn


def as_turns(row: Row, column: str, role: str) -> Turns:
    """Return the turns in a column of a row, whose text is a turn of `role`."""
    value = row.get(column)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return as_objects(value, column)


def as_objects(value: Any, name: str) -> Turns:
    """Return a list of objects; raise ValueError if `value` is something else, or empty."""
    if not value or not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{name} is empty or not a list of objects")
    return value


def is_target(turn: Row) -> bool:
    """Return whether a turn is trained on."""
    return turn["role"] == "assistant" and turn.get("train", True)


def check_turn(turn: Row) -> None:
    """Raise ValueError unless a turn has a known role, known keys, text and complete calls."""
    role, content, calls = turn.get("role"), turn.get("content"), turn.get("tool_calls")
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {', '.join(ROLES)}")
    unknown = turn.keys() - TURN_KEYS
    if unknown:
        raise ValueError(f"the {role}'s turn has {min(unknown)}, an unknown key. Remove it")
    if turn.get("train", True) not in (True, False):
        raise ValueError(f"the {role}'s turn has train {turn['train']!r}. Use true or false")
    if not isinstance(content, str):
        raise ValueError(f"the {role}'s turn is {content!r}, not text")
    if role == "assistant" and not calls and not content.strip():
        raise ValueError("the assistant's turn is empty")
    for call in as_objects(calls, "tool_calls") if calls else ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if not isinstance(function.get("name"), str):
            raise ValueError("a tool call has no name")
        if not isinstance(arguments, dict) or function.keys() & NO_ARGUMENTS:
            raise ValueError(f"the call to {function['name']} has no object `arguments`")


def set_chat_template(tokenizer: Tokenizer, choice: str | None) -> str:
    """Set a tokenizer's chat template to `choice`; if None, to Llama 2's if it has none. Return a
    digest of the template."""
    if choice is None and tokenizer.chat_template is not None:
        return reading.digest(tokenizer.chat_template)[:8]
    choice = choice or "llama-2"
    path = Path(choice).expanduser()
    if choice in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[choice]
    elif path.is_file():
        tokenizer.chat_template = path.read_text(encoding="utf-8-sig")
    else:
        raise Problem(f"--chat-template {choice} is neither a file nor {' or '.join(TEMPLATES)}.")
    print0(f"The chat template is {choice}, in best/ and final/ too.")
    return reading.digest(tokenizer.chat_template)[:8]


def encode(chat: Chat, tokens: "AnswerTokens") -> list[Document]:
    """Return the documents of a chat, whose first token is not a target.

    Targets are the tokens of the assistant's turns, from after the header through the end marker.
    EOS is appended to an answer that ends a document.
    """
    eos = tokens.tokenizer.eos_token_id
    documents = []
    for text, answers in render(chat, tokens.tokenizer):
        for ids, labels in tokens.encode(text, answers):
            if labels[-1] != -100 and ids[-1] != eos:
                ids, labels = [*ids, eos], [*labels, eos]
            documents.append((ids, [-100, *labels[1:]]))
    return documents


def render(chat: Chat, tokenizer: Tokenizer) -> list[tuple[str, Spans]]:
    """Render a chat. Return its documents as texts, with the answers in each.

    Each answer is a target in one text, rendered without the turns after it: some templates drop
    reasoning before the last question. Raise ValueError if the template drops anything else.
    """
    turns = [{key: x for key, x in turn.items() if key != "train"} for turn in chat[0]]
    tools = chat[1]
    template = tokenizer.get_chat_template(tools=tools)
    if "strftime_now" in template:
        template = FIXED_DATE + template
    options = {"tools": tools, "chat_template": template, "tokenize": False}

    def text_of(turns: Turns, **more: Any) -> str:
        try:
            return tokenizer.apply_chat_template(turns, **(options | more))
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(f"the chat template rejects the chat: {error}") from error

    whole = text_of(turns).rstrip()  # a line break after the end marker belongs to no turn
    for tool in tools or ():
        find(tool.get("function", tool).get("name", ""), whole, 0, "tools")
    if tools and whole == text_of(turns, tools=None).rstrip():  # their names are elsewhere
        raise Problem(f"the chat template drops the tools. {ADVICE}")
    documents: list[tuple[str, Spans]] = []
    text, answers, checked = "", [], 0  # of the last document, and the number of its turns
    is_ended = True  # whether the template puts a marker after the answer
    for i, turn in enumerate(turns):
        if not is_target(chat[0][i]):
            continue
        if i == 0:
            raise ValueError('the chat starts with an answer. Add "train": false to it')
        before = text
        text = whole if i + 1 == len(turns) else text_of(turns[: i + 1]).rstrip()
        prompt = text_of(turns[:i], add_generation_prompt=True)
        if not text.startswith(prompt):
            raise Problem(f"turn {i + 1}: the chat template does not start the answer with its "
                             "generation prompt, so training would differ from use. If the prompt "
                             "opens <think>, the answers need reasoning_content. Or pass "
                             "--chat-template chatml, which opens none")  # fmt: skip
        if turns[i - 1]["role"] == "tool":  # Gemma 4 goes on in the turn of the call
            question = [{"role": "user", "content": "?"}]
            header = text_of(question, add_generation_prompt=True).removeprefix(text_of(question))
            if header.strip() and text[len(prompt) :].startswith(header):
                raise Problem(f"turn {i + 1}: the chat template starts the answer with a header "
                              f"that its prompt lacks after a tool's turn. {ADVICE}")  # fmt: skip
        if not is_ended or not text.startswith(before):
            documents.append((before, answers))
            before, answers, checked = "", [], 0
        check_rendered(turns[checked:i], prompt[len(before) :], with_reasoning=False)
        check_rendered([turn], text[len(prompt) :], with_reasoning=True)
        answers.append((len(prompt), len(text)))
        checked = i + 1
        is_ended = bool(turn.get("tool_calls")) or not text.endswith(turn["content"].rstrip())
    if is_ended and whole.startswith(text):  # with the turns after the last answer
        check_rendered(turns[checked:], whole[len(text) :], with_reasoning=False)
        text = whole
    return [*documents, (text, answers)]


def check_rendered(turns: Turns, text: str, with_reasoning: bool) -> None:
    """Raise ValueError unless `text` has the content and the calls of the turns in this order, the
    system's anywhere, and `with_reasoning` the assistant's reasoning."""
    end = 0  # of the turn before
    for turn in turns:
        role, content, reasoning = turn["role"], turn["content"], ""
        if role == "assistant":
            reasoning, _, content = content.rpartition("</think>")
        start = 0 if role == "system" else end
        ends = [find(content, text, start, role)]
        for call in turn.get("tool_calls", ()):
            function = call.get("function", call)
            arguments = function["arguments"]
            parts = [function["name"], *arguments]
            parts += [value for value in arguments.values() if isinstance(value, str)]
            start = max(find(part, text, start, role) for part in parts)
            ends.append(start)
            for key, value in [("", arguments), *arguments.items()]:
                if isinstance(value, str) or json.dumps(value, ensure_ascii=False) in text:
                    continue
                # True and None in Qwen 3.5's calls. LFM's are Python: f(key=True).
                if str(value) in text and not (key and f"{key}={value}" in text):
                    raise Problem("the chat template writes calls in Python, not in JSON: "
                                  f"{reading.shorten(str(value))}. {ADVICE}")  # fmt: skip
        if with_reasoning:
            thoughts = turn["content"].count("</think>") or 1
            if text.count("</think>") > thoughts + ("reasoning_content" in turn):
                raise ValueError("the chat template adds </think> to an answer that has one. Write "
                                 "the reasoning as reasoning_content")  # fmt: skip
            parts = *reasoning.rpartition("<think>")[::2], turn.get("reasoning_content", "")
            for part in (*parts, turn.get("thinking", "")):
                find(part, text, 0, role)
        if role != "system":
            end = max(ends)


def find(part: str, text: str, start: int, role: str) -> int:
    """Return where a part of a turn of `role` ends in `text[start:]`; raise ValueError if it is not
    there, as it is or as JSON."""
    for form in (part.strip(), json.dumps(part, ensure_ascii=False)[1:-1]):
        position = text.find(form, start)
        if position >= 0:
            return position + len(form)
    part = reading.shorten(part)
    raise Problem(f"the chat template drops {part!r} of the {role}'s turn. {ADVICE}")


@functools.lru_cache(maxsize=100)
def tokenize(tokenizer: Tokenizer, text: str) -> tuple[Ids, Spans]:
    """Return the tokens of a text and their characters, none if the tokenizer reports none."""
    options = {"add_special_tokens": False, "return_offsets_mapping": tokenizer.is_fast}
    result = tokenizer(text, verbose=False, **options)
    return result["input_ids"], result.get("offset_mapping", [])


class AnswerTokens:
    """Tokenize rendered chats so that the tokens before each answer are those of its prompt alone.

    A token of the whole text may span the end of a prompt, or of an answer. Generation produces no
    such token, so each answer then gets a document of its own, cut there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.added = {*tokenizer.added_tokens_decoder}

    def prefix(self, text: str, position: int) -> Ids:
        """Return the tokens of text[:position]: the first ones of `text`, if those since the last
        added token, which do not depend on the text before it, are the same."""
        ids, offsets = tokenize(self.tokenizer, text)
        count = bisect_right(offsets, position, key=itemgetter(1))
        for i in reversed(range(count)):
            if ids[i] in self.added:
                recent, _ = tokenize(self.tokenizer, text[offsets[i][0] : position])
                if recent == ids[i:count]:
                    return ids[:count]
                break
        return tokenize(self.tokenizer, text[:position])[0]

    def encode(self, text: str, answers: Spans) -> list[Document]:
        """Return the documents of a text as ids and labels, given the answers in it."""
        documents: list[Document] = [([], [])]
        tokens, offsets = tokenize(self.tokenizer, text)
        for start, end in [*answers, (len(text), len(text))]:  # the last: turns after the answers
            prompt, ids = self.prefix(text, start), self.prefix(text, end)
            i = bisect_right(offsets, start, key=itemgetter(1))
            if i < len(offsets) and offsets[i][0] < start and tokens[i] in self.added:
                # It strips the spaces after it, as Phi 3's tokens do: also those of the answer.
                ids = prompt + tokenize(self.tokenizer, text[start:end])[0]
            elif ids[: len(prompt)] != prompt:
                whole = self.tokenizer.decode(ids)
                ids = prompt + tokenize(self.tokenizer, text[start:end])[0]
                if self.tokenizer.decode(ids) != whole:
                    raise ValueError("a token spans the end of the prompt of an answer")
            labels = [-100] * len(prompt) + ids[len(prompt) :]
            before, labels_before = documents[-1]
            is_answer = start < end
            if prompt[: len(before)] == before and (is_answer or len(documents) == 1):
                labels[: len(before)] = labels_before
                documents[-1] = ids, labels
            elif is_answer:
                documents.append((ids, labels))
        return documents


def encode_text(text: str, tokenizer: Tokenizer) -> Document:
    """Return ids and labels of a plain document: BOS if the tokenizer adds it, text, EOS. Raise
    ValueError if it is empty or not text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the document is {text!r}, not text")
    ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    return ids, [-100, *ids[1:]]


def read_tokens(row: Row, length: int, tokenizer: Tokenizer) -> Document:
    """Return ids and labels of a tokenized row; raise ValueError if they cannot be trained on."""
    ids = reading.token_ids(row, "input_ids", "--max-seq-length", length, tokenizer)
    labels = [-100, *row.get("labels", ids)[1:]]
    is_right = len(labels) == len(ids) and {*labels} != {-100}
    for label, token in zip(labels, ids, strict=False):
        is_right &= type(label) is int and label in (-100, token)
    if not is_right:
        raise ValueError("labels must be one per token, -100 or the token, and not all -100")
    for (before, label), token in zip(itertools.pairwise(labels), ids[1:], strict=True):
        if token == tokenizer.eos_token_id and label == -100 != before:  # taken for padding
            raise ValueError("labels exclude the EOS after a target, so the model would not learn "
                             "to stop")  # fmt: skip
    return ids, labels


def draw_documents(name: str, split: str, rows: Dataset, limit: int, length: int) -> Dataset:
    """Return `limit` random documents (0: all), without those whose first answer starts after
    `length` tokens. Raise Problem if these are more than half."""
    rows = reading.sample(rows, limit)
    numbers = rows.select_columns(["cut", "first_target"]).with_format("numpy")[:]
    kept = np.flatnonzero(numbers["first_target"] <= length)
    cut, late = np.count_nonzero(numbers["cut"]), len(rows) - len(kept)
    print0(f"{name}, {split}: {len(rows):,} documents")
    if cut:
        print0(f"  {cut:,} are cut to --max-seq-length {length}")
    if late:
        print0(f"  {late:,} are left out, because their answers start later")
    if 2 * late > len(rows):
        raise Problem(f"{name}: in {late:,} of {len(rows):,} documents, the answers start after "
                      f"--max-seq-length {length}. Pass a larger one.")  # fmt: skip
    return rows.select_columns(["input_ids", "labels"]).select(kept)


def mark_targets(example: Row, tokenizer: Tokenizer) -> str:
    """Return the start of an example's text, with the targets in « »."""
    text = ""
    pairs = zip(example["input_ids"], example["labels"], strict=True)
    for is_answer, group in itertools.groupby(pairs, key=lambda pair: pair[1] != -100):
        part = tokenizer.decode([token for token, _ in group])
        text += f"«{part}»" if is_answer else part
    return reading.shorten(text)


def pack(lengths: Sequence[int], capacity: int, generator: torch.Generator) -> list[Ids]:
    """Return groups of indices of `lengths`. The lengths in a group sum to at most `capacity`; a
    longer one gets its own group. Each group takes the longest that fits, until none does.
    Equal lengths are drawn at random, so the number of groups is the same in every epoch."""
    packs: list[Ids] = []
    by_length = defaultdict(list)
    for i in torch.randperm(len(lengths), generator=generator).tolist():
        by_length[lengths[i]].append(i)
    remaining = sorted(by_length)
    while remaining:
        packs.append([])
        room = max(capacity, remaining[-1])
        while count := bisect_right(remaining, room):
            length = remaining[count - 1]
            packs[-1].append(by_length[length].pop())
            room -= length
            if not by_length[length]:
                del remaining[count - 1]
    return packs


class PackedDataset(torch.utils.data.Dataset):
    """Sequences of documents that are packed up to `capacity` tokens (0: one each), for each epoch
    anew: [epoch * len() + i] is sequence i of an epoch."""

    def __init__(self, documents: Dataset, capacity: int, seed: int) -> None:
        self.dataset = documents
        self.capacity = capacity
        self.seed = seed
        rows = documents.select_columns("input_ids").with_format("arrow")[:]
        lengths = pyarrow.compute.list_value_length(rows["input_ids"]).to_pylist()
        self.lengths = [length - 1 for length in lengths]  # the last token has no target
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Plan the sequences of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        self.plan = pack(self.lengths, self.capacity, generator)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, i: int) -> Turns:
        epoch, i = divmod(i, len(self.plan))
        if epoch != self.epoch:
            self.set_epoch(epoch)
        return self.dataset.__getitems__(self.plan[i])


def collate(samples: list[Turns]) -> Batch:
    """Return a batch with a row per pack, padded to a multiple of 8; one row if there are no packs.

    int64 [batch, length]: `input_ids`; `labels`, the next token or -100; `position_ids`, which
    start at 0 in each document. Padding is 0. int32 `cu_seqlens`: 0 and the ends, in the flattened
    batch, of the documents and of each row's padding. int `max_seqlen`: the longest of these. ints
    `targets` and `tokens`: the labels that are not -100, and the positions without padding. int64
    `target_positions`: the targets in the flattened batch; [0] if none, as the head needs one.
    """
    rows = samples or [[]]
    totals = [sum(len(document["labels"]) - 1 for document in row) for row in rows]
    width = -(-max(8, *totals) // 8) * 8
    parts = []  # inputs, labels and positions of each document and of each row's padding
    for row, total in zip(rows, totals, strict=True):
        for document in row:
            targets = document["labels"][1:]
            parts.append((document["input_ids"][:-1], targets, np.arange(len(targets))))
        zeros = np.zeros(width - total, dtype=np.int64)
        parts.append((zeros, zeros - 100, zeros))
    columns = (np.concatenate(x, dtype=np.int64) for x in zip(*parts, strict=True))
    inputs, labels, positions = map(torch.from_numpy, columns)
    lengths = [len(part[0]) for part in parts if len(part[0])]
    target_positions = (labels != -100).nonzero().flatten()
    count = len(target_positions)
    return {
        "input_ids": inputs.view(-1, width),
        "labels": labels.view(-1, width),
        "target_positions": target_positions if count else torch.tensor([0]),
        "position_ids": positions.view(-1, width),
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "max_seqlen": max(lengths),
        "targets": count,
        "tokens": sum(totals),
    }


def answer_ends(tokenizer: Tokenizer) -> Ids:
    """Return the tokens that end a generation: EOS, the added tokens that the chat template puts
    after an answer, and the last one after a call, unless it also separates calls."""
    ends = [tokenizer.eos_token_id]
    word = "xyzzy"  # in no template
    call = {"type": "function", "function": {"name": "f", "arguments": {"of": word}}}
    calls = [{"content": "", "tool_calls": [call] * count} for count in (1, 2)]
    for turn in ({"content": word}, *calls):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant"} | turn]
        with contextlib.suppress(Exception):  # the template rejects such turns
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            _, *between, after = text.split(word)
            ids = tokenizer([after, "".join(between)], add_special_tokens=False).input_ids
            added = [x for x in ids[0] if x in tokenizer.added_tokens_decoder]
            ends += added[-1:] if "tool_calls" in turn else added
            ends = [x for x in ends if x not in ids[1] or x == tokenizer.eos_token_id]
    return ends
