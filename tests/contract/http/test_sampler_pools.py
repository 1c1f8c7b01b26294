"""Pools next to workers that also train: routing of samples, and what a client sees while samplers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.server.fake_fleet import BASE_MODEL, FakeFleet, FakeReplica
from support.server.http_server import TestedServer, running_server, settings_for
from tinsmith_server.fleet.base import SavesAddress
from tinsmith_server.wire.ids import sampler_token

pytestmark = pytest.mark.core

BUSY_MACHINE_SECONDS = 120.0
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no sampler pass for silent because the machine is busy, and none be asked for its load unless a test says so.

    A sampler that does not take a sample in time, or does not describe itself in time, is passed over.
    """
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.POOL_SAMPLE_SECONDS", BUSY_MACHINE_SECONDS)
    monkeypatch.setattr("tinsmith_server.services.background.inspection.DESCRIBE_SECONDS", BUSY_MACHINE_SECONDS)
    monkeypatch.setattr("tinsmith_server.services.background.tasks.INSPECT_SECONDS", 3600.0)
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.UNSEEN_SECONDS", 0.05)


@pytest.fixture
async def one_server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    """Mark tests of what a server counts by itself."""
    async with running_server(settings_for(tmp_path), fleet) as server:
        yield server


async def add_pool(fleet: FakeFleet, *names: str) -> list[FakeReplica]:
    replicas = [FakeReplica(name, "tiny-1") for name in names]
    for replica in replicas:
        await fleet.add_replica(replica)
    return replicas


async def taken_by(server: TestedServer, sampler: str, seq_id: int = 0, prompt: int = 0) -> str:
    """Return the sampler that took a sample of this prompt."""
    submitted = await server.sample(sampler, seq_id, prompt={"chunks": [{"type": "encoded_text", "tokens": [prompt]}]})
    assert submitted.status_code == 200, submitted.text
    request_id = submitted.json()["request_id"]
    all_samplers = [*server.fleet.replicas.values(), *server.fleet.handles.values()]
    [name] = [one.sampler_id for one in all_samplers if request_id in one.fake.samples]
    assert request_id.endswith(f"@{sampler_token(name)}")
    return name


async def test_samples_go_to_the_pool_and_the_worker_that_trains_is_left_alone(
    server: TestedServer, fleet: FakeFleet
) -> None:
    await add_pool(fleet, "p1", "p2")
    sampler = await server.sampler()
    assert {await taken_by(server, sampler, prompt, prompt) for prompt in range(16)} == {"p1", "p2"}
    assert server.worker.samples == {}


@pytest.mark.parametrize("trouble", ["down", "draining", "full", "only trains"])
async def test_a_sample_that_its_sampler_refuses_goes_to_the_next_sampler_at_once(
    server: TestedServer, fleet: FakeFleet, trouble: str
) -> None:
    replicas = await add_pool(fleet, "p1", "p2", "p3")
    sampler = await server.sampler()
    first = fleet.replicas[await taken_by(server, sampler, 0)]
    if trouble == "down":
        await first.close()
    first.fake.draining, first.fake.sampler_full = trouble == "draining", trouble == "full"
    first.fake.only_trains = trouble == "only trains"
    second = await taken_by(server, sampler, 1)
    assert second in {one.sampler_id for one in replicas} - {first.sampler_id}
    assert await taken_by(server, sampler, 2) == second


async def test_a_sample_that_no_sampler_can_make_is_pushed_back_with_the_reason(
    server: TestedServer, fleet: FakeFleet
) -> None:
    """The sampling session's model may come back: a 422 would end the program."""
    for one in [*await add_pool(fleet, "p1", "p2"), server.handle]:
        one.fake.only_trains = True
    response = await server.sample(await server.sampler())
    assert (response.status_code, response.json()) == (429, {"detail": "this worker does not sample"})


async def test_a_tenant_that_has_filled_its_share_of_every_replica_does_not_block_other_tenants(
    server: TestedServer, fleet: FakeFleet
) -> None:
    """Each replica knows how much of it is whose, so any number of servers keep the shares without a word."""
    replicas = await add_pool(fleet, "p1", "p2")
    for replica in replicas:
        replica.fake.full_for = {"default"}
    flooded = await server.sample(await server.sampler())
    assert (flooded.status_code, flooded.json()) == (429, {"detail": "too many samples are waiting"})
    made = await server.services.keys.create("other", "theirs")
    other_key = {"X-API-Key": made.secret}
    body = {"sampling_session_id": await server.sampler(headers=other_key), "prompt": PROMPT}
    for seq_id in range(4):
        taken = await server.post("/asample", {**body, "seq_id": seq_id}, headers=other_key)
        assert taken.status_code == 200, taken.text
        got = await server.result(taken.json()["request_id"], headers=other_key)
        assert got.status_code == 200, got.text
    assert sum(len(replica.fake.samples) for replica in replicas) == 4


