"""The sources of settings, and the files that a server needs before it starts.

Each source overrides the sources that follow in this list: flags, the environment (`TINSMITH_...`), the file of
`--config`, the variables of another server (`find_names`), and the defaults in `settings.py`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource

from tinsmith_server.errors import StartupError
from tinsmith_server.settings import Settings

PREFIX = "TINSMITH_"
SECRETS = frozenset({"api_key", "database_url"})
KEYS_ARE_OFF = (
    "keys are off (setting require_keys): every program on this machine may do everything as tenant default, with "
    "any key or none"
)
_FLAGS = {"models": "--model"}


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Merge flags (None if not given), environment, file and defaults.

    Raises StartupError with the setting, its source, and the allowed values.
    """
    from_others = find_names(os.environ)
    from_file = read_config_file(config) if config is not None else {}
    from_environment = EnvSettingsSource(Settings)()
    from_flags = {name: value for name, value in flags.items() if value is not None}
    sources = _sources(from_others, from_file, config, from_environment, from_flags)
    try:
        return Settings(**{**from_others.settings, **from_file, **from_environment, **from_flags})
    except ValidationError as error:
        raise StartupError("; ".join(_sentence(problem, sources) for problem in error.errors())) from error


def notes_on(settings: Settings, flags: Mapping[str, Any], config: Path | None = None) -> list[str]:
    """Return notes about these settings for the person who starts a server."""
    from_file = read_config_file(config) if config is not None else {}
    from_flags = {name: value for name, value in flags.items() if value is not None}
    from_others = find_names(os.environ)
    sources = _sources(from_others, from_file, config, EnvSettingsSource(Settings)(), from_flags)
    notes = [unknown_variables(), from_others.note(sources), None if settings.require_keys else KEYS_ARE_OFF]
    return [note for note in notes if note is not None]


def _sources(
    from_others: Found,
    from_file: Mapping[str, Any],
    config: Path | None,
    from_environment: Mapping[str, Any],
    from_flags: Mapping[str, Any],
) -> dict[str, str]:
    """Return, for each setting, the source of its value."""
    return {
        **from_others.names,
        **{name: f"{name} in {config}" for name in from_file},
        **{name: variable_of(name) for name in from_environment},
        **{name: _FLAGS.get(name, f"--{name.replace('_', '-')}") for name in from_flags},
    }


def unknown_variables() -> str | None:
    """Return a sentence about unknown `TINSMITH_...` variables and similar valid names, or None if all are known."""
    known = sorted(variable_of(name) for name in Settings.model_fields)
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return f"not a setting: {', '.join(_with_nearest(name, known) for name in unknown)}" if unknown else None


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping of setting names in a YAML or JSON file.

    Raises StartupError if the file does not contain a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartupError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the configuration file {path} is neither YAML nor JSON: {_place(error)}") from error
    if not isinstance(content, dict | None):
        raise StartupError(f"the configuration file {path} must contain a mapping of setting names to values")
    known = sorted(Settings.model_fields)
    unknown = [_with_nearest(str(key), known) for key in content or {} if key not in known]
    if unknown:
        raise StartupError(
            f"unknown setting {', '.join(sorted(unknown))} in {path}; the settings are: {', '.join(known)}"
        )
    return content or {}


def describe_settings(settings: Settings) -> str:
    """Return the current settings as YAML that `--config` can read.

    In this YAML, derived and secret values are comments.
    """
    values = settings.model_dump(mode="json")
    lines = [_line(name, value, settings) for name, value in values.items()]
    return "".join(lines)


def _line(name: str, value: object, settings: Settings) -> str:
    derived = {"database_url": settings.store_url, "checkpoint_root": settings.checkpoints_url}
    if name == "api_key" and value is not None:
        return f"# {name}: set, not shown; {variable_of(name)} can set it\n"
    if name in derived and value is None:
        return f"# {name}: {derived[name]}  (derived from data)\n"
    if name in derived and (masked := _without_password(str(value))) != value:
        return f"# {name}: {masked}  (set; the password is not shown; {variable_of(name)} can set it)\n"
    return yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=10**6)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", url)


def _with_nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name} (did you mean {near[0]}?)" if near else name


