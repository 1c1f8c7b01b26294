"""Tinker checkpoints below the checkpoint root.

A checkpoint is an immutable directory. The directory holds PEFT's two files, the optimizer's state if the checkpoint is
for training, and a manifest with the digest of each file. The manifest is written last; a directory without a manifest
is not a checkpoint. If the manifest of a save already exists, an earlier attempt of the same save succeeded.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import structlog
from tinsmith_rpc.tenant_names import RULE, is_tenant_name

from tinsmith_trainer.checkpoints import age_files
from tinsmith_trainer.checkpoints.abandoned import start_sweeping
from tinsmith_trainer.checkpoints.storage import CheckpointStorage, FileTooLarge, StorageFault
from tinsmith_trainer.disk.durable_files import Pieces, ReadFile, WrittenFile, sha256_of, size_of
from tinsmith_trainer.engines import peft_layout
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.tensor_files import memory_for_tensors, tensor_file, tensors_of
from tinsmith_trainer.errors import (
    CheckpointAltered,
    CheckpointInvalid,
    ServerError,
    StorageFull,
    StorageUnavailable,
    UserError,
)
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

log = structlog.get_logger(__name__)

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
OPTIMIZER_FILE = "optimizer.safetensors"
ASSETS = "assets"

Contents = Literal["training", "sampler"]
ManifestOf = Callable[[Mapping[str, WrittenFile]], bytes]
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A saved checkpoint. `directory` is relative to the root; `size_bytes` covers all files."""

    directory: str
    manifest: bytes
    size_bytes: int

    @property
    def manifest_digest(self) -> str:
        return sha256_of(self.manifest)


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A saved checkpoint together with the saved state in memory, so that sampling can start immediately."""

    written: WrittenCheckpoint
    state: AdapterState


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The state that was read from a checkpoint.

    `trained_in` is the quantization of the base model during training; empty means full width.
    """

    state: AdapterState
    has_optimizer: bool
    trained_in: str = ""


