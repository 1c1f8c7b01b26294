"""The start of a new or resumed run: the folder, the server, and the newest checkpoint."""

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
    """A checkpoint manager that also saves at each step for which `is_due` returns true.

    `is_due` returns true at the last step and after a stop request.
    """

    is_due: Callable[[int], bool] = staticmethod(lambda _: False)
    saved_step: int | None = None
    """The latest step with a requested save, or None."""

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
        """Make each checkpoint contain the tokenizer.

        Warn before the first save if the tokenizer cannot be written to a file.
        """
        self._tokenizer = tokenizer if has_tokenizer_json(tokenizer) else False
        if self._tokenizer is False:
            logger.warning(
                "%s has no tokenizer.json, so the run's checkpoints will have no tokenizer", type(tokenizer).__name__
            )


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The resources that a run uses. `resumed` is None for a new run."""

    manager: RunCheckpoints
    client: tinker.TrainingClient
    tokenizer: Any
    resumed: Resumed | None

    @property
    def step(self) -> int:
        return 0 if self.resumed is None else self.resumed.step


@contextmanager
def opened(config: RunConfig, digest: str) -> Iterator[OpenRun]:
    """Open the run. At the end of the context, wait for the last save and close the session.

    `digest` is the digest of the data.

    Raises ServerNotReady, the errors of the SDK, and BadConfig or BadData if the run started with other settings or
    data.
    """
    claim_folder(config, digest)
    base_url, api_key = base_url_from_environment(), api_key_from_environment()
    require_server(config.model, base_url, api_key)
    tokenizer = _found_tokenizer(config, base_url, api_key)
    # Without a URL the SDK would use the vendor's server.
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
    """Write the settings and the digest of the data to the folder of the run.

    Raises BadConfig and BadData if the folder has checkpoints of a run with other settings or data.
    """
    settings, data = config.out / CONFIG_FILE, config.out / DATA_DIGEST_FILE
    if settings.exists() and data.exists() and CheckpointStore(str(config.out / CHECKPOINTS)).steps():
        require_same(config, settings.read_text(), settings)
        if data.read_text() != digest:
            raise BadData(f"the data differs from the data of the run in {config.out}: choose another out")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        write_whole(settings, to_yaml(config))
        write_whole(data, digest)
    except OSError as error:
        raise BadConfig(f"out is {config.out}, which cannot be written: {error.strerror}") from error


def require_server(model: str, base_url: str, api_key: str | None) -> None:
    """Raise ServerNotReady if the server does not serve the model.

    The message says how to start a server with this model.
    """
    try:
        with Api(base_url, api_key) as api:
            served = [model.name for model in api.served_models()]
    except Unreachable as error:
        raise ServerNotReady(f"{error}; run `tinsmith serve --model {model}` to start one on this machine") from error
    except ApiError as error:
        raise ServerNotReady(f"{error}; run `tinsmith doctor` to find out why") from error
    if model not in served:
        raise ServerNotReady(f"{api.base_url} does not serve {model}; it serves {', '.join(served) or 'nothing'}")


def _new_client(service: tinker.ServiceClient, config: RunConfig) -> tinker.TrainingClient:
    return service.create_lora_training_client(
        config.model, rank=config.rank, seed=config.seed, user_metadata=_user_metadata(config)
    ).result()


def _user_metadata(config: RunConfig) -> dict[str, str]:
    """Return the metadata of the training run, as shown by `tinker run info`.

    A finished run that is started again trains nothing. So the training run of a finished run is left out of the
    server's list.
    """
    named = {"name": config.name or str(config.out)}
    return named | {PURPOSE: "summary"} if _is_finished(config) else named


def _is_finished(config: RunConfig) -> bool:
    """Return whether the summary belongs to the newest checkpoint of the run."""
    store = CheckpointStore(str(config.out / CHECKPOINTS))
    summary, steps = config.out / SUMMARY, store.steps()
    if not steps or not summary.exists():
        return False
    try:
        return bool(json.loads(summary.read_text()).get("state") == store.metadata(steps[-1]).state_path)
    except (ValueError, CheckpointDamaged):
        return False


def _found_tokenizer(config: RunConfig, base_url: str, api_key: str | None) -> Any | None:
    """Return the tokenizer. None means that the SDK looks for the tokenizer."""
    if config.tokenizer is not None:
        return _tokenizer_at(config.tokenizer)
    try:
        return load_tokenizer(config.model, base_url, api_key)
    except TokenizerError as error:
        raise BadConfig(f"{error}, or set tokenizer to its folder or hub name") from error
    except ApiError as error:
        raise ServerNotReady(f"the tokenizer of {config.model} cannot be fetched: {error}") from error


def _tokenizer_of(client: tinker.TrainingClient, config: RunConfig) -> Any:
    try:
        return client.get_tokenizer()
    except (OSError, ValueError) as error:
        raise BadConfig(f"there is no tokenizer for {config.model}: set tokenizer to its folder or hub name") from error


def _tokenizer_at(location: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError) as error:
        raise BadConfig(f"tokenizer is {location!r}, which is not a readable tokenizer") from error
