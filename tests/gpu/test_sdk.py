"""The unmodified SDK, and `tinsmith serve` with a worker on a GPU. `--place cpu` runs the same tests on a CPU."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import tinker
from support.client.sdk import adam, exact_logprobs, next_token_datum, service_client
from support.server.from_sources import COMMAND, path_of_children
from support.server.serve_process import ServedInstallation
from tinker import types
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

# The SDK leaves connections open. Other warnings are of libraries in versions that are not known here.
OPEN_CONNECTIONS = "ignore:unclosed:ResourceWarning"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.filterwarnings("default", OPEN_CONNECTIONS)]

MODEL = "Qwen/Qwen3-8B"
Round = tuple[tinker.APIFuture[types.ForwardBackwardOutput], tinker.APIFuture[types.OptimStepResponse]]

SETTINGS = {
    "gpu": {"devices": "0"},
    "cpu": {"devices": "cpu", "numerics": "fast", "engine_flags": "--dtype bfloat16"},
}
"""The defaults of a GPU, by the place of the worker."""
STEPS = 8
LEARNING_RATE = 5e-3
LORA_RANK = 8
TEXTS = [
    [5, 9, 2, 14, 7, 11, 3, 8],
    [4, 4, 8, 15, 16, 23, 42, 4],
    [7, 1, 6, 8, 0, 3, 3, 9, 30, 31],
    [20, 19, 18, 17, 2, 2, 5],
]
"""One text for each tenant."""
PROMPT = TEXTS[0][:4]
SAMPLED_TOKENS = 16
SAMPLE_ATOL = 0.05
LOSS_ATOL = 0.02


@pytest.fixture(scope="module")
def server(place: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    folder = tmp_path_factory.mktemp("served")
    installation = ServedInstallation(
        folder / "data",
        {MODEL: make_tiny_model(folder / "model")},
        {**SETTINGS[place], "deterministic_sampling": "false"},
        variables=path_of_children(tmp_path_factory.mktemp("metadata")),
        program=(*COMMAND, "serve"),
    )
    yield installation.start()
    assert installation.stop() == 0


@pytest.fixture
def client(server: ServedInstallation) -> Iterator[tinker.ServiceClient]:
    with service_client(server) as client:
        yield client


def test_an_adapter_learns_and_its_samples_have_the_logprobs_of_training(client: tinker.ServiceClient) -> None:
    model = create_model(client)
    losses = losses_of(submit(model, TEXTS[0], STEPS))
    assert losses == sorted(losses, reverse=True)
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, seed=7)
    [sampled] = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    assert sampled.logprobs
    scored = model.forward([next_token_datum([*PROMPT, *sampled.tokens])], "cross_entropy").result()
    [of_training] = exact_logprobs(scored)
    np.testing.assert_allclose(sampled.logprobs, of_training[len(PROMPT) - 1 :], rtol=0, atol=SAMPLE_ATOL)


def test_tenants_that_train_at_the_same_time_get_the_answers_of_lone_runs(server: ServedInstallation) -> None:
    keys = [create_key(server, f"tenant-{number}") for number, _ in enumerate(TEXTS)]
    lone = [run_of_tenant(server, Barrier(1), key, text) for key, text in zip(keys, TEXTS, strict=True)]
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        together = list(threads.map(partial(run_of_tenant, server, Barrier(len(TEXTS))), keys, TEXTS))
    np.testing.assert_allclose(together, lone, rtol=0, atol=LOSS_ATOL)
    assert smallest_difference(lone) > 2 * LOSS_ATOL, "an answer of another tenant would not be noticed"


def test_a_program_does_not_notice_that_its_worker_is_killed(
    server: ServedInstallation, client: tinker.ServiceClient
) -> None:
    undisturbed = losses_of(submit(create_model(client), TEXTS[0], STEPS))
    model = create_model(client)
    rounds = submit(model, TEXTS[0], STEPS // 2)
    losses_of(rounds)
    request_id = f"{model.model_id}:op:1"
    answer, killed = server.retrieve(request_id), server.worker_pids()
    rounds += submit(model, TEXTS[0], STEPS - len(rounds))
    server.kill_workers()
    np.testing.assert_allclose(losses_of(rounds), undisturbed, rtol=0, atol=LOSS_ATOL)
    assert [(step.result().metrics or {})["step"] for _, step in rounds] == list(range(1, STEPS + 1))
    assert set(killed).isdisjoint(server.worker_pids())
    again = server.retrieve(request_id)
    assert (again.status_code, again.content) == (answer.status_code, answer.content) == (200, answer.content)


def create_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=LORA_RANK, seed=1).result()


def submit(model: tinker.TrainingClient, text: Sequence[int], steps: int) -> list[Round]:
    """Submit steps on a text without waiting for answers."""
    datums = [next_token_datum(text)] * 2
    return [
        (model.forward_backward(datums, "cross_entropy"), model.optim_step(adam(LEARNING_RATE))) for _ in range(steps)
    ]


def losses_of(rounds: Sequence[Round]) -> list[float]:
    """Wait for the rounds, and return the mean loss of a token in each."""
    losses = [-float(np.mean(exact_logprobs(trained.result()))) for trained, _ in rounds]
    for _, step in rounds:
        step.result()
    return losses


def create_key(server: ServedInstallation, tenant: str) -> str:
    command = [*COMMAND, "keys", "create", f"key of {tenant}", f"--tenant={tenant}", f"--data={server.data}"]
    environment = {**os.environ, **server.variables}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def run_of_tenant(server: ServedInstallation, start: Barrier, key: str, text: Sequence[int]) -> list[float]:
    """Create a model, and train it as soon as all tenants have one."""
    with service_client(server, api_key=key) as client:
        model = create_model(client)
        start.wait()
        return losses_of(submit(model, text, STEPS))


def smallest_difference(runs: Sequence[Sequence[float]]) -> float:
    """Return the difference of the two runs that are most alike, in the step that distinguishes them best."""
    return min(float(np.abs(np.subtract(one, other)).max()) for one, other in itertools.combinations(runs, 2))
