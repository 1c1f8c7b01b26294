"""Logprobs of targets, and their gradients, are those of a plain log-softmax in double precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.logprob_cases import AMPLE, Case, assert_alike, leaves, logprobs_of, some_loss
from tinsmith_trainer.engines.peft import vocabulary_tiles
from tinsmith_trainer.torch_model.architecture import LogitTransform
from tinsmith_trainer.torch_model.device import WarmMemory
from torch import Tensor

cases = st.builds(
    Case,
    tokens=st.integers(1, 40),
    hidden_size=st.sampled_from([1, 8, 33]),
    vocab_size=st.integers(2, 400),
    rank=st.sampled_from([0, 1, 8]),
    targets=st.integers(1, 4),
    bias=st.booleans(),
    spread=st.sampled_from([0.1, 3.0, 50.0]),
    seed=st.integers(0, 99),
    transform=st.builds(LogitTransform, st.sampled_from([1.0, 0.0625, 3.0]), st.sampled_from([None, 5.0, 30.0])),
)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@settings(deadline=None)
@given(cases)
def test_logprobs_and_gradients_are_those_of_a_log_softmax(case: Case) -> None:
    assert_alike(case)


@settings(deadline=None)
@given(cases, st.integers(1, 16))
def test_blocks_of_any_length_make_the_same_sums(case: Case, tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_tiles, "BLOCK_TOKENS", tokens)
        assert_alike(case)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # by the flag's context itself
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("byte_budget", [AMPLE, 7 * 300 * 4], ids=["at once", "in chunks"])
@pytest.mark.parametrize("rank", [0, 4])
def test_other_types_are_computed_with_their_logits_held_or_in_chunks(
    dtype: torch.dtype, byte_budget: int, rank: int
) -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # some machines advertise AMX and trap on it
        assert_alike(Case(dtype=dtype, rank=rank, targets=2), byte_budget)


@pytest.mark.usefixtures("threads")
def test_the_same_call_gives_the_same_bits() -> None:
    def run() -> list[Tensor]:
        hidden, targets, head, delta = Case(tokens=128, vocab_size=9000, hidden_size=64, targets=2).drawn()
        logprobs = logprobs_of(hidden, targets, head, delta)
        return [logprobs, *torch.autograd.grad(some_loss(logprobs), leaves(hidden, delta))]

    first, second = run(), run()
    assert all(torch.equal(one, same) for one, same in zip(first, second, strict=True))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("tokens", [128, 384, 1016, 1024])
def test_a_rows_bits_do_not_depend_on_its_place_or_on_other_rows(tokens: int) -> None:
    hidden, targets, head, delta = Case(tokens=tokens, vocab_size=9000, hidden_size=64).drawn()
    row = tokens // 8
    logprobs = logprobs_of(hidden, targets, head, delta, product_tokens=row)
    rolled = logprobs_of(hidden.roll(3 * row, 0), targets.roll(3 * row, 0), head, delta, product_tokens=row)
    assert torch.equal(rolled, logprobs.roll(3 * row, 0))
    alone = logprobs_of(hidden[:row], targets[:row], head, delta, product_tokens=row)
    assert torch.equal(alone, logprobs[:row])


@pytest.mark.parametrize("cap", [None, 5.0])
def test_kept_logprobs_have_the_bits_of_recomputed_ones(cap: float | None) -> None:
    transform = LogitTransform(1.0, cap)

    def run(kept_blocks: int) -> list[Tensor]:
        case = Case(tokens=128, vocab_size=9000, hidden_size=64, targets=2, transform=transform)
        hidden, targets, head, delta = case.drawn()
        memory = WarmMemory()
        memory.begin(kept_blocks * 32 * case.vocab_size * 4)
        logprobs = logprobs_of(hidden, targets, head, delta, product_tokens=32, transform=transform, memory=memory)
        return [logprobs, *torch.autograd.grad(some_loss(logprobs), leaves(hidden, delta))]

    none, some, every = (run(blocks) for blocks in (0, 3, 4))
    assert all(torch.equal(one, same) for one, same in zip(none, some, strict=True))
    assert all(torch.equal(one, same) for one, same in zip(none, every, strict=True))


def test_warm_memory_is_handed_out_once_until_it_begins_again() -> None:
    memory = WarmMemory()
    assert memory.take(1) is None
    memory.begin(8 * 4)
    first, second = memory.take(5), memory.take(3)
    assert first is not None
    assert second is not None
    assert second.data_ptr() == first.data_ptr() + 5 * 4
    assert memory.take(1) is None
    memory.begin(8 * 4)
    again = memory.take(8)
    assert again is not None
    assert again.data_ptr() == first.data_ptr()


def test_without_gradients_the_bits_are_those_of_training() -> None:
    hidden, targets, head, delta = Case().drawn()
    trained = logprobs_of(hidden, targets, head, delta)
    with torch.no_grad():
        assert torch.equal(logprobs_of(hidden, targets, head, delta), trained)


def test_logits_beyond_the_range_of_an_exponential_are_fine() -> None:
    assert_alike(Case(spread=400.0))
