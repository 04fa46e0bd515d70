"""Test prepare/losses.py: what tokenizers and limits of length lose is counted in all scripts."""

import json

import pytest
from test_chat_dataset import ASSISTANT, CHATML, USER, known_tokenizer, marked
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import block_dataset
import chat_dataset
import summarization_dataset
from prepare import losses

CHANGES = {  # a normalizer, a text that it changes, and letters of the example
    "lower case": (normalizers.Lowercase(), "Two Eggs", "Two"),
    "accents": (
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
        "a café",
        "é",
    ),
    "NFKC": (normalizers.NFKC(), "20 m²", "m²"),
    "quotes": (normalizers.Replace("“", '"'), "“a“", "“a“"),
    "unknown": (normalizers.Sequence([]), "a 日 b", "日b"),
}


def letters_tokenizer(normalizer: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters that normalizes texts, with the markers of ChatML."""
    letters = [*map(chr, range(33, 127)), *"éèüñ²½“\n"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocabulary += [(letter, -3.0) for letter in letters]
    base = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    base.normalizer = normalizer
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    base.decoder = decoders.Metaspace(prepend_scheme="first")
    end = {"single": "$A </s>", "pair": "$A </s> $B </s>", "special_tokens": [("</s>", 1)]}
    base.post_processor = processors.TemplateProcessing(**end)
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, chat_template=CHATML, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def load(script: str, texts: list[str], tokenizer: object, tmp_path: object, **flags: int) -> None:
    """Load rows with the texts as the data of a script."""
    modules = {"T5": summarization_dataset, "GPT-2": block_dataset}
    module = modules.get(script, chat_dataset)
    paths = []
    for name, part in (("rows", texts), ("few", ["b"])):
        rows = [{"text": text} for text in part]
        if script == "T5":
            rows = [{"text": "a", "summary": text} for text in part]
        elif script == "Llama, chats":
            rows = [{"messages": [USER, ASSISTANT | {"content": text}]} for text in part]
        elif script == "Llama, texts":
            rows = [{"content": text} for text in part]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    training, validation = map(str, paths)
    module.load(module.Data(dataset=(training,), val_dataset=(validation,), **flags), tokenizer)


SCRIPTS = ("T5", "GPT-2", "Llama, chats", "Llama, texts")


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_texts_that_a_tokenizer_changes_are_counted(script, kind, tmp_path, capfd):
    normalizer, text, change = CHANGES[kind]
    load(script, ["b c"] * 30 + [text] * 3, letters_tokenizer(normalizer), tmp_path)
    line = capfd.readouterr().out.partition("the tokenizer changes 3 texts, for example: ")[2]
    assert change in line.partition("becomes")[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_texts_that_tokens_spell_exactly_have_no_line(script, tmp_path, capfd):
    texts = ["b", " b  c\n\nd\te ", "日本 👩‍🔬 m² É", "a <b> [1]", "if x[0] < 3: return"]
    load(script, texts * 6, known_tokenizer("our chatml"), tmp_path)
    out = capfd.readouterr().out
    assert "changes" not in out and "marks" not in out


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("mark", [
    "<|eot_id|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "[/INST]", "</tools_of_turn>",
    "<｜User｜>",
])  # fmt: skip
def test_marks_of_another_template_are_counted(script, mark, tmp_path, capfd):
    texts = ["b"] * 30 + [f"a {mark} b <|im_start|>"] * 2
    load(script, texts, marked(CHATML), tmp_path)
    assert (
        f"2 texts spell special tokens, or marks that are no tokens, such as {mark}\n"
        in capfd.readouterr().out
    )


def test_cut_texts_and_summaries_are_counted(tmp_path, capfd):
    tokenizer = known_tokenizer("our chatml")
    flags = {"source_length": 64, "target_length": 8}
    load("T5", ["b"] * 30 + ["0 1 2 3 4 5 6 7"] * 3, tokenizer, tmp_path, **flags)
    out = capfd.readouterr().out
    lost = 3 * (len(tokenizer("0 1 2 3 4 5 6 7").input_ids) - 8)
    assert f"--target-length 8 cuts 3 of 33, by {lost} tokens" in out
    assert "--source-length" not in out
    load("Llama, texts", ["b"] * 40 + ["9" * 50] * 3, tokenizer, tmp_path, max_seq_length=16)
    assert "--max-seq-length 16 cuts 3 of 43, by 102 tokens" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["a\nb", "a  b", "a\tb"])
def test_spaces_that_a_tokenizer_joins_are_counted(text):
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer = letters_tokenizer(spaces)
    for other in ("a b", " a b ", "a b\u00e9"):
        assert not losses.find_change(other, tokenizer(other).input_ids, tokenizer)
    change = losses.find_change(text, tokenizer(text).input_ids, tokenizer)
    assert change == "line breaks or repeated spaces become a space"
