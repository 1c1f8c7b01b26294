"""The tenants that share a step, and the rows that one tenant gives to another. Pure.

Rows of several tenants in one forward are cheaper than separate forwards, but the rows of a large tenant make the
forward slow for a small one. So a tenant's rows are added while that costs no tenant more than alternating would, and
tenants have equal numbers of rows while any waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

Lead = Callable[[str, str], float]
"""A function that returns how much more the first tenant has used than the second."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """The cost of a forward in tokens.

    It is a fixed part, a part for each position whose keys it reads, and one for each computed row or position.
    Measured on CPUs at 3 M to 118 M parameters, a step of 32 short rows takes five to seven times as long as one of a
    single row. GPUs compute hundreds of rows in the time of one. That is for the weights; a byte of keys costs as much.
    """

    fixed_tokens: float
    per_position: float = 0.0

    @classmethod
    def on(cls, device_type: str, key_bytes_per_weight_byte: float = 0.0) -> ForwardCost:
        """Return the costs on a device.

        `key_bytes_per_weight_byte`: keys and values of one position, as a part of the weights.
        """
        fixed = 5.0 if device_type == "cpu" else 256.0
        return cls(fixed, fixed * key_bytes_per_weight_byte)

    def of(self, tokens: int, positions_read: int = 0) -> float:
        return self.fixed_tokens + self.per_position * positions_read + tokens


def co_batched_tenants(rows: Mapping[str, int], tenant: str, cost: Callable[[int], float]) -> frozenset[str]:
    """Return the tenants whose rows are computed in this tenant's step, including itself.

    `rows` are those of each tenant in the batch, `cost` is that of a step of so many rows. With k tenants the step
    costs at most k times what it would cost this tenant alone, which is the time of waiting for the others' turns.
    """
    chosen, together = {tenant}, rows[tenant]
    for other in sorted(set(rows) - chosen, key=lambda other: (rows[other], other)):
        if cost(together + rows[other]) > (len(chosen) + 1) * cost(rows[tenant]):
            break
        chosen.add(other)
        together += rows[other]
    return frozenset(chosen)


def next_for_a_row(waiting: Iterable[str], rows: Mapping[str, int]) -> list[str]:
    """Return the waiting tenants, those with the fewest rows first. `waiting` is in the order of their turns."""
    return sorted(waiting, key=lambda tenant: rows.get(tenant, 0))


def gives_up_a_row(rows: Mapping[str, int], wanting: str, lead: Lead, credit: float) -> str | None:
    """Return the tenant that gives a row of a full batch to one that waits, or None.

    It has two rows more than the other; or, if there are more tenants than rows, it has used more by `credit`. So a
    waiting tenant gets a row in a bounded number of steps, and no row changes its tenant in each step.
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
    """A batch in use: the memory of its keys and values, the filled part of it, and the tenants of its rows."""

    nbytes: int
    filled_bytes: int
    tenants: Collection[str]


def give_up_memory(
    held: Sequence[HeldMemory], needed_bytes: int, room_to_park: int, wanting: str, lead: Lead, credit: float
) -> list[int]:
    """Return the indices in `held` of the batches that leave to free `needed_bytes`; none if that is impossible.

    This is for a tenant without any batch. Batches leave whose tenants have all used more by `credit`, the largest
    first, and their filled part must fit where it is kept meanwhile.
    """
    ahead = [
        index
        for index, batch in enumerate(held)
        if wanting not in batch.tenants and all(lead(tenant, wanting) >= credit for tenant in batch.tenants)
    ]
    leaving: list[int] = []
    for index in sorted(ahead, key=lambda index: held[index].nbytes, reverse=True):
        leaving.append(index)
        needed_bytes -= held[index].nbytes
        room_to_park -= held[index].filled_bytes
        if needed_bytes <= 0 or len(leaving) == len(held):
            return leaving if room_to_park >= 0 else []
    return []
