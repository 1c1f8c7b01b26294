"""Saves that a worker streams from memory to a sampler.

The sampler then does not read these saves from the checkpoint root.

Streaming only saves time. After any failure, the sampler reads the same weights from the root, and counts the failure
by reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from typing import Literal, Protocol

import grpc
from tinsmith_rpc import worker_pb2, worker_pb2_grpc

from tinsmith_trainer.checkpoints.checkpoint_root import Manifest, checked_manifest, decode_checkpoint
from tinsmith_trainer.disk.durable_files import HEAD_BYTES, ReadFile
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.engines.peft_layout import WEIGHTS_FILE
from tinsmith_trainer.engines.tensor_files import memory_for_tensors
from tinsmith_trainer.errors import CheckpointInvalid, TrainerError
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

MOST_BYTES = 4 * 1024**3
FIRST_PART_SECONDS = 2.0
SLOWEST_BYTES_PER_SECOND = 100e6
"""The speed of a checkpoint root on a network volume, in bytes per second. A slower stream saves no time."""
AVOIDED_SECONDS = 30.0
"""The time for which a sampler does not ask a worker again, after a failed connection to this worker.

Without this pause, each load would wait for this worker.
"""

Reason = Literal["unreachable", "slow", "not_kept", "busy", "refused", "damaged", "failed"]
Connect = Callable[[worker_pb2.SaveSource], grpc.Channel]
"""A function that opens a channel on which only the worker with this ID can answer. Raises TrainerError."""

REASONS: dict[grpc.StatusCode, Reason] = {
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "slow",
    grpc.StatusCode.NOT_FOUND: "not_kept",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
    grpc.StatusCode.PERMISSION_DENIED: "refused",
    grpc.StatusCode.UNIMPLEMENTED: "refused",
}
AVOIDED_FOR: frozenset[Reason] = frozenset({"unreachable", "slow", "refused"})


class _Parts(Iterator[worker_pb2.SavePart], Protocol):
    """A streaming call."""

    def cancel(self) -> bool: ...


class StreamFailed(Exception):
    """A failed stream. After this error, the weights are read from the root.

    `reason` is for a counter, and `str(error)` is for the log.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StreamedSaves:
    """The streams of a sampler. Methods block, so they are called in threads."""

    def __init__(self, connect: Connect, base: BaseModelInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._base = base
        self._clock = clock
        self._avoided: dict[str, float] = {}  # the time until which a worker is avoided, by the worker's address

    def take(self, reference: worker_pb2.AdapterRef) -> AdapterState:
        """Stream the adapter from the worker that is named in the reference. Raises StreamFailed."""
        source = reference.source
        if self._clock() < self._avoided.get(source.target, 0.0):
            raise StreamFailed("unreachable", f"{source.target} failed a moment ago")
        try:
            return self._take(reference)
        except StreamFailed as error:
            if error.reason in AVOIDED_FOR:
                self._avoided = {**self._still_avoided(), source.target: self._clock() + AVOIDED_SECONDS}
            raise

    def _still_avoided(self) -> dict[str, float]:
        now = self._clock()
        return {target: until for target, until in self._avoided.items() if now < until}

    def _take(self, reference: worker_pb2.AdapterRef) -> AdapterState:
        request = worker_pb2.StreamSaveRequest(manifest_digest=reference.manifest_digest)
        try:
            with self._connect(reference.source) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                return self._read(reference, stub.StreamSave(request, timeout=patience(reference.source.size_bytes)))
        except grpc.RpcError as error:
            code = error.code()
            reason = REASONS.get(code, "failed")
            raise StreamFailed(reason, f"{code.name}: {error.details()}") from error
        except CheckpointInvalid as error:
            raise StreamFailed("damaged", str(error)) from error
        except TrainerError as error:
            raise StreamFailed("refused", str(error)) from error

    def _read(self, reference: worker_pb2.AdapterRef, parts: _Parts) -> AdapterState:
        first = next(parts, worker_pb2.SavePart())
        try:
            manifest = checked_manifest(reference.directory, first.manifest, reference.manifest_digest, self._base)
            file = _received(_announced_bytes(manifest), (part.content for part in parts))
            return decode_checkpoint(reference.directory, manifest, {WEIGHTS_FILE: file}).state
        finally:
            parts.cancel()


def patience(size_bytes: int) -> float:
    """Return the time limit for a stream of this size, in seconds."""
    return FIRST_PART_SECONDS + max(0, size_bytes) / SLOWEST_BYTES_PER_SECOND


def _announced_bytes(manifest: Manifest) -> int:
    """Return the size of the weights' file. Raises CheckpointInvalid."""
    size_bytes = int(manifest["files"][WEIGHTS_FILE]["size_bytes"])
    if not HEAD_BYTES <= size_bytes <= MOST_BYTES:
        raise CheckpointInvalid(f"A file of {size_bytes} bytes is not taken by stream.")
    return size_bytes


def _received(size_bytes: int, parts: Iterator[bytes]) -> ReadFile:
    """Receive `size_bytes` bytes into new memory. A thread hashes the bytes at the same time.

    Raises CheckpointInvalid if more or fewer bytes arrive.
    """
    head = next(parts, b"")
    if len(head) < HEAD_BYTES:
        raise CheckpointInvalid("The stream ended before the weights began.")
    content, filled, digest = memory_for_tensors(head[:HEAD_BYTES], size_bytes), 0, sha256()
    with ThreadPoolExecutor(1, "hasher") as hasher:
        for part in chain([head], parts):
            end = filled + len(part)
            if end > size_bytes:
                raise CheckpointInvalid(f"The stream has more than the {size_bytes} bytes that its manifest announces.")
            content[filled:end] = part
            hasher.submit(digest.update, content[filled:end])
            filled = end
    return ReadFile(content[:filled], digest.hexdigest())
