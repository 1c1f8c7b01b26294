"""The programs of a test cluster. Each program is built from Go modules once, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.places import cache_directory, locked

SOURCES = Path(__file__).parent
KUBERNETES_VERSION = "1.34.4"
TRAEFIK_VERSION = "3.6.12"
GO_MISSING = (
    "Go is not installed, and the programs of the test cluster are built with it: "
    "install Go 1.25 or newer (https://go.dev/dl)."
)


@dataclass(frozen=True)
class Stub:
    """A stub file that replaces a Go package, so that the imports of this package are not compiled.

    The stub is in the program's folder.
    """

    module: str
    package: str
    """The folder of the package in the module."""
    file: str


@dataclass(frozen=True)
class Program:
    """A folder in `programs/` with a go.mod.

    The folders have separate go.mod files, because some programs have conflicting dependencies.
    """

    name: str
    packages: tuple[str, ...] = (".",)
    variables: tuple[tuple[str, str], ...] = ()
    stubs: tuple[Stub, ...] = ()
    cold_build: str = "a minute"

    @property
    def source(self) -> Path:
        return SOURCES / self.name

    def key(self) -> str:
        """Return a key for the cache. The key changes when any input of the program changes."""
        digest = hashlib.sha256(repr((self.packages, self.variables, *self.stubs)).encode())
        for file in sorted(self.source.iterdir()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()[:16]

    def folder(self) -> Path:
        return cache_directory() / "programs" / f"{self.name}-{self.key()}"

    def command(self, target: Path, module_file: Path | None = None) -> list[str]:
        values = "".join(f" -X {variable}={value}" for variable, value in self.variables)
        modules = [f"-modfile={module_file}"] if module_file else []
        return ["go", "build", "-trimpath", *modules, "-ldflags", f"-s -w{values}", "-o", f"{target}/", *self.packages]


def _kubernetes_variables() -> tuple[tuple[str, str], ...]:
    """Return the version variables of Kubernetes.

    Without the version variables, the kubelet and the API server would report wrong versions.
    """
    major, minor, _ = KUBERNETES_VERSION.split(".")
    values = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor}
    homes = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return tuple((f"{home}.{name}", value) for home in homes for name, value in values.items())


_COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet")

KUBERNETES = Program(
    "kubernetes",
    packages=tuple(f"k8s.io/kubernetes/cmd/{command}" for command in _COMMANDS),
    variables=_kubernetes_variables(),
    cold_build="5 to 10 minutes",
)
COREDNS = Program("coredns", cold_build="2 minutes")
TRAEFIK = Program(
    "traefik",
    packages=("github.com/traefik/traefik/v3/cmd/traefik",),
    variables=(("github.com/traefik/traefik/v3/pkg/version.Version", TRAEFIK_VERSION),),
    stubs=(
        Stub("github.com/go-acme/lego/v4", "providers/dns", "lego_dns_providers.go"),
        Stub("github.com/traefik/traefik/v3", "pkg/provider/ecs", "traefik_ecs_provider.go"),
    ),
    cold_build="3 minutes",
)
KUBERAY = Program("kuberay", packages=("github.com/ray-project/kuberay/ray-operator",), cold_build="2 minutes")
KEDA = Program(
    "keda",
    packages=("github.com/kedacore/keda/v2/cmd/operator", "github.com/kedacore/keda/v2/cmd/adapter"),
    cold_build="10 minutes",
)
PAUSE = Program("pause", cold_build="seconds")
HELLO = Program("hello", cold_build="seconds")
PROMQL = Program("promql", cold_build="2 minutes")
KIND = Program(
    "kind",
    packages=(".", "go.etcd.io/etcd/server/v3", "k8s.io/kubernetes/cmd/kubeadm", "sigs.k8s.io/kind"),
    variables=_kubernetes_variables(),
    cold_build="5 minutes",
)
# Built separately: it imports a package with capitals in its path, and etcd the same path in small letters.
KIND_STORAGE = Program("kind", packages=("github.com/rancher/local-path-provisioner",), cold_build="a minute")

OF_TESTS = (KUBERNETES, COREDNS, TRAEFIK, KUBERAY, PAUSE, HELLO, PROMQL)
"""The programs that clusters and tests use.

The programs are built before the tests, because a test that builds for minutes would reach its time limit. Only `make
test-keda` builds KEDA.
"""


def built(program: Program) -> Path:
    """Return the folder with the binaries of the program. Missing binaries are built first.

    Two builds of the same program never run at the same time. An interrupted build leaves no folder that looks
    complete.
    """
    folder = program.folder()
    if folder.is_dir():
        return folder
    if shutil.which("go") is None:
        raise ClusterError(GO_MISSING)
    with locked(folder.parent / f"{program.name}.lock"):
        if not folder.is_dir():
            _build(program, folder)
    return folder


def _build(program: Program, folder: Path) -> None:
    print(f"building {program.name}: {program.cold_build} when nothing of it is cached yet …", flush=True)
    started = time.monotonic()
    prefix = f".{program.name}-"
    for interrupted in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(interrupted)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as scratch:
        target = Path(scratch) / "bin"
        target.mkdir(mode=0o755)
        module_file = _module_file(program, Path(scratch) / "modules") if program.stubs else None
        _go(program, program.command(target, module_file))
        target.rename(folder)
    print(f"built {program.name} in {time.monotonic() - started:.0f} s", flush=True)


def _module_file(program: Program, scratch: Path) -> Path:
    """Write a go.mod in which modules with stubs are replaced by changed copies. Return the path of the new go.mod.

    Go's option -overlay is not used, because it refuses files in the module cache.
    """
    scratch.mkdir()
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(program.source / name, scratch / name)
    copies: dict[str, Path] = {}
    for stub in program.stubs:
        if stub.module not in copies:
            copies[stub.module] = scratch / str(len(copies))
            _copy_module(program, stub.module, copies[stub.module])
        _replace_package(program, stub, copies[stub.module])
    replacements = [f"-replace={module}={copy}" for module, copy in copies.items()]
    _go(program, ["go", "mod", "edit", *replacements, str(scratch / "go.mod")])
    return scratch / "go.mod"


def _copy_module(program: Program, module: str, target: Path) -> None:
    downloaded = Path(json.loads(_go(program, ["go", "mod", "download", "-json", module]))["Dir"])
    for file in downloaded.rglob("*"):
        if file.is_file():
            copy = target / file.relative_to(downloaded)
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Copied without the mode, because Go's module cache is read-only and the copy is changed and removed.
            shutil.copyfile(file, copy)


def _replace_package(program: Program, stub: Stub, module: Path) -> None:
    package = module / stub.package
    if not package.is_dir():
        raise ClusterError(
            f"The module {stub.module} has no package {stub.package}, so {stub.file} replaces nothing: "
            f"correct the stubs of {program.name} in {Path(__file__).name}."
        )
    for file in package.glob("*.go"):
        file.unlink()
    shutil.copyfile(program.source / stub.file, package / stub.file)


def _go(program: Program, command: list[str]) -> str:
    environment = os.environ | {"CGO_ENABLED": "0", "GOWORK": "off"}
    finished = subprocess.run(command, cwd=program.source, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise ClusterError(f"{' '.join(command[:2])} of {program.name} failed:\n{_tail(finished.stderr)}")
    return finished.stdout


def _tail(output: str, lines: int = 20) -> str:
    return "\n".join(output.splitlines()[-lines:])
