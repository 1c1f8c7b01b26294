from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import SMALL, tiny_directory
from tinsmith_trainer.torch_model.tiny_model import LLAMA3_TOKENS, QWEN3_TOKENS, Family, make_tiny_model
from transformers import AutoTokenizer

FAMILIES: list[Family] = ["qwen3", "llama3"]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_arguments_write_the_same_bytes(family: Family, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", family=family, shape=SMALL)
    assert files(again) == files(tiny_directory(family))


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
