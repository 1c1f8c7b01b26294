"""A cluster by kind: which container engine, which commands, and what is said where they are missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from testcluster.errors import ClusterError
from testcluster.places import Places
from testcluster.programs.builds import KIND

from testcluster import kind

RECORDER = """#!/bin/sh
echo "${KIND_EXPERIMENTAL_PROVIDER:-nobody}: ${0##*/} $*" >> "$CALLS"
case "$*" in
"image inspect "*) exit "$NO_OWN_IMAGE" ;;
*--config=-*) read -r settings; echo "$settings" > "$CALLS.settings" ;;
esac
exit %d
"""
Install = Callable[..., None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where programs write their calls down. Only those are found that the test installs, beside the system's `env`."""
    (tmp_path / "bin").mkdir()
    for program in ("sh", "env"):
        (tmp_path / "bin" / program).symlink_to(f"/usr/bin/{program}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("NO_OWN_IMAGE", "1")
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KIND_EXPERIMENTAL_PROVIDER", raising=False)
    monkeypatch.setattr("testcluster.places.clusters_directory", lambda: tmp_path / "clusters")
    return tmp_path / "calls"


@pytest.fixture
def install(calls: Path, tmp_path: Path) -> Install:
    def install(program: str, *, status: int = 0) -> None:
        file = tmp_path / "bin" / program
        file.write_text(RECORDER % status)
        file.chmod(0o755)

    return install


def test_without_kind_it_is_said_where_to_get_it(calls: Path) -> None:
    assert "kind is not installed" in (kind.missing() or "")


def test_without_a_container_engine_both_are_named(install: Install) -> None:
    """A docker whose daemon does not run is none."""
    install("kind")
    install("docker", status=1)
    assert "kind needs Docker or podman" in (kind.missing() or "")


def test_the_engine_that_kind_is_told_to_take_is_the_one_that_is_asked(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("kind")
    install("docker")
    monkeypatch.setenv("KIND_EXPERIMENTAL_PROVIDER", "podman")
    assert "kind needs podman" in (kind.missing() or "")
    install("podman")
    assert kind.missing() is None


@pytest.mark.parametrize(("engines", "taken"), [(("docker", "podman"), "docker"), (("podman",), "podman")])
def test_the_cluster_is_made_reached_and_deleted_on_one_engine(
    engines: tuple[str, ...], taken: str, install: Install, calls: Path
) -> None:
    for program in ("kind", *engines):
        install(program)
    places = Places("unit")
    kind.create(places)
    # Another one that comes later has nothing to do with it.
    install("docker")
    node = kind.containerd(places).command
    kind.delete(places)
    assert node == (taken, "exec", "--interactive", "tinsmith-unit-control-plane", "ctr")
    options = f"--name=tinsmith-unit --kubeconfig={places.kubeconfig}"
    assert [call for call in calls.read_text().splitlines() if " kind " in call] == [
        f"{taken}: kind create cluster {options} --wait=3m",
        f"{taken}: kind delete cluster {options}",
    ]


def test_our_own_node_image_is_taken_where_the_engine_has_it(
    install: Install, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a network of its own, so kind is told to install none."""
    install("kind")
    install("podman")
    monkeypatch.setenv("NO_OWN_IMAGE", "0")
    kind.create(Places("unit"))
    [created] = [call for call in calls.read_text().splitlines() if " kind " in call]
    assert created.endswith(f"--wait=3m --image={kind.OWN_NODE_IMAGE} --config=-")
    settings = json.loads(calls.with_suffix(".settings").read_text())
    assert settings["networking"] == {"disableDefaultCNI": True}


def test_the_command_that_was_built_with_our_node_image_does_where_none_is_installed(install: Install) -> None:
    install("podman")
    KIND.folder().mkdir(parents=True)
    (KIND.folder() / "kind").write_text("#!/bin/sh\n")
    assert "kind is not installed" in (kind.missing() or "")
    (KIND.folder() / "kind").chmod(0o755)
    assert kind.missing() is None


def test_where_no_node_image_can_be_pulled_it_is_said_how_to_make_one(install: Install) -> None:
    install("kind", status=1)
    install("podman")
    with pytest.raises(ClusterError, match="`make kind-node-image` makes one"):
        kind.create(Places("unit"))


def test_what_kind_says_is_told_when_it_makes_no_cluster(install: Install, calls: Path) -> None:
    install("kind", status=1)
    install("docker")
    with pytest.raises(ClusterError, match="kind create cluster"):
        kind.create(Places("unit"))
