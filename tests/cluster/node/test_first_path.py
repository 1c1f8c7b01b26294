"""Install, apply, train, save, sample: what the quick start promises."""

from __future__ import annotations

import pytest
from cluster.node.conftest import MODEL, SESSION
from support.client.sdk import ANSWER, QUESTION, adam, exact_logprobs, next_token_datum
from support.kubernetes.installation import Installation
from tinker import types


def test_the_commands_of_readme_end_with_a_session_that_is_ready(typed_readme: str) -> None:
    heading, line = typed_readme.splitlines()[-2:]
    assert dict(zip(heading.split(), line.split(), strict=False)).items() >= {"NAME": SESSION, "READY": "True"}.items()


def test_an_unmodified_program_trains_saves_and_samples_through_the_ingress(
    installation: Installation, session: str
) -> None:
    data = [next_token_datum([*QUESTION, *ANSWER])]
    with installation.service_client() as service:
        client = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
        losses = []
        for _ in range(12):
            output = client.forward_backward(data, "cross_entropy")
            client.optim_step(adam(3e-2)).result()
            losses.append(output.result().metrics["loss:sum"])
        assert losses[-1] < losses[0] / 2

        assert client.save_state("trained").result().path.startswith("tinker://")
        sampler = client.save_weights_and_get_sampling_client().result()
        tokens = [*QUESTION, *ANSWER]
        served = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
        [trained] = exact_logprobs(client.forward(data, "cross_entropy").result())
        assert served == pytest.approx(trained, abs=1e-4)
        params = types.SamplingParams(max_tokens=1, temperature=0.0)
        [sequence] = sampler.sample(types.ModelInput.from_ints(tokens[:-1]), 1, params).result().sequences
        assert sequence.tokens == tokens[-1:]


def test_the_status_names_the_samplers_and_their_load(installation: Installation, session: str) -> None:
    status = (installation.get("trainingsession", session) or {})["status"]
    assert status["endpoint"] == f"{session}.{installation.namespace}.svc:7443"
    assert status["adapters"]["capacity"] == 64  # eight models for each of its eight slots
    assert status["nodeName"] in installation.cluster.nodes
    claim = installation.get("persistentvolumeclaim", f"{session}-journal")
    assert claim is not None
    assert status["workerId"] == claim["metadata"]["uid"]


def test_helm_test_takes_a_real_step(installation: Installation, session: str) -> None:
    assert "Phase:          Succeeded" in installation.helm("test", installation.release, "--timeout", "3m")
