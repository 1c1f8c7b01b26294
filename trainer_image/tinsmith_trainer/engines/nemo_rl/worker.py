"""What makes NeMo RL's Megatron worker one of our ranks; `actor` mixes it into the worker itself.

One method crosses the wire, because NeMo RL passes arguments by keyword alone and ours by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tinsmith_trainer.engines.megatron.model.canonical_lora import adapted_rank, canonical_lora
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, attempt
from tinsmith_trainer.engines.megatron.step.rank import Rank
from tinsmith_trainer.engines.nemo_rl.schedule import NemoSchedule


class TinsmithMegatronWorkerMixin:
    """Stands before `MegatronPolicyWorkerImpl` among a class's bases.

    Uses of what that class builds: `model` (Megatron's DistributedDataParallel), `optimizer`, `cfg`, `rank`,
    `mcore_state`, `defer_fp32_logits`. Its own training methods are never called.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from megatron.bridge.training import initialize
        from nemo_rl.models.megatron import setup

        with canonical_lora_in(setup), no_compiler_in(initialize):
            super().__init__(*args, **kwargs)
        self._ts_rank: Rank | None = None

    def ts_start(self, parallelism: Parallelism) -> Answer:
        """Once, before all other calls, on every rank. Raises ModelDirectoryInvalid, or ValueError for a model that
        steps of ours cannot be made on."""
        self._ts_rank = rank_of(self, parallelism)
        return Answer()

    def ts_call(self, method: str, arguments: Sequence[Any]) -> Answer:
        """What came of `Rank`'s method of that name."""
        return attempt(lambda: getattr(self._started, method)(*arguments))

    def ts_call_sharded(self, shard: Any, method: str, arguments: Sequence[Any]) -> Answer:
        """The same, with this rank's shard first."""
        return attempt(lambda: getattr(self._started, method)(shard, *arguments))

    @property
    def _started(self) -> Rank:
        assert self._ts_rank is not None, "ts_start comes first"
        return self._ts_rank


@contextmanager
def canonical_lora_in(setup: ModuleType) -> Iterator[None]:
    """Workers made inside get CanonicalLoRA where `setup`, NeMo RL's module, says LoRA, and cannot be asked for it."""
    stock = setup.LoRA
    vars(setup)["LoRA"] = _canonical_lora
    try:
        yield
    finally:
        vars(setup)["LoRA"] = stock


def _canonical_lora(*, target_modules: Sequence[str], dim: int, **_others: Any) -> Any:
    """In place of `LoRA(...)`, whose other arguments are ours too (`policy_config._peft`), and neutral."""
    return canonical_lora(target_modules=target_modules, dim=dim)


@contextmanager
def no_compiler_in(initialize: ModuleType) -> Iterator[None]:
    """Workers made inside compile nothing for Megatron's data sets, of which none is ever read here.

    `initialize_megatron` in `initialize`, Megatron-Bridge's module, does so in the folder of the package, where a rank
    that is not root may not write, and ends the rank when it fails.
    """
    stock = initialize.compile_helpers
    vars(initialize)["compile_helpers"] = lambda: None
    try:
        yield
    finally:
        vars(initialize)["compile_helpers"] = stock


def rank_of(worker: Any, parallelism: Parallelism) -> Rank:
    """One of our ranks, made of what NeMo RL's worker built."""
    # `_create_megatron_config` in `nemo_rl/models/megatron/setup.py` leaves no choice, and Megatron would end the rank
    # where a step of ours refuses a gradient's norm that is not finite, and lives on.
    worker.model.ddp_config.check_for_nan_in_grad = False
    return adapted_rank(worker.model, worker.optimizer, lambda: NemoSchedule(worker), parallelism, worker.rank)
