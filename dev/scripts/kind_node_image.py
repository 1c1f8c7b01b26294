"""The image of kind's nodes, made on a machine without access to a registry: `make kind-node-image`.

The image consists of files from kind's Go module, Debian's packages, and programs that are built locally. `make
demo-kind` uses this image if the image exists. Unlike kind's own image, the project's image does not contain kindnet,
because no Go module contains kindnet. Without kindnet, a cluster can have only one node and does not enforce
NetworkPolicies.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from images.archives import build_images
from images.commands import ImageError
from images.sources import Image
from testcluster import kind
from testcluster.commands import run
from testcluster.errors import ClusterError
from testcluster.places import cache_directory
from testcluster.programs.archives import PAUSE_IMAGE, write_archive
from testcluster.programs.builds import KIND, KIND_STORAGE, KUBERNETES, KUBERNETES_VERSION, PAUSE, built

RECIPE = Path(kind.__file__).parent / "kind_node"
PODS_TAG = "1"
"""The tag of the images in the manifests of the node image."""
ON_THE_NODE = ("kubeadm", "kubectl", "kubelet")
IN_PODS = {
    "coredns": "coredns",
    # A module's path ends with its version, and the program has the name before that version.
    "etcd": "server",
    "kube-apiserver": "kube-apiserver",
    "kube-controller-manager": "kube-controller-manager",
    "kube-proxy": "kube-proxy",
    "kube-scheduler": "kube-scheduler",
    "local-path-provisioner": "local-path-provisioner",
}
"""The programs that run in pods: the key is the name of the image, and the value is the name of the build."""
LOAD_SECONDS = 600


def main() -> int:
    try:
        engine = kind.running_engine()
        archive = make_archive()
        print(f"bringing {archive.name} into {engine} …", flush=True)
        run(engine, "load", "--input", archive, seconds=LOAD_SECONDS)
    except (ClusterError, ImageError) as error:
        print(f"make kind-node-image: {error}", file=sys.stderr)
        return 1
    print(f"{engine} has {kind.OWN_NODE_IMAGE}, and `make demo-kind` takes it")
    return 0


def make_archive() -> Path:
    """Build the node image as a docker-archive. Unchanged parts of an earlier build are used again.

    Raises ClusterError and ImageError.
    """
    programs = find_programs()
    with build_context(RECIPE / "pods.Dockerfile") as context:
        link(context / "pods", {name: programs[built_as] for name, built_as in IN_PODS.items()})
        pods = build(Image("kind-pods", context / "Dockerfile", context, PODS_TAG))
    with build_context(RECIPE / "Dockerfile") as context:
        link(context / "programs", {name: programs[name] for name in ON_THE_NODE})
        link(context / "images", {"pods.tar": pods})
        write_archive(context / "images" / "pause.tar", PAUSE_IMAGE, programs["pause"])
        copy_files(kind_files(), context / "kind")
        copy_files(RECIPE / "files", context / "files")
        (context / "files" / "kind" / "version").write_text(f"v{KUBERNETES_VERSION}")
        name, _, tag = kind.OWN_NODE_IMAGE.rpartition("/")[2].partition(":")
        return build(Image(name, context / "Dockerfile", context, tag))


def find_programs() -> Mapping[str, Path]:
    """Return all programs that the image contains, by name. Missing programs are built."""
    folders = [built(program) for program in (KUBERNETES, KIND, KIND_STORAGE, PAUSE)]
    return {file.name: file for folder in folders for file in folder.iterdir()}


def kind_files() -> Path:
    """Return the files that kind's base image adds to Debian.

    The files come from the Go module of this version of kind. Go verifies the module with go.sum.
    """
    download = run("env", f"--chdir={KIND.source}", "go", "mod", "download", "-json", "sigs.k8s.io/kind", seconds=300)
    return Path(json.loads(download)["Dir"]) / "images" / "base" / "files"


@contextmanager
def build_context(dockerfile: Path) -> Iterator[Path]:
    """Yield a build context with this Dockerfile.

    The build context is on the disk of the cache, so that large files can be hard links.
    """
    with TemporaryDirectory(dir=cache_directory(), prefix="kind-node-") as directory:
        context = Path(directory)
        shutil.copyfile(dockerfile, context / "Dockerfile")
        (context / ".dockerignore").touch()
        yield context


def link(folder: Path, files: Mapping[str, Path]) -> None:
    folder.mkdir()
    for name, file in files.items():
        (folder / name).hardlink_to(file)


def copy_files(source: Path, target: Path) -> None:
    """Copy files without the file modes, because files in Go's module cache are read-only."""
    for file in source.rglob("*"):
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def build(image: Image) -> Path:
    return build_images([image])[image.name].path


if __name__ == "__main__":
    sys.exit(main())
