"""A program of `make recipes`: what is run, and what is asked of its run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook_sources import sources_directory
from package_environment import ART, COOKBOOK_EXTRAS, PLAYGROUND, RLCLI, THIRD_PARTY, VERIFIERS, environment_directory
from support.recipes.checks import Check, problems
from support.recipes.names import BRIEF, MODELS
from support.recipes.running import Run, Runner

SCRIPTS = Path(__file__).with_name("scripts")
WITH_EXTRAS = (str(SCRIPTS / "with_packages.py"), "{extras}")
"""The arguments before Python's own, where it needs packages of the cookbook's extras."""
OF_LAST_CHECKPOINT = ("state_path", "sampler_path")


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    command: Sequence[str]
    """Python's arguments.

    `{folder}` is one of its own, `{url}` the server's, `{state_path}` and `{sampler_path}` are those of the last
    checkpoint of the program that it comes after.
    """
    checks: Sequence[Check]
    typed: str = ""
    every_run: bool = False
    """Whether `make test` runs it, too."""
    after: str | None = None
    defaults: Sequence[str] = ()
    """Models that it asks for without being told."""

    @property
    def models(self) -> set[str]:
        """Base models that the server must have."""
        named = {name for name in MODELS for word in self.command if word.rpartition("=")[2] == name}
        return named | {*self.defaults}

    def run(self, runner: Runner) -> Run:
        """Run the program.

        Raises AssertionError with all failed checks, or with the program's last words where it fails.
        """
        run = runner.run(self.name, self._command(runner), self.typed)
        found = problems(run, self.checks)
        assert not found, "\n".join([self.name, *found])
        return run

    def _command(self, runner: Runner) -> list[str]:
        places = {"folder": str(runner.folder(self.name)), "third_party": str(environment_directory(THIRD_PARTY))}
        places |= {"url": runner.server.url, "playground": str(environment_directory(PLAYGROUND))}
        places |= {"art": str(environment_directory(ART)), "verifiers": str(environment_directory(VERIFIERS))}
        places |= {"rlcli": str(environment_directory(RLCLI))}
        places |= {"sources": str(sources_directory()), "extras": str(environment_directory(COOKBOOK_EXTRAS))}
        if self.after is not None:
            last = _last_checkpoint(runner.folder(self.after))
            places |= {kind: last[kind] for kind in OF_LAST_CHECKPOINT if kind in last}
        return [_filled(word, places) for word in self.command]


def recipe(
    module: str,
    checks: Sequence[Check],
    *,
    name: str = "",
    every_run: bool = False,
    after: str | None = None,
    defaults: Sequence[str] = (),
    log: str = "log_path={folder}/log",
    **arguments: object,
) -> Program:
    """`python -m tinker_cookbook.<module> name=value …`, with a log path of its own."""
    flags = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in arguments.items()]
    command = ("-m", f"tinker_cookbook.{module}", *flags, *([log] if log else []))
    name = name or module.removeprefix("recipes.")
    return Program(name, command, checks, every_run=every_run, after=after, defaults=defaults)


def script(
    name: str, checks: Sequence[Check], *arguments: str, every_run: bool = False, after: str | None = None
) -> Program:
    """Return a short program of ours that uses a library of the cookbook, and prints its result as a line of JSON."""
    return Program(name, (str(SCRIPTS / f"{name}.py"), *arguments), checks, every_run=every_run, after=after)


def installed(name: str, checks: Sequence[Check], program: str, *arguments: str, folder: str = "{folder}") -> Program:
    """Return a program of the environment that uses OpenAI's client."""
    command = (str(SCRIPTS / "execute.py"), folder, f"{{third_party}}/bin/{program}", *arguments)
    return Program(name, command, checks, defaults=[BRIEF])


def own_tests(
    path: str, models: Sequence[str], checks: Sequence[Check], *options: str, with_extras: bool = False
) -> Program:
    """Return tests of the cookbook itself, from its source distribution.

    Those of recipes run them with their defaults. `with_extras`: they need an extra of the cookbook that this
    environment has not.
    """
    python = WITH_EXTRAS if with_extras else ()
    configured = ("-c", "{sources}/pyproject.toml", "-p", "no:cacheprovider", "-q", *options)
    return Program(path, (*python, "-m", "pytest", f"{{sources}}/{path}", *configured), checks, defaults=models)


def models_for(programs: Iterable[Program]) -> set[str]:
    return {model for program in programs for model in program.models}


def _filled(word: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _last_checkpoint(folder: Path) -> dict[str, str]:
    [path] = folder.rglob("checkpoints.jsonl")
    last: dict[str, str] = json.loads(path.read_text().splitlines()[-1])
    return last
