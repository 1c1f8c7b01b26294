"""From nothing to a cluster that trains: `make demo-cluster` shows the commands of docs/kubernetes.md as it runs them.

The cluster is one of the tests' own, called `demo`; it stays up afterwards, to look at, and a second run finds it.
"""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from testcluster.cluster import Cluster, recorded
from testcluster.errors import ClusterError
from testcluster.lifecycle import bring_up
from testcluster.project_images import ImagesNotBuilt, build_images
from tinsmith.demo import MODEL, find_program

ROOT = Path(__file__).parents[1]
OUT = Path("demo-output") / "cluster"
NAME = "demo"
NAMESPACE = "tinsmith"
SESSION = "tiny"
CHART_PARTS = {"operator": "operator", "api-server": "apiServer", "trainer": "worker"}
READY_SECONDS = 300
ANSWER_SECONDS = 120
INTERRUPTED = 130

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> int:
    started = time.monotonic()
    try:
        chapter("A Kubernetes on this machine")
        cluster = recorded(bring_up(NAME, "node"))
        chapter("The images, built and brought into the cluster")
        images = bring_images(cluster)
        shell = Shell(cluster)
        chapter("Installing Tinsmith")
        install(shell, images)
        chapter("A base model in a volume, and a session that serves it")
        serve_tiny_model(shell)
        chapter("A program of the tinker SDK, through the ingress")
        train(shell, cluster.ingress_url)
    except KeyboardInterrupt:
        errors.print(
            f"\nInterrupted. `make demo-cluster` goes on from here; `make cluster-down NAME={NAME}` cleans up."
        )
        return INTERRUPTED
    except (ClusterError, ImagesNotBuilt, CommandFailed) as error:
        errors.print(f"\nmake demo-cluster: {error}", markup=False)
        return 1
    say_what_next(shell, cluster.ingress_url, time.monotonic() - started)
    return 0


class CommandFailed(Exception):
    """A command that was shown, or a question asked quietly, ended with an error, which it has printed."""


class Shell:
    """Runs commands against the cluster and shows each one as one would type it."""

    def __init__(self, cluster: Cluster) -> None:
        self.kubeconfig = cluster.kubeconfig
        self.programs = {"kubectl": cluster.kubectl_program, "helm": Path(sys.executable).with_name("helm")}
        self._environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def run(self, *command: str) -> None:
        """What it prints is shown. Raises CommandFailed."""
        console.print(f"[bold]$ {shlex.join(command)}[/bold]")
        self._run(command, output=None)

    def read(self, *command: str) -> bytes:
        """Quietly. Raises CommandFailed."""
        return self._run(command, output=subprocess.PIPE)

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


def bring_images(cluster: Cluster) -> Path:
    """Returns values for the chart that name the very images, so that an older installation takes them up."""
    values = {}
    for part, archive in build_images().items():
        [image] = cluster.load_image(archive)
        console.print(f"every node has {image.name}")
        values[CHART_PARTS[part]] = {"image": {"digest": image.digest}}
    file = OUT / "images.yaml"
    (ROOT / OUT).mkdir(parents=True, exist_ok=True)
    (ROOT / file).write_text(yaml.safe_dump(values))
    return file


def install(shell: Shell, images: Path) -> None:
    if f"namespace/{NAMESPACE}" not in shell.read("kubectl", "get", "namespaces", "--output=name").decode().split():
        shell.run("kubectl", "create", "namespace", NAMESPACE)
        shell.run("kubectl", "label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    shell.run("kubectl", "config", "set-context", "--current", "--namespace", NAMESPACE)
    values = ("--values", "examples/values-one-node.yaml", "--values", str(images))
    ingress = ("--set", "apiServer.ingress.enabled=true")
    shell.run(
        "helm", "upgrade", "--install", "tinsmith", "charts/tinsmith", *values, *ingress, "--wait", "--hide-notes"
    )


def serve_tiny_model(shell: Shell) -> None:
    shell.run("kubectl", "apply", "-f", "examples/tiny-model.yaml")
    shell.run("kubectl", "wait", "job/make-tiny-model", "--for=condition=complete", f"--timeout={READY_SECONDS}s")
    shell.run("kubectl", "apply", "-f", "examples/session.yaml")
    shell.run("kubectl", "wait", f"tsess/{SESSION}", "--for=condition=Ready", f"--timeout={READY_SECONDS}s")
    shell.run("kubectl", "get", "tinsmith")


def train(shell: Shell, base_url: str) -> None:
    """Runs `examples/first_steps.py` where the model's tokenizer is; raises CommandFailed when it fails."""
    out = ROOT / OUT
    fetch_model(shell, out)
    wait_until_answering(base_url)
    environment = {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": api_key(shell)}
    arguments = ["--model", MODEL, "--base-model-dir", MODEL, "--out", "."]
    console.print(f"[bold]$ export TINKER_BASE_URL={base_url} TINKER_API_KEY=tml-…[/bold]")
    console.print(f"[bold]$ python {ROOT / 'examples/first_steps.py'} {shlex.join(arguments)}[/bold]")
    # peft reads an attribute that transformers 5 has renamed.
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore::FutureWarning", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, find_program(), *arguments], cwd=out, env={**os.environ, **environment, **quiet}, check=False
    )
    if done.returncode != 0:
        raise CommandFailed(f"The program failed. What there is to see:\n{shell.where_to_look()}")


def fetch_model(shell: Shell, out: Path) -> None:
    """The SDK needs the tokenizer where the program runs, under the model's name."""
    console.print(f"[bold]$ cd {OUT}[/bold]")
    command = ("kubectl", "exec", f"{SESSION}-0", "--", "tar", "-C", "/models", "-c", MODEL)
    console.print(f"[bold]$ {shlex.join(command)} | tar -x[/bold]")
    with tarfile.open(fileobj=BytesIO(shell.read(*command))) as files:
        files.extractall(out, filter="data")


def api_key(shell: Shell) -> str:
    return base64.b64decode(
        shell.read("kubectl", "get", "secret", "tinsmith-api-key", "--output=jsonpath={.data.key}")
    ).decode()


def wait_until_answering(base_url: str) -> None:
    """An ingress controller takes a moment to notice a new Ingress. Raises ClusterError when it does not."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{base_url}/api/v1/healthz", trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise ClusterError(f"The ingress at {base_url} did not lead to the API server within {ANSWER_SECONDS} s.")


def chapter(title: str) -> None:
    console.print(f"\n[bold blue]{title}[/bold blue]")


def say_what_next(shell: Shell, base_url: str, seconds: float) -> None:
    key = "kubectl get secret tinsmith-api-key -o jsonpath='{.data.key}' | base64 -d"
    console.print(f"\nThat took {seconds:.0f} seconds. The files are in {OUT}; cluster {NAME} stays up.")
    console.print("\n[bold]Next[/bold]")
    console.print(shell.where_to_look(), markup=False)
    console.print(f"  export TINKER_BASE_URL={base_url} TINKER_API_KEY=$({key})", markup=False)
    console.print(f"  (cd {OUT} && tinsmith doctor)")
    console.print(f"  make cluster-down NAME={NAME}        # when you have seen enough")


if __name__ == "__main__":
    sys.exit(main())
