"""NeMo RL's worker group and as much of Ray as a driver uses: futures that are answered, raise, or never come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray import exceptions
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer

SILENCE = object()
"""What a rank does that waits in a collective for one that is gone."""

Behaviour = Callable[[int, Mapping[str, Any]], Any]
"""Of a rank and what it was called with: a value, an exception to raise, or SILENCE."""


@dataclass(frozen=True)
class Future:
    rank: int
    outcome: Any


class FakeRay:
    """`wait` gives what is ready one by one, and gives up at once where a timeout is set."""

    exceptions = exceptions

    def __init__(self) -> None:
        self.joined: dict[str, Any] = {}
        self.is_shut_down = False

    def init(self, **arguments: Any) -> None:
        self.joined = arguments

    def shutdown(self) -> None:
        self.is_shut_down = True

    def wait(
        self, pending: list[Future], *, num_returns: int, timeout: float | None
    ) -> tuple[list[Future], list[Future]]:
        ready = [future for future in pending if future.outcome is not SILENCE][:num_returns]
        assert ready or timeout is not None, "the driver would wait for ever"
        return ready, [future for future in pending if future not in ready]

    def get(self, future: Future) -> Any:
        if isinstance(future.outcome, Exception):
            raise future.outcome
        return future.outcome


@dataclass
class FakeWorkerGroup:
    """`RayWorkerGroup`'s two ways to call all workers: by keyword alone."""

    parallelism: Parallelism
    behaviour: Behaviour
    calls: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)

    def run_all_workers_single_data(self, method_name: str, *args: Any, **kwargs: Any) -> list[Future]:
        assert not args, "will fail with args under certain circumstances"
        return [self._call(rank, method_name, kwargs) for rank in range(self.parallelism.world_size)]

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str],
        common_kwargs: Mapping[str, Any],
        **kwargs: Sequence[Any],
    ) -> SimpleNamespace:
        assert not args
        assert [*in_sharded_axes, *sorted(replicate_on_axes)] == [
            "data_parallel",
            "context_parallel",
            "pipeline_parallel",
            "tensor_parallel",
        ]
        futures = []
        for rank in range(self.parallelism.world_size):
            at = self.parallelism.coordinates(rank).data
            own = {name: parts[at] for name, parts in kwargs.items()}
            futures.append(self._call(rank, method_name, {**own, **common_kwargs}))
        return SimpleNamespace(futures=futures)

    def _call(self, rank: int, method: str, arguments: dict[str, Any]) -> Future:
        self.calls.append((rank, method, arguments))
        outcome = self.behaviour(rank, arguments)
        ready = isinstance(outcome, (Exception, Answer)) or outcome is SILENCE
        return Future(rank, outcome if ready else Answer(outcome))