def _place(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Return the position of the error in one line.

    PyYAML's own message spreads a quote of the file over five lines.
    """
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _sentence(problem: ErrorDetails, sources: Mapping[str, str]) -> str:
    what = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        # The error concerns several settings, which its message names.
        return what
    name = str(problem["loc"][0])
    value = "what was given" if name in SECRETS else repr(_plain(problem["input"]))
    return f"{sources.get(name, name)}: {value} is invalid: {what[:1].lower()}{what[1:]}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


PRIVATE_UMASK = 0o077
PRIVATE_DIRECTORY = 0o700


def keep_files_private() -> None:
    """Make new files of this process and its workers readable only for the user of this process.

    Journals and checkpoints hold the training data of all tenants. Other users of this machine must not read this data.
    """
    os.umask(PRIVATE_UMASK)


def make_data_directory(data: Path) -> None:
    """Create the directory unless it exists. Raises StartupError if the directory cannot be created or written."""
    try:
        data.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        # Permissions do not show that a file system is read-only, especially not to root.
        with tempfile.TemporaryFile(dir=data):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StartupError(
            f"the data directory {data} cannot be written: {reason}; set --data to a writable directory"
        ) from error


SETTING_OF_NAME: Mapping[str, str] = {
    "TRAINING_HOST": "host",
    "TRAINING_PORT": "port",
    "SUPPORTED_MODELS": "models",
    "TINKER_API_KEY": "api_key",
    "METADATA_DIR": "data",
    "KGATEWAY_LOG_LEVEL": "log_level",
}
UNAMBIGUOUS_NAMES = ("TRAINING_HOST", "TRAINING_PORT", "SUPPORTED_MODELS")
WITHOUT_EFFECT: Mapping[str, str] = {
    "FUTURES_DB_NAME": "one database contains everything, setting database_url",
    "KGATEWAY_ACCESS_LOG": "requests are in the log at level debug",
    "RAY_ADDRESS": "workers are processes, or TrainingSessions in a cluster",
    "RAY_NAMESPACE": "likewise",
    "RAY_DASHBOARD_URL": "likewise",
    "ALLOW_PARTIAL_BATCHES": "a batch may have any number of datums",
    "TINKERCLOUD_BACKEND": "setting engine selects the engine",
}
_LEVELS = {"warn": "warning", "critical": "error"}


@dataclass(frozen=True, slots=True)
class Found:
    """The settings from another server's variables, the variables that are used, and the variables without effect."""

    settings: Mapping[str, Any]
    names: Mapping[str, str]
    unread: Mapping[str, str]

    def note(self, in_force: Mapping[str, str]) -> str | None:
        """Return a sentence for the person who starts the server, or None.

        `in_force` maps each setting to the source of its value.
        """
        if not self.names:
            return None
        read = ", ".join(
            f"{name} as {setting}"
            + ("" if in_force.get(setting) == name else f" (but {in_force[setting]} has precedence)")
            for setting, name in self.names.items()
        )
        unread = "".join(f"; {name} has no effect: {why}" for name, why in self.unread.items())
        return f"variables of the kgateway Training API are used: {read}{unread}"


def find_names(environment: Mapping[str, str]) -> Found:
    """Return the settings from another server's variables.

    Raises StartupError for a list of models in an unknown form.
    """
    if not any(environment.get(name) for name in UNAMBIGUOUS_NAMES):
        return Found({}, {}, {})
    names = {setting: name for name, setting in SETTING_OF_NAME.items() if environment.get(name)}
    settings = {setting: _value(setting, environment[name]) for setting, name in names.items()}
    return Found(settings, names, {name: why for name, why in WITHOUT_EFFECT.items() if environment.get(name)})


def _value(setting: str, text: str) -> Any:
    match setting:
        case "models":
            return _models(text)
        case "log_level":
            return _LEVELS.get(text.lower(), text.lower())
    return text


def _models(text: str) -> tuple[str, ...]:
    """Return the names in a JSON list of objects with a `model_name`. Context lengths in the list are ignored."""
    try:
        return tuple(str(model["model_name"]) for model in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise StartupError(
            "SUPPORTED_MODELS must be a JSON list of objects with a model_name, such as "
            '[{"model_name": "Qwen/Qwen3-0.6B"}]'
        ) from error
