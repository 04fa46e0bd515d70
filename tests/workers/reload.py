"""Load an exported T5 in a fresh process with plain transformers: reload.py DIRECTORY PAIRS.json

PAIRS.json is a list of [source, target]. Prints one JSON object with the mean loss over the target
tokens, the model's dtype and whether the embeddings are tied.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
total = count = 0
for source, target in json.loads(Path(sys.argv[2]).read_text()):
    labels = tokenizer(target, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(**tokenizer(source, return_tensors="pt"), labels=labels).loss
    total, count = total + loss.double().item() * labels.numel(), count + labels.numel()
tied = model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
head = model.lm_head.weight is model.shared.weight
print(json.dumps({"loss": total / count, "tied": tied and head, "dtype": str(model.dtype)}))
