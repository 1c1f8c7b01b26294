"""Recordings of agents: a base URL for any OpenAI client, and the recorded tokens as data for training.

The server records the tokens, logprobs and weights of each turn, so nothing is tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tinker import types

from tinsmith.training.errors import RecordingRefused, TrainingError
from tinsmith.training.server_calls import Service, refusal, send

RECORDINGS = "/api/v1/recordings"
ALL = 1000

Rewards = float | Mapping[int, float]
"""One reward for all sequences of a recording, or a reward for each sequence by the number of the sequence."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """An answer of the model. The tokens from `start` to before `end` of the sequence were sampled in this turn.

    `model_path` is the saved sampler or the base model, and `weights_digest` is the digest of the sampler's manifest.
    """

    turn: int
    start: int
    end: int
    reason: str
    model_path: str
    weights_digest: str
    finish_reason: str
    sampling_params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """The tokens that the model has read and sampled, from the beginning of a conversation to its last answer.

    `mask` is 1 for each sampled token, except for tokens that have mask 1 in another sequence. `reason` says why the
    sequence leaves the others. A sequence is `abandoned` if the agent repeated the request and continued with the
    other answer.
    """

    sequence: int
    reason: str
    abandoned: bool
    tokens: Sequence[int]
    logprobs: Sequence[float]
    mask: Sequence[int]
    turns: Sequence[RecordedTurn]

    def datum(self, advantage: float) -> types.Datum:
        """Return the sequence for `importance_sampling`, `ppo` and other losses with advantages.

        Tokens with mask 0 have the advantage 0.
        """
        advantages = [advantage if mask else 0.0 for mask in self.mask]
        inputs: Any = {
            "target_tokens": list(self.tokens[1:]),
            "logprobs": list(self.logprobs[1:]),
            "advantages": advantages[1:],
        }
        return types.Datum(model_input=types.ModelInput.from_ints(list(self.tokens[:-1])), loss_fn_inputs=inputs)


class Recording:
    """An open recording. In a `with` block, the recording is deleted at the end.

    Give `base_url`, a key of the server and any model name to the agent's OpenAI client. The methods wait for the
    server: in a coroutine, call them with `asyncio.to_thread`. They raise RecordingRefused for a recording that was
    deleted or has expired, and the errors of the SDK.
    """

    def __init__(self, description: Mapping[str, Any], service: Service | None) -> None:
        self.id = str(description["recording_id"])
        self.model = str(description["model"])
        self.base_url = str(description["base_url"])
        self._service = service

    def sequences(self) -> list[RecordedSequence]:
        """Return the sequences that are recorded until now, in the order of their last turns."""
        return [_sequence(one) for one in _send(self._service, "GET", self._address)["sequences"]]

    def datums(self, reward: Rewards, *, baseline: float = 0.0, abandoned: bool = False) -> list[types.Datum]:
        """Return one datum for each sequence. The advantage of its sampled tokens is the reward minus the baseline.

        Sequences without a reward in a mapping are left out. Abandoned sequences are left out unless `abandoned`.
        """
        return _datums(self.sequences(), reward, baseline, abandoned=abandoned)

    def delete(self) -> None:
        """Delete the recording from the server."""
        _send(self._service, "DELETE", self._address)

    @property
    def _address(self) -> str:
        return f"{RECORDINGS}/{self.id}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()


def open_recording(
    model: str,
    *,
    max_turns: int | None = None,
    max_bytes: int | None = None,
    ttl_seconds: int | None = None,
    service: Service | None = None,
) -> Recording:
    """Open a recording of a base model, a promoted name, or a saved sampler: `tinker://RUN/sampler_weights/NAME`.

    The server deletes the recording after `ttl_seconds`. The default of `service` is a client with the server and key
    from the environment. Raises RecordingRefused with the server's message, NotOffered if the server has no recordings,
    and the errors of the SDK.
    """
    limits = {"max_turns": max_turns, "max_bytes": max_bytes, "ttl_seconds": ttl_seconds}
    body = {"model": model} | {name: value for name, value in limits.items() if value is not None}
    return Recording(_send(service, "POST", RECORDINGS, body), service)


def recordings(*, service: Service | None = None) -> list[Recording]:
    """Return your newest recordings, newest first, at most 1000. Raises NotOffered."""
    listed = _send(service, "GET", RECORDINGS, options={"params": {"limit": ALL}})["recordings"]
    return [Recording(one, service) for one in listed]


def group_datums(group: Iterable[tuple[Recording, float]], *, abandoned: bool = False) -> list[types.Datum]:
    """Return the data of several recordings of one task, each with its reward.

    The baseline is the mean of the rewards. If all rewards are equal, no data are returned, because no recording is
    better than another. Raises the errors of `Recording.sequences`.
    """
    members = list(group)
    rewards = [_finite(reward) for _, reward in members]
    if len(set(rewards)) < 2:
        return []
    mean = math.fsum(rewards) / len(rewards)
    return [
        datum for recording, reward in members for datum in recording.datums(reward, baseline=mean, abandoned=abandoned)
    ]


def _datums(
    sequences: Iterable[RecordedSequence], reward: Rewards, baseline: float, *, abandoned: bool
) -> list[types.Datum]:
    found = []
    for sequence in sequences:
        own = reward.get(sequence.sequence) if isinstance(reward, Mapping) else reward
        if own is not None and (abandoned or not sequence.abandoned):
            found.append(sequence.datum(_finite(own) - baseline))
    return found


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}; it must be a finite number")
    return reward


def _sequence(content: Mapping[str, Any]) -> RecordedSequence:
    return RecordedSequence(
        sequence=content["sequence"],
        reason=content["reason"],
        abandoned=content["abandoned"],
        tokens=content["tokens"],
        logprobs=content["logprobs"],
        mask=content["mask"],
        turns=[
            RecordedTurn(**{name: segment[name] for name in RecordedTurn.__dataclass_fields__})
            for segment in content["segments"]
        ],
    )


def _send(
    service: Service | None, method: str, address: str, body: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    return send(service, method, address, body, explain=_explained, **more)


def _explained(status: int, body: object) -> TrainingError | None:
    return refusal(
        status,
        body,
        refused=RecordingRefused,
        not_offered="this server has no recordings of agents: record the tokens of your own samples instead",
    )
