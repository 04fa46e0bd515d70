"""Chats for supervised fine-tuning: rows to documents with exact targets, packed into sequences."""

import contextlib
import hashlib
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from optional import template_checks as checks  # optional: template_checks

IDS, NUMBER = List(Value("int32")), Value("int64")
FEATURES = Features({"input_ids": IDS, "labels": IDS, "cut": NUMBER, "key": NUMBER,
                     "spells": NUMBER})  # fmt: skip
# Instead of today's date, so that each start has the same texts.
FIXED_DATE = r"""{%- macro strftime_now(format) -%}{{- format | replace('%d', '26')
| replace('%-d', '26') | replace('%I', '12') | replace('%p', 'PM')
| replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07') | replace('%Y', '2024')
| replace('%y', '24') | replace('%a', 'Fri') | replace('%A', 'Friday') | replace('%H', '12')
| replace('%M', '00') | replace('%S', '00') -}}{%- endmacro %}"""
ROLES = ("system", "user", "assistant", "tool")
TURN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"}
TURN_KEYS |= {"thinking", "train"}
USUAL_COLUMNS = (("messages",), ("prompt", "completion"))  # of chats; the first are used
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
{{- raise_exception('user and assistant must alternate (not with --chat-template chatml)') -}}
{%- elif turn['role'] == 'user' -%}
{{- (bos_token or '') + '[INST] ' + (head if loop.first else '') -}}
{{- turn['content'] | trim + ' [/INST]' -}}
{%- else -%}{{- ' ' + turn['content'] | trim + ' ' + (eos_token or '') -}}
{%- endif -%}{%- endfor -%}"""
TEMPLATES = {"llama-2": LLAMA_2}
TEMPLATES |= {"chatml": chat_formats.CHATML}  # optional: chat_formats

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
    load_parts = partial(load_documents, tokenizer=tokenizer, args=args)
    draw = partial(draw_documents, length=args.max_seq_length)
    train_set, val_sets = reading.load_sets(args, load_parts, reading.hold_out, draw, evaluate_only)
    capacity = args.max_seq_length if args.packing else 0
    if train_set:
        print0(f"an example, with targets in « »: {mark_targets(train_set[0], tokenizer)}")
        train_set = PackedDataset(train_set, capacity, seed)
    return train_set, {name: PackedDataset(x, capacity, seed) for name, x in val_sets.items()}


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
    special = [str(x) for x in tokenizer.added_tokens_decoder.values() if x.special]
    if not form and args.text_column in columns:
        reading.print_columns(name, [args.text_column], columns)

    def convert(row: Row) -> list[Row]:
        if form:
            turns, tools = read_chat(row, form)
            text = str((turns, tools))
            first = itertools.takewhile(lambda turn: turn["role"] != "assistant", turns)
            prompt = [*first] or turns
            documents = encode((turns, tools), tokenizer)
        elif args.text_column in columns:
            text = prompt = row.get(args.text_column)
            documents = [encode_text(text, tokenizer)]
        else:
            text = ""
            ids, labels = read_tokens(row, length, tokenizer)
            documents = [(ids, labels)]
            first_target = np.argmax(np.array(labels) != -100)
            prompt = ids[:first_target] if first_target > 1 else ids
        samples = [sample(prompt, *document, length) for document in documents]
        samples[0]["spells"] = int(any(token in text for token in special))
        return samples

    key = [length, form, args.text_column, tokenizer.chat_template]
    key.append(reading.tokenizer_digest(tokenizer))
    key.append(reading.cache_key(chat_formats.find_columns))  # optional: chat_formats
    key.append(reading.cache_key(checks.check_tools))  # optional: template_checks
    documents = reading.map_rows(name, rows, columns, convert, FEATURES, args.bad_rows, *key)
    reading.print_unknown(name, documents, tokenizer)
    spells = documents.with_format("numpy")["spells"][:]
    if count := np.count_nonzero(spells == 1):
        row = np.count_nonzero(spells[: spells.argmax() + 1] >= 0)
        print0(f"{name}: {count:,} rows spell special tokens, the first is row {row:,}. Text of "
               "chats becomes the token, that of documents stays plain text")  # fmt: skip
    return documents


def chat_columns(name: str, columns: Row, args: Data) -> tuple[str, ...]:
    """Return the columns of a data set's chats: those of the flags if it has them, messages, or
    prompts and answers; () if its rows are texts or tokens. `columns` is its first row. Raise
    Problem if it has none of these."""
    pair = args.prompt_column, args.completion_column
    is_alone = len(args.dataset + args.val_dataset) == 1
    if args.text_column != Data.text_column and args.text_column in columns:
        return ()
    if columns.keys() >= {*pair}:
        form = pair
    elif any(pair) and (is_alone or columns.keys() & {*pair}):
        advice = "Pass both --prompt-column and --completion-column."
        raise reading.no_columns(name, map(str, pair), columns, advice)
    else:
        form = reading.usual_columns(columns, USUAL_COLUMNS) or ()
    form = chat_formats.find_columns(name, columns, form, args)  # optional: chat_formats
    if any(pair) and form != pair:
        print0(f"{name} has no {' or '.join(filter(None, pair))}: it is read by its own columns")
    if not form and {args.text_column, "input_ids"}.isdisjoint(columns):
        advice = "Write messages, or pass --text-column or --prompt-column and --completion-column."
        raise reading.no_columns(name, ["messages"], columns, advice)
    return form


def sample(prompt: object, ids: Ids, labels: Ids, length: int) -> Row:
    """Return a document with FEATURES and at most `length` tokens. `cut` is 0 if these are all, 1
    if targets are among them, else 2. `key` is a hash of everything before the first answer.
    `spells` is 1 if the row spells special tokens, else 0, and -1 after its first document."""
    digest = hashlib.blake2b(repr(prompt).encode(), digest_size=7).hexdigest()
    has_targets = {*labels[:length]} != {-100}
    return {
        "input_ids": ids[:length],
        "labels": labels[:length],
        "cut": (len(ids) > length) + (not has_targets),
        "key": int(digest, 16),
        "spells": -1,
    }


def read_chat(row: Row, form: Sequence[str]) -> Chat:
    """Return the turns of the chat in the columns `form` of a row, and its tools or None. A turn is
    not a target if its `train` is False. Raise ValueError if the row is unusable."""
    row = chat_formats.normalize(row, form)  # optional: chat_formats
    for column in UNREAD.split():
        if row.get(column) not in (None, "", []) and column not in form:
            raise ValueError(f"{column} would be ignored")
    turns = as_objects(row.get(form[0]), form[0], "user" * (len(form) == 2))
    if len(form) == 2:
        # In a prompt, assistant turns are no targets unless they say so.
        turns = [{"train": False} | x if x.get("role") == "assistant" else x for x in turns]
        answers = as_objects(row.get(form[1]), form[1], "assistant")
        if answers[0].get("role") != "assistant":
            raise ValueError(f"{form[1]} does not start with the assistant. Use messages")
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


def as_objects(value: Any, name: str, role: str = "") -> Turns:
    """Return a list of objects or, if `value` is text, a turn of `role`. Raise ValueError if it is
    something else, or empty."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
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
        raise ValueError(f"the role {role} is not one of {ROLES}")
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
        name, arguments = function.get("name"), function.get("arguments")
        is_call = isinstance(name, str) and isinstance(arguments, dict)
        if not is_call or function.keys() & {"parameters", "args", "input"}:  # in other formats
            raise ValueError(f"the call to {name} has no name or no object `arguments`")


