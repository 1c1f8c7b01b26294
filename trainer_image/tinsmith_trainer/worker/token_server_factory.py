"""The samplers of `--engine vllm` and `--engine sglang`: a server process, and the sampler that uses the server."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog

from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders
from tinsmith_trainer.sampling.token_server.base import HOST, ServerCommand, ServerSettings, TokenServer
from tinsmith_trainer.sampling.token_server.http import LoopThread
from tinsmith_trainer.sampling.token_server.readiness import Readiness
from tinsmith_trainer.sampling.token_server.sampler import TokenServerSampler
from tinsmith_trainer.sampling.token_server.served_model import ServedModel, read_model
from tinsmith_trainer.sampling.token_server.server_process import ILL_SECONDS, ServerProcess, until_ill
from tinsmith_trainer.sampling.token_server.sglang import DETERMINISTIC, SglangServer, sglang_command
from tinsmith_trainer.sampling.token_server.vllm import VllmServer, vllm_command
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.torch_model.device import choose_device
from tinsmith_trainer.worker.termination_log import print_reason, write_termination_log

log = structlog.get_logger(__name__)

PORTS_TRIED = 1000
FIRST_PORT, LAST_PORT = 12_000, 29_999
"""The range of ports.

The range is below the ports that Linux uses for outgoing connections, and below the node ports of a cluster.
"""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of token server. `connect` is called on the sampler's event loop."""

    name: str
    command: Callable[[ServerSettings], ServerCommand]
    connect: Callable[[ServerSettings], TokenServer]


VLLM = ServerKind("vLLM", vllm_command, lambda settings: VllmServer(settings.socket_address))
SGLANG = ServerKind(
    "SGLang",
    sglang_command,
    lambda settings: SglangServer(settings.address, settings.key, deterministic=DETERMINISTIC in settings.extra),
)
KINDS = {"vllm": VLLM, "sglang": SGLANG}


def build_token_server_sampler(options: WorkerOptions) -> tuple[BaseModelInfo, Sampler]:
    """Build the sampler of the options' engine. Raises ModelNotFound, ModelDirectoryInvalid, ServerError."""
    _allow_many_connections()
    model = read_model(options.model, options.model_revision, options.max_sequence_length)
    settings = ServerSettings(
        model=model.directory,
        port=free_port(),
        gpus=options.gpus,
        max_sequence_length=model.info.max_sequence_length,
        max_rank=options.max_rank,
        max_loaded=options.adapter_slots,
        dtype=_dtype(options),
        private=private_folder(),
        extra=tuple(options.server_argument),
        environment=options.server_environment,
    )

    def end(reason: ServerError) -> NoReturn:
        """End the process, because the server has lost all state. A new process starts a new server."""
        log.error("a token server is lost", reason=str(reason))
        write_termination_log(options.termination_log, reason)
        print_reason(reason)
        shutil.rmtree(settings.private, ignore_errors=True)
        os._exit(1)

    sampler = start_token_server(
        KINDS[options.engine], settings, model, options.scratch, options.server_start_timeout_seconds, end
    )
    return model.info, sampler


def start_token_server(
    kind: ServerKind,
    settings: ServerSettings,
    model: ServedModel,
    scratch: Path | None,
    start_timeout_seconds: float,
    on_loss: Callable[[ServerError], None],
) -> TokenServerSampler:
    """Start the server. Return when the server is healthy.

    If the server ends by itself, a thread of the sampler calls `on_loss`. The private folder in the settings is removed
    at the end. Raises ServerError if the server does not start.
    """
    command = kind.command(settings)
    folders = AdapterFolders(scratch)
    thread = LoopThread("token-server-sampler")
    try:
        running = thread.call(_Running.start(kind, command, settings, start_timeout_seconds, on_loss))
    except BaseException:
        thread.stop()
        folders.remove_all()
        shutil.rmtree(settings.private, ignore_errors=True)
        raise
    sampler = TokenServerSampler(running.server, model, folders, thread, running.stop, readiness=running.readiness)
    sampler.check_probe()
    return sampler


def private_folder() -> Path:
    """Create a folder that only this user can enter. The folder's path is short enough for a socket."""
    return Path(tempfile.mkdtemp(prefix="tinsmith-server-"))


def free_port() -> int:
    """Return a free port of this machine. Raises ServerError.

    The server opens the port only a minute later. If the system chose the port, an outgoing connection could use the
    port during this minute.
    """
    for _ in range(PORTS_TRIED):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT + 1)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
    raise ServerError(f"No port of {HOST} can be had for the server: {PORTS_TRIED} were tried.")


def _dtype(options: WorkerOptions) -> str:
    """Return the dtype that training engines would use on this device.

    The result does not depend on the dtype of the checkpoint.
    """
    _, dtype = choose_device(options.device, options.dtype)
    return str(dtype).removeprefix("torch.")


class _Running:
    """A server process, the client of the server, and a monitor for both. Used by the sampler's thread."""

    def __init__(
        self,
        name: str,
        process: ServerProcess,
        server: TokenServer,
        private: Path,
        on_loss: Callable[[ServerError], None],
    ) -> None:
        self.server = server
        self.readiness = Readiness()
        self._name = name
        self._process = process
        self._private = private
        self._watch = asyncio.create_task(self._watch_over(on_loss))

    @classmethod
    async def start(
        cls,
        kind: ServerKind,
        command: ServerCommand,
        settings: ServerSettings,
        timeout_seconds: float,
        on_loss: Callable[[ServerError], None],
    ) -> _Running:
        server = kind.connect(settings)
        try:
            process = await ServerProcess.start(kind.name, command)
            try:
                await process.until_healthy(server.is_healthy, timeout_seconds)
            except BaseException:
                await process.stop()
                raise
        except BaseException:
            await server.close()
            raise
        return cls(kind.name, process, server, settings.private, on_loss)

    async def stop(self) -> None:
        self._watch.cancel()
        await self._process.stop()
        shutil.rmtree(self._private, ignore_errors=True)

    async def _watch_over(self, on_loss: Callable[[ServerError], None]) -> None:
        ended = asyncio.create_task(self._process.ended())
        unhealthy = asyncio.create_task(self._unhealthy())
        try:
            done, _ = await asyncio.wait({ended, unhealthy}, return_when=asyncio.FIRST_COMPLETED)
            on_loss(done.pop().result())
        finally:
            ended.cancel()
            unhealthy.cancel()

    async def _unhealthy(self) -> ServerError:
        note = partial(self.readiness.note_health, self._name, limit_seconds=ILL_SECONDS)
        await until_ill(self.server.is_healthy, note=note)
        return ServerError(
            f"The server has not been healthy for {ILL_SECONDS:g} s. Its last words: {self._process.last_words()}"
        )


def _allow_many_connections() -> None:
    """Raise the limit of open files.

    Each generation request has a separate connection, and the usual limit is too low.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
