"""A server for all SDK tests: real engine, tiny model, default settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker
from support.client.sdk import service_client
from support.server.serve_process import ServedInstallation
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

MODEL = "Qwen/Qwen3-8B"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    folder = tmp_path_factory.mktemp("served")
    model = make_tiny_model(folder / "model")
    installation = ServedInstallation(folder / "data", {MODEL: model, "tiny/other-name": model})
    installation.start()
    yield installation
    installation.stop()


@pytest.fixture
def client(server: ServedInstallation) -> Iterator[tinker.ServiceClient]:
    with service_client(server) as client:
        yield client
