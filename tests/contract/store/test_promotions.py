"""Names that stand for saved samplers: each change counts once, whichever replica makes it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from support.server.store_records import NOW, later
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import AuditEntry, Promotion

PATHS = [f"tinker://session-1:train:0/sampler_weights/{number}" for number in range(5)]
FIRST = Promotion("ada", "prod", 1, PATHS[0], NOW)
KEPT = 3


def after(promotion: Promotion, path: str) -> Promotion:
    number = promotion.number + 1
    return replace(promotion, number=number, tinker_path=path, at=later(number), before=promotion.number)


async def test_the_last_one_counts_and_the_newest_are_kept(store: Store) -> None:
    assert await store.promotion("ada", "prod") is None
    made = [FIRST]
    for path in PATHS[1:]:
        made.append(after(made[-1], path))
    for promotion in made:
        assert await store.add_promotion(promotion, KEPT)
    assert await store.promotion("ada", "prod") == made[-1]
    assert await store.promotions_of("ada", "prod") == made[:1:-1]


async def test_names_are_of_a_tenant_and_are_found_by_what_they_stand_for_now(store: Store) -> None:
    others = replace(FIRST, tenant="bob")
    for promotion in (FIRST, replace(FIRST, name="beta"), others):
        await store.add_promotion(promotion, KEPT)
    assert await store.names_promoted_to("ada", PATHS[0]) == ["beta", "prod"]
    moved = after(FIRST, PATHS[1])
    await store.add_promotion(moved, KEPT)
    assert await store.names_promoted_to("ada", PATHS[0]) == ["beta"]
    assert await store.list_promotions("ada") == [replace(FIRST, name="beta"), moved]
    assert await store.list_promotions("bob") == [others]


async def test_of_replicas_that_change_a_name_at_once_one_is_first(replicas: tuple[Store, Store]) -> None:
    await replicas[0].add_promotion(FIRST, KEPT)
    rivals = [after(FIRST, path) for path in PATHS[1:]]
    done = await asyncio.gather(*(replicas[turn % 2].add_promotion(each, KEPT) for turn, each in enumerate(rivals)))
    assert sorted(done) == [False, False, False, True]
    assert await replicas[0].promotion("ada", "prod") == rivals[done.index(True)]


async def test_a_change_of_a_name_that_was_removed_meanwhile_is_none(store: Store) -> None:
    await store.add_promotion(FIRST, KEPT)
    assert await store.remove_promotions("ada", "prod")
    assert not await store.add_promotion(after(FIRST, PATHS[1]), KEPT)
    assert not await store.remove_promotions("ada", "prod")
    assert await store.promotion("ada", "prod") is None


async def test_an_entry_is_written_with_a_change_and_only_then(store: Store) -> None:
    entry = AuditEntry("ada", NOW, "checkpoint_promoted", "session-1:train:0", PATHS[0])
    await store.add_promotion(FIRST, KEPT, (entry,))
    await store.add_promotion(FIRST, KEPT, (entry,))
    await store.remove_promotions("ada", "prod", (replace(entry, event="checkpoint_demoted"),))
    await store.remove_promotions("ada", "prod", (replace(entry, event="checkpoint_demoted"),))
    day = timedelta(days=1)
    noted = await store.list_audit("ada", NOW - day, NOW + day, None, 10)
    assert [one.event for one in noted] == ["checkpoint_promoted", "checkpoint_demoted"]
