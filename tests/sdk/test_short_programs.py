"""Programs that end without closing their session, as the SDK's examples do: the next does not wait for them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from support.client.sdk import adam, exact_logprobs, next_token_datum, service_client
from support.server.serve_process import HTTP_OPTIONS, ServedInstallation
from support.waiting import until
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

MODEL = "tiny/model"
PROGRAMS, SLOTS = 40, 8
TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ServedInstallation]:
    """Start a server with the default number of slots."""
    installation = ServedInstallation(tmp_path / "data", {MODEL: make_tiny_model(tmp_path / "model")})
    installation.start()
    yield installation
    installation.stop()


def metric(server: ServedInstallation, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", **HTTP_OPTIONS).text
    found = re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return float(found[1])


def test_forty_programs_that_never_close_get_their_models_and_the_first_continues_unchanged(
    fresh: ServedInstallation, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as open_programs:  # as long as all of them are open, no slot comes free
        models = []
        for seed in range(PROGRAMS):
            program = open_programs.enter_context(service_client(fresh))
            model = program.create_lora_training_client(MODEL, rank=4, seed=seed).result()
            gradient = model.forward_backward([next_token_datum(TOKENS)], "cross_entropy")
            step = model.optim_step(adam())
            gradient.result()
            step.result()
            models.append(model)
        waits = [record.getMessage() for record in caplog.records if "paused" in record.getMessage()]
        assert waits == [], "none waits for a slot"
        assert logprobs(models[0]) == logprobs(twin(open_programs, fresh))
        # What a worker says is shown a little later.
        until(lambda: metric(fresh, "tinsmith_models_loaded") == PROGRAMS + 1)
        until(lambda: metric(fresh, "tinsmith_adapters_parked") == PROGRAMS + 1 - SLOTS)


def twin(open_programs: contextlib.ExitStack, server: ServedInstallation) -> tinker.TrainingClient:
    """Return a model that repeats the first one's calls and was never parked."""
    program = open_programs.enter_context(service_client(server))
    model = program.create_lora_training_client(MODEL, rank=4, seed=0).result()
    model.forward_backward([next_token_datum(TOKENS)], "cross_entropy").result()
    model.optim_step(adam()).result()
    return model


def logprobs(model: tinker.TrainingClient) -> list[list[float]]:
    return exact_logprobs(model.forward([next_token_datum(TOKENS)], "cross_entropy").result())
