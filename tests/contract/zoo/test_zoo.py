"""The most different families of `make zoo`, in every run; models.md has the findings."""

from __future__ import annotations

import pytest
from support.zoo.checks import examine, quiet
from support.zoo.families import FAMILIES, IN_EVERY_RUN
from support.zoo.table import PAGE, memory_of, rows_of, sentences_of


@pytest.fixture(autouse=True)
def without_advice_about_kernels() -> None:
    quiet()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("model_type", IN_EVERY_RUN)
def test_a_family_trains_as_in_plain_peft_and_samples_exports_and_replays_its_adapter(model_type: str) -> None:
    found = examine(model_type)
    assert found.failures() == []
    memories, sentences = rows_of(PAGE.read_text())
    assert memory_of(found) == memories[model_type], "run `make zoo`"
    assert sentences_of(found) == sentences.get(model_type, []), "run `make zoo`"


def test_every_family_has_a_row_and_no_other_has() -> None:
    memories, sentences = rows_of(PAGE.read_text())
    assert set(memories) == set(FAMILIES), "run `make zoo`"
    assert set(sentences) <= set(memories)
    assert set(IN_EVERY_RUN) <= set(FAMILIES)
