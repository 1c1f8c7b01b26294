"""A session whose volume goes with it: its adapters are saved first, and nothing of it stays. It does not sample."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker
from cluster.node.conftest import MODEL
from support.client.sdk import QUESTION, adam, exact_logprobs, next_token_datum
from support.kubernetes.installation import Installation, Object, wait_for

NAME = "short-lived"
BASE_MODEL = "demo/short-lived"
CHILDREN = "pod,statefulset,service,secret,networkpolicy,persistentvolumeclaim"


def short_lived() -> Object:
    claim = {"claimName": "models", "path": MODEL}
    return {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"name": BASE_MODEL, "source": {"type": "PersistentVolumeClaim", "persistentVolumeClaim": claim}},
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
            "sampling": "None",
            "storage": {"size": "1Gi", "retentionPolicy": {"whenDeleted": "Delete"}},
        },
    }


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_for_an_operator(installation: Installation) -> Iterator[None]:
    """Delete the sessions: a namespace cannot go while one waits for an operator that is gone too."""
    yield
    installation.kubectl("delete", "trainingsession", NAME, "--ignore-not-found", "--timeout=300s")


@pytest.fixture
def serving(installation: Installation) -> Installation:
    """Return the installation with the session, ready."""
    installation.apply(short_lived())
    installation.wait_ready(NAME)
    return installation


def test_a_session_without_a_sampler_trains_and_says_that_it_does_not_sample(serving: Installation) -> None:
    with serving.service_client() as service:
        model = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
        data = [next_token_datum(QUESTION)]
        losses = []
        for _ in range(4):
            losses.append(model.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            model.optim_step(adam()).result()
        assert losses[-1] < losses[0]
        with pytest.raises(tinker.APIStatusError, match=f"{BASE_MODEL} is served for training only"):
            service.create_sampling_client(base_model=BASE_MODEL).result()
        with pytest.raises(tinker.RequestFailedError, match=f"{BASE_MODEL} is served for training only"):
            model.save_weights_and_get_sampling_client().result()


def test_adapters_are_saved_before_the_volume_goes_and_nothing_is_left(serving: Installation) -> None:
    """Another session, on another volume, continues from the checkpoint that was made automatically."""
    volume = volume_of(serving)
    data = [next_token_datum(QUESTION)]
    with serving.service_client() as service:
        model = service.create_lora_training_client(BASE_MODEL, rank=4, seed=2).result()
        model.forward_backward(data, "cross_entropy").result()
        model.optim_step(adam()).result()
        before = exact_logprobs(model.forward(data, "cross_entropy").result())

        serving.kubectl("delete", "trainingsession", NAME, "--timeout=300s")
        wait_for(lambda: not left_of(serving), 90, lambda: f"left of {NAME}: {left_of(serving)}")
        gone = f"persistentvolume/{volume}"
        serving.cluster.kubectl("wait", gone, "--for=delete", "--timeout=60s")

        serving.apply(short_lived())
        serving.wait_ready(NAME)
        autosave = f"tinker://{model.get_info().model_id}/weights/autosave"
        resumed = service.create_training_client_from_state_with_optimizer(autosave).result()
        assert exact_logprobs(resumed.forward(data, "cross_entropy").result()) == before


def volume_of(installation: Installation) -> str:
    claim = installation.get("persistentvolumeclaim", f"{NAME}-journal") or {}
    name: str = claim["spec"]["volumeName"]
    return name


def left_of(installation: Installation) -> list[str]:
    listed = installation.kubectl("get", CHILDREN, f"--selector=tinsmith.dev/session={NAME}", "--output=name")
    return listed.split()
