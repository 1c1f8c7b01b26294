"""TrainingSessions as workers: found, followed and given up as the Kubernetes API says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.server.fleet_under_test import START_SECONDS, until_present
from support.server.operator_stand_in import FINALIZER, MODEL, StandInOperator, StandInWorker
from testcluster.cluster import Cluster
from testcluster.ports import free_port
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import StartupError, WorkerAbsent, WorkerUnavailable
from tinsmith_server.fleet.base import SavesAddress, WorkerHandle
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store


async def until(fleet: KubernetesFleet, holds: Callable[[], bool]) -> None:
    """Wait until the condition is true, with a check after each change of the fleet."""
    async with asyncio.timeout(START_SECONDS):
        while not holds():
            await fleet.changes.beyond(fleet.changes.count)


def knows_its_worker(fleet: KubernetesFleet, namespace: str, name: str) -> bool:
    session = fleet._sessions.get((namespace, name))
    return session is not None and session.worker_id is not None


async def running_session(
    fleet: KubernetesFleet, operator: StandInOperator, name: str, **spec: object
) -> StandInWorker:
    """Return a session whose worker the fleet is connected to."""
    await operator.apply(name, **spec)
    worker = await operator.run(name)
    await until(fleet, lambda: worker.worker_id in {one.worker_id for one in fleet.workers})
    await until(fleet, lambda: worker.worker_id in {one.worker_id for one in fleet.trainers(MODEL, 1)})
    await fleet.worker(worker.worker_id).connection(START_SECONDS)
    return worker


async def test_sessions_of_one_model_are_workers_of_their_own(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, store: Store
) -> None:
    first = await running_session(cluster_fleet, operator, "first", adapters={"slots": 2, "maxRank": 16})
    second = await running_session(cluster_fleet, operator, "second", maxSequenceLength=4096)
    assert {worker.name: worker.slots for worker in cluster_fleet.trainers(MODEL, 8)} == {
        operator.title("first"): 2,
        operator.title("second"): 8,
    }
    assert [worker.name for worker in cluster_fleet.trainers(MODEL, 17)] == [operator.title("second")]
    served = cluster_fleet.model(MODEL)
    assert served is not None
    assert (served.max_rank, served.max_context_length) == (128, 4096)
    for worker in (first, second):
        assert (await store.get_worker(worker.worker_id)).epoch == worker.fake.epoch == 1
    assert (await store.get_worker(first.worker_id)).home.startswith(f"{operator.title('first')}@")


async def test_a_worker_that_parks_adapters_has_as_many_places_as_it_says(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny", adapters={"slots": 2})
    handle = cluster_fleet.worker(worker.worker_id)
    assert handle.slots == 2
    worker.fake.model_places = 16
    await worker.crash()
    async with asyncio.timeout(START_SECONDS):
        while handle.slots != 16:
            await asyncio.sleep(0.01)


async def test_a_worker_that_streams_saves_says_where_by_number_while_it_is_connected(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    """A sampler does not trust names."""
    worker = await running_session(cluster_fleet, operator, "tiny")
    handle = cluster_fleet.worker(worker.worker_id)
    assert handle.saves is None
    worker.fake.streams_saves = True
    await operator.say("tiny", ready=True, message="", workerId=worker.worker_id, endpoint=f"localhost:{worker.port}")
    await worker.crash()
    async with asyncio.timeout(START_SECONDS):
        while handle.saves is None:
            await asyncio.sleep(0.01)
    assert handle.saves == SavesAddress(f"127.0.0.1:{worker.port}", worker.worker_id, operator.namespace)
    await worker.stop()
    async with asyncio.timeout(START_SECONDS):
        while handle.saves is not None:
            await asyncio.sleep(0.01)


async def test_sessions_that_were_there_before_the_server_are_known_when_it_has_opened(
    cluster_settings: Settings, operator: StandInOperator, store: Store
) -> None:
    await operator.apply("early")
    await operator.run("early")
    fleet = KubernetesFleet(cluster_settings)
    await fleet.open(store)
    assert [worker.name for worker in fleet.trainers(MODEL, 8)] == [operator.title("early")]
    await fleet.close()


async def test_a_ready_session_is_connected_and_activated_before_the_first_request(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, store: Store
) -> None:
    """A worker is ready when its model is loaded: so the first create finds it warm."""
    await operator.apply("warm")
    worker = await operator.run("warm")
    await until(cluster_fleet, lambda: worker.worker_id in {one.worker_id for one in cluster_fleet.workers})
    handle = cluster_fleet.worker(worker.worker_id)
    async with asyncio.timeout(START_SECONDS):
        while handle.running() is None:
            await asyncio.sleep(0.01)
    assert (await store.get_worker(worker.worker_id)).epoch == worker.fake.epoch == 1
    assert handle.unavailable_reason is None


async def test_a_session_without_a_ready_worker_is_advertised_and_says_what_is_missing(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply("slow")
    await until(cluster_fleet, lambda: cluster_fleet.model(MODEL) is not None)
    assert list(cluster_fleet.trainers(MODEL, 8)) == []
    worker_id = await operator.claim("slow")
    await operator.say("slow", ready=False, message="The worker loads the model.", workerId=worker_id)
    await until_present(cluster_fleet)
    with pytest.raises(
        WorkerUnavailable, match=rf"TrainingSession {operator.title('slow')} is not ready: The worker loads the model$"
    ):
        await cluster_fleet.worker(worker_id).connection(0)
    sentence = f"TrainingSession {operator.title('slow')} is not ready: The worker loads the model"
    assert await cluster_fleet.provide(MODEL) == sentence


async def test_a_suspended_session_gets_no_work_and_says_how_to_resume_it(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, store: Store
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny")
    await operator.suspend("tiny")
    await until(cluster_fleet, lambda: not cluster_fleet.trainers(MODEL, 8))
    handle = cluster_fleet.worker(worker.worker_id)
    sentence = (
        f"TrainingSession {operator.title('tiny')} is suspended; resume it with: "
        f"kubectl --namespace {operator.namespace} "
        """patch trainingsession tiny --type merge --patch '{"spec":{"suspend":false}}'"""
    )
    assert await cluster_fleet.provide(MODEL) == sentence
    while handle.running() is not None:
        await asyncio.sleep(0.01)
    with pytest.raises(WorkerUnavailable) as refusal:
        await handle.connection(0)
    assert str(refusal.value) == sentence
    assert await cluster_fleet.permanently_lost_reason(await store.get_worker(worker.worker_id)) is None

    worker.fake.lose_memory()
    await operator.resume("tiny")
    await handle.connection(START_SECONDS)
    assert worker.fake.epoch == 2


async def test_a_deleted_session_may_come_back_as_the_same_worker_while_its_volume_stays(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, store: Store
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny")
    await operator.delete("tiny")
    await until_present(cluster_fleet, 0)
    with pytest.raises(
        WorkerAbsent, match=f"TrainingSession {operator.title('tiny')} was deleted; if its volume was kept, apply"
    ):
        cluster_fleet.worker(worker.worker_id)
    assert await cluster_fleet.permanently_lost_reason(await store.get_worker(worker.worker_id)) is None
    again = await running_session(cluster_fleet, operator, "tiny")
    assert again is worker


async def test_a_worker_without_its_volume_claim_is_permanently_lost(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, store: Store
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny")
    await operator.delete("tiny")
    await until_present(cluster_fleet, 0)
    await operator.kubectl("delete", "persistentvolumeclaim", "tiny-journal")
    await operator.until_gone("persistentvolumeclaim", "tiny-journal")
    row = await store.get_worker(worker.worker_id)
    assert (
        await cluster_fleet.permanently_lost_reason(row)
        == f"the volume of TrainingSession {operator.title('tiny')} was deleted"
    )


async def test_a_worker_of_another_namespace_is_never_judged(cluster_fleet: KubernetesFleet, store: Store) -> None:
    await store.get_worker("elsewhere")
    await store.record_home("elsewhere", f"another-namespace/tiny@{cluster_fleet._api.cluster}")
    assert await cluster_fleet.permanently_lost_reason(await store.get_worker("elsewhere")) is None


async def test_a_worker_of_another_cluster_is_never_judged_by_names_that_both_have(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, store: Store
) -> None:
    """A server may be started in a second cluster with the store of the first one."""
    await store.get_worker("elsewhere")
    await store.record_home("elsewhere", f"{operator.title('tiny')}@{cluster_fleet._api.cluster}")
    assert await cluster_fleet.permanently_lost_reason(await store.get_worker("elsewhere")) is not None
    await store.record_home("elsewhere", f"{operator.title('tiny')}@another")
    assert await cluster_fleet.permanently_lost_reason(await store.get_worker("elsewhere")) is None


async def test_two_servers_share_a_worker_under_one_epoch(
    cluster_fleet: KubernetesFleet, cluster_settings: Settings, operator: StandInOperator, store: Store
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny")
    other = KubernetesFleet(cluster_settings)
    await other.open(store)
    await other.worker(worker.worker_id).connection(START_SECONDS)
    assert worker.fake.epoch == (await store.get_worker(worker.worker_id)).epoch == 1
    await other.close()


async def test_a_worker_that_is_started_again_while_it_is_activated_gets_its_own_epoch(
    cluster_fleet: KubernetesFleet, operator: StandInOperator, store: Store
) -> None:
    await operator.apply("tiny")
    worker = operator.workers["tiny"] = StandInWorker(await operator.claim("tiny"), operator.authority, free_port())
    describe, lives = worker.fake.Describe, iter(range(1, 3))

    async def describe_and_die(request: Any, context: Any) -> worker_pb2.DescribeReply:
        reply = await describe(request, context)
        if next(lives, None) == 1:
            worker.fake.lose_memory()
        return reply

    worker.fake.Describe = describe_and_die  # type: ignore[method-assign]
    await running_session(cluster_fleet, operator, "tiny")
    row = await store.get_worker(worker.worker_id)
    assert (row.instance_id, row.epoch, worker.fake.epoch) == (worker.fake.instance_id, 2, 2)


async def test_the_running_one_of_two_sessions_with_the_same_volume_is_the_worker(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    """When a session is renamed, the new one waits for the volume that the old one has."""
    worker = await running_session(cluster_fleet, operator, "old")
    await operator.apply("new", storage={"existingClaim": "old-journal"})
    await operator.say("new", ready=False, message="The old one has its volume.", workerId=worker.worker_id)
    await until(cluster_fleet, lambda: knows_its_worker(cluster_fleet, operator.namespace, "new"))
    assert [one.name for one in cluster_fleet.trainers(MODEL, 8)] == [operator.title("old")]
    await operator.delete("old")
    endpoint = f"127.0.0.1:{worker.port}"
    await operator.say("new", ready=True, message="It answers.", workerId=worker.worker_id, endpoint=endpoint)
    await until(
        cluster_fleet, lambda: [one.name for one in cluster_fleet.trainers(MODEL, 8)] == [operator.title("new")]
    )
    await cluster_fleet.worker(worker.worker_id).connection(START_SECONDS)


async def test_a_worker_with_anothers_certificate_is_not_spoken_to(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await operator.apply("victim")
    worker_id = await operator.claim("victim")
    impostor = operator.workers["victim"] = StandInWorker("impostor", operator.authority, 0)
    impostor.port = (await running_session(cluster_fleet, operator, "port-giver")).port
    await operator.workers["port-giver"].stop()
    await impostor.start()
    endpoint = f"127.0.0.1:{impostor.port}"
    await operator.say("victim", ready=True, message="", workerId=worker_id, endpoint=endpoint)
    await until(cluster_fleet, lambda: worker_id in {one.worker_id for one in cluster_fleet.workers})
    with pytest.raises(
        WorkerUnavailable, match=r"TrainingSession \S+/victim is ready, but this server cannot reach it"
    ):
        await cluster_fleet.worker(worker_id).connection(1)
    assert impostor.fake.epoch == 0


async def test_an_api_that_refuses_is_a_sentence_at_the_start(
    crd: Cluster,
    operator: StandInOperator,
    cluster_settings: Settings,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service account without any right."""
    token = (await operator.kubectl("create", "token", "default")).strip()
    kubeconfig = yaml.safe_load(crd.kubeconfig.read_text())
    for user in kubeconfig["users"]:
        user["user"] = {"token": token}
    powerless = tmp_path / "powerless.kubeconfig"
    powerless.write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(powerless))
    fleet = KubernetesFleet(cluster_settings)
    with pytest.raises(StartupError, match=r"is forbidden.*this service account may list"):
        await fleet.open(store)
    await fleet.close()