class CheckpointRoot:
    """The reads and writes of checkpoints below one URL. Methods block, so they are called in threads."""

    def __init__(self, url: str, *, reserved_bytes: int = 0) -> None:
        """Open the storage; see `CheckpointStorage`."""
        self._storage = CheckpointStorage(url, reserved_bytes=reserved_bytes)

    def start_sweeping(self, areas: Iterable[str]) -> None:
        """Start a thread that removes unfinished saves in the areas."""
        if self._storage.folder is not None:
            start_sweeping(self._storage.folder, areas, MANIFEST_FILE)

    def write(
        self,
        model_id: str,
        seq_id: int,
        epoch: int,
        contents: Contents,
        state: AdapterState,
        base: BaseModelInfo,
        area: str,
        *,
        age_recipients: Sequence[str] = (),
        may_use_reserve: bool = False,
    ) -> WrittenCheckpoint:
        """Write the directory `<area>/<model>/<seq>-<epoch>`, which is durable on return.

        If `recipients` are given, only the recipients can read the files, and the worker cannot. `may_use_reserve`: the
        save may use the disk's reserve, because the operation frees space later. Raises StorageUnavailable if the
        storage cannot be reached or may accept the save later, StorageFull if the storage has no room, ServerError if
        the storage refuses the save, and UserError for an invalid recipient.
        """
        files = _encode(contents, state, base)
        if age_recipients:
            files = age_files.encrypt(files, age_recipients)
        attempts = f"{area}/{_path_safe(model_id)}/{seq_id}"

        def manifest_of(written: Mapping[str, WrittenFile]) -> bytes:
            return _manifest(model_id, seq_id, contents, state, base, written)

        try:
            # A repeated encryption gives other bits, so earlier attempts are not reused.
            found = None if age_recipients else self._written_before(attempts, files, manifest_of)
            directory, manifest = found or self._write(f"{attempts}-{epoch}", files, manifest_of, may_use_reserve)
        except StorageFault as error:
            raise _unusable(error, f"The checkpoint {attempts} could not be saved to {self._storage.url}") from error
        size_bytes = sum(map(size_of, files.values())) + len(manifest)
        return WrittenCheckpoint(directory, manifest, size_bytes)

    def read(self, directory: str, manifest_digest: str, base: BaseModelInfo) -> LoadedCheckpoint:
        """Read a checkpoint.

        Raises CheckpointInvalid if the checkpoint is incomplete, altered or of another base model, and the errors of
        `write`.
        """
        try:
            return self._read(directory, manifest_digest, base)
        except CheckpointAltered as error:  # or a damaged page, or a bit flip in transit
            log.warning("reading a checkpoint again", directory=directory, reason=str(error))
        return self._read(directory, manifest_digest, base, from_disk=True)

    def _read(
        self, directory: str, manifest_digest: str, base: BaseModelInfo, *, from_disk: bool = False
    ) -> LoadedCheckpoint:
        found = self._read_files(directory, [MANIFEST_FILE], from_disk=from_disk)[MANIFEST_FILE]
        manifest = checked_manifest(directory, bytes(found.content), manifest_digest, base)
        return decode_checkpoint(
            directory, manifest, self._read_files(directory, manifest["files"], from_disk=from_disk)
        )

    def digest_of(self, directory: str) -> str:
        """Return the manifest digest of an unrecorded checkpoint.

        Raises CheckpointInvalid if the checkpoint has no manifest.
        """
        manifest = self._read_files(directory, [MANIFEST_FILE])[MANIFEST_FILE]
        try:
            json.loads(bytes(manifest.content))
        except ValueError as error:
            raise CheckpointInvalid(
                f"The checkpoint {directory} has a manifest that is not valid JSON: {error}."
            ) from error
        return manifest.sha256

    def read_asset(self, tenant: str, location: str) -> bytes:
        """Read a file that an administrator put below `assets/<tenant>/`.

        Raises UserError for a missing file or an invalid location, and the errors of `write`. A tenant's name cannot
        contain a slash, so no tenant's folder is inside another tenant's folder.
        """
        parts = location.split("/")
        if not is_tenant_name(tenant):
            raise UserError(
                f"The image asset {location!r} cannot be read, since {RULE}, and {tenant[:80]!r} is another one. Use a "
                "key of another tenant, or send images as bytes."
            )
        if "\\" in location or not location.isprintable() or any(p in ("", ".", "..") for p in parts):
            raise UserError(
                f"The image asset {location!r} is not a path below this tenant's assets on the checkpoint root, such "
                f"as photos/cat.png. Send other images as bytes."
            )
        directory = posixpath.join(ASSETS, tenant, *parts[:-1])
        try:
            content = self._storage.read(directory, parts[-1:])[parts[-1]]
        except StorageFault as error:
            raise _unusable(error, f"The image asset {location!r} cannot be read from {self._storage.url}") from error
        if content is None:
            raise UserError(
                f"The image asset {location!r} does not exist: an administrator puts files below {ASSETS}/."
            )
        return content

    def read_upload(self, directory: str, *, most_config_bytes: int, most_weights_bytes: int) -> tuple[bytes, bytes]:
        """Read the configuration and the weights of an adapter that a client uploaded and a server stored.

        Raises CheckpointInvalid if a file is missing or too large, and the errors of `write`.
        """
        names = (peft_layout.CONFIG_FILE, peft_layout.WEIGHTS_FILE)
        try:
            most_bytes = dict(zip(names, (most_config_bytes, most_weights_bytes), strict=True))
            found = self._storage.read_within(directory, most_bytes)
        except FileTooLarge as error:
            raise CheckpointInvalid(
                f"{error.name} has {error.size_bytes} bytes; the limit for the announced rank on this base model is "
                f"{error.most_bytes}."
            ) from None
        except StorageFault as error:
            raise _unusable(error, f"The upload cannot be read from {self._storage.url}") from error
        config, weights = (found[name] for name in names)
        if config is None or weights is None:
            raise CheckpointInvalid(f"The upload lacks {names[0] if config is None else names[1]}.")
        return config, weights

    def _write(
        self, directory: str, files: Mapping[str, Pieces], manifest_of: ManifestOf, may_use_reserve: bool
    ) -> tuple[str, bytes]:
        def commit(written: Mapping[str, WrittenFile]) -> bytes:
            manifest = manifest_of(written)
            reach("checkpoint-before-manifest")
            return manifest

        return directory, self._storage.write(directory, files, MANIFEST_FILE, commit, may_use_reserve=may_use_reserve)

    def _written_before(
        self, attempts: str, files: Mapping[str, Pieces], manifest_of: ManifestOf
    ) -> tuple[str, bytes] | None:
        """Return the directory and the manifest of an earlier complete attempt of this save."""
        earlier = self._storage.directories(f"{attempts}-", holding=MANIFEST_FILE)
        if not earlier:
            return None
        manifest = manifest_of({name: WrittenFile(sha256_of(*each), size_of(each)) for name, each in files.items()})
        for directory in earlier:
            if self._storage.read(directory, [MANIFEST_FILE])[MANIFEST_FILE] == manifest:
                return directory, manifest
        return None

    def _read_files(self, directory: str, names: Iterable[str], *, from_disk: bool = False) -> dict[str, ReadFile]:
        try:
            found = self._storage.read_hashed(directory, names, memory_for_tensors, from_disk=from_disk)
        except StorageFault as error:
            raise _unusable(error, f"The checkpoint {directory} cannot be read from {self._storage.url}") from error
        missing = [name for name, file in found.items() if file is None]
        if missing:
            raise CheckpointInvalid(f"The checkpoint {directory} is incomplete: {', '.join(missing)} is missing.")
        return {name: file for name, file in found.items() if file is not None}


