"""The names by which the kgateway Training API is configured, so that an environment made for it starts this server.

They are read where one of them that is nobody else's is there: `TINKER_API_KEY` alone is what an SDK sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_server.errors import StartupError

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
    "FUTURES_DB_NAME": "one database holds everything, setting database_url",
    "KGATEWAY_ACCESS_LOG": "requests are in the log at level debug",
    "RAY_ADDRESS": "workers are processes, or TrainingSessions in a cluster",
    "RAY_NAMESPACE": "likewise",
    "RAY_DASHBOARD_URL": "likewise",
    "ALLOW_PARTIAL_BATCHES": "a batch may have any number of datums",
    "TINKERCLOUD_BACKEND": "setting engine says what trains",
}
_LEVELS = {"warn": "warning", "critical": "error"}


@dataclass(frozen=True, slots=True)
class Found:
    """What the environment says by these names: settings, where each was read, and what says nothing here."""

    settings: Mapping[str, Any]
    names: Mapping[str, str]
    unread: Mapping[str, str]

    def note(self, in_force: Mapping[str, str]) -> str | None:
        """For whoever starts the server. `in_force`: where settings come from in the end; None: there is nothing."""
        if not self.names:
            return None
        read = ", ".join(
            f"{name} as {setting}"
            + ("" if in_force.get(setting) == name else f" (but {in_force[setting]} goes before)")
            for setting, name in self.names.items()
        )
        unread = "".join(f"; {name} has no effect: {why}" for name, why in self.unread.items())
        return f"names of the kgateway Training API are read: {read}{unread}"


def find_names(environment: Mapping[str, str]) -> Found:
    """Raises StartupError for models that are in no form that there is."""
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
    """Of a JSON list of objects with a `model_name`: how long contexts are, each model's files say."""
    try:
        return tuple(str(model["model_name"]) for model in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise StartupError(
            "SUPPORTED_MODELS must be a JSON list of objects with a model_name, such as "
            '[{"model_name": "Qwen/Qwen3-0.6B"}]'
        ) from error
