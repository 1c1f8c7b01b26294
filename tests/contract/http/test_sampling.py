"""Sampling sessions and what a sample's parameters become."""

from __future__ import annotations

from typing import Any

import pytest
from support.server.fake_fleet import OTHER_MODEL
from support.server.http_server import TestedServer
from tinsmith_rpc import wire_pb2, worker_pb2

pytestmark = pytest.mark.core

TARGETS = {"data": [5, -1, 6, 7], "dtype": "int64", "shape": [2, 2]}
SPARSE_TARGETS = TARGETS | {"data": [5, 7], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 1]}


async def sent(server: TestedServer, **fields: Any) -> worker_pb2.SampleRequest:
    response = await server.sample(await server.sampler(), **fields)
    return server.worker.samples[response.json()["request_id"]]


async def save_for_sampler(server: TestedServer, model_id: str, seq_id: int, **fields: Any) -> dict[str, Any]:
    body = {"model_id": model_id, "seq_id": seq_id, "kind": "snapshot", **fields}
    return await server.outcome(await server.post("/save_weights_for_sampler", body))


@pytest.mark.core("POST /api/v1/asample", "POST /api/v1/create_sampling_session")
async def test_a_samples_parameters_reach_the_worker(server: TestedServer) -> None:
    params = {"max_tokens": 4, "seed": 2**64 - 1, "stop": ["x", "y"], "temperature": 0.0, "top_k": 5, "top_p": 0.9}
    request = await sent(server, num_samples=2, sampling_params=params, prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert (request.max_tokens, request.seed, list(request.stop_strings)) == (4, 2**64 - 1, ["x", "y"])
    assert (request.temperature, request.top_k, request.top_p) == (0.0, 5, 0.9)
    assert (request.num_samples, request.prompt_logprobs, request.prompt_logprobs_last_n) == (2, True, 2)
    assert request.prompt_tokens == b"\1\0\0\0\2\0\0\0\3\0\0\0"


async def test_target_tokens_reach_the_worker_in_the_layout_they_came_in(server: TestedServer) -> None:
    dense = (await sent(server, target_prompt_logprobs=TARGETS)).target_prompt_logprobs
    sparse = (await sent(server, target_prompt_logprobs=SPARSE_TARGETS)).target_prompt_logprobs
    assert (list(dense.shape), list(sparse.shape)) == ([2, 2], [2, 2])
    assert dense.dtype == sparse.dtype == wire_pb2.INT64
    assert memoryview(dense.dense).cast("q").tolist() == [5, -1, 6, 7]
    parts = (sparse.sparse_csr.values, sparse.sparse_csr.crow_indices, sparse.sparse_csr.col_indices)
    assert [memoryview(part).cast("q").tolist() for part in parts] == [[5, 7], [0, 1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({}, (False, [], [])),
        ({"stop": []}, (True, [], [])),
        ({"stop": "end"}, (True, ["end"], [])),
        ({"stop": [7, 9]}, (True, [], [7, 9])),
    ],
    ids=["absent", "empty", "one-string", "token-ids"],
)
async def test_an_absent_stop_is_not_an_empty_one(
    server: TestedServer, stop: dict[str, Any], expected: tuple[bool, list[str], list[int]]
) -> None:
    request = await sent(server, sampling_params=stop)
    assert (request.has_stop, list(request.stop_strings), list(request.stop_tokens)) == expected


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ({"topk_prompt_logprobs": 2.5}, "topk_prompt_logprobs"),
        ({"prompt_alt_tokens_k": "3"}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {"data": []}}, "target_prompt_logprobs.dtype"),
        ({"target_prompt_logprobs": TARGETS | {"dtype": "float32"}}, "target_prompt_logprobs.dtype"),
        ({"target_prompt_logprobs": TARGETS | {"data": [2**63]}}, "target_prompt_logprobs.data"),
        ({"target_prompt_logprobs": TARGETS | {"sparse_col_indices": [0]}}, "must be given together"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": ""}]}}, "'dmel' are not supported"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**31]}]}}, "outside 32 bits"),
        ({"prompt": 3}, "prompt"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**9}, "num_samples"),
        ({"sampling_params": {"temperature": None}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"stop": [-1]}}, "-1 is not a token id"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_sample_that_cannot_work_is_acknowledged_and_fails(
    server: TestedServer, fields: dict[str, Any], sentence: str
) -> None:
    failed = await server.outcome(await server.sample(await server.sampler(), **fields))
    assert failed["category"] == "user"
    assert sentence in failed["error"]


