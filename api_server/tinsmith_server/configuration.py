"""Where settings come from, and what is in force.

Flags win over the environment (`TINSMITH_...`), which wins over the file of `--config`, which
wins over the names of another server (`kgateway_names.py`), and those over the defaults in `settings.py`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from tinsmith_server.errors import StartupError
from tinsmith_server.kgateway_names import Found, find_names
from tinsmith_server.settings import Settings

PREFIX = "TINSMITH_"
SECRETS = frozenset({"api_key", "database_url"})
KEYS_ARE_OFF = (
    "keys are off (setting require_keys): whoever is on this machine may do everything as tenant default, with any key "
    "or none"
)
_FLAGS = {"models": "--model"}


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Merges flags (None means not given), environment, file and defaults.

    Raises StartupError naming the setting, where it was set, and what is allowed.
    """
    from_others = find_names(os.environ)
    from_file = read_config_file(config) if config is not None else {}
    from_environment = EnvSettingsSource(Settings)()
    given = {name: value for name, value in flags.items() if value is not None}
    sources = _sources(from_others, from_file, config, from_environment, given)
    try:
        return Settings(**{**from_others.settings, **from_file, **from_environment, **given})
    except ValidationError as error:
        raise StartupError("; ".join(_sentence(problem, sources) for problem in error.errors())) from error


def notes_on(settings: Settings, flags: Mapping[str, Any], config: Path | None = None) -> list[str]:
    """What whoever starts a server with these settings should read."""
    from_file = read_config_file(config) if config is not None else {}
    given = {name: value for name, value in flags.items() if value is not None}
    from_others = find_names(os.environ)
    sources = _sources(from_others, from_file, config, EnvSettingsSource(Settings)(), given)
    notes = [unknown_variables(), from_others.note(sources), None if settings.require_keys else KEYS_ARE_OFF]
    return [note for note in notes if note is not None]


def _sources(
    from_others: Found,
    from_file: Mapping[str, Any],
    config: Path | None,
    from_environment: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, str]:
    """Where each setting was said last."""
    return {
        **from_others.names,
        **{name: f"{name} in {config}" for name in from_file},
        **{name: variable_of(name) for name in from_environment},
        **{name: _FLAGS.get(name, f"--{name.replace('_', '-')}") for name in given},
    }


def unknown_variables() -> str | None:
    """One sentence about `TINSMITH_...` variables that set nothing, with what may have been meant."""
    known = sorted(variable_of(name) for name in Settings.model_fields)
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return f"not a setting: {', '.join(_with_nearest(name, known) for name in unknown)}" if unknown else None


def read_config_file(path: Path) -> dict[str, Any]:
    """A mapping of setting names, as YAML or JSON. Raises StartupError for anything else in it."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartupError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the configuration file {path} is neither YAML nor JSON: {_place(error)}") from error
    if not isinstance(content, dict | None):
        raise StartupError(f"the configuration file {path} must hold a mapping of setting names to values")
    known = sorted(Settings.model_fields)
    unknown = [_with_nearest(str(key), known) for key in content or {} if key not in known]
    if unknown:
        raise StartupError(f"unknown setting {', '.join(sorted(unknown))} in {path}; there are: {', '.join(known)}")
    return content or {}


def describe_settings(settings: Settings) -> str:
    """What is in force, as YAML that `--config` reads. What is derived or secret stands in comments."""
    values = settings.model_dump(mode="json")
    lines = [_line(name, value, settings) for name, value in values.items()]
    return "".join(lines)


def _line(name: str, value: object, settings: Settings) -> str:
    derived = {"database_url": settings.store_url, "checkpoint_root": settings.checkpoints_url}
    if name == "api_key" and value is not None:
        return f"# {name}: set, and not shown; {variable_of(name)} can give it\n"
    if name in derived and value is None:
        return f"# {name}: {derived[name]}  (follows from data)\n"
    if name in derived and (masked := _without_password(str(value))) != value:
        return f"# {name}: {masked}  (set; the password is not shown; {variable_of(name)} can give it)\n"
    return yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=10**6)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", url)


def _with_nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name} (did you mean {near[0]}?)" if near else name


def _place(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """In one line; PyYAML's own text quotes the file over five."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _sentence(problem: ErrorDetails, sources: Mapping[str, str]) -> str:
    what = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        # About several settings at once; the message names them.
        return what
    name = str(problem["loc"][0])
    value = "what was given" if name in SECRETS else repr(_plain(problem["input"]))
    return f"{sources.get(name, name)}: {value} does not fit: {what[:1].lower()}{what[1:]}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
