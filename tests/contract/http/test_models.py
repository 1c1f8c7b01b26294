"""Creation and loading of models, and what becomes of them when their worker does not play along."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zstandard
from support.engine.graphs import node, ref, written
from support.server.fake_fleet import ALIAS, BASE_MODEL, OTHER_MODEL
from support.server.fake_worker import proto_result
from support.server.http_server import PROTOBUF, TestedServer, training_body
from tinsmith_rpc import worker_pb2
from tinsmith_server.store.store import open_store

pytestmark = pytest.mark.core


@pytest.mark.core("POST /api/v1/get_info", "POST /api/v1/create_model")
async def test_get_info_names_the_base_model_as_the_client_knows_it(server: TestedServer) -> None:
    made = (await server.create_model(await server.session(), base_model=ALIAS, lora_config={"rank": 4})).json()
    info = (await server.post("/get_info", {"model_id": made["model_id"]})).json()
    assert info == {
        "model_id": made["model_id"],
        "model_data": {"arch": "TinyForCausalLM", "model_name": ALIAS, "tokenizer_id": ALIAS},
        "model_name": ALIAS,
        "is_lora": True,
        "lora_rank": 4,
        "optimizer_config": {"type": "adamw"},
        "type": "get_info",
    }


async def test_a_new_model_of_any_rank_gets_the_servers_alpha(server: TestedServer) -> None:
    made = (await server.create_model(await server.session(), lora_config={"rank": 4, "seed": -7})).json()
    await server.result(made["request_id"])
    lora = worker_pb2.CreateModel.FromString(server.worker.payload(made["model_id"], 0)).lora
    assert (lora.rank, lora.alpha, lora.seed, lora.train_unembed) == (4, 32.0, -7, True)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"base_model": "org/none"}, "does not serve the base model 'org/none'; it serves org/tiny"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "the optimizer 'dimuon' is not supported: the vendor"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank is 0: this server trains LoRA adapters, not all weights"),
        ({"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}}, "at least one of"),
        ({"lora_config": {"seed": 2**63}}, "lora_config.seed"),
        ({"user_metadata": {"k": 1}}, "user_metadata.k"),
    ],
    ids=["base-model", "optimizer", "rank", "modules", "seed", "metadata"],
)
async def test_a_model_that_cannot_be_made_is_acknowledged_and_fails(
    server: TestedServer, fields: dict[str, object], sentence: str
) -> None:
    failed = await server.outcome(await server.create_model(await server.session(), **fields))
    assert failed["category"] == "user"
    assert sentence in failed["error"]
    assert server.worker.operations == {}


async def test_a_model_that_the_worker_refuses_fails_and_so_does_work_for_it(server: TestedServer) -> None:
    server.worker.create_failure = "rank 512 is above the limit of 64"
    made = await server.create_model(await server.session())
    assert (await server.outcome(made))["error"] == "rank 512 is above the limit of 64"
    late = await server.outcome(await server.forward_backward(made.json()["model_id"], 1))
    assert late["error"] == "rank 512 is above the limit of 64"


async def test_a_refused_model_has_failed_and_holds_no_place_although_its_client_does_not_ask(
    server: TestedServer,
) -> None:
    server.worker.create_failure = "rank 512 is above the limit of 64"
    model_id = (await server.create_model(await server.session())).json()["model_id"]
    await server.services.binding.wait_until_bound(await server.services.models.owned("default", model_id), 10)
    await server.services._events.drain(server.handle.worker_id)
    run = (await server.client.get(f"/training_runs/{model_id}")).json()
    assert (run["state"], run["failure"]) == ("failed", "rank 512 is above the limit of 64")
    queue = await server.services._store.placement_queue([run["base_model"]], [server.handle.worker_id])
    assert queue.holders == ()


async def test_a_model_directory_that_cannot_be_loaded_fails_the_model_with_the_workers_sentence(
    server: TestedServer,
) -> None:
    server.handle.down, server.handle.unloadable = "model.safetensors is truncated", True
    failed = await server.outcome(await server.create_model(await server.session()))
    assert failed == {
        "error": "org/tiny cannot be served: model.safetensors is truncated",
        "category": "server",
    }


async def test_a_model_is_corrupted_and_says_so_when_its_worker_lost_its_volume(server: TestedServer) -> None:
    model_id = await server.model()
    server.worker.lose_volume()
    failed = await server.outcome(await server.forward_backward(model_id, 1))
    assert failed["category"] == "server"
    assert "lost its volume" in failed["error"]
    assert (await server.client.get(f"/training_runs/{model_id}")).json()["corrupted"] is True


@pytest.mark.core("POST /api/v1/load_weights")
async def test_loading_takes_the_lora_settings_of_the_checkpoint(server: TestedServer) -> None:
    path = (await server.outcome(await server.save(await server.model(), 1, "ck")))["path"]
    body = {"session_id": await server.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    made = (await server.post("/load_weights", body)).json()
    await server.result(made["request_id"])
    load = worker_pb2.LoadWeights.FromString(server.worker.payload(made["model_id"], 0))
    assert (load.create, load.with_optimizer, load.tinker_path) == (True, True, path)
    assert load.directory.startswith("runs/1-")


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        ("tinker://sess-none:train:0/weights/x", {}, "there is no checkpoint tinker://sess-none:train:0/weights/x"),
        ("tinker://a/weights/x/y", {}, "is not a checkpoint path"),
        ("tinker://{run}/sampler_weights/ck", {}, "this needs one made by save_state"),
        ("tinker://{run}/weights/ck", {"base_model": OTHER_MODEL}, "it cannot be loaded onto org/other"),
        ("tinker://{run}/weights/ck", {"optimizer_config": {"type": "dimuon"}}, "'dimuon' is not supported"),
    ],
    ids=["missing", "malformed", "kind", "base-model", "optimizer"],
)
async def test_a_load_that_cannot_work_fails_its_future(
    server: TestedServer, path: str, fields: dict[str, object], sentence: str
) -> None:
    run = await server.model()
    await server.outcome(await server.save(run, 1, "ck"))
    body = {"session_id": await server.session(), "model_seq_id": 0, "optimizer": False, **fields}
    failed = await server.outcome(await server.post("/load_weights", {**body, "path": path.format(run=run)}))
    assert failed["category"] == "user"
    assert sentence in failed["error"]


async def test_an_epoch_raised_behind_an_acknowledgement_makes_the_server_submit_again(server: TestedServer) -> None:
    model_id = await server.model()
    other_replica = await open_store(server.services.settings.store_url)

    async def usurp() -> None:
        server.worker.before_ack = None
        assert await other_replica.raise_epoch("tiny-1", server.worker.epoch, server.worker.instance_id)

    server.worker.before_ack = usurp
    assert (await server.forward_backward(model_id, 1)).status_code == 200
    assert [submit.epoch for submit in server.worker.submits if submit.seq_id == 1] == [1, 2]
    await other_replica.close()


async def test_a_large_result_is_announced_by_its_size_first(server: TestedServer) -> None:
    model_id = await server.model()
    await server.forward_backward(model_id, 1)
    server.worker.outcomes[model_id, 1] = proto_result(bytes(100_000))
    request_id = f"{model_id}:op:1"
    ask = {"request_id": request_id, "allow_metadata_only": True}
    announced = (await server.post("/retrieve_future", ask)).json()
    assert announced == {"status": "complete_metadata", "response_payload_size": 100_000}
    assert len((await server.result(request_id)).content) == 100_000


@pytest.mark.core("POST /api/v1/check_needs")
async def test_a_creation_is_refused_if_the_model_does_not_meet_its_needs(server: TestedServer) -> None:
    await server.services.inspection.refresh()
    asked = {"model": BASE_MODEL, "context": 2048, "audio": True}
    unmet = (await server.post("/check_needs", asked)).json()["unmet"]
    assert unmet == [
        f"{BASE_MODEL} has a context of 1024 tokens, and the program needs 2048",
        f"{BASE_MODEL} does not take audio",
    ]
    metadata = {"tinsmith-needs": json.dumps(asked)}
    made = (await server.create_model(await server.session(), user_metadata=metadata)).json()
    assert (await server.result(made["request_id"])).json() == {"error": "; ".join(unmet), "category": "user"}
    assert (await server.post("/check_needs", {"model": BASE_MODEL, "context": 1024})).json() == {"unmet": []}
    other = (await server.post("/check_needs", {"model": "org/none"})).json()["unmet"]
    assert other[0].startswith("this server does not serve the base model 'org/none'")
    for body in ({"contxt": 1, "model": BASE_MODEL}, {"context": 1}):
        assert (await server.post("/check_needs", body)).status_code == 422


async def test_a_name_with_a_context_length_is_that_of_the_served_model(server: TestedServer) -> None:
    session_id = await server.session()
    made = (await server.create_model(session_id, base_model=f"{BASE_MODEL}:peft:1024")).json()
    assert (await server.result(made["request_id"])).status_code == 200
    info = (await server.post("/get_info", {"model_id": made["model_id"]})).json()
    assert info["model_data"]["model_name"] == BASE_MODEL
    longer = (await server.create_model(session_id, 1, base_model=f"{BASE_MODEL}:peft:2048")).json()
    refused = (await server.result(longer["request_id"])).json()
    assert f"{BASE_MODEL} is served with a context of 1024 tokens" in refused["error"]


async def test_operations_with_an_impossible_number_are_refused(server: TestedServer) -> None:
    model_id = await server.model()
    body = b"\x0a" + bytes([len(model_id)]) + model_id.encode() + b"\x10" + b"\xff" * 9 + b"\x7f"
    for response in (
        await server.client.post("/forward_backward", content=body, headers=PROTOBUF),
        await server.post("/optim_step", {"model_id": model_id, "seq_id": 2**62}),
    ):
        assert response.status_code == 422
        assert "seq_id must be a number from 1 to 2**60, not " in response.text


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
async def test_stable_reinforce_is_mapped_aloud(server: TestedServer, encoding: str) -> None:
    model_id = await server.model()
    body = training_body(model_id, 1, loss_fn="stable_reinforce")
    content = zstandard.compress(body) if encoding == "zstd" else body
    headers = {**PROTOBUF, "content-encoding": encoding}
    response = await server.client.post("/forward_backward", content=content, headers=headers)
    assert "cispo" in response.headers["x-deprecation-note"]
    assert "x-deprecation-note" not in (await server.forward_backward(model_id, 2)).headers


@pytest.mark.parametrize(
    "fields",
    [{"base_model": OTHER_MODEL, "lora_config": {"rank": "many"}}, {"base_model": "org/unknown"}],
    ids=["rank", "model"],
)
async def test_a_refused_model_is_logged_with_its_reason(
    server: TestedServer, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    await server.create_model(await server.session(), **fields)
    output = capsys.readouterr().out
    (line,) = [line for line in output.splitlines() if "model refused" in line]
    assert f"base_model={fields['base_model']}" in line
    assert "reason=" in line
    assert "model accepted" not in output


@pytest.mark.core("POST /api/v1/create_custom_loss")
async def test_equal_custom_losses_have_one_id_and_belong_to_a_session_of_the_tenant(server: TestedServer) -> None:
    session = await server.session()
    loss = written(node("loss", "sum", ref("logprobs"), op="call_method"))
    made = [
        await server.outcome(
            await server.post("/create_custom_loss", {"session_id": session, "custom_loss_seq_id": number, **loss})
        )
        for number in range(2)
    ]
    assert made[0]["loss_id"] == made[1]["loss_id"]
    unknown = await server.post("/create_custom_loss", {"session_id": "sess-none", "custom_loss_seq_id": 0, **loss})
    assert unknown.status_code == 404
