"""The common parts of faults: one undisturbed run, and a server whose worker starts in a moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client.pipelined_program import TINY_MODEL, Ending, run_on
from support.kubernetes.crds import install_crds
from support.kubernetes.fixtures import api_cluster, pytest_collection_finish
from support.server.serve_process import REFERENCE_ENGINE, REFERENCE_MODEL, ServedInstallation
from testcluster.cluster import Cluster
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

__all__ = ["api_cluster", "pytest_collection_finish"]


@pytest.fixture
def reference_server(tmp_path: Path) -> Iterator[ServedInstallation]:
    model = tmp_path / "reference"
    model.mkdir()
    (model / "config.json").write_text("{}")
    installation = ServedInstallation(tmp_path / "data", {REFERENCE_MODEL: model}, {"engine": REFERENCE_ENGINE})
    yield installation.start()
    installation.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Ending:
    """Return the program's results without any fault."""
    installation = ServedInstallation(tmp_path_factory.mktemp("undisturbed"), {TINY_MODEL: tiny_model}).start()
    ending = run_on(installation, installation.data / "checkpoints", lambda: None)
    installation.stop()
    return ending


@pytest.fixture(scope="session")
def session_cluster(api_cluster: Cluster) -> Cluster:
    """Return a Kubernetes API with our resources."""
    install_crds(api_cluster.kubectl)
    return api_cluster
