from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.datums import VOCAB_SIZE, policy_datum, sft_datum
from tinsmith_trainer.engines.base import Datum, LossSpec
from tinsmith_trainer.engines.losses import prepare_loss
from tinsmith_trainer.engines.megatron.batch import encode, gather, scored
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.sharding import close_shards, equal_shards
from tinsmith_trainer.engines.nemo_rl import schedule as module
from tinsmith_trainer.engines.nemo_rl.schedule import NemoSchedule
from torch import nn


class TinyModel(nn.Module):
    """Logits that depend on a position's token alone, so that packing cannot change them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)))

    def forward(
        self, input_ids: torch.Tensor, position_ids: object = None, attention_mask: object = None
    ) -> torch.Tensor:
        return self.table[input_ids]


def _by_hand(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if targets.ndim == 3:
        return torch.stack([_by_hand(logits, one) for one in targets.unbind(-1)], dim=-1)
    return torch.log_softmax(logits, -1).gather(-1, targets.roll(-1, 1).unsqueeze(-1)).squeeze(-1)[:, :-1]


def worker(*, packing: bool) -> Any:
    config = {
        "sequence_packing": {
            "enabled": packing,
            "fuse_loss": False,
            "train_mb_tokens": 16,
            "algorithm": "modified_first_fit_decreasing",
        },
        "make_sequence_length_divisible_by": 4,
    }
    state = SimpleNamespace(straggler_timer=None)
    return SimpleNamespace(cfg=config, model=TinyModel(), mcore_state=state, defer_fp32_logits=True)


def targets_after(datum: Datum) -> Datum:
    targets = datum.loss_inputs["target_tokens"].copy()
    targets[:-1] = datum.tokens[1:]
    return Datum(datum.tokens, {**datum.loss_inputs, "target_tokens": targets})


@pytest.fixture(autouse=True)
def _one_rank(fake_nemo_rl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module,
        "parallel_logprobs",
        _by_hand,
    )


KINDS = {
    "tokens after": ("cross_entropy", lambda length, seed: targets_after(sft_datum(length, seed))),
    "any targets": ("cross_entropy", sft_datum),
    "several targets": ("cross_entropy", lambda length, seed: sft_datum(length, seed, targets=2)),
    "a policy's": ("ppo", lambda length, seed: targets_after(policy_datum(length, seed))),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=6),
    token_budget=st.integers(1, 60),
    packing=st.booleans(),
)
def test_rows_and_gradients_are_those_of_the_whole_call_for_any_microbatches_and_packing(
    kind: str, lengths: list[int], token_budget: int, packing: bool
) -> None:
    name, make = KINDS[kind]
    datums = [make(length, seed) for seed, length in enumerate(lengths)]
    loss = prepare_loss(LossSpec(name, {}), datums)
    batch = encode(datums, loss.arrays, multiple_of=4)
    one = worker(packing=packing)

    # Context ranks pack, and want microbatches of one shape.
    sharding = equal_shards if packing else close_shards
    [own] = sharding(datums, loss.arrays, Parallelism(4, tensor=4), token_budget)
    results = gather(NemoSchedule(one)(own, loss, forward_only=False), datums)

    whole = TinyModel()
    seen = scored(batch)
    targets = seen.targets if seen.targets.ndim == 3 else seen.targets.unsqueeze(-1)
    logprobs = torch.log_softmax(whole(batch["input_ids"])[:, :-1], -1).gather(-1, targets).view(seen.targets.shape)
    terms = loss(logprobs, seen.inputs)
    terms.loss.sum().backward()
    assert one.model.table.grad is not None
    assert whole.table.grad is not None
    assert torch.allclose(one.model.table.grad, whole.table.grad, atol=1e-5)
    for index, result in enumerate(results):
        expected = logprobs[index, : datums[index].length].detach()
        assert torch.allclose(torch.from_numpy(result.logprobs), expected, atol=1e-6)
        assert result.loss == pytest.approx(terms.loss[index].sum().item(), rel=1e-5, abs=1e-5)


def test_a_forward_leaves_no_gradient() -> None:
    datums = [sft_datum(5)]
    loss = prepare_loss(LossSpec("cross_entropy", {}), datums)
    one = worker(packing=False)
    with torch.no_grad():
        results = NemoSchedule(one)([encode(datums, loss.arrays)], loss, forward_only=True)
    assert len(results) == 1
    assert one.model.table.grad is None
