"""Logprobs of targets, and their gradients, are those of a plain log-softmax in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinsmith_trainer.engines.peft import vocabulary_tiles
from tinsmith_trainer.engines.peft.logprobs import target_logprobs
from tinsmith_trainer.engines.peft.vocabulary_tiles import tokens_per_block
from tinsmith_trainer.torch_model.lora import OwnDelta, StackedLoraLinear
from torch import Tensor, nn

AMPLE = 2**30
RELATIVE_ROUNDING = 1e-5
ROUNDING = {torch.float32: RELATIVE_ROUNDING, torch.float64: RELATIVE_ROUNDING, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Case:
    """Tensors drawn from a seed; `rank` 0 is a projection without a LoRA. `spread` is about that of the logits."""

    tokens: int = 24
    hidden_size: int = 16
    vocab_size: int = 300
    rank: int = 4
    targets: int = 1
    bias: bool = False
    spread: float = 3.0
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def drawn(self) -> tuple[Tensor, Tensor, StackedLoraLinear, OwnDelta | None]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        head = nn.Linear(self.hidden_size, self.vocab_size, bias=self.bias).requires_grad_(False)
        head.weight.copy_(normal(self.vocab_size, self.hidden_size) * self.spread / self.hidden_size**0.5)
        if self.bias:
            head.bias.copy_(normal(self.vocab_size))
        hidden = normal(self.tokens, self.hidden_size).to(self.dtype).requires_grad_()
        targets = torch.randint(self.vocab_size, (self.tokens, self.targets), generator=generator)
        delta = None
        if self.rank:
            lora_A = normal(self.rank, self.hidden_size).requires_grad_()
            delta = OwnDelta(lora_A, normal(self.vocab_size, self.rank).mul_(0.1).requires_grad_(), 0.5)
        return hidden, targets, StackedLoraLinear(head.to(self.dtype), "lm_head"), delta


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
)


def logprobs_of(
    hidden: Tensor,
    targets: Tensor,
    head: StackedLoraLinear,
    delta: OwnDelta | None,
    *,
    product_tokens: int | None = None,
    byte_budget: int = AMPLE,
) -> Tensor:
    """By products of all tokens, unless said."""
    tokens = product_tokens or len(hidden)
    return target_logprobs(hidden, targets, head, delta, product_tokens=tokens, byte_budget=byte_budget)


def expected(hidden: Tensor, targets: Tensor, head: StackedLoraLinear, delta: OwnDelta | None) -> Tensor:
    """As one writes it, in float64."""
    logits = hidden.double() @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    if delta is not None:
        logits = logits + hidden.double() @ delta.lora_A.double().T @ delta.lora_B.double().T * delta.scale
    return logits.log_softmax(-1).gather(-1, targets)


def leaves(hidden: Tensor, delta: OwnDelta | None) -> list[Tensor]:
    return [hidden] if delta is None else [hidden, delta.lora_A, delta.lora_B]


def some_loss(logprobs: Tensor) -> Tensor:
    """With a gradient of its own, of either sign, for each logprob."""
    weights = torch.linspace(-1.0, 2.0, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    return (logprobs * weights).sum() + logprobs.square().sum() / 20


def assert_alike(case: Case, byte_budget: int = AMPLE, product_tokens: int | None = None) -> None:
    hidden, targets, head, delta = case.drawn()
    found = logprobs_of(hidden, targets, head, delta, product_tokens=product_tokens, byte_budget=byte_budget)
    plain = expected(hidden, targets, head, delta)

    assert found.dtype == torch.float32
    rounding = ROUNDING[case.dtype] * max(1.0, case.spread)
    torch.testing.assert_close(found.double(), plain, rtol=rounding, atol=rounding)
    gradients = torch.autograd.grad(some_loss(found), leaves(hidden, delta))
    for gradient, same in zip(gradients, torch.autograd.grad(some_loss(plain), leaves(hidden, delta)), strict=True):
        # Where a target has nearly all of the probability, terms of the projection's own size cancel.
        atol = rounding * max(1.0, float(same.abs().max()))
        torch.testing.assert_close(gradient.double(), same.double(), rtol=0, atol=atol)


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
@given(cases, st.integers(1, 40))
def test_products_of_any_length_make_the_same_sums(case: Case, product_tokens: int) -> None:
    assert_alike(case, product_tokens=product_tokens)


@settings(deadline=None)
@given(cases, st.integers(1, 2000))
def test_tiles_of_any_width_make_the_same_sums(case: Case, logits: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_tiles, "TILE_LOGITS", logits)
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


def test_without_gradients_the_bits_are_those_of_training() -> None:
    hidden, targets, head, delta = Case().drawn()
    trained = logprobs_of(hidden, targets, head, delta)
    with torch.no_grad():
        assert torch.equal(logprobs_of(hidden, targets, head, delta), trained)


def test_logits_beyond_the_range_of_an_exponential_are_fine() -> None:
    assert_alike(Case(spread=400.0))


def test_a_logprob_is_never_above_zero() -> None:
    hidden, targets, head, delta = Case(tokens=1000, vocab_size=5, spread=60.0).drawn()
    assert logprobs_of(hidden, targets, head, delta).max() <= 0


@given(st.integers(1, 100_000))
def test_blocks_are_equal(tokens: int) -> None:
    block = tokens_per_block(tokens)
    assert tokens % block == 0
    assert block <= vocabulary_tiles.BLOCK_TOKENS or block % 2 == 1
