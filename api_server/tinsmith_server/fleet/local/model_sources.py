"""The model directories that `--model NAME[=PATH]` names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.base import ServedModel
from tinsmith_server.fleet.names import context_in, is_model_name

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A base model on this machine, and its name for clients. Several names may share a worker."""

    served: ServedModel
    path: Path


def locate_models(specs: Sequence[str]) -> list[ModelDirectory]:
    """Return the directory of every NAME[=PATH]. If the value is the name of a hub repository, the model is downloaded.

    Raises StartupError with the name of the missing file.
    """
    directories = [_locate(spec) for spec in specs]
    names = [directory.served.name for directory in directories]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise StartupError(f"the model name {twice[0]!r} is given twice; each name must have one directory")
    return directories


def _locate(spec: str) -> ModelDirectory:
    name, _, location = spec.partition("=")
    if not is_model_name(name):
        raise StartupError(
            f"--model {spec}: a model name must not be empty or contain ':', ';' or white space, because "
            "clients split names there; only a context length may follow it, as in NAME:peft:262144"
        )
    path = Path(location or name).expanduser()
    if not path.is_dir():
        path = _download(location or name, spec)
    config = _read_config(path.resolve(), spec)
    served = _served(name, path.resolve(), config)
    tokens = context_in(name)
    if tokens is not None and served.max_context_length is not None and served.max_context_length < tokens:
        raise StartupError(
            f"--model {spec}: the model has a context of {served.max_context_length} tokens, and its name promises "
            f"{tokens}; use a shorter context in the name"
        )
    return ModelDirectory(served, path.resolve())


def _read_config(path: Path, spec: str) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise StartupError(f"--model {spec}: cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"--model {spec}: {file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"--model {spec}: {file} is not a model configuration")
    return config


def _served(name: str, path: Path, config: dict[str, Any]) -> ServedModel:
    text_config = config.get("text_config")
    lengths = [part.get("max_position_embeddings") for part in (config, text_config) if isinstance(part, dict)]
    architectures = config.get("architectures") or [config.get("model_type")]
    return ServedModel(
        name=name,
        weights=worker_id_of(path),
        architecture=architectures[0],
        max_context_length=next((length for length in lengths if isinstance(length, int)), None),
    )


def worker_id_of(path: Path) -> str:
    """Return the worker's ID for a model directory.

    The ID is the same for all names of the directory, and the same after a restart.
    """
    readable = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:32] or "model"
    return f"{readable}-{hashlib.sha256(str(path).encode()).hexdigest()[:10]}"


def _download(repository: str, spec: str) -> Path:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or repository.startswith("."):
        raise StartupError(f"--model {spec}: the directory {repository} does not exist")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise StartupError(
            f"--model {spec}: there is no directory {repository}, and downloading it needs huggingface-hub: "
            "in a checkout of Tinsmith, run uv pip install --constraints dev/requirements/dev.txt '.[server,trainer]'"
        ) from error
    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(
            f"--model {spec}: there is no directory {repository}, and it cannot be downloaded: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
