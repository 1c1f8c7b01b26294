"""`export_lora_weights`: download the weights at a `tinker://` path over HTTP."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import tinker

from tinsmith.training.errors import ExportError, NoSuchWeights, NotOffered
from tinsmith.training.server_files import CONFIG_FILE, PURPOSE, WEIGHTS_FILE, fetch_export, fetch_from_archive

if TYPE_CHECKING:
    from tinsmith.training.exports.merging import MergedWeights
    from tinsmith.training.exports.peft_adapter import AdapterWeights
    from tinsmith.training.exports.stored import StoredAdapter

EXPORT_TTL_SECONDS = 3600
"""The lifetime of an export, which is the shortest lifetime that the protocol allows.

An export is deleted as soon as it is downloaded.
"""


@overload
def export_lora_weights(
    path: str,
    merged: Literal[False] = False,
    *,
    base_model: str | Path | None = None,
    service: tinker.ServiceClient | None = None,
) -> AdapterWeights: ...
@overload
def export_lora_weights(
    path: str,
    merged: Literal[True],
    *,
    base_model: str | Path | None = None,
    service: tinker.ServiceClient | None = None,
) -> MergedWeights: ...
@overload
def export_lora_weights(
    path: str,
    merged: bool,
    *,
    base_model: str | Path | None = None,
    service: tinker.ServiceClient | None = None,
) -> AdapterWeights | MergedWeights: ...
def export_lora_weights(
    path: str,
    merged: bool = False,
    *,
    base_model: str | Path | None = None,
    service: tinker.ServiceClient | None = None,
) -> AdapterWeights | MergedWeights:
    """Return the weights of a checkpoint, for example `tinker://RUN/weights/NAME`. The checkpoint may be of any kind.

    `.tensors` in the result maps names to tensors. An adapter is in PEFT's format and in float32. If `merged` is true,
    the result is the whole model in the dtype of the base model, with the adapter merged.

    `base_model` is a folder, or a name on the hub. The default of `base_model` is the server's name of the model. The
    base model is needed for a merged result, and for adapters of experts, because the layout of experts depends on the
    model. The default of `service` is a new session with the server and key from the environment.

    The function downloads the server's archive of the checkpoint. If the server has no archives, a state (`/weights/`)
    is loaded and exported, and the export is deleted afterwards. Raises NoSuchWeights, NotOffered, DownloadDamaged,
    BaseModelUnusable, and ExportError.
    """
    from tinsmith.training.exports.base_model import BaseModel
    from tinsmith.training.exports.merging import merged_into
    from tinsmith.training.exports.peft_adapter import for_peft

    with _session(service) as session:
        adapter = _fetched(session, path)
    name = str(base_model or adapter.base_model)
    if merged:
        return merged_into(adapter, BaseModel(name))
    return for_peft(adapter, BaseModel(name) if adapter.experts else None, name)


@contextmanager
def _session(service: tinker.ServiceClient | None) -> Iterator[tinker.ServiceClient]:
    if service is not None:
        yield service
        return
    created = tinker.ServiceClient()
    try:
        yield created
    finally:
        created.close("success").result()


def _second_session(service: tinker.ServiceClient) -> tinker.ServiceClient:
    """Open a new session with the same server, key and project."""
    same = service.holder.shadow_config
    return tinker.ServiceClient(
        project_id=service._project_id,
        base_url=same.base_url,
        api_key=same.api_key,
        default_headers_overrides=same.default_headers_overrides,
    )


def _fetched(service: tinker.ServiceClient, path: str) -> StoredAdapter:
    from tinsmith.training.exports.stored import read_adapter

    kind = _kind_of(path)
    rest = tinker.RestClient(service.holder)
    base_model = _base_model_of(rest, path)
    with tempfile.TemporaryDirectory(prefix="tinsmith-export-") as folder:
        targets = {name: Path(folder) / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
        if kind == "external":
            fetch_export(rest, path, targets)
        else:
            _fetch_saved(service, rest, path, kind, targets)
        return read_adapter(Path(folder), base_model)


def _fetch_saved(
    service: tinker.ServiceClient, rest: tinker.RestClient, path: str, kind: str, targets: dict[str, Path]
) -> None:
    try:
        fetch_from_archive(rest, path, targets)
    except NotOffered as error:
        if kind == "sampler":
            raise NotOffered(
                f"{error}, which the weights of a sampler need: save with save_state or "
                "save_weights_external, and export that instead"
            ) from error
        _fetch_through_export(service, rest, path, targets)


def _fetch_through_export(
    service: tinker.ServiceClient, rest: tinker.RestClient, path: str, targets: dict[str, Path]
) -> None:
    """Load the state into a training client, and export the client's weights.

    The training client has a separate session, because a server frees the models of a session only when the session
    ends.
    """
    try:
        with _second_session(service) as own:
            training_client = own.create_training_client_from_state(path, user_metadata={PURPOSE: "export"}).result()
            exported = training_client.save_weights_external("export", ttl_seconds=EXPORT_TTL_SECONDS).result().path
    except tinker.TinkerError as error:
        raise NotOffered(
            f"this server offers neither an archive nor an export of {path}: {error}. Ask the server's operator for "
            "the checkpoint's files, and run `tinsmith export` on them"
        ) from error
    try:
        fetch_export(rest, exported, targets)
    finally:
        rest.delete_checkpoint_from_tinker_path(exported).result()


def _kind_of(path: str) -> str:
    try:
        return str(tinker.ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type)
    except ValueError as error:
        raise ExportError(
            f"{path} is not the path of a checkpoint, such as tinker://RUN/weights/NAME: {error}"
        ) from error


def _base_model_of(rest: tinker.RestClient, path: str) -> str:
    try:
        return rest.get_weights_info_by_tinker_path(path).result().base_model
    except tinker.NotFoundError as error:
        raise NoSuchWeights(
            f"the server shows no {path} to this key: it was never saved, was deleted or has expired, or it belongs to "
            "another user and is not published"
        ) from error
