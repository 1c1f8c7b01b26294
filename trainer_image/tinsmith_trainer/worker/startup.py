"""The start and the stop of a process. The start reads the flags and opens the volume, model, service and address."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import grpc
import structlog
from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.offered_saves import OfferedSaves
from tinsmith_trainer.checkpoints.shared_saves import SaveSocket
from tinsmith_trainer.engines.base import Engine, EngineCapabilities
from tinsmith_trainer.engines.megatron.flags import ENGINES as RANKS_ENGINES
from tinsmith_trainer.errors import (
    ImageChanged,
    ModelCannotLoad,
    OutOfMemory,
    ServerError,
    TrainerError,
    is_out_of_memory,
)
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.attempts import AttemptPolicy
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.options import TOKEN_SERVERS, EngineFactory, SamplerFactory, WorkerOptions
from tinsmith_trainer.process import gc_pause
from tinsmith_trainer.process.exit import end_without_blame
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.sample_queue import Samples
from tinsmith_trainer.sampling.sampler_adapters import AdapterLimits, SamplerAdapters
from tinsmith_trainer.sampling.streamed_saves import StreamedSaves
from tinsmith_trainer.sampling.weight_sources import WeightSources
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.training.executor import AREAS
from tinsmith_trainer.training.snapshotting import SnapshotPolicy
from tinsmith_trainer.worker.grpc_server import SamplerServicer, SamplingServicer, WorkerServicer, serve
from tinsmith_trainer.worker.metrics import WorkerName
from tinsmith_trainer.worker.numerics import FAST, MODE, check_numerics, keep_threads, mode_of, numerics_of, remembered
from tinsmith_trainer.worker.peers import worker_name
from tinsmith_trainer.worker.service import WorkerParts, WorkerService
from tinsmith_trainer.worker.tls import TlsDirectory
from tinsmith_trainer.worker.volume import Volume

BROKEN_DEVICE = "CUDA error"

log = structlog.get_logger(__name__)

STOP_GRACE_SECONDS = 1.0
STEP_CHECK_SECONDS = 10.0

META_KEY = "image"
"""The key in the journal's `meta` under which the image is stored."""

UNIX = "unix:"


class Running(Protocol):
    """A process that accepts calls."""

    async def stop(self) -> None:
        """Refuse new work, finish running work, and save all state that must survive."""


async def start(options: WorkerOptions) -> Running:
    """Start the process. Return when the process accepts calls. Raises TrainerError."""
    tls = TlsDirectory(options.tls_directory) if options.tls_directory is not None else None
    if options.volume is None:
        return await _start_sampler(options, tls)
    return await _start_worker(options, options.volume, tls)


class RunningWorker(Running):
    """A running service with its clock and its address."""

    def __init__(self, service: WorkerService, server: grpc.aio.Server, save_socket: SaveSocket | None) -> None:
        self._service = service
        self._server = server
        self._save_socket = save_socket
        self._clock = asyncio.create_task(service.run_clock())
        self._clock.add_done_callback(_end_unless_cancelled)

    @override
    async def stop(self) -> None:
        started = time.monotonic()
        self._clock.cancel()
        await self._service.drain()
        await self._server.stop(STOP_GRACE_SECONDS)
        if self._save_socket is not None:
            await asyncio.to_thread(self._save_socket.close)
        log.info("worker drained", seconds=round(time.monotonic() - started, 3))


def _end_unless_cancelled(clock: asyncio.Task[None]) -> None:
    """End the process if its clock fails.

    A worker without a clock would close no gap and delete no data, but would seem healthy.
    """
    if not clock.cancelled():
        log.error("the worker's clock stopped", exc_info=clock.exception())
        end_without_blame()


class RunningSampler(Running):
    """A running sampler and its address."""

    def __init__(
        self, samples: Samples, server: grpc.aio.Server, *, drains: bool, hang_seconds: float = math.inf
    ) -> None:
        """Create the sampler. `drains`: after the stop request, clients may still fetch samples.

        If one step of the sampler takes longer than `hang_seconds`, the process ends.
        """
        self._samples = samples
        self._server = server
        self._drains = drains
        self._watch = asyncio.create_task(self._end_if_hung(hang_seconds))

    async def _end_if_hung(self, hang_seconds: float) -> None:
        """End the process if a step takes too long. Clients then submit their samples to another replica."""
        while (seconds := self._samples.sampler.stats().step_seconds) < hang_seconds:
            await asyncio.sleep(STEP_CHECK_SECONDS)
        log.error("a step of the sampler does not end, so the process ends", seconds=round(seconds))
        end_without_blame()

    @override
    async def stop(self) -> None:
        """Refuse new samples, so that clients send them to another replica. Let clients fetch the accepted samples."""
        started = time.monotonic()
        self._samples.stop_taking()
        if self._drains:
            await self._samples.drained()
        self._watch.cancel()
        await asyncio.to_thread(self._samples.sampler.close)
        await self._server.stop(STOP_GRACE_SECONDS)
        log.info("sampler drained", seconds=round(time.monotonic() - started, 3))


