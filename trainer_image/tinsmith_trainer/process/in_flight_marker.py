"""The in-flight marker: a file that records the current work of the engine, for the next process.

A killed process cannot report the work that killed it. So each process writes the marker before and after each call of
the engine, without a sync. The file outlives the process, but not every failure of the machine: after a power cut the
file may be missing. Without the file, no call counts as the cause.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import orjson
import structlog

from tinsmith_trainer.errors import VolumeUnsuitable

log = structlog.get_logger(__name__)

Purpose = Literal["operation", "replay", "restore", "snapshot", "import"]
Background = Literal["saves", "loads", "imports"]
"""The kinds of work that run outside the engine's thread."""
HEADER = struct.Struct("<II")
"""The header of the file: the length and the CRC-32 of the JSON that follows.

A length of 0 means that the engine is idle.
"""
IDLE = bytes(HEADER.size)
MAX_BYTES = 64 * 1024
MAX_SIGN_CHARACTERS = 500
OTHERS_KEY = "beside"
"""The key of `Interruption.others` in the file.

The key must not change, because the previous or the next process may have another version of the code.
"""


@dataclass(frozen=True, slots=True)
class InFlightWork:
    """A piece of work that may end the process.

    For a restore or a snapshot, `seq_id` is the last included operation. For an import, `seq_id` is 0, and `model_id`
    is the run into which the adapter is imported.
    """

    purpose: Purpose
    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True)
class Interruption:
    """The end of a process during `work`. `life` identifies the process; `last_sign` may be empty.

    `others` is further work in progress when the process ended. If `others` is not empty, the cause of the end is
    unknown.
    """

    work: InFlightWork
    life: str
    last_sign: str = ""
    others: tuple[InFlightWork, ...] = ()

    @property
    def suspects(self) -> tuple[InFlightWork, ...]:
        return (self.work, *self.others)


class InFlightMarker:
    """The marker file. Thread-safe.

    If the marker cannot be written, an error is logged, and the call cannot later be found as the cause.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises VolumeUnsuitable."""
        self._path = path
        self.life = uuid.uuid4().hex
        """The identity of this process. Each process of this worker has a different identity."""
        self._lock = threading.Lock()
        self._works: Sequence[InFlightWork] = ()
        self._background: dict[Background, Sequence[InFlightWork]] = {}
        self._stopped = False
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._left = _decoded(os.pread(self._file, MAX_BYTES, 0))
        except OSError as error:
            raise VolumeUnsuitable(
                f"{path} cannot be opened: {error.strerror}. Make room and rights for it."
            ) from error

    @property
    def left_behind(self) -> Interruption | None:
        """The work during which the previous process ended, or None if it ended without work."""
        return self._left

    def set(self, *works: InFlightWork) -> None:
        """Mark the engine's current work, which is one or more pieces."""
        with self._lock:
            if not self._stopped:
                self._works = works
                self._mark()

    def mark_background(self, what: Background, *works: InFlightWork) -> None:
        """Mark the work of other threads, which is independent of the engine's work."""
        with self._lock:
            if not self._stopped:
                self._background[what] = works
                self._mark()

    def clear(self) -> None:
        """Mark the engine as idle. The mark that the previous process left is also cleared."""
        with self._lock:
            self._clear()

    def sign(self, last_sign: str) -> None:
        """Record why this process is about to end, because the current work may be the reason."""
        with self._lock:
            self._sign(last_sign)

    def stop(self, last_sign: str = "") -> None:
        """Ignore all later marks.

        The current work stays marked only if `last_sign` shows that this work is the cause of the stop.
        """
        with self._lock:
            self._stopped = True
            if last_sign:
                self._sign(last_sign)
            else:
                self._clear()

    def close(self) -> None:
        """Close the file. Later marks are lost. Idempotent."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _clear(self) -> None:
        self._works = ()
        if self._stopped:
            self._background = {}
        self._mark()

    def _sign(self, last_sign: str) -> None:
        if self._works or any(self._background.values()):
            self._mark(_one_line(last_sign))

    def _mark(self, last_sign: str = "") -> None:
        # a save begins while its copy is still marked
        works = dict.fromkeys((*self._works, *chain(*self._background.values())))
        if not works:
            self._write(IDLE)
            return
        work, *others = works
        self._write(_encoded(Interruption(work, self.life, last_sign, tuple(others))))

    def _write(self, content: bytes) -> None:
        if self._file is None:
            return
        try:
            os.pwrite(self._file, content, 0)
        except OSError as error:
            log.warning("what the engine does is not marked", path=str(self._path), error=error.strerror)


class EngineCall:
    """The engine's current call, which is marked while it runs.

    The engine's thread runs one call at a time. Any thread may ask how long the call has run, to distinguish a hang
    from normal work.
    """

    def __init__(self, marker: InFlightMarker) -> None:
        self.marker = marker
        self._started_at: float | None = None

    def running_seconds(self) -> float:
        """Return how many seconds the current call has run, or 0 if the engine is idle."""
        started_at = self._started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    @contextlib.contextmanager
    def at(self, *works: InFlightWork) -> Iterator[None]:
        """Mark the work during the call.

        An error that ends the process, such as SystemExit, does not clear the marker.
        """
        self.marker.set(*works)
        self._started_at = time.monotonic()
        try:
            yield
        except Exception:
            self.marker.clear()
            raise
        else:
            self.marker.clear()
        finally:
            self._started_at = None

    def prepare_stop(self, hang_seconds: float, background_seconds: float = 0.0) -> bool:
        """Stop marking work. Return True if the stop is orderly.

        In an orderly stop, the current work is not the cause of the process's end. Return False if the call has run for
        `hang_seconds`, or background work for `background_seconds`: then the hang is the reason for the stop.
        """
        seconds = max(self.running_seconds(), background_seconds)
        hangs = seconds >= hang_seconds
        self.marker.stop(
            f"it was still running after {seconds:.0f} s, when the worker was asked to stop" if hangs else ""
        )
        return not hangs


def _one_line(sign: str) -> str:
    # An error may quote a path that is not UTF-8.
    words = " ".join(sign.encode(errors="backslashreplace").decode().split())
    return words if len(words) <= MAX_SIGN_CHARACTERS else f"{words[:MAX_SIGN_CHARACTERS]}…"


def _encoded(interruption: Interruption) -> bytes:
    fields = asdict(interruption)
    fields[OTHERS_KEY] = fields.pop("others")
    body = orjson.dumps(fields)
    return HEADER.pack(len(body), zlib.crc32(body)) + body


def _decoded(content: bytes) -> Interruption | None:
    """Decode the marker.

    Return None if the process was idle, or if the content is incomplete, for example after a power cut.
    """
    if len(content) < HEADER.size:
        return None
    length, checksum = HEADER.unpack_from(content)
    body = content[HEADER.size : HEADER.size + length]
    if not length or len(body) != length or zlib.crc32(body) != checksum:
        return None
    fields = orjson.loads(body)
    others = tuple(_work(work) for work in fields[OTHERS_KEY])
    return Interruption(_work(fields["work"]), fields["life"], fields["last_sign"], others)


def _work(fields: Mapping[str, Any]) -> InFlightWork:
    """Decode a piece of work. Ignore fields that a later release may have added."""
    return InFlightWork(fields["purpose"], fields["model_id"], fields["seq_id"])
