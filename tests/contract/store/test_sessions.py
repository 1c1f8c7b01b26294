import asyncio
from dataclasses import replace
from datetime import datetime

import pytest
from support.server.store_records import NOW, a_checkpoint, a_model, a_sampling_session, a_session, later
from tinsmith_server.store.records import CheckpointTotals, FinishType, ModelState
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core


async def test_a_session_comes_back_as_it_went_in(store: Store) -> None:
    session = a_session(
        tags=("rl", "näive"),
        user_metadata={"z": 1, "a": {"nested": [1.5, None, "\x00"]}},
        sdk_version="0.38.0",
        project_id="project",
        display_name="first try",
    )
    await store.create_session(session, None)

    found = await store.get_session("session-1")

    assert found == session
    assert list(found.user_metadata) == ["z", "a"], "keys keep their order"
    assert await store.get_session("session-2") is None


async def test_a_repeated_idempotency_key_gives_the_first_session(store: Store) -> None:
    first = await store.create_session(a_session("session-1"), "retry-1")

    assert await store.create_session(a_session("session-2"), "retry-1") == first
    assert await store.get_session("session-2") is None


async def test_twenty_concurrent_creates_with_one_key_make_one_session(replicas: tuple[Store, Store]) -> None:
    attempts = [replicas[number % 2].create_session(a_session(f"session-{number}"), "retry-1") for number in range(20)]

    made = await asyncio.gather(*attempts)

    assert len({session.session_id for session in made}) == 1
    assert (await replicas[0].list_sessions("ada", 50, 0)).rows == (made[0],)


async def test_sessions_of_one_moment_keep_one_order_across_pages(store: Store) -> None:
    for number in (1, 3, 0, 5, 2, 4):
        await store.create_session(a_session(f"session-{number}"), None)

    pages = [await store.list_sessions("ada", limit=2, offset=offset) for offset in (0, 2, 4)]

    assert [session.session_id for page in pages for session in page.rows] == [
        f"session-{number}" for number in (5, 4, 3, 2, 1, 0)
    ]


async def test_a_heartbeat_is_noted_and_never_moves_back(store: Store) -> None:
    await store.create_session(a_session(), None)

    assert await store.heartbeat("session-1", later(10)) == a_session(last_heartbeat_at=later(10))
    assert await store.heartbeat("session-1", later(5)) == a_session(last_heartbeat_at=later(10))
    assert await store.heartbeat("unknown", NOW) is None


async def test_the_first_finish_wins(store: Store) -> None:
    await store.create_session(a_session(), None)

    assert await store.finish_session("session-1", "errored", "ValueError: x", later(1))
    assert not await store.finish_session("session-1", "success", None, later(2))

    finished = a_session(finished_at=later(1), finish_type="errored", finish_detail="ValueError: x")
    assert await store.get_session("session-1") == finished


@pytest.mark.parametrize(
    ("heartbeat", "finished"), [(later(1), True), (later(2), False), (later(3), False)], ids=["older", "at", "younger"]
)
async def test_a_silent_session_is_finished_only_while_it_is_silent(
    store: Store, heartbeat: datetime, finished: bool
) -> None:
    await store.create_session(a_session(last_heartbeat_at=heartbeat), None)

    assert await store.finish_silent_session("session-1", "reaped", "no heartbeat", later(9), later(2)) is finished

    alive = a_session(last_heartbeat_at=heartbeat)
    reaped = replace(alive, finished_at=later(9), finish_type="reaped", finish_detail="no heartbeat")
    assert await store.get_session("session-1") == (reaped if finished else alive)


async def test_a_heartbeat_and_the_end_by_silence_exclude_each_other(replicas: tuple[Store, Store]) -> None:
    for number in range(20):
        await replicas[0].create_session(a_session(f"session-{number}"), None)

        beaten, reaped = await asyncio.gather(
            replicas[number % 2].heartbeat(f"session-{number}", later(5)),
            replicas[1 - number % 2].finish_silent_session(f"session-{number}", "reaped", None, later(9), later(2)),
        )

        assert beaten is not None
        assert reaped is (beaten.finished_at is not None)


async def test_one_of_concurrent_finishes_wins(replicas: tuple[Store, Store]) -> None:
    await replicas[0].create_session(a_session(), None)
    types: list[FinishType] = ["success", "errored", "interrupted", "reaped"]

    won = await asyncio.gather(
        *(replicas[number % 2].finish_session("session-1", type, None, NOW) for number, type in enumerate(types))
    )

    assert won.count(True) == 1
    session = await replicas[0].get_session("session-1")
    assert session is not None
    assert session.finish_type == types[won.index(True)]


