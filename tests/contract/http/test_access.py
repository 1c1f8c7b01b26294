"""Access of keys, isolation of tenants, and answers to unknown calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.server.fake_fleet import BASE_MODEL, FakeFleet
from support.server.http_server import API_KEY, TestedServer, one_server, running_server, settings_for
from tinsmith_rpc import CUSTOM_LOSS

pytestmark = pytest.mark.core


async def other_tenant(server: TestedServer) -> dict[str, str]:
    made = await server.services.keys.create("other", "theirs")
    return {"X-API-Key": made.secret}


@one_server
@pytest.mark.parametrize("key", [None, "tml-unknown", "nonsense"])
async def test_no_key_and_unknown_keys_are_401(server: TestedServer, key: str | None) -> None:
    headers = {"X-API-Key": key} if key else {"X-API-Key": ""}
    for path in ("/client/config", "/create_session", "/retrieve_future", "/asample", "/auth/token"):
        assert (await server.post(path, headers=headers)).status_code == 401


async def test_a_revoked_key_is_401(tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_server.services.accounts.keys.CACHE_SECONDS", 0.0)
    async with running_server(settings_for(tmp_path), fleet) as server:
        made = await server.services.keys.create("other", "theirs")
        headers = {"X-API-Key": made.secret}
        assert (await server.post("/client/config", headers=headers)).status_code == 200
        await server.services.keys.revoke(made.record.key_id)
        assert (await server.post("/client/config", headers=headers)).status_code == 401


@one_server
async def test_a_worker_gets_the_tenant_of_each_call(server: TestedServer) -> None:
    model_id, sampler = await server.model(), await server.sampler()
    await server.forward_backward(model_id, 1)
    await server.sample(sampler)
    assert server.worker.tenants == ["default"] * 3
    other_session = await server.session(headers=await other_tenant(server))
    body = {"session_id": other_session, "model_seq_id": 0, "base_model": BASE_MODEL}
    made = await server.post("/create_model", body, headers=await other_tenant(server))
    await server.result(made.json()["request_id"], headers=await other_tenant(server))
    assert server.worker.tenants[3:] == ["other"]


@pytest.mark.core(
    "POST /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "DELETE /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
)
async def test_a_published_checkpoint_is_readable_by_all_and_changed_by_its_owner_only(server: TestedServer) -> None:
    model_id = await server.model()
    path = (await server.outcome(await server.save(model_id, 1, "ck")))["path"]
    headers = await other_tenant(server)
    publish = f"/training_runs/{model_id}/checkpoints/weights/ck/publish"
    await server.client.post(publish)
    assert (await server.post("/weights_info", {"tinker_path": path}, headers=headers)).status_code == 200
    assert (await server.client.delete(publish, headers=headers)).status_code == 404
    assert (await server.client.delete(publish)).status_code == 200
    assert (await server.post("/weights_info", {"tinker_path": path}, headers=headers)).status_code == 404


async def test_a_first_key_is_made_once_and_kept_only_as_a_hash(tmp_path: Path, fleet: FakeFleet) -> None:
    settings = settings_for(tmp_path, api_key=None)
    async with running_server(settings, fleet) as server:
        secret = server.app.state.first_key.secret
    assert secret.encode() not in b"".join(file.read_bytes() for file in tmp_path.glob("tinsmith.db*"))
    async with running_server(settings, fleet, key=secret) as server:
        assert server.app.state.first_key is None
        assert (await server.post("/client/config")).status_code == 200


@pytest.mark.core("POST /api/v1/client/config", "POST /api/v1/client/dynamic_config")
async def test_the_flags_that_clients_hear(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, compress_training_bodies=True), fleet) as server:
        config = (await server.post("/client/config", {"sdk_version": "0.38.0"})).json()
        assert config["proto_compress_fwdbwd"] is True
        assert config["pjwt_auth_enabled"] is False
        assert config["custom_loss_server_side"] is True
        # Without these SDKs from 0.19 to 0.24 send training data as JSON, and those from 0.22 on to another address.
        assert (config["proto_write_fwdbwd"], config["fwd_via_fwdbwd"]) == (True, True)
        server.worker.losses.remove(CUSTOM_LOSS)
        await server.model()  # a worker that runs is seen
        await server.services.inspection.refresh()
        assert (await server.post("/client/config")).json()["custom_loss_server_side"] is False
        assert (await server.post("/client/dynamic_config")).json() == {"sample_cancel_enabled": True}


@pytest.mark.core("GET /api/v1/get_server_capabilities")
async def test_capabilities_prefer_values_of_the_worker_to_the_configuration_of_the_model(server: TestedServer) -> None:
    before = (await server.client.get("/get_server_capabilities")).json()["supported_models"]
    known = {"model_name": "org/tiny", "max_context_length": 1024, "trainable": True, "sampleable": True}
    assert before[0] == known | {"audio": False, "optimizers": ["adamw"]}
    await server.model()
    server.worker.quantization, server.worker.stored_as, server.worker.numerics = "4bit", "mxfp4", "fast"
    await server.services.inspection.refresh()
    after = (await server.client.get("/get_server_capabilities")).json()["supported_models"]
    assert [model["max_context_length"] for model in after] == [512, 512, 1024]
    assert [model.get("images") for model in after] == [True, True, None]
    assert [model.get("quantization") for model in after] == ["4bit", "4bit", None]
    assert [model.get("stored_as") for model in after] == ["mxfp4", "mxfp4", None]
    assert [model.get("numerics") for model in after] == ["fast", "fast", None]


@one_server
@pytest.mark.core("GET /api/v1/healthz", "GET /metrics")
async def test_health_metrics_and_the_api_page_need_no_key(server: TestedServer) -> None:
    headers = {"X-API-Key": ""}
    assert (await server.client.get("/healthz", headers=headers)).json() == {"status": "ok"}
    metrics = await server.client.get("http://localhost/metrics", headers=headers)
    assert 'tinsmith_http_requests_total{route="/healthz",status="200"}' in metrics.text.replace("/api/v1", "")
    document = (await server.client.get("http://localhost/openapi.json", headers=headers)).json()
    body = document["paths"]["/api/v1/optim_step"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].rsplit("/", 1)[1] in document["components"]["schemas"]
    assert (await server.client.get("http://localhost/docs", headers=headers)).status_code == 200


@one_server
@pytest.mark.parametrize(
    "path", ["/health", "/api/v1/healthz", "/api/v1/readyz", "/metrics", "/", "/v1/models", "/no/such/page"]
)
async def test_head_is_answered_as_get_without_a_body(server: TestedServer, path: str) -> None:
    asked, headed = [await server.client.request(method, f"http://server{path}") for method in ("GET", "HEAD")]
    assert (headed.status_code, headed.content) == (asked.status_code, b"")
    assert headed.headers["content-type"] == asked.headers["content-type"]


@pytest.mark.core("GET /")
async def test_the_front_page_says_what_this_is_and_where_to_look(server: TestedServer) -> None:
    page = await server.client.get("http://server/", headers={"X-API-Key": ""})
    assert page.status_code == 200
    assert all(word in page.json()["detail"] for word in ("Tinsmith", "/docs", "tinsmith doctor"))


async def test_metrics_hold_no_ids_of_clients(server: TestedServer) -> None:
    model_id = await server.model()
    await server.forward_backward(model_id, 1)
    await server.services.inspection.refresh()
    text = (await server.client.get("http://server/metrics")).text
    assert "sess-" not in text
    assert 'tinsmith_queue_depth{base_model="org/tiny",worker="tiny-1"} 0.0' in text


async def test_no_log_line_holds_a_key(
    server: TestedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"event": "UNHANDLED_EXCEPTION", "error_type": f"Error-{API_KEY}", "traceback": f"x-api-key: {API_KEY}"}
    event["error_message"] = API_KEY
    await server.post("/telemetry", {"events": [event], "session_id": API_KEY})
    await server.model()
    output = capsys.readouterr()
    assert "client event" in output.out + output.err
    assert API_KEY not in output.out + output.err


@one_server
@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"a":', b"\xff"])
async def test_a_body_that_is_not_a_json_object_is_a_422(server: TestedServer, body: bytes) -> None:
    paths: dict[str, Any] = {"/create_session": 422, "/optim_step": 422, "/asample": 422, "/retrieve_future": 422}
    assert {path: (await server.client.post(path, content=body)).status_code for path in paths} == paths
