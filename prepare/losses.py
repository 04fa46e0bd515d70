"""What a tokenizer loses of texts, and which rows are skipped. Any rank may call these."""

import os
import re
from functools import lru_cache

import numpy as np
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from core.ranks import print0

LINES = {  # columns of samples with what is lost, or "", and the line about them
    "change": "the tokenizer changes {} texts, for example: {}",
    "mark": "{} texts spell special tokens, or marks that are no tokens, such as {}",
    "skipped": "Skipped {} rows, for example: {}",
}
# `others` of a batch's first sample are the columns and keys that are not read, as JSON.
FEATURES = dict.fromkeys([*LINES, "others"], Value("string"))
SPACES = ("\n", "\t", "  ")
MARK = re.compile(r"<[|｜][^<>\s]+[|｜]>|</?\w+_of_\w+>|\[/?INST\]|\[/[A-Z_]+\]|</s>")


@lru_cache
def special_tokens(tokenizer: Tokenizer) -> re.Pattern:
    """Return a pattern of the special tokens of a tokenizer, with the spaces that they strip."""
    patterns = [
        (r"\s*" if token.lstrip else "") + re.escape(str(token))
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
    ]
    return re.compile("|".join(patterns) or "(?!)")  # matches nothing


def find_mark(text: str, tokenizer: Tokenizer) -> str:
    """Return the first mark of a chat template in a text that is no token, or the first special
    token that it spells; "" if there is none."""
    for mark in MARK.findall(text):
        if tokenizer.convert_tokens_to_ids(mark) in (None, tokenizer.unk_token_id):
            return mark
    match = special_tokens(tokenizer).search(text)
    return match[0] if match else ""


def find_change(text: str, ids: list, tokenizer: Tokenizer, is_rendered: bool = False) -> str:
    """Return what the tokens of a text change in it; "" if that is at most single spaces. Tokens of
    a rendered chat may be of its start, with EOS."""
    # Of a list, decode() checks the type of each number.
    decoded = tokenizer.decode(np.array(ids), skip_special_tokens=not is_rendered)
    letters = "".join(text.split())
    decoded = "".join(decoded.split())
    end = min(len(letters), len(decoded)) if is_rendered else None
    if letters[:end] != decoded[:end]:
        before, after = difference(letters, decoded)
        return f"{before!r} becomes {after!r}"
    if any(spaces in text for spaces in lost_spaces(tokenizer)):
        return "line breaks or repeated spaces become a space"
    return ""


def difference(*texts: str) -> list:
    """Return the parts of texts around the first place where they differ."""
    same = len(os.path.commonprefix(texts))
    return [text[max(0, same - 20) : same + 20] for text in texts]


@lru_cache
def lost_spaces(tokenizer: Tokenizer) -> list:
    """Return those of SPACES that a tokenizer does not keep between letters."""
    texts = {spaces: tokenizer.decode(tokenizer(f"a{spaces}b")["input_ids"]) for spaces in SPACES}
    return [spaces for spaces, text in texts.items() if spaces not in text]


def print_losses(name: str, samples: Dataset) -> None:
    """Print how many samples have which of FEATURES, with the first of each."""
    for column, line in LINES.items():
        examples = [*filter(None, samples[column][:])]
        if examples:
            print0(f"{name}: " + line.format(f"{len(examples):,}", examples[0]))
