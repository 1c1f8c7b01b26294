"""The most likely tokens, out of what servers name: more than were asked for, and in any order."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.base import EMPTY_LOGPROB, EMPTY_TOKEN
from tinsmith_trainer.sampling.token_server.base import joined, top_logprobs

LOGPROBS = st.one_of(st.none(), st.just(float("nan")), st.sampled_from([-3.0, -1.0, -0.5, -0.25]))
ROWS = st.lists(st.one_of(st.none(), st.dictionaries(st.integers(0, 20), LOGPROBS, max_size=8)), max_size=5)


@given(rows=ROWS, k=st.integers(1, 5))
def test_a_row_holds_the_best_that_were_named_in_their_order_and_then_nothing(rows: list, k: int) -> None:
    found = top_logprobs(rows, k)
    assert found.token_ids.shape == found.logprobs.shape == (len(rows), k)
    for row, tokens, logprobs in zip(rows, found.token_ids.tolist(), found.logprobs.tolist(), strict=True):
        known = {token: value for token, value in (row or {}).items() if value is not None and not math.isnan(value)}
        best = sorted(known, key=lambda token: (-known[token], token))[:k]
        assert tokens == best + [EMPTY_TOKEN] * (k - len(best))
        assert logprobs == [known[token] for token in best] + [EMPTY_LOGPROB] * (k - len(best))


def test_rows_of_two_answers_are_one_behind_the_other() -> None:
    both = joined(top_logprobs([{1: -1.0}], 1), top_logprobs([{2: -2.0}, {3: -3.0}], 1))
    np.testing.assert_array_equal(both.token_ids, [[1], [2], [3]])
    np.testing.assert_array_equal(both.logprobs, [[-1.0], [-2.0], [-3.0]])
