"""Ray for one engine: started in this container, or running already. Quiet, and without this process's secrets."""

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
"""What ranks need of the environment. The rest stays here: it holds keys to stores and hubs, and ranks need none."""

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""Where ranks are on GPUs: which of the machine's are this worker's."""

SHARED_MEMORY = "/dev/shm"
SMALLEST_OBJECT_STORE_BYTES = 80 * 1024**2
LARGEST_OBJECT_STORE_BYTES = 2 * 1024**3
LOST_HEAD_SECONDS = 10
"""A cluster without its head is no cluster; Ray's own patience is a minute."""

ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Its handler would abort the worker at the SIGTERM that asks for a clean end.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Half a minute by default, which a busy node does not keep to.
    "RAY_gcs_server_port_wait_time_s": "120",
}
SYSTEM_CONFIG: Mapping[str, Any] = {"worker_niceness": 0}
"""Ray's workers give way to all else by default; ranks are what this machine is for."""
RAY_FOLDER = "/tmp/ray"
"""Where Ray keeps its logs and sockets by itself, and pods have a volume for them."""
FOLDER_PREFIX = "tinray-"
SHORT_FOLDER = "/tmp"
LONGEST_SOCKET_BYTES = 107
BELOW_FOLDER = "/session_2026-01-02_03-04-05_678901_4194304/sockets/plasma_store"
"""The longest path that Ray makes a socket at, below its folder."""


def prepare_for_ray() -> None:
    """Before this process imports Ray, which reads its settings then."""
    os.environ.update(ALWAYS)


class RayCluster:
    """This process as Ray's driver, after `prepare_for_ray`. One at a time in a process, as Ray has it."""

    def __init__(self, address: str | None, *, cpus: int, gpus: int = 0, shows_actors: bool = False) -> None:
        """Starts Ray with `cpus` and `gpus` where `address` is None; what actors print, `shows_actors` prints here too.

        Raises ServerError where it cannot be reached or started.
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
        """Ends what was started. Idempotent."""
        stop_ray(self._folder)


def new_folder() -> str:
    """Named after this process, without what others of its kind left when they were killed; short, as sockets want."""
    parent = _parent()
    for folder in parent.glob(f"{FOLDER_PREFIX}*-*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        # In a container every life has the same number.
        if owner.isdigit() and (owner == str(os.getpid()) or not Path("/proc", owner).exists()):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=parent)


def _parent() -> Path:
    """Where the longest socket still has a name that the kernel takes: many machines have a long $TMPDIR."""
    if os.access(RAY_FOLDER, os.W_OK):
        return Path(RAY_FOLDER)
    usual = Path(tempfile.gettempdir())
    longest = f"{usual}/{FOLDER_PREFIX}4194304-abcdefgh{BELOW_FOLDER}"
    return usual if len(os.fsencode(longest)) <= LONGEST_SOCKET_BYTES else Path(SHORT_FOLDER)


def _attach(address: str, shows_actors: bool) -> None:
    import ray

    ray.init(address, log_to_driver=shows_actors, configure_logging=False, logging_level=logging.ERROR)


def start_ray(start: Callable[[str], None]) -> str:
    """The folder of a Ray that runs now: `start` is given it.

    Ray waits 30 s for its own programs, whatever it is told; those of a busy node may need longer once.
    """
    try:
        return _start_once(start)
    except Exception as error:
        log.warning("Ray did not start, and is started again", reason=f"{type(error).__name__}: {error}")
        return _start_once(start)


def stop_ray(folder: str | None) -> None:
    """This process is no driver any more, and `folder`, of a Ray that it started, is gone."""
    _shut_down()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _start_once(start: Callable[[str], None]) -> str:
    """Or nothing is left of it."""
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
    """Of a start that failed Ray ends nothing: its programs would go on beside those of the next."""
    for told in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in told.read_bytes():
                os.kill(int(told.parent.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str, cpus: int, gpus: int, shows_actors: bool) -> None:
    # Ray says that it leaves SIGTERM alone in a thread like ours, where it is the worker's.
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
    """Of all who speak to a Ray that this process starts: whoever may do so may run any program."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_token())
    from ray._raylet import Config  # type: ignore[attr-defined]

    # Ray reads its settings when it is imported, which it may have been before.
    Config.initialize("")


@functools.cache
def _token() -> str:
    """One for the life of the process: Ray reads it once, and a second cluster would refuse its own driver."""
    return secrets.token_hex(32)


def _object_store_bytes() -> int:
    """What calls and states travel through; Ray spills to disk what does not fit."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    return max(SMALLEST_OBJECT_STORE_BYTES, min(LARGEST_OBJECT_STORE_BYTES, free // 2))


@contextmanager
def _only_passed_on(also: Sequence[str]) -> Iterator[None]:
    """Ray's processes inherit the environment in which they are started."""
    kept_back = {name: value for name, value in os.environ.items() if not is_passed_on(name) and name not in also}
    for name in kept_back:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept_back)


def is_passed_on(name: str) -> bool:
    return name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
