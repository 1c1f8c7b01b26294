"""How samplers get adapters: told ahead of the first sample, and streamed from the worker that saved them."""

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


# Prompts spread over a pool, so any replica may be asked; but what nobody asks for costs each of them a read.
TOLD_REPLICAS = 8


class AdapterHints:
    """Nothing depends on one: who has not heard it loads the weights with their first sample."""

    def __init__(self, fleet: Fleet, loads: SamplerLoads, sources: SaveSources) -> None:
        self._fleet = fleet
        self._loads = loads
        self._sources = sources
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, checkpoint: Checkpoint, worker_id: str) -> None:
        """Of a checkpoint that somebody can sample from now. Returns at once. A worker has what it saved in memory.

        `worker_id`: who made it; empty where that is not known.
        """
        save = save_of(checkpoint, worker_id)
        samplers = self._fleet.samplers(checkpoint.base_model, checkpoint.lora_rank)
        replicas = {one.sampler_id: one for one in samplers if one.kind == "pool"}
        order = preference(cache_key(checkpoint.manifest_digest, b""), self._loads.of(list(replicas.values())))
        for sampler_id in order[:TOLD_REPLICAS]:
            client = replicas[sampler_id].running()
            if client is not None:
                adapter = self._sources.adapter_for(replicas[sampler_id], save)
                task = asyncio.create_task(_tell(client, adapter), context=contextvars.Context())
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)


async def _tell(client: SamplerClient, adapter: worker_pb2.AdapterRef) -> None:
    with contextlib.suppress(WorkerError):
        await client.prepare(adapter)
