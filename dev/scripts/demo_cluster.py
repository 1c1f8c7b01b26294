"""`make demo-cluster`: train a model on a new cluster.

The program prints and runs the commands of docs/how-to/kubernetes.md.

The cluster is a test cluster called `demo`. The cluster continues to run afterwards, and a second run of the demo uses
the same cluster. If KUBECONFIG and TINSMITH_TEST_CONTEXT name a cluster of the user, the demo uses this cluster. `make
demo-kind` runs the demo on a cluster that kind makes.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import yaml
from images.sources import LOCAL_REGISTRY
from testcluster.cluster import Cluster, configured_cluster, recorded
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import LoadedImage, repository
from testcluster.lifecycle import bring_up, bring_up_by_kind
from testcluster.loading import load_command
from testcluster.ports import free_port
from testcluster.project_images import ImagesNotBuilt, build_images
from testcluster.tar_files import extract_files
from tinsmith.console import make_console
from tinsmith.demo import MODEL, find_program

ROOT = Path(__file__).parents[2]
OUT = Path("demo-output") / "cluster"
NAME, NAME_BY_KIND = "demo", "demo-kind"
NAMESPACE = "tinsmith"
SESSION = "tiny"
CHART_PARTS = {"operator": "operator", "api-server": "apiServer", "trainer": "worker"}
# Gives the pods of each build another annotation, so that they are replaced if no digest changes.
BUILD_ANNOTATION = "tinsmith.dev/demo-build"
SERVICE = "service/tinsmith-api-server"
READY_SECONDS = 300
ANSWER_SECONDS = 120
INTERRUPTED = 130

console = make_console()
errors = make_console(stderr=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo_cluster", description="From nothing to a cluster that trains.")
    parser.add_argument("--kind", action="store_true", help="in a cluster that kind makes for it")
    by_kind = parser.parse_args(arguments).kind
    command = "make demo-kind" if by_kind else "make demo-cluster"
    started = time.monotonic()
    try:
        chapter("A Kubernetes")
        cluster = recorded(bring_up_by_kind(NAME_BY_KIND)) if by_kind else find_cluster()
        chapter("The images, built and brought into the cluster")
        archives = build_images()
        images = bring_images(cluster, archives)
        shell = Shell(cluster)
        chapter("Installing Tinsmith")
        install(shell, chart_values(images, archives))
        chapter("A base model in a volume, and a session that serves it")
        serve_tiny_model(shell, images["trainer"])
        chapter("A program of the tinker SDK")
        with way_in(shell) as base_url:
            train(shell, base_url)
    except KeyboardInterrupt:
        errors.print(f"\nInterrupted. `{command}` continues from here.")
        return INTERRUPTED
    except (ClusterError, ImagesNotBuilt, CommandFailed) as error:
        errors.print(f"\n{command}: {error}")
        return 1
    say_what_next(shell, time.monotonic() - started)
    return 0


def find_cluster() -> Cluster:
    """Return the cluster that the user named. If the user named no cluster, create a cluster. Raises ClusterError."""
    cluster = configured_cluster()
    if cluster is None:
        return recorded(bring_up(NAME, "node"))
    # Report missing requirements now, not after minutes of building.
    load_command()
    console.print(f"that of {cluster.kubeconfig}, with {len(cluster.nodes)} nodes")
    return with_own_kubeconfig(cluster)


def with_own_kubeconfig(cluster: Cluster) -> Cluster:
    """Return the cluster with a copy of its kubeconfig. In the copy, the demo sets a namespace."""
    file = ROOT / OUT / "kubeconfig"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    return replace(cluster, kubeconfig=file)


class CommandFailed(Exception):
    """An error for a command or a quiet query that failed. The error message of the command is already printed."""


class Shell:
    """A shell that runs commands against the cluster, and prints each command as a user would type it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.kubeconfig = cluster.kubeconfig
        self.programs = {"kubectl": cluster.kubectl_program, "helm": Path(sys.executable).with_name("helm")}
        self._environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def run(self, *command: str) -> None:
        """Run a command and show the output. Raises CommandFailed."""
        console.print(f"$ {shlex.join(command)}", style="bold")
        self._run(command, output=None)

    def read(self, *command: str) -> bytes:
        """Run a command and return the output without printing. Raises CommandFailed."""
        return self._run(command, output=subprocess.PIPE)

    @contextmanager
    def running(self, *command: str) -> Iterator[None]:
        """Run a command in the background while the context is open. Show only the error output of the command."""
        console.print(f"$ {shlex.join(command)} &", style="bold")
        words = [str(self.programs[command[0]]), *command[1:]]
        with subprocess.Popen(words, env=self._environment, stdout=subprocess.DEVNULL) as process:
            try:
                yield
            finally:
                process.terminate()

    def _run(self, command: tuple[str, ...], output: int | None) -> bytes:
        done = subprocess.run(
            [str(self.programs[command[0]]), *command[1:]],
            cwd=ROOT,
            env=self._environment,
            stdout=output,
            check=False,
        )
        if done.returncode != 0:
            raise CommandFailed(f"`{shlex.join(command)}` failed. What there is to see:\n{self.where_to_look()}")
        return done.stdout or b""

    def where_to_look(self) -> str:
        paths = ":".join(sorted({str(program.parent) for program in self.programs.values()}))
        return (
            f"  export KUBECONFIG={self.kubeconfig} PATH={paths}:$PATH\n"
            f"  kubectl get tinsmith,pods && kubectl describe tsess {SESSION}"
        )


