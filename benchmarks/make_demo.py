"""Make the model and data of `make demo`: a small random T5, and sentences to restore.

    python benchmarks/make_demo.py output/demo

The sentences are those of the docstrings of Python's library. The model is given a sentence's words
without the commonest, such as "names open files", and must write the sentence: "Return the names of
all open files." Its vocabulary is learned from the sentences. A model so small repeats itself: its
generation_config.json forbids that, as it may for any model.
"""

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

from runtime.rows import readers

VOCABULARY = 2048
SHAPE = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,'()_-]+\.")
COMMON = (
    "a an and are as at be been by can could do does for from has have if in into is it its may "
    "must not of on or should so than that the their then there these they this to was were when "
    "which will with would you"
)
LEFT_OUT = set(COMMON.split())


def sentences() -> list[str]:
    """Return the sentences of 5 to 14 words in the docstrings of Python's library, each once."""
    found = {}
    for row in readers.docstrings():
        for paragraph in (row["headline"], *row["text"].split("\n\n")):
            for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(paragraph.split())):
                if SENTENCE.fullmatch(sentence) and 5 <= len(sentence.split()) <= 14:
                    found[sentence] = None
    return list(found)


def keywords(sentence: str) -> str:
    """Return the words of a sentence without the commonest: the model's input."""
    words = re.findall(r"[\w'()-]+", sentence)
    return " ".join(word for word in words if word.lower() not in LEFT_OUT)


def make_tokenizer(texts: list[str]) -> T5Tokenizer:
    """Learn a unigram vocabulary of the texts, with EOS and padding as T5 has them."""
    return T5Tokenizer(extra_ids=0).train_new_from_iterator(
        texts, vocab_size=VOCABULARY, show_progress=False
    )


def make_model(tokenizer: T5Tokenizer) -> T5ForConditionalGeneration:
    """Return a T5 with random weights, the same each time."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        dropout_rate=0.0,
        **SHAPE,
    )
    model = T5ForConditionalGeneration(config)
    model.generation_config.update(no_repeat_ngram_size=2, repetition_penalty=1.2)
    return model


def main() -> None:
    """Write DIRECTORY/model, a Hugging Face directory, and DIRECTORY/sentences.jsonl."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where to write")
    directory = parser.parse_args().directory
    targets = sentences()
    tokenizer = make_tokenizer(targets)
    model = make_model(tokenizer)
    tokenizer.save_pretrained(directory / "model")
    model.save_pretrained(directory / "model")
    with (directory / "sentences.jsonl").open("w") as file:
        for sentence in targets:
            row = {"keywords": keywords(sentence), "sentence": sentence}
            file.write(json.dumps(row) + "\n")
    print(f"{len(targets):,} sentences, a vocabulary of {len(tokenizer):,} tokens", flush=True)


if __name__ == "__main__":
    main()
