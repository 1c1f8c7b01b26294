"""The positions of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.engines.megatron.parallelism import Parallelism

small = st.integers(1, 3)


@given(small, small, small, small)
def test_coordinates_are_those_of_megatrons_rank_order(pipeline: int, data: int, context: int, tensor: int) -> None:
    layout = Parallelism(pipeline * data * context * tensor, tensor=tensor, pipeline=pipeline, context=context)
    ranks = np.arange(layout.world_size).reshape(pipeline, data, context, tensor)

    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert ranks[at.pipeline, at.data, at.context, at.tensor] == rank


@given(small, small, small, st.integers(1, 4))
def test_one_rank_of_a_stage_reports_each_share_of_the_experts(
    pipeline: int, data: int, tensor: int, expert: int
) -> None:
    """Megatron's order: expert ranks are neighbours, whatever else divides the stage."""
    expert = math.gcd(data * tensor, expert)
    layout = Parallelism(pipeline * data * tensor, tensor=tensor, pipeline=pipeline, expert=expert)
    ranks = np.arange(layout.world_size).reshape(pipeline, -1, expert)

    told = [layout.coordinates(rank) for rank in range(layout.world_size) if layout.is_first_of_experts(rank)]

    assert [(at.pipeline, at.expert) for at in told] == [(p, e) for p in range(pipeline) for e in range(expert)]
    assert all(layout.coordinates(int(rank)).expert == e for (_, _, e), rank in np.ndenumerate(ranks))


@given(small, small, small, small)
def test_each_copy_of_the_data_has_one_speaker_on_the_last_stage(
    pipeline: int, data: int, context: int, tensor: int
) -> None:
    layout = Parallelism(pipeline * data * context * tensor, tensor=tensor, pipeline=pipeline, context=context)

    reporting_ranks = [layout.coordinates(rank) for rank in layout.reporting_ranks()]

    assert [at.data for at in reporting_ranks] == list(range(data))
    assert {(at.pipeline, at.context, at.tensor) for at in reporting_ranks} == {(pipeline - 1, 0, 0)}


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"world_size": 6, "tensor": 4}, "does not divide 6 ranks"),
        ({"world_size": 4, "expert": 3}, "Experts"),
        ({"tensor": 0}, "least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Parallelism(**sizes)
