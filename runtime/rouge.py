"""Generated texts beside their references, and their ROUGE scores."""

import importlib.util
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from . import arguments


def add_arguments(parser: ArgumentParser) -> None:
    """Add the group "summaries" to `parser`."""
    add = parser.add_argument_group("summaries").add_argument
    add("--rouge-samples", type=int, help="examples to summarise (training 32, evaluation all)")
    add("--num-beams", type=int, help="1: greedy (default: as the model's generation_config.json)")


def resolve_arguments(args: Namespace) -> dict[str, Any]:
    """Return the values, by name, of what was not given: 32 for --rouge-samples in a training.

    In an evaluation it stays None, which is all.
    """
    if args.rouge_samples is None and not args.evaluate_only:
        return {"rouge_samples": 32}
    return {}


def check_arguments(args: Namespace) -> list[str]:
    """Return a sentence for each thing that is wrong with --rouge-samples and --num-beams."""
    limits = {"rouge_samples": (0, arguments.ANY), "num_beams": (1, arguments.ANY)}
    given = {name: limit for name, limit in limits.items() if getattr(args, name) is not None}
    problems = arguments.out_of_range(args, given)
    if args.rouge_samples != 0 and not importlib.util.find_spec("rouge_score"):
        problems.append("ROUGE needs `pip install rouge-score`, or --rouge-samples 0")
    return problems


def generated_texts(
    batch: dict[str, torch.Tensor | int], output: torch.Tensor, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, str, str]]:
    """Return source, reference and generated text of each example in a batch.

    `batch` has `input_ids` [batch, source] and `labels` [batch, target], and `output` the generated
    ids [batch, length], all int64. A row whose labels are all -100 is no example.
    """
    is_target = batch["labels"] != -100
    labels = batch["labels"].masked_fill(~is_target, tokenizer.pad_token_id)
    parts = (batch["input_ids"], labels, output)
    decoded = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in parts)
    triples = zip(*decoded, strict=True)
    return [triple for triple, row in zip(triples, is_target, strict=True) if row.any()]


def shown(triples: list[tuple[str, str, str]]) -> str:
    """Return lines of source, reference and generated text of each example."""
    lines = []
    for source, reference, generated in triples:
        lines.append(f"   source: {source[:300]}")
        lines.append(f"reference: {reference}")
        lines.append(f"generated: {generated}")
    return "\n".join(lines)


def score(triples: list[tuple[str, str, str]]) -> dict[str, float]:
    """Return mean F-measures of ROUGE-1, -2 and -L (Lin 2004, with stemming) in percent.

    `triples` are source, reference and generated text. Without any the result is {}.
    """
    if not triples:
        return {}
    from rouge_score.rouge_scorer import RougeScorer  # only who asks for ROUGE needs it

    kinds = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(kinds, use_stemmer=True)
    scores = [scorer.score(reference, generated) for _, reference, generated in triples]
    return {k: 100 * sum(found[k].fmeasure for found in scores) / len(scores) for k in kinds}
