"""The chart as helm renders it, without a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "tinsmith"
HELM = Path(sys.executable).with_name("helm")
RELEASE = "tinsmith"
NAMESPACE = "research"
KUBERNETES_VERSION = "1.34.0"
REGISTRY = "tinsmith.local"

Object = dict[str, Any]


class HelmFailed(Exception):
    """`str(error)` is what helm said."""


def render(
    values: Mapping[str, Any], release: str = RELEASE, chart: Path = CHART, namespace: str = NAMESPACE
) -> list[Object]:
    """Every object of a release whose images are loaded into the nodes, the definitions included."""
    done = _template(json.dumps(with_registry(values)), release, chart, namespace)
    assert done.returncode == 0, done.stderr
    # The definitions are thousands of lines, which the loader in Python reads ten times slower.
    return [each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each]


def notes(values: Mapping[str, Any]) -> str:
    """Return what helm prints when it has installed the release.

    Helm renders notes only where there is a cluster, so this renders a copy of the chart that has them in an object.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(CHART, Path(folder) / "tinsmith")
        templates = copy / "templates"
        text = (templates / "NOTES.txt").rename(templates / "_notes.tpl").read_text()
        (templates / "_notes.tpl").write_text('{{ define "notes" }}' + text + "{{ end }}")
        (templates / "notes.yaml").write_text(
            '{kind: Notes, metadata: {name: notes}, text: {{ include "notes" . | quote }}}'
        )
        found: str = named(render(values, chart=copy), "Notes", "notes")["text"]
    return found


def refusal(values: Mapping[str, Any], release: str = RELEASE) -> str:
    """Return helm's message about values that it must refuse."""
    done = _template(json.dumps(with_registry(values)), release, CHART)
    assert done.returncode != 0, "helm took these values"
    return done.stderr


@cache
def _template(values: str, release: str, chart: Path, namespace: str = NAMESPACE) -> subprocess.CompletedProcess[str]:
    """Render the chart once for each set of values: the chart does not change while tests run."""
    options = ["--namespace", namespace, "--kube-version", KUBERNETES_VERSION, "--values", "-"]
    command = [str(HELM), "template", release, str(chart), *options]
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False)


def lint() -> str:
    done = subprocess.run([str(HELM), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- looking at what was rendered


def named(objects: Iterable[Object], kind: str, name: str) -> Object:
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pods(objects: Iterable[Object]) -> dict[str, Object]:
    """Specs of pods, and of those that workloads make, by what they come from."""
    found = {}
    for each in objects:
        if each["kind"] == "Pod":
            found[f"Pod {each['metadata']['name']}"] = each["spec"]
        elif each["kind"] == "Deployment":
            found[f"Deployment {each['metadata']['name']}"] = each["spec"]["template"]["spec"]
    return found


def environment(pod: Object) -> dict[str, Any]:
    """Return the variables of the pod's one container that have a literal value."""
    [container] = pod["containers"]
    return {each["name"]: each.get("value") for each in container["env"]}


# ---- making values


def with_registry(values: Mapping[str, Any]) -> Object:
    """Return the values, with the registry of the images in the nodes where they name none."""
    if values.get("image", {}) is None:
        return dict(values)
    return merged(at("image.registry", REGISTRY), values)


def at(path: str, value: Any) -> Object:
    """`a.b.c` set to a value, as values of the chart."""
    *parents, last = path.split(".")
    values: Object = {last: value}
    for name in reversed(parents):
        values = {name: values}
    return values


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Object:
    """Merge two values: objects member by member, and otherwise the second wins."""
    both = dict(first)
    for name, value in second.items():
        mine = both.get(name)
        both[name] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return both


def looked_up(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at `a.b.c`, or None."""
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found