def bring_images(cluster: Cluster, archives: Mapping[str, Path]) -> dict[str, LoadedImage]:
    images = {}
    for part, archive in archives.items():
        [images[part]] = cluster.load_image(archive)
        console.print(f"the cluster has {images[part].name}")
    return images


def chart_values(images: Mapping[str, LoadedImage], archives: Mapping[str, Path]) -> dict[str, Any]:
    """Return chart values with the digests of the images, if the digests are known.

    Because of the digests, a new build replaces the pods of the operator and the API server in an existing release. A
    session keeps its running worker.
    """
    values: dict[str, Any] = {}
    for part, image in images.items():
        if image.digest is not None:
            values[CHART_PARTS[part]] = {"image": {"digest": image.digest}}
        elif part != "trainer":
            values[CHART_PARTS[part]] = {"podAnnotations": {BUILD_ANNOTATION: archives[part].stem}}
    registry = repository(images["trainer"].name).removesuffix("/tinsmith/trainer")
    values["image"] = {"registry": registry}
    if registry != LOCAL_REGISTRY:
        # The tag stays the same, but nodes still have the earlier image under it.
        values["image"]["pullPolicy"] = "Always"
    return values


def written(name: str, content: str) -> str:
    """Write a file of the demo. Return the path of the file as it appears in the printed commands."""
    (ROOT / OUT).mkdir(parents=True, exist_ok=True)
    (ROOT / OUT / name).write_text(content)
    return str(OUT / name)