@pytest.mark.parametrize(
    ("state", "listed"),
    [("accepted", True), ("bound", True), ("released", False), ("failed", False), ("corrupted", False)],
)
async def test_a_finished_session_is_listed_until_its_models_are_gone(
    store: Store, state: ModelState, listed: bool
) -> None:
    for session_id in ("finished", "running"):
        await store.create_session(a_session(session_id), None)
        await store.add_model(replace(a_model(session_id), state=state))
        await store.add_model(replace(a_model(session_id, 1), state=state))
    await store.finish_session("finished", "success", None, later(1))

    found = await store.finished_sessions_with_live_models()

    assert [session.session_id for session in found] == (["finished"] if listed else [])


async def test_sessions_without_models_are_forgotten_with_their_keys_and_sampling_sessions(store: Store) -> None:
    for name in ("own-old", "own-young", "own-alive", "own-model", "own-failed", "OWN-old", "ownold", "other"):
        await store.create_session(a_session(name), f"key of {name}")
        await store.add_sampling_session(a_sampling_session(name))
        if name != "own-alive":
            await store.finish_session(name, "reaped", None, later(10 if name == "own-young" else 1))
    await store.add_model(a_model("own-model", state="released"))
    await store.add_model(a_model("own-failed", state="failed"))

    assert await store.delete_sessions_without_models("own-", later(10)) == 1
    assert await store.delete_sessions_without_models("own-", later(10)) == 0

    assert await store.get_session("own-old") is None
    assert await store.get_sampling_session("own-old:sample:0") is None
    assert (await store.create_session(a_session("own-new"), "key of own-old")).session_id == "own-new"
    left = {"own-young", "own-alive", "own-model", "own-failed", "OWN-old", "ownold", "other"}
    assert {session.session_id for session in (await store.list_sessions("ada", 50, 0)).rows} == {*left, "own-new"}
    assert None not in [await store.get_sampling_session(f"{name}:sample:0") for name in left]


async def test_any_number_of_sessions_is_forgotten_a_few_in_a_transaction(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.store.queries.sessions.SESSIONS_AT_ONCE", 3)
    for number in range(7):
        await store.create_session(a_session(f"own-{number}"), None)
        await store.finish_session(f"own-{number}", "reaped", None, later(1))

    assert await store.delete_sessions_without_models("own-", later(2)) == 7
    assert (await store.list_sessions("ada", 50, 0)).total == 0


async def test_sessions_are_listed_by_descending_time_and_id(store: Store) -> None:
    for number, seconds in enumerate((0, 5, 5, 9)):
        await store.create_session(a_session(f"session-{number}", created_at=later(seconds)), None)
    await store.create_session(a_session("another", tenant="grace", created_at=later(3)), None)

    async def behind(position: tuple[datetime, str] | None, limit: int) -> list[str]:
        return [session.session_id for session in await store.sessions_after("ada", position, limit)]

    assert await behind(None, 2) == ["session-3", "session-2"]
    assert await behind((later(5), "session-2"), 5) == ["session-1", "session-0"]
    assert await behind((later(0), "session-0"), 5) == []


async def test_a_session_is_put_into_a_project_by_its_owner_alone(store: Store) -> None:
    await store.create_session(a_session(project_id="old"), None)
    assert not await store.assign_project("grace", "session-1", "theirs")
    assert await store.assign_project("ada", "session-1", "new")
    found = await store.get_session("session-1")
    assert found is not None
    assert found.project_id == "new"


async def test_storage_of_sessions_excludes_deleted_and_unnamed_checkpoints(store: Store) -> None:
    for session_id in ("session-1", "session-2"):
        await store.create_session(a_session(session_id), None)
    for number in range(2):
        model = await store.add_model(a_model(model_seq_id=number))
        await store.put_checkpoint(a_checkpoint("one", run_id=model.model_id, size_bytes=10))
    await store.put_checkpoint(a_checkpoint("two", "sampler", run_id=model.model_id, size_bytes=5))
    await store.put_checkpoint(a_checkpoint("gone", run_id=model.model_id, size_bytes=100))
    await store.put_checkpoint(a_checkpoint("unnamed", "ephemeral", run_id=model.model_id, size_bytes=100))
    await store.delete_checkpoint(model.model_id, "training", "gone", NOW)
    assert await store.checkpoint_totals_of_sessions(["session-1", "session-2"]) == {
        "session-1": CheckpointTotals(3, 25)
    }
    assert await store.checkpoint_totals_of_sessions([]) == {}


async def test_an_idempotency_key_belongs_to_its_tenant(store: Store) -> None:
    await store.create_session(a_session("session-1", tenant="ada"), "retry-1")

    other = await store.create_session(a_session("session-2", tenant="grace"), "retry-1")

    assert other.session_id == "session-2"
