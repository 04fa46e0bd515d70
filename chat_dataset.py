"""Chats for supervised fine-tuning, from rows to packed batches.

Copy this file along with llama_fsdp.py and the folder runtime/.
"""

import functools
import hashlib
import itertools
import json
import os.path
import re
from argparse import Namespace
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from datasets import Dataset, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import chats, readers
from runtime.batches import pad
from runtime.options import BadRows, flag
from runtime.ranks import say

IDS = List(Value("int32"))
NUMBER = Value("int64")
FEATURES = {"input_ids": IDS, "labels": IDS, "cut": NUMBER, "key": NUMBER, "first_target": NUMBER}
BUILT_IN = ("docstrings",)
DATE = date(2024, 7, 26)

Spans = list[tuple[int, int]]  # the start and end characters of the assistant's turns in a text


@dataclass
class Options:
    """data"""

    dataset: list[str] = flag([], "docstrings (built in), CSV, JSON, JSONL or Parquet files, "
        "save_to_disk directories or hub ids; NAME:train[:1000] takes a split or a part (default: "
        "docstrings)", metavar="DATA")  # fmt: skip
    val_dataset: list[str] = flag(
        [], "validate on these instead of a part of each --dataset", metavar="DATA"
    )
    dataset_config: str | None = flag(None, "configuration of a hub data set")
    text_column: str = flag("content", "column with plain documents")
    prompt_column: str | None = flag(None, "column with prompts, for chats of two turns")
    completion_column: str | None = flag(None, "column with their answers")
    system_column: str | None = flag(None, "column with system turns (default: system, or "
        "system_prompt)")  # fmt: skip
    max_seq_length: int = flag(2048, "tokens in a sequence; longer documents are truncated", low=8)
    chat_template: str | None = flag(None, "chatml, llama-2 or a Jinja file (default: the "
        "tokenizer's, or llama-2 if it has none)", metavar="NAME|FILE")  # fmt: skip
    packing: bool = flag(True, "pack several documents into a sequence")
    train_on_prompt: bool = flag(False, "train on all tokens of a chat")
    bad_rows: BadRows = flag("fail", "skip: drop unusable rows")
    num_train_samples: int = flag(0, "documents per data set (0: all)", low=0)
    num_val_samples: int = flag(0, "documents per data set (0: all)", low=0)

    def problems(self) -> list[str]:
        """Return a message if only one of the two columns of a chat is named."""
        if bool(self.prompt_column) == bool(self.completion_column):
            return []
        return ["Pass both --prompt-column and --completion-column."]


def load(args: Namespace, tokenizer: Tokenizer) -> tuple["Packs | None", dict[str, "Packs"]]:
    """Return the training set (None with --evaluate-only) and the validation sets by name.

    Each data set has its own validation set: its split `validation`, else 5% of it. --val-dataset
    replaces them. Raise ValueError if data or flags cannot be used.
    """

    def draw(spec: str, split: str, rows: Dataset, limit: int) -> Dataset:
        if split == "train":
            count_open_ended(spec, rows, tokenizer)
        return draw_documents(f"{spec}, {split}", rows, limit, args.max_seq_length)

    load_parts = functools.partial(load_documents, tokenizer=tokenizer, args=args)
    train_set, val_sets = readers.load_sets(args, "docstrings", load_parts, hold_out, draw)
    capacity = args.max_seq_length if args.packing else 0
    packs = {spec: Packs(rows, capacity, args.seed) for spec, rows in val_sets.items()}
    if not train_set:
        return None, packs
    say(f"an example, with targets in « »: {mark_targets(train_set[0], tokenizer)}")
    return Packs(train_set, capacity, args.seed), packs