def install(shell: Shell, images: Mapping[str, Any]) -> None:
    if f"namespace/{NAMESPACE}" not in shell.read("kubectl", "get", "namespaces", "--output=name").decode().split():
        shell.run("kubectl", "create", "namespace", NAMESPACE)
        shell.run("kubectl", "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    shell.run("kubectl", "config", "set-context", "--current", "--namespace", NAMESPACE)
    values = ("--values", "examples/values-one-node.yaml", "--values", written("images.yaml", yaml.safe_dump(images)))
    ingress = ("--set", "apiServer.ingress.enabled=true") if shell.cluster.ingress_address else ()
    shell.run(
        "helm", "upgrade", "--install", "tinsmith", "charts/tinsmith", *values, *ingress, "--wait", "--hide-notes"
    )


def tiny_model(trainer: str) -> str:
    """Return the manifest of the session with the tiny model.

    If the cluster uses another registry, the name of the image contains this registry.
    """
    file = "examples/tiny-model.yaml"
    content = (ROOT / file).read_text()
    if f"image: {trainer}\n" in content:
        return file
    return written("tiny-model.yaml", re.sub(r"image: \S+", f"image: {trainer}", content))


def serve_tiny_model(shell: Shell, trainer: LoadedImage) -> None:
    shell.run("kubectl", "apply", "-f", tiny_model(trainer.name))
    shell.run("kubectl", "wait", "job/make-tiny-model", "--for=condition=complete", f"--timeout={READY_SECONDS}s")
    shell.run("kubectl", "apply", "-f", "examples/session.yaml")
    shell.run("kubectl", "wait", f"tsess/{SESSION}", "--for=condition=Ready", f"--timeout={READY_SECONDS}s")
    shell.run("kubectl", "get", "tinsmith")


@contextmanager
def way_in(shell: Shell) -> Iterator[str]:
    """Yield the address of the server: the address of the ingress, or of a forwarded port if no ingress is known."""
    if shell.cluster.ingress_address:
        yield shell.cluster.ingress_url
        return
    port = free_port()
    with shell.running("kubectl", "port-forward", SERVICE, f"{port}:80"):
        yield f"http://127.0.0.1:{port}"


def train(shell: Shell, base_url: str) -> None:
    """Run `examples/first_steps.py` in the folder that contains the model's tokenizer. Raises CommandFailed."""
    out = ROOT / OUT
    fetch_model(shell, out)
    wait_until_answering(base_url)
    environment = {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": api_key(shell)}
    arguments = ["--model", MODEL, "--base-model-dir", MODEL, "--out", "."]
    console.print(f"$ export TINKER_BASE_URL={base_url} TINKER_API_KEY=tml-…", style="bold")
    console.print(f"$ python {ROOT / 'examples/first_steps.py'} {shlex.join(arguments)}", style="bold")
    # PEFT reads an attribute that transformers 5 has renamed.
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore::FutureWarning", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, find_program(), *arguments], cwd=out, env={**os.environ, **environment, **quiet}, check=False
    )
    if done.returncode != 0:
        raise CommandFailed(f"The program failed. What there is to see:\n{shell.where_to_look()}")


def fetch_model(shell: Shell, out: Path) -> None:
    """Download the tokenizer to a directory with the name of the model, in the folder of the program.

    The SDK reads the tokenizer from this directory.
    """
    console.print(f"$ cd {OUT}", style="bold")
    command = ("kubectl", "exec", f"{SESSION}-0", "--", "tar", "-C", "/models", "-c", MODEL)
    console.print(f"$ {shlex.join(command)} | tar -x", style="bold")
    with tarfile.open(fileobj=BytesIO(shell.read(*command))) as files:
        extract_files(files, out)


def api_key(shell: Shell) -> str:
    return base64.b64decode(
        shell.read("kubectl", "get", "secret", "tinsmith-api-key", "--output=jsonpath={.data.key}")
    ).decode()


def wait_until_answering(base_url: str) -> None:
    """Wait until the server answers. An ingress controller, and the port forwarding of kubectl, need a moment to start.

    Raises ClusterError if the server does not answer.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{base_url}/api/v1/healthz", trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise ClusterError(f"{base_url} did not lead to the API server within {ANSWER_SECONDS} s.")


def chapter(title: str) -> None:
    console.print(f"\n{title}", style="bold blue")


def say_what_next(shell: Shell, seconds: float) -> None:
    key = "kubectl get secret tinsmith-api-key -o jsonpath='{.data.key}' | base64 -d"
    base_url = shell.cluster.ingress_url if shell.cluster.ingress_address else "http://127.0.0.1:8000"
    console.print(f"\nThat took {seconds:.0f} seconds. The files are in {OUT}; what was installed stays up.")
    console.print("\nNext", style="bold")
    console.print(shell.where_to_look())
    if not shell.cluster.ingress_address:
        console.print(f"  kubectl port-forward {SERVICE} 8000:80 &")
    console.print(f"  export TINKER_BASE_URL={base_url} TINKER_API_KEY=$({key})")
    console.print(f"  (cd {OUT} && tinsmith doctor)")
    console.print(f"  {clean_up(shell.cluster)}        # when you have seen enough")


def clean_up(cluster: Cluster) -> str:
    """Remove the demo. A user's cluster keeps the CRDs, because other objects may depend on the CRDs."""
    if cluster.name:
        return f"make cluster-down NAME={cluster.name}"
    return f"kubectl delete tsess {SESSION} && helm uninstall tinsmith && kubectl delete namespace {NAMESPACE}"


if __name__ == "__main__":
    sys.exit(main())