async def _start_worker(options: WorkerOptions, volume_path: Path, tls: TlsDirectory | None) -> RunningWorker:
    volume = Volume(volume_path, reserved_bytes=options.reserved_bytes)
    await asyncio.to_thread(volume.take)
    if options.image is not None:
        await asyncio.to_thread(pin_image, volume, options.image, is_fast=options.numerics == FAST)
    await asyncio.to_thread(with_journal, volume, keep_threads)
    engine, sampler = await asyncio.to_thread(load_engine, options)
    numerics = numerics_of(options, mode_of(options, engine.capabilities()))
    await asyncio.to_thread(with_journal, volume, lambda journal: check_numerics(journal, numerics, volume))
    # This process owns the volume, so the previous owner of the socket has ended.
    save_socket = SaveSocket(options.saves_socket) if options.saves_socket is not None else None
    root = CheckpointRoot(options.checkpoint_root, reserved_bytes=options.reserved_bytes)
    parts = WorkerParts(
        engine=engine,
        sampler=sampler,
        checkpoints=root,
        volume=volume,
        policy=SnapshotPolicy(options.snapshot_replay_seconds, options.snapshot_cost_factor),
        attempts=AttemptPolicy(options.attempts_per_operation, options.hang_timeout_seconds),
        model_places=options.model_places,
        reports_co_batching=options.report_co_batching,
        shared_saves=save_socket.saves if save_socket is not None else None,
        offered_saves=OfferedSaves(size_bytes=options.offered_saves_bytes or 0),
    )
    service = WorkerService(parts)
    server = await _serve(options, WorkerServicer(service, _name(options)), tls)
    root.start_sweeping(AREAS)
    log.info("worker ready", instance_id=service.instance_id, model=options.model, address=_address(options))
    return RunningWorker(service, server, save_socket)


async def _start_sampler(options: WorkerOptions, tls: TlsDirectory | None) -> RunningSampler:
    base, sampler = await asyncio.to_thread(load_sampler, options)
    limits = AdapterLimits(max_loaded=options.adapter_slots, max_rank=options.max_rank)
    streams = StreamedSaves(partial(channel_to, tls=tls), base)
    root = CheckpointRoot(options.checkpoint_root)
    sources = WeightSources(root, base, saves_socket=options.saves_socket, streams=streams)
    samples = Samples(sampler, SamplerAdapters(sampler, sources, limits))
    capabilities = _capabilities(options, images=sampler.takes_images)
    server = await _serve(options, SamplerServicer(samples, base, capabilities, _name(options)), tls)
    log.info("sampler ready", model=options.model, address=_address(options))
    # The server of this machine stops its sampler after it has stopped serving clients.
    is_alone = options.parent_fd is None
    return RunningSampler(samples, server, drains=is_alone, hang_seconds=options.hang_timeout_seconds)


def channel_to(source: worker_pb2.SaveSource, *, tls: TlsDirectory | None) -> grpc.Channel:
    """Open a channel to a worker, by mutual TLS or on this machine. Callers reach this process in the same way.

    Raises TrainerError.
    """
    if tls is not None:
        return tls.channel(source.target, worker_name(source.worker_id))
    if not source.target.startswith(UNIX):
        raise ServerError(f"{source.target} is on a network, and this sampler has no certificate to show there.")
    return grpc.insecure_channel(source.target)


def _capabilities(options: WorkerOptions, *, images: bool) -> EngineCapabilities:
    return EngineCapabilities(
        engine=options.engine,
        losses=(),
        max_rank=options.max_rank,
        adapter_slots=options.adapter_slots,
        batch_invariant=options.deterministic_sampling and options.engine not in TOKEN_SERVERS,
        numerics=None,
        train_attn=False,
        train_mlp=False,
        train_unembed=False,
        images=images,
    )


def pin_image(volume: Volume, image: str, *, is_fast: bool = False) -> None:
    """Record the image that runs operations from this start on.

    Raises ImageChanged if operations of another image must be replayed, because their bits may differ. It then records
    nothing. A journal is bound to an image only by operations with published results that must be replayed. Operations
    that never ran may run with any image. After an orderly stop, a snapshot contains the effect of all operations that
    ran. With `numerics: fast`, in the previous or in this process, any image may replay any operation.
    """
    with_journal(volume, lambda journal: _pin_image(journal, volume, image, is_fast=is_fast))