def load_documents(spec: str, tokenizer: Tokenizer, args: Namespace) -> readers.Parts:
    """Return the documents of one --dataset argument by split: train, and maybe validation."""
    name, split = readers.split_spec(spec, BUILT_IN)
    if name in BUILT_IN:
        rows = readers.docstring_rows()
        parts = {"train": rows.rename_columns({"headline": "prompt", "text": "completion"})}
    else:
        parts = readers.read(name, args.dataset_config)
    template = tokenizer.chat_template
    if "strftime_now" in str(template):
        say(f"The chat template writes a date, which is always {DATE}.")
    columns = args.text_column, args.prompt_column, args.completion_column, args.system_column
    key = [args.max_seq_length, args.train_on_prompt, *columns, template]
    key += [readers.tokenizer_digest(tokenizer), readers.cache_key(chats.read_chat)]
    documents = {}
    for part, rows in readers.pick(name, parts, split).items():
        convert = row_encoder(name, rows, tokenizer, args)
        rows = readers.select(rows, [*chats.COLUMNS, *columns, "input_ids", "labels"])
        documents[part] = readers.map_rows(name, rows, convert, FEATURES, args.bad_rows, *key)
    return documents


def row_encoder(
    name: str, rows: Dataset, tokenizer: Tokenizer, args: Namespace
) -> Callable[[list[dict]], list[list[dict]]]:
    """Return a function from a list of rows of data set `name` to a list of documents per row.

    A document has FEATURES and at most --max-seq-length + 1 tokens. `cut` counts those cut off,
    `key` a 56-bit hash of everything before the first answer, `first_target` the answer's position.
    """
    length = args.max_seq_length + 1
    columns = readers.columns_of(name, rows)
    pair = args.prompt_column, args.completion_column
    chat_columns = chats.find_columns(name, columns, pair, args.system_column)
    form = f"chats in {' and '.join(chat_columns)}" if chat_columns else "documents or tokens"
    say(f"{name}: columns {', '.join(columns)}, read as {form}")
    options = args.system_column, args.train_on_prompt

    def documents(prompt: object, encoded: list[tuple[list, list]]) -> list[dict]:
        digest = hashlib.blake2b(repr(prompt).encode(), digest_size=7).hexdigest()
        result = []
        for ids, labels in encoded:
            start = next((i for i, label in enumerate(labels) if label != -100), len(labels))
            values = ids[:length], labels[:length], len(ids[length:]), int(digest, 16), start
            result.append(dict(zip(FEATURES, values, strict=True)))
        return result

    def from_chats(batch: list[dict]) -> list[list[dict]]:
        turns = [chats.read_chat(row, chat_columns, *options) for row in batch]
        prompts = []
        for chat, _ in turns:
            first = [turn["role"] for turn in chat].index("assistant")
            prompts.append(chat[:first] or chat)
        return list(map(documents, prompts, encode(turns, tokenizer, args.train_on_prompt)))

    def from_texts(batch: list[dict]) -> list[list[dict]]:
        texts = [row.get(args.text_column) for row in batch]
        pairs = zip(texts, encode_texts(texts, tokenizer), strict=True)
        return [documents(text, [encoded]) for text, encoded in pairs]

    def from_tokens(batch: list[dict]) -> list[list[dict]]:
        pairs = [read_tokens(row, length, tokenizer) for row in batch]
        return [documents(ids, [(ids, labels)]) for ids, labels in pairs]

    if chat_columns:
        return from_chats
    if args.text_column in columns:
        return from_texts
    if "input_ids" in columns:
        readers.compare_origin(name, readers.token_origin(args, tokenizer))
        return from_tokens
    first, *others = readers.guess_columns(columns) or [""]
    advice = "Write each chat as a row of messages"
    if columns.get("text", 0) > 0 or (first and not others and -1 not in columns.values()):
        advice = f"Pass --text-column {'text' if 'text' in columns else first}"
    elif len(others) == 1 or (others and others[0].lower().rstrip("s") in readers.ANSWERS.split()):
        advice = f"Pass --prompt-column {first} --completion-column {others[0]}"
    names = ", ".join(columns)
    raise ValueError(f"--dataset {name} has no chats in its columns {names}. {advice}.")