async def test_a_replica_that_terminates_takes_nothing_new_and_still_gives_its_results(
    server: TestedServer, fleet: FakeFleet
) -> None:
    [replica] = await add_pool(fleet, "p1")
    sampler = await server.sampler()
    submitted = (await server.sample(sampler, 0)).json()["request_id"]
    replica.terminating = True
    assert await taken_by(server, sampler, 1) == "tiny-1"
    assert (await server.result(submitted)).status_code == 200


async def test_a_sample_is_gone_as_soon_as_its_replica_is(hasty_server: TestedServer, fleet: FakeFleet) -> None:
    [replica] = await add_pool(fleet, "p1")
    replica.fake.withheld = {"never"}
    submitted = (await hasty_server.sample(await hasty_server.sampler())).json()["request_id"]
    await fleet.remove_replica("p1")
    answer = await hasty_server.result(submitted)
    assert (answer.status_code, "submit the sample again" in answer.json()["detail"]) == (410, True)


async def test_a_sample_is_waited_for_while_its_replica_is_unreachable(
    hasty_server: TestedServer, fleet: FakeFleet
) -> None:
    [replica] = await add_pool(fleet, "p1")
    submitted = (await hasty_server.sample(await hasty_server.sampler())).json()["request_id"]
    replica.down = "the network is down"
    waiting = await hasty_server.result(submitted)
    assert (waiting.status_code, waiting.json()["queue_state"]) == (408, "paused_capacity")
    assert waiting.json()["queue_state_reason"] == "the network is down"
    replica.down = None
    assert (await hasty_server.result(submitted)).status_code == 200


async def test_nothing_is_given_up_while_the_fleet_does_not_know_where_its_samplers_are(
    hasty_server: TestedServer, fleet: FakeFleet
) -> None:
    await add_pool(fleet, "p1")
    submitted = (await hasty_server.sample(await hasty_server.sampler())).json()["request_id"]
    await fleet.remove_replica("p1")
    fleet.not_ready = "the pools are not known"
    assert (await hasty_server.result(submitted)).status_code == 408
    fleet.not_ready = None
    assert (await hasty_server.result(submitted)).status_code == 410


