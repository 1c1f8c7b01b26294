"""A worker's newest saves, for the sampler beside it on the same machine: mapped, they need not be read from the root.

The sampler asks over a Unix socket, by the digest of the manifest, and gets the memory itself. Whatever does not come
this way is on the root: nothing depends on this one. Whoever may open the socket may have every save, as whoever may
call the worker; it belongs into a directory of the worker's user alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import structlog

from tinsmith_trainer.disk.durable_files import BLOCK_BYTES, size_of
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.tensor_files import TENSOR_ALIGNMENT_BYTES, tensor_file, tensors_of
from tinsmith_trainer.errors import ServerError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""For good, since a seal of a memfd cannot be broken."""


class WeightsUnusable(Exception):
    """What came is no sealed weights of this base model, and says so."""


class SealedWeights:
    """The owner of the file; `description` is what `mapped` needs beside it, of some hundred bytes."""

    def __init__(self, state: AdapterState, base_revision: str) -> None:
        """Copies the state's weights. Raises OSError where the machine has no room, or no such files."""
        tensors = state.weights_only().tensors
        header, *content = tensor_file(tensors, {})
        begin = -len(header) % TENSOR_ALIGNMENT_BYTES
        self.size_bytes = begin + len(header) + size_of(content)
        self.description = json.dumps(
            {
                "base_model_revision": base_revision,
                "begins_at": begin,
                "lora": asdict(state.lora),
                "optimizer_step": state.optimizer_step,
                "size_bytes": self.size_bytes,
            }
        ).encode()
        self._file = os.fdopen(os.memfd_create("tinsmith-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", 0)
        try:
            for piece in (bytes(begin), header, *content):
                self._write(memoryview(piece))
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            self._file.close()
            raise

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Whoever has mapped it keeps it."""
        self._file.close()

    def _write(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._file.write(piece[:BLOCK_BYTES]) :]


def map_weights(descriptor: int, description: bytes, base_revision: str) -> AdapterState:
    """Of a file that a `SealedWeights` has made: its tensors are the file's own pages, which stay while they are used.

    Writing to them changes no other process's. Raises WeightsUnusable.
    """
    try:
        told = json.loads(description)
        size_bytes, begin = int(told["size_bytes"]), int(told["begins_at"])
        lora = LoraSpec(**told["lora"])
        if told["base_model_revision"] != base_revision:
            raise WeightsUnusable("they are of another base model")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise WeightsUnusable("their file can still be changed")
        if os.fstat(descriptor).st_size != size_bytes:
            raise WeightsUnusable("their file has another size than was said")
        pages = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return AdapterState(lora, int(told["optimizer_step"]), tensors_of(memoryview(pages)[begin:]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsUnusable(str(error) or type(error).__name__) from error


log = structlog.get_logger(__name__)

MOST_SHARED = 4
SHARED_BYTES = 1024**3
"""Of those that are kept, and of those that are being copied. What a sampler has mapped of others is the sampler's."""
MAX_MESSAGE_BYTES = 4096
ANSWER_SECONDS = 2.0
"""An answer is one small message; a worker that is slower than that is no faster than the root."""


class SharedSaves:
    """The newest saves by the digests of their manifests. Thread-safe."""

    def __init__(self, *, most: int = MOST_SHARED, size_bytes: int = SHARED_BYTES) -> None:
        self._most = most
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, SealedWeights] = OrderedDict()
        self._copying_bytes = 0

    @contextmanager
    def copying(self, state: AdapterState, base_revision: str) -> Iterator[Callable[[str], None]]:
        """Copies a save's weights while the caller writes them, who then says the digest of what was written.

        Weights beyond the bounds, and those for which the machine has no room, are not kept.
        """
        written: list[str] = []
        size_bytes = sum(tensor.nbytes for tensor in state.weights_only().tensors.values())
        with self._room_for(size_bytes) as has_room, ThreadPoolExecutor(1, "sharer") as beside:
            copied = _start_copy(beside, state, base_revision) if has_room else None
            try:
                yield written.append
            finally:
                self._end(copied.result() if copied is not None else None, written)

    def give(self, digest: str, taker: socket.socket) -> None:
        """Sends it, or nothing where it is not there. Raises OSError."""
        with self._lock:
            found = self._kept.get(digest)
            if found is None:
                return
            descriptor, description = os.dup(found.fileno()), found.description
        try:
            socket.send_fds(taker, [description], [descriptor])
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            while self._kept:
                self._drop_oldest()

    @contextmanager
    def _room_for(self, size_bytes: int) -> Iterator[bool]:
        """Makes it before anything is copied, so that the bound holds meanwhile, too."""
        with self._lock:
            has_room = self._copying_bytes + size_bytes <= self._size_bytes
            if has_room:
                self._copying_bytes += size_bytes
                while self._kept and self._copying_bytes + self._kept_bytes() > self._size_bytes:
                    self._drop_oldest()
        try:
            yield has_room
        finally:
            with self._lock:
                self._copying_bytes -= size_bytes if has_room else 0

    def _end(self, copied: SealedWeights | None, written: list[str]) -> None:
        if copied is None:
            return
        if not written:
            copied.close()
            return
        with self._lock:
            before = self._kept.pop(written[0], None)
            if before is not None:
                before.close()
            self._kept[written[0]] = copied
            while len(self._kept) > self._most:
                self._drop_oldest()

    def _kept_bytes(self) -> int:
        return sum(each.size_bytes for each in self._kept.values())

    def _drop_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        oldest.close()


