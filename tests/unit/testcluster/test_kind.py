"""A cluster by kind: which container engine, which commands, and what is said where they are missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from testcluster import kind
from testcluster.errors import ClusterError
from testcluster.places import Places

RECORDER = """#!/bin/sh
echo "${KIND_EXPERIMENTAL_PROVIDER:-unset}: ${0##*/} $*" >> "$CALLS"
case "$*" in
"image inspect "*) exit "$NO_OWN_IMAGE" ;;
*--config=-*) read -r settings; echo "$settings" > "$CALLS.settings" ;;
esac
exit %d
"""
Install = Callable[..., None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the log of program calls. Only the test's programs and the system's `env` are on the PATH."""
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


def test_without_kind_the_message_says_where_to_get_it(calls: Path) -> None:
    assert "kind is not installed" in (kind.missing() or "")


def test_without_a_container_engine_both_are_named(install: Install) -> None:
    """A docker whose daemon does not run is none."""
    install("kind")
    install("docker", status=1)
    assert "kind needs Docker or podman" in (kind.missing() or "")


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


def test_without_a_node_image_the_error_says_how_to_make_one(install: Install) -> None:
    install("kind", status=1)
    install("podman")
    with pytest.raises(ClusterError, match="`make kind-node-image` makes one"):
        kind.create(Places("unit"))
