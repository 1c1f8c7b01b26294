"""The tenants that share a step, and the rows that a tenant gives to another tenant. The functions are pure.

Rows of several tenants in one forward are cheaper than separate forwards. But a forward with many rows of one tenant is
slow for a tenant with few rows. So a tenant's rows are added to a step only if no tenant waits longer than with
separate turns. While any tenant waits for a row, rows are divided equally among tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

Lead = Callable[[str, str], float]
"""A function that returns how much more the first tenant has used than the second tenant."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """The cost of a forward in tokens.

    The cost has three parts: a fixed part, a part for each position with keys that the forward reads, and a part for
    each computed row or position. On CPUs with 3 M to 118 M parameters, a step of 32 short rows takes five to seven
    times as long as a step of one row. GPUs compute hundreds of rows in the time of one row. The fixed part is the cost
    of reading the weights; reading a byte of keys costs as much as reading a byte of weights.
    """

    fixed_tokens: float
    per_position: float = 0.0

    @classmethod
    def on(cls, device_type: str, key_bytes_per_weight_byte: float = 0.0) -> ForwardCost:
        """Return the cost of forwards on a device.

        `key_bytes_per_weight_byte` is the size of one position's keys and values, divided by the size of the weights.
        """
        fixed = 5.0 if device_type == "cpu" else 256.0
        return cls(fixed, fixed * key_bytes_per_weight_byte)

    def of(self, tokens: int, positions_read: int = 0) -> float:
        return self.fixed_tokens + self.per_position * positions_read + tokens


def co_batched_tenants(rows: Mapping[str, int], tenant: str, cost: Callable[[int], float]) -> frozenset[str]:
    """Return all tenants that share the step of this tenant, including this tenant.

    `rows` is the number of rows of each tenant in the batch. `cost` returns the cost of a step from the number of rows.
    A step of k tenants costs at most k times as much as a step for this tenant alone, so no tenant waits longer than
    with separate turns.
    """
    chosen, together = {tenant}, rows[tenant]
    for other in sorted(set(rows) - chosen, key=lambda other: (rows[other], other)):
        if cost(together + rows[other]) > (len(chosen) + 1) * cost(rows[tenant]):
            break
        chosen.add(other)
        together += rows[other]
    return frozenset(chosen)


def next_for_a_row(waiting: Iterable[str], rows: Mapping[str, int]) -> list[str]:
    """Return the waiting tenants.

    Tenants with the fewest rows come first. `waiting` lists the tenants in the order of turns.
    """
    return sorted(waiting, key=lambda tenant: rows.get(tenant, 0))


def gives_up_a_row(rows: Mapping[str, int], wanting: str, lead: Lead, credit: float) -> str | None:
    """Return the tenant that must give a row of a full batch to a waiting tenant, or None.

    The tenant that gives a row has at least two rows more than the waiting tenant. A waiting tenant without rows also
    gets the row of a tenant that has used at least `credit` more. So a waiting tenant gets a row after a bounded number
    of steps, and rows do not change tenants in every step.
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
    """A batch in use: the memory for keys and values, the filled part of this memory, and the tenants of the rows."""

    nbytes: int
    filled_bytes: int
    tenants: Collection[str]


def give_up_memory(
    held: Sequence[HeldMemory], needed_bytes: int, room_to_park: int, wanting: str, lead: Lead, credit: float
) -> list[int]:
    """Return the indices in `held` of the batches that must close to free `needed_bytes`.

    If closing cannot free so many bytes, return no index.

    The waiting tenant has no batch. A batch may be closed if each tenant of the batch has used at least `credit` more
    than the waiting tenant. The largest batches are closed first, and the filled parts of closed batches must fit in
    `room_to_park`.
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
