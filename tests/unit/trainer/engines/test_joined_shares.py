"""Calls of many adapters share one output projection and one loss, and each has the results of its own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.contract import CROSS_ENTROPY, advance_all, compute_together, gradients, train
from support.engine.datums import policy_datum, sft_datum
from support.engine.peft import DATUMS
from support.engine.places import peft_engine
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import LoraSpec, LossSpec, Outcome, Work
from tinsmith_trainer.engines.batching import CELLS_PER_TOKEN, pad, plan_microbatches
from tinsmith_trainer.engines.losses import prepare_loss
from tinsmith_trainer.engines.peft import PeftEngine, PeftEngineSettings, logprobs, shared_forward, shares
from tinsmith_trainer.engines.peft.share_losses import LossBatch, plan_batches
from tinsmith_trainer.engines.peft.shares import Share
from tinsmith_trainer.torch_model.expert_products import HAS_GROUPED_PRODUCTS
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # by a flag's context

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""The difference that another order of sums may make in logprobs, and in gradients relative to the largest element."""
EQUAL = {name: LoraSpec(rank=8, alpha=32.0, seed=seed) for seed, name in enumerate("abcd")}
UNLIKE = EQUAL | {
    "b": LoraSpec(rank=3, alpha=8.0, seed=1),
    "c": LoraSpec(rank=8, alpha=32.0, seed=2, train_unembed=False),
    "d": LoraSpec(rank=5, alpha=32.0, seed=3, train_attn=False, train_mlp=False),
}
NO_HEAD = {name: replace(spec, train_unembed=False) for name, spec in EQUAL.items()}
MANY_TOKENS = 2**20
AMPLE, ELEVEN_TOKENS = 2**28, 11 * 512 * 4
"""Budgets of bytes for logits of 512 ids in float32."""

SAME_LOSS = [
    Work(name, [sft_datum(length, 1), sft_datum(7, 2)], CROSS_ENTROPY)
    for name, length in zip("abcd", (5, 40, 12, 20), strict=True)
]
LOSSES = [
    Work("a", [policy_datum(9), policy_datum(30)], LossSpec("ppo", {"clip_high_threshold": 1.1})),
    Work("b", [sft_datum(12, targets=3), sft_datum(4, targets=3)], CROSS_ENTROPY),
    Work("c", [policy_datum(17), policy_datum(5)], LossSpec("gspo")),
    Work("d", [policy_datum(20)], LossSpec("ppo", {"clip_high_threshold": 1.1})),
]


@pytest.fixture(autouse=True)
def logits_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute logits as on a GPU. In float32 a CPU would compute each adapter's logprobs by tiles."""
    for module in (logprobs, shares):
        monkeypatch.setattr(module, "takes_tiles", lambda _: False)
    with torch.backends.mkldnn.flags(enabled=False):  # some machines advertise AMX and trap on it
        yield


def new_engine(specs: Mapping[str, LoraSpec], dtype: torch.dtype = torch.float32, budget: int = AMPLE) -> PeftEngine:
    """Build an engine on the path of a GPU, with adapters that have been trained a little."""
    limits = PeftEngineSettings(
        cobatch_tokens=MANY_TOKENS,
        logits_byte_budget=budget,
        lora_products="bfloat16" if dtype == torch.bfloat16 else "float32",
    )
    engine = peft_engine("like-gpu", tiny_directory(), limits, dtype)
    for name, spec in specs.items():
        engine.create_adapter(name, spec)
        train(engine, DATUMS[:2], adapter=name)
    return engine


