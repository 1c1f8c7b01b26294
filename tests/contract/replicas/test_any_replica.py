"""Two replicas: each knows at once what the other has answered, and a request to both at once runs once."""

from __future__ import annotations

import asyncio

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer
from tinsmith_rpc import worker_pb2
from tinsmith_server.services.accounts.keys import CACHE_SECONDS, Keys
from tinsmith_server.store.store import open_store

Replicas = tuple[TestedServer, TestedServer]

SUCCESS = {"reason": {"type": "success"}, "detail": None}


async def test_a_model_made_at_one_takes_work_and_answers_at_the_other_at_once(replicas: Replicas) -> None:
    first, second = replicas
    made = (await first.create_model(await second.session())).json()
    assert (await second.forward_backward(made["model_id"], 1)).status_code == 200
    assert (await first.result(f"{made['model_id']}:op:1")).status_code == 200
    assert (await second.result(made["request_id"])).json()["model_id"] == made["model_id"]


async def test_a_save_sent_to_one_and_polled_at_the_other_is_listed_by_both_at_once(replicas: Replicas) -> None:
    first, second = replicas
    model_id = await first.model()
    saved = await second.outcome(await first.save(model_id, 1, "a"))
    for server in (first, second):
        listed = (await server.client.get(f"/training_runs/{model_id}/checkpoints")).json()["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [saved["path"]]


async def test_a_key_works_everywhere_at_once_and_dies_everywhere_within_seconds(replicas: Replicas) -> None:
    assert CACHE_SECONDS <= 5
    made = await replicas[0].services.keys.create("ada", "laptop")
    headers = {"X-API-Key": made.secret}
    for server in replicas:
        assert (await server.client.get("/sessions", headers=headers)).status_code == 200
    await replicas[0].services.keys.revoke(made.record.key_id)
    await asyncio.sleep(CACHE_SECONDS)
    for server in replicas:
        assert (await server.client.get("/sessions", headers=headers)).status_code == 401


async def test_waiting_models_are_served_in_order_of_arrival_across_replicas(
    replicas: Replicas, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.training.placement.RECHECK_SECONDS", 0.1)
    first, second = replicas
    fleet.handles["tiny-1"]._slots = 1
    held = await first.model()
    waiting = []
    for server in (second, first, second, first):
        first.time.pass_seconds(1)
        waiting.append((await server.create_model(await server.session())).json()["model_id"])
    for ended in [held, *waiting[:-1]]:
        await first.post(f"/sessions/{ended.split(':', maxsplit=1)[0]}/finish", SUCCESS)
        await first.services.background.reap_now()
        following = waiting[[held, *waiting].index(ended)]
        assert (await second.result(f"{following}:op:0")).status_code == 200
    creations = [one.model_id for one in first.worker.operations.values() if one.kind == worker_pb2.CREATE_MODEL]
    assert creations == [held, *waiting]


async def test_only_one_of_several_new_replicas_creates_the_first_key(postgres_url: str) -> None:
    stores = [await open_store(postgres_url) for _ in range(4)]
    made = await asyncio.gather(*(Keys(store, None).create_first() for store in stores))
    keys = await stores[0].list_keys()
    for store in stores:
        await store.close()
    assert [key.record for key in made if key is not None] == list(keys)
    assert len(keys) == 1
