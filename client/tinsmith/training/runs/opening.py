"""What a run begins with, the first time and each other time: its folder, a server, and the newest checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tinker
from typing_extensions import override

from tinsmith.api import Api, ApiError, Unreachable
from tinsmith.base_models import TokenizerError, load_tokenizer
from tinsmith.credentials import api_key_from_environment, base_url_from_environment
from tinsmith.files import write_whole
from tinsmith.training.checkpoints.manager import CheckpointManager, Resumed, has_tokenizer_json
from tinsmith.training.checkpoints.retention import Retention
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.errors import BadConfig, BadData, CheckpointDamaged, ServerNotReady
from tinsmith.training.runs.config import CHECKPOINTS, CONFIG_FILE, SUMMARY, RunConfig, require_same, to_yaml
from tinsmith.training.server_files import PURPOSE

logger = logging.getLogger(__name__)

DATA_DIGEST_FILE = "data.sha256"


class RunCheckpoints(CheckpointManager):
    """Saves also where `is_due` says so: at the last step, and where somebody asked the run to stop."""

    is_due: Callable[[int], bool] = staticmethod(lambda _: False)
    saved_step: int | None = None
    """The last for which a save was asked."""

    @override
    def maybe_save(
        self,
        training_client: tinker.TrainingClient,
        step: int,
        *,
        loop_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        if self.is_due(step):
            self.save(training_client, step, loop_state=loop_state, metrics=metrics)
        elif not super().maybe_save(training_client, step, loop_state=loop_state, metrics=metrics):
            return False
        self.saved_step = step
        return True

    def keep_tokenizer(self, tokenizer: Any) -> None:
        """In each checkpoint. One that no file can hold is told of now: the first save is many steps away."""
        self._tokenizer = tokenizer if has_tokenizer_json(tokenizer) else False
        if self._tokenizer is False:
            logger.warning(
                "%s has no tokenizer.json: the run's checkpoints are without a tokenizer", type(tokenizer).__name__
            )


@dataclass(frozen=True, slots=True)
class OpenRun:
    """`resumed` is None for a run that begins."""

    manager: RunCheckpoints
    client: tinker.TrainingClient
    tokenizer: Any
    resumed: Resumed | None

    @property
    def step(self) -> int:
        return 0 if self.resumed is None else self.resumed.step


@contextmanager
def opened(config: RunConfig, digest: str) -> Iterator[OpenRun]:
    """At the end everything is saved, and the session over. `digest` is of the data.

    Raises BadConfig and BadData where settings or data are others than those that the run began with,
    ServerNotReady, and what the SDK raises.
    """
    claim_folder(config, digest)
    base_url, api_key = base_url_from_environment(), api_key_from_environment()
    require_server(config.model, base_url, api_key)
    tokenizer = _found_tokenizer(config, base_url, api_key)
    # The very server that was asked: without a URL the SDK takes its maker's.
    with tinker.ServiceClient(base_url=base_url, api_key=api_key, display_name=str(config.out)) as service:
        manager = RunCheckpoints(
            config.out / CHECKPOINTS,
            service,
            config=config.model_dump(mode="json"),
            save_every=config.save_every,
            retention=Retention(keep_last=config.keep_last),
            user_metadata=_user_metadata(config),
        )
        with manager:
            resumed = manager.resume()
            client = _new_client(service, config) if resumed is None else resumed.training_client
            if tokenizer is None:
                tokenizer = _tokenizer_of(client, config)
            manager.keep_tokenizer(tokenizer)
            yield OpenRun(manager, client, tokenizer, resumed)


def claim_folder(config: RunConfig, digest: str) -> None:
    """Writes the settings and the digest of the data there.

    Raises BadConfig and BadData where a run with others has a checkpoint.
    """
    settings, data = config.out / CONFIG_FILE, config.out / DATA_DIGEST_FILE
    if settings.exists() and data.exists() and CheckpointStore(str(config.out / CHECKPOINTS)).steps():
        require_same(config, settings.read_text(), settings)
        if data.read_text() != digest:
            raise BadData(f"the data is not that which the run in {config.out} began with: give this run another out")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        write_whole(settings, to_yaml(config))
        write_whole(data, digest)
    except OSError as error:
        raise BadConfig(f"out is {config.out}, which cannot be written: {error.strerror}") from error


def require_server(model: str, base_url: str, api_key: str | None) -> None:
    """Raises ServerNotReady: with the command that starts one where none answers."""
    try:
        with Api(base_url, api_key) as api:
            served = [model.name for model in api.served_models()]
    except Unreachable as error:
        raise ServerNotReady(f"{error}; `tinsmith serve --model {model}` starts one on this machine") from error
    except ApiError as error:
        raise ServerNotReady(f"{error}; `tinsmith doctor` finds out why") from error
    if model not in served:
        raise ServerNotReady(f"{api.base_url} does not serve {model}; it serves {', '.join(served) or 'nothing'}")


def _new_client(service: tinker.ServiceClient, config: RunConfig) -> tinker.TrainingClient:
    return service.create_lora_training_client(
        config.model, rank=config.rank, seed=config.seed, user_metadata=_user_metadata(config)
    ).result()


def _user_metadata(config: RunConfig) -> dict[str, str]:
    """Return what `tinker run info` shows of the run.

    A finished run that is started again trains nothing: what it makes at the server is left out of the list.
    """
    named = {"name": config.name or str(config.out)}
    return named | {PURPOSE: "summary"} if _is_finished(config) else named


def _is_finished(config: RunConfig) -> bool:
    """Return whether the summary of the run is that of its newest checkpoint."""
    store = CheckpointStore(str(config.out / CHECKPOINTS))
    summary, steps = config.out / SUMMARY, store.steps()
    if not steps or not summary.exists():
        return False
    try:
        return bool(json.loads(summary.read_text()).get("state") == store.metadata(steps[-1]).state_path)
    except (ValueError, CheckpointDamaged):
        return False


def _found_tokenizer(config: RunConfig, base_url: str, api_key: str | None) -> Any | None:
    """None: the SDK looks for it, at a hub at last."""
    if config.tokenizer is not None:
        return _tokenizer_at(config.tokenizer)
    try:
        return load_tokenizer(config.model, base_url, api_key)
    except TokenizerError as error:
        raise BadConfig(f"{error}, or give its folder or name as tokenizer") from error
    except ApiError as error:
        raise ServerNotReady(f"the tokenizer of {config.model} cannot be fetched: {error}") from error


def _tokenizer_of(client: tinker.TrainingClient, config: RunConfig) -> Any:
    try:
        return client.get_tokenizer()
    except (OSError, ValueError) as error:
        raise BadConfig(f"there is no tokenizer for {config.model}: give its folder or name as tokenizer") from error


def _tokenizer_at(location: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError) as error:
        raise BadConfig(f"tokenizer is {location!r}, and nothing there can be read as one") from error
