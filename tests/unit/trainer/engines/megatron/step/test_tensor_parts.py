"""Cutting tensors for ranks and joining them again: nothing is lost, and padding is zero."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.tensor_parts import TensorPart, cut, join, whole_shapes
from torch import Tensor

MAX_RANK = 5
INPUTS, OUTPUTS, EXPERTS = 12, 10, 4
"""Of every module; 10 outputs over 4 tensor ranks are padded, as a vocabulary is."""


def parts_of(layout: Parallelism, rank: int) -> list[TensorPart]:
    """Return the parts of a pipeline stage.

    Tensor ranks divide the rows of some modules and the columns of others.

        Expert ranks share the experts, each with its own B.
    """
    stage, tensor = layout.coordinates(rank).pipeline, layout.tensor
    own = (EXPERTS // layout.expert, OUTPUTS, MAX_RANK)
    rows, columns = -(-OUTPUTS // tensor), INPUTS // tensor
    A, B = (MAX_RANK, INPUTS), (OUTPUTS, MAX_RANK)
    return [
        TensorPart(f"{stage}.rows.lora_A", A, None, A),
        TensorPart(f"{stage}.rows.lora_B", (rows, MAX_RANK), 0, B),
        TensorPart(f"{stage}.columns.lora_A", (MAX_RANK, columns), 1, A),
        TensorPart(f"{stage}.columns.lora_B", B, None, B),
        TensorPart(f"{stage}.experts.lora_A", (1, *A), None, (1, *A)),
        TensorPart(f"{stage}.experts.lora_B", own, 0, (EXPERTS, *B), "expert"),
    ]


layouts = st.builds(
    lambda pipeline, data, tensor, expert: Parallelism(
        pipeline * data * tensor, tensor=tensor, pipeline=pipeline, expert=math.gcd(data * tensor, expert)
    ),
    *(st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 4))),
)


@given(layouts, st.integers(1, MAX_RANK), st.booleans())
def test_divided_tensors_join_to_the_original(layout: Parallelism, rank: int, all_modules: bool) -> None:
    parts = [parts_of(layout, each) for each in range(layout.world_size)]
    modules = [f"{stage}.{kind}" for stage in range(layout.pipeline) for kind in ("columns", "experts", "rows")]
    trained = modules if all_modules else modules[:1]
    shapes = whole_shapes(parts, trained, rank)
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}

    held: list[dict[str, Tensor] | None] = [cut(whole, own, layout.coordinates(each)) for each, own in enumerate(parts)]
    silent = [
        tensors if layout.is_first_copy(each) or layout.is_first_of_experts(each) else None
        for each, tensors in enumerate(held)
    ]
    joined = join(silent, parts, layout, shapes)

    assert list(joined) == list(whole)
    assert all(torch.equal(joined[name], values) for name, values in whole.items())


@given(layouts, st.integers(1, MAX_RANK))
def test_padding_and_untrained_values_are_zero(layout: Parallelism, rank: int) -> None:
    parts = [parts_of(layout, each) for each in range(layout.world_size)]
    whole = {name: torch.ones(shape) for name, shape in whole_shapes(parts, ["0.rows"], rank).items()}

    held = [cut(whole, own, layout.coordinates(each)) for each, own in enumerate(parts)]

    for own, tensors in zip(parts, held, strict=True):
        assert {name: tensor.shape for name, tensor in tensors.items()} == {part.name: part.shape for part in own}
        assert not any(tensor.any() for name, tensor in tensors.items() if not name.startswith("0.rows"))
    copies = layout.data * layout.tensor
    assert sum(tensors["0.rows.lora_A"].sum() for tensors in held[:copies]) == copies * rank * INPUTS
    assert sum(tensors["0.rows.lora_B"].sum() for tensors in held[:copies]) == layout.data * rank * OUTPUTS