def encode(
    rows: list[tuple[list[dict], list[dict] | None]], tokenizer: Tokenizer, train_on_prompt: bool
) -> list[list[tuple[list, list]]]:
    """Return the documents of each chat as token ids and labels, which are the ids of targets and
    otherwise -100. `rows` are chats with their tools. The first token is not a target.

    Targets are the tokens of the assistant's turns, from after the header through the end marker,
    or all tokens with `train_on_prompt`. EOS is appended to an answer that ends a document.
    """
    tokens = AnswerTokens(tokenizer)
    eos = tokenizer.eos_token_id
    result = []
    for chat, tools in rows:
        documents = []
        for text, spans, ends_in_answer in render(chat, tools, tokenizer, train_on_prompt):
            parts = tokens.encode(text, spans)
            for ids, labels in parts:
                if train_on_prompt:
                    labels = list(ids)
                if (ends_in_answer or len(parts) > 1) and ids[-1] != eos:
                    ids, labels = [*ids, eos], [*labels, eos]
                documents.append((ids, [-100, *labels[1:]]))
        result.append(documents)
    return result


@functools.cache
def fix_date(template: str) -> str:
    """Return a chat template that writes DATE instead of today's date, so that all nodes and all
    starts of a run render the same text. Raise ValueError if a date format is not a literal."""
    call = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"
    result = re.sub(call, lambda match: json.dumps(DATE.strftime(match[2])), template)
    if "strftime_now(" in result:
        raise ValueError("the chat template calls strftime_now without a format in quotes. Pass "
                         "a --chat-template FILE with a fixed date")  # fmt: skip
    return result


def render(
    chat: list[dict], tools: list[dict] | None, tokenizer: Tokenizer, train_on_prompt: bool
) -> list[tuple[str, Spans, bool]]:
    """Render a chat and return its documents as tuples: the text, the assistant's turns in it, and
    whether the text ends with an answer.

    Each answer is a target in one text, rendered without the turns after it. Usually that is the
    whole chat, but some templates drop reasoning before the last question or move the system
    turn there. Raise ValueError if the template rejects the chat or drops a part of it.
    """
    template = fix_date(tokenizer.get_chat_template(tools=tools))
    options = {"tools": tools, "chat_template": template, "tokenize": False}

    def text_of(turns: list[dict], **more: Any) -> str:
        try:
            return tokenizer.apply_chat_template(turns, **(options | more))
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(f"the chat template rejects the chat: {error}") from error

    is_target = [turn.get("train", turn["role"] == "assistant") for turn in chat]
    chat = [{key: x for key, x in turn.items() if key != "train"} for turn in chat]
    whole = text_of(chat).rstrip()  # a line break after the end marker belongs to no turn
    for turn in chat:
        if turn["role"] != "assistant":
            chats.check_rendered(turn, tools, whole)
    if tools and text_of(chat, tools=None).rstrip() == whole:  # their names may be in a turn
        raise ValueError("the chat template drops the tools. Pass a --chat-template FILE that "
                         "renders them, such as Qwen 2.5's")  # fmt: skip
    if train_on_prompt:
        return [(whole, [], is_target[-1])]
    documents: list[tuple[str, Spans]] = []
    for i in itertools.compress(range(len(chat)), is_target):
        text = whole if i == len(chat) - 1 else text_of(chat[: i + 1]).rstrip()
        if i:
            prompt = text_of(chat[:i], add_generation_prompt=True)
        else:  # no turns to render, so take what precedes an empty answer
            empty = text_of([{"role": "assistant", "content": ""}])
            prompt = os.path.commonprefix([text, empty]).rstrip(" ")
        if not text.startswith(prompt):
            raise ValueError(
                f"turn {i + 1}: the chat template does not start the answer with its generation "
                "prompt, so training would differ from use. If the prompt opens <think>, the "
                "answers need reasoning_content. Or pass --chat-template chatml, which opens none"
            )
        chats.check_rendered(chat[i], None, text[len(prompt) :])
        extends_last = documents and text.startswith(documents[-1][0])
        spans = documents.pop()[1] if extends_last else []
        documents.append((text, [*spans, (len(prompt), len(text))]))
    text, spans = documents[-1]
    if whole.startswith(text):  # with the turns after the last answer
        documents[-1] = whole, spans
    return [(text, spans, spans[-1][1] == len(text)) for text, spans in documents]


