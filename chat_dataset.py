"""Chats for supervised fine-tuning: rows to documents with exact targets, packed into sequences."""

import functools
import hashlib
import itertools
import json
import os.path
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
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
from core.steps import pad
from optional import chat_formats  # optional: chat_formats

IDS, NUMBER = List(Value("int32")), Value("int64")
FEATURES = Features({"input_ids": IDS, "labels": IDS, "cut": NUMBER, "key": NUMBER,
                     "first_target": NUMBER, "targets": NUMBER})  # fmt: skip
DATE = date(2024, 7, 26)  # instead of today, so that each start has the same texts
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

Chat = tuple[list[dict], list[dict] | None]  # turns, and tools or None
Spans = list[tuple[int, int]]  # the start and end characters of the assistant's turns in a text
Document = tuple[list[int], list[int]]  # ids, and labels: the ids of targets and otherwise -100


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
    system_column: str | None = None
    """column with system turns; none: system or system_prompt"""
    max_seq_length: Annotated[int, Range(8), tyro.conf.arg(metavar="N")] = 2048
    """tokens in a sequence; longer documents are truncated"""
    chat_template: str | None = None
    """name of a built-in one or a Jinja file; none: the tokenizer's, or llama-2 without one"""
    packing: bool = True
    """pack several documents into a sequence"""
    train_on_prompt: bool = False
    """train on all tokens of a chat"""
    bad_rows: Literal["fail", "skip"] = "fail"
    """skip: drop unusable rows"""
    num_train_samples: Size = 0
    """documents per training set; 0: all"""
    num_val_samples: Size = 0
    """documents per validation set; 0: all"""

    def problems(self, _: Any) -> list[str]:
        """Return a message if only one of the two columns of a chat is named."""
        is_one = bool(self.prompt_column) != bool(self.completion_column)
        return ["Pass both --prompt-column and --completion-column."] * is_one


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
    """Return the documents that the rows of data set `name` are or contain.

    A document has FEATURES and at most --max-seq-length + 1 tokens. `cut` counts those cut off,
    `key` is a hash of everything before the first answer, and `first_target` that one's position.
    """
    length = args.max_seq_length + 1
    columns = reading.first_row(name, rows)
    flags = args.text_column, args.system_column, args.prompt_column, args.completion_column
    if missing := [x for x in flags[1:] if x and x not in columns]:
        raise reading.no_columns(name, missing, columns, "Correct the flag.")
    forms = [flags[2:]] if any(flags[2:]) else [("messages",), ("prompt", "completion")]
    form = next((form for form in forms if {*form} <= {*columns}), ())
    form = chat_formats.find_columns(name, columns, form, args)  # optional: chat_formats
    if not form and {args.text_column, "input_ids"}.isdisjoint(columns):
        raise Problem(f"Data set {name} has no chats that can be read. Its columns are: "
                      f"{', '.join(columns)}. Write messages, or pass --prompt-column and "
                      "--completion-column, or --text-column.")  # fmt: skip

    def convert(batch: list[dict]) -> list[list[dict]]:
        tokens = AnswerTokens(tokenizer)
        result = []
        for row in batch:
            if form:
                row = chat_formats.normalize(row, form)  # optional: chat_formats
                chat = read_chat(row, form, args)
                first = [turn["role"] for turn in chat[0]].index("assistant")
                prompt = chat[0][:first] or chat[0]
                documents = encode(chat, tokens, args.train_on_prompt)
            elif args.text_column in columns:
                prompt = row.get(args.text_column)
                documents = [encode_text(prompt, tokenizer)]
            else:
                documents = [read_tokens(row, length, tokenizer)]
                prompt = documents[0][0]
            result.append([sample(prompt, *document, length) for document in documents])
        return result

    key = [length, args.train_on_prompt, *flags, tokenizer.chat_template]
    key.append(reading.tokenizer_digest(tokenizer))
    key.append(reading.cache_key(chat_formats.find_columns))  # optional: chat_formats
    return reading.map_rows(
        name, rows, lambda row: convert([row])[0], FEATURES, args.bad_rows, *key
    )


