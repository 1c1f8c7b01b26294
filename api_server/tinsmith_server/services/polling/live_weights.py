"""Samples from the weights that a model has at the moment of the request: `tinker://<model>/weights/live`.

The weights are saved without a name behind all operations that the model has accepted, and sampled from this save.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import replace

from tinsmith_server.errors import Unprocessable, WorkerUnavailable
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.polling.futures import Futures
from tinsmith_server.services.polling.long_polls import Pending
from tinsmith_server.services.sampling.sample_requests import PlainSample
from tinsmith_server.services.sampling.sampling import Sampling, Submission
from tinsmith_server.services.training.operations import Operations
from tinsmith_server.store.records import SamplingSession
from tinsmith_server.wire.ids import parse_tinker_path, sampling_session_id_of, session_of
from tinsmith_server.wire.plain_requests import CreateSamplingClientRequest
from tinsmith_server.wire.requests import CreateSamplingSessionRequest

SAVE_SECONDS = 60.0
"""The time for which a request waits for the save. The save is a short operation, but it waits for earlier ones."""
# Sampling sessions that clients number have 31 bits, so these numbers are different.
FIRST_NUMBER = 2**32
NUMBER_BITS = 62


class LiveWeights:
    """The opening of sampling sessions and the submission of samples, from saved or from live weights."""

    def __init__(self, sampling: Sampling, operations: Operations, futures: Futures) -> None:
        self._sampling = sampling
        self._operations = operations
        self._futures = futures

    async def open(self, tenant: str, request: CreateSamplingSessionRequest) -> SamplingSession:
        """Open a sampling session. Raises the errors of `Sampling.open`, and those of `_save`."""
        model_id = live_model(request.model_path)
        if model_id is None:
            return await self._sampling.open(tenant, request)
        # A repeated request is the same save.
        name = sampling_session_id_of(request.session_id, request.sampling_session_seq_id)
        return await self._save(tenant, model_id, name, key=f"live {name}")

    async def open_own(
        self, tenant: str, request: CreateSamplingClientRequest, key: str | None = None
    ) -> SamplingSession:
        """Open a sampling session for a client without a session. Raises the errors of `open`."""
        model_id = live_model(request.model_path)
        if model_id is None:
            return await self._sampling.open_own(tenant, request, key)
        return await self._save(tenant, model_id, _drawn_name(model_id, key), key)

    async def submit_plain(self, tenant: str, sample: PlainSample, key: str | None = None) -> Submission:
        """Submit a sample that has no number. Raises the errors of `Sampling.submit_plain`, and those of `_save`."""
        model_id = live_model(sample.model_path)
        if model_id is not None and sample.sampling_session_id is None:
            session = await self._save(tenant, model_id, _drawn_name(model_id, key), key)
            sample = replace(sample, sampling_session_id=session.sampling_session_id, model_path=None)
        return await self._sampling.submit_plain(tenant, sample, key)

    async def _save(self, tenant: str, model_id: str, name: str, key: str | None) -> SamplingSession:
        """Save the weights for a sampling session with this name, and return the sampling session.

        Raises WorkerUnavailable if earlier operations of the model take too long, and Unprocessable if the save fails.
        """
        accepted = await self._operations.save_live(tenant, model_id, name, key)
        deadline = asyncio.get_running_loop().time() + SAVE_SECONDS
        while isinstance(answer := await self._saved(tenant, str(accepted.operation)), Pending):
            if asyncio.get_running_loop().time() >= deadline:
                raise WorkerUnavailable(
                    f"{model_id} still runs earlier operations, so its weights are not saved yet: send this again with "
                    "the same Idempotency-Key"
                )
        if isinstance(answer, Failure):
            raise Unprocessable(f"the weights of {model_id} cannot be sampled: {answer.message}")
        return await self._sampling.owned(tenant, name)

    async def _saved(self, tenant: str, request_id: str) -> object:
        return await self._futures.retrieve(tenant, request_id, allow_metadata_only=False)


def live_model(path: str | None) -> str | None:
    """Return the model whose live weights the path names, or None for another path."""
    try:
        parsed = parse_tinker_path(path or "")
    except ValueError:
        return None
    return parsed.run_id if (parsed.kind, parsed.name) == ("weights", "live") else None


def _drawn_name(model_id: str, key: str | None) -> str:
    """Return the name of a sampling session in the model's session. The same idempotency key returns the same name."""
    drawn = secrets.token_bytes(8) if key is None else hashlib.sha256(f"{model_id} {key}".encode()).digest()
    number = FIRST_NUMBER | int.from_bytes(drawn[:8]) % 2**NUMBER_BITS
    return sampling_session_id_of(session_of(model_id), number)