def set_chat_template(tokenizer: Tokenizer, choice: str | None) -> str:
    """Set a tokenizer's chat template to `choice`; if None, to Llama 2's if it has none. Return a
    digest of the template."""
    if choice or tokenizer.chat_template is None:
        choice = choice or "llama-2"
        path = Path(choice).expanduser()
        if choice not in TEMPLATES and not path.is_file():
            raise Problem(f"--chat-template {choice} is no file, nor {' or '.join(TEMPLATES)}.")
        tokenizer.chat_template = TEMPLATES.get(choice) or path.read_text(encoding="utf-8-sig")
        print0(f"The chat template is {choice}, in best/ and final/ too.")
    return reading.digest(tokenizer.chat_template)[:8]


def encode(chat: Chat, tokenizer: Tokenizer) -> list[Document]:
    """Return the documents of a chat, whose first token is not a target. Targets are the tokens of
    the assistant's turns, from after the header through the end marker. EOS is appended to an
    answer that ends a document."""
    documents = []
    for text, answers in render(chat, tokenizer):
        documents += tokenize(text, answers, tokenizer)
    for ids, labels in documents:
        labels[0] = -100
        if labels[-1] != -100 and ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
            labels.append(tokenizer.eos_token_id)
    return documents


def render(chat: Chat, tokenizer: Tokenizer) -> list[tuple[str, Spans]]:
    """Return a chat's documents as texts, with the answers in each. Each answer is a target in one
    text, rendered without the turns after it: some templates drop reasoning before the last
    question. Raise ValueError if a template is not fit for training."""
    trained, tools = chat
    turns = [{key: x for key, x in turn.items() if key != "train"} for turn in trained]
    template = tokenizer.get_chat_template(tools=tools)
    if "strftime_now" in template:
        template = FIXED_DATE + template

    def text_of(turns: Turns, is_prompt: bool = False, tools: Turns | None = tools) -> str:
        try:
            options = {"add_generation_prompt": is_prompt, "tokenize": False}
            text = tokenizer.apply_chat_template(turns, tools, chat_template=template, **options)
        except Exception as error:  # a template is a program and may raise anything
            has_calls = tools or any("tool_calls" in turn for turn in trained)  # as others have
            kind = Problem if has_calls else ValueError
            raise kind(f"the chat template rejects the chat: {error}") from error
        return text if is_prompt else text.rstrip()  # the end marker's line break is of no turn

    checks.check_tools(text_of, turns, tools)  # optional: template_checks
    documents = [("", [])]
    checked = 0  # turns of the last document  # optional: template_checks
    is_ended = True  # whether the template puts a marker after the answer
    for i, turn in enumerate(turns):
        if not is_target(trained[i]):
            continue
        prompt, text = text_of(turns[:i], is_prompt=True), text_of(turns[: i + 1])
        if not text.startswith(prompt):
            raise Problem(f"turn {i + 1}: the chat template does not start the answer with its "
                          "generation prompt. If that opens <think>, add reasoning_content to the "
                          "answers, or pass --chat-template chatml")  # fmt: skip
        if not is_ended or not text.startswith(documents[-1][0]):
            documents.append(("", []))
            checked = 0  # optional: template_checks
        before, answers = documents[-1]
        checks.check_rendered(turns[checked:i], prompt[len(before) :])  # optional: template_checks
        answer = text[len(prompt) :]  # optional: template_checks
        checks.check_answer(text_of, turns[: i + 1], answer)  # optional: template_checks
        documents[-1] = text, [*answers, (len(prompt), len(text))]
        checked = i + 1  # optional: template_checks
        is_ended = turn.get("tool_calls") or not text.endswith(turn["content"].rstrip())
    text, answers = documents[-1]
    whole = text_of(turns)
    if is_ended and whole.startswith(text):  # with the turns after the last answer
        checks.check_rendered(turns[checked:], whole[len(text) :])  # optional: template_checks
        documents[-1] = whole, answers
    return documents


