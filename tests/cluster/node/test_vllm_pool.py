"""A pool of `engine: vllm` with vLLM itself, in its build for CPUs, which samples what a session trains meanwhile.

The session samples nothing, so that every sample is the pool's. Pools of this engine ask for a GPU: the node reports
one, which no program uses.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tinker
import yaml
from cluster.node.conftest import EXAMPLES, wait_gone
from package_environment import IMAGE_PYTHON
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.kubernetes.installation import Installation, Object, wait_for
from support.requirements import InstalledBy, require
from support.token_server.real_vllm import ENVIRONMENT, EXTRA, PLUGIN, SHAPE, installed_vllm
from testcluster.cluster import Cluster
from tinker import types
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

_PACKAGES = Path("lib", f"python{IMAGE_PYTHON}", "site-packages")
# The environment's own script names an interpreter of this machine.
_PROGRAM = """\
#!/bin/sh
exec "${0%/*}/python" -m vllm.entrypoints.cli.main "$@"
"""
_SETTINGS = """\
home = /usr/bin
include-system-site-packages = false
"""


def lay_out_vllm(folder: Path) -> None:
    """Write `folder`, whose `bin/vllm` runs in the trainer's image wherever the folder is mounted there.

    Skips the test where vLLM is not installed, or for another Python than the image's.
    """
    packages = installed_vllm() / _PACKAGES
    require(
        packages.is_dir(),
        f"Pods have Python {IMAGE_PYTHON}, and vLLM is installed for another: install that Python",
        InstalledBy.PACKAGE_ENVIRONMENTS,
    )
    target = folder / _PACKAGES
    target.parent.mkdir(parents=True)
    _link_tree(packages, target.parent)
    # PyTorch looks for NVIDIA's libraries in its own folder.
    nvidia = find_spec("nvidia")
    for root in (nvidia.submodule_search_locations if nvidia else None) or ():
        _link_tree(Path(root), target)
    shutil.copytree(PLUGIN, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    _add_program(folder)


def _link_tree(source: Path, into: Path) -> None:
    """Link the tree into a folder with other files. Copies, where `into` is on another disk."""
    links = ["--link"] if source.stat().st_dev == into.stat().st_dev else []
    subprocess.run(["cp", "--archive", "--no-clobber", *links, source, into], check=True)


def _add_program(folder: Path) -> None:
    (folder / "pyvenv.cfg").write_text(_SETTINGS)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").symlink_to("/usr/bin/python3")
    vllm = programs / "vllm"
    vllm.write_text(_PROGRAM)
    vllm.chmod(0o755)


NAME = "vllm"
MODEL = "demo/vllm"
STORAGE = "shared"
SEEN_AT = "/models/vllm"
IMAGE = "tinsmith.local/tinsmith/trainer:0.1.0"
IMAGES_PATH = "/opt/tinsmith/bin:/usr/local/bin:/usr/bin:/bin"
GPU = "nvidia.com/gpu"
TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def pool(installation: Installation) -> Iterator[str]:
    """Return a session and a pool of one model, ready."""
    volumes = installation.kubectl("get", "storageclass", STORAGE, "--ignore-not-found")
    require(bool(volumes), f"This cluster has no storage class `{STORAGE}`, whose volumes are folders of this machine.")
    with volume_with_vllm(installation) as claim, a_gpu(installation.cluster):
        for manifest in (session_manifest(claim), pool_manifest(claim)):
            installation.apply(manifest)
        try:
            yield NAME
        finally:
            installation.kubectl("delete", f"samplerpool/{NAME}", f"trainingsession/{NAME}", "--wait=false")
            wait_gone(installation, "deployment", f"{NAME}-sampler")
            wait_gone(installation, "pod", f"{NAME}-0")


@contextmanager
def volume_with_vllm(installation: Installation) -> Iterator[str]:
    """Return a claim whose volume has the model and vLLM."""
    spec = {
        "storageClassName": STORAGE,
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "8Gi"}},
    }
    installation.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": NAME}, "spec": spec})
    installation.kubectl("wait", "pvc", NAME, "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
    try:
        claim = installation.get("pvc", NAME) or {}
        volume = installation.get("pv", claim["spec"]["volumeName"]) or {}
        folder = Path(volume["spec"]["hostPath"]["path"])
        for file in make_tiny_model(folder / "tiny", shape=SHAPE).iterdir():
            file.chmod(0o644)  # its weights are for their owner's eyes
        lay_out_vllm(folder / "vllm")
        yield NAME
    finally:
        installation.kubectl("delete", "pvc", NAME, "--wait=false")


@contextmanager
def a_gpu(cluster: Cluster) -> Iterator[None]:
    """Report a GPU, as a device plugin does."""
    path = f"/status/capacity/{GPU.replace('/', '~1')}"
    patch_node(cluster, {"op": "add", "path": path, "value": "1"})
    try:
        yield
    finally:
        patch_node(cluster, {"op": "remove", "path": path})


def patch_node(cluster: Cluster, change: Object) -> None:
    cluster.kubectl(
        "patch", "node", cluster.nodes[0], "--subresource=status", "--type=json", f"--patch={json.dumps([change])}"
    )


def served_from(claim: str, example: str) -> Any:
    """Return the example's manifest, for the model on the claim's volume."""
    manifest = yaml.safe_load((EXAMPLES / example).read_text())
    manifest["metadata"]["name"] = NAME
    manifest["spec"]["model"]["name"] = MODEL
    manifest["spec"]["model"]["source"]["persistentVolumeClaim"] = {"claimName": claim, "path": "tiny"}
    return manifest


def session_manifest(claim: str) -> Object:
    manifest: Object = served_from(claim, "session.yaml")
    manifest["spec"]["sampling"] = "None"
    manifest["spec"]["storage"]["retentionPolicy"] = {"whenDeleted": "Delete"}
    return manifest


def pool_manifest(claim: str) -> Object:
    manifest: Object = served_from(claim, "sampler-pool.yaml")
    variables = {**ENVIRONMENT, "PATH": f"{SEEN_AT}/bin:{IMAGES_PATH}"}
    manifest["spec"] |= {
        "engine": "vllm",
        "replicas": 1,
        "adapters": {"maxLoaded": 2, "maxRank": 8},
        "resources": {"requests": {"cpu": "250m", "memory": "3Gi"}, "limits": {GPU: 1, "memory": "6Gi"}},
        "serverArguments": list(EXTRA),
        "pod": {"image": IMAGE, "env": [{"name": name, "value": value} for name, value in variables.items()]},
    }
    return manifest


def train(model: tinker.TrainingClient, steps: int) -> None:
    for _ in range(steps):
        model.forward_backward([next_token_datum(TOKENS)], "cross_entropy")
        step = model.optim_step(adam(5e-3))
    step.result()


def logprobs_of_trainer(model: tinker.TrainingClient, tokens: list[int]) -> list[float]:
    [logprobs] = exact_logprobs(model.forward([next_token_datum(tokens)], "cross_entropy").result())
    return logprobs


def scored(sampler: tinker.SamplingClient) -> list[float | None]:
    return sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]


def test_vllm_in_a_pool_samples_saves_made_during_its_operation(installation: Installation, pool: str) -> None:
    with installation.service_client() as client:
        installation.wait_ready(pool)
        model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
        train(model, 3)
        first = model.save_weights_and_get_sampling_client().result()
        of_first = logprobs_of_trainer(model, TOKENS)
        wait_for(lambda: is_ready(installation, pool), 600, lambda: f"{installation.get('samplerpool', pool)}")
        assert scored(first) == pytest.approx(of_first, abs=1e-3)

        train(model, 3)
        second = model.save_weights_and_get_sampling_client().result()
        of_second = logprobs_of_trainer(model, TOKENS)
        assert scored(second) == pytest.approx(of_second, abs=1e-3)
        assert of_second != pytest.approx(of_first, abs=1e-2)
        assert scored(first) == pytest.approx(of_first, abs=1e-3), "both are served, side by side"

        [sequence] = second.sample(types.ModelInput.from_ints(TOKENS[:4]), 1, GREEDY).result().sequences
        expected = logprobs_of_trainer(model, [*TOKENS[:4], *sequence.tokens])
        assert sequence.logprobs == pytest.approx(expected[3:], abs=1e-3)


def is_ready(installation: Installation, pool: str) -> bool:
    status = (installation.get("samplerpool", pool) or {}).get("status") or {}
    return bool(status.get("readyReplicas"))
