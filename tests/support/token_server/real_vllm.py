"""vLLM itself, as its build for CPUs: `make package-environments` installs it, `make test-vllm` asks it.

What a CPU computes is the model runner, the scheduler and the HTTP server of the real thing over other kernels, which
`vllm_cpu/` mends where they are wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import package_environment
from support.requirements import require_environment
from support.tiny_models import LONG, tiny_directory
from tinsmith_trainer.sampling.token_server.served_model import read_model

from .look_alikes import call
from .shared import SharedServer

PLUGIN = Path(__file__).with_name("vllm_cpu")
SHAPE = LONG
"""A shape with heads of 32, the smallest that its kernels have; those for GPUs have 64.

With smaller ones it reports that it is healthy, and dies of the first request.
"""

EXTRA = (
    "--enforce-eager",  # else it compiles for minutes
    "--block-size=32",  # else 128, longer than most of the tests' prompts
    "--max-num-seqs=64",  # it reserves memory for each
    "--max-num-batched-tokens=512",  # so that long prompts take several steps, as they do on GPUs
    "--enable-server-load-tracking",  # by which the tests see what runs
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; else a share of the machine's memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes cores for itself that others use
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else it compiles C++ in spite of --enforce-eager
    "VLLM_SERVER_DEV_MODE": "1",  # opens the routes that pause it
    "PYTHONDONTWRITEBYTECODE": "",  # a third of the start is compiling Python, once
}


def start_real_vllm(folder: Path) -> SharedServer:
    """Start vLLM with a tiny model of `SHAPE`. Skips the test where it is not installed."""
    path = f"{installed_vllm() / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**real_vllm_variables(folder), "PATH": path}
    return SharedServer("vllm", read_model(str(tiny_directory(shape=SHAPE))), variables, EXTRA, RealHand)


def installed_vllm() -> Path:
    """Return vLLM's environment. Skips the test where it is not installed."""
    return require_environment("vllm-cpu")


def real_vllm_variables(folder: Path) -> dict[str, str]:
    """Return the variables by which its process runs on a CPU, and keeps its files in `folder`."""
    return {
        **ENVIRONMENT,
        "PYTHONPATH": str(PLUGIN),
        "LD_LIBRARY_PATH": package_environment.lent_libraries(),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "TMPDIR": str(folder),
    }


class RealHand:
    """A hand that uses the server's own routes: some are open only in its mode for developers."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextmanager
    def held(self) -> Iterator[None]:
        self._call("/pause?mode=keep&clear_cache=false", b"")
        try:
            yield
        finally:
            self._call("/resume", b"")

    def state(self) -> dict[str, Any]:
        models = json.loads(self._call("/v1/models"))["data"]
        return {
            "running": json.loads(self._call("/load"))["server_load"],
            "adapters": [model["id"] for model in models if model["parent"] is not None],
        }

    def _call(self, path: str, data: bytes | None = None) -> bytes:
        return call(self._address, path, data)
