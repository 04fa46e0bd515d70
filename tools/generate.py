"""Generate text with a trained model, or with adapters on their base model.

python tools/generate.py OUTPUT_DIR/final "Return the number of"
python tools/generate.py OUTPUT_DIR/final < prompts.txt                # one prompt per line
"""

import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any directory

from runtime import options, ranks


def load_model(directory: Path) -> transformers.PreTrainedModel:
    """Return the model in a directory, or the base model with the adapters in it.

    Raise OSError, ValueError or ImportError if it cannot be loaded.
    """
    kind = transformers.AutoModelForCausalLM
    is_whole = (directory / "config.json").is_file()
    if is_whole and transformers.AutoConfig.from_pretrained(directory).is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    return kind.from_pretrained(directory, dtype="auto").to(ranks.local_device())


def main() -> None:
    """Print the model's answer to each prompt, which is a user turn if there is a chat template."""
    parser = options.Parser(__doc__)
    parser.add_argument("directory", type=Path, help="final/ or best/ of a run")
    parser.add_argument("prompt", nargs="?", help="text to continue (default: each line of stdin)")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="limit for an answer")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if not (args.directory / "tokenizer_config.json").is_file():
        final = args.directory / "final"
        suggestion = final if final.is_dir() else "a final/ or best/ of a run"
        ranks.exit_with(f"{args.directory} has no model. Pass {suggestion}.")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.directory)
        model = load_model(args.directory)
    except (OSError, ValueError, ImportError) as error:
        ranks.exit_with(f"{args.directory} cannot be loaded: {str(error).splitlines()[0]}")
    for prompt in map(str.rstrip, sys.stdin) if args.prompt is None else [args.prompt]:
        text = prompt
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=text == prompt).input_ids
        # EOS also separates documents, so a blank prompt starts a new one.
        ids = torch.tensor([tokens or [tokenizer.eos_token_id]], device=model.device)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=args.max_new_tokens)[0]
        if not model.config.is_encoder_decoder:
            output = output[ids.size(1) :]
        print(tokenizer.decode(output, skip_special_tokens=True), flush=True)


if __name__ == "__main__":
    main()