class AnswerTokens:
    """Tokenize rendered chats so that the tokens before each answer are those of its prompt alone.

    A token of the whole text may span the end of a prompt, or of an answer. Generation never
    produces it, so each answer then gets a document of its own, cut at these places.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.added = {*tokenizer.added_tokens_decoder}
        self.ids_of = functools.cache(lambda text: self.tokenize(text)[0])
        tokenizer("", verbose=False)  # resets what an earlier call set, such as truncation

    def tokenize(self, text: str) -> tuple[list[int], Spans | None]:
        """Return the ids of a text's tokens and the characters where these start and end, None if
        the tokenizer is slow."""
        if not self.tokenizer.is_fast:
            options = {"add_special_tokens": False, "verbose": False}
            return self.tokenizer(text, **options)["input_ids"], None
        # Without the tokenizer's own call, which takes several times as long for short texts.
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode(self, text: str, spans: Spans) -> list[tuple[list[int], list[int]]]:
        """Return the documents of a text as ids and labels, given the answers in it."""
        ids, offsets = self.tokenize(text)
        labels = [-100] * len(ids)
        for start, end in spans:
            first = self.count(text, ids, offsets, start, is_prompt=True)
            last = self.count(text, ids, offsets, end, is_prompt=False)
            if first is None or last is None:
                return self.split(text, spans)
            labels[first:last] = ids[first:last]
        return [(ids, labels)]

    def count(
        self, text: str, ids: list[int], offsets: Spans | None, position: int, is_prompt: bool
    ) -> int | None:
        """Return the number of tokens in text[:position], or None if those of the whole text
        differ. Slow tokenizers give no `offsets`; for them, compare `ids` with the encoding of
        text[:position]. At the end of an answer only the last token is compared."""
        if offsets is None:
            part = self.ids_of(text[:position])
            return len(part) if ids[: len(part)] == part else None
        count = bisect_right(offsets, position, key=itemgetter(1))
        if not is_prompt:
            # The next token starts before `position` if Metaspace's "▁" took its first character.
            before, after = offsets[count - 1], (offsets[count:] or [(position, position)])[0]
            return count if before[1] == position <= after[0] else None
        # Compare only the last tokens: the text before them, or before an added token, does not
        # change them. If they differ, for example because of a space at the start, compare all.
        recent = range(count - 1, max(0, count - 24), -1)
        first = next((i for i in recent if ids[i] in self.added), max(0, count - 24))
        start = offsets[first - 1][1] if first else 0
        kept = ids[max(first, count - 16) : count]
        if self.ids_of(text[start:position])[-len(kept) :] == kept:
            return count
        return count if ids[:count] == self.ids_of(text[:position]) else None

    def split(self, text: str, spans: Spans) -> list[tuple[list[int], list[int]]]:
        """Return the documents of a text that is cut at the ends of its prompts and answers."""
        documents: list[tuple[list, list]] = []
        for start, end in spans:
            prompt, ids = self.ids_of(text[:start]), self.ids_of(text[:end])
            if ids[: len(prompt)] != prompt:
                ids = prompt + self.after(prompt, text[start:end], ids)
            labels = [-100] * len(prompt) + ids[len(prompt) :]
            if documents and prompt[: len(documents[-1][0])] == documents[-1][0]:
                before = documents.pop()[1]
                labels[: len(before)] = before
            documents.append((ids, labels))
        return documents

    def after(self, prompt: list[int], answer: str, whole: list[int]) -> list[int]:
        """Return the tokens of `answer` that decode after those of `prompt` like `whole`. Some
        tokenizers put a space before the first word of a text, hence the other beginnings."""
        expected = self.tokenizer.decode(whole)
        for beginning in ("", "a", "\n", ".", "0"):
            ids = self.ids_of(beginning + answer)[len(self.ids_of(beginning)) :]
            if self.tokenizer.decode(prompt + ids) == expected:
                return ids
        return self.ids_of(answer)


def encode_texts(texts: list[str], tokenizer: Tokenizer) -> list[tuple[list, list]]:
    """Return ids and labels of plain documents: BOS if the tokenizer adds it, text, EOS. Raise
    ValueError if one is empty or not text."""
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"the document is {text!r}, not text")
    options = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    eos = [tokenizer.eos_token_id]
    documents = []
    for ids in tokenizer(texts, **options)["input_ids"]:
        sequence = ids if ids[-1:] == eos else ids + eos
        documents.append((sequence, [-100, *sequence[1:]]))
    return documents


def read_tokens(row: dict, length: int, tokenizer: Tokenizer) -> tuple[list, list]:
    """Return ids and labels of a tokenized row; raise ValueError if they cannot be trained on."""
    ids = readers.token_ids(row, "input_ids", "--max-seq-length", length, tokenizer)
    labels = [-100, *row.get("labels", ids)[1:]]
    is_wrong = len(labels) != len(ids) or any(map(lambda x, i: x not in (-100, i), labels, ids))
    if is_wrong or {*labels} == {-100}:
        raise ValueError("labels must be one per token, -100 or the token, and not all -100")
    return ids, labels


def hold_out(name: str, rows: Dataset) -> readers.Parts:
    """Split documents into `train` and `validation`, see `readers.held_out`. Documents with equal
    prompts (column `key`) stay together."""
    keys = rows.with_format("numpy")["key"][:]
    distinct = np.unique(keys)  # hashes, so their order is random
    usual = keys < distinct[len(distinct) // 20]
    return readers.split_by(readers.held_out(name, keys, usual), rows)


def draw_documents(name: str, rows: Dataset, limit: int, length: int) -> Dataset:
    """Return `limit` random documents (0: all), without those whose first answer starts after
    `length` tokens. Raise ValueError if these are more than half."""
    total = len(rows)
    rows = readers.sample(rows, limit)
    first_targets = rows.with_format("numpy")["first_target"][:]
    kept = np.flatnonzero(first_targets <= length)
    dropped = len(rows) - len(kept)
    cut = np.count_nonzero(rows.with_format("numpy")["cut"][:])
    say(f"{name}: {len(rows):,} of {total:,} documents, {count_targets(rows):,} target tokens\n"
        f"  {cut:,} cut to --max-seq-length; {dropped:,} left out, because their answers start "
        "later")  # fmt: skip
    if 2 * dropped > len(rows):
        enough = np.sort(first_targets)[-(-9 * len(rows) // 10) - 1]
        raise ValueError(f"{name}: in {dropped:,} of {len(rows):,} documents, the answers start "
                         f"after --max-seq-length {length}. Pass {enough} to keep nine of ten."
                         )  # fmt: skip
    return rows.select_columns(["input_ids", "labels"]).select(kept)


def count_targets(rows: Dataset) -> int:
    """Return the number of labels in the rows that are not -100."""
    parts = (labels.flatten().to_numpy() for labels in readers.arrays(rows, "labels"))
    return sum(int((part != -100).sum()) for part in parts)


def count_open_ended(name: str, rows: Dataset, tokenizer: Tokenizer) -> None:
    """Print a warning if answers in the first rows end in an ordinary token, not cut ones."""
    added = tokenizer.added_tokens_decoder.items()
    stops = [tokenizer.eos_token_id, *(i for i, token in added if token.special)]
    table = rows.with_format("arrow")[:10_000]
    labels = table["labels"].combine_chunks()
    tokens = labels.flatten().to_numpy()
    is_last = (tokens != -100) & (np.append(tokens[1:], -100) == -100)
    is_last[labels.value_lengths().to_numpy().cumsum()[table["cut"].to_numpy() > 0] - 1] = False
    is_open = ~np.isin(tokens[is_last], stops)
    if is_open.any():
        say(f"Warning: {name}: {is_open.sum():,} of {is_open.size:,} answers end in an ordinary "
            "token, so the model may not learn to stop. Pass a --chat-template whose turns end in "
            "a special token, for example llama-2.")  # fmt: skip


def mark_targets(example: dict[str, list[int]], tokenizer: Tokenizer) -> str:
    """Return the start of the example's text, with the targets in « and »."""
    text = ""
    pairs = zip(example["input_ids"], example["labels"], strict=True)
    for is_target, group in itertools.groupby(pairs, key=lambda pair: pair[1] != -100):
        part = tokenizer.decode([token for token, _ in group])
        text += f"«{part}»" if is_target else part
    return readers.shorten(text)


