"""The engine's flags at the server's start: its workers start later, with the first program that needs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.process import SENTENCE_PREFIX, worker_environment


def check_engine_flags(engine_flags: Sequence[str], others: Sequence[str]) -> None:
    """`others` is what else a worker is started with.

    Raises StartupError with the sentence of the worker's own parser, and for a flag that the server gives by itself.
    """
    _check_not_given_twice(engine_flags, others)
    checked = subprocess.run(
        [sys.executable, "-m", "tinsmith_trainer.flag_check", *others, *engine_flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=worker_environment(),
        check=False,
    )
    if checked.returncode:
        raise StartupError(f"engine, engine_flags: {_sentence(checked.stderr)}")


def _check_not_given_twice(engine_flags: Sequence[str], others: Sequence[str]) -> None:
    """The worker would take one of the two, and nobody would hear of the other."""
    if twice := [name for name in _names(engine_flags) if name in _names(others)]:
        raise StartupError(f"engine_flags: --{twice[0]} is given to the worker by the server itself; remove it")


def _names(flags: Sequence[str]) -> list[str]:
    """`--flag value`, `--flag=value` and `--no-flag` are all of `flag`."""
    words = [word.removeprefix("--") for word in flags if word.startswith("--")]
    return [word.partition("=")[0].removeprefix("no-") for word in words]


def _sentence(stderr: str) -> str:
    """The parser's, or the last words of a Python that has no worker."""
    last = (stderr.strip().splitlines() or ["the worker's program does not run, and says nothing"])[-1]
    return last.removeprefix(SENTENCE_PREFIX)
