"""How long results are kept, and whose make room where those of all do not fit, decided purely.

The tenant with most gives first, so that large results of one drop none of another who has kept to a fair part. A
result that is younger than a client may need to ask for it again goes only where the disk itself is short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tinsmith_trainer.oplog.journal_tables import StoredModel


@dataclass(frozen=True, slots=True)
class Retention:
    """How long results can be read: `seconds`, if those of all models fit into `result_bytes`. Where they do not, the
    oldest of the tenant with most go first, and none that finished less than `least_seconds` ago, unless the disk
    `is_short`.

    Of each tenant the newest `closed_models` that were released, or could not be created, have that time; of others
    what finished `least_seconds` ago goes.

    Below its snapshot a model keeps the rows of its newest `operations`, and all that finished less than
    `least_seconds` ago; of the others only their numbers, whatever their age.
    """

    seconds: float
    result_bytes: int
    operations: int
    least_seconds: float
    closed_models: int
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """An operation that has a result and is never run again."""

    seq_id: int
    finished_at: float
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Horizons:
    """Times in Unix seconds: what finished at or before is past its time, or may go to make room."""

    expired: float
    crowded_out: float

    def is_spent(self, operation: Finished, newest_beyond: int) -> bool:
        """Tell whether its result may go. `newest_beyond`: the highest number below those of the newest operations."""
        if operation.seq_id <= newest_beyond and operation.finished_at <= self.crowded_out:
            return True
        return operation.finished_at <= self.expired


@dataclass(frozen=True, slots=True)
class KeptResult:
    """A result as a round finds it: its row, whose model's it is, when it finished (Unix seconds), and its bytes."""

    row: int
    model_id: str
    finished_at: float
    size_bytes: int


def surplus_models(models: Sequence[StoredModel], most: int) -> set[str]:
    """Return each owner's oldest released models, beyond so many. `models` are in the order of their creation."""
    released = Counter[str]()
    surplus = set()
    for model in reversed(models):
        if model.phase == "released":
            owner = model.tenant or ""
            released[owner] += 1
            if released[owner] > most:
                surplus.add(model.model_id)
    return surplus


def excess_bytes(bytes_of_owners: Mapping[str, int], budget_bytes: int) -> dict[str, int]:
    """Return how much each owner has beyond the level at which all together fit; those below it have none."""
    level = _level(sorted(bytes_of_owners.values()), budget_bytes)
    return {owner: size - level for owner, size in bytes_of_owners.items() if size > level}


def _level(sizes: list[int], budget_bytes: int) -> int:
    """Return the highest size that every owner may have. `sizes` are in ascending order."""
    left = budget_bytes
    for index, size in enumerate(sizes):
        share = left // (len(sizes) - index)
        if size > share:
            return max(share, 0)
        left -= size
    return sizes[-1] if sizes else 0


def crowded_out(
    oldest_first: Iterable[KeptResult],
    excess: dict[str, int],
    owners: Mapping[str, str],
    not_after: float,
) -> Iterator[KeptResult]:
    """Yield each owner's oldest results until its excess, which is reduced by them, is gone.

    `owners`: by model. Results that finished after `not_after` stay.
    """
    for result in oldest_first:
        owner = owners.get(result.model_id, result.model_id)
        if excess.get(owner, 0) > 0 and result.finished_at <= not_after:
            excess[owner] -= result.size_bytes
            yield result
