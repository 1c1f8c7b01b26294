"""The whole server over sessions of a real Kubernetes API: what a client sees while sessions come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from support.server.fleet_under_test import until_present
from support.server.http_server import API_KEY, TestedServer, running_server
from support.server.operator_stand_in import FINALIZER, MODEL, StandInOperator
from tinsmith_server.app import create_app
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.settings import Settings


@pytest.fixture
async def settings(cluster_settings: Settings, operator: StandInOperator, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("tinsmith_server.services.training.placement.RECHECK_SECONDS", 0.1)
    monkeypatch.setattr("tinsmith_server.services.training.binding.RETRY_SECONDS", 0.1)
    await operator.apply_template("tiny", adapters={"slots": 1})
    return cluster_settings.model_copy(update={"poll_hold_seconds": 1.0})


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[TestedServer]:
    changed = Settings(**{**settings.model_dump(), "api_key": API_KEY})
    async with running_server(changed, KubernetesFleet(changed)) as server:
        yield server


async def until_answered(server: TestedServer, request_id: str) -> httpx.Response:
    while (answer := await server.result(request_id)).status_code == 408:
        pass
    return answer


async def until_session(operator: StandInOperator, name: str) -> None:
    await operator.kubectl("wait", f"trainingsession/{name}", "--for=create", "--timeout=30s")


async def test_a_model_is_placed_at_once_on_a_warm_session_and_on_none_that_is_retired(
    settings: Settings, operator: StandInOperator
) -> None:
    await operator.apply_template("tiny", maxSessions=2, adapters={"slots": 1})
    for name in ("tiny-1", "tiny-2"):
        await operator.apply_from_template(name, "tiny")
        await operator.run(name)
    await operator.kubectl("annotate", "trainingsession", "tiny-1", "tinsmith.dev/retired-at=2026-01-01T00:00:00Z")
    async with serving(settings) as server:
        first = (await server.create_model(await server.session())).json()
        placed = await server.result(first["request_id"])
        assert (placed.status_code, placed.json()["model_id"]) == (200, first["model_id"])
        used = {name for name, worker in operator.workers.items() if worker.fake.operations}
        assert used == {"tiny-2"}


async def test_a_model_waits_for_the_session_that_is_made_for_it_and_then_for_its_slot(
    settings: Settings, operator: StandInOperator
) -> None:
    async with serving(settings) as server:
        first = (await server.create_model(await server.session())).json()
        await until_session(operator, "tiny-1")
        waiting = await server.result(first["request_id"])
        assert (waiting.status_code, waiting.json()["queue_state"]) == (408, "paused_capacity")
        assert f"TrainingSession {operator.title('tiny-1')} is" in waiting.json()["queue_state_reason"]
        await operator.run("tiny-1")
        assert (await until_answered(server, first["request_id"])).json()["model_id"] == first["model_id"]

        second = (await server.create_model(await server.session())).json()
        waiting = await server.result(second["request_id"])
        while f"TrainingSession {operator.title('tiny-1')} is" in waiting.json()["queue_state_reason"]:
            waiting = await server.result(second["request_id"])  # what was said to the first one stands for a moment
        reason = waiting.json()["queue_state_reason"]
        assert reason.startswith("waiting for one of 1 places of org/tiny; 1 held by your session ")
        assert "raise spec.maxSessions" in reason
        assert await operator.session_names() == ["tiny-1"]


async def test_results_and_models_outlive_the_server_and_a_suspension(
    settings: Settings, operator: StandInOperator
) -> None:
    await operator.apply("own")
    worker = await operator.run("own")
    async with serving(settings) as server:
        model_id = await server.model()
        assert (await server.forward_backward(model_id, 1)).status_code == 200
    async with serving(settings) as server:
        assert (await until_answered(server, f"{model_id}:op:1")).status_code == 200
        await operator.suspend("own")
        worker.fake.lose_memory()
        while "is suspended" not in (await server.result(f"{model_id}:op:1")).text:
            pass
        held = await server.result(f"{model_id}:op:1")
        assert (held.status_code, held.json()["queue_state"]) == (408, "paused_capacity")
        await operator.resume("own")
        assert (await until_answered(server, f"{model_id}:op:1")).status_code == 200
        assert (await server.forward_backward(model_id, 2)).status_code == 200


async def test_a_volume_that_is_gone_corrupts_its_models_with_the_cure(
    settings: Settings, operator: StandInOperator
) -> None:
    await operator.apply("own")
    worker = await operator.run("own")
    async with serving(settings) as server:
        model_id = await server.model()
        await operator.delete("own")
        await operator.until_gone("trainingsession", "own")
        await worker.stop()
        await server.services.background.write_off_now()
        assert (await server.client.get(f"/training_runs/{model_id}")).json()["corrupted"] is False
        await operator.kubectl("delete", "persistentvolumeclaim", "own-journal")
        await operator.until_gone("persistentvolumeclaim", "own-journal")
        await until_present(server.fleet, 0)
        await server.services.background.write_off_now()
        failed = await server.outcome(await server.forward_backward(model_id, 1))
        assert failed["category"] == "server"
        assert (
            f"the volume of TrainingSession {operator.title('own')} was deleted; its checkpoints are kept"
            in failed["error"]
        )


async def test_the_settings_choose_the_fleet(settings: Settings) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        assert [model.model_name for model in app.state.services.capabilities.supported_models()] == [MODEL]
        assert await app.state.services.readiness.problem() is None


async def test_a_session_deleted_with_its_volume_leaves_its_models_as_checkpoints(
    settings: Settings, operator: StandInOperator
) -> None:
    await operator.apply("own", finalizers=(FINALIZER,), storage={"retentionPolicy": {"whenDeleted": "Delete"}})
    await operator.run("own")
    async with serving(settings) as server:
        model_id = await server.model()
        await operator.delete("own")
        while not (listed := (await server.client.get(f"/training_runs/{model_id}/checkpoints")).json()["checkpoints"]):
            await server.services.background.reap_now()
        assert [one["checkpoint_id"] for one in listed] == ["weights/autosave"]
        await operator.let_go("own")
        while (answer := await server.result(f"{model_id}:op:0")).status_code != 410:
            await asyncio.sleep(0.01)
        assert f"TrainingSession {operator.namespace}/own was deleted" in answer.json()["detail"]
        assert f"resume from tinker://{model_id}/weights/autosave" in answer.json()["detail"]
