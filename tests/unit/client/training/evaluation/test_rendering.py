"""Rendering from the prompts of a task to tokens."""

from __future__ import annotations

import pytest
from support.first_token import FIRST, tokenizer_with_first_token
from tinsmith.training.evaluation.rendering import RAW, rendering_by

pytestmark = pytest.mark.pytorch


@pytest.mark.parametrize("text", ["hi", f"{FIRST}hi"])
def test_a_raw_text_begins_with_the_first_token_once(text: str) -> None:
    rendering = rendering_by(RAW, tokenizer_with_first_token())
    assert rendering.prompt(text).to_ints() == [0, 1, 2]
    assert rendering.continued(text, "hi")[0].to_ints() == [0, 1, 2, 1, 2]