def sample(prompt: object, ids: list[int], labels: list[int], length: int) -> dict[str, Any]:
    """Return a document with FEATURES and at most `length` tokens, see `encode_rows`."""
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=7).hexdigest()
    is_target = np.array(labels) != -100
    start = int(is_target.argmax()) if is_target.any() else len(ids)
    values = ids[:length], labels[:length], len(ids[length:]), int(digest, 16), start
    return dict(zip(FEATURES, (*values, int(is_target[:length].sum())), strict=True))


def read_chat(row: dict, form: Sequence[str], args: Data) -> Chat:
    """Return the turns of the chat in the columns `form` of a row, and its tools or None. A turn is
    not a target if its `train` is False. Raise ValueError if the row is unusable."""
    if unread := [x for x in UNREAD.split() if x not in form and row.get(x) not in (None, "", [])]:
        raise ValueError(f"{', '.join(unread)} would be ignored, of columns {', '.join(row)}")
    prompt, *completion = (row.get(column) for column in form)
    turns = as_turns(prompt, form[0], "user" if completion else None)
    if completion:
        answers = as_turns(completion[0], form[1], "assistant")
        if answers[0].get("role") != "assistant":
            raise ValueError(f"{form[1]} does not start with an assistant's turn")
        context = [{"train": False} | x if x.get("role") == "assistant" else x for x in turns]
        turns = [*(turns if args.train_on_prompt else context), *answers]
    system_columns = [args.system_column] if args.system_column else ["system", "system_prompt"]
    system = next(filter(None, map(row.get, system_columns)), None)
    if system not in (None, turns[0].get("content")):
        if turns[0].get("role") == "system":
            raise ValueError("the row has a system column and a system turn")
        turns = [{"role": "system", "content": system}, *turns]
    for turn in turns:
        check_turn(turn)
    trained = [turn for turn in turns if turn.get("train", True)]
    if all(turn["role"] != "assistant" for turn in trained):
        raise ValueError("the chat has no assistant turn to train on")
    if args.train_on_prompt and len(trained) < len(turns):
        raise ValueError("the row excludes a turn, but --train-on-prompt trains on all of them")
    tools = row.get("tools")
    return turns, as_turns(tools, "tools") if tools else None


def check_turn(turn: dict) -> None:
    """Raise ValueError unless a turn has a known role, known keys, text and complete calls."""
    role, content, calls = turn.get("role"), turn.get("content"), turn.get("tool_calls")
    if role not in ROLES:
        raise ValueError(f"the role {role} is not one of {', '.join(ROLES)}")
    if unknown := {*turn} - TURN_KEYS:
        raise ValueError(f"the {role}'s turn has {min(unknown)}, an unknown key. Remove it")
    if turn.get("train", True) not in (True, False):
        raise ValueError(f"the {role}'s turn has train {turn['train']!r}. Use true or false")
    if not isinstance(content, str):
        raise ValueError(f"the {role}'s turn is {content!r}, not text")
    content.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    if role == "assistant" and not calls and not content.strip():
        raise ValueError("the assistant's turn is empty")
    for call in as_turns(calls, "tool_calls") if calls else ():
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call has no name")
        if not isinstance(function.get("arguments"), dict) or {*function} & NO_ARGUMENTS:
            raise ValueError(f"the call to {function['name']} has no object `arguments`")


def as_turns(value: Any, name: str, role: str | None = None) -> list[dict]:
    """Return a list of objects unchanged, and another value as a turn of `role` if it is given.
    Raise ValueError if it is neither, or empty."""
    if role and not isinstance(value, list):
        return [{"role": role, "content": value}]
    if not value or not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{name} is empty or not a list of objects")
    return value


def set_chat_template(tokenizer: Tokenizer, choice: str | None) -> None:
    """Set a tokenizer's chat template to `choice`; if None, to Llama 2's if it has none."""
    if choice is None and tokenizer.chat_template is not None:
        return
    choice = choice or "llama-2"
    path = Path(choice).expanduser()
    if choice not in TEMPLATES and not path.is_file():
        raise Problem(f"--chat-template {choice} is neither a file nor {' or '.join(TEMPLATES)}.")
    template = TEMPLATES.get(choice) or path.read_text(encoding="utf-8", errors="replace")
    tokenizer.chat_template = template
    print0(f"The chat template is {choice}, in best/ and final/ too.")


