"""Usage and audit log: added up by several replicas, noted only with the change."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from support.server.store_records import NOW, a_checkpoint, later
from tinsmith_server.store.records import AuditEntry, Usage
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

HOUR = datetime(2026, 3, 1, 12, tzinfo=UTC)
RUN = "session-1:train:0"
MODEL = "Qwen/Qwen3-0.6B"
MOST = 1000
SOON, LONG = timedelta(minutes=5), timedelta(days=1)
TRAINED = Usage("ada", "session-1", MODEL, HOUR, "training", 100)
SAVED = AuditEntry("ada", NOW, "checkpoint_saved", RUN, f"tinker://{RUN}/weights/first", {"type": "training"})


async def used(store: Store, tenant: str = "ada") -> list[Usage]:
    return list(await store.usage_between(tenant, HOUR - LONG, HOUR + LONG, MOST))


async def noted(store: Store, tenant: str = "ada") -> list[AuditEntry]:
    return list(await store.list_audit(tenant, NOW - LONG, NOW + LONG, None, MOST))


async def test_replicas_add_to_the_same_rows_and_lose_nothing(replicas: tuple[Store, Store]) -> None:
    others = [replace(TRAINED, session_id=f"session-{number}") for number in range(20)]

    await asyncio.gather(*(replicas[turn % 2].add_usage(others if turn % 3 else others[::-1]) for turn in range(10)))

    found = await used(replicas[0])
    assert {one.session_id: one.amount for one in found} == {one.session_id: 1000 for one in others}


async def test_usage_comes_by_the_hour_the_largest_first_and_of_the_tenant_and_window_alone(store: Store) -> None:
    small = replace(TRAINED, kind="sample", amount=3)
    late = replace(TRAINED, hour=HOUR + timedelta(hours=1), amount=2**50)
    await store.add_usage([late, small, TRAINED, replace(TRAINED, tenant="bob")])

    assert await used(store) == [TRAINED, small, late]
    assert await store.usage_between("ada", HOUR, late.hour, MOST) == [TRAINED, small]
    assert await store.usage_between("ada", HOUR, late.hour, 1) == [TRAINED]
    assert await used(store, "bob") == [replace(TRAINED, tenant="bob")]


async def test_storage_is_counted_for_the_time_since_the_last_round_hour_by_hour(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint("kept", size_bytes=1000))
    await store.put_checkpoint(a_checkpoint("sampled", type="sampler", size_bytes=24))
    await store.put_checkpoint(a_checkpoint("unnamed", type="ephemeral", size_bytes=10**6))
    await store.put_checkpoint(a_checkpoint("over", size_bytes=10**6, expires_at=NOW))
    await store.add_storage_usage(HOUR, SOON, LONG)

    for minutes in (1, 4, 50, 90, 90):
        await store.add_storage_usage(HOUR + timedelta(minutes=minutes), SOON, LONG)

    assert [(one.session_id, one.base_model, one.hour, one.kind, one.amount) for one in await used(store)] == [
        ("", MODEL, HOUR, "storage", 1024 * 3600),
        ("", MODEL, HOUR + timedelta(hours=1), "storage", 1024 * 1800),
    ]


async def test_replicas_that_count_storage_at_once_count_it_once(replicas: tuple[Store, Store]) -> None:
    await replicas[0].put_checkpoint(a_checkpoint("kept", size_bytes=1000))
    await replicas[0].add_storage_usage(HOUR, SOON, LONG)
    end = HOUR + timedelta(minutes=30)

    await asyncio.gather(*(one.add_storage_usage(end, SOON, LONG) for one in replicas * 3))

    assert [one.amount for one in await used(replicas[0])] == [1000 * 1800]


async def test_storage_is_counted_only_for_the_requested_part_of_a_long_absence(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint("kept", size_bytes=1))
    await store.add_storage_usage(HOUR - timedelta(days=30), SOON, LONG)
    await store.add_storage_usage(HOUR, SOON, timedelta(hours=2))

    assert sum(one.amount for one in await used(store)) == 7200


async def test_records_of_a_save_are_written_once_even_if_its_event_is_replayed(store: Store) -> None:
    first, newer = a_checkpoint(event_id=5), a_checkpoint(event_id=6)
    counted = replace(TRAINED, kind="checkpoint", amount=1)
    for checkpoint in (first, first, newer, first, newer):
        await store.put_checkpoint(checkpoint, (counted, SAVED))

    assert await used(store) == [replace(counted, amount=2)]
    assert [one.tinker_path for one in await noted(store)] == [SAVED.tinker_path] * 2


async def test_entries_are_written_together_with_the_change_of_an_existing_checkpoint(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint())
    named = (RUN, "training", "first")
    for event in ("gone", "first"):
        entry = replace(SAVED, event=event)
        which = (RUN, "training", event)
        await store.set_checkpoint_public(*which, True, (entry,))  # type: ignore[arg-type]
        await store.set_checkpoint_expiry(*which, later(60), (entry,))  # type: ignore[arg-type]
        await store.delete_checkpoint(*which, NOW, (entry,))  # type: ignore[arg-type]
    await store.delete_checkpoint(*named, NOW, (SAVED,))  # type: ignore[arg-type]

    assert [(one.event, one.details) for one in await noted(store)] == [("first", {"type": "training"})] * 3


async def test_entries_are_read_page_by_page_oldest_first_and_each_tenants_apart(store: Store) -> None:
    times = [later(3), later(1), later(1), later(2)]
    for number, at in enumerate(times):
        entry = replace(SAVED, at=at, event=str(number))
        await store.put_checkpoint(a_checkpoint(f"c{number}"), (entry, replace(entry, tenant="bob")))

    found: list[AuditEntry] = []
    while page := await store.list_audit("ada", later(0), later(3), found[-1] if found else None, 1):
        found += page

    assert [one.event for one in found] == ["1", "2", "3"]
    assert {one.tenant for one in await noted(store, "bob")} == {"bob"}


async def test_older_records_are_deleted(store: Store) -> None:
    old = HOUR - timedelta(hours=3)
    await store.add_usage([TRAINED, replace(TRAINED, hour=old)])
    await store.put_checkpoint(a_checkpoint(), (SAVED, replace(SAVED, at=old, event="old")))

    await store.delete_old_accounts(HOUR)

    assert await used(store) == [TRAINED]
    assert [one.event for one in await noted(store)] == ["checkpoint_saved"]
