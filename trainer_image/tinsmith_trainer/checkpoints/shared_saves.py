"""A worker's newest saves, shared in memory with a sampler on the same machine.

The sampler requests a save over a Unix socket, by manifest digest. The sampler receives a file descriptor, and maps the
file. If a save is not shared, the sampler reads the save from the root. A process that can open the socket can read
every save, so the socket belongs in a directory that only the worker's user can enter.

The weights are in an anonymous file (memfd). The file disappears when the last process with an open descriptor ends,
even after a crash. The file is sealed before the worker sends the descriptor, because a process that maps a file
crashes if another process shortens the file.
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
"""The seals of the file. The seals of a memfd cannot be removed."""


class WeightsUnusable(Exception):
    """An error for a received file that does not hold sealed weights of this base model.

    The message gives the reason.
    """


class SealedWeights:
    """The owner of the anonymous file.

    `description` holds further data for `map_weights`, some hundred bytes.
    """

    def __init__(self, state: AdapterState, base_revision: str) -> None:
        """Copy the state's weights.

        Raises OSError if memory is short, or if the system does not support anonymous files.
        """
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
        """Close the file. Processes that have mapped the file keep the pages of the file."""
        self._file.close()

    def _write(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._file.write(piece[:BLOCK_BYTES]) :]


def map_weights(descriptor: int, description: bytes, base_revision: str) -> AdapterState:
    """Return a state with tensors in the pages of a `SealedWeights` file. The pages stay as long as a tensor exists.

    Writing to the tensors affects no other process. Raises WeightsUnusable.
    """
    try:
        described = json.loads(description)
        size_bytes, begin = int(described["size_bytes"]), int(described["begins_at"])
        lora = LoraSpec(**described["lora"])
        if described["base_model_revision"] != base_revision:
            raise WeightsUnusable("the weights belong to another base model")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise WeightsUnusable("the weights file is not sealed")
        if os.fstat(descriptor).st_size != size_bytes:
            raise WeightsUnusable("the weights file does not have the described size")
        pages = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return AdapterState(lora, int(described["optimizer_step"]), tensors_of(memoryview(pages)[begin:]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsUnusable(str(error) or type(error).__name__) from error


log = structlog.get_logger(__name__)

MAX_SHARED = 4
SHARED_BYTES = 1024**3
"""The limit for the bytes of kept saves and of copies in progress.

The limit does not count pages of dropped saves that the sampler still maps.
"""
MAX_MESSAGE_BYTES = 4096
ANSWER_SECONDS = 2.0
"""The timeout for a worker's answer, which is one small message.

If a worker needs more time to answer, a read from the root is as fast.
"""


class SharedSaves:
    """The newest saves by manifest digest. Thread-safe."""

    def __init__(self, *, most: int = MAX_SHARED, size_bytes: int = SHARED_BYTES) -> None:
        self._most = most
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, SealedWeights] = OrderedDict()
        self._copying_bytes = 0

    @contextmanager
    def copying(self, state: AdapterState, base_revision: str) -> Iterator[Callable[[str], None]]:
        """Copy a save's weights while the caller writes them.

        After the write, the caller passes the digest of the manifest.

        Weights are not shared if they exceed the limits. A save without enough memory for the copy is not shared.
        """
        written: list[str] = []
        size_bytes = sum(tensor.nbytes for tensor in state.weights_only().tensors.values())
        with self._room_for(size_bytes) as has_room, ThreadPoolExecutor(1, "sharer") as copier:
            copied = _start_copy(copier, state, base_revision) if has_room else None
            try:
                yield written.append
            finally:
                self._end(copied.result() if copied is not None else None, written)

    def send(self, digest: str, client: socket.socket) -> None:
        """Send a save, or an empty answer if the worker no longer keeps the save.

        Raises OSError if the sampler cannot be reached.
        """
        with self._lock:
            found = self._kept.get(digest)
            if found is None:
                return
            descriptor, description = os.dup(found.fileno()), found.description
        try:
            socket.send_fds(client, [description], [descriptor])
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            while self._kept:
                self._drop_oldest()

    @contextmanager
    def _room_for(self, size_bytes: int) -> Iterator[bool]:
        """Drop old saves before the copy, so that the limit also holds during the copy."""
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
    """The socket, and a thread that answers requests in sequence."""

    def __init__(self, path: Path, saves: SharedSaves | None = None) -> None:
        """Listen at the path, and replace the socket of an ended worker. Raises ServerError."""
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
        self._answering = threading.Thread(target=self._answer_all, name="save-socket", daemon=True)
        self._answering.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # close() does not wake the thread
        self._answering.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self.saves.close()

    def _answer_all(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError as error:
                log.info("stopped sharing saves", reason=error.strerror)
                return
            with client:
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        try:
            client.settimeout(ANSWER_SECONDS)
            self.saves.send(client.recv(MAX_MESSAGE_BYTES).decode(errors="replace"), client)
        except OSError as error:
            log.info("a save could not be sent", reason=str(error))


def fetch_save(socket_path: Path, digest: str, base_revision: str) -> AdapterState | None:
    """Return the weights that a worker's socket has for this digest.

    If the result is None, the weights must be read from the root.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(ANSWER_SECONDS)
            server.connect(str(socket_path))
            server.send(digest.encode())
            description, descriptors, _, _ = socket.recv_fds(server, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        log.info("the worker shares no saves", reason=str(error))
        return None
    if not descriptors:
        return None
    try:
        return map_weights(descriptors[0], description, base_revision)
    except WeightsUnusable as error:
        log.warning("a worker's save is unusable and is read from the root", reason=str(error))
        return None
    finally:
        os.close(descriptors[0])


def _start_copy(
    copier: ThreadPoolExecutor, state: AdapterState, base_revision: str
) -> Future[SealedWeights | None] | None:
    try:
        return copier.submit(_copy_sealed, state, base_revision)
    except RuntimeError as error:  # the limit of threads is reached
        log.warning("a save cannot be shared; samplers read it from the root", reason=str(error))
        return None


def _copy_sealed(state: AdapterState, base_revision: str) -> SealedWeights | None:
    """Copy the weights. Return None on any failure, because the save itself is complete on the root."""
    try:
        return SealedWeights(state, base_revision)
    except Exception as error:
        log.warning("a save cannot be shared; samplers read it from the root", reason=str(error))
        return None
