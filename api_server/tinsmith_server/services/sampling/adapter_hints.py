"""Tells a pool's samplers of weights that samples are about to name, so that they are there when the first comes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import WorkerError
from tinsmith_server.fleet.base import Fleet, SamplerClient
from tinsmith_server.services.sampling.routing import SamplerLoads, cache_key, preference
from tinsmith_server.services.sampling.save_sources import SaveSources, save_of
from tinsmith_server.store.records import Checkpoint

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