class SaveSocket:
    """The socket, and a thread that answers there, one after the other."""

    def __init__(self, path: Path, saves: SharedSaves | None = None) -> None:
        """What has this name already is of a worker that has ended. Raises ServerError."""
        self.saves = saves or SharedSaves()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ServerError(f"Saves cannot be shared at {path}: {error.strerror or error}.") from error
        self._answering = threading.Thread(target=self._answer_all, name="saves-door", daemon=True)
        self._answering.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread
        self._answering.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self.saves.close()

    def _answer_all(self) -> None:
        while True:
            try:
                taker, _ = self._socket.accept()
            except OSError as error:
                log.info("saves are not shared any more", reason=error.strerror)
                return
            with taker:
                self._answer(taker)

    def _answer(self, taker: socket.socket) -> None:
        try:
            taker.settimeout(ANSWER_SECONDS)
            self.saves.give(taker.recv(MAX_MESSAGE_BYTES).decode(errors="replace"), taker)
        except OSError as error:
            log.info("a save could not be handed over", reason=str(error))


def fetch_save(door: Path, digest: str, base_revision: str) -> AdapterState | None:
    """The weights that a worker's door has under this digest; None: they are to be read from the root."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as giver:
            giver.settimeout(ANSWER_SECONDS)
            giver.connect(str(door))
            giver.send(digest.encode())
            description, descriptors, _, _ = socket.recv_fds(giver, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        log.info("the worker hands no saves over", reason=str(error))
        return None
    if not descriptors:
        return None
    try:
        return map_weights(descriptors[0], description, base_revision)
    except WeightsUnusable as error:
        log.warning("a worker's save is read from the root instead", reason=str(error))
        return None
    finally:
        os.close(descriptors[0])


def _start_copy(
    beside: ThreadPoolExecutor, state: AdapterState, base_revision: str
) -> Future[SealedWeights | None] | None:
    try:
        return beside.submit(_sealed, state, base_revision)
    except RuntimeError as error:  # there may be no more threads
        log.warning("a save cannot be shared; samplers read it from the root", reason=str(error))
        return None


def _sealed(state: AdapterState, base_revision: str) -> SealedWeights | None:
    """None, whatever goes wrong: the save itself is whole on the root."""
    try:
        return SealedWeights(state, base_revision)
    except Exception as error:
        log.warning("a save cannot be shared; samplers read it from the root", reason=str(error))
        return None
