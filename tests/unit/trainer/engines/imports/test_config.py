"""Every field of PEFT's LoraConfig has a place in one of the tables: honoured, harmless, or refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest
from peft import LoraConfig
from tinsmith_trainer.engines.imports.config import (
    CONVERTED_INITIALIZATIONS,
    HARMLESS,
    HONOURED,
    REFUSED,
    read_rank_and_alpha,
)
from tinsmith_trainer.errors import CheckpointInvalid


def config_of(**fields: object) -> bytes:
    return json.dumps({"r": 4, "lora_alpha": 8, **fields}).encode()


def test_the_tables_have_each_field_of_the_installed_peft_once_and_no_other() -> None:
    assert sorted([*HONOURED, *HARMLESS, *REFUSED]) == sorted(field.name for field in dataclasses.fields(LoraConfig))


def test_variants_that_peft_marks_as_such_are_refused() -> None:
    marked = {field.name for field in dataclasses.fields(LoraConfig) if field.metadata.get("is_lora_variant")}
    assert marked
    assert marked <= REFUSED.keys()


@pytest.mark.parametrize("field", REFUSED)
def test_each_refused_field_is_named_where_it_is_set_and_allowed_where_it_is_not(field: str) -> None:
    with pytest.raises(CheckpointInvalid, match=rf"\({field}\)"):
        read_rank_and_alpha(config_of(**{field: [1]}))
    for value in (None, False, []):
        assert read_rank_and_alpha(config_of(**{field: value})) == (4, 8.0)


@pytest.mark.parametrize("name", [*CONVERTED_INITIALIZATIONS, "loftq", "pissa_niter_4", "", 1, [], {"a": 1}])
def test_initializations_that_may_change_the_base_are_refused(name: object) -> None:
    with pytest.raises(CheckpointInvalid, match="init_lora_weights is"):
        read_rank_and_alpha(config_of(init_lora_weights=name))


def test_an_unknown_field_is_refused_unless_it_is_null() -> None:
    assert read_rank_and_alpha(config_of(later=None)) == (4, 8.0)
    for value in (False, 0, "", "on", {}):
        with pytest.raises(CheckpointInvalid, match="the field 'later' is unknown"):
            read_rank_and_alpha(config_of(later=value))