async def test_a_replica_that_another_server_heard_of_first_is_waited_for(
    server: TestedServer, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.UNSEEN_SECONDS", 30.0)
    [replica] = await add_pool(fleet, "p1")
    submitted = (await server.sample(await server.sampler())).json()["request_id"]
    del fleet.replicas["p1"]
    polling = asyncio.create_task(server.result(submitted))
    await asyncio.sleep(0.2)  # it has asked in vain, and waits
    assert not polling.done()
    fleet.replicas["p1"] = replica
    fleet.changes.note()
    assert (await polling).status_code == 200


async def test_an_unknown_replica_is_searched_before_its_sample_is_given_up(
    hasty_server: TestedServer, fleet: FakeFleet
) -> None:
    """Its watch may have ended unnoticed: the client would resubmit samples that are not gone."""
    await add_pool(fleet, "p1")
    submitted = (await hasty_server.sample(await hasty_server.sampler())).json()["request_id"]
    fleet.unseen["p1"] = fleet.replicas.pop("p1")
    fleet.blind = "the cluster's API does not answer"
    waiting = await hasty_server.result(submitted)
    assert (waiting.status_code, waiting.json()["queue_state_reason"]) == (408, fleet.blind)
    fleet.blind = None
    assert (await hasty_server.result(submitted)).status_code == 200
    needed = fleet.refreshes
    assert (await hasty_server.result(submitted)).status_code == 200
    assert fleet.refreshes == needed


async def test_a_replica_that_hangs_does_not_delay_the_reports_of_the_others(
    one_server: TestedServer, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.background.inspection.DESCRIBE_SECONDS", 2.0)
    hanging, _ = await add_pool(fleet, "p1", "p2")
    hanging.fake.hangs = True
    async with asyncio.timeout(10):
        await one_server.services.inspection.refresh()
    assert "p2" in one_server.services.inspection.workers
    assert "p1" not in one_server.services.inspection.workers


async def refusals(server: TestedServer, sampler: str, seconds: int) -> list[str]:
    """Return the answers to a program that submits a sample twice a minute, for this long."""
    heard = []
    for _ in range(0, seconds + 1, 30):
        for _ in range(2):  # of two servers in turn, each is asked
            refused = await server.sample(sampler)
            heard.append(f"{refused.status_code} {refused.json()['detail']}")
        server.time.pass_seconds(30)
    return heard


async def test_a_model_that_is_away_for_a_moment_is_waited_for(server: TestedServer, fleet: FakeFleet) -> None:
    """A SamplerPool may be deleted and applied again: a 422 would end the program."""
    sampler = await server.sampler()
    fleet.handles["tiny-1"].suspended = True
    served = fleet.served.pop(BASE_MODEL)
    assert all(one.startswith("429 this server does not serve") for one in await refusals(server, sampler, 270))
    fleet.served[BASE_MODEL] = served
    fleet.handles["tiny-1"].suspended = False
    for seq_id in range(2):
        assert (await server.sample(sampler, seq_id)).status_code == 200


async def test_replicas_that_do_not_answer_hold_a_sample_for_a_while_and_not_one_after_the_other(
    one_server: TestedServer, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.CONNECT_SECONDS", 1.0)
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.POOL_SAMPLE_SECONDS", 2.0)
    for replica in await add_pool(fleet, "p1", "p2", "p3", "p4", "p5", "p6"):
        replica.fake.hangs = True
    fleet.handles["tiny-1"].suspended = True
    response = await one_server.sample(await one_server.sampler())
    assert response.status_code == 429
    assert sum(one.fake.sample_calls for one in fleet.replicas.values()) == 1


async def test_the_metrics_say_where_samples_went_and_name_no_client(
    one_server: TestedServer, fleet: FakeFleet
) -> None:
    await add_pool(fleet, "p1", "p2")
    sampler = await one_server.sampler()
    first = fleet.replicas[await taken_by(one_server, sampler, 0)]
    first.fake.draining = True
    await taken_by(one_server, sampler, 1)
    await one_server.services.inspection.refresh()
    text = (await one_server.client.get("http://server/metrics")).text
    for line in (
        'tinsmith_samples_given_total{base_model="org/tiny",kind="pool"} 2.0',
        'tinsmith_samples_passed_on_total{base_model="org/tiny"} 1.0',
        'tinsmith_samplers_accepting{base_model="org/tiny",kind="pool"} 2.0',
        'tinsmith_samplers_accepting{base_model="org/tiny",kind="colocated"} 1.0',
        'tinsmith_futures{base_model="org/tiny",state="sampling",worker="p1"} 0.0',
    ):
        assert line in text
    assert sampler.split(":")[0] not in text


async def until_announced(replicas: list[FakeReplica], count: int, versions: int) -> None:
    """Wait for this many announcements of this many versions. Each server announces, so a sampler may get one twice."""

    def announced() -> int:
        return sum(len({adapter.directory for adapter in one.fake.prepared}) == versions for one in replicas)

    async with asyncio.timeout(BUSY_MACHINE_SECONDS):
        while announced() < count:
            await asyncio.sleep(0.005)


async def test_a_pool_hears_of_weights_before_their_first_sample_and_a_worker_that_trains_does_not(
    server: TestedServer, fleet: FakeFleet
) -> None:
    replicas = await add_pool(fleet, "p1", "p2")
    model_id = await server.model()
    unnamed = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
    await server.outcome(await server.post("/save_weights_for_sampler", unnamed))
    await until_announced(replicas, 2, versions=1)
    body = {"model_id": model_id, "seq_id": 2, "path": "named"}
    named = await server.outcome(await server.post("/save_weights_for_sampler", body))
    opened = {"session_id": await server.session(), "sampling_session_seq_id": 1, "model_path": named["path"]}
    assert (await server.post("/create_sampling_session", opened)).status_code == 200
    await until_announced(replicas, 2, versions=2)
    assert server.worker.prepared == []


async def test_a_replica_on_the_network_of_the_saving_worker_gets_the_address_with_the_hint(
    server: TestedServer, fleet: FakeFleet
) -> None:
    near, far = await add_pool(fleet, "near", "far")
    near.network, far.network = "research", "production"
    fleet.handles["tiny-1"].saves_address = SavesAddress("10.0.0.1:7443", "tiny-1", "research")
    body = {"model_id": await server.model(), "seq_id": 1, "sampling_session_seq_id": 0}
    saved = await server.outcome(await server.post("/save_weights_for_sampler", body))
    await until_announced([near, far], 2, versions=1)
    assert {adapter.source.target for adapter in near.fake.prepared} == {"10.0.0.1:7443"}
    assert not any(adapter.HasField("source") for adapter in far.fake.prepared)
    for seq_id in range(8):
        await taken_by(server, saved["sampling_session_id"], seq_id, prompt=seq_id)
    assert {sample.adapter.source.worker_id for sample in near.fake.samples.values()} == {"tiny-1"}
    assert {sample.adapter.source.worker_id for sample in far.fake.samples.values()} == {""}


async def test_no_tenant_names_an_address_from_which_weights_would_be_taken(
    server: TestedServer, fleet: FakeFleet
) -> None:
    [replica] = await add_pool(fleet, "p1")
    replica.network = "research"
    adapter = {"directory": "ephemeral/a", "source": {"target": "169.254.169.254:80", "worker_id": "tiny-1"}}
    sampler = await server.sampler()
    for seq_id, fields in enumerate(({"adapter": adapter}, {"source": adapter["source"]})):
        submitted = await server.sample(sampler, seq_id, **fields)
        assert submitted.status_code in (200, 422)
    body = {"model_id": await server.model(), "seq_id": 1, "sampling_session_seq_id": 0, **adapter}
    saved = await server.outcome(await server.post("/save_weights_for_sampler", body))
    await server.sample(saved["sampling_session_id"], 0, adapter=adapter)
    await until_announced([replica], 1, versions=1)
    adapters = [*replica.fake.prepared, *(sample.adapter for sample in replica.fake.samples.values())]
    assert not any(one.HasField("source") for one in adapters)
    assert not any("169.254" in str(sample) for sample in replica.fake.samples.values())
