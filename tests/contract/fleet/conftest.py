"""A worker in two installations: a process of this machine, and a session of a real Kubernetes API.

A sampler has four: those two, a process of this machine next to its worker, and a pool.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.crds import install_crds
from support.kubernetes.fixtures import api_cluster, namespace, pytest_collection_finish
from support.server.empty_stores import with_schema
from support.server.fleet_under_test import Installation, SamplingInstallation, until_present, worker_pid
from support.server.operator_stand_in import MODEL, StandInOperator, reached_at
from testcluster.cluster import Cluster
from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet
from tinsmith_server.fleet.local.commands import SamplerCommand, WorkerCommand
from tinsmith_server.fleet.local.fleet import LocalFleet
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store, open_store

__all__ = ["api_cluster", "namespace", "pytest_collection_finish"]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await open_store(with_schema(f"sqlite:///{tmp_path / 'store.db'}"))
    yield store
    await store.close()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return settings of a local fleet: one model directory under two names, and the fake worker.

    No model loads before a test asks for it, so that the test can break the directory first.
    """
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for kind in (WorkerCommand, SamplerCommand):
        monkeypatch.setattr(kind, "__call__", _fake(kind.__call__))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    models = (f"{MODEL}={model}", f"b={model}")
    return Settings(data=tmp_path / "data", models=models, preload_models=False, lora_alpha=32)


def _fake(real: Callable[[Any, Path, int], list[str]]) -> Callable[[Any, Path, int], list[str]]:
    def command(self: Any, socket: Path, parent_fd: int) -> list[str]:
        return [sys.executable, "-m", "support.server.fake_worker_program", *real(self, socket, parent_fd)[3:]]

    return command


@pytest.fixture
def settings_with_sampler(settings: Settings, tmp_path: Path) -> Settings:
    """Return settings with a sampler next to the worker, which is a fake, too."""
    program = tmp_path / "environment" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    return settings.model_copy(update={"sampler": "vllm", "sampler_environment": tmp_path / "environment"})


@pytest.fixture
async def local_fleet(settings: Settings, store: Store) -> AsyncIterator[LocalFleet]:
    fleet = LocalFleet(settings)
    await fleet.open(store)
    yield fleet
    await fleet.close()


@pytest.fixture(scope="session")
def crd(api_cluster: Cluster) -> Cluster:
    install_crds(api_cluster.kubectl)
    return api_cluster


@pytest.fixture
async def operator(
    crd: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StandInOperator]:
    monkeypatch.setenv("KUBECONFIG", str(crd.kubeconfig))
    operator = StandInOperator(crd, namespace, tmp_path)
    yield operator
    await operator.close()


@pytest.fixture
def cluster_settings(operator: StandInOperator, tmp_path: Path) -> Settings:
    return Settings(
        fleet="kubernetes",
        fleet_namespaces=(operator.namespace,),
        fleet_tls_directory=operator.tls_directory,
        checkpoint_root=(tmp_path / "checkpoints").as_uri(),
        data=tmp_path / "data",
    )


@pytest.fixture
async def cluster_fleet(cluster_settings: Settings, store: Store) -> AsyncIterator[KubernetesFleet]:
    fleet = KubernetesFleet(cluster_settings, reached_at)
    await fleet.open(store)
    yield fleet
    await fleet.close()


@pytest.fixture
async def local_installation(local_fleet: LocalFleet, store: Store) -> Installation:
    async def kill() -> None:
        os.kill(worker_pid(), signal.SIGKILL)

    return Installation(local_fleet, store, kill, "add the model with --model")


@pytest.fixture
async def cluster_installation(cluster_fleet: KubernetesFleet, store: Store, operator: StandInOperator) -> Installation:
    await operator.apply("tiny")
    worker = await operator.run("tiny")
    await until_present(cluster_fleet)
    return Installation(cluster_fleet, store, worker.crash, "no TrainingSession of namespace")


@pytest.fixture(params=["local", "cluster"])
def installation(request: pytest.FixtureRequest) -> Installation:
    installation: Installation = request.getfixturevalue(f"{request.param}_installation")
    return installation


@pytest.fixture
def local_sampling(settings: Settings) -> SamplingInstallation:
    async def crash() -> None:
        os.kill(worker_pid(), signal.SIGKILL)

    return SamplingInstallation("colocated", settings, lambda: LocalFleet(settings), crash)


@pytest.fixture
def separate_sampling(settings_with_sampler: Settings) -> SamplingInstallation:
    """Return an installation whose worker never starts, since no client trains."""

    async def crash() -> None:
        os.kill(worker_pid(), signal.SIGKILL)

    return SamplingInstallation("pool", settings_with_sampler, lambda: LocalFleet(settings_with_sampler), crash)


@pytest.fixture
async def colocated_sampling(cluster_settings: Settings, operator: StandInOperator) -> SamplingInstallation:
    await operator.apply("tiny")
    worker = await operator.run("tiny")
    return SamplingInstallation(
        "colocated", cluster_settings, lambda: KubernetesFleet(cluster_settings, reached_at), worker.crash
    )


@pytest.fixture
async def pool_sampling(cluster_settings: Settings, operator: StandInOperator) -> SamplingInstallation:
    await operator.apply_pool("fast")
    replica = await operator.run_replica("fast")
    return SamplingInstallation(
        "pool", cluster_settings, lambda: KubernetesFleet(cluster_settings, reached_at), replica.worker.crash
    )


@pytest.fixture(params=["local", "separate", "colocated", "pool"])
def sampling(request: pytest.FixtureRequest) -> SamplingInstallation:
    """Every place where samples are made."""
    installation: SamplingInstallation = request.getfixturevalue(f"{request.param}_sampling")
    return installation


@pytest.fixture(params=["colocated", "pool"])
def shared_sampling(request: pytest.FixtureRequest) -> SamplingInstallation:
    """Places that several API servers share."""
    installation: SamplingInstallation = request.getfixturevalue(f"{request.param}_sampling")
    return installation
