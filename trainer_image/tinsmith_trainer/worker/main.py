"""A worker process, from the arguments to the exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from tinsmith_rpc import tracing

from tinsmith_trainer.errors import OutOfMemory, ServerError, TrainerError
from tinsmith_trainer.options import EXIT_USAGE, UsageError, WorkerOptions, parse_options, termination_log_of
from tinsmith_trainer.process.exit import end_without_blame
from tinsmith_trainer.process.output import configure_logs
from tinsmith_trainer.worker.startup import Running, start
from tinsmith_trainer.worker.termination_log import print_reason, write_termination_log

log = structlog.get_logger(__name__)

EXIT_CANNOT_START = 3
"""The exit status if the model, the volume, the image or the certificates prevent the start.

The last line on standard error names the cause.
"""
EXIT_MAY_PASS = 1
"""The exit status of a failed start, if a later start may succeed."""


def run(arguments: Sequence[str]) -> int:
    """Run the process and return the exit status."""
    try:
        options = parse_options(arguments)
    except UsageError as error:
        write_termination_log(termination_log_of(arguments), error)
        print_reason(error)
        return EXIT_USAGE
    configure_logs(options.log_format, options.log_level)
    try:
        tracing.start("tinsmith-worker")
    except tracing.TracingUnavailable as error:
        # The images of vLLM, SGLang, NeMo RL and Miles have OpenTelemetry only if their base has it.
        log.warning("no traces", reason=str(error))
    if options.parent_fd is not None:
        _die_with_parent(options.parent_fd)
    try:
        return _run_with(options)
    finally:
        tracing.stop()


def _run_with(options: WorkerOptions) -> int:
    try:
        asyncio.run(_live(options))
    except TrainerError as error:
        write_termination_log(options.termination_log, error)
        print_reason(error)
        return EXIT_MAY_PASS if isinstance(error, OutOfMemory) else EXIT_CANNOT_START
    except Exception as error:
        write_termination_log(options.termination_log, error)
        print_reason(error)
        raise
    return 0


async def _live(options: WorkerOptions) -> None:
    """Serve until a signal. Raises TrainerError if the process cannot start."""
    stopping = _stop_on_signals()
    health = Health()
    try:
        if options.health_address is not None:
            await health.serve(options.health_address)
        running = await _start_unless_stopped(options, stopping)
        await health.set_ready(True)
        await stopping.wait()
        await health.set_ready(False)
        await running.stop()
    finally:
        await health.close()


def _stop_on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def _start_unless_stopped(options: WorkerOptions, stopping: asyncio.Event) -> Running:
    starting = asyncio.create_task(start(options))
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        _leave_the_start()
    stopped.cancel()
    return starting.result()


def _leave_the_start() -> NoReturn:
    """Exit at once. A thread that loads a model cannot be stopped. Acknowledged operations are safe in the journal."""
    log.info("stopped before it was ready")
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent(descriptor: int) -> None:
    """End this process when the parent server ends.

    The parent server holds the other end of the pipe, and never writes to the pipe. End of file on the pipe means that
    the parent server has ended.
    """

    def watch() -> None:
        os.read(descriptor, 1)
        # There is nothing to save, because acknowledged operations are in the journal.
        end_without_blame()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


LIVENESS = "liveness"
READINESS = ("readiness", "")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """gRPC's health service, for the probes of this process."""

    def __init__(self) -> None:
        self._servicer = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def serve(self, address: str) -> int:
        """Start the health service as alive and not ready. Return the port. Raises ServerError if the port is taken."""
        await self._servicer.set(LIVENESS, SERVING)
        await self.set_ready(False)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ServerError(f"Health cannot be served on {address}: {error}. Choose a free address.") from error
        await self._server.start()
        return port

    async def set_ready(self, ready: bool) -> None:
        for service in READINESS:
            await self._servicer.set(service, SERVING if ready else NOT_SERVING)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0)
