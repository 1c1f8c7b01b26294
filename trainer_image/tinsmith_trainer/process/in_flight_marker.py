"""What the engine is at, where the next process finds it: a file that outlives this process, and not the machine.

A process that the system kills has no last word, so the word is written before: one small write before a call of the
engine and one after it, and no sync. When the machine goes, so may the marker; then it says nothing of the call either.
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
Beside = Literal["saves", "loads", "imports"]
"""Work of threads other than the engine's."""
HEADER = struct.Struct("<II")
"""Length and CRC-32 of the JSON behind it. A length of 0: the engine is idle."""
IDLE = bytes(HEADER.size)
MAX_BYTES = 64 * 1024
MAX_SIGN_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class InFlightWork:
    """The purpose of an engine call. `seq_id` of a restore or a snapshot: the last operation inside; of an import,
    whose `model_id` is the run that will have the adapter: 0.
    """

    purpose: Purpose
    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True)
class Interruption:
    """A process ended while it was at `work`. `life` tells that process from others; `last_sign` may be empty.

    `beside`: what the same call of the engine was for, too. Then it is not known which of them it was.
    """

    work: InFlightWork
    life: str
    last_sign: str = ""
    beside: tuple[InFlightWork, ...] = ()

    @property
    def suspects(self) -> tuple[InFlightWork, ...]:
        return (self.work, *self.beside)


class InFlightMarker:
    """Thread-safe. A marker that cannot be written is logged, and fails nothing: that call is not counted."""

    def __init__(self, path: Path) -> None:
        """Raises VolumeUnsuitable."""
        self._path = path
        self.life = uuid.uuid4().hex
        """Tells this process from those before and after it."""
        self._lock = threading.Lock()
        self._works: Sequence[InFlightWork] = ()
        self._beside: dict[Beside, Sequence[InFlightWork]] = {}
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
        """What the process before this one was at when it ended."""
        return self._left

    def set(self, *works: InFlightWork) -> None:
        """At least one."""
        with self._lock:
            if not self._stopped:
                self._works = works
                self._mark()

    def beside(self, what: Beside, *works: InFlightWork) -> None:
        """What other threads are at, whatever the engine does meanwhile."""
        with self._lock:
            if not self._stopped:
                self._beside[what] = works
                self._mark()

    def clear(self) -> None:
        """The engine is idle. What was left behind is gone, too."""
        with self._lock:
            self._clear()

    def sign(self, last_sign: str) -> None:
        """Why this process is going to end, if the call that runs now is why."""
        with self._lock:
            self._sign(last_sign)

    def stop(self, last_sign: str = "") -> None:
        """Nothing is marked from now on; the call that runs now stays marked if there is a sign against it."""
        with self._lock:
            self._stopped = True
            if last_sign:
                self._sign(last_sign)
            else:
                self._clear()

    def close(self) -> None:
        """Idempotent. Whatever is told to it afterwards is lost."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _clear(self) -> None:
        self._works = ()
        if self._stopped:
            self._beside = {}
        self._mark()

    def _sign(self, last_sign: str) -> None:
        if self._works or any(self._beside.values()):
            self._mark(_one_line(last_sign))

    def _mark(self, last_sign: str = "") -> None:
        works = dict.fromkeys((*self._works, *chain(*self._beside.values())))  # a save begins while its copy is marked
        if not works:
            self._write(IDLE)
            return
        work, *beside = works
        self._write(_encoded(Interruption(work, self.life, last_sign, tuple(beside))))

    def _write(self, content: bytes) -> None:
        if self._file is None:
            return
        try:
            os.pwrite(self._file, content, 0)
        except OSError as error:
            log.warning("what the engine does is not marked", path=str(self._path), error=error.strerror)


class EngineCall:
    """One call at a time, by the engine's thread; anyone may ask for how long, which is how a hang is told from work.

    While it runs it is marked, so that the next process knows what this one ended of.
    """

    def __init__(self, marker: InFlightMarker) -> None:
        self.marker = marker
        self._started_at: float | None = None

    def running_seconds(self) -> float:
        """0: idle."""
        started_at = self._started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    @contextlib.contextmanager
    def at(self, *works: InFlightWork) -> Iterator[None]:
        """Around the call. An error that ends the process, such as SystemExit, leaves the marker."""
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

    def told_to_stop(self, hang_seconds: float, beside_seconds: float = 0.0) -> bool:
        """Whether the stop is an orderly one: whatever ends this process now, what runs is not to blame.

        False: the call, or what is marked beside it and has run for `beside_seconds`, has taken so long that it is why
        the process is told to stop.
        """
        seconds = max(self.running_seconds(), beside_seconds)
        hangs = seconds >= hang_seconds
        self.marker.stop(
            f"it was still running after {seconds:.0f} s, when the worker was told to stop" if hangs else ""
        )
        return not hangs


def _one_line(sign: str) -> str:
    # An error may quote a path that is no UTF-8.
    words = " ".join(sign.encode(errors="backslashreplace").decode().split())
    return words if len(words) <= MAX_SIGN_CHARACTERS else f"{words[:MAX_SIGN_CHARACTERS]}…"


def _encoded(interruption: Interruption) -> bytes:
    body = orjson.dumps(asdict(interruption))
    return HEADER.pack(len(body), zlib.crc32(body)) + body


def _decoded(content: bytes) -> Interruption | None:
    """None: idle, or not whole, as after a power cut."""
    if len(content) < HEADER.size:
        return None
    length, checksum = HEADER.unpack_from(content)
    body = content[HEADER.size : HEADER.size + length]
    if not length or len(body) != length or zlib.crc32(body) != checksum:
        return None
    fields = orjson.loads(body)
    beside = tuple(_work(work) for work in fields["beside"])
    return Interruption(_work(fields["work"]), fields["life"], fields["last_sign"], beside)


def _work(fields: Mapping[str, Any]) -> InFlightWork:
    """A later release may say more of it."""
    return InFlightWork(fields["purpose"], fields["model_id"], fields["seq_id"])
