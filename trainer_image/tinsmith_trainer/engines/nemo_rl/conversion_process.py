"""Watches the process that converts a model: its progress, its end, and that it does not outlive this one."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from tinsmith_trainer.engines.nemo_rl.environment import for_ranks
from tinsmith_trainer.errors import ServerError

log = structlog.get_logger(__name__)

IMPORTER = "tinsmith_trainer.engines.nemo_rl.bridge_import"
ITERATION = "iter_0000000"
"""The folder in which Megatron-Bridge saves weights that no step has changed."""
FAILURE = "failure"
"""Where the importer leaves its error."""

PROGRESS_SECONDS = 10.0
STANDARD_ERROR = 2
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Of ranks. The importer is alone, and takes a port that is free."""


class OutOfMemory(ServerError):
    """The kernel killed the process that converted."""


def import_model(
    directory: Path,
    folder: Path,
    python: Path,
    environment: Mapping[str, str],
    *,
    lock: int,
    progress_seconds: float = PROGRESS_SECONDS,
) -> None:
    """Converts the model in `directory` into `folder`, which is there and empty. Raises ServerError, or OutOfMemory.

    `python` has Megatron-Bridge, which this process need not have. The child holds the descriptor `lock` too: were
    this process killed, nobody else would begin while the child, which ends when its input does, still writes.
    """
    started = time.monotonic()
    log.info(
        "converting the base model to Megatron's format", directory=str(directory), bytes=_weights_bytes(directory)
    )
    child = subprocess.Popen(
        [str(python), "-m", IMPORTER, str(directory), str(folder)],
        env=_importers_environment(environment),
        stdin=subprocess.PIPE,
        stdout=STANDARD_ERROR,
        pass_fds=[lock],
    )
    try:
        _wait(child, folder, started, progress_seconds)
    finally:
        child.kill()
        child.communicate()
    if child.returncode:
        failed = f"The model in {directory} could not be converted to Megatron's format: "
        raise _error(child.returncode)(failed + _reason(child.returncode, folder))
    log.info("converted the base model", seconds=_since(started), bytes=_written_bytes(folder))


def _importers_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without secrets, and offline: all it reads is in the model's directory."""
    kept = {name: value for name, value in for_ranks(environment).items() if name not in _RENDEZVOUS}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def _wait(child: subprocess.Popen[bytes], folder: Path, started: float, progress_seconds: float) -> None:
    while True:
        try:
            child.wait(progress_seconds)
        except subprocess.TimeoutExpired:
            log.info("the base model is being converted", seconds=_since(started), bytes=_written_bytes(folder))
        else:
            return


def _error(status: int) -> type[ServerError]:
    return OutOfMemory if status == -signal.SIGKILL else ServerError


def _reason(status: int, folder: Path) -> str:
    if status == -signal.SIGKILL:
        return (
            "its process was killed, as the kernel does where memory runs out. It needs about twice the model's size: "
            "give the container more memory."
        )
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}; the lines above are its last."
    failure = folder / FAILURE
    said = failure.read_text() if failure.exists() else ""
    return said or f"its process ended with {status}; the lines above are its last."


def _weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))


def _written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{ITERATION}/*.distcp"))


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)
