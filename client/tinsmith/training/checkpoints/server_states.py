"""What checkpoints ask of a server, by the `tinker` SDK alone."""

from __future__ import annotations

import io
import json
import secrets
import shutil
import tarfile
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import httpx
import tinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from tinsmith.training.errors import NotOffered, StateGone

EXPORT_TTL_SECONDS = 3600
"""The shortest that the protocol has; an export is deleted as soon as it is here."""
DOWNLOAD_TIMEOUT_SECONDS = 60.0
"""Without a byte, not in all."""
ARCHIVE_TIMEOUT_SECONDS = 600.0
NO_SUCH_CALL = (tinker.NotFoundError, tinker.UnprocessableEntityError, tinker.BadRequestError)
CONFIG_IN_EXPORT, WEIGHTS_IN_EXPORT = "adapter_config.json", "adapter_model.safetensors"
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
        try:
            urls = self._rest.get_external_weights_urls(export_path).result().urls
            missing = [name for name in (CONFIG_IN_EXPORT, WEIGHTS_IN_EXPORT) if name not in urls]
            if missing:
                raise NotOffered(f"the server's export has no {missing[0]}; save with adapter=False")
            _download(urls[WEIGHTS_IN_EXPORT], target)
            answer = httpx.get(urls[CONFIG_IN_EXPORT], timeout=DOWNLOAD_TIMEOUT_SECONDS).raise_for_status()
            return cast(dict[str, Any], json.loads(answer.content))
        finally:
            self.delete(export_path)

    def fetch_optimizer(self, state_path: str, target: Path) -> None:
        """Writes the optimizer's tensors to `target`, as safetensors. The archive is in memory meanwhile.

        Raises NotOffered: no call of the protocol is for them, and a server's archive of a state may have them or not.
        """
        try:
            with tarfile.open(fileobj=io.BytesIO(self._archive(state_path))) as opened:
                members = {member.name: member for member in opened}
                content = opened.extractfile(members[OPTIMIZER_IN_ARCHIVE])
                assert content is not None, "an archive of files alone"
                with target.open("wb") as copy:
                    shutil.copyfileobj(content, copy)
        except (KeyError, tarfile.ReadError, *NO_SUCH_CALL) as error:
            raise NotOffered(
                f"this server does not give an optimizer away. Save with optimizer=False: {state_path} holds it, "
                "and a resumed run has it"
            ) from error

    def _archive(self, state_path: str) -> bytes:
        """The SDK has no function for it any more; its layer of HTTP makes the call, and follows to the file."""
        parsed = tinker.ParsedCheckpointTinkerPath.from_tinker_path(state_path)
        address = f"/api/v1/training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}/archive"
        holder = self._rest.holder

        async def ask() -> bytes:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
                answer = await client.get(address, cast_to=httpx.Response, options={"timeout": ARCHIVE_TIMEOUT_SECONDS})
                return bytes(answer.content)

        asked: Future[bytes] = holder.run_coroutine_threadsafe(ask()).future()
        return asked.result()


def _download(url: str, target: Path) -> None:
    """A link is a permission by itself: it is asked without a key."""
    with httpx.stream("GET", url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer, target.open("wb") as file:
        answer.raise_for_status()
        for part in answer.iter_bytes():
            file.write(part)
