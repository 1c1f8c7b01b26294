"""Calls of the engine that have given way: which there are, and how many there may be.

Each holds its operation's datums, and a copy of its adapter's gradients beside the adapter.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from tinsmith_trainer.oplog.model_queue import Entry
from tinsmith_trainer.oplog.model_queues import Ready
from tinsmith_trainer.training.executor import TrainingCall
from tinsmith_trainer.training.fair_shares import Contender

MOST_CALLS = 8
"""In all, but that each tenant may have one: none waits for the end of another's operation. So many can share a
forward."""


@dataclass(slots=True)
class CallInProgress:
    """`seconds`: what its microbatches have taken so far."""

    contender: Contender
    entry: Entry
    training: TrainingCall
    seconds: float = 0.0


class CallsInProgress:
    """One for each model at most, since a model's operations are in order. Of the engine's thread."""

    def __init__(self) -> None:
        self._calls: dict[str, CallInProgress] = {}

    def __contains__(self, model_id: object) -> bool:
        return model_id in self._calls

    def take(self, model_id: str) -> CallInProgress | None:
        """To go on with it. Whoever does not give it back has dropped it."""
        return self._calls.pop(model_id, None)

    def find(self, model_id: str) -> CallInProgress | None:
        """To compute some of it beside another's."""
        return self._calls.get(model_id)

    def has_room(self) -> bool:
        """For one more, whosever it is, beside the one that has been taken."""
        return len(self._calls) + 1 < MOST_CALLS

    def give_back(self, call: CallInProgress) -> None:
        self._calls[call.contender.model_id] = call

    def drop_all(self) -> None:
        """What they were at has not begun then; the journal has it."""
        self._calls.clear()

    def keep_only(self, model_ids: Container[str]) -> None:
        """Models that are not to go on, as one that was quarantined, keep no memory."""
        for model_id in [model_id for model_id in self._calls if model_id not in model_ids]:
            del self._calls[model_id]

    def has_others_than(self, model_id: str) -> bool:
        return any(other != model_id for other in self._calls)

    def contenders(self, ready: Sequence[Ready]) -> list[Contender]:
        """Those that may have a turn now; at least one of at least one."""
        found = [(Contender(queue.tenant, queue.model_id), entry.operation) for queue, _, entry in ready]
        return [who for who, operation in found if not operation.is_forward_backward or self._may_run(who)]

    def _may_run(self, contender: Contender) -> bool:
        """Whether its call goes on, or there is room for one more."""
        if contender.model_id in self._calls or len(self._calls) < MOST_CALLS:
            return True
        return all(call.contender.share != contender.share for call in self._calls.values())
