"""Stand-ins that many tests share: one start of a server takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders
from tinsmith_trainer.sampling.token_server.base import ServerSettings, TokenServer
from tinsmith_trainer.sampling.token_server.loop_thread import LoopThread
from tinsmith_trainer.sampling.token_server.sampler import TokenServerSampler
from tinsmith_trainer.sampling.token_server.served_model import ServedModel, read_model
from tinsmith_trainer.sampling.token_server.sglang import DETERMINISTIC
from tinsmith_trainer.worker.token_server_factory import KINDS, start_token_server

from .look_alikes import StandInHand, environment_with_look_alikes, settings_for, variables

START_SECONDS = 120.0
EXTRA = {"vllm": (), "sglang": (DETERMINISTIC,)}


def unexpected(reason: ServerError) -> None:
    raise AssertionError(f"the server was lost: {reason}")


class SharedStandIns:
    """One server of each kind, started when a test first asks for it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._environment = environment_with_look_alikes(folder)
        self._model: ServedModel = read_model(str(model))
        self._settings: dict[str, ServerSettings] = {}
        self._owners = ExitStack()

    def sampler(self, engine: str) -> TokenServerSampler:
        """A new one on the shared server, which it leaves running when it is closed."""
        settings = self._started(engine)
        thread = LoopThread("attached-sampler")
        server = thread.call(_connected(KINDS[engine].connect, settings))
        return TokenServerSampler(server, self._model, AdapterFolders(None), thread, _nothing)

    def hand(self, engine: str) -> StandInHand:
        return StandInHand(self._started(engine).address)

    def close(self) -> None:
        self._owners.close()

    def _started(self, engine: str) -> ServerSettings:
        if engine not in self._settings:
            settings = settings_for(self._model.directory, self._model.info.max_sequence_length, *EXTRA[engine])
            with variables(self._environment):
                owner = start_token_server(KINDS[engine], settings, self._model, None, START_SECONDS, unexpected)
            self._owners.callback(owner.close)
            self._settings[engine] = settings
        return self._settings[engine]


async def _connected(connect: Callable[[ServerSettings], TokenServer], settings: ServerSettings) -> TokenServer:
    return connect(settings)


async def _nothing() -> None:
    """The server is somebody else's."""
