"""Names that cannot be promoted or rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from support.server.store_records import NOW, a_checkpoint
from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.checkpoints.promotions import NAMES_PER_TENANT, Promotions
from tinsmith_server.store.records import Checkpoint, Promotion

PATH = "tinker://session-1:train:0/sampler_weights/first"
FIRST = Promotion("ada", "prod", 1, PATH, NOW)


class Rows:
    """The promotions of a tenant, newest first; none can be added."""

    def __init__(self, *history: Promotion, names: int = 0) -> None:
        self.history, self.names = history, names

    async def promotion(self, _tenant: str, _name: str) -> Promotion | None:
        return self.history[0] if self.history else None

    async def promotions_of(self, _tenant: str, _name: str) -> Sequence[Promotion]:
        return self.history

    async def list_promotions(self, _tenant: str) -> Sequence[Promotion]:
        return [replace(FIRST, name=f"name-{number}") for number in range(self.names)]


class Fleet:
    """A fleet that serves one base model, `tiny`."""

    def model(self, name: str) -> object:
        return object() if name == "tiny" else None


class Lookup:
    async def readable(self, _tenant: str, _path: str, _type: str) -> Checkpoint:
        return a_checkpoint(type="sampler")


def promotions(rows: Rows) -> Promotions:
    return Promotions(cast(Any, rows), cast(Any, Fleet()), cast(Any, Lookup()))


@pytest.mark.parametrize(
    ("name", "names", "message"),
    [
        ("tiny", 0, "tiny is the name of a base model: choose another name"),
        ("-prod", 0, "'-prod' is not a valid name"),
        ("prod", NAMES_PER_TENANT, f"you have {NAMES_PER_TENANT} names, which is the limit: remove one first"),
    ],
)
async def test_a_name_that_cannot_be_promoted_is_refused_with_what_to_do(name: str, names: int, message: str) -> None:
    with pytest.raises(Unprocessable, match=message):
        await promotions(Rows(names=names)).promote("ada", name, PATH)


@pytest.mark.parametrize(
    ("history", "expected", "message"),
    [
        ([FIRST], None, "prod had no path before tinker://.*/first: promote another checkpoint instead"),
        ([replace(FIRST, number=30, before=9)], None, "the path of prod before tinker://.*/first is no longer kept"),
        ([replace(FIRST, number=3), FIRST], 2, "the last change of prod is number 3 now, not 2"),
    ],
    ids=["first", "forgotten", "changed"],
)
async def test_a_rollback_without_a_known_path_is_refused_with_the_reason(
    history: list[Promotion], expected: int | None, message: str
) -> None:
    with pytest.raises(Unprocessable, match=message):
        await promotions(Rows(*history)).roll_back("ada", "prod", expected)
