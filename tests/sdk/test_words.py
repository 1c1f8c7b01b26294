"""What a program's user reads on the screen where a server cannot do what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from support.client.sdk import service_client
from support.server.serve_process import ServedInstallation
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model

MODEL = "tiny/broken"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServedInstallation]:
    """One whose model has sound files and a forward that raises: three key heads do not go into four."""
    model = make_tiny_model(tmp_path / "model", shape=TinyShape(kv_heads=3))
    installation = ServedInstallation(tmp_path / "data", {MODEL: model})
    installation.start()
    yield installation
    installation.stop()


def test_a_model_that_no_engine_can_run_fails_its_client_with_the_reason(server: ServedInstallation) -> None:
    with service_client(server) as service, pytest.raises(tinker.RequestFailedError) as failed:
        service.create_lora_training_client(MODEL, rank=4).result()
    assert f"{MODEL} cannot be served: The engine peft cannot load" in str(failed.value)
    assert "RuntimeError: The size of tensor" in str(failed.value)


def test_a_worker_that_cannot_run_its_model_rests(server: ServedInstallation) -> None:
    """The next request that needs it tries again; nobody else does."""
    with service_client(server) as service, pytest.raises(tinker.RequestFailedError):
        service.create_lora_training_client(MODEL, rank=4).result()
    assert server.worker_pids() == []
