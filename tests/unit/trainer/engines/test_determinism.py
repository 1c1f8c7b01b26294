"""Exact numerics on a GPU start only where a repeated step has equal bits."""

from __future__ import annotations

import pytest
from support.engine.reference import ReferenceEngine
from support.engine.rounding import RoundingEngine
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.engines.peft.determinism import check_repeats
from tinsmith_trainer.errors import ServerError


def test_an_engine_that_repeats_its_bits_passes_and_keeps_no_adapter() -> None:
    engine = ReferenceEngine(adapter_slots=1)
    check_repeats(engine)
    check_repeats(engine)


def test_an_engine_that_rounds_differently_is_refused_with_the_flag_to_use() -> None:
    engine: Engine = RoundingEngine("reference", 1, 16)
    with pytest.raises(ServerError, match=r"--numerics exact.*other bits.*Use --numerics fast"):
        check_repeats(engine)
