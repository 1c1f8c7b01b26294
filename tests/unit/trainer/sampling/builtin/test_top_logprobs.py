from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinsmith_trainer.sampling.builtin.draws import top_logprobs

few_values = st.sampled_from([-math.inf, -3.0, -2.0, -1.0, -0.5])  # so that many are equal
rows = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 12)), elements=few_values)


@given(rows, st.integers(1, 12))
def test_the_likeliest_come_first_and_the_lower_id_of_equals(values: np.ndarray, k: int) -> None:  # type: ignore[type-arg]
    k = min(k, values.shape[1])
    ids, logprobs = top_logprobs(torch.from_numpy(values), k)
    expected = [sorted(range(len(row)), key=lambda token: (-row[token], token))[:k] for row in values]
    assert ids.tolist() == expected
    assert logprobs.tolist() == np.take_along_axis(values, np.array(expected), axis=1).tolist()


@given(rows, st.data())
def test_fewer_are_the_beginning_of_more(values: np.ndarray, data: st.DataObject) -> None:  # type: ignore[type-arg]
    more = data.draw(st.integers(1, values.shape[1]))
    fewer = data.draw(st.integers(1, more))
    many, few = (top_logprobs(torch.from_numpy(values), k)[0] for k in (more, fewer))
    assert few.tolist() == many[:, :fewer].tolist()


@pytest.mark.parametrize("k", [1, 3])
def test_a_row_of_nan_does_not_touch_the_others(k: int) -> None:
    values = torch.tensor([[math.nan] * 4, [-3.0, -1.0, -2.0, -4.0]])
    ids, _ = top_logprobs(values, k)
    assert ids[1].tolist() == [1, 2, 0][:k]
