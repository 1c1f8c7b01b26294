"""`python -m tinsmith_trainer`: one worker process, from flags to a served socket."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import structlog

from tinsmith_trainer.checkpoints import CheckpointRoot
from tinsmith_trainer.errors import ServerError, TrainerError
from tinsmith_trainer.logs import configure_logs
from tinsmith_trainer.options import EngineFactory, WorkerOptions, parse_options
from tinsmith_trainer.samples import Samples
from tinsmith_trainer.scheduler import SnapshotPolicy
from tinsmith_trainer.server import SamplerServicer, WorkerServicer, serve
from tinsmith_trainer.service import WorkerParts, WorkerService
from tinsmith_trainer.volume import Volume

log = structlog.get_logger(__name__)

EXIT_CANNOT_START = 3
"""The model directory or the journal is at fault; the last line on standard error says what."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    configure_logs(options.log_format, options.log_level)
    if options.parent_fd is not None:
        _die_with_parent(options.parent_fd)
    try:
        return asyncio.run(_run(options))
    except TrainerError as error:
        print(f"tinsmith-trainer: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START


async def _run(options: WorkerOptions) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    if options.volume is None:
        await _run_sampler(options, stopping)
    else:
        await _run_worker(options, options.volume, stopping)
    return 0


async def _run_worker(options: WorkerOptions, volume_path: Path, stopping: asyncio.Event) -> None:
    volume = Volume(volume_path, reserved_bytes=options.reserved_bytes)
    await asyncio.to_thread(volume.wait_for_lock)
    engine, sampler = await asyncio.to_thread(_engine_factory(options.engine), options)
    parts = WorkerParts(
        engine=engine,
        sampler=sampler,
        checkpoints=CheckpointRoot(options.checkpoint_root),
        volume=volume,
        policy=SnapshotPolicy(options.snapshot_replay_seconds, options.snapshot_cost_factor),
    )
    service = WorkerService(parts)
    clock = asyncio.create_task(service.run_clock())
    server = await serve(WorkerServicer(service), f"unix:{options.socket}")
    log.info("worker ready", instance_id=service.instance_id, model=options.model, socket=options.socket)
    await stopping.wait()
    clock.cancel()
    await service.drain()
    await server.stop(grace=1.0)


async def _run_sampler(options: WorkerOptions, stopping: asyncio.Event) -> None:
    engine, sampler = await asyncio.to_thread(_engine_factory(options.engine), options)
    if sampler is None:
        raise ServerError(f"The engine {options.engine} brings no sampler.")
    base = engine.base_model()
    samples = Samples(sampler, CheckpointRoot(options.checkpoint_root), base)
    server = await serve(SamplerServicer(sampler, samples, base), f"unix:{options.socket}")
    log.info("sampler ready", model=options.model, socket=options.socket)
    await stopping.wait()
    await asyncio.to_thread(sampler.close)
    await server.stop(grace=1.0)


def _engine_factory(name: str) -> EngineFactory:
    if name == "peft":
        from tinsmith_trainer.colocated import build_colocated

        return build_colocated
    module, _, attribute = name.partition(":")
    return cast(EngineFactory, getattr(importlib.import_module(module), attribute))


def _die_with_parent(descriptor: int) -> None:
    """The server holds the other end and never writes: end of file means that it is gone, however it died."""

    def watch() -> None:
        os.read(descriptor, 1)
        # Nothing to save: what was acknowledged is in the journal.
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
