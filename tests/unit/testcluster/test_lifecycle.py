"""What `up`, `down` and `status` make of what they find."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testcluster.cluster import Cluster, given
from testcluster.errors import ClusterError
from testcluster.lifecycle import bring_down, bring_up, bring_up_by_kind, missing
from testcluster.places import Places
from testcluster.processes import ProcessTable, end, marked
from testcluster.record import Record, read_record, write_record
from testcluster.teardown import mounts_below

from testcluster import __main__ as command
from testcluster import cluster as cluster_handle
from testcluster import kind, lifecycle, own, record

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
    """A cluster of one process, as far as anyone can tell."""
    places = Places("unit")
    ProcessTable(places).start("etcd", SLEEP)
    started = ProcessTable(places).running("etcd")
    write_record(Record("unit", "api", "ourselves", str(places.kubeconfig), "kubectl"))
    yield places
    # The mark is in its environment, which a program that has only just begun does not show yet.
    end([started, *marked(places.directory)])


def test_up_leaves_a_cluster_that_is_up_as_it_is(up_already: Places) -> None:
    before = ProcessTable(up_already).running("etcd")
    assert bring_up("unit", "api") == read_record(up_already)
    assert ProcessTable(up_already).running("etcd") == before


def test_up_refuses_to_turn_one_tier_into_another(up_already: Places) -> None:
    with pytest.raises(ClusterError, match="take it down first"):
        bring_up("unit", "node")


def test_a_cluster_one_of_whose_processes_ended_is_not_up(
    up_already: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    end([ProcessTable(up_already).running("etcd")])
    assert read_record(up_already) is None
    assert command.main(["status"]) == 0
    assert "unit: broken, etcd ended" in capsys.readouterr().out


def test_a_start_that_fails_stops_what_it_started_and_keeps_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_record_of_an_older_version_does_not_count(up_already: Places) -> None:
    up_already.record.write_text('{"name": "unit", "nodes": [], "flavour": "old"}')
    assert read_record(up_already) is None


def test_what_is_missing_is_one_sentence_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert missing("api") == "A test cluster needs etcd: `make debian-packages` installs them."


def test_nodes_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "run as root" in (missing("node") or "")


def test_kind_helps_out_where_a_cluster_of_our_own_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kind(monkeypatch)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert missing("node") is None
    assert missing("node", nodes=2) is not None
    assert bring_up("unit", "node").maker == "kind"


def test_a_cluster_of_our_own_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has an Ingress controller and our storage classes."""
    by_kind(monkeypatch)
    monkeypatch.setattr(own, "missing", lambda tier: None)
    monkeypatch.setattr(own, "build", lambda tier: None)
    monkeypatch.setattr(own, "start", lambda places, tier, nodes: own_record(places))
    assert bring_up("unit", "node").maker == "ourselves"


def test_kind_makes_a_cluster_that_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kind(monkeypatch)
    monkeypatch.setattr(own, "missing", lambda tier: None)
    assert bring_up_by_kind("unit").maker == "kind"


def test_what_kind_lacks_is_said_to_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "missing", lambda tier: None)
    with pytest.raises(ClusterError, match="kind is not installed"):
        bring_up_by_kind("unit")


def by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind is there, and makes clusters that are nothing."""
    monkeypatch.setattr(kind, "missing", lambda: None)
    monkeypatch.setattr(kind, "create", lambda places: places.directory.mkdir())
    monkeypatch.setattr(lifecycle, "find_kubectl", lambda: Path("kubectl"))


def own_record(places: Places) -> Record:
    places.directory.mkdir()
    return Record(places.name, "node", "ourselves", str(places.kubeconfig), "kubectl", ("node-1",))


def test_an_unknown_ingress_is_named_with_its_cure() -> None:
    with pytest.raises(ClusterError, match=cluster_handle.INGRESS_VARIABLE):
        _ = Cluster("", Path("/their/kubeconfig"), Path("kubectl"), ("only",)).ingress_url


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Says that the current context is `mine`, and that there is one node."""
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\ncase "$2" in config) echo mine ;; get) echo node/only ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(cluster_handle, "find_kubectl", lambda: program)
    monkeypatch.setenv("KUBECONFIG", "/their/kubeconfig")
    return program


def test_a_kubeconfig_alone_gives_no_cluster(kubectl: Path) -> None:
    """It points at somebody's work."""
    assert given() is None


def test_a_confirmed_kubeconfig_gives_its_cluster(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster_handle.CONTEXT_VARIABLE, "mine")
    assert given() == Cluster("", Path("/their/kubeconfig"), kubectl, ("only",))


def test_a_kubeconfig_with_another_context_is_refused(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster_handle.CONTEXT_VARIABLE, "production")
    with pytest.raises(ClusterError, match="make them agree"):
        given()


def test_nodes_of_a_given_cluster_are_out_of_reach(kubectl: Path) -> None:
    kubectl.write_text("#!/bin/sh\necho containerd://abc\n")
    cluster = Cluster("", Path("/their/kubeconfig"), kubectl, ("only",))
    with pytest.raises(ClusterError, match="out of reach"):
        cluster.kill_container("tin", "tiny-0", "worker")
    with pytest.raises(ClusterError, match="no node to lose"):
        cluster.power_off("only")


def test_mounts_are_found_below_the_folder_and_only_there() -> None:
    mountinfo = (
        "1 0 8:1 / /clusters/dev/node-1/a rw - ext4 /dev/a rw\n"
        "2 0 8:1 / /clusters/dev\\040two rw - ext4 /dev/a rw\n"
        "3 0 8:1 / /clusters/developer rw - ext4 /dev/a rw\n"
        "4 0 8:1 / /clusters/dev/with\\040space rw - ext4 /dev/a rw\n"
    )
    assert mounts_below(Path("/clusters/dev"), mountinfo) == ["/clusters/dev/node-1/a", "/clusters/dev/with space"]
