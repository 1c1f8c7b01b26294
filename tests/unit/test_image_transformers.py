"""A worker imports what it needs, and reads a model, on the transformers of each image for GPUs.

Those are older than the tests' own. The images themselves are too large to be built here. PyTorch and all else are
those of this environment.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_environment import KNOWN
from support.module_imports import ROOT, failed_imports, import_statements, sources
from support.requirements import require_environment
from support.whole_models import whole_model

VERSIONS = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())
IMAGES = {
    "vllm": VERSIONS["gpu"]["vllm"],
    "sglang": VERSIONS["gpu"]["sglang"],
    "nemo-rl": VERSIONS["nemo-rl"],
    "miles": VERSIONS["miles"],
}
OF_RANKS = re.compile(r"tinsmith_trainer\.engines\.(megatron\b|nemo_rl\.(actor|worker)$)")
"""Megatron's engine has an image with the tests' own transformers; the others are imported by NeMo RL's ranks alone."""
ASKED_FOR_FIRST = "from transformers.utils.chat_parsing import ResponseParser"
"""Runs only where find_spec has found the module; test_model_language.py has the answers of a worker without it."""

MADE_DENSE = f"""
import sys, pathlib, tempfile
sys.path.append({str(ROOT / "tests")!r})
from support.zoo.stored_formats import read_as_its_dense_twin
with tempfile.TemporaryDirectory() as folder: read_as_its_dense_twin("mxfp4", pathlib.Path(folder))
"""
"""Fails where transformers makes MXFP4 dense in a narrower dtype than was asked for."""
READ_MODEL = "from tinsmith_trainer.sampling.token_server.served_model import read_model; read_model"


def late_imports() -> Iterator[str]:
    """Yield the imports from transformers that functions of the worker run: no import of their module finds a fault."""
    for file in sources("tinsmith_trainer"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                        yield ast.unparse(node)


def failed_on(environment: Path) -> dict[str, str]:
    [packages] = environment.glob("lib/python*/site-packages")
    modules = [statement for statement in import_statements("tinsmith_trainer") if not OF_RANKS.search(statement)]
    late = sorted(set(late_imports()) - {ASKED_FOR_FIRST})
    # Transformers 5.6 makes no text model out of a whole model's configuration, as all later ones do.
    reading = f"{READ_MODEL}({str(whole_model('qwen3_5'))!r})"
    return failed_imports([*modules, *late, reading, MADE_DENSE], first_on_path=packages)


@pytest.mark.slow("imports another version of transformers, in a process of its own")
def test_a_worker_imports_and_reads_a_model_on_the_transformers_of_vllm() -> None:
    assert failed_on(require_environment("transformers-vllm")) == {}


@pytest.mark.slow("imports another version of transformers, in a process of its own")
def test_a_worker_imports_and_reads_a_model_on_the_transformers_of_sglang() -> None:
    assert failed_on(require_environment("transformers-sglang")) == {}


@pytest.mark.slow("imports another version of transformers, in a process of its own")
def test_a_worker_imports_and_reads_a_model_on_the_transformers_of_nemo_rl() -> None:
    assert failed_on(require_environment("transformers-nemo-rl")) == {}


@pytest.mark.slow("imports another version of transformers, in a process of its own")
def test_a_worker_imports_and_reads_a_model_on_the_transformers_of_miles() -> None:
    assert failed_on(require_environment("transformers-miles")) == {}


@pytest.mark.parametrize("image", IMAGES)
def test_these_are_the_versions_that_the_images_bring(image: str) -> None:
    lock = KNOWN[f"transformers-{image}"].lock.read_text()
    assert re.findall(r"^transformers==([\w.]+)", lock, re.MULTILINE) == [IMAGES[image]["transformers"]["version"]]
    assert len(IMAGES[image]["transformers"]["reason"]) > 20
