"""A worker's newest saves, for samplers in other pods, which ask for them by the digests of their manifests.

Nothing is copied: kept is what was written to the checkpoint root, for a while longer. Whatever is not here any more is
there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinsmith_trainer.checkpoints.checkpoint_root import SavedWeights
from tinsmith_trainer.durable_files import Pieces
from tinsmith_trainer.engines import peft_layout

MOST_OFFERED = 4
MOST_AT_ONCE = 2
"""Each takes a third of a second of this process for 400 MB, which its training goes without."""
PART_BYTES = 1024**2
"""Of one message: half as many, or four times as many, take twice the time."""


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


class SaveNotGiven(Exception):
    """Whoever asks reads the root, and says what the error says."""


class SaveNotOffered(SaveNotGiven):
    """It is none of the newest, or of a process before this one."""


class TooManyStreams(SaveNotGiven):
    """Others are given theirs just now, and nobody waits for what the root has, too."""


class OfferedSaves:
    """Thread-safe."""

    def __init__(self, *, size_bytes: int, most: int = MOST_OFFERED) -> None:
        """`size_bytes`: of all that are kept. One that has more is not; 0: none is."""
        self._most = most
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, SavedWeights] = OrderedDict()
        self._under_way = 0

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

    @contextmanager
    def given(self, digest: str) -> Iterator[Offer]:
        """One that somebody is being given. Raises SaveNotGiven."""
        saved = self._begin(digest)
        try:
            yield _offer_of(saved)
        finally:
            with self._lock:
                self._under_way -= 1

    def _begin(self, digest: str) -> SavedWeights:
        with self._lock:
            found = self._kept.get(digest)
            if found is None:
                raise SaveNotOffered("this save is not, or no more, in this worker's memory")
            if self._under_way >= MOST_AT_ONCE:
                raise TooManyStreams(f"this worker gives saves to {self._under_way} samplers just now")
            self._under_way += 1
            return found

    def _kept_bytes(self) -> int:
        return sum(saved.written.size_bytes for saved in self._kept.values())


def _offer_of(saved: SavedWeights) -> Offer:
    # The manifest has the digest of the weights alone: what the configuration calls the base model is not in them.
    files = peft_layout.encode_adapter(saved.state.lora, saved.state.tensors, base_model="")
    return Offer(saved.written.manifest, files[peft_layout.WEIGHTS_FILE])