async def test_a_session_that_is_deleted_with_its_volume_is_leaving_and_gets_no_new_models(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    storage = {"retentionPolicy": {"whenDeleted": "Delete"}}
    await operator.apply("tiny", finalizers=(FINALIZER,), storage=storage)
    worker = await operator.run("tiny")
    await until_present(cluster_fleet)
    handle = cluster_fleet.worker(worker.worker_id)
    client = await handle.connection(START_SECONDS)
    assert not handle.leaving
    await operator.delete("tiny")
    await until(cluster_fleet, lambda: handle.leaving)
    assert list(cluster_fleet.trainers(MODEL, 8)) == []
    assert cluster_fleet.model(MODEL) is None
    assert (await client.describe()).instance_id == worker.fake.instance_id
    await operator.let_go("tiny")
    await until_present(cluster_fleet, 0)


async def until_lost(handle: WorkerHandle) -> None:
    async with asyncio.timeout(START_SECONDS):
        while handle.running() is not None:
            await asyncio.sleep(0.01)


async def until_wanted(operator: StandInOperator, kind: str, name: str, *, other_than: str = "") -> str:
    async with asyncio.timeout(START_SECONDS):
        while (wanted := await operator.wanted_time(kind, name)) == other_than:
            await asyncio.sleep(0.05)
    return wanted


async def test_a_call_for_a_session_that_was_suspended_as_idle_wakes_it_once_for_each_suspension(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny")
    await operator.falls_asleep("tiny", "2026-01-02T03:04:05Z")
    await until(cluster_fleet, lambda: not cluster_fleet.trainers(MODEL, 1))
    handle = cluster_fleet.worker(worker.worker_id)
    await until_lost(handle)
    assert await operator.wanted_time("trainingsession", "tiny") == ""
    calls = [asyncio.create_task(handle.connection(START_SECONDS)) for _ in range(3)]
    first = await until_wanted(operator, "trainingsession", "tiny")
    assert "waking session tiny" in (handle.unavailable_reason or "")
    await operator.wakes("tiny")
    await asyncio.gather(*calls)
    await handle.connection(START_SECONDS)
    assert await operator.wanted_time("trainingsession", "tiny") == first
    await operator.falls_asleep("tiny", "2026-01-02T04:05:06Z")
    await until_lost(handle)
    with pytest.raises(WorkerUnavailable, match="waking session tiny"):
        await handle.connection(0.1)
    assert await until_wanted(operator, "trainingsession", "tiny", other_than=first) > first


async def test_a_new_model_wakes_a_session_before_another_one_is_made(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await running_session(cluster_fleet, operator, "tiny")
    await operator.falls_asleep("tiny", "2026-01-02T03:04:05Z")
    await until(cluster_fleet, lambda: not cluster_fleet.trainers(MODEL, 1))
    assert "waking session tiny" in await cluster_fleet.provide(MODEL, rank=1)
    await until_wanted(operator, "trainingsession", "tiny")


async def test_a_session_that_sleeps_without_a_free_place_is_not_woken_for_a_new_model(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await running_session(cluster_fleet, operator, "tiny")
    await operator.falls_asleep("tiny", "2026-01-02T03:04:05Z", used=8)
    await until(cluster_fleet, lambda: not cluster_fleet.trainers(MODEL, 1))
    await cluster_fleet.provide(MODEL, rank=1)
    assert await cluster_fleet.provide(MODEL, rank=1, sampling=True)
    await until_wanted(operator, "trainingsession", "tiny")


async def test_a_worker_that_still_stops_is_not_woken_by_our_own_polls(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny")
    handle = cluster_fleet.worker(worker.worker_id)
    await operator.falls_asleep("tiny", "2026-01-02T03:04:05Z", stops=False)
    await until(cluster_fleet, lambda: handle.asleep)
    await handle.connection(START_SECONDS)
    assert await operator.wanted_time("trainingsession", "tiny") == ""


async def test_a_session_past_its_deadline_does_not_hold_up_new_models(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    for name in ("old", "tiny"):
        await running_session(cluster_fleet, operator, name)
    await operator.falls_asleep("tiny", "2026-01-02T03:04:05Z")
    await operator.say("old", ready=False, message="The session has existed for 60 s.", reason="DeadlineExceeded")
    await until(cluster_fleet, lambda: not cluster_fleet.trainers(MODEL, 1))
    assert "waking session tiny" in await cluster_fleet.provide(MODEL, rank=1)


async def test_a_sample_wakes_a_session_beside_a_pool_without_replicas(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    await running_session(cluster_fleet, operator, "tiny")
    await operator.falls_asleep("tiny", "2026-01-02T03:04:05Z")
    await operator.apply_pool("fast", replicas=0)
    await until(cluster_fleet, lambda: bool(cluster_fleet._pools.pools) and not cluster_fleet.trainers(MODEL, 1))
    assert "waking session tiny" in await cluster_fleet.provide(MODEL, sampling=True)


async def test_a_new_model_keeps_its_session_from_an_idle_deletion(
    cluster_fleet: KubernetesFleet, operator: StandInOperator
) -> None:
    worker = await running_session(cluster_fleet, operator, "tiny", idle={"deleteAfterSeconds": 600})
    cluster_fleet.worker(worker.worker_id).note_bound()
    await until_wanted(operator, "trainingsession", "tiny")