def tokenize(text: str, answers: Spans, tokenizer: Tokenizer) -> list[Document]:
    """Return the documents of a text as ids and labels, given the answers in it. The tokens before
    each answer are those of its prompt alone.

    A token of the whole text may span the end of a prompt, or of an answer. Generation produces no
    such token, so each answer then gets a document of its own, cut there.
    """
    call = partial(tokenizer, add_special_tokens=False, verbose=False)
    added = tokenizer.added_tokens_decoder.values()
    special = [str(x) for x in added if x.special and not x.lstrip]
    # Tokens that strip the spaces after them, also those of an answer, as Phi 3's.
    strips = [i for i, x in tokenizer.added_tokens_decoder.items() if x.rstrip]
    known = 0  # characters whose tokens are in known_ids: the text before a special token
    known_ids = []

    def prefix(position: int) -> Ids:
        """Return the tokens of text[:position]. Those from a special token do not depend on the
        text before it."""
        nonlocal known
        mark = max((text.rfind(token, known, position) for token in special), default=0)
        if mark > known:
            known_ids.extend(call(text[known:mark])["input_ids"])
            known = mark
        return known_ids + call(text[known:position])["input_ids"]

    documents = [([], [])]
    for start, end in answers:
        prompt, ids = prefix(start), prefix(end)
        is_stripped = prompt and prompt[-1] in strips and text[start : start + 1].isspace()
        if is_stripped or ids[: len(prompt)] != prompt:
            decoded = tokenizer.decode(ids)
            ids = prompt + call(text[start:end])["input_ids"]
            if not is_stripped and tokenizer.decode(ids) != decoded:
                raise ValueError("a token spans the end of the prompt of an answer")
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        before, labels_before = documents[-1]
        if prompt[: len(before)] == before:
            labels[: len(before)] = labels_before
            documents.pop()
        documents.append((ids, labels))
    before, labels = documents[-1]
    ids = prefix(len(text))
    if len(documents) == 1 and ids[: len(before)] == before:  # with the turns after the answers
        documents = [(ids, labels + [-100] * (len(ids) - len(before)))]
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
    masked = [x if y != -100 else -100 for x, y in zip(ids, labels, strict=False)]
    if str(labels) != str(masked) or len(labels) != len(ids) or {*labels} == {-100}:
        raise ValueError("labels must be one per token, -100 or the token, and not all -100")
    for (before, label), token in zip(itertools.pairwise(labels), ids[1:], strict=True):
        if token == tokenizer.eos_token_id and label == -100 != before:  # taken for padding
            raise ValueError("labels exclude the EOS after a target: the model would not stop")
    return ids, labels


