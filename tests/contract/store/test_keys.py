import asyncio

import pytest
from support.server.store_records import NOW, later
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core


async def test_a_key_is_found_by_its_hash(store: Store) -> None:
    key = await store.add_key("ada", "laptop", "tml-abcd", "hash-1", NOW)

    assert await store.find_key("hash-1") == key
    assert (key.tenant, key.name, key.prefix, key.created_at, key.revoked_at) == (
        "ada",
        "laptop",
        "tml-abcd",
        NOW,
        None,
    )
    assert await store.find_key("hash-2") is None


async def test_a_revoked_key_is_not_found_but_listed(store: Store) -> None:
    key = await store.add_key("ada", "laptop", "tml-abcd", "hash-1", NOW)

    assert await store.revoke_key(key.key_id, later(1))

    assert await store.find_key("hash-1") is None
    assert [listed.revoked_at for listed in await store.list_keys()] == [later(1)]


async def test_keys_are_listed_in_the_order_they_were_made_and_by_tenant(store: Store) -> None:
    for number, tenant in enumerate(["ada", "grace", "ada"]):
        await store.add_key(tenant, f"key {number}", "tml-", f"hash-{number}", NOW)

    assert [key.name for key in await store.list_keys()] == ["key 0", "key 1", "key 2"]
    assert [key.name for key in await store.list_keys("ada")] == ["key 0", "key 2"]


async def test_replicas_that_start_with_the_same_static_key_share_one(replicas: tuple[Store, Store]) -> None:
    made = await asyncio.gather(*(replica.add_key("ada", "static", "tml-", "hash-1", NOW) for replica in replicas))

    assert made[0] == made[1]
    assert await replicas[0].list_keys() == [made[0]]
