"""Recomputation on ranks in backward, which costs time, saves memory, and changes no bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from support.engine.contract import IMPORTANCE_SAMPLING, bits, forward_backward, spec, state_bits
from support.engine.datums import policy_datum, sft_datum
from support.nemo_rl.engines import engine_over
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankRecompute
from tinsmith_trainer.engines.megatron.local_rank import InProcessRank, RankModel
from tinsmith_trainer.engines.megatron.model.gpt_model import CausalAttention
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.torch_model.tiny_model import Family

SETTINGS = MegatronSettings(max_rank=8, token_budget=64)
SFT = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12))]
POLICY = [policy_datum(length, seed) for seed, length in enumerate((7, 19))]
TIMES: dict[RankRecompute, dict[str, int]] = {
    "mlp": {"attention": 1, "mlp": 2},
    "layers": {"attention": 2, "mlp": 2},
}


FEED_FORWARDS: dict[Family, Any] = {"qwen3": MLP, "qwen3-moe": SequentialMLP}


@pytest.fixture(params=list(FEED_FORWARDS))
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture
def calls(family: Family, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the calls of each layer's two halves, over all layers."""
    counted: Counter[str] = Counter()
    for half, owner in (("attention", CausalAttention), ("mlp", FEED_FORWARDS[family])):
        monkeypatch.setattr(owner, "forward", _counting(owner.forward, counted, half))
    return counted


def _counting(forward: Any, counted: Counter[str], half: str) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        counted[half] += 1
        return forward(*args, **kwargs)

    return count


def trained(family: Family, recompute: RankRecompute) -> object:
    """Every bit of a step, on layers of which the first has frozen embeddings before it."""
    model = tiny_model(family)
    rank = InProcessRank(RankModel(model.directory, Parallelism(), SETTINGS.max_rank, recompute))
    engine = engine_over(rank, model, SETTINGS)
    engine.create_adapter("a", spec(engine))
    outcomes = [bits(forward_backward(engine, SFT)) for _ in range(2)]
    engine.optim_step("a", AdamParams(learning_rate=1e-2))
    outcomes.append(bits(forward_backward(engine, POLICY, loss=IMPORTANCE_SAMPLING)))
    return outcomes, state_bits(engine.state("a"))


def test_a_step_is_the_same_to_the_bit(family: Family, calls: Counter[str]) -> None:
    kept = trained(family, "none")
    once = Counter(calls)
    for recompute, times in TIMES.items():
        calls.clear()
        assert trained(family, recompute) == kept
        assert calls == {half: times[half] * once[half] for half in once}
