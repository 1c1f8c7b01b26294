"""Biases, penalties and masks against a plain implementation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sampler.jobs import job
from tinsmith_trainer.sampling.base import GrammarState
from tinsmith_trainer.sampling.builtin.draws import Draw, draw_tokens
from tinsmith_trainer.sampling.builtin.rules.logit_changes import LogitChanges, changed_rows

VOCAB = 70  # neither a multiple of a mask's words nor of the blocks of draws
tokens = st.integers(0, VOCAB - 1)
penalties = st.floats(-2, 2, width=32)


class FixedMask(GrammarState):
    """Allows the same tokens at each position; it is its own grammar."""

    def __init__(self, allowed: set[int]) -> None:
        self.words = np.zeros(-(-VOCAB // 32), np.uint32)
        for token in allowed:
            self.words[token // 32] |= np.uint32(1 << token % 32)

    def begin(self) -> GrammarState:
        return self

    def allowed(self) -> np.ndarray:
        return self.words.view(np.int32)

    def take(self, token: int) -> bool:
        return False


@given(
    earlier=st.lists(tokens, max_size=12),
    bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4),
    frequency=penalties,
    presence=penalties,
    allowed=st.one_of(st.none(), st.sets(tokens, min_size=1)),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_changed_logits_are_those_of_a_plain_implementation_and_other_rows_keep_their_bits(
    earlier: list[int],
    bias: dict[int, float],
    frequency: float,
    presence: float,
    allowed: set[int] | None,
    temperature: float,
    seed: int,
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    asked = job([1], frequency_penalty=frequency, presence_penalty=presence, logit_bias=tuple(bias.items()))
    changes = LogitChanges(replace(asked, grammar=None if allowed is None else FixedMask(allowed)))
    for token in earlier:
        changes.take(token)

    expected = logits[1].tolist()
    for token in range(VOCAB):
        count = earlier.count(token)
        expected[token] += bias.get(token, 0.0) - count * frequency - (presence if count else 0.0)
        if allowed is not None and token not in allowed:
            expected[token] = -np.inf
    changed = changed_rows(logits, [None, changes, None])
    assert changed is not None
    np.testing.assert_allclose(changed.logits[0].numpy(), expected, atol=1e-4)

    draws = [Draw(temperature, uniform=0.3)] * 3
    drawn, logprobs = draw_tokens(logits, draws, changed)
    without, raw = draw_tokens(logits, draws)
    assert (drawn[[0, 2]].tolist(), logprobs[[0, 2]].tolist()) == (without[[0, 2]].tolist(), raw[[0, 2]].tolist())
    assert allowed is None or int(drawn[1]) in allowed
    before = torch.log_softmax(logits[1], -1)[drawn[1]]
    assert float(logprobs[1]) == pytest.approx(float(before), abs=1e-5), "logprobs are those before the changes"
