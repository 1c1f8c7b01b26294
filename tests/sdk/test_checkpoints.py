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


def test_a_resumed_run_continues_bit_for_bit(client: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    path = model.save_state("middle").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for run in (model, resumed):
        train(run, rounds=2)
    assert logprobs(resumed) == logprobs(model)


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


def test_a_name_that_was_deleted_and_saved_again_samples_from_its_new_weights(
    client: tinker.ServiceClient, model: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    """A sampler's prompt cache belongs to the weights, not to their name, so a path works too."""
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


def test_listings_show_saved_checkpoints_and_deletes_remove_them(
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


def test_a_copy_continues_exactly_as_its_source(
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
    """The export is encrypted for the cookbook alone, which deletes it afterwards."""
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
