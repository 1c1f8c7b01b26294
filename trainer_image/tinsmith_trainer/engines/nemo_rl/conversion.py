"""The conversion of the base model to Megatron's format.

One process converts the model once to a shared path, before ranks start.

NeMo RL would convert the model on all ranks when the ranks start (`handle_model_import` in
`nemo_rl/models/megatron/setup.py`), into a folder named after the model's path. The conversion by NeMo RL has three
problems. If the weights at the path change, the conversion of the old weights would still be used. An unfinished folder
of dead ranks would count as finished. Two groups of ranks would write the same files at the same time. Tinsmith's
conversion is named after the weights and the converter, belongs to one process at a time, and gets a marker when it is
complete. Ranks receive the path of the conversion, and never convert.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog

from tinsmith_trainer.disk.durable_files import make_directory, sync_directory, write_file
from tinsmith_trainer.engines.nemo_rl.environment import for_ranks
from tinsmith_trainer.errors import ServerError

log = structlog.get_logger(__name__)

IMPORTER = "tinsmith_trainer.engines.nemo_rl.bridge_import"
ITERATION = "iter_0000000"
"""The folder in which Megatron-Bridge saves weights before the first training step."""
FAILURE = "failure"
"""The file to which the importer writes an error."""

PROGRESS_SECONDS = 10.0
STANDARD_ERROR = 2
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Variables for the rendezvous of ranks, which the importer does not get.

The importer runs alone, and uses a free port.
"""


class ConversionOutOfMemory(ServerError):
    """An error for a converting process that the kernel killed for lack of memory."""


def import_model(
    directory: Path,
    folder: Path,
    python: Path,
    environment: Mapping[str, str],
    *,
    lock: int,
    progress_seconds: float = PROGRESS_SECONDS,
) -> None:
    """Convert the model in `directory` into the empty `folder`. Raises ServerError or ConversionOutOfMemory.

    `python` is an interpreter with Megatron-Bridge, which this process may lack. The child process also holds the
    lock's descriptor `lock`. If this process is killed, no other process can start a conversion while the child still
    writes. The child process ends when the standard input closes.
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
    """Return an environment without secrets and without access to hubs.

    The converter needs only files in the model's directory.
    """
    kept = {name: value for name, value in for_ranks(environment).items() if name not in _RENDEZVOUS}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def _wait(child: subprocess.Popen[bytes], folder: Path, started: float, progress_seconds: float) -> None:
    while True:
        try:
            child.wait(progress_seconds)
        except subprocess.TimeoutExpired:
            log.info("still converting the base model", seconds=_since(started), bytes=_written_bytes(folder))
        else:
            return


def _error(status: int) -> type[ServerError]:
    return ConversionOutOfMemory if status == -signal.SIGKILL else ServerError


def _reason(status: int, folder: Path) -> str:
    if status == -signal.SIGKILL:
        return (
            "its process was killed, probably out of memory. It needs about twice the model's size: give the container "
            "more memory."
        )
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}; see its output above."
    failure = folder / FAILURE
    reported = failure.read_text() if failure.exists() else ""
    return reported or f"its process ended with status {status}; see its output above."


def _weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))


def _written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{ITERATION}/*.distcp"))


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)


BRIDGE_COMMIT = "8c46dc4259080c510b7455f43e836fdff222c5d3"
"""The commit of Megatron-Bridge. Another version may not be able to read the files of this version."""

ROOT_VARIABLE = "NRL_MEGATRON_CHECKPOINT_DIR"
WHOLE = "tinsmith-whole"
RUN_CONFIG = "run_config.yaml"
POLL_SECONDS = 1.0


def converted_model(
    directory: Path,
    revision: str,
    python: Path,
    environment: Mapping[str, str] = os.environ,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Return the folder for NeMo RL's `pretrained_checkpoint`, converting the model if needed.

    If another process converts the model, wait until the other process has finished. `revision` is the digest of the
    weights in `directory`; `python` is the interpreter of the ranks. A conversion takes minutes, and as much disk space
    as the model. Raises ServerError.
    """
    folder = conversion_folder(revision, environment)
    if not _is_whole(folder):
        try:
            _convert_alone(directory, folder, python, environment, sleep)
        except OSError as error:
            raise ServerError(
                f"The model in {directory} cannot be converted to Megatron's format in {folder.parent}: {error}. The "
                f"folder must be writable, with free space of the model's size; {ROOT_VARIABLE} sets another folder."
            ) from error
    log.info("the base model is converted to Megatron's format", folder=str(folder))
    return folder / ITERATION


def conversion_folder(revision: str, environment: Mapping[str, str] = os.environ) -> Path:
    return _root(environment) / f"{revision}-{BRIDGE_COMMIT[:12]}"


def _root(environment: Mapping[str, str]) -> Path:
    """Return the folder that `get_megatron_checkpoint_dir` in `nemo_rl/models/policy/utils.py` returns."""
    if root := environment.get(ROOT_VARIABLE, "").strip():
        return Path(root)
    home = environment.get("HF_HOME", "").strip()
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "nemo_rl"


def _convert_alone(
    directory: Path, folder: Path, python: Path, environment: Mapping[str, str], sleep: Callable[[float], None]
) -> None:
    make_directory(folder.parent)
    with _alone(folder.with_name(f"{folder.name}.lock"), sleep) as lock:
        if _is_whole(folder):
            return
        if folder.exists():
            log.warning("restarting an unfinished conversion of the base model", folder=str(folder))
            shutil.rmtree(folder)
        folder.mkdir()
        import_model(directory, folder, python, environment, lock=lock)
        _mark_whole(folder)


def _is_whole(folder: Path) -> bool:
    return (folder / WHOLE).exists() and (folder / ITERATION / RUN_CONFIG).exists()


def _mark_whole(folder: Path) -> None:
    """Sync the files of the conversion, then mark the conversion as complete.

    In another order, a power cut could keep the mark but lose the weights.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_directory(path)
    write_file(folder / WHOLE, [])


@contextmanager
def _alone(lock: Path, sleep: Callable[[float], None]) -> Iterator[int]:
    """Hold a file lock.

    The kernel releases a lock when the processes that hold the lock end, so a dead process blocks no other process.
    """
    with lock.open("w") as file:
        waiting = False
        while not _taken(file.fileno()):
            if not waiting:
                log.info("waiting for another process to convert the base model", lock=str(lock))
                waiting = True
            sleep(POLL_SECONDS)
        yield file.fileno()


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
