"""What ranks that are Ray's actors answer to a call, and how the loss of one is noticed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import ray
import structlog
from ray.exceptions import RayError, RayTaskError

from tinsmith_trainer.engines.megatron.rank_group import Answer, RanksLost
from tinsmith_trainer.errors import ServerError, TrainerError

log = structlog.get_logger(__name__)

OTHERS_SECONDS = 10.0
"""How long the others may take to fail as well once one has: then they are waiting for it in vain."""


def collect(calls: Sequence[Any]) -> list[Answer]:
    """By rank. Raises RanksLost as soon as one is known to be dead, or to have failed where others wait for it."""
    answers: dict[Any, Answer] = {}
    pending, give_up_at = list(calls), math.inf
    while pending:
        timeout = None if give_up_at == math.inf else max(0.0, give_up_at - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=timeout)
        if not ready:
            why = next(answer.message for answer in answers.values() if answer.fault is not None)
            raise RanksLost(f"{len(pending)} of {len(calls)} ranks do not answer, since another one failed: {why}")
        answers[ready[0]] = _answer(ready[0])
        if answers[ready[0]].fault is not None:
            give_up_at = min(give_up_at, time.monotonic() + OTHERS_SECONDS)
    return [answers[call] for call in calls]


def _answer(call: Any) -> Answer:
    try:
        answer: Answer = ray.get(call)
    except RayError as error:
        raise RanksLost(f"A rank is gone: {error}") from error
    return answer


def start_error(error: BaseException | None) -> Exception:
    """A rank's own sentence on what is wrong with the model, where it has one; else Ray's first, and all in the log."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TrainerError):
        return cause
    log.error("ranks did not start", error=str(error))
    said = str(cause).strip().splitlines()[:1] if cause else ["some failed, and others waited for them in vain"]
    return ServerError(f"The ranks did not start: {''.join(said) or type(cause).__name__}")
