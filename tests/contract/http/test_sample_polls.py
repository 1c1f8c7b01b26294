"""One poll for all samples of a sampling client, and numbers for those that join."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.server.fake_fleet import FakeFleet, FakeReplica
from support.server.http_server import TestedServer, running_server, settings_for

pytestmark = pytest.mark.core

one_server = pytest.mark.parametrize("server", ["one server"], indirect=True)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.UNSEEN_SECONDS", 0.05)
    monkeypatch.setattr("tinsmith_server.services.polling.sample_polls.REPORT_SECONDS", 0.5)


async def poll(server: TestedServer, sampler: str, cursor: int = 0, client: int = 0, **fields: Any) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": client}
    response = await server.post("/retrieve_futures", {"target": target, "prev_cursor": cursor, **fields})
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def ids(answer: dict[str, Any]) -> set[str]:
    return {completion["request_id"] for completion in answer["completions"]}


async def submitted(server: TestedServer, sampler: str, *numbers: int) -> list[str]:
    return [(await server.sample(sampler, number)).json()["request_id"] for number in numbers]


async def withheld(server: TestedServer, sampler: str, *numbers: int) -> list[str]:
    """Submit samples that do not end."""
    known = (await submitted(server, sampler, 10**6))[0].partition("@")[2]
    held = [f"{sampler}:asample:{number}@{known}" for number in numbers]
    server.worker.withheld.update(held)
    assert await submitted(server, sampler, *numbers) == held
    return held


async def test_one_poll_reports_all_ended_samples(server: TestedServer) -> None:
    sampler = await server.sampler()
    request_ids = await submitted(server, sampler, 0, 1, 2)
    answer = await poll(server, sampler)
    assert ids(answer) == set(request_ids)
    assert {one["state"] for one in answer["completions"]} == {"finished"}
    assert all(one["response_payload_uncompressed_size"] > 0 for one in answer["completions"])
    for request_id in request_ids:
        assert (await server.result(request_id)).status_code == 200


async def test_only_unseen_samples_are_reported_again(server: TestedServer) -> None:
    sampler = await server.sampler()
    first = await submitted(server, sampler, 0)
    told = await poll(server, sampler)
    assert ids(await poll(server, sampler, 0, timeout=0)) == set(first)
    cursor = (await poll(server, sampler, 0, timeout=0))["cursor"]
    assert cursor > told["cursor"]
    assert await poll(server, sampler, cursor, timeout=0) == {"completions": [], "cursor": cursor}
    second = await submitted(server, sampler, 1)
    assert ids(await poll(server, sampler, cursor)) == set(second)


@pytest.mark.core("POST /api/v1/retrieve_futures")
async def test_a_poll_is_held_until_a_sample_ends(server: TestedServer) -> None:
    sampler = await server.sampler()
    [waiting] = await withheld(server, sampler, 0)
    cursor = (await poll(server, sampler))["cursor"]
    held = asyncio.create_task(poll(server, sampler, cursor))
    await server.worker.many_requested.wait()
    assert not held.done()
    await server.worker.finish(waiting)
    assert ids(await asyncio.wait_for(held, 10)) == {waiting}


@one_server
async def test_a_refused_sample_is_reported_as_ended_and_its_future_has_the_reason(server: TestedServer) -> None:
    """A request that cannot be a sample fails in its future, as for clients that poll it alone."""
    sampler = await server.sampler()
    refused = (await server.sample(sampler, 0, num_samples=0)).json()["request_id"]
    assert ids(await poll(server, sampler)) == {refused}
    assert "num_samples" in (await server.result(refused)).json()["error"]


async def test_samples_of_several_replicas_come_in_one_answer(server: TestedServer, fleet: FakeFleet) -> None:
    for name in ("p1", "p2", "p3"):
        await fleet.add_replica(FakeReplica(name, "tiny-1"))
    sampler = await server.sampler()
    request_ids = []
    for number in range(16):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [number]}]}
        request_ids.append((await server.sample(sampler, number, prompt=prompt)).json()["request_id"])
    assert len({request_id.partition("@")[2] for request_id in request_ids}) > 1
    answer = await poll(server, sampler)
    assert ids(answer) == set(request_ids)
    assert ids(await poll(server, sampler, answer["cursor"], timeout=0)) == set()


async def test_an_unreachable_replica_does_not_delay_news_of_the_others(
    hasty_server: TestedServer, fleet: FakeFleet
) -> None:
    replica = FakeReplica("p1", "tiny-1")
    await fleet.add_replica(replica)
    sampler = await hasty_server.sampler()
    [there] = await submitted(hasty_server, sampler, 0)
    replica.down = "the network is down"
    [other] = await submitted(hasty_server, sampler, 1)
    replica.waits.clear()
    answer = await poll(hasty_server, sampler)
    assert ids(answer) == {other}
    assert replica.waits == [], "it was waited for, and the answer with it"
    replica.down = None
    assert ids(await poll(hasty_server, sampler, answer["cursor"])) == {there}


@pytest.mark.parametrize("how", ["restarted", "gone"])
async def test_a_sample_lost_with_its_replica_is_reported_as_failed_and_must_be_resubmitted(
    hasty_server: TestedServer, fleet: FakeFleet, how: str
) -> None:
    replica = FakeReplica("p1", "tiny-1")
    await fleet.add_replica(replica)
    sampler = await hasty_server.sampler()
    [lost] = await submitted(hasty_server, sampler, 0)
    if how == "gone":
        await fleet.remove_replica("p1")
    else:
        replica.fake.lose_memory()
    answer = await poll(hasty_server, sampler)
    assert answer["completions"] == [{"state": "failed", "request_id": lost}]
    assert (await hasty_server.result(lost)).status_code == 410


@one_server
async def test_a_sampler_that_cannot_tell_of_many_says_what_to_do(server: TestedServer) -> None:
    server.worker.tells_of_one_sample = True
    target = {"sampling_session_id": await server.sampler()}
    response = await server.post("/retrieve_futures", {"target": target})
    assert (response.status_code, "setting session_poller off" in response.text) == (422, True)


@pytest.mark.core("POST /api/v1/join_sampling_session")
async def test_each_joining_client_gets_a_unique_number(server: TestedServer) -> None:
    sampler, other = await server.sampler(), await server.sampler()
    answers = await asyncio.gather(
        *(server.post("/join_sampling_session", {"sampling_session_id": sampler}) for _ in range(5))
    )
    assert sorted(answer.json()["client_counter"] for answer in answers) == [1, 2, 3, 4, 5]
    joined = await server.post("/join_sampling_session", {"sampling_session_id": other})
    assert joined.json() == {"client_counter": 1, "type": "join_sampling_session"}


@pytest.mark.parametrize("uses_session_poller", [False, True])
async def test_clients_wait_by_one_poll_where_the_setting_says_so(
    tmp_path: Path, fleet: FakeFleet, uses_session_poller: bool
) -> None:
    async with running_server(settings_for(tmp_path, session_poller=uses_session_poller), fleet) as server:
        flags = (await server.post("/client/config", {"sdk_version": "0.38.0"})).json()
    assert (flags["sample_use_retrieve_futures"], flags["sample_join_sampling_session"]) == (uses_session_poller, True)
