"""The first check of every loader: the directory's files are those of one model, without an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.files.stored_weights import check_stored_weights

ADAPTER_CONFIG = "adapter_config.json"


def checked_config(directory: Path) -> Any:
    """Return a directory's configuration, once its files hold exactly the weights that it describes.

    Raises ModelDirectoryInvalid, which names the file or the tensors.
    """
    check_files(directory)
    try:
        config: Any = AutoConfig.from_pretrained(directory)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, …
        raise ModelDirectoryInvalid(blame(directory, error)) from error
    check_stored_weights(directory, config)
    return config


def check_files(directory: Path) -> None:
    """Refuse a directory that is not one model's. Raises ModelDirectoryInvalid."""
    _check_no_adapter(directory)
    config = directory / "config.json"
    if not config.is_file():
        raise ModelDirectoryInvalid(f"{config} is missing: {directory} is not a transformers model directory.")
    try:
        json.loads(config.read_text())
    except ValueError as error:
        raise ModelDirectoryInvalid(f"{config} is not valid JSON: {error}.") from error
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        raise ModelDirectoryInvalid(f"{directory} has no weights: expected *.safetensors beside config.json.")
    for shard in sorted(directory.glob("*.safetensors")):
        _check_safetensors(shard)


def _check_no_adapter(directory: Path) -> None:
    """Refuse an adapter that transformers would add to every model that it loads from the directory."""
    if (directory / ADAPTER_CONFIG).is_file():
        raise ModelDirectoryInvalid(
            f"{directory} holds a PEFT adapter ({ADAPTER_CONFIG}), which transformers would add to the model without "
            f"notice. To serve the base model, give a directory without the files of the adapter. To train the adapter "
            f"further, move them to a directory of their own and import that with `tinsmith import`."
        )


def _check_safetensors(shard: Path) -> None:
    try:
        with safe_open(str(shard), framework="pt"):
            pass
    except SafetensorError as error:
        raise ModelDirectoryInvalid(f"{shard} is truncated or not a safetensors file: {error}.") from error


def blame(directory: Path, error: Exception) -> str:
    """Return what is said of a directory that transformers cannot load."""
    return f"The model in {directory} cannot be loaded: {type(error).__name__}: {error}"
