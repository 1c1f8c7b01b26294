"""Programs are built once per version of their sources, and half a build is never taken for a whole one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from testcluster.errors import ClusterError
from testcluster.programs import builds
from testcluster.programs.builds import KUBERNETES, PAUSE, Program, Stub, built

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


def test_changed_sources_are_built_anew(program: Program) -> None:
    before = built(program)
    (program.source / "go.sum").write_text("example.com v1.0.0 h1:x\n")
    assert built(program) != before
    assert before.is_dir()


def test_changed_variables_are_built_anew(program: Program) -> None:
    assert program.key() != replace(program, variables=(("main.version", "2"),)).key()


def test_a_build_that_failed_says_so_and_leaves_nothing_to_find(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STATUS", "1")
    with pytest.raises(ClusterError, match="go build of tool failed"):
        built(program)
    assert list((tmp_path / "cache" / "programs").iterdir()) == []


def test_what_an_interrupted_build_left_is_swept(program: Program) -> None:
    left = program.folder().parent / ".tool-interrupted"
    left.mkdir(parents=True)
    built(program)
    assert not left.exists()


def test_without_go_the_error_names_it(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ClusterError, match="Go is not installed"):
        built(program)


@pytest.fixture
def stubbed(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """A program with a stub for one of the two packages of a module, which is read-only as in Go's module cache."""
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


def test_stubs_of_one_module_share_its_copy(stubbed: Program) -> None:
    (stubbed.source / "light_stub.go").write_text("light stub\n")
    light = Stub("example.com/clouds", "light", "light_stub.go")
    folder = built(replace(stubbed, stubs=(*stubbed.stubs, light)))
    assert [copy.name for copy in folder.glob("module-*")] == ["module-0"]
    assert sorted(contents(folder / "module-0")) == ["go.mod", "heavy/heavy_stub.go", "light/light_stub.go"]


def test_a_build_with_stubs_leaves_the_sources_and_the_module_cache_as_they_were(
    stubbed: Program, tmp_path: Path
) -> None:
    before = contents(stubbed.source), contents(tmp_path / "modules")
    built(stubbed)
    assert (contents(stubbed.source), contents(tmp_path / "modules")) == before


def test_a_changed_stub_is_built_anew(stubbed: Program) -> None:
    before = stubbed.key()
    (stubbed.source / "heavy_stub.go").write_text("another stub\n")
    assert stubbed.key() != before
    assert replace(stubbed, stubs=()).key() != stubbed.key()


def test_a_stub_of_a_package_that_the_module_lacks_is_an_error(stubbed: Program) -> None:
    """A newer version of the module may have moved the package, and would then be compiled with it."""
    moved = replace(stubbed, stubs=(Stub("example.com/clouds", "moved", "heavy_stub.go"),))
    with pytest.raises(ClusterError, match=r"example\.com/clouds has no package moved"):
        built(moved)


def test_every_stub_is_a_file_of_its_program() -> None:
    for program in builds.OF_TESTS:
        for stub in program.stubs:
            assert (program.source / stub.file).is_file()


# What each of these programs compiles besides Go's own library is mostly these modules; Go compiles a package once for
# all programs whose versions of it, and of what it imports, are the same.
SHARED_MODULES = ("k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go")


def test_programs_share_what_go_compiled_of_the_modules_that_they_have_in_common() -> None:
    programs = [pinned((builds.SOURCES / name / "go.mod").read_text()) for name in ("coredns", "traefik", "kuberay")]
    for module in SHARED_MODULES:
        assert len({program[module] for program in programs}) == 1, module


def test_kubernetes_knows_its_version() -> None:
    """Without it the kubelet and the API server disagree about skew."""
    command = " ".join(KUBERNETES.command(Path("out")))
    module = (builds.SOURCES / "kubernetes" / "go.mod").read_text()
    assert f"version.gitVersion=v{builds.KUBERNETES_VERSION}" in command
    assert f"k8s.io/kubernetes v{builds.KUBERNETES_VERSION} " in module


def test_what_a_node_of_kinds_runs_is_of_the_versions_that_our_own_nodes_run() -> None:
    """They are one Kubernetes: kubeadm starts an API server and a kubelet of another module."""
    pins = {name: pinned((builds.SOURCES / name / "go.mod").read_text()) for name in ("kind", "kubernetes", "coredns")}
    for module in ("k8s.io/kubernetes", "k8s.io/api", "k8s.io/kubelet"):
        assert pins["kind"][module] == pins["kubernetes"][module]
    assert pins["kind"]["github.com/coredns/coredns"] == pins["coredns"]["github.com/coredns/coredns"]


def pinned(module: str) -> dict[str, str]:
    """The versions in a go.mod; a replacement goes before what is required."""
    return dict(re.findall(r"^\t?(?:require )?(\S+)(?: => \S+)? (v\S+)", module, flags=re.MULTILINE))


def test_traefik_knows_its_version() -> None:
    module = (builds.SOURCES / "traefik" / "go.mod").read_text()
    assert f"github.com/traefik/traefik/v3 v{builds.TRAEFIK_VERSION}" in module


def test_every_program_has_its_sources() -> None:
    for program in (KUBERNETES, builds.COREDNS, builds.TRAEFIK, PAUSE, builds.HELLO, builds.KIND):
        assert (program.source / "go.mod").is_file()
