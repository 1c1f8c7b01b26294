"""Who may give a sampler the weights of a save before it has read them from the checkpoint root."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import WorkerAbsent
from tinsmith_server.fleet.base import Fleet, SamplerHandle, SavesAddress
from tinsmith_server.store.records import Checkpoint


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint on the root, and the worker that made it; empty: nobody knows. Only what a tenant may sample from
    becomes one."""

    directory: str
    manifest_digest: str
    size_bytes: int
    worker_id: str


def save_of(checkpoint: Checkpoint, worker_id: str) -> Save:
    return Save(checkpoint.directory, checkpoint.manifest_digest, checkpoint.size_bytes, worker_id)


class SaveSources:
    """What to ask a sampler for."""

    def __init__(self, fleet: Fleet, *, streams: bool) -> None:
        """`streams`: whether samplers are told of workers at all, or read everything."""
        self._fleet = fleet
        self._streams = streams

    def adapter_for(self, sampler: SamplerHandle, save: Save) -> worker_pb2.AdapterRef:
        """With the address of the save's worker, where the sampler can reach that."""
        adapter = worker_pb2.AdapterRef(directory=save.directory, manifest_digest=save.manifest_digest)
        address = self._address_of(save.worker_id) if self._streams else None
        if address is not None and address.network == sampler.takes_saves_in:
            adapter.source.target = address.target
            adapter.source.worker_id = address.worker_id
            adapter.source.size_bytes = save.size_bytes
        return adapter

    def _address_of(self, worker_id: str) -> SavesAddress | None:
        with suppress(WorkerAbsent):
            return self._fleet.worker(worker_id).saves
        return None
