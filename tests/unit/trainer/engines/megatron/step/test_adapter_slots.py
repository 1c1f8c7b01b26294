from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.engines.megatron.step.adapter_slots import AdapterSlot, pack, to_host, unpack

SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=6)
TYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(SHAPES, TYPES)
def test_packed_tensors_are_restored_bit_for_bit(shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    before = [parameter.detach().clone() for parameter in parameters]
    packed = to_host(pack(parameters))
    for parameter in parameters:
        parameter.detach().zero_()
    unpack(packed, parameters)
    assert all(torch.equal(parameter, was) for parameter, was in zip(parameters, before, strict=True))
    assert all(parameter.requires_grad for parameter in parameters)


def test_gradients_are_added_and_taken_once() -> None:
    slot = AdapterSlot(step=0, has_moments=False, gradients=None, parked=None)
    assert slot.take_gradients() is None
    slot.add(torch.ones(3))
    slot.add(torch.full((3,), 2.0))
    taken = slot.take_gradients()
    assert taken is not None
    assert taken.tolist() == [3.0, 3.0, 3.0]
    assert slot.gradients is None
