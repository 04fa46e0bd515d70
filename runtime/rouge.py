"""Generation with a wrapped model; generated texts and their ROUGE scores."""

import contextlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import regex
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import PreTrainedTokenizerBase

from .checks import eager_mode
from .options import flag
from .ranks import explain_errors
from .weights import unwrapped

# Other values return other objects than one text per example, need a tokenizer or depend on time.
ONE_TEXT = {
    "do_sample": False,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "stop_strings": None,
    "prompt_lookup_num_tokens": None,
    "max_time": None,
    "use_cache": True,  # training's config says False, and generation without it is slow
}


@dataclass
class Options:
    """summaries"""

    rouge_samples: int | None = flag(
        None, "texts to summarize (default: 32, in evaluation all)", low=0
    )
    num_beams: int | None = flag(None, "1: greedy (default: from generation_config.json)", low=1)

    def derive(self) -> None:
        """Set the default of --rouge-samples: 32 in training, none (all samples) in evaluation."""
        if self.rouge_samples is None and not self.evaluate_only:
            self.rouge_samples = 32

    def problems(self) -> list[str]:
        """Return a message if rouge-score is missing."""
        if self.rouge_samples != 0 and not importlib.util.find_spec("rouge_score"):
            return ["ROUGE needs `pip install rouge-score`. Or pass --rouge-samples 0."]
        return []


@contextlib.contextmanager
def generation(
    model: nn.Module, device: torch.device, dtype: torch.dtype, num_beams: int | None
) -> Iterator[Callable]:
    """Yield `generate(batch, length)`, which computes in `dtype` and does not sample; all ranks.

    The model's generation config applies, except for ONE_TEXT and, unless it is None, `num_beams`.
    Generation runs outside the root's forward, so FSDP1's root is gathered around it. The blocks
    gather themselves, and `synced_gpus` gives all ranks the same number of forward passes.
    """
    root = contextlib.nullcontext()
    if isinstance(model, FSDP):
        root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    options = ONE_TEXT | {"synced_gpus": dist.get_world_size() > 1}
    options["pad_token_id"] = unwrapped(model).config.pad_token_id  # the file's may have no row
    if num_beams is not None:
        options["num_beams"] = num_beams

    def generate(batch: dict[str, torch.Tensor], length: int) -> torch.Tensor:
        inputs = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
        return unwrapped(model).generate(**inputs, max_new_tokens=length, **options)

    with root, torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        yield generate


@torch.no_grad()
def check_generation(
    model: nn.Module, device: torch.device, dtype: torch.dtype, num_beams: int | None,
    batch: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    """Generate three tokens for a batch, so that settings that cannot work fail before training.

    All ranks need the same `batch`. Raise ValueError if generation fails.
    """
    quiet = warnings.catch_warnings(action="ignore")  # of a min_length above three tokens
    advice = "Fix its generation_config.json, or pass --rouge-samples 0."
    with (
        explain_errors("The model cannot generate texts for ROUGE", advice),
        quiet, eager_mode(device), generation(model, device, dtype, num_beams) as generate,
    ):  # fmt: skip
        generate(batch, 3)


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


class Words:
    """A tokenizer for ROUGE in any script. It splits where a character is no letter, mark or digit,
    and around each character of Chinese, Japanese and Thai; English words are stemmed."""

    PATTERN = regex.compile(
        r"(?V1)[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]"
        r"|[[\p{L}\p{M}\p{N}]--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]]+"
    )

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer  # comes with rouge-score

        self.stem = PorterStemmer().stem

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text in lower case. Those of up to 3 letters are not stemmed."""
        words = self.PATTERN.findall(text.lower())
        return [self.stem(word) if len(word) > 3 and word.isascii() else word for word in words]


def score(triples: list[tuple[str, str, str]]) -> dict[str, float]:
    """Return mean F-measures of ROUGE-1, -2 and -L (Lin 2004, with stemming) in percent.

    `triples` are source, reference and generated text. Return {} if there are none.
    """
    if not triples:
        return {}
    from rouge_score.rouge_scorer import RougeScorer  # needed only for ROUGE

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=Words())
    scores = [scorer.score(reference, generated) for _, reference, generated in triples]
    return {kind: 100 * mean(row[kind].fmeasure for row in scores) for kind in scores[0]}
