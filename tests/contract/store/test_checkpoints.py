import asyncio
import random
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import pytest
from support.server.store_records import NOW, a_checkpoint, a_model, a_sampling_session, a_session, later
from tinsmith_server.store.records import Checkpoint
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

RUN = "session-1:train:0"


async def names(found: Awaitable[Sequence[Checkpoint]]) -> list[str]:
    return [checkpoint.name for checkpoint in await found]


async def test_a_checkpoint_comes_back_as_it_went_in(store: Store) -> None:
    checkpoint = a_checkpoint(
        expires_at=later(60), public=True, user_metadata={"step": "3"}, size_bytes=2**40, event_id=2**40, seq_id=2**60
    )

    assert await store.put_checkpoint(checkpoint) is None

    assert await store.get_checkpoint(RUN, "training", "first") == checkpoint
    assert await store.get_checkpoint(RUN, "sampler", "first") is None
    assert await store.get_checkpoint(RUN, "training", "second") is None


@pytest.mark.parametrize(
    "newer",
    [a_checkpoint(epoch=3, event_id=6), a_checkpoint(epoch=4, event_id=1)],
    ids=["a later event", "a later epoch"],
)
async def test_a_newer_save_moves_the_name_and_returns_the_replaced_save(store: Store, newer: Checkpoint) -> None:
    first = a_checkpoint(epoch=3, event_id=5, public=True, expires_at=later(60))
    await store.put_checkpoint(first)

    assert await store.put_checkpoint(newer) == first

    assert await store.get_checkpoint(RUN, "training", "first") == newer


@pytest.mark.parametrize(
    "older",
    [a_checkpoint(epoch=3, event_id=5), a_checkpoint(epoch=3, event_id=4), a_checkpoint(epoch=2, event_id=9)],
    ids=["the same event", "an earlier event", "an earlier epoch"],
)
async def test_a_replayed_or_late_event_changes_nothing(store: Store, older: Checkpoint) -> None:
    present = a_checkpoint(epoch=3, event_id=5, public=True)
    await store.put_checkpoint(present)

    assert await store.put_checkpoint(older) is None

    assert await store.get_checkpoint(RUN, "training", "first") == present


async def test_the_surplus_of_a_run_is_what_is_older_than_the_newest_of_its_type(store: Store) -> None:
    for number in range(4):
        for type in ("training", "sampler", "ephemeral"):
            public = type == "training" and number == 0
            await store.put_checkpoint(
                a_checkpoint(f"{type}-{number}", type, event_id=number + 1, created_at=later(number), public=public)  # type: ignore[arg-type]
            )
    await store.put_checkpoint(a_checkpoint("of-another-run", run_id="session-2:train:0"))
    await store.put_checkpoint(a_checkpoint("of-grace", run_id="session-3:train:0", tenant="grace"))
    await store.delete_checkpoint(RUN, "sampler", "sampler-3", later(9))

    assert await names(store.surplus_checkpoints("ada", 2, 10)) == ["sampler-0", "training-1"]
    assert await names(store.surplus_checkpoints("ada", 1, 2)) == ["sampler-0", "sampler-1"]
    assert await store.surplus_checkpoints("ada", 9, 10) == []


async def test_the_newest_checkpoints_of_runs_are_one_of_each_type_that_has_not_expired(store: Store) -> None:
    for number in range(3):
        for type in ("training", "sampler", "ephemeral"):
            await store.put_checkpoint(
                a_checkpoint(f"{type}-{number}", type, event_id=number + 1, created_at=later(number))  # type: ignore[arg-type]
            )
    await store.put_checkpoint(a_checkpoint("of-another-run", run_id="session-2:train:0"))
    await store.put_checkpoint(a_checkpoint("of-a-third-run", run_id="session-3:train:0"))
    await store.set_checkpoint_expiry(RUN, "sampler", "sampler-2", later(9))

    two = [RUN, "session-2:train:0", "unknown"]
    assert set(await names(store.newest_checkpoints(two, later(8)))) == {"of-another-run", "sampler-2", "training-2"}
    assert set(await names(store.newest_checkpoints(two, later(9)))) == {"of-another-run", "sampler-1", "training-2"}


async def test_a_checkpoint_that_became_public_is_not_deleted_as_surplus(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint(public=True))
    assert await store.delete_checkpoint(RUN, "training", "first", later(1), unless_public=True) is None
    assert await store.get_checkpoint(RUN, "training", "first") is not None