def encode(chat: Chat, tokens: "AnswerTokens", train_on_prompt: bool) -> list[Document]:
    """Return the documents of a chat, whose first token is not a target.

    Targets are the tokens of the assistant's turns, from after the header through the end marker,
    or all tokens with `train_on_prompt`. EOS is appended to an answer that ends a document.
    """
    eos = tokens.tokenizer.eos_token_id
    documents = []
    for text, spans, ends_in_answer in render(chat, tokens.tokenizer, train_on_prompt):
        parts = tokens.encode(text, spans)
        for ids, labels in parts:
            if train_on_prompt:
                labels = list(ids)
            if (ends_in_answer or len(parts) > 1) and ids[-1] != eos:
                ids, labels = [*ids, eos], [*labels, eos]
            documents.append((ids, [-100, *labels[1:]]))
    return documents


def render(
    chat: Chat, tokenizer: Tokenizer, train_on_prompt: bool
) -> list[tuple[str, Spans, bool]]:
    """Render a chat. Return its documents as text, answers in it, and whether it ends with one.

    Each answer is a target in one text, rendered without the turns after it: some templates drop
    reasoning before the last question. Raise ValueError if the template drops anything else.
    """
    turns, tools = chat
    call = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"  # with a literal format
    template = tokenizer.get_chat_template(tools=tools)
    template = re.sub(call, lambda match: json.dumps(DATE.strftime(match[2])), template)
    if "strftime_now(" in template:
        raise ValueError("the chat template writes today's date. Pass a --chat-template without it")
    options = {"tools": tools, "chat_template": template, "tokenize": False}

    def text_of(turns: list[dict], **more: Any) -> str:
        try:
            return tokenizer.apply_chat_template(turns, **(options | more))
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(f"the chat template rejects the chat: {error}") from error

    is_target = [turn["role"] == "assistant" and turn.get("train", True) for turn in turns]
    turns = [{key: x for key, x in turn.items() if key != "train"} for turn in turns]
    whole = text_of(turns).rstrip()  # a line break after the end marker belongs to no turn
    check_rendered(turns, whole, train_on_prompt)
    names = [tool.get("function", tool).get("name", "") for tool in tools or ()]
    is_dropped = tools and text_of(turns, tools=None).rstrip() == whole
    if is_dropped or not all(name in whole for name in names):
        raise ValueError(f"the chat template drops the tools. {ADVICE}")
    if train_on_prompt:
        return [(whole, [], turns[-1]["role"] == "assistant")]
    documents: list[tuple[str, Spans]] = []
    for i in itertools.compress(range(len(turns)), is_target):
        text = whole if i == len(turns) - 1 else text_of(turns[: i + 1]).rstrip()
        if i:
            prompt = text_of(turns[:i], add_generation_prompt=True)
        else:  # no turns to render, so take what precedes an empty answer
            empty = text_of([{"role": "assistant", "content": ""}])
            prompt = os.path.commonprefix([text, empty]).rstrip(" ")
        if not text.startswith(prompt):
            raise ValueError(f"turn {i + 1}: the chat template does not start the answer with its "
                             "generation prompt, so training would differ from use. If the prompt "
                             "opens <think>, the answers need reasoning_content. Or pass "
                             "--chat-template chatml, which opens none")  # fmt: skip
        check_rendered(turns[: i + 1], text, False)
        check_rendered([turns[i]], text[len(prompt) :], True)
        extends_last = documents and text.startswith(documents[-1][0])
        spans = documents.pop()[1] if extends_last else []
        documents.append((text, [*spans, (len(prompt), len(text))]))
    text, spans = documents[-1]
    if whole.startswith(text):  # with the turns after the last answer
        documents[-1] = whole, spans
    return [(text, spans, spans[-1][1] == len(text)) for text, spans in documents]


