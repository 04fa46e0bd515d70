"""Load an exported model with plain Transformers and print what it is: reload.py DIRECTORY ROWS

ROWS is a JSON file with lists of token ids by data set.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from plain import mean_loss

directory = sys.argv[1]
sets = json.loads(Path(sys.argv[2]).read_text())
is_t5 = transformers.AutoConfig.from_pretrained(directory).is_encoder_decoder
auto = transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM
model = auto.from_pretrained(directory).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
with torch.no_grad():
    losses = {name: mean_loss(model, rows).item() for name, rows in sets.items()}
    loss = mean_loss(model, sum(sets.values(), [])).item()
result = {
    "loss": loss,
    "losses": losses,
    "class": type(model).__name__,
    "dtype": str(model.dtype),
    "is_tied": head.weight is embedding.weight,
    "temperature": model.generation_config.temperature,
    "template": tokenizer.chat_template,
    "ids": tokenizer("a text").input_ids,
}
print(json.dumps(result))
