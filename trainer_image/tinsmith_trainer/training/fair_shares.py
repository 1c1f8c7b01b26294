"""Fair shares: tenants share the engine by their weights, and a tenant's models share the tenant's part equally.

The functions are pure.

Shares are counted in tokens. The method is deficit round robin with turns of one microbatch: the next turn goes to the
waiting tenant with the fewest tokens. So a waiting tenant falls behind another tenant by at most one turn, and a new
tenant waits only for the current turn. If a tenant uses tokens while no other tenant waits, these tokens are not
charged later. An idle tenant saves up only a small head start. A tenant with the weight 2 is charged for half of its
tokens, and so gets twice as many as a tenant with the weight 1, which is the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")

HEAD_START_TOKENS = 1280
"""The head start of a new tenant: a full microbatch and the optimizer step after this microbatch.

Without the head start, another tenant's turn could come between a gradient and the optimizer step.
"""

LEAST_TOKENS = 16
"""The cost of the smallest turn: a row of the shortest padded length. With a minimum cost, no turn is free."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A model with an operation to run. A model with an unknown tenant (empty) has a separate share."""

    tenant: str
    model_id: str

    @property
    def share(self) -> tuple[str, str]:
        """The key of the fair share that pays for the model's turns."""
        return (self.tenant, "") if self.tenant else ("", self.model_id)


@dataclass(slots=True)
class Shares(Generic[Key]):
    """Equal shares for all keys that wait for a turn."""

    _had: dict[Key, int] = field(default_factory=dict)  # tokens, counted from the same moment for all keys
    _since: dict[Key, int] = field(default_factory=dict)
    _waiting: frozenset[Key] = frozenset()
    _turn: int = 0
    _latest: Key | None = None  # the key with the latest turn

    def next(self, waiting: Iterable[Key]) -> Key:
        """Return the key that has the next turn. At least one key must wait.

        If tokens are equal, the key that has waited longest is next.
        """
        in_order = list(dict.fromkeys(waiting))
        self.admit(frozenset(in_order))
        chosen = min(in_order, key=lambda key: (self._had[key], self._since[key]))
        self._turn, self._latest = self._turn + 1, chosen
        self._since[chosen] = 2 * self._turn + 1  # a key that arrives during this turn has waited for a shorter time
        return chosen

    def charge(self, key: Key, tokens: int) -> None:
        """Charge the key for the tokens of a turn."""
        self._had[key] += tokens

    def knows(self, key: Key) -> bool:
        return key in self._had

    def had(self, key: Key) -> int:
        """Return the tokens of a key so far, for a comparison with other waiting keys."""
        return self._had[key]

    def admit(self, now: frozenset[Key]) -> None:
        """Set the keys that wait now. Repeated calls with the same keys change nothing."""
        stayed = now & self._waiting
        if not stayed:  # only the key with the latest turn waited before
            self._had, self._since = {}, {}
        least = min((self._had[key] for key in stayed), default=0)
        # A stream of new keys, each of which leaves after its turn, must not displace the keys that stay.
        start = least - HEAD_START_TOKENS if self._latest in stayed else least
        for key in now - stayed:
            self._had[key] = max(self._had.get(key, start), start)
            self._since[key] = 2 * self._turn
        for key in [key for key, had in self._had.items() if key not in now and had <= start]:
            del self._had[key], self._since[key]
        self._waiting = now


class FairShares:
    """Turns of tenants, and of models within each tenant.

    The forward in one model's turn may also compute microbatches of other models. Each model is charged for the model's
    own tokens.
    """

    def __init__(self) -> None:
        self._tenants = Shares[tuple[str, str]]()
        self._models: dict[tuple[str, str], Shares[str]] = {}
        # Only weights other than 1.
        self._weights: dict[str, float] = {}

    def weigh(self, tenant: str, weight: float) -> None:
        """Set the weight of a tenant's share. Another thread may call this method."""
        if weight == 1.0:
            self._weights.pop(tenant, None)
        else:
            self._weights[tenant] = weight

    def next(self, contenders: Sequence[Contender]) -> Contender:
        """Return the contender that has the next turn. At least one contender must be given."""
        chosen = self._tenants.next(contender.share for contender in contenders)
        self._models = {known: models for known, models in self._models.items() if self._tenants.knows(known)}
        waiting: dict[tuple[str, str], dict[str, Contender]] = {}
        for contender in contenders:
            waiting.setdefault(contender.share, {})[contender.model_id] = contender
        for share, models in waiting.items():
            self._models.setdefault(share, Shares()).admit(frozenset(models))
        return waiting[chosen][self._models[chosen].next(waiting[chosen])]

    def cobatch_candidates(self, chosen: Contender, contenders: Iterable[Contender]) -> list[Contender]:
        """Return the contenders that may share the turn's forward with the chosen contender.

        The contenders with the fewest tokens come first.

        A contender that is far ahead of the chosen contender is left out. With a contender that is far ahead, the small
        turns of the chosen model would become as long as the large turns of this contender. Call this after `next` with
        the same contenders.
        """
        others = [one for one in contenders if one != chosen and self._ahead(one, chosen) <= HEAD_START_TOKENS]
        return sorted(others, key=lambda one: self._ahead(one, chosen))

    def _ahead(self, one: Contender, other: Contender) -> int:
        """Return the difference in tokens between the two tenants, or between two models of one tenant."""
        if one.share == other.share:
            models = self._models[one.share]
            return models.had(one.model_id) - models.had(other.model_id)
        return self._tenants.had(one.share) - self._tenants.had(other.share)

    def charge(self, contender: Contender, tokens: int) -> None:
        """Charge the model for the model's tokens in this turn."""
        cost = max(tokens, LEAST_TOKENS)
        self._tenants.charge(contender.share, max(1, round(cost / self._weights.get(contender.tenant, 1.0))))
        self._models[contender.share].charge(contender.model_id, cost)


@dataclass(slots=True)
class Pace:
    """The average speed of microbatches, which converts seconds to tokens.

    A step, a save or a load costs as many tokens as microbatches could compute in the same time. The time of a step, a
    save or a load depends on ranks, disks and object stores, so a fixed price would be wrong for most systems.
    """

    tokens: int = 0
    seconds: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def worth(self, seconds: float) -> int:
        """Return the number of tokens that microbatches compute in this many seconds.

        Before the first microbatch, return 0.
        """
        return round(max(seconds, 0.0) * self.tokens / self.seconds) if self.seconds else 0