def assert_as_alone(engine: PeftEngine, works: Sequence[Work], rounding: float) -> None:
    """Compare calls of one forward with the same calls one by one: outputs, metrics and gradients."""
    expected: list[tuple[Outcome, Mapping[str, np.ndarray]]] = []
    for work in works:
        [outcome] = compute_together(engine, [work])
        expected.append((outcome, gradients(engine, work.adapter_id)))
        engine.clear_gradients(work.adapter_id)
    together = compute_together(engine, works)
    for work, found, (outcome, gradient) in zip(works, together, expected, strict=True):
        for one, other in zip(found.outputs, outcome.outputs, strict=True):
            assert one["logprobs"].shape == other["logprobs"].shape
            np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=rounding)
        assert found.metrics == pytest.approx(outcome.metrics, rel=rounding, abs=10 * rounding)
        for name, values in gradients(engine, work.adapter_id).items():
            atol = rounding * float(np.abs(gradient[name]).max())
            np.testing.assert_allclose(values, gradient[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("specs", [EQUAL, UNLIKE, NO_HEAD], ids=["equal layouts", "other layouts", "no projection"])
@pytest.mark.parametrize(
    ("works", "dtype", "budget"),
    [
        pytest.param(SAME_LOSS, torch.float32, AMPLE, id="one loss"),
        pytest.param(LOSSES, torch.float32, AMPLE, id="several losses"),
        pytest.param(LOSSES, torch.float32, ELEVEN_TOKENS, id="logits in chunks"),
        pytest.param(SAME_LOSS, torch.bfloat16, ELEVEN_TOKENS, id="bfloat16"),
    ],
)
def test_joined_calls_have_the_results_of_calls_alone(
    specs: Mapping[str, LoraSpec], works: Sequence[Work], dtype: torch.dtype, budget: int
) -> None:
    assert_as_alone(new_engine(specs, dtype, budget), works, ROUNDING[dtype])


@pytest.mark.parametrize(("works", "losses"), [(SAME_LOSS, 1), (LOSSES, 3)], ids=["one loss", "three losses"])
def test_a_forward_has_one_projection_and_one_loss_for_all_calls_of_the_same_loss(
    works: Sequence[Work], losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(EQUAL)
    projected: list[object] = []
    batches: list[object] = []
    monkeypatch.setattr(shared_forward, "target_logprobs", _noted(projected, logprobs.target_logprobs))
    monkeypatch.setattr(LossBatch, "loss", _noted(batches, LossBatch.loss))
    compute_together(engine, works)
    assert (len(projected), len(batches)) == (1, losses)


@pytest.mark.skipif(not HAS_GROUPED_PRODUCTS, reason="this PyTorch computes a product for each adapter")
def test_the_operations_for_one_more_adapter_are_fewer_than_its_tensors() -> None:
    """Each operation takes time on the host, however small its tensors are."""
    engine = new_engine(EQUAL, torch.bfloat16)
    datums, counts = [sft_datum(20)] * len(EQUAL), []
    for works in ([Work("a", datums, CROSS_ENTROPY)], [Work(name, datums[:1], CROSS_ENTROPY) for name in EQUAL]):
        calls = [engine.start(work) for work in works]
        with CountedOperations() as counted:
            advance_all(engine, calls)
        counts.append(counted.count)
    one, many = counts
    tensors = len(engine.adapter_shapes(EQUAL["a"]))
    assert many - one < tensors


class CountedOperations(TorchDispatchMode):
    """Counts the operations of a block, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _noted(calls: list[object], function: Callable[..., object]) -> Callable[..., object]:
    def noting(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return function(*args, **kwargs)

    return noting


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 5)), min_size=1, max_size=12))
@settings(deadline=None)
def test_short_calls_are_not_padded_to_many_times_their_tokens(lengths_and_rows: list[tuple[int, int]]) -> None:
    planned = plan_batches([drawn_share(*each) for each in lengths_and_rows], joined=True)
    assert sorted(place for batch in planned for place in batch.places) == list(range(len(lengths_and_rows)))
    for batch in planned:
        cells = batch.rows * batch.width
        assert len(batch.shares) == 1 or cells <= CELLS_PER_TOKEN * batch.tokens


def test_without_joining_each_share_is_a_batch() -> None:
    planned = plan_batches([drawn_share(8, 1), drawn_share(8, 1)], joined=False)
    assert [list(batch.places) for batch in planned] == [[0], [1]]


def drawn_share(length: int, rows: int) -> Share:
    """Return a share of this many datums, without an adapter."""
    datums = [sft_datum(length, seed) for seed in range(rows)]
    [microbatch] = plan_microbatches(datums, max_length=512, token_budget=MANY_TOKENS, packs_below=512)
    loss = prepare_loss(CROSS_ENTROPY, datums)
    return Share(mock.Mock(), microbatch.shape, pad(microbatch, datums, loss.arrays), loss, None)
