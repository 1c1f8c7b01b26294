"""Numerics: all properties of a process that determine the bits of its results.

The journal stores these properties, so that replays give the same bits. Each property has a name that operators know,
and a text as its value. Later releases can add properties: if a journal has no value for a property, any value is
accepted.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
import structlog

from tinsmith_trainer.engines.base import EngineCapabilities
from tinsmith_trainer.engines.base import Numerics as NumericsMode
from tinsmith_trainer.engines.batching import counted_gpu_memory
from tinsmith_trainer.engines.megatron.flags import RankFlags
from tinsmith_trainer.errors import NumericsChanged, ServerError
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.worker.volume import Volume

log = structlog.get_logger(__name__)

META_KEY = "numerics"
Numerics = Mapping[str, str]

MODE = "--numerics"
FAST = "fast"
FLAGS = (
    *("engine", "dtype", "quantization", "token_budget", "lora_products", "loss_kernel", "recompute"),
    *("map_stable_reinforce", *(name for name in RankFlags.__annotations__ if name != "ray_address")),
)
"""The flags that determine bits. The flag for the place of Ray is not among them, because it changes no bits."""
THREADS = "threads of PyTorch"
THREADS_VARIABLE = "OMP_NUM_THREADS"
NOT_SET = "not set"
ACCEPT_VARIABLE = "TINSMITH_ACCEPT_NUMERICS"
"""The variable that names the accepted numerics. The message of a refusal contains its value.

A value does not accept differences that appear later.
"""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PACKAGES = {"Tinsmith": "tinsmith", "transformers": "transformers", "numpy": "numpy"}


def numerics_of(options: WorkerOptions, mode: NumericsMode) -> dict[str, str]:
    """Return the properties of this process that determine bits. Call this after the engine is loaded.

    Imported libraries and the device are among the properties. `mode` is the engine's; without a flag it follows from
    the device.
    """
    flags = {f"--{name.replace('_', '-')}": _in_words(getattr(options, name)) for name in FLAGS}
    torch = sys.modules.get("torch")  # an engine that computes without torch loads in a tenth of a second
    place = {"device": options.device} if torch is None else _of_torch(torch, options)
    return {MODE: mode, **flags, **_versions(), "processor": platform.machine(), **place}


def mode_of(options: WorkerOptions, capabilities: EngineCapabilities) -> NumericsMode:
    """Return the engine's mode. Raises ServerError if it is not the requested mode."""
    mode = capabilities.numerics
    assert mode is not None, "an engine trains"
    if options.numerics not in (None, mode):
        raise ServerError(
            f"--numerics {options.numerics}: the engine {options.engine} computes with {mode} numerics only; omit the "
            "flag."
        )
    return mode


def _in_words(value: Any) -> str:
    return NOT_SET if value is None else str(value)


def _versions() -> dict[str, str]:
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _of_torch(torch: ModuleType, options: WorkerOptions) -> dict[str, str]:
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    driver = {"driver": _driver()} if on_gpu else {}
    return {
        "PyTorch": str(torch.__version__),
        **driver,
        "device": _gpu(torch) if on_gpu else f"CPU with {torch.backends.cpu.get_cpu_capability()}",
        THREADS: str(torch.get_num_threads()),
    }


def _driver() -> str:
    """Return the version of NVIDIA's kernel module, which compiles and chooses kernels."""
    return DRIVER_FILE.read_text().partition("\n")[0] if DRIVER_FILE.exists() else "unknown"


def _gpu(torch: ModuleType) -> str:
    """Return the name of the GPU with its memory, which determines the size of microbatches."""
    found = torch.cuda.get_device_properties(0)
    return f"{found.name} with {counted_gpu_memory(found.total_memory) // 2**30} GiB"


def check_numerics(journal: Journal, now: Numerics, volume: Volume) -> None:
    """Record the numerics of this process.

    Raises NumericsChanged if operations with published results would run again with other numerics, unless the mode is
    fast or ACCEPT_VARIABLE names them. It then records nothing.
    """
    before, to_replay = journal.read(remembered).result()
    is_exact = now.get(MODE) != FAST
    differing = {name: before[name] for name in before if before[name] != now.get(name, NOT_SET)}
    if differing and to_replay and is_exact and os.environ.get(ACCEPT_VARIABLE) != name_of(now):
        raise NumericsChanged(_refusal(volume, differing, now, to_replay))
    if differing and to_replay:
        log.warning("operations are replayed to other bits", differing=sorted(differing))
    if to_replay:
        log.info("operations will be replayed", count=to_replay, numerics=now.get(MODE))
    if before != now:
        content = orjson.dumps(dict(now)).decode()
        journal.write(lambda db: journal_tables.set_meta(db, META_KEY, content), uses_reserve=True).result()
        log.info("numerics remembered", differing=sorted(differing))


def name_of(numerics: Numerics) -> str:
    return hashlib.sha256(orjson.dumps(dict(numerics), option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


def keep_threads(journal: Journal) -> None:
    """Set the number of threads with which the operations to replay ran before.

    Call this before the engine is imported.

    The default depends on processors and limits, which may change between starts.
    """
    before, to_replay = journal.read(remembered).result()
    threads = None if before.get(MODE) == FAST else before.get(THREADS)
    if threads is None or not to_replay or os.environ.get(THREADS_VARIABLE) == threads:
        return
    log.warning("threads are as before, since operations are replayed", threads=threads, replayed=to_replay)
    os.environ[THREADS_VARIABLE] = threads
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))


def remembered(db: journal_tables.Database) -> tuple[dict[str, str], int]:
    """Return the numerics with which operations ran, and the number of operations to replay."""
    return orjson.loads(journal_tables.get_meta(db, META_KEY) or "{}"), journal_tables.count_to_replay(db)


def _refusal(volume: Volume, differing: Numerics, now: Numerics, to_replay: int) -> str:
    """Return the message of the refusal. The remedies come first, because a termination log shortens long messages."""
    changes = "; ".join(f"{name} was {value} and is {now.get(name, NOT_SET)}" for name, value in differing.items())
    return (
        f"{to_replay} operation(s) in the journal in {volume.directory} are in no snapshot, and would be computed "
        f"otherwise than their results were. Start the worker as before, let it stop cleanly, and change it then. "
        f"Where that is impossible, {ACCEPT_VARIABLE}={name_of(now)} in its environment accepts other weights. "
        f"What differs: {changes}."
    )
