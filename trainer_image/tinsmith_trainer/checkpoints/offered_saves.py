"""A worker's newest saves, which the worker streams to samplers in other pods.

A sampler requests a save by the digest of the manifest.

The worker makes no copy of a save, but keeps the written data in memory for longer. Samplers read older saves from the
root.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinsmith_trainer.checkpoints.checkpoint_root import SavedWeights
from tinsmith_trainer.disk.durable_files import Pieces
from tinsmith_trainer.engines import peft_layout

MAX_OFFERED = 4
MAX_STREAMS = 2
"""The limit of concurrent streams. For every 400 MB, a stream takes a third of a second of CPU time from training."""
STREAM_WAIT_SECONDS = 1.0
"""The time for which a sampler waits if all streams are in use.

The replicas of a pool request a save at the same time; a replica that has waited this long reads the save from the
root.
"""
PART_BYTES = 1024**2
"""The size of one message. With messages of an eighth of this size, worker and sampler need twice as much CPU time."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A save that can be streamed: the manifest, and the content of the weights file on the root."""

    manifest: bytes
    weights: Pieces

    def parts(self) -> Iterator[bytes]:
        """Yield the file's content in parts."""
        gathered = bytearray()
        for piece in self.weights:
            for begin in range(0, len(piece), PART_BYTES):
                part = piece[begin : begin + PART_BYTES]
                if gathered and len(gathered) + len(part) > PART_BYTES:
                    yield bytes(gathered)
                    gathered.clear()
                gathered += part
        yield bytes(gathered)


class SaveUnavailable(Exception):
    """An error for a save that is not streamed.

    The caller must then read the save from the root, and report the text of the error.
    """


class SaveNotOffered(SaveUnavailable):
    """An error for a save that is not among the newest saves, or that an earlier process made."""


class TooManyStreams(SaveUnavailable):
    """An error for a stream if the wait would take longer than a read from the root."""


class OfferedSaves:
    """The saves that can be streamed. Thread-safe, except for the method `streaming`."""

    def __init__(self, *, size_bytes: int, most: int = MAX_OFFERED) -> None:
        """Keep saves of at most `size_bytes` in total; a larger save is not kept. A limit of 0 keeps no saves."""
        self._most = most
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, SavedWeights] = OrderedDict()
        self._streams = asyncio.Semaphore(MAX_STREAMS)

    def add(self, saved: SavedWeights) -> None:
        """Add a save that is on the root."""
        if saved.written.size_bytes > self._size_bytes:
            return
        with self._lock:
            self._kept[saved.written.manifest_digest] = saved
            while len(self._kept) > self._most or self._kept_bytes() > self._size_bytes:
                self._kept.popitem(last=False)

    @property
    def keeps_any(self) -> bool:
        return self._size_bytes > 0

    @asynccontextmanager
    async def streaming(self, digest: str) -> AsyncIterator[Offer]:
        """Wait until fewer than `MAX_STREAMS` streams run, then yield a save for streaming.

        Call this from one event loop only.

        Raises SaveUnavailable.
        """
        offer = self.find(digest)
        try:
            async with asyncio.timeout(STREAM_WAIT_SECONDS):
                await self._streams.acquire()
        except TimeoutError:
            raise TooManyStreams(f"this worker is already streaming saves to {MAX_STREAMS} samplers") from None
        try:
            yield offer
        finally:
            self._streams.release()

    def find(self, digest: str) -> Offer:
        """Return a save. Raises SaveNotOffered."""
        with self._lock:
            found = self._kept.get(digest)
        if found is None:
            raise SaveNotOffered("this save is not, or no longer, in this worker's memory")
        return _offer_of(found)

    def _kept_bytes(self) -> int:
        return sum(saved.written.size_bytes for saved in self._kept.values())


def _offer_of(saved: SavedWeights) -> Offer:
    # Only the weights are streamed, and the base model's name is not part of them.
    files = peft_layout.encode_adapter(saved.state.lora, saved.state.tensors, base_model="")
    return Offer(saved.written.manifest, files[peft_layout.WEIGHTS_FILE])
