"""Rate limits of a key and quotas of a tenant: the tenant over a limit gets a reason, and others are served."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.server.fake_fleet import FakeFleet
from support.server.http_server import PROTOBUF, TestedServer, running_server, settings_for, training_body

pytestmark = pytest.mark.core

Start = Callable[..., AbstractAsyncContextManager[TestedServer]]


@pytest.fixture
def start(tmp_path: Path, fleet: FakeFleet) -> Start:
    def started(**settings: Any) -> AbstractAsyncContextManager[TestedServer]:
        return running_server(settings_for(tmp_path, poll_hold_seconds=0.1, **settings), fleet)

    return started


async def test_requests_over_the_rate_limit_get_a_retry_time_and_polls_do_not_count(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(requests_per_minute=3) as server:
        # However long the requests take.
        monkeypatch.setattr(server.services.admission.rates.requests, "_clock", lambda: 0.0)
        session = await server.session()
        assert (await server.create_model(session)).status_code == 200
        assert (await server.client.get("/sessions")).status_code == 200
        refused = await server.client.get("/sessions")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "20")
        assert "3 requests a minute (setting requests_per_minute)" in refused.json()["detail"]
        assert (await server.post("/session_heartbeat", {"session_id": session})).status_code == 200
        assert (await server.result(f"{session}:train:0:op:0")).status_code in {200, 408}


@pytest.mark.parametrize("compress", [bytes, zstandard.compress], ids=["plain", "zstd"])
async def test_training_tokens_over_the_rate_limit_delay_later_operations(
    start: Start, compress: Callable[[bytes], bytes]
) -> None:
    async with start(trained_tokens_per_minute=1) as server:
        model_id = await server.model()
        headers = PROTOBUF if compress is bytes else {**PROTOBUF, "content-encoding": "zstd"}
        first = await server.client.post(
            "/forward_backward", content=compress(training_body(model_id, 1)), headers=headers
        )
        assert first.status_code == 200
        refused = await server.forward_backward(model_id, 2, headers=PROTOBUF)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        assert "setting trained_tokens_per_minute" in refused.json()["detail"]


async def test_sampled_tokens_over_the_rate_hold_back_the_next_sample(start: Start) -> None:
    async with start(sampled_tokens_per_minute=1) as server:
        sampler = await server.sampler()
        submitted = (await server.sample(sampler, 0)).json()
        assert (await server.result(submitted["request_id"])).status_code == 200
        refused = await server.sample(sampler, 1)
        assert refused.status_code == 429
        assert "setting sampled_tokens_per_minute" in refused.json()["detail"]


async def test_a_model_more_than_a_tenant_may_hold_fails_in_its_future(start: Start) -> None:
    async with start(adapters_per_tenant=2) as server:
        session = await server.session()
        made = [await server.create_model(session, number) for number in range(3)]
        failed = await server.outcome(made[2])
        assert (
            "you have 2 models, and the limit is 2 (setting adapters_per_tenant, or your tenant's limit"
            in failed["error"]
        )
        assert (await server.create_model(session, 0)).json() == made[0].json()


async def test_operations_that_wait_beyond_the_limit_are_held_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.accounts.quotas.PATIENCE_SECONDS", 0.05)
    async with start(queued_operations_per_tenant=2) as server:
        model_id = await server.model()
        assert [(await server.forward_backward(model_id, number)).status_code for number in (1, 3)] == [200, 200]
        refused = await server.forward_backward(model_id, 4)
        assert refused.status_code == 429
        assert "setting queued_operations_per_tenant" in refused.json()["detail"]
        assert (await server.forward_backward(model_id, 2)).status_code == 200
        await server.services.inspection.refresh()
        assert (await server.forward_backward(model_id, 4)).status_code == 200


async def test_nothing_is_saved_beyond_the_bytes_of_a_tenants_checkpoints(start: Start) -> None:
    async with start(checkpoint_bytes_per_tenant=10) as server:
        model_id = await server.model()
        assert "path" in await server.outcome(await server.save(model_id, 1, "first"))
        failed = await server.outcome(await server.save(model_id, 2, "second"))
        assert "setting checkpoint_bytes_per_tenant" in failed["error"]
        deleted = await server.client.delete(f"/training_runs/{model_id}/checkpoints/weights/first")
        assert deleted.status_code == 200
        assert "path" in await server.outcome(await server.save(model_id, 3, "third"))


async def test_samples_beyond_those_that_a_tenant_may_have_in_flight_wait_at_the_client(start: Start) -> None:
    async with start(samples_per_tenant=2) as server:
        sampler = await server.sampler()
        taken = [(await server.sample(sampler, number)).json()["request_id"] for number in (0, 1)]
        refused = await server.sample(sampler, 2)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await server.result(taken[0])).status_code == 200
        assert (await server.sample(sampler, 2)).status_code == 200


async def test_a_cancelled_samples_place_is_free_also_where_its_sampler_cannot_be_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.CANCEL_SECONDS", 0.1)
    async with start(samples_per_tenant=1) as server:
        sampler = await server.sampler()
        taken = (await server.sample(sampler)).json()["request_id"]
        server.handle.down = "its machine is gone"
        assert (await server.post("/cancel_future", {"request_id": taken})).status_code == 408
        server.handle.down = None
        assert (await server.sample(sampler, 1)).status_code == 200
