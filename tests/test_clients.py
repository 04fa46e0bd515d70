"""Programs that read Hugging Face files on their own compute the same logits from exports.

    pip install "mlx[cpu]" mlx-lm ctranslate2

Programs that are not installed are skipped.
"""

from pathlib import Path

import numpy
import pytest
import torch
import transformers
from conftest import launch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

IDS = [*range(40, 70)]
SHAPE = {"vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "eos_token_id": 1, "bos_token_id": 1,
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64}}  # fmt: skip
GPT2 = {"vocab_size": 384, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "bos_token_id": 1, "eos_token_id": 1}  # fmt: skip
# Tied, because under Transformers 5 CTranslate2 scales the head of every T5.
T5 = {"vocab_size": 384, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
MODELS = {
    "llama_fsdp": ("LlamaForCausalLM", SHAPE),
    "gpt2_fsdp": ("GPT2LMHeadModel", GPT2),
    "T5_training": ("T5ForConditionalGeneration", T5),
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, chats, texts, pairs) -> Path:
    """Return a directory with the output directories of a run of each script."""
    folder = tmp_path_factory.mktemp("exports")
    data = {
        "llama_fsdp": [chats, "--val-dataset", chats, "--max-seq-length", "64"],
        "gpt2_fsdp": [texts[0], "--val-dataset", texts[1], "--block-size", "32"],
        "T5_training": [pairs, "--target-length", "12", "--rouge-samples", "0"],
    }
    for script, flags in data.items():
        save_base(script, folder / f"{script} base")
        options = ["--model-name", folder / f"{script} base", "--output-dir", folder / script]
        steps = ["--max-steps", "2", "--export-dtype", "fp32"]
        launch(1, f"{script}.py", *options, *steps, "--dataset", *flags)
    return folder


def save_base(script: str, path: Path) -> None:
    """Save a random model, with a tokenizer that has a token for each row of its embedding."""
    name, shape = MODELS[script]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model_class(model_class.config_class(**shape)).save_pretrained(path)
    tokens = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<{i}>" for i in range(384 - len(tokens))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="</s>", **special
    )
    tokenizer.save_pretrained(path)


@torch.no_grad()
def log_probabilities(directory: Path, script: str) -> Tensor:
    """Return Transformers' log probabilities [30, vocabulary] after each of IDS, in the decoder if
    there is one."""
    model = getattr(transformers, MODELS[script][0]).from_pretrained(directory).eval()
    ids = torch.tensor([IDS])
    if script == "T5_training":
        output = model(input_ids=ids, decoder_input_ids=torch.tensor([[0, *IDS[:-1]]]))
    else:
        output = model(ids)
    return output.logits[0].log_softmax(-1)


@pytest.mark.slow
def test_mlx_computes_the_same_logits(exports):
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm")
    mx.set_default_device(mx.cpu)
    directory = exports / "llama_fsdp/final"
    model, _ = mlx_lm.load(str(directory))
    logits = torch.tensor(model(mx.array([IDS])).astype(mx.float32).tolist()[0])
    torch.testing.assert_close(
        logits.log_softmax(-1), log_probabilities(directory, "llama_fsdp"), atol=1e-4, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpt2_fsdp", "T5_training"])  # Llama needs Transformers 4
def test_ctranslate2_computes_the_same_logits(script, exports, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    directory = exports / script / "final"
    converter = ctranslate2.converters.TransformersConverter(str(directory))
    converter.convert(str(tmp_path / "converted"))
    options = {"device": "cpu", "compute_type": "float32"}
    expected = log_probabilities(directory, script)
    if script == "T5_training":
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        tokens = tokenizer.convert_ids_to_tokens(IDS)
        translator = ctranslate2.Translator(str(tmp_path / "converted"), **options)
        (result,) = translator.score_batch([tokens], [tokens])
        scores = torch.tensor(result.log_probs)[: len(IDS)]
        expected = expected[torch.arange(len(IDS)), torch.tensor(IDS)]
    else:
        generator = ctranslate2.Generator(str(tmp_path / "converted"), **options)
        output = generator.forward_batch([IDS], return_log_probs=True)
        scores = torch.tensor(numpy.array(output)[0])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