def _pin_image(journal: Journal, volume: Volume, image: str, *, is_fast: bool) -> None:
    before = journal.read(lambda db: journal_tables.get_meta(db, META_KEY)).result()
    numerics, to_replay = journal.read(remembered).result()
    if before == image:
        return
    if before is not None and to_replay and not (is_fast or numerics.get(MODE) == FAST):
        raise ImageChanged(_image_refusal(volume, before, image, to_replay), before)
    journal.write(lambda db: journal_tables.set_meta(db, META_KEY, image), uses_reserve=True).result()
    log.info("image remembered", image=image, before=before)


def with_journal(volume: Volume, use: Callable[[Journal], None]) -> None:
    """Open the journal for one read, before the worker uses it."""
    journal = Journal(volume.journal_path, room=volume.room)
    try:
        use(journal)
    finally:
        journal.close()


def load_engine(options: WorkerOptions) -> tuple[Engine, Sampler | None]:
    """Load the engine of `--engine`. It runs outside the event loop, because importing a framework takes seconds."""
    with explained(options.engine, options.model):
        with gc_pause():
            build = _engine_factory(options.engine)
        log.info("engine imported", engine=options.engine)
        engine, sampler = build(options)
    _check_length(options, engine.base_model())
    if sampler is not None and not options.sampling:
        raise ServerError(f"The engine {options.engine} brings a sampler in spite of --no-sampling.")
    return engine, sampler


def load_sampler(options: WorkerOptions) -> tuple[BaseModelInfo, Sampler]:
    """Load the sampler of `--engine`, in a thread."""
    with explained(options.engine, options.model):
        with gc_pause():
            build = _sampler_factory(options.engine)
        log.info("engine imported", engine=options.engine)
        base, sampler = build(options)
    _check_length(options, base)
    return base, sampler


@contextlib.contextmanager
def explained(engine: str, model: str) -> Iterator[None]:
    """Translate errors that occur while an engine is built.

    Raises OutOfMemory, and ModelCannotLoad for unexpected errors, for example of a forward. Errors that may not occur
    in another process are raised unchanged.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"There is no memory for {model}: {_in_one_line(error)}. "
                f"Give the worker more, or end what else uses it."
            ) from error
        if _may_pass(error):
            raise
        log.exception("the model cannot be loaded", engine=engine, model=model)
        raise ModelCannotLoad(
            f"The engine {engine} cannot load {model}: {_in_one_line(error)}. "
            f"Serve a model that it can run; the worker's log says where this one failed."
        ) from error


def _may_pass(error: Exception) -> bool:
    """Return whether a later start may succeed: after a network failure, or if only this process has lost a device."""
    return isinstance(error, (ConnectionError, TimeoutError)) or BROKEN_DEVICE in str(error)


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: ")


def _check_length(options: WorkerOptions, base: BaseModelInfo) -> None:
    limit, own = options.max_sequence_length, base.max_sequence_length
    if limit is not None and own != limit:
        raise ServerError(f"The engine {options.engine} takes {own} tokens whatever --max-sequence-length says.")


def _engine_factory(name: str) -> EngineFactory:
    if name == "peft":
        from tinsmith_trainer.worker.engine_factories import build_colocated

        return build_colocated
    if name in RANKS_ENGINES:
        from tinsmith_trainer.worker.engine_factories import build_on_ranks

        return build_on_ranks
    return cast(EngineFactory, _named(name))


def _sampler_factory(name: str) -> SamplerFactory:
    if name == "builtin":
        from tinsmith_trainer.worker.engine_factories import build_sampler

        return build_sampler
    if name in TOKEN_SERVERS:
        from tinsmith_trainer.worker.token_server_factory import build_token_server_sampler

        return build_token_server_sampler
    return cast(SamplerFactory, _named(name))


def _named(name: str) -> object:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _image_refusal(volume: Volume, before: str, image: str, to_replay: int) -> str:
    return (
        f"{to_replay} operation(s) in the journal in {volume.directory} ran on the image {before} and are in no "
        f"snapshot; {image} may compute other bits than those that clients have. Start {before} once more, let it "
        "stop cleanly, and change the image then."
    )


async def _serve(options: WorkerOptions, servicer: SamplingServicer, tls: TlsDirectory | None) -> grpc.aio.Server:
    return await serve(servicer, _address(options), tls)


def _address(options: WorkerOptions) -> str:
    return options.listen or f"{UNIX}{options.socket}"


def _name(options: WorkerOptions) -> WorkerName:
    return WorkerName(options.worker_id, options.model_name)
