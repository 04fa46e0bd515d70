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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

import torch
import transformers
from jinja2 import TemplateError

from core import ranks


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


def main() -> None:
    """Print the model's answer to each prompt, which is a user turn if there is a chat template."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a chat without a traceback
    parser = argparse.ArgumentParser(description="Generate text with a trained model.")
    parser.add_argument("directory", type=Path, help="final/ or best/ of a run")
    parser.add_argument("prompt", nargs="?", help="text to continue (default: each line of stdin)")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="limit for an answer")
    parser.add_argument("--system", help="system turn of each chat")
    parser.add_argument("--temperature", type=float, help="0: greedy (default: the model's)")
    parser.add_argument("--top-p", type=float, help="share to sample from (default: the model's)")
    args = parser.parse_intermixed_args()
    settings = {"temperature": args.temperature, "top_p": args.top_p}
    settings = {name: value for name, value in settings.items() if value is not None}
    if not (0 <= settings.get("temperature", 1) < 100 and 0 < settings.get("top_p", 1) <= 1):
        ranks.exit_with("--temperature must be from 0 to 100, and --top-p above 0 and at most 1.")
    if settings:
        settings["do_sample"] = args.temperature != 0
    settings["max_new_tokens"] = args.max_new_tokens
    if args.prompt is not None and not args.prompt.strip():
        ranks.exit_with("The prompt is blank. Pass some text.")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if not (args.directory / "tokenizer_config.json").is_file():
        ranks.exit_with(f"{args.directory} has no model. Pass a final/ or best/ of a run.")
    turns = system = [{"role": "system", "content": args.system}] if args.system else []
    try:
        tokenizer, model = load(args.directory)
        if args.system:  # without a template, or if it rejects system turns, this raises an error
            tokenizer.apply_chat_template([*system, {"role": "user", "content": "?"}])
    except (OSError, ValueError, ImportError, TemplateError) as error:
        ranks.exit_with(f"{args.directory} cannot be used: {str(error).splitlines()[0]}")
    is_chat = args.prompt is None and sys.stdin.isatty()
    for text in read_prompts("> " * is_chat) if args.prompt is None else [args.prompt]:
        turns = [*(turns if is_chat else system), {"role": "user", "content": text}]
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        batch = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")
        ids = batch.input_ids.to(model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0]
        start = 0 if model.config.is_encoder_decoder else ids.size(1)
        answer = tokenizer.decode(output[start:], skip_special_tokens=True)
        print(answer, flush=True)
        if not answer.strip():
            print("The answer is empty.", file=sys.stderr)
        turns.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
