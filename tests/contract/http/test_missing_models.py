"""Models that their worker does not hold: not yet, not any more, or only for a moment."""

from __future__ import annotations

import asyncio

import pytest
from support.server.fake_worker import json_result
from support.server.http_server import TestedServer, one_server
from tinsmith_rpc import worker_pb2
from tinsmith_server.fleet.base import WorkerClient
from tinsmith_server.services.training import operations

pytestmark = pytest.mark.core


async def test_work_that_overtakes_its_models_creation_is_sent_again_and_costs_nothing(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "PATIENCE_SECONDS", 0)
    waiting, loaded = asyncio.Event(), asyncio.Event()
    connect = server.handle.connection

    async def connection_after_loading(timeout_seconds: float) -> WorkerClient:
        monkeypatch.setattr(server.handle, "connection", connect)
        waiting.set()
        await loaded.wait()
        return await connect(timeout_seconds)

    monkeypatch.setattr(server.handle, "connection", connection_after_loading)
    made = (await server.create_model(await server.session())).json()
    await waiting.wait()
    early = await server.forward_backward(made["model_id"], 1)
    assert (early.status_code, server.worker.submits) == (503, [])
    assert "is not ready yet" in early.json()["detail"]
    loaded.set()
    assert (await server.result(made["request_id"])).status_code == 200
    assert (await server.forward_backward(made["model_id"], 1)).status_code == 200


@pytest.mark.parametrize(
    "creation",
    [
        worker_pb2.AwaitReply(pending=worker_pb2.Pending()),
        json_result({}),
        worker_pb2.AwaitReply(gone=worker_pb2.Gone()),
    ],
    ids=["pending", "result", "gone"],
)
async def test_a_creation_that_the_worker_knows_is_not_lost(
    server: TestedServer, creation: worker_pb2.AwaitReply
) -> None:
    models = server.services.models
    model = await models.owned("default", await server.model())
    assert (await models.settle_missing(model, creation)).state == "bound"


async def test_a_model_that_its_worker_has_never_got_is_not_lost(server: TestedServer) -> None:
    server.handle.down = "the worker is starting"
    made = (await server.create_model(await server.session())).json()
    models = server.services.models
    model = await models.owned("default", made["model_id"])
    not_found = worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
    assert (await models.settle_missing(model, not_found)).state == "accepted"


@one_server
async def test_work_refused_by_a_worker_that_has_the_model_again_is_sent_again(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await server.model()
    create = server.worker.operations.pop((model_id, 0))
    connect = server.handle.connection

    async def connection_after_recovery(timeout_seconds: float) -> WorkerClient:
        if len(server.worker.submits) > 1:
            server.worker.operations[model_id, 0] = create
        return await connect(timeout_seconds)

    monkeypatch.setattr(server.handle, "connection", connection_after_recovery)
    assert [(await server.forward_backward(model_id, 1)).status_code for _ in range(2)] == [503, 200]
