"""Ray for one engine. The worker starts Ray in this container, or connects to a running cluster.

Most of Ray's log lines are hidden, and Ray gets none of the worker's secrets.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from tinsmith_trainer.errors import ServerError

log = structlog.get_logger(__name__)

PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HF_HOME")
PASSED_ON_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "GLOO_", "RAY_")
"""The prefixes of environment variables that ranks need.

Ranks do not get other variables, because some variables hold keys of object stores and hubs.
"""

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""The variable that selects this worker's GPUs."""

SHARED_MEMORY = "/dev/shm"
SMALLEST_OBJECT_STORE_BYTES = 80 * 1024**2
LARGEST_OBJECT_STORE_BYTES = 2 * 1024**3
LOST_HEAD_SECONDS = 10
"""The time after which a cluster without a connection to the head node counts as lost. Ray's default is a minute."""

ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Its handler would abort the worker at a SIGTERM, which requests a clean end.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # 30 s by default, which is too short on a busy node.
    "RAY_gcs_server_port_wait_time_s": "120",
}
SYSTEM_CONFIG: Mapping[str, Any] = {"worker_niceness": 0}
"""Settings that keep the priority of Ray's workers normal, because ranks are the main work of this machine."""
RAY_FOLDER = "/tmp/ray"
"""Ray's default folder for logs and sockets. Pods mount a volume at this path."""
FOLDER_PREFIX = "tinray-"
SHORT_FOLDER = "/tmp"
LONGEST_SOCKET_BYTES = 107
BELOW_FOLDER = "/session_2026-01-02_03-04-05_678901_4194304/sockets/plasma_store"
"""The longest path of a Ray socket, relative to Ray's folder."""


def prepare_for_ray() -> None:
    """Set the environment variables with Ray's settings.

    Call this before the process imports Ray, because Ray reads the variables at import.
    """
    os.environ.update(ALWAYS)


class RayCluster:
    """A connection of this process to Ray as a driver. Call `prepare_for_ray` before.

    Ray allows one connection per process.
    """

    def __init__(self, address: str | None, *, cpus: int, gpus: int = 0, shows_actors: bool = False) -> None:
        """Attach to `address`. If `address` is None, start Ray with `cpus` and `gpus`.

        With `shows_actors`, the output of actors appears in this process's output. Raises ServerError if Ray cannot be
        reached or started.
        """
        self._folder: str | None = None
        try:
            if address is not None:
                _attach(address, shows_actors)
            else:
                self._folder = start_ray(functools.partial(_start, cpus=cpus, gpus=gpus, shows_actors=shows_actors))
        except Exception as error:
            self.close()
            where = "in this container" if address is None else f"at {address}"
            raise ServerError(f"Ray {where} does not answer: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Disconnect, and end Ray if this process started it. Idempotent."""
        stop_ray(self._folder)


def new_folder() -> str:
    """Create a folder named after this process, and remove the folders of killed processes.

    The folder's path must be short, because sockets need short names.
    """
    parent = _parent()
    for folder in parent.glob(f"{FOLDER_PREFIX}*-*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        # In a container every process has the same id.
        if owner.isdigit() and (owner == str(os.getpid()) or not Path("/proc", owner).exists()):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=parent)


def _parent() -> Path:
    """Return a parent folder that is short enough for the longest socket name.

    On many machines, the path in $TMPDIR is too long.
    """
    if os.access(RAY_FOLDER, os.W_OK):
        return Path(RAY_FOLDER)
    usual = Path(tempfile.gettempdir())
    longest = f"{usual}/{FOLDER_PREFIX}4194304-abcdefgh{BELOW_FOLDER}"
    return usual if len(os.fsencode(longest)) <= LONGEST_SOCKET_BYTES else Path(SHORT_FOLDER)


def _attach(address: str, shows_actors: bool) -> None:
    import ray

    ray.init(address, log_to_driver=shows_actors, configure_logging=False, logging_level=logging.ERROR)


def start_ray(start: Callable[[str], None]) -> str:
    """Call `start` with a new folder, and return the folder of the running Ray.

    During a start, Ray waits 30 s for its own programs. A busy node may need more time, so a failed start is repeated.
    """
    try:
        return _start_once(start)
    except Exception as error:
        log.warning("Ray did not start; starting it again", reason=f"{type(error).__name__}: {error}")
        return _start_once(start)


def stop_ray(folder: str | None) -> None:
    """Disconnect from Ray, and remove `folder`, which belongs to a Ray that this process started."""
    _shut_down()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _start_once(start: Callable[[str], None]) -> str:
    """Start Ray, or clean up after a failure."""
    folder = new_folder()
    try:
        start(folder)
    except Exception:
        _shut_down()
        _clear_away(folder)
        raise
    return folder


def _shut_down() -> None:
    import ray

    ray.shutdown()


def _clear_away(folder: str) -> None:
    """Kill the programs that a failed start of Ray leaves running, and remove the folder of this start."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in cmdline.read_bytes():
                os.kill(int(cmdline.parent.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str, cpus: int, gpus: int, shows_actors: bool) -> None:
    # Ray logs that it does not handle SIGTERM in this thread, where the worker handles it.
    logging.getLogger("ray").setLevel(logging.ERROR)
    require_token()
    import ray

    with _only_passed_on(GPU_VARIABLES if gpus else ()):
        ray.init(
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            log_to_driver=shows_actors,
            configure_logging=False,
            logging_level=logging.ERROR,
            object_store_memory=_object_store_bytes(),
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            _system_config={"gcs_rpc_server_reconnect_timeout_s": LOST_HEAD_SECONDS, **SYSTEM_CONFIG},
        )


def require_token() -> None:
    """Require a token from clients of a Ray cluster that this process starts: clients may run any program."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_token())
    from ray._raylet import Config  # type: ignore[attr-defined]

    # Ray reads its settings at import, which may have happened before.
    Config.initialize("")


@functools.cache
def _token() -> str:
    """Return the token of this process.

    Ray reads the token once per process, so a second cluster must use the same token.
    """
    return secrets.token_hex(32)


def _object_store_bytes() -> int:
    """Return the size of Ray's memory for calls and states in transit. Larger data is written to disk."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    return max(SMALLEST_OBJECT_STORE_BYTES, min(LARGEST_OBJECT_STORE_BYTES, free // 2))


@contextmanager
def _only_passed_on(also: Sequence[str]) -> Iterator[None]:
    """Inside the context, remove environment variables that Ray's processes must not inherit."""
    kept_back = {name: value for name, value in os.environ.items() if not is_passed_on(name) and name not in also}
    for name in kept_back:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept_back)


def is_passed_on(name: str) -> bool:
    return name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
