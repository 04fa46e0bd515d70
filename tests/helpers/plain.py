"""Transformers models trained and evaluated in plain PyTorch, one text at a time."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def save(model: PreTrainedModel, path: Path) -> None:
    """Save the model with a tokenizer of bytes, padding 0 and EOS 1."""
    model.save_pretrained(path)
    # For some models Transformers reads tokenizers only from a tokenizer.json.
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(path)


def predictions(model: PreTrainedModel, samples: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits [positions, vocabulary] and the targets of each text in the samples, which
    are texts or lists of texts."""
    for sample in samples:
        for text in sample if isinstance(sample, list) else [sample]:
            ids, labels = (
                torch.tensor(list(map(int, text[name])))[None]
                for name in ("input_ids", "labels" if "labels" in text else "input_ids")
            )
            if model.config.is_encoder_decoder:
                yield model(ids, labels=labels, use_cache=False).logits[0], labels[0]
            else:
                yield model(ids[:, :-1], use_cache=False).logits[0], labels[0, 1:]


def mean_loss(model: PreTrainedModel, samples: Iterable[Any]) -> Tensor:
    """Return the mean cross-entropy over all targets, fp64 []."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for logits, targets in predictions(model, samples):
        total = total + F.cross_entropy(logits.double(), targets, reduction="sum")
        count += int((targets != -100).sum())
    return total / count


def loss_class(script: ModuleType) -> type[PreTrainedModel]:
    """Return the class that a script makes of its MODEL."""
    added = getattr(script, "LossModel", None)
    return type("LossModel", (added, script.MODEL), {}) if added else script.MODEL
