"""`tinsmith serve --sampler vllm`: the worker trains, vLLM samples from its saves, and both are one server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import tinker
from support.client.doors import check_doors
from support.client.sdk import adam, next_token_datum, service_client
from support.server.serve_process import API_KEY, HTTP_OPTIONS, TESTS, ServedInstallation
from support.token_server.look_alikes import call, environment_with_look_alikes
from support.token_server.real_vllm import EXTRA, PLUGIN, SHAPE, installed_vllm, real_vllm_variables
from support.waiting import until
from tinker import types
from tinker_cookbook.weights import build_lora_adapter
from tinsmith_trainer.sampling.token_server.base import SOCKET_SCHEME, GenerationRequest
from tinsmith_trainer.sampling.token_server.vllm import drawn_by_vllm, vllm_request
from tinsmith_trainer.torch_model.tiny_model import Family, make_tiny_model
from transformers import AutoTokenizer

# Its starts of vLLM take half a minute each, and several where other lanes have the cores.
pytestmark = pytest.mark.timeout(700)

MODEL = "Qwen/Qwen3-8B"
TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
PROMPT = types.ModelInput.from_ints(TOKENS[:4])
GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0)


@dataclass(frozen=True)
class Vllm:
    """The path and the start command of an installed vLLM."""

    environment: Path
    variables: Mapping[str, str]
    words: tuple[str, ...] = ()


def stand_in(folder: Path) -> Vllm:
    environment_with_look_alikes(folder)
    return Vllm(folder, {})


def vllm_itself(folder: Path) -> Vllm:
    variables = real_vllm_variables(folder)
    return Vllm(installed_vllm(), {**variables, "PYTHONPATH": f"{PLUGIN}{os.pathsep}{TESTS}"}, EXTRA)


KINDS: Mapping[str, Callable[[Path], Vllm]] = {"stand-in": stand_in, "vllm itself": vllm_itself}


of_each_kind = pytest.fixture(scope="module", params=["stand-in", pytest.param("vllm itself", marks=pytest.mark.vllm)])


@of_each_kind
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    with serving("qwen3", request.param, tmp_path_factory.mktemp("vllm")) as installation:
        yield installation


@of_each_kind
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    with serving("qwen3-moe", request.param, tmp_path_factory.mktemp("mixture")) as installation:
        yield installation


@contextmanager
def serving(family: Family, kind: str, folder: Path) -> Iterator[ServedInstallation]:
    vllm = KINDS[kind](folder)
    installation = ServedInstallation(
        folder / "data",
        {MODEL: make_tiny_model(folder / "model", family=family, shape=SHAPE)},
        settings={
            "deterministic_sampling": "false",
            "sampler": "vllm",
            "sampler_environment": str(vllm.environment),
            "sampler_flags": " ".join(f"--server-argument={word}" for word in vllm.words),
            "max_rank": "16",
        },
        variables=vllm.variables,
    )
    installation.start()
    yield installation
    processes = of_server(installation)
    assert installation.stop() == 0
    assert not [process for process in processes if is_alive(process)], "all of them end with the server"


@pytest.fixture
def client(server: ServedInstallation) -> Iterator[tinker.ServiceClient]:
    with service_client(server) as client:
        yield client


def of_server(server: ServedInstallation) -> list[psutil.Process]:
    assert server.process is not None
    return psutil.Process(server.process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs; it may be collected at any moment."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def vllm_of(server: ServedInstallation) -> psutil.Process:
    sampler = next(one for one in of_server(server) if "--role" in one.cmdline())
    [supervisor] = sampler.children()
    [vllm] = supervisor.children()
    return vllm


def trained(client: tinker.ServiceClient, **trains: bool) -> tinker.TrainingClient:
    model = client.create_lora_training_client(MODEL, rank=8, seed=1, **trains).result()
    for _ in range(5):
        model.forward_backward([next_token_datum(TOKENS)] * 2, "cross_entropy")
        step = model.optim_step(adam(5e-3))
    step.result()
    return model


def logprobs_of_trainer(model: tinker.TrainingClient, tokens: list[int]) -> list[float]:
    [output] = model.forward([next_token_datum(tokens)], "cross_entropy").result().loss_fn_outputs
    return [float(value) for value in output["logprobs"].data]


def test_samples_of_a_new_save_have_the_logprobs_of_the_trainer(client: tinker.ServiceClient) -> None:
    model = trained(client)
    before = model.save_weights_and_get_sampling_client().result()
    for _ in range(2):
        model.forward_backward([next_token_datum(TOKENS)] * 2, "cross_entropy")
        model.optim_step(adam(5e-3)).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    [sequence] = sampler.sample(PROMPT, 1, GREEDY).result().sequences
    expected = logprobs_of_trainer(model, [*TOKENS[:4], *sequence.tokens])
    assert sequence.logprobs == pytest.approx(expected[3:], abs=1e-3)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    assert scored[1:] == pytest.approx(logprobs_of_trainer(model, TOKENS), abs=1e-3)
    assert before.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:] != pytest.approx(scored[1:])


def test_all_doors_give_the_same_answer(server: ServedInstallation, client: tinker.ServiceClient) -> None:
    path = trained(client).save_weights_for_sampler("doors").result().path
    check_doors(server, path, MODEL, AutoTokenizer.from_pretrained(server.models[MODEL]))


@pytest.mark.parametrize("others", [True, False], ids=["with all else", "alone"])
def test_experts_of_a_mixture_are_sampled_with_the_trainers_logprobs(mixture: ServedInstallation, others: bool) -> None:
    tokens = types.ModelInput.from_ints(TOKENS)
    with service_client(mixture) as client:
        base = client.create_sampling_client(base_model=MODEL).result()
        model = trained(client, train_attn=others, train_unembed=others)
        sampler = model.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(tokens).result()[1:]
        assert scored == pytest.approx(logprobs_of_trainer(model, TOKENS), abs=1e-3)
        assert scored != pytest.approx(base.compute_logprobs(tokens).result()[1:], abs=0.1)
        [sequence] = sampler.sample(PROMPT, 1, GREEDY).result().sequences
        expected = logprobs_of_trainer(model, [*TOKENS[:4], *sequence.tokens])
        assert sequence.logprobs == pytest.approx(expected[3:], abs=1e-3)


@pytest.mark.parametrize("mixture", [pytest.param("vllm itself", marks=pytest.mark.vllm)], indirect=True)
def test_an_exported_mixture_is_served_by_vllm_alone_with_the_trainers_logprobs(
    mixture: ServedInstallation, tmp_path: Path
) -> None:
    """The files are downloaded by their links and converted by the cookbook's adapter for servers."""
    with service_client(mixture) as client:
        model = trained(client, train_unembed=False)
        download(mixture, model.save_weights_external("exported").result().path, tmp_path / "exported")
        expected = logprobs_of_trainer(model, TOKENS)
        base = client.create_sampling_client(base_model=MODEL).result()
        of_base = base.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]  # vLLM runs, at the latest now
    assert expected != pytest.approx(of_base, abs=0.1)
    served = tmp_path / "served"
    build_lora_adapter(
        base_model=str(mixture.models[MODEL]), adapter_path=str(tmp_path / "exported"), output_path=str(served)
    )
    assert scored_by_vllm(address_of_vllm(mixture), served) == pytest.approx(expected, abs=1e-3)


