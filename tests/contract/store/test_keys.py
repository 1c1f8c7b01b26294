import asyncio
from random import random

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


async def test_of_the_last_two_keys_of_admins_only_one_is_revoked(replicas: tuple[Store, Store]) -> None:
    """Two admins may revoke each other at the same moment, at two replicas."""
    for _ in range(5):
        keys = [await replicas[0].add_key("ada", "", "tml-", f"hash-{random()}", NOW, "admin") for _ in range(2)]
        revoked = await asyncio.gather(
            *(
                store.revoke_key(key.key_id, later(1), spares_last_admin=True)
                for store, key in zip(replicas, keys, strict=True)
            )
        )
        assert sorted(revoked) == [False, True]
        for key in keys:
            await replicas[0].revoke_key(key.key_id, later(2))


async def test_a_key_of_another_role_is_no_admins_last_key(store: Store) -> None:
    member = await store.add_key("ada", "", "tml-", "hash-1", NOW)
    admin = await store.add_key("ada", "", "tml-", "hash-2", NOW, "admin")

    assert await store.revoke_key(member.key_id, later(1), spares_last_admin=True)
    assert not await store.revoke_key(admin.key_id, later(1), spares_last_admin=True)
    assert await store.revoke_key(admin.key_id, later(1))
    assert [key.revoked_at for key in await store.list_keys()] == [later(1), later(1)]


async def test_an_ended_login_is_known_until_its_tokens_have_expired(store: Store) -> None:
    for _ in range(2):
        await store.end_login("first", later(10), NOW)
    assert [await store.is_login_ended(login) for login in ("first", "other")] == [True, False]
    await store.end_login("second", later(20), later(10))
    assert [await store.is_login_ended(login) for login in ("first", "second")] == [False, True]


async def test_keys_are_listed_in_the_order_they_were_made_and_by_tenant(store: Store) -> None:
    for number, tenant in enumerate(["ada", "grace", "ada"]):
        await store.add_key(tenant, f"key {number}", "tml-", f"hash-{number}", NOW)

    assert [key.name for key in await store.list_keys()] == ["key 0", "key 1", "key 2"]
    assert [key.name for key in await store.list_keys("ada")] == ["key 0", "key 2"]


async def test_replicas_that_start_with_the_same_static_key_share_one(replicas: tuple[Store, Store]) -> None:
    made = await asyncio.gather(*(replica.add_key("ada", "static", "tml-", "hash-1", NOW) for replica in replicas))

    assert made[0] == made[1]
    assert await replicas[0].list_keys() == [made[0]]
