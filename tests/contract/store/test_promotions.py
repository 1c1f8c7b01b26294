"""Names that stand for saved samplers: each change counts once, whichever replica makes it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.server.store_records import NOW, a_checkpoint, later
from tinsmith_server.store.records import AuditEntry, Checkpoint, PromotedPath, Promotion, PromotionBounds
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

PATHS = [f"tinker://session-1:train:0/sampler_weights/{number}" for number in range(5)]
FIRST = Promotion("ada", "prod", 1, PATHS[0], NOW)
BOUNDS = PromotionBounds(names=2, kept_per_name=3)


def checkpoint_of(promotion: Promotion) -> Checkpoint:
    name, tenant = promotion.tinker_path.rpartition("/")[2], promotion.tenant
    return a_checkpoint(name, "sampler", run_id=f"{tenant}:train:0", tenant=tenant)


async def promote(store: Store, promotion: Promotion, previous: Promotion | None, *most_and_along: Any) -> bool:
    """Promotes a checkpoint that is there."""
    checkpoint = checkpoint_of(promotion)
    await store.put_checkpoint(checkpoint)
    return await store.add_promotion(promotion, previous, checkpoint, *most_and_along)


def after(promotion: Promotion, path: str) -> Promotion:
    number = promotion.number + 1
    return replace(promotion, number=number, tinker_path=path, at=later(number), before=promotion.number)


async def test_names_belong_to_a_tenant_and_are_found_by_their_current_path(store: Store) -> None:
    others = replace(FIRST, tenant="bob")
    for promotion in (FIRST, replace(FIRST, name="beta"), others):
        await promote(store, promotion, None, BOUNDS)
    assert await store.names_promoted_to("ada", PATHS[0]) == ["beta", "prod"]
    moved = after(FIRST, PATHS[1])
    await promote(store, moved, FIRST, BOUNDS)
    assert await store.names_promoted_to("ada", PATHS[0]) == ["beta"]
    assert await store.list_promotions("ada") == [replace(FIRST, name="beta"), moved]
    assert await store.list_promotions("bob") == [others]


async def test_concurrent_changes_of_a_name_by_replicas_are_serialized(replicas: tuple[Store, Store]) -> None:
    await promote(replicas[0], FIRST, None, BOUNDS)
    rivals = [after(FIRST, path) for path in PATHS[1:]]
    changes = (promote(replicas[turn % 2], each, FIRST, BOUNDS) for turn, each in enumerate(rivals))
    done = await asyncio.gather(*changes)
    assert sorted(done) == [False, False, False, True]
    assert await replicas[0].promotion("ada", "prod") == rivals[done.index(True)]


@pytest.mark.parametrize("differs", [{"tinker_path": PATHS[2]}, {"at": later(1)}], ids=["path", "time"])
async def test_a_name_that_was_removed_and_promoted_again_is_another_one(store: Store, differs: dict[str, Any]) -> None:
    """The numbers of its changes are the same."""
    anew = replace(FIRST, **differs)
    await promote(store, FIRST, None, BOUNDS)
    await store.remove_promotions("ada", "prod")
    await promote(store, anew, None, BOUNDS)
    assert not await promote(store, after(FIRST, PATHS[1]), FIRST, BOUNDS)
    assert await store.promotion("ada", "prod") == anew


async def test_replicas_that_add_names_concurrently_do_not_exceed_the_limit(replicas: tuple[Store, Store]) -> None:
    rivals = [replace(FIRST, name=f"name-{number}") for number in range(8)]
    changes = (promote(replicas[turn % 2], each, None, BOUNDS) for turn, each in enumerate(rivals))
    assert sum(await asyncio.gather(*changes)) == BOUNDS.names
    assert len(await replicas[0].list_promotions("ada")) == BOUNDS.names
    others = replace(FIRST, tenant="bob")
    assert await promote(replicas[1], others, None, BOUNDS)


async def test_a_checkpoint_that_was_deleted_or_has_an_end_gets_no_name(store: Store) -> None:
    checkpoint = checkpoint_of(FIRST)
    named = (checkpoint.run_id, checkpoint.type, checkpoint.name)
    await store.put_checkpoint(replace(checkpoint, expires_at=later(60)))
    assert not await store.add_promotion(FIRST, None, checkpoint, BOUNDS)
    await store.set_checkpoint_expiry(*named, None)
    await store.delete_checkpoint(*named, NOW)
    assert not await store.add_promotion(FIRST, None, checkpoint, BOUNDS)
    assert await store.list_promotions("ada") == []


async def test_a_promoted_checkpoint_is_not_deleted_and_gets_no_expiry(store: Store) -> None:
    await promote(store, FIRST, None, BOUNDS)
    checkpoint, stands = checkpoint_of(FIRST), PromotedPath("ada", PATHS[0])
    named = (checkpoint.run_id, checkpoint.type, checkpoint.name)
    entry = AuditEntry("ada", NOW, "checkpoint_deleted", checkpoint.run_id, PATHS[0])
    assert await store.delete_checkpoint(*named, NOW, (entry,), stands) is None
    assert not await store.set_checkpoint_expiry(*named, later(60), (entry,), stands)
    assert await store.get_checkpoint(*named) == checkpoint
    assert await store.list_garbage(NOW) == []
    day = timedelta(days=1)
    assert await store.list_audit("ada", NOW - day, NOW + day, None, 10) == []
    await store.remove_promotions("ada", "prod")
    assert await store.set_checkpoint_expiry(*named, later(60), (), stands)
    assert await store.delete_checkpoint(*named, NOW, (), stands) is not None


async def test_one_of_a_concurrent_promotion_and_deletion_is_refused(replicas: tuple[Store, Store]) -> None:
    """Whichever comes first: a name that stands for nothing would fail each request that asks for it."""
    most = PromotionBounds(names=10, kept_per_name=3)
    for attempt in range(8):
        promotion = replace(FIRST, name=f"name-{attempt}", tinker_path=f"{PATHS[0]}-{attempt}")
        checkpoint, stands = checkpoint_of(promotion), PromotedPath("ada", promotion.tinker_path)
        await replicas[0].put_checkpoint(checkpoint)
        named = (checkpoint.run_id, checkpoint.type, checkpoint.name)
        work = [
            replicas[attempt % 2].add_promotion(promotion, None, checkpoint, most),
            replicas[(attempt + 1) % 2].delete_checkpoint(*named, NOW, (), stands),
        ]
        await asyncio.gather(*(work if attempt < 4 else work[::-1]))
        is_promoted = await replicas[0].promotion("ada", promotion.name) is not None
        assert is_promoted == (await replicas[0].get_checkpoint(*named) is not None)
