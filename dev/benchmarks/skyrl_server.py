"""Installs SkyRL's server of the Tinker API into a separate environment once, and starts the server on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from testcluster.places import cache_directory

VERSION = "0.4.0"
REQUIREMENTS = (f"skyrl[tinker,jax]=={VERSION}", "aiohttp")
"""SkyRL and its packages. SkyRL needs aiohttp, but does not list aiohttp in its metadata."""
PYTHON = "3.12"
FIND_PYTHON = Path(__file__).parents[1] / "scripts" / "find-python"
MODEL = "tiny/qwen3"
START_SECONDS = 180.0

LAUNCH = """
import sys
import skyrl.tinker.api as api
from skyrl.tinker.config import config_to_argv
engine = [sys.executable, "-m", "skyrl.tinker.engine"]
api._build_uv_run_cmd_engine = lambda parent, config: [*engine, *config_to_argv(config)]
source = open(api.__file__).read()
main = source[source.index('if __name__ == "__main__"'):]
exec(compile(main, api.__file__, "exec"), {**vars(api), "__name__": "__main__"})
"""
"""SkyRL's own start command without `uv run`, because `uv run` would install SkyRL again for the engine."""


def environment_directory() -> Path:
    return cache_directory() / f"skyrl-{VERSION}"


def installed_python() -> Path:
    """Return the Python of SkyRL's environment. A missing environment is made, which takes minutes and 6 GB."""
    environment = environment_directory()
    complete = environment / "complete"
    if not complete.exists():
        shutil.rmtree(environment, ignore_errors=True)
        python = subprocess.run([FIND_PYTHON, PYTHON], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        subprocess.run([python, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin/python", "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        complete.touch()
    return environment / "bin/python"


@contextmanager
def running_skyrl(python: Path, model: Path, *, port: int, adapters: int, scratch: Path) -> Iterator[str]:
    """Start SkyRL with slots for this number of adapters, and yield the address of the server.

    `scratch`: a folder that this function creates. Raises TimeoutError, with the server's output, if the server does
    not answer.
    """
    (scratch / MODEL).parent.mkdir(parents=True)
    (scratch / MODEL).symlink_to(model.resolve())
    # One slot is for the base model itself.
    options = {"max_lora_adapters": adapters + 1, "max_lora_rank": 32}
    command = [str(python), "-c", LAUNCH, "--host=127.0.0.1", f"--port={port}", f"--base-model={MODEL}"]
    command += ["--backend=jax", f"--backend-config={json.dumps(options)}", f"--checkpoints-base={scratch}/checkpoints"]
    command += [f"--database-url=sqlite:///{scratch}/skyrl.db"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    log = scratch / "skyrl.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield _wait_until_it_answers(f"http://127.0.0.1:{port}", server, log)
    finally:
        _end(server)


def _wait_until_it_answers(url: str, server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/api/v1/healthz", timeout=2).is_success:
                return url
        except httpx.TransportError:
            time.sleep(0.5)
    raise TimeoutError(f"SkyRL does not answer: {log.read_text()[-2000:]}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and the engine, which is a process in the same group."""
    try:
        os.killpg(server.pid, 15)
        server.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, 9)
        server.wait()
    except ProcessLookupError:
        sys.stderr.write("SkyRL had ended by itself\n")
