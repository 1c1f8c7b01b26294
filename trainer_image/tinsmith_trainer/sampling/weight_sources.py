"""The sources of an adapter's weights for a sampler. The sampler uses the nearest source that has the weights."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.shared_saves import fetch_save
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.sampling.streamed_saves import StreamedSaves, StreamFailed
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

log = structlog.get_logger(__name__)

Way = Literal["own", "shared", "stream", "root"]
"""`own`: this process saved the weights. `shared`: the weights are mapped from a worker on this machine.

`stream`: the weights come from the memory of a worker on another machine. `root`: the weights are read from the
checkpoint root.
"""


class WeightSources:
    """The sources from which a sampler reads weights and images. Methods block, so they are called in threads."""

    def __init__(
        self,
        checkpoints: CheckpointRoot,
        base: BaseModelInfo,
        *,
        saves_socket: Path | None = None,
        streams: StreamedSaves | None = None,
    ) -> None:
        """Create the sources. `saves_socket` is the socket of the worker on this machine.

        The sampler asks the worker on this machine first.
        """
        self.checkpoints = checkpoints
        self._base = base
        self._saves_socket = saves_socket
        self._streams = streams
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()
        self._streams_failed: Counter[str] = Counter()

    def fetch(self, reference: worker_pb2.AdapterRef) -> AdapterState:
        """Return the adapter's weights. Raises TrainerError if the checkpoint root does not have the weights either."""
        way: Way = "shared"
        state = self._shared(reference)
        if state is None:
            state, way = self._streamed(reference), "stream"
        if state is None:
            state = self.checkpoints.read(reference.directory, reference.manifest_digest, self._base).state
            way = "root"
        self._count(self._taken, way)
        return state

    def note_own(self) -> None:
        """Count an adapter that this process saved and still has in memory."""
        self._count(self._taken, "own")

    def taken(self) -> Mapping[str, int]:
        """Return the number of adapters from each source."""
        with self._lock:
            return dict(self._taken)

    def streams_failed(self) -> Mapping[str, int]:
        """Return the number of failed streams by reason. After a failed stream, the weights are read from the root."""
        with self._lock:
            return dict(self._streams_failed)

    def _shared(self, reference: worker_pb2.AdapterRef) -> AdapterState | None:
        if self._saves_socket is None:
            return None
        return fetch_save(self._saves_socket, reference.manifest_digest, self._base.revision)

    def _streamed(self, reference: worker_pb2.AdapterRef) -> AdapterState | None:
        if self._streams is None or not reference.HasField("source"):
            return None
        try:
            return self._streams.take(reference)
        except StreamFailed as error:
            self._count(self._streams_failed, error.reason)
            log.info(
                "a save is read from the root instead",
                worker=reference.source.worker_id,
                reason=error.reason,
                why=str(error),
            )
            return None

    def _count(self, counter: Counter[str], what: str) -> None:
        with self._lock:
            counter[what] += 1
