"""Generate text with a trained model, or with adapters on their base model.

python tools/generate.py OUTPUT_DIR/final "Return the number of"
python tools/generate.py OUTPUT_DIR/final < prompts.txt          # one prompt per line
python tools/generate.py OUTPUT_DIR/final --system "Be brief."   # a chat, until Ctrl-D
"""

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from jinja2 import TemplateError
from tyro.conf import Positional


@dataclass
class Args:
    """The flags."""

    directory: Positional[Path]  # final/ of a run
    prompt: Positional[str | None] = None  # text to continue (none: each line of stdin)
    max_new_tokens: int = 100  # limit for an answer
    system: str = ""  # system turn of each chat
    temperature: float | None = None  # 0: greedy (none: the model's)
    top_p: float | None = None  # share to sample from (none: the model's)


def settings(args: Args) -> dict[str, Any]:
    """Return keyword arguments for the model's `generate`. Raise ValueError if a flag is out of its
    range."""
    sampling = {}
    if args.temperature is not None:
        sampling["temperature"] = args.temperature
    if args.top_p is not None:
        sampling["top_p"] = args.top_p
    if not (0 <= sampling.get("temperature", 1) < 100 and 0 < sampling.get("top_p", 1) <= 1):
        raise ValueError("--temperature must be from 0 to 100, and --top-p above 0 and at most 1.")
    if sampling:
        sampling["do_sample"] = args.temperature != 0
    return sampling | {"max_new_tokens": args.max_new_tokens}


def load(directory: Path) -> tuple:
    """Return the tokenizer and the model in a directory, or the base model with its adapters."""
    if not (directory / "tokenizer_config.json").is_file():
        raise ValueError(f"{directory} has no model. Pass the final/ of a run.")
    kind = transformers.AutoModelForCausalLM
    is_whole = (directory / "config.json").is_file()
    if is_whole and transformers.AutoConfig.from_pretrained(directory).is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    model = kind.from_pretrained(directory, dtype="auto")
    if (directory / "generation_config.json").is_file():  # beside adapters too
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return transformers.AutoTokenizer.from_pretrained(directory), model.to(device)


def read_prompts(mark: str) -> Iterator[str]:
    """Print `mark` before each line of stdin, and yield those that are not blank."""
    print(end=mark, flush=True)
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield line.rstrip()
        else:
            print(f"Line {number} is blank and was skipped.", file=sys.stderr)
        print(end=mark, flush=True)


def answer(model: Any, tokenizer: Any, turns: list[dict], options: dict[str, Any]) -> str:
    """Return the model's answer to the last turn, or to its text if there is no chat template."""
    text = turns[-1]["content"]
    # Without a template, a system turn raises ValueError.
    is_chat = bool(tokenizer.chat_template) or turns[0]["role"] == "system"
    if is_chat:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(text, add_special_tokens=not is_chat, return_tensors="pt").to(model.device)
    mask = torch.ones_like(batch.input_ids)
    output = model.generate(batch.input_ids, attention_mask=mask, **options)[0]
    start = 0 if model.config.is_encoder_decoder else mask.size(1)
    return tokenizer.decode(output[start:], skip_special_tokens=True)


def run(args: Args) -> None:
    """Print the model's answer to each prompt, which is a user turn if there is a chat template."""
    options = settings(args)
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("The prompt is blank. Pass some text.")
    tokenizer, model = load(args.directory)
    is_chat = args.prompt is None and sys.stdin.isatty()
    prompts = read_prompts("> " if is_chat else "") if args.prompt is None else [args.prompt]
    first = [{"role": "system", "content": args.system}] if args.system else []
    turns = first
    for prompt in prompts:
        if not is_chat:
            turns = first
        turns = [*turns, {"role": "user", "content": prompt}]
        text = answer(model, tokenizer, turns, options)
        print(text, flush=True)
        if not text.strip():
            print("The answer is empty.", file=sys.stderr)
        turns.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a chat without a traceback
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    arguments = tyro.cli(Args, description=__doc__)
    try:
        run(arguments)
    except (OSError, ValueError, ImportError, TemplateError) as error:
        first_line, *_ = str(error).splitlines()
        sys.exit(f"error: {first_line}")