def download(server: ServedInstallation, path: str, folder: Path) -> None:
    folder.mkdir()
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        (folder / name).write_bytes(httpx.get(url, **HTTP_OPTIONS).raise_for_status().content)


def address_of_vllm(server: ServedInstallation) -> str:
    words = vllm_of(server).cmdline()
    return SOCKET_SCHEME + words[words.index("--uds") + 1]


def scored_by_vllm(address: str, adapter: Path) -> list[float]:
    """Return the logprobs of TOKENS after the first, from vLLM's own API."""
    load = {"lora_name": "exported", "lora_path": str(adapter)}
    call(address, "/v1/load_lora_adapter", json.dumps(load).encode())
    request = GenerationRequest(
        adapter="exported",
        prompt=np.array(TOKENS),
        max_tokens=1,
        temperature=0.0,
        top_k=-1,
        top_p=1.0,
        seed=None,
        stop_token_ids=(),
        stop_strings=(),
        scored_from=1,
    )
    answer = json.loads(call(address, "/v1/completions", json.dumps(vllm_request(request)).encode()))
    scored = drawn_by_vllm(request, answer).prompt_logprobs
    assert scored is not None
    return [float(value) for value in scored[1:]]


def test_the_base_model_is_sampled_without_an_adapter(client: tinker.ServiceClient) -> None:
    base = client.create_sampling_client(base_model=MODEL).result()
    tuned = trained(client).save_weights_and_get_sampling_client().result()
    scored = [one.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:] for one in (base, tuned)]
    assert scored[0] != pytest.approx(scored[1], abs=1e-2)


def test_a_lost_vllm_restarts_and_the_program_continues(
    server: ServedInstallation, client: tinker.ServiceClient
) -> None:
    sampler = trained(client).save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    lost = vllm_of(server)
    lost.kill()
    until(lambda: not lost.is_running())
    assert sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:] == pytest.approx(
        before[1:], abs=1e-4
    )
    assert vllm_of(server) != lost
