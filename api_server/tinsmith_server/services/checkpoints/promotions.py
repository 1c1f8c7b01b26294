"""Stable names for a tenant's saved samplers.

The checkpoint of a name changes atomically, and the change can be rolled back.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum
from typing import Literal

from tinsmith_server.errors import NotFound, Unprocessable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.accounts.callers import signed
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.store.records import (
    AuditEntry,
    Checkpoint,
    Clock,
    PromotedPath,
    Promotion,
    PromotionBounds,
    utc_now,
)
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import parse_tinker_path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAMES_PER_TENANT = 100
KEPT_PER_NAME = 20
Event = Literal["checkpoint_promoted", "checkpoint_demoted"]


class Expected(Enum):
    """The path to which a name must point now, or None for a new name."""

    ANYTHING = "the name's present path"


class Promotions:
    """The promoted names of tenants. A name points to a checkpoint of its own tenant, and the checkpoint has no expiry.

    Each request reads the store, so all servers answer with the current value.
    """

    def __init__(self, store: Store, fleet: Fleet, lookup: CheckpointLookup, clock: Clock = utc_now) -> None:
        self._store = store
        self._fleet = fleet
        self._lookup = lookup
        self._clock = clock

    async def promote(
        self, tenant: str, name: str, path: str, expected: str | Expected | None = Expected.ANYTHING
    ) -> Promotion:
        """Make the name point to `path`. If the name already points to `path`, nothing changes.

        `expected` is the path to which the name must point now, or None for a new name. So a repeated promotion gets
        the same answer, and a rollback always leads to a different path.

        Raises Unprocessable for an invalid name, for a checkpoint that expires or has the wrong kind, for too many
        names, and if the name does not point to `expected`. Raises NotFound for a checkpoint that the tenant does not
        have.
        """
        self._check_name(name)

        async def attempt() -> Promotion | None:
            checkpoint = await self._lasting(tenant, path)
            current = await self._store.promotion(tenant, name)
            if current is not None and current.tinker_path == path:
                return current
            _check_expected(name, current, expected)
            if current is None:
                await self._check_number(tenant)
            return await self._add(_after(current, tenant, name, path, self._clock()), current, checkpoint)

        return await _until_first(attempt)

    async def roll_back(self, tenant: str, name: str, expected_number: int | None = None) -> Promotion:
        """Make the name point to its previous path. A second rollback leads to the path before the previous path.

        Raises NotFound and Unprocessable. `expected_number` is the number of the change to undo. If this change is
        already undone, nothing changes, so a repeated request gets the same answer.
        """

        async def attempt() -> Promotion | None:
            current, *kept = await self._history(tenant, name)
            if expected_number is not None and current.number != expected_number:
                if current.is_rollback and current.number == expected_number + 1:
                    return current
                raise Unprocessable(
                    f"the last change of {name} is number {current.number} now, not {expected_number}: the name "
                    f"refers to {current.tinker_path}"
                )
            if current.before is None:
                raise Unprocessable(
                    f"{name} had no path before {current.tinker_path}: promote another checkpoint instead"
                )
            target = next((one for one in kept if one.number == current.before), None)
            if target is None:
                raise Unprocessable(
                    f"the path of {name} before {current.tinker_path} is no longer kept: promote it instead"
                )
            try:
                checkpoint = await self._lasting(tenant, target.tinker_path)
            except (NotFound, Unprocessable) as error:
                raise Unprocessable(f"{name} cannot be rolled back: {error}; promote another checkpoint") from error
            number = current.number + 1
            made = replace(target, number=number, at=self._clock(), is_rollback=True)
            return await self._add(made, current, checkpoint)

        return await _until_first(attempt)

    async def list(self, tenant: str) -> Sequence[Promotion]:
        """Return the current path of each promoted name."""
        return await self._store.list_promotions(tenant)

    async def history(self, tenant: str, name: str) -> Sequence[Promotion]:
        """Return the changes of a name, newest first. Raises NotFound."""
        return await self._history(tenant, name)

    async def remove(self, tenant: str, name: str) -> None:
        """Remove the name. The checkpoint is kept. Raises NotFound."""
        (current, *_) = await self._history(tenant, name)
        await self._store.remove_promotions(tenant, name, (_entry(current, "checkpoint_demoted", self._clock()),))

    async def path_of(self, tenant: str, name: str) -> str | None:
        """Return the path to which the name points, or None if the tenant has no such name."""
        if NAME.fullmatch(name) is None:
            return None
        current = await self._store.promotion(tenant, name)
        return None if current is None else current.tinker_path

    async def _history(self, tenant: str, name: str) -> Sequence[Promotion]:
        found = await self._store.promotions_of(tenant, name) if NAME.fullmatch(name) else ()
        if not found:
            raise NotFound(f"you have no promoted name {name[:80]}")
        return found

    async def _add(self, promotion: Promotion, previous: Promotion | None, checkpoint: Checkpoint) -> Promotion | None:
        """Store the promotion.

        Returns None if the name has changed in between, if the limit is reached, or if the checkpoint now has an
        expiry.
        """
        most = PromotionBounds(NAMES_PER_TENANT, KEPT_PER_NAME)
        extra_rows = (_entry(promotion, "checkpoint_promoted", promotion.at, checkpoint_type=checkpoint.type),)
        return promotion if await self._store.add_promotion(promotion, previous, checkpoint, most, extra_rows) else None

    async def _lasting(self, tenant: str, path: str) -> Checkpoint:
        try:
            checkpoint = await self._lookup.readable(tenant, path, "sampler")
        except CheckpointRefused as error:
            raise NotFound(str(error)) from error
        if checkpoint.tenant != tenant:
            raise Unprocessable(f"{path} belongs to another tenant, who may delete it: promote a copy")
        if checkpoint.expires_at is not None:
            raise Unprocessable(
                f"{path} ends at {checkpoint.expires_at:%Y-%m-%d %H:%M} UTC, and a promoted checkpoint must not "
                f"expire: remove its expiry first (`tinker checkpoint set-ttl {path} --remove`)"
            )
        return checkpoint

    def _check_name(self, name: str) -> None:
        if NAME.fullmatch(name) is None:
            raise Unprocessable(
                f"{name[:80]!r} is not a valid name: use 1 to 64 ASCII letters, digits, dots, underscores and "
                "hyphens, starting with a letter or digit"
            )
        if self._fleet.model(name) is not None:
            raise Unprocessable(f"{name} is the name of a base model: choose another name")

    async def _check_number(self, tenant: str) -> None:
        if len(await self._store.list_promotions(tenant)) >= NAMES_PER_TENANT:
            raise Unprocessable(f"you have {NAMES_PER_TENANT} names, which is the limit: remove one first")


async def refuse_to_end(store: Store, path: PromotedPath) -> None:
    """Raise Unprocessable if a name points to the path, because users of the name would lose their model."""
    if names := await store.names_promoted_to(path.tenant, path.tinker_path):
        raise Unprocessable(
            f"{', '.join(names)} refers to {path.tinker_path}: promote another checkpoint, roll back, or remove the "
            "name first"
        )


async def _until_first(attempt: Callable[[], Awaitable[Promotion | None]]) -> Promotion:
    """Repeat the attempt until no other request changes the name or the checkpoint at the same time."""
    while (made := await attempt()) is None:
        pass
    return made


def _check_expected(name: str, current: Promotion | None, expected: str | Expected | None) -> None:
    stands = None if current is None else current.tinker_path
    if expected is not Expected.ANYTHING and expected != stands:
        raise Unprocessable(f"{name} now refers to {stands or 'nothing'}, not to {expected or 'nothing'}")


def _after(current: Promotion | None, tenant: str, name: str, path: str, at: datetime) -> Promotion:
    before = None if current is None else current.number
    return Promotion(tenant, name, (before or 0) + 1, path, at, before)


def _entry(promotion: Promotion, event: Event, at: datetime, **details: str) -> AuditEntry:
    entry_details = {
        "tenant": promotion.tenant,
        "name": promotion.name,
        "is_rollback": promotion.is_rollback,
        **details,
    }
    run_id = parse_tinker_path(promotion.tinker_path).run_id
    return AuditEntry(promotion.tenant, at, event, run_id, promotion.tinker_path, signed(entry_details))