def check_rendered(turns: list[dict], text: str, with_reasoning: bool) -> None:
    """Raise ValueError unless `text` has the content and the calls of the turns in this order, the
    system's anywhere, and with `with_reasoning` the last turn's reasoning."""

    def end_of(key: str, part: str, start: int) -> int:
        forms = part.strip(), json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]
        ends = [i + len(form) for form in forms if (i := text.find(form, start)) >= 0]
        if not ends:
            raise ValueError(f"the chat template drops {key} of the {turn['role']}'s turn. "
                             f"{ADVICE}")  # fmt: skip
        return min(ends)

    previous = 0  # the end of the turn before
    for turn in turns:
        start = 0 if turn["role"] == "system" else previous
        ends = [start]
        for call in turn.get("tool_calls", ()):
            function = call.get("function", call)
            names = function["name"], *function["arguments"]
            ends.append(max(end_of("tool_calls", name, ends[-1]) for name in names))
        thought, _, content = turn["content"].rpartition("</think>")
        ends.append(end_of("content", content, start))
        if turn["role"] != "assistant" or (with_reasoning and turn is turns[-1]):
            ends.append(end_of("content", thought.rpartition("<think>")[2], start))
            for key in {"reasoning_content", "thinking"} & turn.keys():
                end_of(key, turn[key], start)
        previous = previous if turn["role"] == "system" else max(ends)


class AnswerTokens:
    """Tokenize rendered chats so that the tokens before each answer are those of its prompt alone.

    A token of the whole text may span the end of a prompt, or of an answer. Generation produces no
    such token, so each answer then gets a document of its own, cut there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokenize = functools.cache(self._tokenize)

    def _tokenize(self, text: str) -> tuple[list[int], Spans]:
        options = {"add_special_tokens": False, "return_offsets_mapping": self.tokenizer.is_fast}
        result = self.tokenizer(text, verbose=False, **options)
        return result["input_ids"], result.get("offset_mapping", [])

    def prefix(self, text: str, position: int) -> list[int]:
        """Return the ids of text[:position]."""
        ids, offsets = self.tokenize(text)
        count = bisect_right(offsets, position, key=itemgetter(1))
        last = ids[max(0, count - 16) : count]
        # The text before does not change the last tokens. If they differ, tokenize all of it.
        start = offsets[max(0, count - 24)][0] if last else position
        if last and self.tokenize(text[start:position])[0][-len(last) :] == last:
            return ids[:count]
        return self.tokenize(text[:position])[0]

    def encode(self, text: str, spans: Spans) -> list[Document]:
        """Return the documents of a text as ids and labels, given the answers in it."""
        documents: list[Document] = [([], [])]
        for start, end in spans:
            prompt, ids = self.prefix(text, start), self.prefix(text, end)
            if ids[: len(prompt)] != prompt:
                ids = prompt + self.after(prompt, text[start:end], ids)
            labels = [-100] * len(prompt) + ids[len(prompt) :]
            if prompt[: len(documents[-1][0])] == documents[-1][0]:
                before = documents.pop()[1]
                labels[: len(before)] = before
            documents.append((ids, labels))
        whole, (ids, labels) = self.tokenize(text)[0], documents[-1]
        if len(documents) == 1 and whole[: len(ids)] == ids:  # with the turns after the last answer
            documents = [(whole, labels + [-100] * (len(whole) - len(ids)))]
        return documents

    def after(self, prompt: list[int], answer: str, whole: list[int]) -> list[int]:
        """Return the tokens of `answer` that decode after those of `prompt` like `whole`. Some
        tokenizers put a space before the first word of a text, hence the other beginnings."""
        expected = self.tokenizer.decode(whole)
        for beginning in ("", "a", "\n", ".", "0"):
            ids = self.tokenize(beginning + answer)[0][len(self.tokenize(beginning)[0]) :]
            if self.tokenizer.decode(prompt + ids) == expected:
                return ids
        return self.tokenize(answer)[0]


def encode_text(text: str, tokenizer: Tokenizer) -> Document:
    """Return ids and labels of a plain document: BOS if the tokenizer adds it, text, EOS. Raise
    ValueError if it is empty or not text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the document is {text!r}, not text")
    ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    ids = ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
    return ids, [-100, *ids[1:]]


def read_tokens(row: dict, length: int, tokenizer: Tokenizer) -> Document:
    """Return ids and labels of a tokenized row; raise ValueError if they cannot be trained on."""
    ids = reading.token_ids(row, "input_ids", "--max-seq-length", length, tokenizer)
    labels = [-100, *row.get("labels", ids)[1:]]
    are_right = all(type(x) is int and x in (-100, i) for x, i in zip(labels, ids, strict=False))
    if len(labels) != len(ids) or not are_right or {*labels} == {-100}:
        raise ValueError("labels must be one per token, -100 or the token, and not all -100")
    return ids, labels