def draw_documents(name: str, split: str, rows: Dataset, limit: int, length: int) -> Dataset:
    """Return `limit` random documents (0: all), without those whose first answer starts after
    `length` tokens. Raise Problem if these are more than half."""
    rows = reading.sample(rows, limit)
    cut = rows.with_format("numpy")["cut"][:]
    kept = np.flatnonzero(cut < 2)
    print0(f"{name}, {split}: {len(kept):,} of {len(rows):,} documents")
    if count := np.count_nonzero(cut):
        print0(f"  {count:,} are cut to --max-seq-length {length}, or left out: no answer fits")
    if 2 * len(kept) < len(rows):
        raise Problem(f"{name}: most answers start after --max-seq-length {length}. Raise it.")
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
    packs = []
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
        column = documents.with_format("arrow")["input_ids"][:]
        lengths = pyarrow.compute.list_value_length(column).to_numpy()
        self.lengths = (lengths - 1).tolist()  # the last token has no target
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
    ends, known = [tokenizer.eos_token_id], tokenizer.added_tokens_decoder
    word = "xyzzy"  # in no template
    call = {"type": "function", "function": {"name": "f", "arguments": {"of": word}}}
    calls = [{"content": "", "tool_calls": [call] * count} for count in (1, 2)]
    for turn in ({"content": word}, *calls):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant"} | turn]
        with contextlib.suppress(Exception):  # the template rejects such turns
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            _, *between, after = text.split(word)
            ids = tokenizer([after, "".join(between)], add_special_tokens=False).input_ids
            added = [x for x in ids[0] if x in known and str(known[x]).strip()]  # Gemma has "\n"
            ends += added[-1:] if "tool_calls" in turn else added
            ends = [x for x in ends if x not in ids[1] or x == tokenizer.eos_token_id]
    return ends
