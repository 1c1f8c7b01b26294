"""Tinker checkpoints under the checkpoint root, any fsspec URL.

A checkpoint is an immutable directory: PEFT's two files, the optimizer for training checkpoints,
and a manifest with the digest of each, written last. What has no manifest does not exist;
finding one's own manifest means that an earlier attempt succeeded.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import fsspec
from fsspec.implementations.local import LocalFileSystem
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from tinsmith_trainer import peft_layout
from tinsmith_trainer.durable_files import sha256_of, sync_directory
from tinsmith_trainer.engines.base import AdapterState, BaseModelInfo, LoraSpec
from tinsmith_trainer.errors import CheckpointInvalid, ServerError
from tinsmith_trainer.failpoints import reach

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
OPTIMIZER_FILE = "optimizer.safetensors"

Contents = Literal["training", "sampler"]


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """Where it is, relative to the root; `size_bytes` is that of all files."""

    directory: str
    manifest_digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    state: AdapterState
    has_optimizer: bool


class CheckpointRoot:
    """Reads and writes checkpoints below one URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        fs, path = fsspec.core.url_to_fs(url)
        self._fs = fs
        self._path = str(path).rstrip("/")

    def write(
        self,
        model_id: str,
        seq_id: int,
        epoch: int,
        contents: Contents,
        state: AdapterState,
        base: BaseModelInfo,
        area: str,
    ) -> WrittenCheckpoint:
        """Writes the directory `<area>/<model>/<seq>-<epoch>`; durable when it returns.

        Raises ServerError when the storage refuses.
        """
        files = _encode(contents, state, base)
        manifest = _manifest(model_id, seq_id, contents, state, base, files)
        attempts = f"{area}/{_path_safe(model_id)}/{seq_id}"
        try:
            directory = self._written_before(attempts, manifest)
            if directory is None:
                directory = f"{attempts}-{epoch}"
                self._write_files(directory, files, manifest)
        except OSError as error:
            raise ServerError(f"The checkpoint {attempts} could not be written to {self.url}: {error}.") from error
        size_bytes = sum(len(content) for content in files.values()) + len(manifest)
        return WrittenCheckpoint(directory, sha256_of(manifest), size_bytes)

    def read(self, directory: str, manifest_digest: str, base: BaseModelInfo) -> LoadedCheckpoint:
        """Raises CheckpointInvalid when anything is missing, altered, or of another base model."""
        manifest_bytes = self._read_file(directory, MANIFEST_FILE)
        if sha256_of(manifest_bytes) != manifest_digest:
            raise CheckpointInvalid(
                f"The checkpoint {directory} was altered: its manifest is not the one that was saved."
            )
        manifest = json.loads(manifest_bytes)
        _check_base_model(directory, manifest, base)
        files = {name: self._read_checked(directory, name, entry) for name, entry in manifest["files"].items()}
        return _decode(manifest, files)

    def _written_before(self, attempts: str, manifest: bytes) -> str | None:
        """The directory of an earlier attempt at this very checkpoint that got as far as its manifest."""
        for path in self._fs.glob(f"{self._path}/{attempts}-*/{MANIFEST_FILE}"):
            if self._fs.cat_file(path) == manifest:
                return str(path)[len(self._path) + 1 : -len(MANIFEST_FILE) - 1]
        return None

    def _write_files(self, directory: str, files: dict[str, bytes], manifest: bytes) -> None:
        folder = f"{self._path}/{directory}"
        self._fs.makedirs(folder, exist_ok=True)
        for name, content in files.items():
            self._write_file(f"{folder}/{name}", content)
        reach("checkpoint-before-manifest")
        self._write_file(f"{folder}/{MANIFEST_FILE}", manifest)
        if isinstance(self._fs, LocalFileSystem):
            _sync_upwards(Path(folder), Path(self._path))

    def _write_file(self, path: str, content: bytes) -> None:
        with self._fs.open(path, "wb") as file:
            file.write(content)
            if isinstance(self._fs, LocalFileSystem):
                file.flush()
                os.fsync(file.fileno())

    def _read_checked(self, directory: str, name: str, entry: dict[str, Any]) -> bytes:
        content = self._read_file(directory, name)
        if len(content) != entry["size_bytes"] or sha256_of(content) != entry["sha256"]:
            raise CheckpointInvalid(
                f"The checkpoint {directory} is damaged: {name} has {len(content)} bytes unlike its manifest "
                f"({entry['size_bytes']} bytes). Use another checkpoint."
            )
        return content

    def _read_file(self, directory: str, name: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(f"{self._path}/{directory}/{name}"))
        except FileNotFoundError as error:
            raise CheckpointInvalid(f"The checkpoint {directory} is incomplete: {name} is missing.") from error
        except OSError as error:
            raise ServerError(f"The checkpoint {directory} cannot be read from {self.url}: {error}.") from error


def _path_safe(model_id: str) -> str:
    """Model ids hold colons, which object stores and Windows shares dislike."""
    return model_id.replace(":", ".")


def _encode(contents: Contents, state: AdapterState, base: BaseModelInfo) -> dict[str, bytes]:
    files = peft_layout.encode_adapter(state.lora, state.tensors, base.path)
    if contents == "training":
        moments = {name: tensor for name, tensor in state.tensors.items() if name.startswith("adam/")}
        files[OPTIMIZER_FILE] = save_tensors(moments, {"format": "pt"})
    return files


def _manifest(
    model_id: str, seq_id: int, contents: Contents, state: AdapterState, base: BaseModelInfo, files: dict[str, bytes]
) -> bytes:
    description = {
        "format_version": FORMAT_VERSION,
        "model_id": model_id,
        "seq_id": seq_id,
        "contents": contents,
        "base_model_revision": base.revision,
        "base_model_architecture": base.architecture,
        "lora": asdict(state.lora),
        "optimizer_step": state.optimizer_step,
        "files": {name: {"sha256": sha256_of(data), "size_bytes": len(data)} for name, data in files.items()},
    }
    return json.dumps(description, indent=2, sort_keys=True).encode() + b"\n"


def _check_base_model(directory: str, manifest: dict[str, Any], base: BaseModelInfo) -> None:
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointInvalid(
            f"The checkpoint {directory} has format {manifest['format_version']}; this worker reads {FORMAT_VERSION}."
        )
    if manifest["base_model_revision"] != base.revision:
        raise CheckpointInvalid(
            f"The checkpoint {directory} belongs to another base model ({manifest['base_model_architecture']}, "
            f"weights {manifest['base_model_revision'][:12]}) than the one served here ({base.architecture}, "
            f"weights {base.revision[:12]}). Load it into a model of its own base model."
        )


def _decode(manifest: dict[str, Any], files: dict[str, bytes]) -> LoadedCheckpoint:
    tensors = peft_layout.decode_weights(files[peft_layout.WEIGHTS_FILE])
    has_optimizer = OPTIMIZER_FILE in files
    if has_optimizer:
        tensors |= load_tensors(files[OPTIMIZER_FILE])
    state = AdapterState(LoraSpec(**manifest["lora"]), manifest["optimizer_step"], tensors)
    return LoadedCheckpoint(state, has_optimizer)


def _sync_upwards(folder: Path, root: Path) -> None:
    for directory in (folder, *folder.parents):
        sync_directory(directory)
        if directory == root.parent:
            return
