"""Make the model that `make demo` trains: a small T5 with random weights and words of its own.

    python benchmarks/demo_model.py output/demo/model

Its vocabulary is learned from the docstrings that it is trained on, in a second or two. A model so
small repeats itself: generation_config.json forbids that, as it may for any model.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

from runtime import readers

VOCABULARY = 2048
SHAPE = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}


def make_tokenizer() -> T5Tokenizer:
    """A unigram vocabulary of the docstrings, with EOS and padding as T5 has them."""
    rows = readers.docstring_rows()
    texts = [*rows["text"], *rows["headline"]]
    return T5Tokenizer(extra_ids=0).train_new_from_iterator(
        texts, vocab_size=VOCABULARY, show_progress=False
    )


def make_model(tokenizer: T5Tokenizer) -> T5ForConditionalGeneration:
    """Random weights, the same each time."""
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
    model.generation_config.update(no_repeat_ngram_size=3, repetition_penalty=1.2)
    return model


def main() -> None:
    """Write a Hugging Face directory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="where to write it")
    directory = parser.parse_args().directory
    readers.show_progress(verbose=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    print(
        f"{directory}: a T5 of {model.num_parameters():,} random weights, {len(tokenizer):,} tokens"
    )


if __name__ == "__main__":
    main()
