"""Chats for supervised fine-tuning, from rows to packed batches.

Copy this file along with llama_fsdp.py and the folder runtime/.
"""

import hashlib
import random
from argparse import ArgumentParser, Namespace
from bisect import bisect_right
from collections import abc, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, List, Value
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import arguments, chat_formats, readers

# Spaces stand before turns, not after: the text of a longer chat begins with that of a shorter one.
TEMPLATE = """{{ bos_token or '' }}{% for message in messages %}{{ '' if loop.first else ' ' }}<|{{
'prompter' if message['role'] == 'user' else message['role'] }}|> {{ message['content'] }} {{
'<|endoftext|>' }}{% endfor %}{{ ' <|assistant|>' if add_generation_prompt else '' }}"""
FEATURES = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
FEATURES |= {"cut": Value("int64"), "key": Value("int64")}
EXAMPLE = [{"input_ids": range(17), "labels": range(17)}] * 2  # a pack of two documents


def add_arguments(parser: ArgumentParser) -> None:
    """Add the group "data" to `parser`, whose formatter shows the defaults."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", action="append", help="docstrings (built in, used if none is given), a JSONL, "
        "JSON, Parquet or CSV file, or a hub id; may be given several times")  # fmt: skip
    add("--dataset-config", help="configuration of a hub data set")
    add("--train-split", default="train", help="split of a hub data set")
    add("--val-split", default="validation", help="the training split again: hold out 5%% of it")
    add("--text-column", default="content", help="column of plain documents")
    add("--max-seq-length", type=int, default=2048, help="tokens in a sequence; the rest is cut")
    add("--packing", **arguments.ON, help="fill sequences with several documents")
    add("--train-on-prompt", **arguments.OFF, help="train on all turns of a chat, rendered whole")
    add("--bad-rows", choices=["fail", "skip"], default="fail",
        help="skip: leave out rows that cannot be used, up to half, and say which")  # fmt: skip
    add("--num-train-samples", type=int, default=0, help="documents per data set (0: all)")
    add("--num-val-samples", type=int, default=0, help="the same for validation")


def check_arguments(args: Namespace) -> list[str]:
    """One sentence for each value that is out of range."""
    limits = dict.fromkeys(("num_train_samples", "num_val_samples"), (0, arguments.ANY))
    return arguments.out_of_range(args, {"max_seq_length": (8, arguments.ANY)} | limits)


def encode(
    chat: list[dict], tools: list[dict] | None, tokenizer: Tokenizer, train_on_prompt: bool
) -> list[tuple[list, list]]:
    """The documents of a chat: token ids, and labels, the id of a target, else -100; never the
    first token.

    Targets are the assistant's turns, from after the header through the end marker: each in one
    document, as the model sees it when it writes it. `train_on_prompt` makes targets of all tokens
    of the chat as it is rendered whole. An answer at a document's end without EOS gets it. Raises
    ValueError or TemplateError if the template cannot render the chat.
    """
    template = None if tokenizer.chat_template else TEMPLATE
    chat_formats.check_template(tokenizer.get_chat_template(template, tools), chat, tools)
    options = {"tools": tools, "tokenize": False, "chat_template": template}
    render = partial(tokenizer.apply_chat_template, **options)
    whole = render(chat).rstrip()  # a line break after the end marker is nobody's
    found = []
    for text, beginnings in [(whole, [])] if train_on_prompt else split(chat, whole, render):
        texts = [text, *beginnings]
        ids, *others = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        labels = list(ids) if train_on_prompt else [-100] * len(ids)
        # Tokens may merge across the borders, so these are where the tokens differ first.
        borders = [common_length(ids, other) for other in others]
        for start, end in zip(borders[::2], borders[1::2], strict=True):
            labels[start:end] = ids[start:end]
        answered = text != whole or chat[-1]["role"] == "assistant"
        if answered and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
            labels = [*labels, tokenizer.eos_token_id]
        found.append((ids, [-100, *labels[1:]]))
    return found


def split(chat: list[dict], whole: str, render: abc.Callable) -> list[tuple[str, list[str]]]:
    """Texts that begin with the chat up to each answer as it is rendered without what follows, and
    the beginnings of each: up to where an answer starts, up to where it ends, and so on.

    One text, the whole chat, if what follows never alters a turn. Some templates drop what the
    assistant thought before the last question, or put the system's turn there.
    """
    texts: list[str] = []
    beginnings: list[list[str]] = []
    for i, turn in enumerate(chat):
        if turn["role"] != "assistant":
            continue
        start = render(chat[:i], add_generation_prompt=True) if i else ""
        end = render(chat[: i + 1]).rstrip()
        if not end.startswith(start):
            raise ValueError(
                "the chat template renders an answer otherwise than it asks for one, so the model "
                "would learn what it will not be asked"
            )
        if texts and end.startswith(texts[-1]):
            texts[-1] = end
        else:
            texts.append(end)
            beginnings.append([])
        # Without a turn before the first one, the header is that of an empty answer.
        beginnings[-1] += [start or render([{"role": "assistant", "content": ""}]), end]
    if whole.startswith(texts[-1]):
        texts[-1] = whole  # with the turns after the last answer
    return list(zip(texts, beginnings, strict=True))


def common_length(ids: list[int], other: list[int]) -> int:
    """How many tokens of `other` are the first ones of `ids`."""
    for place, token in enumerate(other):
        if ids[place : place + 1] != [token]:
            return place
    return len(other)


def encode_text(text: str, tokenizer: Tokenizer) -> tuple[list, list]:
    """The same of a document: BOS if the tokenizer adds it, text, EOS; ValueError without text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the document is empty or not text")
    ids = tokenizer(text, split_special_tokens=True, verbose=False)["input_ids"]
    if ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return ids, [-100, *ids[1:]]


