"""Adapters made elsewhere are imported by the command and by the calls of SDK 0.39, and are trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.server.serve_process import API_KEY, HTTP_OPTIONS, ServedInstallation
from tinker import types
from transformers import AutoModelForCausalLM

from .conftest import MODEL

# peft calls transformers
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
DATA = [next_token_datum(TOKENS)]
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def peft_adapter(server: ServedInstallation, tmp_path: Path) -> Path:
    """Return PEFT's folder of an adapter on only two projections, which is common."""
    base = AutoModelForCausalLM.from_pretrained(server.models[MODEL], dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logprobs_of_peft(server: ServedInstallation, adapter: Path) -> list[float]:
    base = AutoModelForCausalLM.from_pretrained(server.models[MODEL], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([TOKENS[:-1]])).logits[0], -1)
    return [float(scores[at, token]) for at, token in enumerate(TOKENS[1:])]


def logprobs(model: tinker.TrainingClient) -> list[list[float]]:
    return exact_logprobs(model.forward(DATA, "cross_entropy").result())


def run_import(server: ServedInstallation, adapter: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("tinsmith")
    command = [str(program), "import", str(adapter), "--base-model", MODEL, "--base-url", server.url]
    environment = {"TINKER_API_KEY": API_KEY, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def import_by_calls(server: ServedInstallation, files: dict[str, bytes], rank: int) -> httpx.Response:
    """Send the SDK's `external_weights_upload_start` and `_finish`, and a PUT for each file between them."""
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": API_KEY}, **HTTP_OPTIONS) as http:
        body = {"base_model": MODEL, "lora_config": {"rank": rank}}
        started = http.post("/external_weights_upload_start", json=body).raise_for_status().json()
        for name, url in started["urls"].items():
            httpx.put(url, content=files[name], **HTTP_OPTIONS).raise_for_status()
        return http.post("/external_weights_upload_finish", json={"upload_id": started["upload_id"]})


def export(server: ServedInstallation, model: tinker.TrainingClient, name: str) -> dict[str, bytes]:
    path = model.save_weights_external(name).result().path
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    urls = rest.get_external_weights_urls(path).result().urls
    return {file: httpx.get(url, **HTTP_OPTIONS).content for file, url in urls.items()}


def test_an_adapter_of_peft_comes_in_and_says_what_it_says_there(
    client: tinker.ServiceClient, server: ServedInstallation, peft_adapter: Path
) -> None:
    brought_in = run_import(server, peft_adapter)
    assert brought_in.returncode == 0, brought_in.stderr
    path = brought_in.stdout.strip()

    model = client.create_training_client_from_state(path).result()
    expected = logprobs_of_peft(server, peft_adapter)
    np.testing.assert_allclose(logprobs(model)[0], expected, atol=1e-4)
    sampler = client.create_sampling_client(model_path=path).result()
    sampled = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(sampled[1:], expected, atol=1e-4)

    model.forward_backward(DATA, "cross_entropy")
    model.optim_step(adam()).result()
    assert sum(logprobs(model)[0]) > sum(expected)


def test_an_adapter_that_leaves_and_comes_back_has_the_same_weights(
    client: tinker.ServiceClient, server: ServedInstallation, tmp_path: Path
) -> None:
    model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    model.forward_backward(DATA, "cross_entropy")
    model.optim_step(adam()).result()
    files = export(server, model, "leaves")

    path = import_by_calls(server, files, rank=8).raise_for_status().json()["tinker_path"]
    again = client.create_training_client_from_state(path).result()

    assert logprobs(again) == logprobs(model)
    tensors = []
    for name, content in (("one", files[FILES[1]]), ("two", export(server, again, "again")[FILES[1]])):
        (tmp_path / name).write_bytes(content)
        tensors.append(load_file(tmp_path / name))
    assert tensors[0].keys() == tensors[1].keys()
    assert all(np.array_equal(tensors[0][name], tensor) for name, tensor in tensors[1].items())
