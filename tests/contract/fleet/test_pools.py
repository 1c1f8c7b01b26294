"""SamplerPools as samplers: their replicas are found, followed and given up as the Kubernetes API says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from support.server.fleet_under_test import START_SECONDS
from support.server.http_server import API_KEY, TestedServer, running_server
from support.server.operator_stand_in import MODEL, StandInOperator, StandInReplica, reached_at
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet.base import SamplerHandle
from tinsmith_server.fleet.kubernetes.api import KubernetesApi, Manifest
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


def accepting(fleet: KubernetesFleet, rank: int = 0) -> dict[str, SamplerHandle]:
    """Return the IDs of the samplers that get new samples."""
    return {one.sampler_id: one for one in fleet.samplers(MODEL, rank)}


def holding(fleet: KubernetesFleet) -> set[str]:
    """Return the IDs of the samplers that are asked for results."""
    return {one.sampler_id for one in fleet.all_samplers}


async def running_replica(fleet: KubernetesFleet, operator: StandInOperator, pool: str = "fast") -> StandInReplica:
    """Return a replica that the fleet is connected to."""
    replica = await operator.run_replica(pool)
    await until(lambda: replica.pod_uid in accepting(fleet))
    return replica


async def test_every_replica_is_a_separate_sampler_and_not_a_worker(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply_pool("fast", maxSequenceLength=2048)
    replicas = [await running_replica(cluster_fleet, operator) for _ in range(2)]
    found = accepting(cluster_fleet)
    assert set(found) == {replica.pod_uid for replica in replicas}
    assert {one.name for one in found.values()} == {operator.title(replica.slice_name) for replica in replicas}
    assert [(one.base_model, one.kind) for one in found.values()] == [(MODEL, "pool")] * 2
    assert list(cluster_fleet.workers) == list(cluster_fleet.trainers(MODEL, 8)) == []
    served = cluster_fleet.model(MODEL)
    assert served is not None
    assert (served.training, served.sampling) == (False, True)
    assert (served.max_context_length, served.max_rank, served.max_sampling_rank) == (2048, None, 128)
    for replica in replicas:
        client = await found[replica.pod_uid].connection(START_SECONDS)
        await client.sample(worker_pb2.SampleRequest(request_id=replica.pod_uid), "ada")
        assert list(replica.fake.samples) == [replica.pod_uid]
        assert replica.fake.epoch == 0  # a sampler without a journal is not activated


async def test_a_replica_that_terminates_gets_nothing_new_and_is_asked_for_results_until_it_is_gone(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply_pool("fast")
    replica = await running_replica(cluster_fleet, operator)
    handle = accepting(cluster_fleet)[replica.pod_uid]
    replica.serving, replica.terminating = False, True
    await operator.publish(replica)
    await until(lambda: accepting(cluster_fleet) == {})
    assert holding(cluster_fleet) == {replica.pod_uid}
    assert (await (await handle.connection(0)).describe()).instance_id == replica.fake.instance_id
    await operator.remove_replica(replica)
    await until(lambda: holding(cluster_fleet) == set())


async def test_a_replica_that_neither_answers_nor_runs_is_not_waited_for(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    """Pods of a lost node stay listed until they are removed."""
    await operator.apply_pool("fast")
    replica = await running_replica(cluster_fleet, operator)
    handle = accepting(cluster_fleet)[replica.pod_uid]
    await replica.worker.stop()
    await until(lambda: handle.running() is None)
    assert holding(cluster_fleet) == {replica.pod_uid}  # it may be the network alone
    with pytest.raises(WorkerUnavailable, match=r"SamplerPool \S+/fast is ready, but this server cannot reach it"):
        await handle.connection(0)
    replica.serving = False
    await operator.publish(replica)
    await until(lambda: holding(cluster_fleet) == set())
    with pytest.raises(WorkerUnavailable, match=r"of SamplerPool \S+/fast does not answer at present"):
        await handle.connection(0)
    await replica.worker.start()
    replica.serving = True
    await operator.publish(replica)
    await until(lambda: set(accepting(cluster_fleet)) == {replica.pod_uid})


async def test_a_pool_that_is_deleted_takes_nothing_new_and_its_replicas_may_finish(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply_pool("fast")
    replica = await running_replica(cluster_fleet, operator)
    await operator.kubectl("delete", "samplerpool", "fast")
    await until(lambda: cluster_fleet.model(MODEL) is None)
    assert accepting(cluster_fleet) == {}
    assert holding(cluster_fleet) == {replica.pod_uid}
    # Applied again, it is another pool: the old pod keeps the old certificate and stays what it was.
    await operator.apply_pool("fast")
    successor = await running_replica(cluster_fleet, operator)
    assert set(accepting(cluster_fleet)) == {successor.pod_uid}
    assert holding(cluster_fleet) == {replica.pod_uid, successor.pod_uid}


async def test_a_replica_that_no_watch_tells_of_is_found_by_looking_again(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_arguments: object) -> AsyncGenerator[tuple[str, Manifest], None]:
        await asyncio.Event().wait()
        yield "BOOKMARK", {}

    await operator.apply_pool("fast")
    known = await running_replica(cluster_fleet, operator)
    monkeypatch.setattr(cluster_fleet._refresh, "_age_seconds", 0.0)
    with monkeypatch.context() as network:
        network.setattr(KubernetesApi, "watch", silent)
        await cluster_fleet.refresh()
        unseen = await operator.run_replica("fast")
        assert holding(cluster_fleet) == {known.pod_uid}
        await cluster_fleet.refresh()
        assert holding(cluster_fleet) == {known.pod_uid, unseen.pod_uid}
    await cluster_fleet.refresh()
    await operator.remove_replica(unseen)
    await until(lambda: holding(cluster_fleet) == {known.pod_uid})  # watched again


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[TestedServer]:
    changed = Settings(**{**settings.model_dump(), "api_key": API_KEY, "poll_hold_seconds": 0.5})
    async with running_server(changed, KubernetesFleet(changed, reached_at)) as server:
        yield server


async def pushed_back(server: TestedServer, sampler: str) -> str:
    response = await server.sample(sampler)
    assert response.status_code == 429, response.text
    return str(response.json()["detail"])


async def test_a_sample_without_a_ready_replica_is_refused_with_the_reason_of_the_pool(
    cluster_settings: Settings, operator: StandInOperator
) -> None:
    await operator.apply_pool("fast")
    await operator.say_of_pool("fast", ready=False, message="1 replica loads the model.")
    async with serving(cluster_settings) as server:
        sampler = await server.sampler()
        title = operator.title("fast")
        assert await pushed_back(server, sampler) == f"SamplerPool {title} is not ready: 1 replica loads the model"
        await operator.kubectl("scale", "samplerpool", "fast", "--replicas=0")
        cure = (
            f"SamplerPool {title} has no replicas; if it has no autoscaler, scale it up with: "
            f"kubectl --namespace {operator.namespace} scale samplerpool fast --replicas 1"
        )
        while await pushed_back(server, sampler) != cure:
            await asyncio.sleep(0.01)
        await operator.kubectl(*cure.partition("kubectl ")[2].split()[2:])
        await operator.run_replica("fast")
        while (answer := await server.sample(sampler)).status_code == 429:
            await asyncio.sleep(0.01)
        assert answer.status_code == 200


async def test_a_model_with_sessions_that_only_train_is_sampled_from_once_it_has_a_pool(
    cluster_settings: Settings, operator: StandInOperator
) -> None:
    await operator.apply("trains", sampling="None")
    await operator.run("trains")
    async with serving(cluster_settings) as server:
        body = {"session_id": await server.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
        refused = await server.post("/create_sampling_session", body)
        assert (refused.status_code, "to add a SamplerPool" in refused.json()["detail"]) == (
            422,
            True,
        )
        await operator.apply_pool("fast")
        replica = await operator.run_replica("fast")
        while (opened := await server.post("/create_sampling_session", body)).status_code == 422:
            await asyncio.sleep(0.01)
        while (answer := await server.sample(opened.json()["sampling_session_id"])).status_code == 429:
            await asyncio.sleep(0.01)
        assert list(replica.fake.samples) == [answer.json()["request_id"]]


async def test_a_replica_that_leaves_hands_its_work_to_the_others_without_a_refusal(
    cluster_settings: Settings, operator: StandInOperator
) -> None:
    """A rolling update as a client sees it: results are fetched, new samples run, and lost ones are repeated."""
    await operator.apply_pool("fast", replicas=2)
    replicas = [await operator.run_replica("fast") for _ in range(2)]
    async with serving(cluster_settings) as server:
        sampler = await server.sampler()
        while sum(one.accepting for one in server.fleet.all_samplers) < 2:
            await asyncio.sleep(0.01)
        first = (await server.sample(sampler, 0)).json()["request_id"]
        [leaving] = [one for one in replicas if first in one.fake.samples]
        [staying] = [one for one in replicas if one is not leaving]
        leaving.fake.draining = True
        second = (await server.sample(sampler, 1)).json()["request_id"]
        assert list(staying.fake.samples) == [second]
        assert await settled(server, first) == 200
        await operator.remove_replica(leaving)
        assert await settled(server, first) == 410
        assert await settled(server, second) == 200


async def settled(server: TestedServer, request_id: str) -> int:
    """Return the status of the answer, after any number of 408."""
    while (answer := await server.result(request_id)).status_code == 408:
        await asyncio.sleep(0.01)
    return answer.status_code


async def test_a_pool_past_its_deadline_is_not_woken_and_a_session_samples_instead(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply_pool("fast")
    await operator.pool_falls_asleep("fast", "2026-01-02T03:04:05Z")
    await operator.say_of_pool("fast", ready=False, message="It has existed for 60 s.", reason="DeadlineExceeded")
    await operator.apply("tiny")
    await operator.run("tiny")
    await operator.falls_asleep("tiny", "2026-01-02T03:04:05Z")
    await until(lambda: any(pool.is_past_deadline for pool in cluster_fleet._pools.pools))
    await until(lambda: any(session.asleep for session in cluster_fleet._sessions.values()))
    assert "waking session tiny" in await cluster_fleet.provide(MODEL, sampling=True)
    assert await operator.wanted_time("samplerpool", "fast") == ""


async def test_a_sample_wakes_a_pool_that_was_suspended_as_idle(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply_pool("fast")
    await operator.pool_falls_asleep("fast", "2026-01-02T03:04:05Z")
    await until(lambda: any(pool.suspended_at is not None for pool in cluster_fleet._pools.pools))
    assert "waking sampler pool fast" in await cluster_fleet.provide(MODEL, sampling=True)
    async with asyncio.timeout(START_SECONDS):
        while not await operator.wanted_time("samplerpool", "fast"):
            await asyncio.sleep(0.05)