def encoder(name: str, kind: str, tokenizer: Tokenizer, args: Namespace) -> abc.Callable:
    """The function from rows of data set `name` and their indices to FEATURES and readers.ORIGIN:
    documents of --max-seq-length + 1 tokens, how many are `cut`, and a `key` from all before the
    first answer. A row is one document or several; a bad one an empty one, or a ValueError."""
    length = args.max_seq_length + 1

    def encode_row(row: dict) -> list[tuple]:
        if kind == "text":
            before = row[args.text_column]
            found = [encode_text(before, tokenizer)]
        else:
            chat, tools = chat_formats.read(row, kind)
            before = chat[: [turn["role"] for turn in chat].index("assistant")] or chat
            found = encode(chat, tools, tokenizer, args.train_on_prompt)
        key = int(hashlib.blake2b(repr(before).encode(), digest_size=7).hexdigest(), 16)
        return [(ids[:length], labels[:length], len(ids[length:]), key) for ids, labels in found]

    def encode_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        found = []
        for index, *values in zip(indices, *batch.values(), strict=True):
            problem = ""
            try:
                documents = encode_row(dict(zip(batch, values, strict=True)))
            except (ValueError, TypeError, TemplateError) as error:
                problem = readers.problem(name, index + 1, error, args.bad_rows)
                documents = [([], [], 0, 0)]
            found += [(*document, index + 1, problem) for document in documents]
        columns = [*FEATURES, *readers.ORIGIN]
        return dict(zip(columns, map(list, zip(*found, strict=True)), strict=True))

    return encode_batch


