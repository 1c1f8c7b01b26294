from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.datums import VOCAB_SIZE, policy_datum, sft_datum
from tinsmith_trainer.engines.base import Datum, LossSpec
from tinsmith_trainer.engines.losses import PreparedLoss, prepare_loss
from tinsmith_trainer.engines.megatron.batch import TARGET_IDS, Batch, RowResults, encode, scored
from tinsmith_trainer.engines.nemo_rl.schedule import ROWS, RowList, TinkerLoss, parallel_logprobs
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fake_nemo_rl")


def next_token_targets(datum: Datum) -> Datum:
    targets = datum.loss_inputs["target_tokens"].copy()
    targets[:-1] = datum.tokens[1:]
    return Datum(datum.tokens, {**datum.loss_inputs, "target_tokens": targets})


def prepared(name: str, datums: Sequence[Datum]) -> tuple[PreparedLoss, Batch]:
    loss = prepare_loss(LossSpec(name, {}), datums)
    return loss, encode(datums, loss.arrays, multiple_of=4)


def by_hand(logits: Tensor, batch: Batch) -> Tensor:
    """Return the logprob of each target at its position, straight from the whole logits."""
    targets = scored(batch).targets
    logprobs = torch.log_softmax(logits[:, :-1], -1)
    return logprobs.gather(-1, targets if targets.ndim == 3 else targets.unsqueeze(-1)).view(targets.shape)


def of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 3:
        return torch.stack([of_targets(logits, one) for one in targets.unbind(-1)], dim=-1)
    return torch.log_softmax(logits, -1).gather(-1, targets.roll(-1, 1).unsqueeze(-1)).squeeze(-1)[:, :-1]


CALLS = {
    "tokens after": ("cross_entropy", [next_token_targets(sft_datum(n)) for n in (5, 3, 9)]),
    "any targets": ("cross_entropy", [sft_datum(5), sft_datum(7)]),
    "several targets": ("cross_entropy", [sft_datum(5, targets=3), sft_datum(2, targets=2)]),
    "a policy's": ("importance_sampling", [policy_datum(6), policy_datum(4)]),
    "a policy's tokens after": ("ppo", [next_token_targets(policy_datum(n)) for n in (6, 4)]),
}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_the_plain_sum_over_the_calls_tokens_without_nemo_rls_division(call: str) -> None:
    loss, batch = prepared(*CALLS[call])
    logits = torch.randn(*batch["input_ids"].shape, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logprobs = by_hand(logits, batch)
    expected = loss(logprobs, scored(batch).inputs)
    general = TARGET_IDS in batch
    tinker = TinkerLoss(loss, by_itself=general, logprobs=of_targets)
    given_input = {"logits": logits} if general else {"next_token_logprobs": logprobs}
    total, metrics = tinker(batch, torch.tensor(17.0), torch.tensor(23.0), **given_input)
    assert total.item() == pytest.approx(expected.loss.sum().item(), rel=1e-6)
    [rows] = metrics[ROWS]
    assert torch.equal(rows.row_id, batch["row_id"])
    assert torch.allclose(rows.logprobs, logprobs, atol=1e-6)


def row(index: int) -> RowResults:
    return RowResults(torch.tensor([index]), torch.zeros(1, index + 1), torch.zeros(1), {})


@given(st.lists(st.integers(0, 5), max_size=4).map(lambda counts: [[row(i) for i in range(n)] for n in counts]))
def test_rows_of_packed_sequences_are_summed_as_nemo_rl_sums_metrics(parts: list[list[RowResults]]) -> None:
    total: int | RowList = 0
    for part in parts:
        total += RowList(part)
    flat = [result for part in parts for result in part]
    assert (list(total) if isinstance(total, list) else []) == flat


def test_targets_logprobs_come_from_nemo_rls_own_over_the_ranks_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    for name in ("tensor_model_parallel_rank", "tensor_model_parallel_group", "context_parallel_group"):
        monkeypatch.setattr(parallel_state, f"get_{name}", lambda: 0)
    # Whatever engine another test left in this process.
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    logits = torch.randn(2, 5, VOCAB_SIZE)
    targets = torch.randint(VOCAB_SIZE, (2, 5))
    assert torch.allclose(parallel_logprobs(logits, targets), of_targets(logits, targets))
