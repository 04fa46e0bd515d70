"""Generated texts and their ROUGE scores."""

import importlib.util
import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


def add_arguments(parser: ArgumentParser) -> None:
    """Declare --rouge-samples and --num-beams, for generated summaries, in `parser`."""
    add = parser.add_argument_group("summaries").add_argument
    add("--rouge-samples", type=int, help="texts to summarize (default: 32, in evaluation all)")
    add("--num-beams", type=int, help="1: greedy (default: from generation_config.json)")


def resolve_arguments(args: Namespace) -> dict[str, Any]:
    """Return the default of --rouge-samples: 32 in training, none (all samples) in evaluation."""
    if args.rouge_samples is None and not args.evaluate_only:
        return {"rouge_samples": 32}
    return {}


def check_arguments(args: Namespace) -> list[str]:
    """Return an error message if rouge-score is missing."""
    if args.rouge_samples != 0 and not importlib.util.find_spec("rouge_score"):
        return ["ROUGE needs `pip install rouge-score`. Or pass --rouge-samples 0."]
    return []


def generated_texts(
    batch: dict[str, torch.Tensor | int], output: torch.Tensor, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, str, str]]:
    """Return source, reference and generated text of each example in a batch.

    `batch` has `input_ids` [batch, source] and `labels` [batch, target], and `output` the generated
    ids [batch, length], all int64. Rows whose labels are all -100 are left out.
    """
    is_target = batch["labels"] != -100
    labels = [row[row != -100].tolist() for row in batch["labels"]]
    parts = (batch["input_ids"], labels, output)
    decoded = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in parts)
    triples = zip(*decoded, strict=True)
    return [triple for triple, row in zip(triples, is_target, strict=True) if row.any()]


def format_triples(triples: list[tuple[str, str, str]]) -> str:
    """Return three lines for each example: source, reference and generated text."""
    lines = []
    for source, reference, generated in triples:
        lines.append(f"   source: {source[:300]}")
        lines.append(f"reference: {reference}")
        lines.append(f"generated: {generated}")
    return "\n".join(lines)


def write(path: Path, triples: list[tuple[str, str, str]]) -> None:
    """Write source, reference and generated text of each example as a line of JSON."""
    keys = ("source", "reference", "generated")
    lines = [json.dumps(dict(zip(keys, triple, strict=True))) + "\n" for triple in triples]
    path.write_text("".join(lines))


def score(triples: list[tuple[str, str, str]]) -> dict[str, float]:
    """Return mean F-measures of ROUGE-1, -2 and -L (Lin 2004, with stemming) in percent.

    `triples` are source, reference and generated text. Return {} if there are none.
    """
    if not triples:
        return {}
    from rouge_score.rouge_scorer import RougeScorer  # needed only for ROUGE

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = [scorer.score(reference, generated) for _, reference, generated in triples]
    return {kind: 100 * mean(row[kind].fmeasure for row in scores) for kind in scores[0]}
