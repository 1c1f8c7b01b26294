"""Events of workers. The server writes events to the store, even if no client polls for a result."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import ModelNotAtWorker
from tinsmith_server.fleet.base import Changes, Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.audit import of_new
from tinsmith_server.services.checkpoints.retention import Retention
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.failures import Failure
from tinsmith_server.store.records import (
    Checkpoint,
    CheckpointType,
    Clock,
    FinalState,
    Model,
    RunStep,
    SamplingSession,
    utc_now,
)
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import parse_sampling_session_id

log = get_logger(__name__)

# The time that a submission may wait for a worker that restarts.
CONNECT_SECONDS = 20.0
# This time is short, because the worker was connected a moment before.
RECONNECT_SECONDS = 2.0
STEPS_TOGETHER_SECONDS = 0.5

CHECKPOINT_TYPES: dict[worker_pb2.CheckpointKind.ValueType, CheckpointType] = {
    worker_pb2.TRAINING: "training",
    worker_pb2.SAMPLER: "sampler",
    worker_pb2.EXTERNAL: "external",
    worker_pb2.EPHEMERAL: "ephemeral",
}


class Events:
    """A service that writes workers' events to the store.

    An event that is applied twice changes nothing the second time, so any replica may drain events at any time.
    """

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        retention: Retention,
        delivery: Delivery,
        freed: Changes,
        to_be_sampled: Callable[[Checkpoint, str], None],
        clock: Clock = utc_now,
    ) -> None:
        """Start.

        `freed` is notified when a model has ended and its slot is free. `to_be_sampled` is called with each save for
        sampling and the worker of the save.
        """
        self._store = store
        self._fleet = fleet
        self._retention = retention
        self._delivery = delivery
        self._freed = freed
        self._to_be_sampled = to_be_sampled
        self._clock = clock
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Drains that have not begun.
        self._next_drains: dict[str, asyncio.Task[int]] = {}

    async def drain(self, worker_id: str, connect_seconds: float = CONNECT_SECONDS) -> int:
        """Apply all events that the worker has reported, and return the cursor. Raises WorkerUnavailable."""
        # The wait is outside the lock. Inside it, callers would wait for an absent worker one after the other.
        await self._fleet.worker(worker_id).connection(connect_seconds)
        drain = self._next_drains.get(worker_id)
        if drain is None:
            drain = asyncio.create_task(self._drain(worker_id), context=contextvars.Context())
            # All callers may have given up.
            drain.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
            self._next_drains[worker_id] = drain
        return await asyncio.shield(drain)

    async def _drain(self, worker_id: str) -> int:
        """Drain the events while holding the worker's lock.

        One drain serves all callers that asked before the lock was acquired.
        """
        async with self._turns[worker_id]:
            # A later caller needs another drain, because this drain may miss newer events.
            del self._next_drains[worker_id]
            while await self._apply_next(worker_id, hold_seconds=0, connect_seconds=RECONNECT_SECONDS):
                pass
            return (await self._store.get_worker(worker_id)).event_cursor

    async def drain_for(self, worker_id: str, result: worker_pb2.Result, connect_seconds: float) -> None:
        """Apply at least the events that the store must contain before a client sees this result.

        Raises WorkerUnavailable.
        """
        if result.event_id and (await self._store.get_worker(worker_id)).event_cursor < result.event_id:
            await self.drain(worker_id, connect_seconds)

    async def follow(self, worker_id: str, hold_seconds: float) -> None:
        """Wait for the worker's next events, and apply them. Raises WorkerUnavailable.

        The pause makes one transaction of many steps. A client that waits for an event does not wait for this task.
        """
        if await self._apply_next(worker_id, hold_seconds, CONNECT_SECONDS):
            await asyncio.sleep(STEPS_TOGETHER_SECONDS)

    async def _apply_next(self, worker_id: str, hold_seconds: float, connect_seconds: float) -> int:
        worker = await self._fleet.worker(worker_id).connection(connect_seconds)
        cursor = (await self._store.get_worker(worker_id)).event_cursor
        events = await worker.events(cursor, hold_seconds)
        steps = [event for event in events if event.HasField("step_done")]
        if steps:
            await self._add_steps(worker_id, steps)
        for event in events:
            await self._apply(worker_id, event)
        if events:
            await self._store.advance_cursor(worker_id, events[-1].event_id)
        return len(events)

    async def _apply(self, worker_id: str, event: worker_pb2.Event) -> None:
        match event.WhichOneof("what"):
            case "checkpoint_saved":
                await self._checkpoint_saved(worker_id, event)
            case "model_corrupted":
                corrupted = event.model_corrupted
                log.error("model corrupted", model_id=corrupted.model_id, reason=corrupted.reason)
                failure = Failure("server", corrupted.reason).to_row()
                await self._end(worker_id, corrupted.model_id, "corrupted", failure)
            case "model_released":
                released = event.model_released
                # The reason is the answer to later requests. It is empty if the session has ended or the client
                # released the model.
                why = Failure("user", released.reason).to_row() if released.reason else None
                await self._end(worker_id, released.model_id, "released", why)
            case "model_failed":
                failed = event.model_failed
                await self._end(worker_id, failed.model_id, "failed", Failure.from_worker(failed.failure).to_row())
            case "model_created":
                await self._model_created(worker_id, event.model_created.model_id)

    async def _add_steps(self, worker_id: str, events: Sequence[worker_pb2.Event]) -> None:
        unknown = await self._store.add_steps([_step(event) for event in events])
        if unknown:
            log.error("steps of unknown models", worker_id=worker_id, model_ids=sorted(unknown))

    async def _model_created(self, worker_id: str, model_id: str) -> None:
        """Bind a model that a worker has created, if the worker's acknowledgement was lost.

        If the model is bound to another worker or has ended, release the model at this worker. An accepted model that
        no other worker has created is bound to this worker, even if the model was placed at another worker. After a
        release at this worker, a later placement at the same worker would find that the model has ended. The event of a
        creation comes only once, so the model must not be moved to another worker later.
        """
        slots = self._fleet.worker(worker_id).slots
        if await self._store.bind_to_creator(model_id, worker_id, slots):
            return
        model = await self._store.get_model(model_id)
        if model is None:
            log.error("report of an unknown model", model_id=model_id, worker_id=worker_id)
            return
        log.warning("model released where it does not live", model_id=model_id, worker_id=worker_id)
        with contextlib.suppress(ModelNotAtWorker):
            await self._delivery.release(worker_id, model_id, model.tenant)

    async def _end(self, worker_id: str, model_id: str, state: FinalState, failure: str | None = None) -> None:
        """End the model if it is bound to this worker."""
        model = await self._store.get_model(model_id)
        if model is not None and model.worker_id == worker_id:
            await self._store.end_model(model_id, state, failure)
            self._freed.note()

    async def _checkpoint_saved(self, worker_id: str, event: worker_pb2.Event) -> None:
        saved = event.checkpoint_saved
        model = await self._store.get_model(saved.model_id)
        if model is None:
            log.error("checkpoint of an unknown model", model_id=saved.model_id, directory=saved.directory)
            return
        checkpoint = _checkpoint(event, model, self._clock())
        await self._store.put_checkpoint(checkpoint, of_new(checkpoint, "checkpoint_saved"))
        if saved.kind == worker_pb2.EPHEMERAL:
            self._to_be_sampled(checkpoint, worker_id)
            await self._store.add_sampling_session(_sampling_session(event, model))
            await self._retention.enforce_ephemeral_cap(model.tenant)


def _checkpoint(event: worker_pb2.Event, model: Model, now: datetime) -> Checkpoint:
    """Return the row for a save.

    The time until the checkpoint's expiry counts from `now`, because the clock of a worker may be slow.
    """
    saved = event.checkpoint_saved
    return Checkpoint(
        run_id=saved.model_id,
        type=CHECKPOINT_TYPES[saved.kind],
        name=saved.sampling_session_id if saved.kind == worker_pb2.EPHEMERAL else saved.name,
        tenant=model.tenant,
        base_model=model.base_model,
        directory=saved.directory,
        manifest_digest=saved.manifest_digest,
        size_bytes=saved.size_bytes,
        epoch=event.epoch,
        event_id=event.event_id,
        seq_id=saved.seq_id,
        lora_rank=saved.lora.rank,
        lora_alpha=saved.lora.alpha,
        train_attn=saved.lora.train_attn,
        train_mlp=saved.lora.train_mlp,
        train_unembed=saved.lora.train_unembed,
        created_at=datetime.fromtimestamp(event.time, UTC),
        expires_at=now + timedelta(seconds=saved.ttl_seconds) if saved.HasField("ttl_seconds") else None,
        user_metadata=dict(saved.user_metadata) if saved.has_user_metadata else None,
    )


def _step(event: worker_pb2.Event) -> RunStep:
    done = event.step_done
    return RunStep(
        run_id=done.model_id,
        position=done.position,
        step=done.step,
        at=datetime.fromtimestamp(event.time, UTC),
        tokens=done.tokens,
        loss=_finite(done.loss),
        grad_norm=_finite(done.grad_norm),
        learning_rate=_finite(done.learning_rate),
        seconds=_finite(done.seconds),
        sampler_gap=_finite(done.sampler_gap),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sampling_session(event: worker_pb2.Event, model: Model) -> SamplingSession:
    saved = event.checkpoint_saved
    name = parse_sampling_session_id(saved.sampling_session_id)
    return SamplingSession(
        sampling_session_id=saved.sampling_session_id,
        session_id=name.session_id,
        sampling_session_seq_id=name.seq_id,
        tenant=model.tenant,
        base_model=model.base_model,
        created_at=datetime.fromtimestamp(event.time, UTC),
        model_id=model.model_id,
        inflight=name.inflight,
        checkpoint_directory=saved.directory,
        manifest_digest=saved.manifest_digest,
    )
