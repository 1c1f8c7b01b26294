from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import SMALL, tiny_directory
from tinsmith_trainer.torch_model.tiny_model import LLAMA3_TOKENS, QWEN3_TOKENS, Family, TinyShape, make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FAMILIES: list[Family] = ["qwen3", "llama3"]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_arguments_write_the_same_bytes(family: Family, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", family=family, shape=SMALL)
    assert files(again) == files(tiny_directory(family))


def test_another_seed_writes_other_weights(tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", shape=SMALL, seed=1)
    name = "model.safetensors"
    assert files(other)[name] != files(tiny_directory())[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_of_both_chat_formats_are_single_ids(family: Family) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory(family))
    for token in (*QWEN3_TOKENS, *LLAMA3_TOKENS):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1, token


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["3+4=7. The answer is 7.", "Grüße, 世界 🌍", " a\n\n\tb "])
def test_any_text_comes_back_from_its_tokens(family: Family, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_directory(family))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert max(ids) < SMALL.vocab_size


def test_the_shape_is_the_one_asked_for(tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=1, vocab_size=600)
    config = AutoConfig.from_pretrained(make_tiny_model(tmp_path, shape=shape))
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 48, 1)
    assert (config.vocab_size, config.max_position_embeddings) == (600, 4096)


def test_the_default_is_a_few_hundred_kilobytes(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    parameters = AutoModelForCausalLM.from_pretrained(directory).num_parameters()
    assert parameters < 300_000
    assert sum(len(content) for content in files(directory).values()) < 2_000_000
