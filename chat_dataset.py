"""Chats for supervised fine-tuning, from rows to packed batches.

Copy this file along with llama_fsdp.py and the folder runtime/.
"""

import hashlib
import itertools
import random
from argparse import ArgumentParser, Namespace
from bisect import bisect_right
from collections import abc, defaultdict

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from jinja2 import TemplateError
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime import arguments
from runtime.rows import bad_rows, chat_formats, chat_templates, json_rows, readers, tokens

FEATURES = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
FEATURES |= {"cut": Value("int64"), "key": Value("int64"), "begins": Value("int64")}
TOGETHER = 32  # rows that are made into tokens in one call: all they are made of is held
SHORT = 100  # characters of a text whose tokens are kept for the other chats


def examples(args: Namespace) -> list[list[dict]]:
    """Return two sequences that begin alike, for model_checks.check_logits. Packed, both end in the
    document that the first also begins with; it is longer than some models' attention blocks."""
    # A multiple of 4, so that two fill a row, which is padded to one of 8.
    length = max(16, min(160, args.max_seq_length // 2 // 4 * 4))
    long = [10 + i % 97 for i in range(length + 1)]
    other = long[:8] + [10 + (3 + 5 * i) % 97 for i in range(8, length + 1)]
    first, second, short = ({"input_ids": x, "labels": x} for x in (long, other, long[:9]))
    return [[first, first], [second, first]] if args.packing else [[first], [short]]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the group "data" to `parser`, whose formatter shows the defaults."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", action="append", help="docstrings (built in, used if none is given), a JSONL, "
        "JSON, Parquet or CSV file, or a hub id; may be given several times")  # fmt: skip
    add("--weights", type=int, nargs="+", help="how often the documents of each --dataset are seen "
        "in an epoch (default: once)")  # fmt: skip
    add("--val-dataset", action="append", help="a file or hub id to validate on, instead of a part "
        "of each --dataset; may be given several times")  # fmt: skip
    add("--dataset-config", help="configuration of a hub data set")
    add("--train-split", default="train", help="split of a hub data set")
    add("--val-split", default="validation", help="the training split again: hold out 5%% of it")
    add("--text-column", default="content", help="column of plain documents")
    add("--max-seq-length", type=int, default=2048, help="tokens in a sequence; the rest is cut")
    add("--chat-template", metavar="NAME|FILE", help=chat_templates.HELP)
    add("--packing", **arguments.ON, help="fill sequences with several documents")
    add("--train-on-prompt", **arguments.OFF, help="train on all turns of a chat, rendered whole")
    add("--bad-rows", choices=bad_rows.CHOICES, default="fail", help=bad_rows.HELP)
    add("--num-train-samples", type=int, default=0, help="documents per data set (0: all)")
    add("--num-val-samples", type=int, default=0, help="the same for validation")


def resolve_arguments(args: Namespace) -> dict[str, list]:
    """Resolve --dataset, --val-dataset and --weights."""
    dataset = args.dataset or ["docstrings"]
    weights = args.weights or [1] * len(dataset)
    return {"dataset": dataset, "val_dataset": args.val_dataset or [], "weights": weights}


def check_arguments(args: Namespace) -> list[str]:
    """List a sentence for each value that is wrong."""
    limits = dict.fromkeys(("num_train_samples", "num_val_samples"), (0, arguments.ANY))
    problems = arguments.out_of_range(args, {"max_seq_length": (8, arguments.ANY)} | limits)
    problems += chat_templates.check_argument(args.chat_template)
    for flag, names in ("--dataset", args.dataset), ("--val-dataset", args.val_dataset):
        for name in [] if args.export_only else names:
            problems += readers.check_name(flag, name)
    if len(args.weights) != len(args.dataset) or min(args.weights) < 1:
        problems.append(
            f"--weights needs a whole number above 0 for each of the {len(args.dataset)} --dataset"
        )
    return problems


def encode(
    chats: list[tuple[list[dict], list[dict] | None]], tokenizer: Tokenizer, train_on_prompt: bool
) -> list[list[tuple[list, list]]]:  # fmt: skip
    """Return the documents of each chat, given with its tools: token ids, and labels, which are the
    id of a target, else -100. The first token is no target.

    Targets are the assistant's turns, from after the header through the end marker: each in one
    document, as the model sees it when it writes it. `train_on_prompt` makes all tokens targets, of
    the chat as it is rendered whole. An answer at a document's end without EOS gets it. The
    template's date is always `chat_templates.DATE`. Raises ValueError, with the number of the turn,
    if it cannot render a chat.
    """
    rendered = [render(chat, tools, tokenizer, train_on_prompt) for chat, tools in chats]
    documents = list(itertools.chain(*rendered))
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer([text for text, _, _ in documents], **options)
    encodings = encoded.encodings or [None] * len(documents)
    kept: dict[str, list[int]] = {}  # the ids of short texts, such as the header of all answers

    def ids_of(texts: list[str]) -> dict[str, list[int]]:
        found = {text: kept[text] for text in texts if text in kept}
        if new := [text for text in dict.fromkeys(texts) if text not in kept]:
            found |= zip(new, tokenizer(new, **options)["input_ids"], strict=True)
            kept.update((text, found[text]) for text in new if len(text) < SHORT)
        return found

    def label(document: tuple, ids: list[int], encoding: Encoding | None) -> tuple[list, list]:
        text, beginnings, is_answered = document
        labels = list(ids) if train_on_prompt else [-100] * len(ids)
        ends = last_parts(text, beginnings, ids, encoding, tokenizer)
        found = ids_of([end for _, end in ends])
        # Tokens may merge across the borders, so these are where the tokens differ first.
        borders = [common_length(ids, found[end], place) for place, end in ends]
        for start, end in zip(borders[::2], borders[1::2], strict=True):
            labels[start:end] = ids[start:end]
        if is_answered and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
            labels = [*labels, tokenizer.eos_token_id]
        return ids, [-100, *labels[1:]]

    labelled = map(label, documents, encoded["input_ids"], encodings)
    return [list(itertools.islice(labelled, len(parts))) for parts in rendered]


def render(
    chat: list[dict], tools: list[dict] | None, tokenizer: Tokenizer, train_on_prompt: bool
) -> list[tuple[str, list[tuple[int, str]], bool]]:  # fmt: skip
    """Return the texts of a chat's documents, each with its beginnings, see `split`, and whether an
    answer ends it; raises ValueError."""
    template = tokenizer.get_chat_template(tools=tools)
    chat_templates.check_turns(tokenizer, template, chat, tools)
    template = chat_templates.with_date(template)
    rendered = chat_templates.renderer(tokenizer, template, chat, tools)
    try:
        whole = rendered(chat).rstrip()  # a line break after the end marker belongs to no turn
    except TemplateError as error:
        raise ValueError(f"{failing_turn(chat, rendered)}: {error}") from error
    parts = [(whole, [])] if train_on_prompt else split(chat, whole, rendered)
    ends_with_answer = chat[-1]["role"] == "assistant"
    return [(text, begins, text != whole or ends_with_answer) for text, begins in parts]


def split(
    chat: list[dict], whole: str, render: abc.Callable
) -> list[tuple[str, list[tuple[int, str]]]]:
    """Return texts in which every answer stands as it is rendered without the turns after it, and
    of each text its beginnings: up to where an answer starts, up to where it ends, and so on. A
    beginning is so many characters of the text, and a text after them.

    It is one text, the whole chat, if later turns never change an earlier one. Some templates drop
    what the assistant thought before the last question, or put the system's turn there.
    """
    texts: list[str] = []
    beginnings: list[list[tuple[int, str]]] = []
    for i, turn in enumerate(chat):
        if turn["role"] != "assistant":
            continue
        try:
            start = render(chat[:i], add_generation_prompt=True) if i else ""
            end = whole if i == len(chat) - 1 else render(chat[: i + 1]).rstrip()
        except TemplateError as error:
            raise ValueError(f"{turn_name(chat, i)}: {error}") from error
        if not end.startswith(start):
            raise ValueError(
                f"{turn_name(chat, i)}: the chat template renders an answer otherwise than it asks "
                "for one, so the model would learn what it will not be asked"
            )
        if texts and end.startswith(texts[-1]):
            texts[-1] = end
        else:
            texts.append(end)
            beginnings.append([])
        # Without a turn before the first one, the header is that of an empty answer.
        header = "" if start else render([{"role": "assistant", "content": ""}])
        beginnings[-1] += [(len(start), header), (len(end), "")]
    if whole.startswith(texts[-1]):
        texts[-1] = whole  # with the turns after the last answer
    return list(zip(texts, beginnings, strict=True))


def last_parts(
    text: str, beginnings: list[tuple[int, str]], ids: list[int], encoding: Encoding | None,
    tokenizer: Tokenizer,
) -> list[tuple[int, str]]:  # fmt: skip
    """Return of each beginning of a text how many of its tokens are the text's for certain, and the
    text that the others are to be made of.

    A fast tokenizer goes on after a token of `restarts` as if nothing stood before it, so only what
    stands from the last one on is made into tokens again. Else it is all of each beginning.
    """
    places, starts, stops = [0], [0], [0]
    if encoding is not None and beginnings:
        contents = chat_templates.restarts(tokenizer)
        for place, token in enumerate(ids):
            if token in contents:
                start = encoding.token_to_chars(place)[0]
                if text.startswith(contents[token], start):
                    places.append(place)
                    starts.append(start)
                    stops.append(start + len(contents[token]))
    found = []
    for known, rest in beginnings:
        last = bisect_right(stops, known) - 1
        found.append((places[last], text[starts[last] : known] + rest))
    return found


def failing_turn(chat: list[dict], render: abc.Callable) -> str:
    """Name the first turn with which the chat template raises."""
    for i in range(len(chat)):
        try:
            render(chat[: i + 1])
        except TemplateError:
            return turn_name(chat, i)
    return turn_name(chat, len(chat) - 1)


def turn_name(chat: list[dict], i: int) -> str:
    """Name a turn by its number, from 1, its speaker and the one before."""
    name = f"turn {i + 1}, the {chat[i]['role']}'s"
    if i:
        name += f" after the {chat[i - 1]['role']}'s"
    return name


def common_length(ids: list[int], other: list[int], start: int) -> int:
    """Return up to which place `ids` have the tokens of `other`, which begin at `start`."""
    if ids[start : start + len(other)] == other:
        return start + len(other)
    return next(i for i, token in enumerate(other, start) if ids[i : i + 1] != [token])


def encode_texts(texts: list[str], tokenizer: Tokenizer) -> list[tuple[list, list]]:
    """Return ids and labels of plain documents: BOS if the tokenizer adds it, text, EOS. Raises
    ValueError if one has no text."""
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("the document is empty or not text")
    options = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    found = tokenizer(texts, **options)["input_ids"]
    eos = [tokenizer.eos_token_id]
    ended = [ids if ids[-1:] == eos else ids + eos for ids in found]
    return [(ids, [-100, *ids[1:]]) for ids in ended]


def key_of(before: str | list[dict]) -> int:
    """Return a hash of 56 bits of what stands before a document's first answer."""
    return int(hashlib.blake2b(repr(before).encode(), digest_size=7).hexdigest(), 16)


def first_target(labels: list[int]) -> int:
    """Return the place of the first label that is a target; their number if there is none."""
    return next((i for i, label in enumerate(labels) if label != -100), len(labels))


def cut(ids: list[int], labels: list[int], length: int, key: int) -> tuple:
    """Return a document's values of FEATURES, with at most `length` tokens."""
    return ids[:length], labels[:length], len(ids[length:]), key, first_target(labels)


def encoder(
    name: str, kind: str, features: Features, tokenizer: Tokenizer, args: Namespace
) -> abc.Callable:
    """Return the function that makes documents, in the columns of FEATURES and bad_rows.ORIGIN, of
    a batch of rows of data set `name` and their indices.

    Documents have at most --max-seq-length + 1 tokens; `cut` is how many more there were, `key` a
    hash of all before the first answer, `begins` the place of the first target. A row gives one
    document or several; a bad row gives an empty one, or raises ValueError."""
    length = args.max_seq_length + 1

    def encode_rows(rows: list[dict]) -> list[list[tuple]]:
        asked, chats = [], []
        for row in rows:
            if row.get(json_rows.BROKEN):
                raise ValueError(row[json_rows.BROKEN])
            row = {key: json_rows.as_in_file(value, features[key]) for key, value in row.items()}
            if kind == "text":
                asked.append(row[args.text_column])
                continue
            chat, tools = chat_formats.read(row, kind)
            asked.append(chat[: [turn["role"] for turn in chat].index("assistant")] or chat)
            chats.append((chat, tools))
        if kind == "text":
            encoded = [[document] for document in encode_texts(asked, tokenizer)]
        else:
            encoded = encode(chats, tokenizer, args.train_on_prompt)
        found = []
        for before, documents in zip(asked, encoded, strict=True):
            key = key_of(before)
            found.append([cut(ids, labels, length, key) for ids, labels in documents])
        return found

    def encode_or_name(rows: list[dict], numbers: list[int]) -> list[tuple]:
        """Encode rows together; if one of them is bad, each alone."""
        try:
            found = encode_rows(rows)
        except (ValueError, TypeError, TemplateError) as error:
            if len(rows) > 1:
                pairs = zip(rows, numbers, strict=True)
                return [x for row, number in pairs for x in encode_or_name([row], [number])]
            problem = bad_rows.problem(name, numbers[0], error, args.bad_rows)
            return [([], [], 0, 0, 0, numbers[0], problem)]
        pairs = zip(numbers, found, strict=True)
        return [(*document, number, "") for number, documents in pairs for document in documents]

    def encode_batch(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        values = zip(*batch.values(), strict=True)
        rows = [dict(zip(batch, row, strict=True)) for row in values]
        numbers = [index + 1 for index in indices]
        found = []
        for i in range(0, len(rows), TOGETHER):
            found += encode_or_name(rows[i : i + TOGETHER], numbers[i : i + TOGETHER])
        columns = [*FEATURES, *bad_rows.ORIGIN]
        return dict(zip(columns, map(list, zip(*found, strict=True)), strict=True))

    return encode_batch


def load_sets(
    args: Namespace, tokenizer: Tokenizer, verbose: bool
) -> tuple[Dataset | None, dict[str, Dataset]]:
    """Return all training documents, each data set's as often as --weights says (None with
    --evaluate-only), and the validation sets by name: a part of each data set, or --val-dataset's.

    They have the columns of FEATURES, and come from the cache if they are there. `verbose` prints
    how many there are, and what was cut. Raises ValueError, with a sentence for the user, if there
    are none.
    """
    readers.show_progress(verbose)
    train_sets = []
    val_sets = {}
    is_needed = not (args.evaluate_only and args.val_dataset)
    for name in args.dataset if is_needed else ():
        train_set, *val_set = load_documents(args, tokenizer, name, verbose)
        train_sets.append(train_set)
        if val_set:
            val_sets[name] = val_set[0]
    for name in args.val_dataset:
        (val_sets[name],) = load_parts(args, tokenizer, name, ["val_split"], verbose)
    for name, rows in val_sets.items():
        limit = args.num_val_samples
        val_sets[name] = draw_documents(rows, limit, f"{name}, validation", args, verbose)
    if args.evaluate_only:
        return None, val_sets
    for number, (name, rows) in enumerate(zip(args.dataset, train_sets, strict=True)):
        limit = args.num_train_samples
        train_sets[number] = draw_documents(rows, limit, f"{name}, training", args, verbose)
    if verbose and chat_templates.asks_for_date(tokenizer):
        print(f"The chat template asks for the date: it is always {chat_templates.DATE}.")
    if verbose:
        say_shares(args, train_sets)
        print(f"an example, «learned»: {readers.marked(train_sets[0][0], tokenizer)}", flush=True)
    weighted = zip(train_sets, args.weights, strict=True)
    return concatenate_datasets([x for rows, weight in weighted for x in [rows] * weight]), val_sets


def load_documents(
    args: Namespace, tokenizer: Tokenizer, name: str, verbose: bool
) -> tuple[Dataset, ...]:
    """Return the training documents of data set `name`, and, without --val-dataset, those to
    validate on: another split of a hub data set, or 5%."""
    if args.val_dataset:
        return tuple(load_parts(args, tokenizer, name, ["train_split"], verbose))
    parts = load_parts(args, tokenizer, name, ["train_split", "val_split"], verbose)
    if len(parts) == 1:
        return readers.hold_out(name, parts[0], parts[0].with_format("numpy")["key"][:])
    return tuple(parts)


def load_parts(
    args: Namespace, tokenizer: Tokenizer, name: str, flags: list[str], verbose: bool
) -> list[Dataset]:
    """Return the documents of all rows of a file, or of each split that `flags` name."""
    if name == "docstrings":
        rows = readers.docstring_rows()
        parts = [(name, rows.rename_columns({"headline": "prompt", "text": "completion"}))]
    else:
        parts = readers.read_parts(name, args, *flags)
    found = [encode_rows(name, rows, tokenizer, args, verbose) for _, rows in parts]
    check_lost(name, found, args, verbose)
    return found


def check_lost(name: str, parts: list[Dataset], args: Namespace, verbose: bool) -> None:
    """Print a warning if more than a tenth of the documents of data set `name` will be left out, as
    their answers begin after --max-seq-length; raise ValueError if more than half will be."""
    begins = np.concatenate([rows.with_format("numpy")["begins"][:] for rows in parts])
    total = len(begins)
    lost = int((begins > args.max_seq_length).sum())
    if 10 * lost <= total:
        return
    enough = np.sort(begins)[-(-9 * total // 10) - 1]
    problem = (
        f"{name}: {lost:,} of {total:,} documents are left out, as their answers begin after "
        f"--max-seq-length {args.max_seq_length}: --max-seq-length {enough} keeps nine of ten"
    )
    if 2 * lost > total:
        raise ValueError(f"{problem}; a run leaves out half at most")
    if verbose:
        print(f"WARNING: {problem}", flush=True)


def say_shares(args: Namespace, train_sets: list[Dataset]) -> None:
    """Print what part of an epoch's target tokens each data set has, if there are several."""
    counts = [readers.count_targets(rows) for rows in train_sets]
    total = sum(count * weight for count, weight in zip(counts, args.weights, strict=True))
    for name, count, weight in zip(args.dataset, counts, args.weights, strict=True):
        if len(counts) > 1:
            share = count * weight / total
            print(f"{name}: {weight} x {count:,} target tokens, {share:.1%} of an epoch's")


def encode_rows(
    name: str, rows: Dataset, tokenizer: Tokenizer, args: Namespace, verbose: bool
) -> Dataset:
    """Return the documents in the rows of data set `name`, from the cache if they are there."""
    columns = [column for column in rows.column_names if column != json_rows.BROKEN]
    kind = chat_formats.find_kind(name, columns, args.text_column)
    if verbose:
        used = chat_formats.used_columns(kind, columns, args.text_column)
        others = ", ".join(column for column in columns if column not in used)
        unused = f"; not used: {others}" if others else ""
        print(f"{name}: rows of kind {kind} ({', '.join(used)}{unused})")
    if kind == "tokens":
        return token_documents(name, rows, tokenizer, args, verbose)
    # --bad-rows is no part of the identity: fail and skip make the same of good rows, and if rows
    # are bad only skip has a result, which good_rows checks again.
    identity = (name, args.max_seq_length, args.train_on_prompt, args.text_column)
    identity += (tokenizer.chat_template, readers.token_rules(tokenizer))
    identity += (chat_templates.asks_for_date(tokenizer) and chat_templates.DATE,)
    # The code of their files counts, too.
    identity += tuple(map(readers.fingerprint, (chat_formats.read, chat_templates.check_turns)))
    features = FEATURES | bad_rows.ORIGIN
    encode_batch = encoder(name, kind, rows.features, tokenizer, args)
    found = readers.cached_map(rows, encode_batch, features, *identity, with_indices=True)
    _, counts = np.unique(found.with_format("numpy")["row"][:], return_counts=True)
    several = counts[counts > 1]
    if verbose and len(several):
        print(
            f"{name}: {len(several):,} chats gave {sum(several):,} documents, as the chat template "
            "renders turns differently when others follow"
        )
    return bad_rows.good_rows(name, found, args.bad_rows, verbose)


def token_documents(
    name: str, rows: Dataset, tokenizer: Tokenizer, args: Namespace, verbose: bool
) -> Dataset:
    """Return documents of tokens made beforehand; without labels, all but the first are targets."""
    shaping = ("max_seq_length", "train_on_prompt")
    rules = readers.token_rules(tokenizer) | {tokens.TEMPLATE: tokenizer.chat_template}
    made_from = tokens.check_origin(name, rows, FEATURES, args, shaping, rules)
    columns = [column for column in ("input_ids", "labels") if column in rows.column_names]
    limits = dict.fromkeys(columns, ("--max-seq-length", args.max_seq_length + 1))
    checked = tokens.checked_columns(name, rows, limits, tokenizer, hidden=True)
    if made_from:  # by --prepare-only: the rows have all columns
        return rows

    def complete(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        found = []
        for index, ids, *labels in zip(indices, *batch.values(), strict=True):
            targets = [-100, *(labels or [ids])[0][1:]]
            problem = ""
            if len(targets) != len(ids):
                problem = "it has not one label for each token"
            elif all(label == -100 for label in targets):
                problem = "no label is a target"
            if problem:
                raise ValueError(f"{name}, {json_rows.place(name, index + 1)}: {problem}")
            found.append((ids, targets, 0, tokens.key(ids), first_target(targets)))
        return dict(zip(FEATURES, map(list, zip(*found, strict=True)), strict=True))

    return readers.cached_map(checked, complete, FEATURES, name, with_indices=True)


def draw_documents(rows: Dataset, limit: int, name: str, args: Namespace, verbose: bool) -> Dataset:
    """Return a random `limit` of the documents (0: all), without those that have no target left.

    A chat has none if its first answer begins after --max-seq-length. With --prepare-only such
    chats stay, so that who trains on the tokens is told of them. Raises ValueError if no document
    is left.
    """
    total = len(rows)
    limit = min(limit or total, total)
    if limit < total:
        rows = rows.select(sorted(random.Random(0).sample(range(total), limit)))
    columns = rows.with_format("numpy", ["cut", "begins"])[:]
    lost = columns["cut"]  # tokens
    cut = np.count_nonzero(lost)
    kept = np.flatnonzero(columns["begins"] <= args.max_seq_length)
    if verbose:
        targets = readers.count_targets(rows)
        print(f"{name}: {limit:,} of {total:,} documents, with {targets:,} target tokens")
    if verbose and cut:
        print(
            f"{name}: {cut:,} of {limit:,} cut to --max-seq-length, losing {lost.sum():,} tokens; "
            f"{limit - len(kept):,} left out, whose answers begin after it",
            flush=True,
        )
    if len(kept) == 0:
        raise ValueError(
            f"{name}: no answer begins within --max-seq-length {args.max_seq_length}: "
            f"--max-seq-length {columns['begins'].max()} keeps all {limit:,} documents"
        )
    if args.prepare_only:
        return rows
    rows = rows.remove_columns("begins")
    return rows if len(kept) == limit else rows.select(kept)


def pack(lengths: abc.Sequence[int], capacity: int, generator: torch.Generator) -> list[list[int]]:
    """Return the indices of `lengths` in packs of at most `capacity`; a longer one is alone.

    Each pack takes the longest that fits, until none does. Of equal lengths a random one is taken.
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
    """The packs of `documents`, planned anew in each epoch.

    A document of n tokens takes n - 1 positions, for the last one has nothing to predict.
    `positions` is their sum, `fill` its share of the room in all packs, and `span` the mean over
    positions of their document's length.
    """

    def __init__(self, documents: Dataset, args: Namespace):
        self.documents = readers.Rows(documents)
        self.args = args
        self.epoch = 0
        self.plans: dict[int, list[list[int]]] = {}  # of the current epoch alone
        parts = (x[0] for x in documents.with_format("arrow", ["input_ids"]).iter(10_000))
        self.lengths = [n - 1 for x in parts for n in x.combine_chunks().value_lengths().tolist()]
        self.positions = sum(self.lengths)
        self.span = sum(n * n for n in self.lengths) / self.positions
        self.fill = self.positions / (len(self) * args.max_seq_length)

    def plan(self) -> list[list[int]]:
        """Return the indices of the documents in each sequence of the epoch."""
        if self.epoch not in self.plans:
            capacity = self.args.max_seq_length if self.args.packing else 0
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.epoch)
            self.plans = {self.epoch: pack(self.lengths, capacity, generator)}
        return self.plans[self.epoch]

    @property
    def dataset(self) -> Dataset:
        """The documents, of which the packs are made."""
        return self.documents.dataset

    def set_epoch(self, epoch: int) -> None:
        """Pack the documents as in this epoch from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.plan())

    def __getitem__(self, i: int) -> list[dict]:
        return self.documents.__getitems__(self.plan()[i])


@readers.names_cache
def load(
    args: Namespace, tokenizer: Tokenizer, verbose: bool
) -> tuple[Packs | None, dict[str, Packs]]:
    """Return packs of the documents of `load_sets`."""
    documents, val_documents = load_sets(args, tokenizer, verbose)
    val_sets = {name: Packs(rows, args) for name, rows in val_documents.items()}
    if args.evaluate_only:
        return None, val_sets
    return Packs(documents, args), val_sets


def collate(samples: list[list[dict]]) -> dict[str, torch.Tensor | int]:
    """Return packs as rows, padded with 0 to a multiple of 8; without samples one row of padding.

    int64 [batch, length]: `input_ids`; `labels`, the token that follows, or -100; `position_ids`,
    from 0 in each document, 0 in padding. int32 `cu_seq_lens`: 0 and the ends, in the flattened
    batch, of the documents and of each row's padding; the int `longest_document` is the longest of
    these. The ints `targets` and `tokens` count the labels that are not -100, and the positions
    that are not padding. int64 `target_positions` are those of the labels in the flattened batch,
    [0] if there is none, because the head needs at least one.
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
        "longest_document": int(np.diff(bounds).max()),
        "targets": targets,
        "tokens": sum(used),
    }
