"""The command lines of workers and samplers on this machine, and the check of their flags."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.local.devices import ONLY_PLACE, Place
from tinsmith_server.fleet.local.model_sources import ModelDirectory
from tinsmith_server.fleet.local.process import SENTENCE_PREFIX, worker_environment
from tinsmith_server.logs import chosen_format
from tinsmith_server.settings import Settings

PROGRAM = (sys.executable, "-m", "tinsmith_trainer")
# Without flags of the user, an engine needs no check.
DEFAULT_ENGINE = "peft"
BUILTIN = "builtin"
# The number of final characters of a worker's id in a socket's name. They distinguish the workers.
DIGEST_CHARACTERS = 10
# The worker's flags that define the base model. They also apply to its sampler, which would otherwise sample another
# model.
OF_BOTH = frozenset({"dtype", "max-sequence-length"})


class WorkerCommand:
    """The command line of one worker."""

    def __init__(self, settings: Settings, directory: ModelDirectory, place: Place = ONLY_PLACE) -> None:
        self._settings = settings
        self._directory = directory
        self._worker_id = place.worker_id(directory.served.weights)
        self._device = place.flags if settings.engine == DEFAULT_ENGINE else ()

    @property
    def volume(self) -> Path:
        return self._settings.data.absolute() / "workers" / self._worker_id

    def __call__(self, socket: Path, parent_fd: int) -> list[str]:
        self.volume.mkdir(parents=True, exist_ok=True)
        return [*PROGRAM, *self.own_flags(socket, parent_fd), *self._settings.engine_flags]

    def own_flags(self, socket: Path, parent_fd: int) -> list[str]:
        """Return the flags that the server sets itself, without the engine's flags."""
        settings = self._settings
        places = () if settings.model_places is None else ("--model-places", str(settings.model_places))
        return [
            *_flags_of_both(settings, self._directory, socket, parent_fd),
            *("--volume", str(self.volume)),
            *("--engine", settings.engine),
            *self._device,
            *places,
            *(() if settings.quantization is None else ("--quantization", settings.quantization)),
            *(() if settings.numerics is None else ("--numerics", settings.numerics)),
            "--map-stable-reinforce" if settings.map_stable_reinforce else "--no-map-stable-reinforce",
            "--deterministic-sampling" if settings.deterministic_sampling else "--no-deterministic-sampling",
            *(() if settings.sampler == BUILTIN else ("--no-sampling", *_saves_socket(self._worker_id, socket))),
        ]


class SamplerCommand:
    """The command line of a sampler process next to a worker."""

    def __init__(self, settings: Settings, directory: ModelDirectory, place: Place = ONLY_PLACE) -> None:
        self._settings = settings
        self._directory = directory
        self._worker_id = place.worker_id(directory.served.weights)

    def __call__(self, socket: Path, parent_fd: int) -> list[str]:
        return [*PROGRAM, *self.own_flags(socket, parent_fd), *self._settings.sampler_flags]

    def own_flags(self, socket: Path, parent_fd: int) -> list[str]:
        """Return the flags that the server sets itself, without `sampler_flags`."""
        settings = self._settings
        scratch = settings.data.absolute() / "samplers" / self._worker_id
        place = settings.sampler_environment
        return [
            *("--role", "sampler"),
            *_flags_of_both(settings, self._directory, socket, parent_fd),
            *("--engine", settings.sampler),
            *("--scratch", str(scratch)),
            *_saves_socket(self._worker_id, socket),
            *(() if place is None else ("--server-environment", str(place.absolute()))),
            *_of_the_base_model(settings),
        ]


def check_commands(settings: Settings, directory: ModelDirectory) -> None:
    """Raise StartupError for a missing sampler, and for flags that the worker refuses or that the server sets."""
    socket, parent_fd = Path("socket"), 0
    if (settings.engine, settings.engine_flags) != (DEFAULT_ENGINE, ()):
        worker = WorkerCommand(settings, directory).own_flags(socket, parent_fd)
        _check_not_set_twice("engine_flags", settings.engine_flags, worker)
        check_flags("engine, engine_flags", [*worker, *settings.engine_flags])
    if settings.sampler != BUILTIN:
        sampler = SamplerCommand(settings, directory).own_flags(socket, parent_fd)
        _check_not_set_twice("sampler_flags", settings.sampler_flags, sampler)
        check_flags("sampler, sampler_environment, sampler_flags", [*sampler, *settings.sampler_flags])


def check_flags(setting_names: str, flags: Sequence[str]) -> None:
    """Raise StartupError for invalid flags.

    `setting_names` are the settings that contain the flags.
    """
    checked = subprocess.run(
        [sys.executable, "-m", "tinsmith_trainer.options", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=worker_environment(),
        check=False,
    )
    if checked.returncode:
        raise StartupError(f"{setting_names}: {_sentence(checked.stderr)}")


def _flags_of_both(settings: Settings, directory: ModelDirectory, socket: Path, parent_fd: int) -> list[str]:
    return [
        *("--model", str(directory.path)),
        *("--socket", str(socket)),
        *("--checkpoint-root", settings.checkpoints_url),
        *("--parent-fd", str(parent_fd)),
        *("--adapter-slots", str(settings.adapter_slots)),
        *("--max-rank", str(settings.max_rank)),
        *("--log-format", chosen_format(settings.log_format)),
        *("--log-level", settings.log_level),
    ]


def _saves_socket(worker_id: str, socket: Path) -> list[str]:
    """Return the flag with the socket on which a worker streams saves.

    The socket's path is always the same for one worker, and short enough for a Unix socket.
    """
    return ["--saves-socket", str(socket.with_name(f"{worker_id[-DIGEST_CHARACTERS:]}.saves"))]


def _of_the_base_model(settings: Settings) -> list[str]:
    """Return the engine's flags that the sampler needs, too, except the flags that the sampler sets itself."""
    names = OF_BOTH - set(_names(settings.sampler_flags))
    found: list[str] = []
    for place, word in enumerate(settings.engine_flags):
        name, equals, _ = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in names:
            found += [word] if equals else settings.engine_flags[place : place + 2]
    return found


def _check_not_set_twice(setting: str, more: Sequence[str], others: Sequence[str]) -> None:
    """Raise StartupError for flags that are set twice, because the process would silently use one of the values."""
    if twice := [name for name in _names(more) if name in _names(others)]:
        raise StartupError(f"{setting}: --{twice[0]} is set by the server itself; remove it")


def _names(flags: Sequence[str]) -> list[str]:
    """Return the names of flags. The name of `--flag value`, `--flag=value` and `--no-flag` is `flag`."""
    words = [word.removeprefix("--") for word in flags if word.startswith("--")]
    return [word.partition("=")[0].removeprefix("no-") for word in words]


def _sentence(stderr: str) -> str:
    """Return the parser's message. If the worker's package is not installed, return the last line of Python's error."""
    last = (stderr.strip().splitlines() or ["the worker's program cannot run, and printed no reason"])[-1]
    return last.removeprefix(SENTENCE_PREFIX)
