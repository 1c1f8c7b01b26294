"""What checkpoints ask of a server, by the `tinker` SDK alone."""

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
"""The shortest that the protocol has; an export is deleted as soon as it is here."""
OPTIMIZER_IN_ARCHIVE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class StartedSave:
    """Saves that have their place among the calls of a training client: later calls change nothing about them."""

    state: Any
    adapter: Any | None


def start_save(
    training_client: tinker.TrainingClient, name: str, *, adapter: bool, ttl_seconds: int | None
) -> StartedSave:
    """Returns at once. A run may save one step twice, after the first save failed: names are of their own."""
    unique = f"{name}-{secrets.token_hex(4)}"
    state = training_client.save_state(unique, ttl_seconds=ttl_seconds)
    exported = training_client.save_weights_external(unique, ttl_seconds=EXPORT_TTL_SECONDS) if adapter else None
    return StartedSave(state, exported)


class ServerStates:
    """Errors of the SDK pass through, except where the server has not what is asked for."""

    def __init__(self, rest: tinker.RestClient) -> None:
        self._rest = rest

    @classmethod
    def of(cls, service: tinker.ServiceClient) -> Self:
        """Of the server that this client speaks to, wherever the environment leads."""
        return cls(tinker.RestClient(service.holder))

    def require(self, state_path: str) -> None:
        """Raises StateGone."""
        try:
            self._rest.get_weights_info_by_tinker_path(state_path).result()
        except tinker.NotFoundError as error:
            raise StateGone(
                f"the server has no {state_path}: it was deleted, its time has passed, or it is another server's"
            ) from error

    def delete(self, path: str) -> None:
        """One that is gone already is fine."""
        try:
            self._rest.delete_checkpoint_from_tinker_path(path).result()
        except tinker.NotFoundError:
            return

    def fetch_adapter(self, export_path: str, target: Path) -> dict[str, Any]:
        """Writes the weights to `target`, deletes the export, and returns PEFT's `adapter_config`.

        Raises NotOffered where the export has no such files.
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
        """Writes the optimizer's tensors to `target`, as safetensors.

        Raises NotOffered: no call of the protocol is for them, and a server's archive of a state may have them or not.
        """
        try:
            fetch_from_archive(self._rest, state_path, {OPTIMIZER_IN_ARCHIVE: target})
        except NotOffered as error:
            raise NotOffered(
                f"this server does not give an optimizer away. Save with optimizer=False: {state_path} holds it, "
                "and a resumed run has it"
            ) from error
