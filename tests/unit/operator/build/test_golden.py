"""The objects of sessions and pools: three in full, the others as differences from one of these.

tests/cluster/crd/ tests that an API server accepts them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.golden import assert_golden
from support.operator.built_pools import BUILT_POOLS
from support.operator.built_sessions import BUILT

GOLDEN = Path(__file__).parent / "golden"
BUILDS = {**BUILT, **BUILT_POOLS}
COMPLETE = {"pool": "pool-minimal", "two-nodes": "nemo-rl-two-nodes", "": "minimal"}


@pytest.mark.parametrize("name", COMPLETE.values())
def test_the_objects_of_a_session_or_pool_are_as_reviewed(name: str) -> None:
    assert_golden(GOLDEN / f"{name}.yaml", BUILDS[name].objects())


@pytest.mark.parametrize("name", sorted(BUILDS.keys() - set(COMPLETE.values())))
def test_the_objects_of_another_kind_differ_as_reviewed(name: str) -> None:
    base = next(base for kind, base in COMPLETE.items() if kind in name)
    assert_golden(GOLDEN / f"{name}.diff", BUILDS[name].objects(), BUILDS[base].objects())


def test_every_golden_file_has_its_session_or_pool() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(BUILDS)