def checked_manifest(directory: str, content: bytes, digest: str, base: BaseModelInfo) -> Manifest:
    """Return the manifest of a usable checkpoint. Raises CheckpointInvalid if the manifest is not usable."""
    if sha256_of(content) != digest:
        raise CheckpointAltered(f"The checkpoint {directory} was altered: its manifest is not the one that was saved.")
    manifest: Manifest = json.loads(content)
    _check_base_model(directory, manifest, base)
    _check_not_encrypted(directory, manifest)
    return manifest


def decode_checkpoint(directory: str, manifest: Manifest, files: Mapping[str, ReadFile]) -> LoadedCheckpoint:
    """Decode the weights, and the optimizer's state if the checkpoint has one.

    Raises CheckpointInvalid for altered files.
    """
    for name, file in files.items():
        _check_content(directory, name, file, manifest["files"][name])
    tensors = peft_layout.decode_weights(files[peft_layout.WEIGHTS_FILE].content)
    has_optimizer = OPTIMIZER_FILE in files
    if has_optimizer:
        tensors |= tensors_of(files[OPTIMIZER_FILE].content)
    state = AdapterState(LoraSpec(**manifest["lora"]), manifest["optimizer_step"], tensors)
    return LoadedCheckpoint(state, has_optimizer, manifest.get("base_model_quantization", ""))


def _unusable(fault: StorageFault, what: str) -> ServerError:
    if fault.is_full:
        return StorageFull(f"{what}: {fault}")
    kind = StorageUnavailable if fault.is_transient else ServerError
    return kind(f"{what}: {fault}")


def _check_content(directory: str, name: str, file: ReadFile, entry: dict[str, Any]) -> None:
    if len(file.content) != entry["size_bytes"] or file.sha256 != entry["sha256"]:
        raise CheckpointAltered(
            f"The checkpoint {directory} is damaged: {name} has {len(file.content)} bytes unlike its manifest "
            f"({entry['size_bytes']} bytes). Use another checkpoint."
        )


def _path_safe(model_id: str) -> str:
    """Replace colons in model ids, because object stores and Windows shares do not support colons well."""
    return model_id.replace(":", ".")


def _encode(contents: Contents, state: AdapterState, base: BaseModelInfo) -> dict[str, Pieces]:
    files = peft_layout.encode_adapter(state.lora, state.tensors, base.path)
    if contents == "training":
        moments = {name: tensor for name, tensor in state.tensors.items() if name.startswith("adam/")}
        files[OPTIMIZER_FILE] = tensor_file(moments, {"format": "pt"})
    return files


def _manifest(
    model_id: str,
    seq_id: int,
    contents: Contents,
    state: AdapterState,
    base: BaseModelInfo,
    files: Mapping[str, WrittenFile],
) -> bytes:
    description = {
        "format_version": FORMAT_VERSION,
        "model_id": model_id,
        "seq_id": seq_id,
        "contents": contents,
        "base_model_revision": base.revision,
        "base_model_architecture": base.architecture,
        "base_model_quantization": base.quantization,
        "lora": asdict(state.lora),
        "optimizer_step": state.optimizer_step,
        "files": {name: asdict(written) for name, written in files.items()},
    }
    return json.dumps(description, indent=2, sort_keys=True).encode() + b"\n"


def _check_base_model(directory: str, manifest: Manifest, base: BaseModelInfo) -> None:
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


def _check_not_encrypted(directory: str, manifest: Manifest) -> None:
    if any(name.endswith(age_files.SUFFIX) for name in manifest["files"]):
        raise CheckpointInvalid(
            f"The checkpoint {directory} is encrypted for age recipients, which do not include this server: decrypt "
            "its files and load them with `tinsmith import`."
        )
