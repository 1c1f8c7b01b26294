"""The actions of `make demo-cluster` on the cluster and the images that it finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import demo_cluster
import pytest
from demo_cluster import Shell, chart_values, clean_up, find_cluster, way_in
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import LoadedImage
from testcluster.loading import COMMAND_VARIABLE

ARCHIVES = {part: Path(f"/cache/{part}_0.1.0-abc.tar") for part in ("trainer", "api-server", "operator")}
KUBECTL = """#!/bin/sh
case "$*" in
*port-forward*) exec sleep 60 ;;
*"config view"*) echo "kind: Config" ;;
esac
"""


@pytest.fixture(autouse=True)
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the demo's own files, outside of the checkout."""
    monkeypatch.setattr(demo_cluster, "OUT", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def existing_cluster(tmp_path: Path) -> Cluster:
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    return Cluster("", tmp_path / "theirs", program, ("one", "two"))


def images(registry: str, digest: str | None) -> dict[str, LoadedImage]:
    return {part: LoadedImage(f"{registry}/tinsmith/{part}:0.1.0", digest) for part in ARCHIVES}


def test_elsewhere_another_build_makes_new_pods() -> None:
    values = chart_values(images("tinsmith.local", None), ARCHIVES)
    assert values == {
        "operator": {"podAnnotations": {"tinsmith.dev/demo-build": "operator_0.1.0-abc"}},
        "apiServer": {"podAnnotations": {"tinsmith.dev/demo-build": "api-server_0.1.0-abc"}},
        "image": {"registry": "tinsmith.local"},
    }


def test_a_given_cluster_is_used_by_a_kubeconfig_of_the_demos_own(
    existing_cluster: Cluster, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sets a namespace there."""
    monkeypatch.setattr(demo_cluster, "configured_cluster", lambda: existing_cluster)
    monkeypatch.setenv(COMMAND_VARIABLE, "kind load image-archive {archive} --name dev")
    found = find_cluster()
    assert found == replace(existing_cluster, kubeconfig=out / "kubeconfig")
    assert found.kubeconfig.read_text() == "kind: Config\n"
    assert found.kubeconfig.stat().st_mode & 0o077 == 0, "it may hold a key"


def test_a_given_cluster_without_a_way_for_images_is_refused_before_they_are_built(
    existing_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_cluster, "configured_cluster", lambda: existing_cluster)
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    with pytest.raises(ClusterError, match=COMMAND_VARIABLE):
        find_cluster()


def test_the_server_is_reached_by_the_ingress_or_else_by_a_port_of_this_machine(existing_cluster: Cluster) -> None:
    with way_in(Shell(replace(existing_cluster, ingress_address="10.0.0.1"))) as url:
        assert url == "http://10.0.0.1"
    with way_in(Shell(existing_cluster)) as url:
        assert url.startswith("http://127.0.0.1:")


def test_the_last_line_names_the_missing_part_of_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("testcluster.places.clusters_directory", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    assert demo_cluster.main(["--kind"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("make demo-kind: kind is not installed: ")


def test_cleaning_up_leaves_a_cluster_that_was_given(existing_cluster: Cluster) -> None:
    assert clean_up(replace(existing_cluster, name="demo")) == "make cluster-down NAME=demo"
    assert "helm uninstall tinsmith" in clean_up(existing_cluster)
