"""The results of `up`, `down` and `status` in each state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testcluster import __main__ as command
from testcluster import cluster as cluster_handle
from testcluster import kind, lifecycle, own, record
from testcluster.cluster import configured_cluster
from testcluster.errors import ClusterError
from testcluster.lifecycle import bring_down, bring_up, missing
from testcluster.places import Places
from testcluster.processes import ProcessTable, end, marked
from testcluster.record import Record, read_record, write_record

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("testcluster.places.clusters_directory", lambda: tmp_path)
    monkeypatch.setattr(record, "clusters_directory", lambda: tmp_path)
    monkeypatch.setattr(kind, "missing", lambda: "kind is not installed.")
    for variable in ("KUBECONFIG", cluster_handle.CONTEXT_VARIABLE, cluster_handle.INGRESS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.fixture
def up_already() -> Iterator[Places]:
    """Yield a cluster of one process that looks as if it were up."""
    places = Places("unit")
    ProcessTable(places).start("etcd", SLEEP)
    started = ProcessTable(places).running("etcd")
    write_record(Record("unit", "api", "ourselves", str(places.kubeconfig), "kubectl"))
    yield places
    # The mark is in its environment, which a program that has only just begun does not show yet.
    end([started, *marked(places.directory)])


def test_a_cluster_is_not_up_when_one_of_its_processes_ended(
    up_already: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    end([ProcessTable(up_already).running("etcd")])
    assert read_record(up_already) is None
    assert command.main(["status"]) == 0
    assert "unit: broken, etcd ended" in capsys.readouterr().out


def test_a_failed_start_stops_its_processes_and_keeps_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places("unit")

    def start(places: Places, *_: object) -> Record:
        ProcessTable(places).start("etcd", SLEEP)
        raise ClusterError("the API server does not answer")

    monkeypatch.setattr(own, "missing", lambda tier: None)
    monkeypatch.setattr(own, "build", lambda tier: None)
    monkeypatch.setattr(own, "start", start)
    with pytest.raises(ClusterError, match="does not answer"):
        bring_up("unit", "api")
    assert marked(places.directory) == []
    assert [entry.name for entry in places.directory.iterdir()] == ["logs"]


def test_down_removes_everything_and_may_be_said_twice(up_already: Places) -> None:
    assert bring_down("unit") is True
    assert not up_already.directory.exists()
    assert marked(up_already.directory) == []
    assert bring_down("unit") is False


def test_the_error_for_a_missing_program_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert missing("api") == "A test cluster needs etcd: `make debian-packages` installs them."


def test_kind_helps_out_where_a_cluster_of_our_own_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kind(monkeypatch)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert missing("node") is None
    assert missing("node", nodes=2) is not None
    assert bring_up("unit", "node").maker == "kind"


def by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind is there, and makes clusters that are nothing."""
    monkeypatch.setattr(kind, "missing", lambda: None)
    monkeypatch.setattr(kind, "create", lambda places: places.directory.mkdir())
    monkeypatch.setattr(lifecycle, "find_kubectl", lambda: Path("kubectl"))


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Says that the current context is `mine`, and that there is one node."""
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\ncase "$2" in config) echo mine ;; get) echo node/only ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(cluster_handle, "find_kubectl", lambda: program)
    monkeypatch.setenv("KUBECONFIG", "/their/kubeconfig")
    return program


def test_a_kubeconfig_with_another_context_is_refused(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster_handle.CONTEXT_VARIABLE, "production")
    with pytest.raises(ClusterError, match="make them agree"):
        configured_cluster()