async def test_a_deleted_checkpoint_is_gone_and_said_once(store: Store) -> None:
    checkpoint = a_checkpoint()
    await store.put_checkpoint(checkpoint)

    assert await store.delete_checkpoint(RUN, "training", "first", NOW) == checkpoint
    assert await store.delete_checkpoint(RUN, "training", "first", NOW) is None

    assert await store.get_checkpoint(RUN, "training", "first") is None
    assert await store.checkpoints_of_run(RUN) == []
    assert (await store.list_checkpoints("ada", 10, 0)).total == 0


async def test_a_replayed_event_does_not_bring_a_deleted_checkpoint_back(store: Store) -> None:
    checkpoint = a_checkpoint()
    await store.put_checkpoint(checkpoint)
    await store.delete_checkpoint(RUN, "training", "first", NOW)

    assert await store.put_checkpoint(checkpoint) is None

    assert await store.get_checkpoint(RUN, "training", "first") is None


async def test_the_remains_of_deleted_checkpoints_are_removed_a_while_after_their_model(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker does not repeat reported events: only a repeat could bring it back."""
    monkeypatch.setattr("tinsmith_server.store.queries.checkpoints.TOMBSTONES_AT_ONCE", 1)
    await store.create_session(a_session(), None)
    for number, (state, worker_id) in enumerate((("released", "heard"), ("bound", "heard"), ("released", "unheard"))):
        await store.add_model(a_model(model_seq_id=number, state=state, worker_id=worker_id))
    for worker_id, cursor in (("heard", 7), ("unheard", 6)):
        await store.get_worker(worker_id)
        await store.advance_cursor(worker_id, cursor)
    deleted = {
        (number, name): a_checkpoint(name, "ephemeral", run_id=f"session-1:train:{number}", event_id=7)
        for number in (0, 1, 2)
        for name in ("long ago", "long ago too", "just now")
    }
    for (_, name), checkpoint in deleted.items():
        await store.put_checkpoint(checkpoint)
        await store.delete_checkpoint(checkpoint.run_id, "ephemeral", name, later(2 if name == "just now" else 1))
    await store.put_checkpoint(a_checkpoint("kept", "ephemeral"))

    await store.delete_old_tombstones(later(2))

    for checkpoint in deleted.values():
        await store.put_checkpoint(checkpoint)
    # Only what is forgotten can come back by its old event.
    assert sorted(await names(store.ephemeral_checkpoints("ada"))) == ["kept", "long ago", "long ago too"]
    assert await store.get_checkpoint("session-1:train:0", "ephemeral", "long ago") is not None


async def test_a_save_that_is_forgotten_takes_along_the_sampling_session_that_it_opened(store: Store) -> None:
    """Sessions that a client opened by a path, or on existing weights, stay."""
    await store.create_session(a_session(), None)
    await store.add_model(a_model(state="released", worker_id="heard"))
    await store.get_worker("heard")
    await store.advance_cursor("heard", 7)
    by_save, by_later_save = (a_sampling_session(seq_id=number, model_id=RUN) for number in (1, 2))
    by_path = a_sampling_session(seq_id=3, model_path=f"tinker://{RUN}/sampler_weights/first")
    for opened in (by_save, by_later_save, by_path):
        await store.add_sampling_session(opened)
    for save in (by_save, by_later_save):
        await store.put_checkpoint(a_checkpoint(save.sampling_session_id, "ephemeral", event_id=7))
    await store.put_checkpoint(a_checkpoint("first", "sampler", event_id=7))
    await store.delete_checkpoint(RUN, "ephemeral", by_save.sampling_session_id, NOW)
    await store.delete_checkpoint(RUN, "sampler", "first", NOW)

    await store.delete_old_tombstones(later(1))

    kept = [by_later_save.sampling_session_id, by_path.sampling_session_id]
    assert await store.sampler_ids_of_session("session-1") == kept


async def test_the_newest_of_concurrent_saves_stays_and_the_others_become_garbage_once(
    replicas: tuple[Store, Store],
) -> None:
    saves = [a_checkpoint(epoch=number // 5, event_id=number) for number in range(20)]
    shuffled = random.Random(1).sample(saves, len(saves))

    put = await asyncio.gather(*(replicas[n % 2].put_checkpoint(save) for n, save in enumerate(shuffled)))

    assert await replicas[0].get_checkpoint(RUN, "training", "first") == saves[-1]
    replaced = [checkpoint.directory for checkpoint in put if checkpoint is not None]
    assert len(replaced) == len(set(replaced))
    assert saves[-1].directory not in replaced


async def test_publishing_and_expiry_change_only_existing_checkpoints(store: Store) -> None:
    checkpoint = a_checkpoint()
    await store.put_checkpoint(checkpoint)

    await store.set_checkpoint_public(RUN, "training", "first", True)
    await store.set_checkpoint_expiry(RUN, "training", "first", later(60))
    assert await store.get_checkpoint(RUN, "training", "first") == replace(
        checkpoint, public=True, expires_at=later(60)
    )

    await store.set_checkpoint_public(RUN, "training", "first", False)
    await store.set_checkpoint_expiry(RUN, "training", "first", None)
    assert await store.get_checkpoint(RUN, "training", "first") == checkpoint

    await store.set_checkpoint_public(RUN, "training", "second", True)
    assert await store.get_checkpoint(RUN, "training", "second") is None


async def test_checkpoints_expire_at_their_time(store: Store) -> None:
    for name, expires_at in [("past", later(1)), ("now", later(2)), ("future", later(3)), ("never", None)]:
        await store.put_checkpoint(a_checkpoint(name, expires_at=expires_at))
    await store.put_checkpoint(a_checkpoint("deleted", expires_at=later(1)))
    await store.delete_checkpoint(RUN, "training", "deleted", NOW)

    assert await names(store.expired_checkpoints(later(2))) == ["past", "now"]


async def test_ephemeral_checkpoints_outlive_their_session_for_a_while(store: Store) -> None:
    for session_id, finished_at in [("long ago", later(1)), ("just now", later(2)), ("running", None)]:
        await store.create_session(a_session(session_id), None)
        model = await store.add_model(a_model(session_id))
        for type in ("ephemeral", "sampler"):
            await store.put_checkpoint(a_checkpoint(session_id, type, run_id=model.model_id))
        if finished_at is not None:
            await store.finish_session(session_id, "success", None, finished_at)

    found = await store.ephemeral_of_finished_sessions(later(2))

    assert [(checkpoint.name, checkpoint.type) for checkpoint in found] == [("long ago", "ephemeral")]


async def test_a_checkpoint_that_was_prolonged_or_saved_again_does_not_expire(store: Store) -> None:
    """The replica that removes expired checkpoints may have been paused since it looked."""
    for name in ("prolonged", "saved again", "past"):
        await store.put_checkpoint(a_checkpoint(name, expires_at=later(1)))
    await store.set_checkpoint_expiry("session-1:train:0", "training", "prolonged", later(60))
    await store.put_checkpoint(a_checkpoint("saved again", event_id=2))

    deleted = [
        await store.delete_expired_checkpoint("session-1:train:0", "training", name, later(2))
        for name in ("prolonged", "saved again", "past", "past")
    ]

    assert [one and one.name for one in deleted] == [None, None, "past", None]
    assert {one.name for one in await store.checkpoints_of_run("session-1:train:0")} == {"prolonged", "saved again"}


@pytest.mark.parametrize("seed", range(3))
async def test_pointers_that_two_replicas_move_at_once_end_at_the_newest_and_show_no_garbage(
    replicas: tuple[Store, Store], seed: int
) -> None:
    """The replicas drain the same events, each in an order of its own, while one of the names is deleted."""
    chance = random.Random(seed)
    versions = [(epoch, event_id) for epoch in (1, 2) for event_id in range(6)]
    saves = [a_version(name, *version) for name in ("a", "b") for version in versions]
    work: list[Awaitable[object]] = [
        replica.put_checkpoint(save) for replica in replicas for save in chance.sample(saves, len(saves))
    ]
    work.insert(chance.randrange(len(work)), replicas[1].delete_checkpoint(saves[0].run_id, "training", "a", NOW))

    await asyncio.gather(*work)

    left = {one.name: one for one in await replicas[0].checkpoints_of_run(saves[0].run_id)}
    assert left["b"] == a_version("b", *versions[-1])
    assert left.get("a") in (None, a_version("a", *versions[-1]))
    assert not {one.directory for one in left.values()} & set(await replicas[0].list_garbage(NOW))


def a_version(name: str, epoch: int, event_id: int) -> Checkpoint:
    return a_checkpoint(name, epoch=epoch, event_id=event_id, directory=f"{name}/{epoch}/{event_id}")


async def test_a_tenants_checkpoints_have_the_bytes_of_those_that_have_a_name_and_are_there(store: Store) -> None:
    await store.put_checkpoint(a_checkpoint("first", size_bytes=2**40))
    await store.put_checkpoint(a_checkpoint("second", event_id=2, size_bytes=5))
    await store.put_checkpoint(a_checkpoint("third", event_id=3, size_bytes=7))
    await store.put_checkpoint(a_checkpoint("unnamed", "ephemeral", event_id=4, size_bytes=11))
    await store.delete_checkpoint(RUN, "training", "third", later(1))
    assert await store.checkpoint_bytes("ada") == 2**40 + 5
    assert await store.checkpoint_bytes("unknown") == 0
