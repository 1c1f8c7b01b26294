"""Servers that many tests share: one start takes seconds, and of a real one a minute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders
from tinsmith_trainer.sampling.token_server.base import ServerSettings, TokenServer
from tinsmith_trainer.sampling.token_server.http import LoopThread
from tinsmith_trainer.sampling.token_server.sampler import TokenServerSampler
from tinsmith_trainer.sampling.token_server.served_model import ServedModel, read_model
from tinsmith_trainer.sampling.token_server.sglang import DETERMINISTIC
from tinsmith_trainer.worker.token_server_factory import KINDS, SGLANG, start_token_server

from .look_alikes import StandInHand, environment_with_look_alikes, settings_for, variables

START_SECONDS = 300.0
EXTRA = {"vllm": (), "sglang": (DETERMINISTIC,)}


class ServerHand(Protocol):
    """The actions of tests on a running server of either kind."""

    def held(self) -> AbstractContextManager[None]:
        """Stop all computing for the block."""

    def state(self) -> dict[str, Any]:
        """Return how many requests are `running`, and the names of the `adapters`."""


class SharedServer:
    """A server of the kind that `engine` names, started as a sampler starts its own.

    `environment` selects the program, `extra` are further arguments, and `hand_on` makes a hand for its address.
    """

    def __init__(
        self,
        engine: str,
        model: ServedModel,
        environment: Mapping[str, str],
        extra: tuple[str, ...],
        hand_on: Callable[[str], ServerHand],
    ) -> None:
        self._kind = KINDS[engine]
        self._model = model
        self._settings = settings_for(model.directory, model.info.max_sequence_length, *extra)
        with variables(environment):
            self._owner = start_token_server(self._kind, self._settings, model, None, START_SECONDS, unexpected)
        self.hand = hand_on(self.address)

    @property
    def address(self) -> str:
        return self._settings.address if self._kind is SGLANG else self._settings.socket_address

    def sampler(self) -> TokenServerSampler:
        """Return a new sampler, which leaves the server running when it is closed."""
        thread = LoopThread("attached-sampler")
        server = thread.call(_connected(self._kind.connect, self._settings))
        return TokenServerSampler(server, self._model, AdapterFolders(None), thread, _nothing)

    def close(self) -> None:
        self._owner.close()


class SharedStandIns:
    """One stand-in of each kind, started when a test first asks for it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._environment = environment_with_look_alikes(folder)
        self._model = read_model(str(model))
        self._servers: dict[str, SharedServer] = {}

    def server(self, engine: str) -> SharedServer:
        if engine not in self._servers:
            self._servers[engine] = SharedServer(engine, self._model, self._environment, EXTRA[engine], StandInHand)
        return self._servers[engine]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


def unexpected(reason: ServerError) -> None:
    raise AssertionError(f"the server was lost: {reason}")


async def _connected(connect: Callable[[ServerSettings], TokenServer], settings: ServerSettings) -> TokenServer:
    return connect(settings)


async def _nothing() -> None:
    """Do nothing: the server has another owner."""
