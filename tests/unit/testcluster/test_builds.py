"""Programs are built once per version of their sources, and half a build is never taken for a whole one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from testcluster.errors import ClusterError
from testcluster.programs import builds
from testcluster.programs.builds import Program, Stub, built

# Stands in for go: `go build … -o TARGET …` writes a file, and each call a line. A build with another go.mod copies the
# modules that this go.mod names into the program.
GO = """#!/bin/sh
case "$1 $2" in
"mod download") echo "{\\"Dir\\": \\"$MODULES/$4\\"}"; exit ;;
"mod edit") shift 2; for argument; do case "$argument" in
    -replace=*) copies="$copies ${argument##*=}" ;;
    *) echo "$copies" > "$argument" ;;
    esac; done; exit ;;
esac
echo called >> "$CALLS"
while [ "$1" != -o ]; do
    case "$1" in -modfile=*) copies=$(cat "${1#*=}") ;; esac
    shift
done
for copy in $copies; do cp -r "$copy" "$2/module-$(basename "$copy")"; done
echo program > "$2/tool"
exit "$STATUS"
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builds, "SOURCES", tmp_path / "sources")
    source = tmp_path / "sources" / "tool"
    source.mkdir(parents=True)
    (source / "go.mod").write_text("module tool\n")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "go").write_text(GO)
    (folder / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STATUS", "0")
    return Program("tool")


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_the_same_sources_are_built_once(program: Program, tmp_path: Path) -> None:
    folder = built(program)
    assert (folder / "tool").read_text() == "program\n"
    assert built(program) == folder
    assert calls(tmp_path) == 1


def test_changed_sources_are_built_again(program: Program) -> None:
    before = built(program)
    (program.source / "go.sum").write_text("example.com v1.0.0 h1:x\n")
    assert built(program) != before
    assert before.is_dir()


def test_a_build_that_failed_says_so_and_leaves_nothing_to_find(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STATUS", "1")
    with pytest.raises(ClusterError, match="go build of tool failed"):
        built(program)
    assert list((tmp_path / "cache" / "programs").iterdir()) == []


@pytest.fixture
def stubbed(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """Return a program with a stub for one package of a module, which is read-only as in Go's module cache."""
    module = tmp_path / "modules" / "example.com" / "clouds"
    for file in ("go.mod", "heavy/heavy.go", "heavy/sdk.go", "light/light.go"):
        (module / file).parent.mkdir(parents=True, exist_ok=True)
        (module / file).write_text("original\n")
        (module / file).chmod(0o444)
    for folder in (module / "heavy", module / "light", module):
        folder.chmod(0o555)
    monkeypatch.setenv("MODULES", str(tmp_path / "modules"))
    (program.source / "go.sum").write_text("")
    (program.source / "heavy_stub.go").write_text("stub\n")
    return replace(program, stubs=(Stub("example.com/clouds", "heavy", "heavy_stub.go"),))


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_stub_replaces_the_whole_package_and_nothing_else_of_its_module(stubbed: Program) -> None:
    assert contents(built(stubbed) / "module-0") == {
        "go.mod": "original\n",
        "heavy/heavy_stub.go": "stub\n",
        "light/light.go": "original\n",
    }


def test_nodes_of_kind_have_the_versions_of_our_own_nodes() -> None:
    """They are one Kubernetes: kubeadm starts an API server and a kubelet of another module."""
    pins = {name: pinned((builds.SOURCES / name / "go.mod").read_text()) for name in ("kind", "kubernetes", "coredns")}
    for module in ("k8s.io/kubernetes", "k8s.io/api", "k8s.io/kubelet"):
        assert pins["kind"][module] == pins["kubernetes"][module]
    assert pins["kind"]["github.com/coredns/coredns"] == pins["coredns"]["github.com/coredns/coredns"]


def pinned(module: str) -> dict[str, str]:
    """Return the versions in a go.mod; a replacement takes precedence."""
    return dict(re.findall(r"^\t?(?:require )?(\S+)(?: => \S+)? (v\S+)", module, flags=re.MULTILINE))
