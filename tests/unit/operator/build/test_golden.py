"""What is built, whole. That an API server takes it is tested in tests/cluster/crd/."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.built_pools import BUILT_POOLS, BuiltPool
from support.built_sessions import BUILT, Built
from support.golden import assert_golden

GOLDEN = {**BUILT, **BUILT_POOLS}


@pytest.mark.parametrize(("name", "built"), GOLDEN.items(), ids=GOLDEN)
def test_the_objects_of_a_session_or_pool_are_as_reviewed(name: str, built: Built | BuiltPool) -> None:
    assert_golden(Path(__file__).parent / "golden" / f"{name}.yaml", built.objects())
