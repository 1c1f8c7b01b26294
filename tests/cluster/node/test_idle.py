"""An idle session and an idle pool stop, and the next request of a program that is still running starts them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tinker
from cluster.node.conftest import EXAMPLES, MODEL, SESSION, wait_gone
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.kubernetes.installation import Installation

ROUNDS = 4
IDLE = {"suspendAfterSeconds": 10}
POOL = "tiny"


def train(client: tinker.ServiceClient, pause: Callable[[], None]) -> list[list[list[float]]]:
    """Train for some rounds, and pause before each round but the first. Returns all logprobs."""
    model = client.create_lora_training_client(MODEL, rank=8, seed=3).result()
    logprobs = []
    for round_ in range(ROUNDS):
        if round_ > 0:
            pause()
        forward = model.forward_backward([next_token_datum([5, 9, 2, 14, 7, 11, 3, 8])], "cross_entropy")
        model.optim_step(adam(3e-3)).result()
        logprobs.append(exact_logprobs(forward.result()))
    return logprobs


def sample(client: tinker.ServiceClient) -> list[int]:
    sampling = client.create_sampling_client(base_model=MODEL).result()
    prompt = tinker.ModelInput.from_ints([5, 9, 2, 14])
    parameters = tinker.SamplingParams(max_tokens=8, temperature=0.0)
    return list(sampling.sample(prompt, num_samples=1, sampling_params=parameters).result().sequences[0].tokens)


@contextmanager
def idle_policy(installation: Installation, kind: str, name: str) -> Iterator[None]:
    installation.patch(kind, name, {"spec": {"idle": IDLE}})
    try:
        yield
    finally:
        installation.patch(kind, name, {"spec": {"idle": None}})


def test_a_program_that_pauses_trains_and_samples_as_if_its_session_had_always_run(
    installation: Installation, session: str
) -> None:
    slept = []

    def fall_asleep() -> None:
        installation.wait_reason(SESSION, "Idle")
        assert installation.get("pod", f"{SESSION}-0") is None
        slept.append((installation.get("trainingsession", SESSION) or {})["status"]["idle"]["suspendedTime"])

    with installation.service_client() as client:
        undisturbed, tokens = train(client, lambda: None), sample(client)
        with idle_policy(installation, "trainingsession", SESSION):
            assert train(client, fall_asleep) == undisturbed
            fall_asleep()
            assert sample(client) == tokens
        assert len(set(slept)) == ROUNDS
    assert (installation.get("trainingsession", SESSION) or {})["spec"].get("suspend", False) is False


def test_an_idle_pool_has_no_replicas_until_a_sample_wants_it(installation: Installation, session: str) -> None:
    installation.apply(EXAMPLES / "sampler-pool.yaml")
    installation.wait_reason(POOL, "ReplicasReady", kind="samplerpool")
    try:
        with installation.service_client() as client, idle_policy(installation, "samplerpool", POOL):
            tokens = sample(client)
            installation.wait_reason(POOL, "Idle", kind="samplerpool")
            assert sample(client) == tokens
            installation.wait_reason(POOL, "ReplicasReady", kind="samplerpool")
    finally:
        installation.kubectl("delete", "samplerpool", POOL)
        wait_gone(installation, "samplerpool", POOL)
