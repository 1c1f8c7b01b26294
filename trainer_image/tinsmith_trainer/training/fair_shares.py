"""Whose turn it is: tenants share the engine, and a tenant's models share its part. Pure.

Parts are of tokens. It is deficit round robin with turns of one microbatch, the deficit kept as what each has had: of
those who wait, the one who has had least goes first. So nobody who waits falls behind another by more than that one's
latest turn, and a newcomer waits for the turn that runs. What somebody uses while nobody else waits is not held against
him, and who asks for nothing saves nothing up but a small start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")

HEAD_START_TOKENS = 1280
"""A full microbatch and the step behind it. So much ahead does a newcomer come in: what belongs together, as a gradient
and its step, is not torn apart by another's turn."""

LEAST_TOKENS = 16
"""What the smallest turn costs, so that nothing is free: a row of the shortest padded length."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A model that has something to run. Where its tenant is not known (empty), it is one by itself."""

    tenant: str
    model_id: str

    @property
    def share(self) -> tuple[str, str]:
        """Whose part of the engine its turns come out of."""
        return (self.tenant, "") if self.tenant else ("", self.model_id)


@dataclass(slots=True)
class Shares(Generic[Key]):
    """Equal parts for those who wait."""

    _had: dict[Key, int] = field(default_factory=dict)  # in tokens, since a moment that is the same for all
    _since: dict[Key, int] = field(default_factory=dict)
    _waiting: frozenset[Key] = frozenset()
    _turn: int = 0
    _latest: Key | None = None  # who had the latest turn

    def next(self, waiting: Iterable[Key]) -> Key:
        """Of those who wait now, at least one. Among equals it is who has waited for longest."""
        in_order = list(dict.fromkeys(waiting))
        self.admit(frozenset(in_order))
        chosen = min(in_order, key=lambda key: (self._had[key], self._since[key]))
        self._turn, self._latest = self._turn + 1, chosen
        self._since[chosen] = 2 * self._turn + 1  # whoever comes during this turn waits for longer
        return chosen

    def charge(self, key: Key, tokens: int) -> None:
        """For the turn that it has had."""
        self._had[key] += tokens

    def knows(self, key: Key) -> bool:
        return key in self._had

    def had(self, key: Key) -> int:
        """In tokens, to compare it with others of those who wait."""
        return self._had[key]

    def admit(self, now: frozenset[Key]) -> None:
        """Those who wait now. Again for the same: nothing changes."""
        stayed = now & self._waiting
        if not stayed:  # whoever had the last turn had it while nobody else waited
            self._had, self._since = {}, {}
        least = min((self._had[key] for key in stayed), default=0)
        # A stream of newcomers, each of whom leaves after its turn, must not keep those who stay from theirs.
        start = least - HEAD_START_TOKENS if self._latest in stayed else least
        for key in now - stayed:
            self._had[key] = max(self._had.get(key, start), start)
            self._since[key] = 2 * self._turn
        for key in [key for key, had in self._had.items() if key not in now and had <= start]:
            del self._had[key], self._since[key]
        self._waiting = now


class FairShares:
    """Tenants in turn, and within each its models. In a turn of one others may be computed beside it: each is charged
    for its own.
    """

    def __init__(self) -> None:
        self._tenants = Shares[tuple[str, str]]()
        self._models: dict[tuple[str, str], Shares[str]] = {}

    def next(self, contenders: Sequence[Contender]) -> Contender:
        """Of at least one."""
        chosen = self._tenants.next(contender.share for contender in contenders)
        self._models = {known: models for known, models in self._models.items() if self._tenants.knows(known)}
        waiting: dict[tuple[str, str], dict[str, Contender]] = {}
        for contender in contenders:
            waiting.setdefault(contender.share, {})[contender.model_id] = contender
        for share, models in waiting.items():
            self._models.setdefault(share, Shares()).admit(frozenset(models))
        return waiting[chosen][self._models[chosen].next(waiting[chosen])]

    def cobatch_candidates(self, chosen: Contender, contenders: Iterable[Contender]) -> list[Contender]:
        """Of those of the latest `next`, whoever has had least first: others than the chosen one, and none that is far
        ahead of it. Small turns of one would be as long as large ones of another that comes along each time.
        """
        others = [one for one in contenders if one != chosen and self._ahead(one, chosen) <= HEAD_START_TOKENS]
        return sorted(others, key=lambda one: self._ahead(one, chosen))

    def _ahead(self, one: Contender, other: Contender) -> int:
        """In tokens that it has had, of its tenant's or of the model's own."""
        if one.share == other.share:
            models = self._models[one.share]
            return models.had(one.model_id) - models.had(other.model_id)
        return self._tenants.had(one.share) - self._tenants.had(other.share)

    def charge(self, contender: Contender, tokens: int) -> None:
        """For what it has had in this turn."""
        cost = max(tokens, LEAST_TOKENS)
        self._tenants.charge(contender.share, cost)
        self._models[contender.share].charge(contender.model_id, cost)


@dataclass(slots=True)
class Pace:
    """Of all microbatches so far. By it a step, a save or a load costs as many tokens as could have been computed
    meanwhile: their time depends on ranks, disks and object stores, and a fixed price would be wrong for most."""

    tokens: int = 0
    seconds: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def worth(self, seconds: float) -> int:
        """In tokens. Before the first microbatch nothing is known, and nothing is asked for it."""
        return round(max(seconds, 0.0) * self.tokens / self.seconds) if self.seconds else 0
