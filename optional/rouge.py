"""Generated summaries and their ROUGE scores. Without this file, training and evaluation report
losses only: no text is generated."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import regex
import torch
import torch.distributed as dist
from nltk.stem.porter import PorterStemmer  # comes with rouge-score
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase as Tokenizer

import policies
from core import ranks
from core.args import Interval, Size
from core.log import progress
from core.ranks import Batch, print0
from core.steps import ordered_loader
from core.weights import unwrapped

# Other values return other objects than one text per example, need a tokenizer or depend on time.
ONE_TEXT = {
    "do_sample": False, "num_return_sequences": 1, "return_dict_in_generate": False,
    "stop_strings": None, "prompt_lookup_num_tokens": None, "max_time": None,
    "use_cache": True,  # training's config says False, and generation without it is slow
}  # fmt: skip
Triples = list[Sequence[str]]  # source, reference and generated text


@dataclass
class Rouge:
    """Summaries that the model writes after training and in evaluation."""

    rouge_samples: Interval = None
    """texts to summarize; 0: none; unset: 32, or in an evaluation all"""
    num_beams: Size = 0
    """1: greedy; 0: as in generation_config.json"""


@contextlib.contextmanager
def generation(args: Any, device: torch.device, model: nn.Module) -> Iterator[Callable]:
    """Yield `generate(batch, length)`, which does not sample and returns int64 [batch, tokens].
    The model's generation config applies, except for ONE_TEXT and --num-beams. Generation runs
    outside the root's forward, so FSDP1's root is gathered around it. The blocks gather themselves,
    and `synced_gpus` gives all ranks the same number of forward passes."""
    root = contextlib.nullcontext()
    if isinstance(model, FSDP):
        root = FSDP.summon_full_params(model, recurse=False, writeback=False)
    options = ONE_TEXT | {"synced_gpus": dist.get_world_size() > 1}
    options["pad_token_id"] = unwrapped(model).config.pad_token_id  # the file's may have no row
    if args.summaries.num_beams > 0:
        options["num_beams"] = args.summaries.num_beams
    dtype = policies.PRECISIONS[args.sharding.precision].param_dtype

    def generate(batch: Batch, length: int) -> Tensor:
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
        return unwrapped(model).generate(**inputs, max_new_tokens=length, **options)

    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    with policies.evaluation(model), root, autocast:
        yield generate


@torch.no_grad()
def summarize(
    args: Any, device: torch.device, model: nn.Module, tokenizer: Tokenizer, collate: Callable,
    val_sets: dict, default: int = 32,
) -> Triples:  # fmt: skip
    """Return source, reference and generated text of --rouge-samples samples (else `default`) of
    the first set, on all ranks, each of which generates its share."""
    samples = next(iter(val_sets.values()))
    limit = default if args.summaries.rouge_samples is None else args.summaries.rouge_samples
    some = Subset(samples, range(min(limit, len(samples))))
    loader = ordered_loader(some, args.optim.batch_size, collate, device)
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    share: Triples = []
    with generation(args, device, model) as generate:
        for batch in progress(loader, "summaries", len(loader)):
            output = generate(batch, args.data.target_length)
            labels = [row[row != -100] for row in batch["labels"]]
            texts = map(decode, (batch["input_ids"], labels, output))
            share += [triple for *triple, ids in zip(*texts, labels, strict=True) if len(ids)]
    shares = ranks.on_every_rank(lambda: share)  # take one from each rank; rank 0 has the most
    return [x[i] for i in range(len(shares[0])) for x in shares if i < len(x)]


def sample(args: Any, *parts: Any) -> dict[str, float]:
    """Return the scores of 32 samples or --rouge-samples, and print three. The arguments are those
    of `summarize`."""
    triples = summarize(args, *parts)
    for triple in triples[:3]:
        print0("   source: {:.300}\nreference: {}\ngenerated: {}".format(*triple))
    return score(triples)


def evaluate(args: Any, *parts: Any) -> dict[str, float]:
    """Return the scores of all samples or --rouge-samples, and write predictions.jsonl. The
    arguments are those of `summarize`."""
    *_, val_sets = parts
    triples = summarize(args, *parts, default=len(next(iter(val_sets.values()))))
    text = ""
    for triple in triples:
        named = zip(("source", "reference", "generated"), triple, strict=True)
        text += json.dumps(dict(named)) + "\n"
    ranks.on_rank_zero((args.run.output_dir / "predictions.jsonl").write_text, text)
    return score(triples)


class Words:
    """A tokenizer for ROUGE in any script. It splits where a character is no letter, mark or digit,
    and around each character of Chinese, Japanese and Thai; English words are stemmed."""

    _single = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}"
    PATTERN = regex.compile(rf"(?V1)[{_single}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_single}]]+")
    stem = staticmethod(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text in lower case. Those of up to 3 letters are not stemmed."""
        words = self.PATTERN.findall(text.lower())
        return [self.stem(word) if len(word) > 3 and word.isascii() else word for word in words]


def score(triples: Triples) -> dict[str, float]:
    """Return mean F-measures of ROUGE-1, -2 and -L in percent; {} if there are no triples."""
    if not triples:
        return {}
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=Words())
    scores = [scorer.score(reference, generated) for _, reference, generated in triples]
    means = {}
    for name in scores[0]:
        means[name] = 100 * mean(row[name].fmeasure for row in scores)
    return means