def pack(lengths: Sequence[int], capacity: int, generator: torch.Generator) -> list[list[int]]:
    """Return groups of indices of `lengths`. The lengths in a group sum to at most `capacity`; a
    longer one gets its own group. Each group takes the longest that fits, until none does.

    Equal lengths are drawn at random, so the number of groups is the same in every epoch.
    """
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


class Packs(torch.utils.data.Dataset):
    """Sequences of documents that are packed up to `capacity` tokens (0: one each), planned
    separately for each epoch.

    A document of n tokens takes n - 1 positions, because its last token has no target. The
    `mean_length` of documents is averaged over positions.
    """

    def __init__(self, documents: Dataset, capacity: int, seed: int):
        self.dataset = documents
        self.capacity = capacity
        self.seed = seed
        parts = (ids.value_lengths().tolist() for ids in readers.arrays(documents, "input_ids"))
        self.lengths = [length - 1 for part in parts for length in part]
        self.mean_length = sum(n * n for n in self.lengths) / sum(self.lengths)
        self.epoch: int | None = None
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Plan the epoch whose packed sequences len() and [i] refer to."""
        if epoch != self.epoch:
            self.epoch = epoch
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.plan = pack(self.lengths, self.capacity, generator)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, i: int) -> list[dict]:
        return self.dataset.__getitems__(self.plan[i])


def probe_batch(max_seq_length: int, packing: bool) -> list[list[dict]]:
    """Return two sequences that start alike, for checks.check_model. With `packing`, the
    rows are [a, a] and [b, a], so that equal documents can be compared."""
    # A multiple of 4, because two documents fill a row, which is padded to a multiple of 8. It is
    # longer than some attention blocks.
    length = max(16, min(160, max_seq_length // 2 // 4 * 4))
    a = [10 + i % 97 for i in range(length + 1)]
    b = a[:8] + [10 + (3 + 5 * i) % 97 for i in range(8, length + 1)]
    rows = [[a, a], [b, a]] if packing else [[a], [a[:9]]]
    return [[{"input_ids": ids, "labels": ids} for ids in row] for row in rows]


def collate(samples: list[list[dict]]) -> dict[str, torch.Tensor | int]:
    """Return a batch with a row per pack, padded to a multiple of 8; one row if there are no packs.

    int64 [batch, length]: `input_ids`; `labels`, the next token or -100; `position_ids`, which
    start at 0 in each document. `input_ids` and `position_ids` are 0 in padding. int32
    `cu_seq_lens`: 0 and the ends, in the flattened batch, of the documents and of each row's
    padding. int `longest_document`: the longest of these. ints `targets` and `tokens`: the labels
    that are not -100, and the positions that are not padding. int64 `target_positions`: the targets
    in the flattened batch, [0] if there are none, because the head needs at least one.
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
        "cu_seq_lens": torch.tensor([0, *itertools.accumulate(segments)], dtype=torch.int32),
        "longest_document": max(segments),
        "targets": len(target_positions),
        "tokens": sum(map(sum, lengths)),
    }


def joined(parts: Iterable[Sequence[int]]) -> np.ndarray:
    """Return the values of all parts, none if there are no parts."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
