"""The wire format of earlier SDKs' requests and answers. `tests/sdk/test_generations.py` asks the SDKs."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for
from tinsmith_rpc import wire_pb2, worker_pb2

from .test_checkpoints import save_external

pytestmark = pytest.mark.core

DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2]}]},
    "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}},
}
JSON = {"accept": "application/json"}


def training(model_id: str, seq_id: int, *data: Any, key: str = "forward_backward_input") -> dict[str, Any]:
    """Return a training call with the fields in the order in which pydantic writes them."""
    return {key: {"data": list(data), "loss_fn": "cross_entropy"}, "model_id": model_id, "seq_id": seq_id}


@pytest.mark.parametrize(
    ("path", "key", "forward_only"),
    [("/forward_backward", "forward_backward_input", False), ("/forward", "forward_input", True)],
)
async def test_a_training_call_in_json_reaches_the_worker_in_protobuf(
    server: TestedServer, path: str, key: str, forward_only: bool
) -> None:
    model_id = await server.model()
    submitted = await server.post(path, training(model_id, 1, DATUM, key=key))
    assert submitted.json()["request_id"] == f"{model_id}:op:1"
    message = wire_pb2.ForwardBackwardRequest.FromString(server.worker.payload(model_id, 1))
    assert (message.forward_only, message.loss_fn, len(message.data)) == (forward_only, "cross_entropy", 1)


async def test_invalid_data_in_json_fails_its_future(server: TestedServer) -> None:
    model_id = await server.model()
    submitted = await server.post("/forward_backward", training(model_id, 1, DATUM, {"model_input": 1}))
    failed = await server.outcome(submitted)
    assert failed["category"] == "user"
    assert failed["error"].startswith("datum 1: model_input")


@pytest.mark.parametrize("body", [{}, {"seq_id": 1}, {"model_id": 1, "seq_id": 1}, {"model_id": "m", "seq_id": "1"}])
async def test_a_body_without_a_model_id_is_refused(server: TestedServer, body: dict[str, Any]) -> None:
    assert (await server.post("/forward_backward", body)).status_code == 422


async def test_a_result_is_protobuf_for_clients_that_accept_it_and_json_for_others(server: TestedServer) -> None:
    model_id = await server.model()
    request_id = (await server.forward_backward(model_id, 1)).json()["request_id"]
    in_protobuf = await server.result(request_id, headers={"accept": "application/x-protobuf, application/json"})
    assert in_protobuf.headers["content-type"] == "application/x-protobuf"
    in_json = await server.result(request_id, headers=JSON)
    assert in_json.headers["content-type"] == "application/json"
    assert in_json.json()["loss_fn_outputs"] == []


async def test_a_sample_is_read_and_answered_in_the_form_of_the_first_sdks(server: TestedServer) -> None:
    sampler = await server.sampler()
    submitted = await server.sample(sampler, prompt={"chunks": [{"tokens": [1, 2, 3]}]})
    answer = await server.result(submitted.json()["request_id"], headers=JSON)
    assert [one["stop_reason"] for one in answer.json()["sequences"]] == ["length"]


async def test_a_load_without_a_word_about_the_optimizer_restores_it(server: TestedServer) -> None:
    model_id = await server.model()
    path = (await server.outcome(await server.save(model_id, 1, "ck")))["path"]
    await server.outcome(await server.post("/load_weights", {"model_id": model_id, "seq_id": 2, "path": path}))
    assert worker_pb2.LoadWeights.FromString(server.worker.payload(model_id, 2)).with_optimizer


@pytest.mark.core("POST /api/v1/unload_model")
async def test_an_unloaded_model_is_over_and_says_so(server: TestedServer) -> None:
    model_id = await server.model()
    for _ in range(2):
        submitted = await server.post("/unload_model", {"model_id": model_id, "type": "unload_model"})
        assert await server.outcome(submitted) == {"model_id": model_id, "type": "unload_model"}
    assert (await server.services.models.owned("default", model_id)).state == "released"


@pytest.mark.parametrize(
    "address",
    [
        pytest.param(
            "/training_runs/{}/checkpoints",
            marks=pytest.mark.core("GET /api/v1/training_runs/{run_id}/checkpoints"),
        ),
        pytest.param("/models/{}/checkpoints", marks=pytest.mark.core("GET /api/v1/models/{run_id}/checkpoints")),
        "/checkpoints",
    ],
)
async def test_a_list_has_only_types_that_the_sdk_knows(server: TestedServer, address: str) -> None:
    """SDKs below 0.28 fail on the whole list for one unknown type."""
    model_id = await server.model()
    await server.outcome(await server.save(model_id, 1, "ck"))
    await save_external(server, model_id, 2, "ex")
    for version, expected in {"0.27.2": ["training"], "0.28.0": ["external", "training"]}.items():
        listed = await server.client.get(address.format(model_id), headers={"X-Stainless-Package-Version": version})
        assert sorted(one["checkpoint_type"] for one in listed.json()["checkpoints"]) == expected


async def test_an_archive_is_a_redirect_to_all_files_at_once(server: TestedServer) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 8, "empty": b""}
    server.worker.saved_files = files
    model_id = await server.model()
    await server.outcome(await server.save(model_id, 1, "ck"))
    address = f"/training_runs/{model_id}/checkpoints/weights/ck/archive"
    redirect = await server.client.get(address, follow_redirects=False)
    assert redirect.status_code == 302
    assert redirect.headers["expires"].endswith("GMT")
    url = urlsplit(redirect.headers["location"]).path
    fetched = await server.client.get(url.removeprefix("/api/v1"), headers={"X-API-Key": ""})
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(fetched.content))) as archive:
        assert {one.name: archive.extractfile(one).read() for one in archive} == files  # type: ignore[union-attr]
    assert (await server.client.get(url.removeprefix("/api/v1") + "x")).status_code == 404
    assert (await server.client.get(address.replace("ck", "nothing"))).status_code == 404


async def test_a_body_in_json_over_the_limit_is_refused_with_a_sentence(tmp_path: Path, fleet: FakeFleet) -> None:
    """The model's ID stands at its end, which is not read: so there is no future to fail."""
    async with running_server(settings_for(tmp_path, max_body_bytes=2**20), fleet) as server:
        model_id = await server.model()
        long = {"model_input": {"chunks": [{"tokens": [1] * 2**20}]}, "loss_fn_inputs": {}}
        refused = await server.post("/forward_backward", training(model_id, 1, long))
        assert (refused.status_code, "setting max_body_bytes" in refused.json()["detail"]) == (413, True)