@pytest.mark.core("GET /api/v1/samplers/{sampling_session_id}", "POST /api/v1/save_weights_for_sampler")
async def test_a_sampler_on_saved_weights_samples_from_them(server: TestedServer) -> None:
    path = (await save_for_sampler(server, await server.model(), 1, path="s1"))["path"]
    body = {"session_id": await server.session(), "sampling_session_seq_id": 0, "model_path": path}
    opened = (await server.post("/create_sampling_session", body)).json()["sampling_session_id"]
    assert (await server.client.get(f"/samplers/{opened}")).json() == {
        "sampler_id": opened,
        "base_model": "org/tiny",
        "model_path": path,
    }
    submitted = (await server.sample(opened)).json()["request_id"]
    adapter = server.worker.samples[submitted].adapter
    assert adapter.directory == server.worker.events[-1].checkpoint_saved.directory


@pytest.mark.core("durability 11")
async def test_a_sampler_is_gone_when_its_weights_were_deleted(server: TestedServer) -> None:
    model_id = await server.model()
    path = (await save_for_sampler(server, model_id, 1, path="s1"))["path"]
    body = {"session_id": await server.session(), "sampling_session_seq_id": 0, "model_path": path}
    opened = (await server.post("/create_sampling_session", body)).json()["sampling_session_id"]
    await server.client.delete(f"/training_runs/{model_id}/checkpoints/sampler_weights/s1")
    gone = await server.sample(opened)
    assert (gone.status_code, gone.json()["detail"].partition(";")[0]) == (
        410,
        f"{path} was deleted, overwritten or has expired since its sampling client was created",
    )


async def test_an_unnamed_save_opens_a_session_on_its_weights(server: TestedServer) -> None:
    model_id = await server.model()
    opened = (await save_for_sampler(server, model_id, 1, sampling_session_seq_id=4))["sampling_session_id"]
    await save_for_sampler(server, model_id, 2, sampling_session_seq_id=5)
    submitted = (await server.sample(opened)).json()["request_id"]
    adapter = server.worker.samples[submitted].adapter
    assert adapter.directory == server.worker.events[0].checkpoint_saved.directory
    assert (await server.client.get("/checkpoints")).json()["checkpoints"] == []


async def test_inflight_sessions_move_to_the_newest_inflight_save(server: TestedServer) -> None:
    model_id = await server.model()
    first = await save_for_sampler(server, model_id, 1, sampling_session_seq_id=0, kind="inflight")
    await save_for_sampler(server, model_id, 2, sampling_session_seq_id=1, kind="inflight")
    await save_for_sampler(server, model_id, 3, sampling_session_seq_id=2, kind="snapshot")
    submitted = (await server.sample(first["sampling_session_id"])).json()["request_id"]
    adapter = server.worker.samples[submitted].adapter
    assert adapter.directory == server.worker.events[1].checkpoint_saved.directory


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ({"base_model": "org/none"}, 422),
        ({"model_path": "tinker://sess-none:train:0/sampler_weights/x"}, 404),
        ({"model_path": "tinker://sess-none:train:0/weights/x"}, 404),
        ({}, 422),
        ({"base_model": OTHER_MODEL, "model_path": "tinker://a/sampler_weights/b"}, 404),
    ],
)
async def test_a_sampler_on_nothing_is_refused(server: TestedServer, source: dict[str, str], status: int) -> None:
    body = {"session_id": await server.session(), "sampling_session_seq_id": 0, **source}
    assert (await server.post("/create_sampling_session", body)).status_code == status


@pytest.mark.core("POST /api/v1/cancel_future")
async def test_a_sample_can_be_cancelled_and_a_training_operation_cannot(server: TestedServer) -> None:
    submitted = (await server.sample(await server.sampler())).json()["request_id"]
    assert (await server.post("/cancel_future", {"request_id": submitted})).status_code == 200
    assert server.worker.cancelled == [submitted]
    operation = f"{await server.model()}:op:0"
    assert (await server.post("/cancel_future", {"request_id": operation})).status_code == 422


async def test_a_worker_that_restarts_pushes_samples_back_without_losing_them(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.CONNECT_SECONDS", 0.01)
    sampler = await server.sampler()
    server.handle.down = "the worker is restarting"
    assert (await server.sample(sampler)).status_code == 429
    server.handle.down = None
    assert (await server.sample(sampler)).status_code == 200
