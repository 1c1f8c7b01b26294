"""Requests for models that no worker may train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from tinsmith_server.fleet.base import ServedModel
from tinsmith_server.services.training.model_creation import InvalidModelRequest, check_rank, find_served

TRAINED = ServedModel("tiny", "tiny-1", max_rank=8)
SAMPLED = ServedModel("big", "big-1", training=False)


class Fleet:
    def __init__(self, *models: ServedModel) -> None:
        self.models: Sequence[ServedModel] = models

    def model(self, name: str) -> ServedModel | None:
        return next((one for one in self.models if one.name == name), None)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([SAMPLED], "big is served for sampling only; ask an administrator to add a TrainingSession for it"),
        ([TRAINED], "this server does not serve the base model 'big'; it serves tiny"),
        ([], "this server does not serve the base model 'big'; it serves no model at all"),
    ],
    ids=["sampling-only", "unknown", "none"],
)
def test_a_base_model_that_is_not_trained_here_is_refused_with_what_is_served(
    models: list[ServedModel], message: str
) -> None:
    with pytest.raises(InvalidModelRequest, match=message):
        find_served(cast(Any, Fleet(*models)), "big")


def test_a_rank_above_the_limit_of_the_model_is_refused_with_the_limit() -> None:
    check_rank(TRAINED, 8)
    check_rank(SAMPLED, 512)
    with pytest.raises(InvalidModelRequest, match=r"lora_config\.rank: 9 is above 8, the limit of tiny"):
        check_rank(TRAINED, 9)