def draw_documents(name: str, split: str, rows: Dataset, limit: int, length: int) -> Dataset:
    """Return `limit` random documents (0: all), without those whose first answer starts after
    `length` tokens. Raise Problem if these are more than half."""
    total = len(rows)
    rows = reading.sample(rows, limit)
    numbers = rows.select_columns(["cut", "first_target", "targets"]).with_format("numpy")[:]
    kept = np.flatnonzero(numbers["first_target"] <= length)
    dropped, cut = len(rows) - len(kept), np.count_nonzero(numbers["cut"])
    print0(f"{name}, {split}: {len(rows):,} of {total:,} documents, "
           f"{numbers['targets'].sum():,} target tokens")  # fmt: skip
    if cut or dropped:
        print0(f"  {cut:,} cut to --max-seq-length; {dropped:,} left out, because their answers "
               "start later")  # fmt: skip
    if 2 * dropped > len(rows):
        raise Problem(f"{name}: in {dropped:,} of {len(rows):,} documents, the answers start after "
                      f"--max-seq-length {length}. Pass a larger one.")  # fmt: skip
    return rows.select_columns(["input_ids", "labels"]).select(kept)


def mark_targets(example: dict[str, list[int]], tokenizer: Tokenizer) -> str:
    """Return the start of an example's text, with the targets in « »."""
    text = ""
    pairs = zip(example["input_ids"], example["labels"], strict=True)
    for is_target, group in itertools.groupby(pairs, key=lambda pair: pair[1] != -100):
        part = tokenizer.decode([token for token, _ in group])
        text += f"«{part}»" if is_target else part
    return reading.shorten(text)


def pack(lengths: Sequence[int], capacity: int, generator: torch.Generator) -> list[list[int]]:
    """Return groups of indices of `lengths`. The lengths in a group sum to at most `capacity`; a
    longer one gets its own group. Each group takes the longest that fits, until none does.
    Equal lengths are drawn at random, so the number of groups is the same in every epoch."""
    packs: list[list[int]] = []
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
        self.dataset, self.capacity, self.seed = documents, capacity, seed
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

    def __getitem__(self, i: int) -> list[dict]:
        epoch, i = divmod(i, len(self.plan))
        if epoch != self.epoch:
            self.set_epoch(epoch)
        return self.dataset.__getitems__(self.plan[i])


def collate(samples: list[list[dict]]) -> Batch:
    """Return a batch with a row per pack, padded to a multiple of 8; one row if there are no packs.

    int64 [batch, length]: `input_ids`; `labels`, the next token or -100; `position_ids`, which
    start at 0 in each document. Padding is 0. int32 `cu_seqlens`: 0 and the ends, in the flattened
    batch, of the documents and of each row's padding. int `max_seqlen`: the longest of these. ints
    `targets` and `tokens`: the labels that are not -100, and the positions without padding. int64
    `target_positions`: the targets in the flattened batch; [0] if none, as the head needs one.
    """
    rows = samples or [[]]
    lengths = [[len(document["labels"]) - 1 for document in row] for row in rows]
    inputs = [joined(document["input_ids"][:-1] for document in row) for row in rows]
    targets = [joined(document["labels"][1:] for document in row) for row in rows]
    input_ids = pad(inputs, 0, least=8, multiple=8)
    labels = pad(targets, -100, least=8, multiple=8)
    positions = pad([joined(map(np.arange, row)) for row in lengths], 0, least=8, multiple=8)
    width = labels.shape[1]
    segments = [n for row in lengths for n in (*row, width - sum(row)) if n]
    target_positions = (labels.flatten() != -100).nonzero().flatten()
    return {
        "input_ids": input_ids,
        "labels": labels,
        "target_positions": target_positions if len(target_positions) else torch.tensor([0]),
        "position_ids": positions,
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(segments)], dtype=torch.int32),
        "max_seqlen": max(segments),
        "targets": len(target_positions),
        "tokens": sum(map(sum, lengths)),
    }


def joined(parts: Iterable[Sequence[int]]) -> np.ndarray:
    """Return the values of all parts, none if there are no parts."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
