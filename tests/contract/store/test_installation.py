import asyncio

import pytest
from support.server.store_records import NOW, a_checkpoint, a_model, a_session, later
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core


async def test_files_that_lost_their_name_are_garbage_until_they_are_removed(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint(directory="first", event_id=1))
    await store.put_checkpoint(a_checkpoint(directory="second", event_id=2))
    assert await store.list_garbage(NOW) == ["first"]

    checkpoint = a_checkpoint()
    await store.delete_checkpoint(checkpoint.run_id, checkpoint.type, checkpoint.name, NOW)
    assert await store.list_garbage(NOW) == ["first", "second"]

    await store.remove_garbage("first")
    await store.remove_garbage("first")
    assert await store.list_garbage(NOW) == ["second"]


async def test_a_save_that_is_reported_twice_is_no_garbage(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint(directory="only", event_id=1))
    await store.put_checkpoint(a_checkpoint(directory="only", event_id=2))
    assert await store.list_garbage(NOW) == []


async def test_a_secret_is_drawn_once_for_all_replicas(replicas: tuple[Store, Store]) -> None:
    drawn = await asyncio.gather(*(replicas[number % 2].secret("urls") for number in range(8)))

    assert len(set(drawn)) == 1
    assert len(drawn[0]) == 32
    assert await replicas[0].secret("other") != drawn[0]


async def test_counts_name_every_state_even_at_zero(store: Store) -> None:
    assert set((await store.counts()).values()) == {0}
    for session_id in ("session-1", "session-2"):
        await store.create_session(a_session(session_id), None)
    await store.finish_session("session-2", "success", None, NOW)
    await store.add_model(a_model())
    await store.add_model(a_model(model_seq_id=1, state="bound"))
    await store.add_model(a_model(model_seq_id=2, state="bound"))
    for name in ("first", "second"):
        await store.put_checkpoint(a_checkpoint(name, "sampler"))
    await store.delete_checkpoint("session-1:train:0", "sampler", "first", NOW)

    assert await store.counts() == {
        "models.accepted": 1,
        "models.bound": 2,
        "models.released": 0,
        "models.failed": 0,
        "models.corrupted": 0,
        "sessions.active": 1,
        "checkpoints.training": 0,
        "checkpoints.sampler": 1,
        "checkpoints.external": 0,
        "checkpoints.ephemeral": 0,
    }


async def test_a_directory_that_is_being_written_is_garbage_only_when_its_time_is_over(store: Store) -> None:
    await store.reserve_directory("writing", later(60))
    assert await store.list_garbage(later(59)) == []
    assert await store.list_garbage(later(60)) == ["writing"]


async def test_a_folder_in_which_a_record_has_its_directory_is_no_garbage(store: Store) -> None:
    """An attempt that came second reserves the folder of one that has been finished."""
    for folder in ("weights/run", "weights/run-2", "weights/run_3"):
        await store.reserve_directory(folder, later(60))
    checkpoint = a_checkpoint(directory="weights/run/0-1")
    await store.put_checkpoint(checkpoint)
    assert await store.list_garbage(later(60)) == ["weights/run-2", "weights/run_3"]
    await store.delete_checkpoint(checkpoint.run_id, checkpoint.type, checkpoint.name, NOW)
    assert sorted(await store.list_garbage(later(60))) == [
        *("weights/run", "weights/run-2", "weights/run/0-1", "weights/run_3")
    ]


async def test_a_record_ends_the_reservation_of_its_directory(store: Store) -> None:
    for name in ("new", "replaced"):
        await store.reserve_directory(name, later(60))
    await store.put_checkpoint(a_checkpoint(directory="new", event_id=1))
    assert await store.list_garbage(later(60)) == ["replaced"]
    await store.put_checkpoint(a_checkpoint(directory="replaced", event_id=2))
    assert await store.list_garbage(later(60)) == ["new"]


async def test_an_older_record_ends_no_reservation(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint(directory="first", event_id=2))
    await store.reserve_directory("late", later(60))
    await store.put_checkpoint(a_checkpoint(directory="late", event_id=1))
    assert await store.list_garbage(later(60)) == ["late"]


async def test_a_directory_that_is_reserved_again_is_kept_for_longer(store: Store) -> None:
    await store.reserve_directory("writing", later(60))
    await store.reserve_directory("writing", later(90))
    assert await store.list_garbage(later(60)) == []
    assert await store.list_garbage(later(90)) == ["writing"]
