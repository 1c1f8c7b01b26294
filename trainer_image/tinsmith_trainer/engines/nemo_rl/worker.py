"""The mixin that turns NeMo RL's Megatron worker into a rank of Tinsmith; `actor` combines the two classes.

All remote calls use one method, because NeMo RL passes arguments only by keyword, and Tinsmith's calls pass arguments
by position.
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
    """A base class that comes before `MegatronPolicyWorkerImpl`.

    The mixin uses attributes that `MegatronPolicyWorkerImpl` builds: `model` (Megatron's DistributedDataParallel),
    `optimizer`, `cfg`, `rank`, `mcore_state`, `defer_fp32_logits`. NeMo RL's own training methods are never called.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from megatron.bridge.training import initialize
        from nemo_rl.models.megatron import setup

        with canonical_lora_in(setup), no_compiler_in(initialize):
            super().__init__(*args, **kwargs)
        self._ts_rank: Rank | None = None

    def ts_start(self, parallelism: Parallelism) -> Answer:
        """Build the rank. Call this once on every rank, before all other calls.

        Raises ModelDirectoryInvalid, or ValueError for a model whose optimizer steps are not supported.
        """
        self._ts_rank = rank_of(self, parallelism)
        return Answer()

    def ts_call(self, method: str, arguments: Sequence[Any]) -> Answer:
        """Call the method of `Rank` with this name, and return the result."""
        return attempt(lambda: getattr(self._started, method)(*arguments))

    def ts_call_sharded(self, shard: Any, method: str, arguments: Sequence[Any]) -> Answer:
        """Call the method of `Rank` with this name, with this rank's shard as first argument, and return the result."""
        return attempt(lambda: getattr(self._started, method)(shard, *arguments))

    @property
    def _started(self) -> Rank:
        assert self._ts_rank is not None, "ts_start comes first"
        return self._ts_rank


@contextmanager
def canonical_lora_in(setup: ModuleType) -> Iterator[None]:
    """Make NeMo RL's module `setup` use CanonicalLoRA for workers created inside the context.

    NeMo RL has no option for CanonicalLoRA.
    """
    stock = setup.LoRA
    vars(setup)["LoRA"] = _canonical_lora
    try:
        yield
    finally:
        vars(setup)["LoRA"] = stock


def _canonical_lora(*, target_modules: Sequence[str], dim: int, **_others: Any) -> Any:
    """Replace `LoRA(...)`. The other arguments of `LoRA` have no effect (`policy_config._peft`)."""
    return canonical_lora(target_modules=target_modules, dim=dim)


@contextmanager
def no_compiler_in(initialize: ModuleType) -> Iterator[None]:
    """Disable the compilation of Megatron's data sets for workers created inside the context.

    The data sets are not used.

    `initialize_megatron` in Megatron-Bridge's module `initialize` compiles in the package's folder. A rank that does
    not run as root may not write to the package's folder, and a failure ends the rank.
    """
    stock = initialize.compile_helpers
    vars(initialize)["compile_helpers"] = lambda: None
    try:
        yield
    finally:
        vars(initialize)["compile_helpers"] = stock


def rank_of(worker: Any, parallelism: Parallelism) -> Rank:
    """Build a rank of Tinsmith from NeMo RL's worker."""
    # `_create_megatron_config` in `nemo_rl/models/megatron/setup.py` has no option for it, and Megatron would end the
    # rank for a non-finite gradient, which our step refuses without ending it.
    worker.model.ddp_config.check_for_nan_in_grad = False
    return adapted_rank(worker.model, worker.optimizer, lambda: NemoSchedule(worker), parallelism, worker.rank)
