"""The tokenizers of base models, which workers read from the models' files."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith_server.errors import NotFound, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet, SamplerClient
from tinsmith_server.fleet.names import find_model

CONNECT_SECONDS = 5.0
CACHE_BYTES = 64 * 2**20
# The files' time is constant, so that every server makes the same archive.
_WRITTEN = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file of the tokenizer's files; `digest` is the digest that the worker computed for the files."""

    digest: str
    content: bytes


class Tokenizers:
    """A cache of the latest archives, with at most `CACHE_BYTES` in total. The newest archive is always kept."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._archives: OrderedDict[str, Archive] = OrderedDict()
        self._digests: dict[str, str] = {}
        # Without a lock, each of many programs that start together would read the files into memory. Each base model
        # has its own lock, so that a worker that does not answer delays only this model's programs.
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def archive(self, base_model: str) -> Archive:
        """Return the current tokenizer of the base model.

        Raises NotFound for an unknown base model, Unprocessable for a base model without a tokenizer that may be sent,
        and WorkerUnavailable while no worker of the base model runs.
        """
        served = find_model(self._fleet, base_model)
        if served is None:
            raise NotFound(
                f"there is no base model {base_model[:200]!r}; GET /api/v1/get_server_capabilities lists all"
            )
        base_model = served.name
        worker = await self._worker(base_model)
        async with self._reading[base_model]:
            known = self._archives.get(self._digests.get(base_model, ""))
            reply = await worker.read_tokenizer(known.digest if known else "")
            archive = self._archives.get(reply.digest)
            if archive is None:
                content = await asyncio.to_thread(packed, reply.files)
                archive = Archive(reply.digest, content)
            self._keep(base_model, archive)
        return archive

    def _keep(self, base_model: str, archive: Archive) -> None:
        self._digests[base_model] = archive.digest
        self._archives[archive.digest] = archive
        self._archives.move_to_end(archive.digest)
        held = sum(len(one.content) for one in self._archives.values())
        while held > CACHE_BYTES and len(self._archives) > 1:
            _, oldest = self._archives.popitem(last=False)
            held -= len(oldest.content)

    async def _worker(self, base_model: str) -> SamplerClient:
        """Return a worker that runs, or a worker that can be started.

        Every worker of a base model has the files of the model.
        """
        model = self._fleet.model(base_model)
        places = [*self._fleet.trainers(base_model, rank=1), *self._fleet.samplers(base_model)]
        for place in places:
            if (running := place.running()) is not None:
                return running
        if places:
            return await places[0].connection(CONNECT_SECONDS)
        sampling = model is not None and not model.training
        raise WorkerUnavailable(await self._fleet.provide(base_model, sampling=sampling))


def packed(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into:
        for name, content in sorted(files.items()):
            info = zipfile.ZipInfo(name, _WRITTEN)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            into.writestr(info, content)
    return archive.getvalue()
