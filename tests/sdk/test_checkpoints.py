"""Saves, loads, names and listings through the unmodified SDK."""

from __future__ import annotations

import tempfile
import urllib.request
from pathlib import Path

import pytest
import tinker
from safetensors.numpy import load_file
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.server.serve_process import API_KEY, ServedInstallation
from tinker import types
from tinker_cookbook import weights

from .conftest import MODEL

TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
DATA = [next_token_datum(TOKENS)]


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    model = client.create_lora_training_client(MODEL, rank=8, seed=1, user_metadata={"renderer_name": "qwen3"}).result()
    train(model, rounds=3)
    return model


@pytest.fixture
def rest(server: ServedInstallation) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=API_KEY)


def train(model: tinker.TrainingClient, rounds: int) -> None:
    for _ in range(rounds):
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step(adam())


def logprobs(model: tinker.TrainingClient) -> list[list[float]]:
    return exact_logprobs(model.forward(DATA, "cross_entropy").result())


def test_a_resumed_run_goes_on_bit_for_bit(client: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    path = model.save_state("middle").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for run in (model, resumed):
        train(run, rounds=2)
    assert logprobs(resumed) == logprobs(model)


def test_a_load_without_the_optimizer_restarts_it(client: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    path = model.save_state("weights-only").result().path
    fresh = client.create_training_client_from_state(path).result()
    assert logprobs(fresh) == logprobs(model)
    for run in (model, fresh):
        train(run, rounds=1)
    assert logprobs(fresh) != logprobs(model)


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_trap_24_the_deprecated_load_state_still_works(model: tinker.TrainingClient) -> None:
    before, path = logprobs(model), model.save_state("before").result().path
    train(model, rounds=2)
    assert logprobs(model) != before
    model.load_state_with_optimizer(path).result()
    assert logprobs(model) == before


def test_saves_in_a_pipeline_hold_the_state_of_their_place(
    client: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    expected = logprobs(model)
    saved = model.save_state("here")
    train(model, rounds=2)
    resumed = client.create_training_client_from_state(saved.result().path).result()
    assert logprobs(resumed) == expected


def test_a_taken_name_is_refused_and_overwrite_replaces_it(
    client: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    path = model.save_state("name").result().path
    train(model, rounds=1)
    with pytest.raises(tinker.RequestFailedError, match="exists already") as failure:
        model.save_state("name").result()
    assert failure.value.category == "user"
    newer = logprobs(model)
    assert model.save_state("name", overwrite=True).result().path == path
    assert logprobs(client.create_training_client_from_state(path).result()) == newer


def test_a_name_that_was_deleted_and_saved_again_samples_from_its_new_weights(
    client: tinker.ServiceClient, model: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    """By path, too: what a sampler has cached of a prompt belongs to the weights, not to their name."""
    tokens = types.ModelInput.from_ints(TOKENS * 8)
    path = model.save_weights_for_sampler("again").result().path
    assert path is not None
    older = client.create_sampling_client(path).result().compute_logprobs(tokens).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    train(model, rounds=2)
    assert model.save_weights_for_sampler("again").result().path == path
    newer = client.create_sampling_client(path).result().compute_logprobs(tokens).result()
    unnamed = model.save_weights_and_get_sampling_client().result()
    assert newer == unnamed.compute_logprobs(tokens).result() != older


def test_two_saves_of_one_name_in_a_pipeline_are_told_apart(model: tinker.TrainingClient) -> None:
    first, second = model.save_state("twice"), model.save_state("twice")
    first.result()
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        second.result()


def test_the_same_name_serves_a_state_and_a_sampler(model: tinker.TrainingClient, client: tinker.ServiceClient) -> None:
    state, sampler = model.save_state("final"), model.save_weights_for_sampler("final")
    assert state.result().path.endswith("/weights/final")
    path = sampler.result().path
    assert path is not None
    assert path.endswith("/sampler_weights/final")
    from_path = client.create_sampling_client(model_path=path).result()
    trainer = model.forward(DATA, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert from_path.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:] == pytest.approx(
        trainer, abs=1e-4
    )


def test_a_state_is_no_sampler_and_the_refusal_says_which_call_makes_one(
    model: tinker.TrainingClient, client: tinker.ServiceClient
) -> None:
    state, sampler = model.save_state("one").result().path, model.save_weights_for_sampler("one").result().path
    assert sampler is not None
    with pytest.raises(tinker.NotFoundError, match="is a training checkpoint; this needs one made by save_weights_for"):
        client.create_sampling_client(state).result()
    with pytest.raises(tinker.RequestFailedError, match="is a sampler checkpoint; this needs one made by save_state"):
        client.create_training_client_from_state(sampler).result()


@pytest.mark.parametrize("name", ["a/b", "a:b", ""], ids=["slash", "colon", "empty"])
def test_trap_16_a_name_that_no_path_can_hold_is_refused(model: tinker.TrainingClient, name: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match="name") as failure:
        model.save_state(name).result()
    assert failure.value.category == "user"


def test_a_checkpoint_that_does_not_exist_is_named(client: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    run = model.save_state("there").result().path.split("/")[2]
    with pytest.raises(tinker.RequestFailedError, match="nowhere"):
        client.create_training_client_from_state(f"tinker://{run}/weights/nowhere").result()


def test_a_truncated_checkpoint_is_refused(
    server: ServedInstallation, client: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    path = model.save_state("cut").result().path
    [weights] = server.data.glob(
        f"checkpoints/weights/{path.split('/')[2].replace(':', '.')}/*/adapter_model.safetensors"
    )
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(tinker.RequestFailedError, match="damaged"):
        client.create_training_client_from_state(path).result()


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_an_adapter_of_another_shape_does_not_load_into_a_model(
    client: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    path = model.save_state("rank-8").result().path
    other = client.create_lora_training_client(MODEL, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="rank 8"):
        other.load_state(path).result()


def test_listings_show_what_was_saved_and_deletes_remove_it(
    model: tinker.TrainingClient, rest: tinker.RestClient, server: ServedInstallation
) -> None:
    path = model.save_state("listed", ttl_seconds=7200, user_metadata={"step": "3"}).result().path
    run = path.split("/")[2]
    [checkpoint] = rest.list_checkpoints(run).result().checkpoints
    assert (checkpoint.checkpoint_id, checkpoint.checkpoint_type, checkpoint.tinker_path) == (
        "weights/listed",
        "training",
        path,
    )
    assert checkpoint.user_metadata == {"step": "3"}
    assert checkpoint.expires_at is not None
    assert (checkpoint.size_bytes or 0) > 10_000
    assert path in [item.tinker_path for item in rest.list_user_checkpoints().result().checkpoints]
    training_run = rest.get_training_run(run).result()
    assert (training_run.lora_rank, training_run.user_metadata) == (8, {"renderer_name": "qwen3"})
    rest.delete_checkpoint(run, "weights/listed").result()
    assert rest.list_checkpoints(run).result().checkpoints == []


def test_publish_ttl_and_weights_info(model: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = model.save_state("public").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    run = path.split("/")[2]
    assert rest.list_checkpoints(run).result().checkpoints[0].public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    [checkpoint] = rest.list_checkpoints(run).result().checkpoints
    assert not checkpoint.public
    assert checkpoint.expires_at is not None
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (MODEL, 8, True)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls transformers
def test_an_external_export_loads_in_plain_peft_with_the_same_logprobs(
    server: ServedInstallation, model: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = model.save_weights_external("export").result().path
    run = path.split("/")[2]
    urls = server.get(f"/api/v1/training_runs/{run}/checkpoints/external_weights/export/external_weights_urls").json()[
        "urls"
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, url in urls.items():
            with urllib.request.urlopen(url) as response:  # plain GET, no key
                (Path(folder) / name).write_bytes(response.read())
        base = AutoModelForCausalLM.from_pretrained(server.models[MODEL], dtype=torch.float32)
        peft_model = PeftModel.from_pretrained(base, folder)
        with torch.no_grad():
            logits = peft_model(torch.tensor([TOKENS[:-1]])).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(7), torch.tensor(TOKENS[1:])].tolist()
    assert model.forward(DATA, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == pytest.approx(
        expected, abs=1e-4
    )


def test_a_copy_goes_on_as_what_it_was_made_of(
    client: tinker.ServiceClient, model: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    source = model.save_state("to-copy").result().path
    copy = rest.copy_weights(source, "another-project").result()
    rest.delete_checkpoint_from_tinker_path(source).result()
    resumed = client.create_training_client_from_state_with_optimizer(copy).result()
    for run in (model, resumed):
        train(run, rounds=1)
    assert logprobs(resumed) == logprobs(model)


def test_the_cookbook_downloads_a_training_checkpoint_that_only_it_can_read(
    server: ServedInstallation, model: tinker.TrainingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an export that is encrypted for it alone, and that it deletes."""
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    path = model.save_state("to-download").result().path
    folder = Path(weights.download(tinker_path=path, output_dir=str(tmp_path / "adapter"), base_url=server.url))
    downloaded = load_file(folder / "adapter_model.safetensors")
    plain = model.save_weights_external("plain").result().path
    expected = load_file(
        Path(weights.download(tinker_path=plain, output_dir=str(tmp_path / "b"), base_url=server.url))
        / "adapter_model.safetensors"
    )
    assert downloaded.keys() == expected.keys()
    assert all((downloaded[name] == expected[name]).all() for name in expected)


def test_a_session_that_ended_refuses_new_work(server: ServedInstallation) -> None:
    session = server.post("/api/v1/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}).json()
    reason = {"reason": {"type": "success"}, "detail": None}
    assert server.post(f"/api/v1/sessions/{session['session_id']}/finish", reason).status_code == 200
    create = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    refused = server.post("/api/v1/create_model", create)
    assert refused.status_code == 410
    assert "finished" in refused.json()["detail"]
