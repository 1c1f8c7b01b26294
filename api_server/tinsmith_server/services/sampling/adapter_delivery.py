"""The delivery of adapters to samplers.

The server announces an adapter before the first sample, and the adapter's worker streams the weights to the sampler.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from contextlib import suppress
from dataclasses import dataclass

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import WorkerAbsent, WorkerError
from tinsmith_server.fleet.base import Fleet, SamplerClient, SamplerHandle, SavesAddress
from tinsmith_server.services.sampling.routing import SamplerLoads, cache_key, preference
from tinsmith_server.store.records import Checkpoint


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that the tenant may sample, and the worker that made the checkpoint.

    The worker is "" if the worker is unknown.
    """

    directory: str
    manifest_digest: str
    size_bytes: int
    worker_id: str


def save_of(checkpoint: Checkpoint, worker_id: str) -> Save:
    return Save(checkpoint.directory, checkpoint.manifest_digest, checkpoint.size_bytes, worker_id)


class SaveSources:
    """The choice of a source for a save: the checkpoint root, or the worker that made the save."""

    def __init__(self, fleet: Fleet, *, streams: bool) -> None:
        """Create the object. If `streams` is False, samplers read every save from the checkpoint root."""
        self._fleet = fleet
        self._streams = streams

    def adapter_for(self, sampler: SamplerHandle, save: Save) -> worker_pb2.AdapterRef:
        """Return the adapter. If the sampler can reach the adapter's worker, include the worker's address."""
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


# Prompts are spread over a pool, so any replica may need the adapter. But each announcement costs a read of the
# adapter.
HINTED_REPLICAS = 8


class AdapterHints:
    """The announcement of adapters to samplers.

    A sampler that missed an announcement loads the weights at the first sample.
    """

    def __init__(self, fleet: Fleet, loads: SamplerLoads, sources: SaveSources) -> None:
        self._fleet = fleet
        self._loads = loads
        self._sources = sources
        self._tasks: set[asyncio.Task[None]] = set()

    def announce(self, checkpoint: Checkpoint, worker_id: str) -> None:
        """Announce a checkpoint that can be sampled now. Returns immediately.

        `worker_id` is the worker that made the checkpoint and has it in memory, or "" if the worker is unknown.
        """
        save = save_of(checkpoint, worker_id)
        samplers = self._fleet.samplers(checkpoint.base_model, checkpoint.lora_rank)
        replicas = {one.sampler_id: one for one in samplers if one.kind == "pool"}
        order = preference(cache_key(checkpoint.manifest_digest, b""), self._loads.of(list(replicas.values())))
        for sampler_id in order[:HINTED_REPLICAS]:
            client = replicas[sampler_id].running()
            if client is not None:
                adapter = self._sources.adapter_for(replicas[sampler_id], save)
                task = asyncio.create_task(_prepare(client, adapter), context=contextvars.Context())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)


async def _prepare(client: SamplerClient, adapter: worker_pb2.AdapterRef) -> None:
    with contextlib.suppress(WorkerError):
        await client.prepare(adapter)