def held_out(keys: list[int]) -> list[bool]:
    """True for the rows of 5% of the keys, of one at least; ValueError if all are the same."""
    distinct = sorted(set(keys))  # hashes: the least of them are a random choice
    if len(distinct) < 2:
        raise ValueError("5% cannot be held out: no two rows differ before the first answer")
    return [key < distinct[max(1, len(distinct) // 20)] for key in keys]


def read_rows(name: str, args: Namespace) -> list[Dataset]:
    """The rows of data set `name`: a training and a validation set, or one that is to be split.

    Raises ValueError, with a sentence for the user, if they cannot be had.
    """
    if name == "docstrings":
        rows = readers.docstring_rows()
        return [rows.rename_columns({"headline": "prompt", "text": "completion"})]
    path = Path(name)
    if path.is_file() or path.suffix:
        if path.suffix.lower() not in readers.KINDS:
            known = ", ".join(readers.KINDS)
            raise ValueError(f"--dataset {name} is of no known kind: {known}")
        return [readers.read_file(path)]
    splits = readers.read_hub(name, args)
    return [splits[part] for part in dict.fromkeys((args.train_split, args.val_split))]


def load_documents(
    args: Namespace, tokenizer: Tokenizer, name: str, verbose: bool
) -> tuple[Dataset, Dataset]:
    """Training and validation documents of data set `name`, with the columns of FEATURES.

    They come from the cache if they are there. `verbose` prints how many there are and what was
    cut. Raises ValueError, with a sentence for the user, if there are none.
    """
    readers.show_progress(verbose)
    encoded = [encode_rows(name, rows, tokenizer, args, verbose) for rows in read_rows(name, args)]
    if len(encoded) == 1:
        rows = encoded[0]
        is_held_out = held_out(rows["key"][:])
        train_set = rows.select([i for i, out in enumerate(is_held_out) if not out])
        val_set = rows.select([i for i, out in enumerate(is_held_out) if out])
    else:
        train_set, val_set = encoded
    train_set = choose(train_set, args.num_train_samples, f"{name}, training", verbose)
    val_set = choose(val_set, args.num_val_samples, f"{name}, validation", verbose)
    if verbose:
        print(f"an example, «learned»: {readers.marked(train_set[0], tokenizer)}", flush=True)
    return train_set, val_set


def encode_rows(
    name: str, rows: Dataset, tokenizer: Tokenizer, args: Namespace, verbose: bool
) -> Dataset:
    """The documents in the rows of data set `name`, from the cache if they are there."""
    kind = chat_formats.find_kind(name, rows.column_names, args.text_column)
    if verbose:
        used = chat_formats.used_columns(kind, rows.column_names, args.text_column)
        print(f"{name}: rows of kind {kind} ({', '.join(used)})")
    # --bad-rows is no part of it: fail and skip make the same of good rows, and where rows are bad
    # only skip has a result, at which good_rows looks again.
    identity = (name, args.max_seq_length, args.train_on_prompt, args.text_column)
    identity += (tokenizer.chat_template, *readers.tokenizer_identity(tokenizer))
    identity += (readers.fingerprint(chat_formats.read),)  # what is in its file counts, too
    features = FEATURES | readers.ORIGIN
    encode_batch = encoder(name, kind, tokenizer, args)
    found = readers.cached_map(rows, encode_batch, features, *identity, with_indices=True)
    _, counts = np.unique(found["row"][:], return_counts=True)
    several = counts[counts > 1]
    if verbose and len(several):
        print(
            f"{name}: {len(several):,} chats gave {sum(several):,} documents, as the chat template "
            "renders turns differently when others follow"
        )
    return readers.good_rows(name, found, args.bad_rows, verbose)


def choose(rows: Dataset, limit: int, name: str, verbose: bool) -> Dataset:
    """A random choice of `limit` documents (0: all), without those that have no target left.

    A chat has none if its first answer begins after --max-seq-length. Raises ValueError if that is
    so of all of them.
    """
    limit = min(limit or len(rows), len(rows))
    rows = rows.select(sorted(random.Random(0).sample(range(len(rows)), limit)))
    cut = {i: tokens for i, tokens in enumerate(rows["cut"][:]) if tokens}
    empty = set()
    for i, labels in zip(cut, rows.select(list(cut))["labels"], strict=True):
        if all(label == -100 for label in labels):
            empty.add(i)
    if verbose:
        print(f"{name}: {limit:,} documents with {readers.count_targets(rows):,} target tokens")
    if verbose and cut:
        print(
            f"{name}: {len(cut):,} cut to --max-seq-length, losing {sum(cut.values()):,} tokens; "
            f"{len(empty):,} left out, whose answers begin after it",
            flush=True,
        )
    if len(empty) == limit:
        raise ValueError(f"{name}: no answer begins within --max-seq-length")
    return rows.select([i for i in range(limit) if i not in empty])


def pack(lengths: abc.Sequence[int], capacity: int, generator: torch.Generator) -> list[list[int]]:
    """Indices of `lengths` in packs of `capacity`, or alone above it.

    Each pack takes the longest that fits, until none does. Which one of equal length is a draw.
    That changes no sum, so the number of packs, and of steps, is the same in every epoch.
    """
    packs: list[list[int]] = []
    by_length = defaultdict(list)
    for i in torch.randperm(len(lengths), generator=generator).tolist():
        by_length[lengths[i]].append(i)
    left = sorted(by_length)
    while left:
        packs.append([])
        room = max(capacity, left[-1])
        while fitting := bisect_right(left, room):
            length = left[fitting - 1]
            packs[-1].append(by_length[length].pop())
            room -= length
            if not by_length[length]:
                del left[fitting - 1]
    return packs


class Packs(torch.utils.data.Dataset):
    """`documents` as packs, planned anew in each epoch.

    A document of n tokens takes n - 1 positions, for the last one has nothing to predict.
    `positions` is their sum, `fill` its share of the room in all packs, and `span` the mean over
    positions of their document's length.
    """

    def __init__(self, documents: Dataset, args: Namespace):
        self.documents = readers.Rows(documents)
        self.args = args
        self.epoch = 0
        self.plans: dict[int, list[list[int]]] = {}  # of the epoch at hand
        parts = (x[0] for x in documents.with_format("arrow", ["input_ids"]).iter(10_000))
        self.lengths = [n - 1 for x in parts for n in x.combine_chunks().value_lengths().tolist()]
        self.positions = sum(self.lengths)
        self.span = sum(n * n for n in self.lengths) / self.positions
        self.fill = self.positions / (len(self) * args.max_seq_length)

    def plan(self) -> list[list[int]]:
        """The documents in each sequence of the epoch."""
        if self.epoch not in self.plans:
            capacity = self.args.max_seq_length if self.args.packing else 0
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.epoch)
            self.plans = {self.epoch: pack(self.lengths, capacity, generator)}
        return self.plans[self.epoch]

    def set_epoch(self, epoch: int) -> None:
        """Pack the documents as in this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.plan())

    def __getitem__(self, i: int) -> list[dict]:
        return self.documents.__getitems__(self.plan()[i])


def collate(samples: list[list[dict]]) -> dict[str, torch.Tensor | int]:
    """Packs as rows, padded with 0 to a multiple of 8; without samples one row, all padding.

    int64 [batch, length]: `input_ids`; `labels`, which follow them, or -100; `position_ids`, from 0
    in each document, 0 in padding. int32 `cu_seq_lens`: 0 and the ends, in the flattened batch, of
    the documents and of each row's padding. The ints `targets` and `tokens` count the labels that
    are not -100, and the positions that are not padding. int64 `target_positions` are those of the
    labels in the flattened batch; one is there even if there is no label, for a head needs some.
    """
    rows = samples or [[]]
    used = [sum(len(document["labels"]) - 1 for document in row) for row in rows]
    width = max(8, -(-max(used) // 8) * 8)
    shape = len(rows), width
    input_ids = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, -100)
    positions = np.zeros(shape, dtype=np.int64)
    count = np.arange(width)
    bounds = [0]
    for number, row in enumerate(rows):
        at = 0
        for document in row:
            end = at + len(document["labels"]) - 1
            input_ids[number, at:end] = document["input_ids"][:-1]
            labels[number, at:end] = document["labels"][1:]
            positions[number, at:end] = count[: end - at]
            bounds.append(number * width + end)
            at = end
        if at < width:
            bounds.append((number + 1) * width)
    target_positions = np.flatnonzero(labels != -100)
    targets = len(target_positions)
    if targets == 0:
        target_positions = np.zeros(1, dtype=np.int64)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "target_positions": torch.from_numpy(target_positions),
        "position_ids": torch.from_numpy(positions),
        "cu_seq_lens": torch.tensor(bounds, dtype=torch.int32),
        "targets": targets,
        "tokens": sum(used),
    }
