"""Generate text with a trained model, or with adapters on their base model.

python tools/generate.py OUTPUT_DIR/final "Return the number of"
python tools/generate.py OUTPUT_DIR/final < prompts.txt          # one prompt per line
python tools/generate.py OUTPUT_DIR/final --system "Be brief."   # a chat, until Ctrl-D
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import torch
import transformers
from jinja2 import TemplateError


def load(directory: Path) -> tuple:
    """Return the tokenizer and the model in a directory, or the base model with its adapters."""
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


def parse_args() -> argparse.Namespace:
    """Return the flags, with `settings` for the model's `generate`, or exit with a message."""
    parser = argparse.ArgumentParser(description="Generate text with a trained model.")
    add = parser.add_argument
    add("directory", type=Path, help="final/ or best/ of a run")
    add("prompt", nargs="?", help="text to continue (default: each line of stdin)")
    add(
        "--max-new-tokens",
        type=int,
        default=100,
        help="limit for an answer",
    )
    add("--system", help="system turn of each chat")
    add("--temperature", type=float, help="0: greedy (default: the model's)")
    add("--top-p", type=float, help="share to sample from (default: the model's)")
    args = parser.parse_intermixed_args()
    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if not (0 <= sampling.get("temperature", 1) < 100 and 0 < sampling.get("top_p", 1) <= 1):
        sys.exit("error: --temperature must be from 0 to 100, and --top-p above 0 and at most 1.")
    if sampling:
        sampling["do_sample"] = args.temperature != 0
    args.settings = sampling | {"max_new_tokens": args.max_new_tokens}
    if args.prompt is not None and not args.prompt.strip():
        sys.exit("error: The prompt is blank. Pass some text.")
    if not (args.directory / "tokenizer_config.json").is_file():
        sys.exit(f"error: {args.directory} has no model. Pass a final/ or best/ of a run.")
    return args


def answer(model: Any, tokenizer: Any, turns: list[dict], settings: dict) -> str:
    """Return the model's answer to the last turn, or to its text if there is no chat template."""
    text = turns[-1]["content"]
    has_template = bool(tokenizer.chat_template)
    if has_template:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(text, add_special_tokens=not has_template, return_tensors="pt")
    ids = batch.input_ids.to(model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **settings,
    )[0]
    start = 0 if model.config.is_encoder_decoder else ids.size(1)
    return tokenizer.decode(output[start:], skip_special_tokens=True)


def main() -> None:
    """Print the model's answer to each prompt, which is a user turn if there is a chat template."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a chat without a traceback
    args = parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    system = [{"role": "system", "content": args.system}] if args.system else []
    try:
        tokenizer, model = load(args.directory)
        if args.system:  # without a template, or if it rejects system turns, this raises an error
            tokenizer.apply_chat_template([*system, {"role": "user", "content": "?"}])
    except (OSError, ValueError, ImportError, TemplateError) as error:
        sys.exit(f"error: {args.directory} cannot be used: {str(error).splitlines()[0]}")
    is_chat = args.prompt is None and sys.stdin.isatty()
    prompts = read_prompts("> " * is_chat) if args.prompt is None else [args.prompt]
    turns = system
    for prompt in prompts:
        if not is_chat:
            turns = system
        turns = [*turns, {"role": "user", "content": prompt}]
        text = answer(model, tokenizer, turns, args.settings)
        print(text, flush=True)
        if not text.strip():
            print("The answer is empty.", file=sys.stderr)
        turns.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
