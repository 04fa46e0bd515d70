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

from runtime import arguments, readers

ROLES = ("system", "user", "assistant")
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
    add("--train-on-prompt", **arguments.OFF, help="train on all turns of a chat")
    add("--num-train-samples", type=int, default=0, help="documents per data set (0: all)")
    add("--num-val-samples", type=int, default=0, help="the same for validation")


def check_arguments(args: Namespace) -> list[str]:
    """One sentence for each value that is out of range."""
    limits = dict.fromkeys(("num_train_samples", "num_val_samples"), (0, arguments.ANY))
    return arguments.out_of_range(args, {"max_seq_length": (8, arguments.ANY)} | limits)


def find_kind(name: str, columns: list[str], text_column: str) -> str:
    """What the rows of data set `name` hold: messages, prompt or text; ValueError if none."""
    known = {"messages": {"messages"}, "prompt": {"prompt", "completion"}, "text": {text_column}}
    for kind, needed in known.items():
        if needed <= set(columns):
            return kind
    raise ValueError(f"{name} has columns {', '.join(columns)}: it needs messages, prompt and "
                     f"completion, or --text-column {text_column}")  # fmt: skip


def messages(row: dict, kind: str) -> list[dict[str, str]]:
    """The chat in a row of kind messages or prompt, {role, content} a turn; raises ValueError."""
    pair = {"user": row.get("prompt"), "assistant": row.get("completion")}
    turns = [{"role": role, "content": text or None} for role, text in pair.items()]
    chat = turns if kind == "prompt" else row["messages"]
    if not chat or not isinstance(chat, list) or not all(isinstance(turn, dict) for turn in chat):
        raise ValueError("messages is empty or not a list of {role, content}")
    for turn in chat:
        role = turn.get("role")
        if role not in ROLES:
            raise ValueError(f"the role {role} is not one of {', '.join(ROLES)}")
        if not isinstance(turn.get("content"), str):
            raise ValueError(f"the {role}'s turn is empty or not text")
    if all(turn["role"] != "assistant" for turn in chat):
        raise ValueError("no turn is the assistant's, so there is nothing to learn")
    return [{"role": turn["role"], "content": turn["content"]} for turn in chat]


def encode(chat: list[dict], tokenizer: Tokenizer, train_on_prompt: bool) -> tuple[list, list]:
    """Token ids of a chat, and labels: the id of a target, else -100; never the first token.

    Targets are the assistant's turns, from after the header through the end marker, or all tokens.
    A last turn without EOS gets it. Raises ValueError if a template alters earlier turns,
    TemplateError if it refuses the chat.
    """
    template = None if tokenizer.chat_template else TEMPLATE
    render = partial(tokenizer.apply_chat_template, tokenize=False, chat_template=template)
    text = render(chat).rstrip()  # a line break after the end marker is nobody's
    spoken = [i for i, turn in enumerate(chat) if turn["role"] == "assistant"]
    beginnings = []  # of the text: up to where an answer starts, up to where it ends, and so on
    if not train_on_prompt:
        for i in spoken:
            start = render(chat[:i], add_generation_prompt=True) if i else ""
            end = render(chat[: i + 1]).rstrip()
            if not (text.startswith(start) and text.startswith(end)):
                raise ValueError("the chat template renders a turn differently when others follow")
            # Without a turn before the first one, the header is that of an empty answer.
            beginnings += [start or render([chat[0] | {"content": ""}]), end]
    encoded = tokenizer([text, *beginnings], add_special_tokens=False, verbose=False)["input_ids"]
    ids = encoded[0]
    labels = list(ids) if train_on_prompt else [-100] * len(ids)
    # Tokens may merge across the borders, so these are where the tokens differ first.
    borders = [common_length(ids, other) for other in encoded[1:]]
    for start, end in zip(borders[::2], borders[1::2], strict=True):
        labels[start:end] = ids[start:end]
    if spoken[-1] == len(chat) - 1 and ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
        labels = [*labels, tokenizer.eos_token_id]
    return ids, [-100, *labels[1:]]


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
    """The function from rows of data set `name` and their indices to FEATURES: --max-seq-length + 1
    tokens, how many are `cut`, and a `key` from all before the first answer; raises ValueError."""

    def encode_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        found = []
        length = args.max_seq_length + 1
        for index, *values in zip(indices, *batch.values(), strict=True):
            row = dict(zip(batch, values, strict=True))
            try:
                if kind == "text":
                    before = row[args.text_column]
                    ids, labels = encode_text(before, tokenizer)
                else:
                    chat = messages(row, kind)
                    before = chat[: [turn["role"] for turn in chat].index("assistant")] or chat
                    ids, labels = encode(chat, tokenizer, args.train_on_prompt)
            except (ValueError, TypeError, TemplateError) as error:
                raise ValueError(f"{name}, row {index + 1}: {error}") from error
            key = int(hashlib.blake2b(repr(before).encode(), digest_size=7).hexdigest(), 16)
            found.append((ids[:length], labels[:length], len(ids[length:]), key))
        return dict(zip(FEATURES, map(list, zip(*found, strict=True)), strict=True))

    return encode_batch


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
    parts = readers.read_parts(name, args, "train_split", "val_split")
    return [rows for _, rows in parts]


def load_documents(
    args: Namespace, tokenizer: Tokenizer, name: str, verbose: bool
) -> tuple[Dataset, Dataset]:
    """Training and validation documents of data set `name`, with the columns of FEATURES.

    They come from the cache if they are there. `verbose` prints how many there are and what was
    cut. Raises ValueError, with a sentence for the user, if there are none.
    """
    readers.show_progress(verbose)
    identity = (name, args.max_seq_length, args.train_on_prompt, args.text_column)
    identity += (tokenizer.chat_template, *readers.tokenizer_identity(tokenizer))
    encoded = []
    for rows in read_rows(name, args):
        kind = find_kind(name, rows.column_names, args.text_column)
        encode_batch = encoder(name, kind, tokenizer, args)
        encoded.append(
            readers.cached_map(rows, encode_batch, FEATURES, *identity, with_indices=True)
        )
    if len(encoded) == 1:
        train_set, val_set = readers.hold_out(name, encoded[0], encoded[0]["key"][:])
    else:
        train_set, val_set = encoded
    train_set = choose(train_set, args.num_train_samples, f"{name}, training", verbose)
    val_set = choose(val_set, args.num_val_samples, f"{name}, validation", verbose)
    if verbose:
        print(f"an example, «learned»: {readers.marked(train_set[0], tokenizer)}", flush=True)
    return train_set, val_set


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
