"""The state of the workers and of the store. Metrics, capabilities and the routing of samples use this state."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

from tinsmith_rpc import CUSTOM_LOSS, worker_pb2

from tinsmith_server.errors import TinsmithError, Unprocessable, WorkerError
from tinsmith_server.fleet.base import Fleet, SamplerHandle, ServedModel, describable_handles
from tinsmith_server.fleet.names import NotServed, served_model
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.quotas import QueueQuota
from tinsmith_server.services.sampling.routing import SamplerLoads
from tinsmith_server.services.training.model_creation import OPTIMIZERS
from tinsmith_server.services.training.needs import unmet_needs
from tinsmith_server.store.store import Store
from tinsmith_server.wire.needs import Needs
from tinsmith_server.wire.responses import SupportedModel

log = get_logger(__name__)

# A worker that hangs must not delay the others' descriptions.
DESCRIBE_SECONDS = 4.0
STORE_SECONDS = 2.0


class Inspection:
    """The descriptions of workers from the latest refresh.

    Reading a description never waits for a worker and never starts a worker.
    """

    def __init__(self, store: Store, fleet: Fleet, loads: SamplerLoads, queued: QueueQuota) -> None:
        self._store = store
        self._fleet = fleet
        self._loads = loads
        self._queued = queued
        self.workers: Mapping[str, worker_pb2.DescribeReply] = {}
        self.models: Mapping[str, worker_pb2.ModelStatus] = {}
        self.rows: Mapping[str, int] = {}

    @property
    def handles(self) -> Sequence[SamplerHandle]:
        """The handles of all workers and samplers."""
        return describable_handles(self._fleet)

    @property
    def trainer_ids(self) -> Collection[str]:
        """The IDs of the handles that train."""
        return {handle.sampler_id for handle in self._fleet.workers}

    async def refresh(self) -> None:
        """Ask all workers for descriptions, and store the descriptions in `workers` by worker ID."""
        handles = self.handles
        sampler_ids = {handle.sampler_id for handle in handles if handle.running() is not None}
        descriptions = await asyncio.gather(*(_describe(handle) for handle in handles))
        seen = zip(handles, descriptions, strict=True)
        self.workers = {handle.sampler_id: reply for handle, reply in seen if reply is not None}
        self.models = {model.model_id: model for reply in self.workers.values() for model in reply.models}
        self._loads.refresh(self.workers, sampler_ids - self.workers.keys())
        await self._queued.refresh(self.workers.values())
        self.rows = await self._store.counts()

    def max_sequence_length(self, base_model: str) -> int | None:
        """Return the length that all trainers and samplers of the base model accept, or None for an unknown length."""
        lengths = [reply.base_model.max_sequence_length for reply in self._replies(base_model)]
        return min((length for length in lengths if length), default=None)

    def takes_images(self, base_model: str) -> bool | None:
        """Return whether all trainers and samplers of the base model accept images, or None if this is unknown."""
        seen = [reply.capabilities.images for reply in self._replies(base_model)]
        return all(seen) if seen else None

    def runs_custom_losses(self) -> bool:
        """Return whether all described workers run custom losses.

        Programs ask this question before they choose a model.
        """
        seen = [self.workers[one.sampler_id] for one in self._fleet.workers if one.sampler_id in self.workers]
        return all(CUSTOM_LOSS in reply.capabilities.losses for reply in seen)

    def vocab_size(self, base_model: str) -> int | None:
        """Return the size of the vocabulary, or None before the first description."""
        return max((reply.base_model.vocab_size for reply in self._replies(base_model)), default=0) or None

    def quantization(self, base_model: str) -> str | None:
        """Return the quantization format of the weights in memory, or None if the weights are dense."""
        return _joined(reply.base_model.quantization for reply in self._replies(base_model))

    def numerics(self, base_model: str) -> str | None:
        """Return `exact` if a replay of training gives the same bits, `fast` if it rounds differently, or None.

        None means that no worker has described itself.
        """
        return _joined(reply.capabilities.numerics for reply in self._replies(base_model))

    def losses(self, base_model: str) -> list[str] | None:
        """Return the losses that all trainers of the base model have, or None if this is unknown."""
        seen = [reply.capabilities.losses for reply in self._trainers(base_model)]
        return [loss for loss in seen[0] if all(loss in others for others in seen)] if seen else None

    def max_rank(self, base_model: str) -> int | None:
        """Return the LoRA rank that all trainers of the base model take, or None if this is unknown."""
        return min((reply.capabilities.max_rank for reply in self._trainers(base_model)), default=None)

    def modules(self, base_model: str) -> list[str] | None:
        """Return the modules that all trainers of the base model can train, or None if this is unknown."""
        seen = [reply.capabilities for reply in self._trainers(base_model)]
        trained = {
            "attn": all(one.train_attn for one in seen),
            "mlp": all(one.train_mlp for one in seen),
            "unembed": all(one.train_unembed for one in seen),
        }
        return [module for module, can_train in trained.items() if can_train] if seen else None

    def stored_as(self, base_model: str) -> str | None:
        """Return the quantization format of the files if the worker has made the weights dense.

        Return None for dense files.
        """
        return _joined(reply.base_model.stored_as for reply in self._replies(base_model))

    def _trainers(self, base_model: str) -> list[worker_pb2.DescribeReply]:
        """Return the descriptions of the workers that train the base model. Samplers have no losses."""
        return [reply for reply in self._replies(base_model) if reply.capabilities.losses]

    def _replies(self, base_model: str) -> list[worker_pb2.DescribeReply]:
        handles = (*self._fleet.trainers(base_model, rank=0), *self._fleet.samplers(base_model))
        replies = [self.workers.get(handle.sampler_id) for handle in handles]
        return [reply for reply in replies if reply is not None]


def _joined(descriptions: Iterable[str]) -> str | None:
    return ", ".join(sorted(set(descriptions) - {""})) or None


async def _describe(handle: SamplerHandle) -> worker_pb2.DescribeReply | None:
    worker = handle.running()
    if worker is None:
        return None
    try:
        async with asyncio.timeout(DESCRIBE_SECONDS):
            return await worker.describe()
    except (WorkerError, TimeoutError):
        return None


class Capabilities:
    """The models that the server offers, and their properties.

    The longest sequence is the limit of the running worker, which may differ from the model's configuration.
    """

    def __init__(self, fleet: Fleet, inspection: Inspection) -> None:
        self._fleet = fleet
        self._inspection = inspection

    def supported_models(self) -> list[SupportedModel]:
        return [self.of(served) for served in self._fleet.models]

    def of(self, served: ServedModel) -> SupportedModel:
        """Return the model with its capabilities. Programs, messages and checks of needs use this one table."""
        seen, name = self._inspection, served.name
        return SupportedModel(
            model_name=name,
            max_context_length=seen.max_sequence_length(name) or served.max_context_length,
            trainable=served.training,
            sampleable=served.sampling,
            images=seen.takes_images(name),
            losses=seen.losses(name),
            optimizers=list(OPTIMIZERS),
            modules=seen.modules(name),
            max_rank=served.max_rank or seen.max_rank(name),
            max_sampling_rank=served.max_sampling_rank,
            quantization=seen.quantization(name),
            stored_as=seen.stored_as(name),
            numerics=seen.numerics(name),
        )

    def unmet(self, needs: Needs) -> list[str]:
        """Return the needs that the served model does not meet. Raises Unprocessable without the name of a model."""
        if needs.model is None:
            raise Unprocessable("model is missing: name the base model that the program needs")
        try:
            served = served_model(self._fleet, needs.model)
        except NotServed as error:
            return [str(error)]
        return list(unmet_needs(needs, self.of(served)))


class Readiness:
    """The readiness of this replica to serve requests.

    The store must answer. If the fleet does not know its workers, the replica is not ready, unless all other replicas
    have the same problem. If all replicas have this problem, this replica stays ready, because most requests need only
    existing connections, and clients give up if no server is ready. Workers need not be running.
    """

    def __init__(self, store: Store, fleet: Fleet, replica: str) -> None:
        """Start.

        `replica` is the name with which this replica takes leases.
        """
        self._store = store
        self._fleet = fleet
        self._replica = replica
        # The last logged reason, because probes ask every few seconds.
        self._logged: str | None = None

    async def problem(self) -> str | None:
        """Return why the replica is not ready, or None if it is ready."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._store.check()
                return await self._fleet_problem()
        except TimeoutError:
            return f"the store has not answered for {STORE_SECONDS:g} s"
        except TinsmithError as error:
            return str(error)

    async def _fleet_problem(self) -> str | None:
        problem = self._fleet.problem
        if problem is None or set(await self._store.announced_replicas()) - {self._replica}:
            self._logged = None
            return problem
        if self._logged != problem:
            log.warning("ready without it, since no other replica is ready", reason=problem)
        self._logged = problem
        return None
