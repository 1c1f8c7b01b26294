"""Who goes along in a step, and whose rows give way to whom. Pure.

Rows of several tenants in one forward are cheaper than forwards of their own, and a tenant that has many makes the
forward slow for one that has few. So company is welcome while it costs nobody more than taking turns would, and rows
are held in equal numbers while somebody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

Lead = Callable[[str, str], float]
"""By how much the first tenant has had more than the second."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """In tokens: what a forward costs whatever is in it, for each position whose keys it reads, and one for each row or
    position that it computes.

    Measured on CPUs at 3 M to 118 M parameters, a step of 32 short rows takes five to seven times as long as one of a
    single row. GPUs compute hundreds in the time of one. That is for the weights; keys cost as much a byte.
    """

    fixed_tokens: float
    per_position: float = 0.0

    @classmethod
    def on(cls, device_type: str, key_bytes_per_weight_byte: float = 0.0) -> ForwardCost:
        """`key_bytes_per_weight_byte`: keys and values of one position, as a part of the weights."""
        fixed = 5.0 if device_type == "cpu" else 256.0
        return cls(fixed, fixed * key_bytes_per_weight_byte)

    def of(self, tokens: int, positions_read: int = 0) -> float:
        return self.fixed_tokens + self.per_position * positions_read + tokens


def company(rows: Mapping[str, int], tenant: str, cost: Callable[[int], float]) -> frozenset[str]:
    """Whose rows are computed in a step that is `tenant`'s turn, its own among them.

    `rows` are those of each tenant in the batch, `cost` is that of a step of so many. With k tenants the step costs at
    most k times what it would cost the one alone, which is what waiting for the others' turns would take.
    """
    chosen, together = {tenant}, rows[tenant]
    for other in sorted(set(rows) - chosen, key=lambda other: (rows[other], other)):
        if cost(together + rows[other]) > (len(chosen) + 1) * cost(rows[tenant]):
            break
        chosen.add(other)
        together += rows[other]
    return frozenset(chosen)


def next_for_a_row(waiting: Iterable[str], rows: Mapping[str, int]) -> list[str]:
    """Those that have fewest rows of the batch first; `waiting` are in the order of their turns."""
    return sorted(waiting, key=lambda tenant: rows.get(tenant, 0))


def gives_up_a_row(rows: Mapping[str, int], wanting: str, lead: Lead, credit: float) -> str | None:
    """The tenant that gives a row of a full batch to one that waits, or None.

    One with two rows more than the other; and where there are more tenants than rows, one that has had more by
    `credit`. So whoever waits has a row in a bounded number of steps, and none goes back and forth in each.
    """
    held = rows.get(wanting, 0)
    others = [tenant for tenant in rows if tenant != wanting and rows[tenant]]
    if not others:
        return None
    most = max(others, key=lambda tenant: (rows[tenant], lead(tenant, wanting)))
    if rows[most] > held + 1 or (not held and lead(most, wanting) >= credit):
        return most
    return None


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """A batch in use: what its keys and values take, what of that is filled, and whose rows are in it."""

    nbytes: int
    filled_bytes: int
    tenants: Collection[str]


def give_up_memory(
    held: Sequence[HeldMemory], needed_bytes: int, room_to_park: int, wanting: str, lead: Lead, credit: float
) -> list[int]:
    """Places in `held` of the batches that leave so that `needed_bytes` are free; none if that cannot be.

    For a tenant that has nothing in any batch. Those leave whose tenants have all had more by `credit`, the largest
    first, and what is in them must fit where it is kept meanwhile.
    """
    ahead = [
        place
        for place, batch in enumerate(held)
        if wanting not in batch.tenants and all(lead(tenant, wanting) >= credit for tenant in batch.tenants)
    ]
    leaving: list[int] = []
    for place in sorted(ahead, key=lambda place: held[place].nbytes, reverse=True):
        leaving.append(place)
        needed_bytes -= held[place].nbytes
        room_to_park -= held[place].filled_bytes
        if needed_bytes <= 0 or len(leaving) == len(held):
            return leaving if room_to_park >= 0 else []
    return []
