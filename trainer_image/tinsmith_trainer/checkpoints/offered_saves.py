"""A worker's newest saves, for samplers in other pods, which ask for them by the digests of their manifests.

Nothing is copied: kept is what was written to the checkpoint root, for a while longer. Whatever is not here any more is
there.
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

MOST_OFFERED = 4
MOST_AT_ONCE = 2
"""Each takes a third of a second of this process's processor for 400 MB, which its training goes without."""
TURN_SECONDS = 1.0
"""How long a third one waits: the replicas of a pool ask at the same time, and hear of none that the root is better."""
PART_BYTES = 1024**2
"""Of one message. Messages of an eighth of that take twice as much of a processor, on both sides."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The manifest, and the file of weights as it is on the root."""

    manifest: bytes
    weights: Pieces

    def parts(self) -> Iterator[bytes]:
        """The file's content, one after the other."""
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
    """Whoever asks reads the root, and says what the error says."""


class SaveNotOffered(SaveUnavailable):
    """It is none of the newest, or of a process before this one."""


class TooManyStreams(SaveUnavailable):
    """Others are given theirs for longer than is worth waiting for what the root has, too."""


class OfferedSaves:
    """Thread-safe, but for who is given one."""

    def __init__(self, *, size_bytes: int, most: int = MOST_OFFERED) -> None:
        """`size_bytes`: of all that are kept. One that has more is not; 0: none is."""
        self._most = most
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, SavedWeights] = OrderedDict()
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    def add(self, saved: SavedWeights) -> None:
        """It is on the root."""
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
    async def given(self, digest: str) -> AsyncIterator[Offer]:
        """One that somebody is being given, in one event loop. Waits for its turn. Raises SaveUnavailable."""
        offer = self.find(digest)
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise TooManyStreams(f"this worker gives saves to {MOST_AT_ONCE} samplers just now") from None
        try:
            yield offer
        finally:
            self._turns.release()

    def find(self, digest: str) -> Offer:
        """Raises SaveNotOffered."""
        with self._lock:
            found = self._kept.get(digest)
        if found is None:
            raise SaveNotOffered("this save is not, or no more, in this worker's memory")
        return _offer_of(found)

    def _kept_bytes(self) -> int:
        return sum(saved.written.size_bytes for saved in self._kept.values())


def _offer_of(saved: SavedWeights) -> Offer:
    # The manifest has the digest of the weights alone: what the configuration calls the base model is not in them.
    files = peft_layout.encode_adapter(saved.state.lora, saved.state.tensors, base_model="")
    return Offer(saved.written.manifest, files[peft_layout.WEIGHTS_FILE])
