"""Takes a save from the memory of the worker that made it, over the network, as it would be read from the root.

Nothing depends on it. Where it fails, for whatever reason, the root has the same weights, and the reason is counted.
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

from tinsmith_trainer.checkpoints.checkpoint_root import Manifest, checked_manifest, decoded
from tinsmith_trainer.disk.durable_files import HEAD_BYTES, ReadFile
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.engines.peft_layout import WEIGHTS_FILE
from tinsmith_trainer.engines.tensor_files import memory_for_tensors
from tinsmith_trainer.errors import CheckpointInvalid, TrainerError
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

MOST_BYTES = 4 * 1024**3
FIRST_PART_SECONDS = 2.0
SLOWEST_BYTES_PER_SECOND = 100e6
"""What a root on a network volume gives; a worker that is slower than that spares nothing."""
AVOIDED_SECONDS = 30.0
"""So long nothing is asked of a worker that could not be reached: else each load would wait for it in vain."""

Reason = Literal["unreachable", "slow", "not_kept", "busy", "refused", "damaged", "failed"]
Connect = Callable[[worker_pb2.SaveSource], grpc.Channel]
"""Opens a channel on which nobody but the worker of this id can answer. Raises TrainerError."""

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
    """A call that streams."""

    def cancel(self) -> bool: ...


class StreamFailed(Exception):
    """The root is to be read. `reason` is for a counter, `str(error)` for the log."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StreamedSaves:
    """Calls block, for threads."""

    def __init__(self, connect: Connect, base: BaseModelInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._base = base
        self._clock = clock
        self._avoided: dict[str, float] = {}  # until when, by the worker's address

    def take(self, reference: worker_pb2.AdapterRef) -> AdapterState:
        """From the worker that the reference names. Raises StreamFailed."""
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
            return decoded(reference.directory, manifest, {WEIGHTS_FILE: file}).state
        finally:
            parts.cancel()


def patience(size_bytes: int) -> float:
    """Seconds from the call to the last part, of a checkpoint of that size."""
    return FIRST_PART_SECONDS + max(0, size_bytes) / SLOWEST_BYTES_PER_SECOND


def _announced_bytes(manifest: Manifest) -> int:
    """Of the file of weights. Raises CheckpointInvalid."""
    size_bytes = int(manifest["files"][WEIGHTS_FILE]["size_bytes"])
    if not HEAD_BYTES <= size_bytes <= MOST_BYTES:
        raise CheckpointInvalid(f"A file of {size_bytes} bytes is not taken by stream.")
    return size_bytes


def _received(size_bytes: int, parts: Iterator[bytes]) -> ReadFile:
    """So many bytes, in memory made for them; a thread hashes what is there. Raises CheckpointInvalid for others."""
    head = next(parts, b"")
    if len(head) < HEAD_BYTES:
        raise CheckpointInvalid("The stream ended before the weights began.")
    content, filled, digest = memory_for_tensors(head[:HEAD_BYTES], size_bytes), 0, sha256()
    with ThreadPoolExecutor(1, "hasher") as beside:
        for part in chain([head], parts):
            end = filled + len(part)
            if end > size_bytes:
                raise CheckpointInvalid(f"The stream has more than the {size_bytes} bytes that its manifest announces.")
            content[filled:end] = part
            beside.submit(digest.update, content[filled:end])
            filled = end
    return ReadFile(content[:filled], digest.hexdigest())
