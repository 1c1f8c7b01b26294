"""The files in the directory of a checkpoint, and `metadata.json`, which exists only in a complete checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from tinsmith.training.errors import CheckpointDamaged

ADAPTER_FILE = "adapter.safetensors"
TRAINER_STATE_FILE = "trainer_state.pt"
OPTIMIZER_FILE = "optimizer.pt"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.yaml"
METADATA_FILE = "metadata.json"

FORMAT = 1
STEP_DIRECTORY = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The SHA-256 of a file in hexadecimal, and the length of the file in bytes."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """The content of the file `metadata.json`.

    `state_path` is the `tinker://` path of weights and optimizer on the server. `adapter_config` is PEFT's
    configuration, or None for a checkpoint without an adapter. `files` lists all files except `metadata.json`.
    """

    step: int
    created_at: datetime
    base_model: str
    state_path: str
    metrics: Mapping[str, float]
    adapter_config: Mapping[str, Any] | None
    files: Mapping[str, FileDigest]

    @property
    def size_bytes(self) -> int:
        """Return the size of all files except `metadata.json`."""
        return sum(file.size_bytes for file in self.files.values())


def directory_name(step: int) -> str:
    """Return the name of the directory for a step. Raises ValueError for a negative step."""
    if step < 0:
        raise ValueError(f"step is {step}; steps are counted from 0")
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a directory, or None if the directory is not a checkpoint."""
    matched = STEP_DIRECTORY.fullmatch(name)
    return int(matched[1]) if matched else None


def digest_of(stream: BinaryIO) -> FileDigest:
    """Read the whole stream, and return the digest of the content."""
    sha256, size = hashlib.sha256(), 0
    while part := stream.read(2**20):
        sha256.update(part)
        size += len(part)
    return FileDigest(sha256.hexdigest(), size)


def digest_of_file(path: Path) -> FileDigest:
    with path.open("rb") as stream:
        return digest_of(stream)


def to_json(metadata: Metadata) -> bytes:
    """Return the metadata as JSON.

    The JSON includes a digest of the metadata, which shows whether the file was changed.
    """
    described = {
        "format": FORMAT,
        "step": metadata.step,
        "created_at": metadata.created_at.isoformat(),
        "base_model": metadata.base_model,
        "state_path": metadata.state_path,
        # JSON has no NaN and no infinities; float() parses their names.
        "metrics": {name: value if _is_json(value) else str(value) for name, value in metadata.metrics.items()},
        "adapter_config": metadata.adapter_config,
        "files": {
            name: {"sha256": file.sha256, "size_bytes": file.size_bytes} for name, file in metadata.files.items()
        },
    }
    return json.dumps(described | {"sha256": _digest(described)}, indent=2).encode()


def from_json(content: bytes) -> Metadata:
    """Parse the text that `to_json` returned. Raises CheckpointDamaged for any other text."""
    try:
        described = json.loads(content)
        if described.pop("sha256") != _digest(described):
            raise CheckpointDamaged(f"{METADATA_FILE} was changed after it was written")
        if described["format"] != FORMAT:
            raise CheckpointDamaged(
                f"{METADATA_FILE} has format {described['format']}; this release reads format {FORMAT}"
            )
        return Metadata(
            step=described["step"],
            created_at=datetime.fromisoformat(described["created_at"]),
            base_model=described["base_model"],
            state_path=described["state_path"],
            metrics={name: float(value) for name, value in described["metrics"].items()},
            adapter_config=described["adapter_config"],
            files={name: FileDigest(**file) for name, file in described["files"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{METADATA_FILE} cannot be read: {error or type(error).__name__}") from error


def _is_json(value: float) -> bool:
    return float("-inf") < value < float("inf")


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
