"""The part of a checkpoint that is on the server.

The server's part of a checkpoint is accessed through the `tinker` SDK.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import tinker

from tinsmith.training.errors import NotOffered, StateGone
from tinsmith.training.server_files import CONFIG_FILE, WEIGHTS_FILE, fetch_export, fetch_from_archive

EXPORT_TTL_SECONDS = 3600
"""The lifetime of an export, which is the shortest lifetime that the protocol allows.

An export is deleted as soon as it is downloaded.
"""
OPTIMIZER_IN_ARCHIVE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class StartedSave:
    """Saves that are in the queue of a training client's calls. Calls after a queued save do not affect the save."""

    state: Any
    adapter: Any | None


def start_save(
    training_client: tinker.TrainingClient, name: str, *, adapter: bool, ttl_seconds: int | None
) -> StartedSave:
    """Start the saves, and return immediately.

    The names are unique, because a run may save a step again after a failure.
    """
    unique = f"{name}-{secrets.token_hex(4)}"
    state = training_client.save_state(unique, ttl_seconds=ttl_seconds)
    exported = training_client.save_weights_external(unique, ttl_seconds=EXPORT_TTL_SECONDS) if adapter else None
    return StartedSave(state, exported)


class ServerStates:
    """The states on one server. Errors of the SDK are raised unchanged, except for missing states."""

    def __init__(self, rest: tinker.RestClient) -> None:
        self._rest = rest

    @classmethod
    def of(cls, service: tinker.ServiceClient) -> Self:
        """Return an object for the states on the server of this client."""
        return cls(tinker.RestClient(service.holder))

    def require(self, state_path: str) -> None:
        """Raise StateGone if the server does not have the state."""
        try:
            self._rest.get_weights_info_by_tinker_path(state_path).result()
        except tinker.NotFoundError as error:
            raise StateGone(
                f"the server has no {state_path}: it was deleted or has expired, or it is on another server"
            ) from error

    def delete(self, path: str) -> None:
        """Delete a state if the state exists."""
        try:
            self._rest.delete_checkpoint_from_tinker_path(path).result()
        except tinker.NotFoundError:
            return

    def fetch_adapter(self, export_path: str, target: Path) -> dict[str, Any]:
        """Download the weights to `target`, delete the export, and return PEFT's `adapter_config`.

        Raises NotOffered if the export does not contain an adapter's files.
        """
        config = target.with_name(CONFIG_FILE)
        try:
            fetch_export(self._rest, export_path, {CONFIG_FILE: config, WEIGHTS_FILE: target})
            return cast(dict[str, Any], json.loads(config.read_bytes()))
        except NotOffered as error:
            raise NotOffered(f"{error}; save with adapter=False") from error
        finally:
            config.unlink(missing_ok=True)
            self.delete(export_path)

    def fetch_optimizer(self, state_path: str, target: Path) -> None:
        """Download the tensors of the optimizer to `target`, as safetensors.

        Raises NotOffered if the server's archives do not contain the tensors. The protocol has no call that returns the
        tensors, so the archive of the state is downloaded.
        """
        try:
            fetch_from_archive(self._rest, state_path, {OPTIMIZER_IN_ARCHIVE: target})
        except NotOffered as error:
            raise NotOffered(
                f"this server does not offer the optimizer's state. Save with optimizer=False: {state_path} has it, "
                "so a resumed run has it"
            ) from error
