"""Commands in a built image.

A command in an image runs in the same way as in a pod. The trainer's own tests run with the image's Python and PyTorch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from images.archives import build_to_run
from images.builder import Program
from images.commands import run
from images.sources import IMAGES, ROOT

TOOLS_LOCK = ROOT / "dev" / "requirements" / "image-tests.txt"
FIND_UV = ROOT / "dev" / "scripts" / "find-uv"
SOURCE = "/tmp/source"
TOOLS = "/tmp/tools"
# Tests whose results could differ with another Python or another PyTorch build. The slow tests repeat these promises
# on other devices, in other precisions and at larger sizes.
TRAINER_TESTS = (
    "-m",
    "quick",
    "tests/contract/engine",
    *(f"tests/unit/trainer/{folder}" for folder in ("engines", "sampling/builtin", "torch_model")),
)
# These tests need the client's command, the SDK, Megatron, Ray or Triton, which the image omits on purpose.
NOT_OF_THE_IMAGE = (
    "tests/unit/trainer/engines/custom_losses",
    "tests/unit/trainer/engines/megatron",
    "tests/unit/trainer/engines/miles",
    "tests/unit/trainer/engines/nemo_rl",
    "tests/unit/trainer/engines/test_loss_kernels.py",
)


def run_in_image(name: str, program: Program) -> subprocess.CompletedProcess[str]:
    """Run a program in the image of this checkout. A missing image is built first.

    The caller checks the exit status of the program.
    """
    command = _command(name, program)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_trainer_tests(arguments: Sequence[str]) -> int:
    """Run the tests that `arguments` names. Without arguments, run the tests of engines, models and samplers.

    Return pytest's exit status.
    """
    with TemporaryDirectory(prefix="tinsmith-tools-") as tools:
        _install_tools(Path(tools))
        return subprocess.run(_command("trainer", _pytest(Path(tools), arguments)), check=False).returncode


def _command(name: str, program: Program) -> list[str]:
    return build_to_run(name).command(IMAGES[name].reference, program)


def _pytest(tools: Path, arguments: Sequence[str]) -> Program:
    ignored = [f"--ignore={file}" for file in NOT_OF_THE_IMAGE]
    return Program(
        words=["env", f"--chdir={SOURCE}", "python3", "-m", "pytest", *ignored, *(arguments or TRAINER_TESTS)],
        environment={
            # The checkout's packages come first, because a test may need newer code than the image has.
            "PYTHONPATH": f"{TOOLS}:{SOURCE}/trainer_image:{SOURCE}/rpc",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
            "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis",
            "HF_HUB_OFFLINE": "1",
        },
        mounts={ROOT: SOURCE, tools: TOOLS},
    )


def _install_tools(directory: Path) -> None:
    """Install the test tools, for the Python of the image and the platform of this machine."""
    uv = run(FIND_UV).strip()
    wanted = ["--python-version", "3.13", "--only-binary=:all:", "--no-deps", "--require-hashes"]
    directory.chmod(0o755)
    run(uv, "pip", "install", "--quiet", "--target", directory, *wanted, "--requirement", TOOLS_LOCK)
