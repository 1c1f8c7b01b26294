"""The checkpoints that each SDK version can read."""

from __future__ import annotations

import pytest
from tinsmith_server.wire.ids import ALL_TYPES, known_checkpoint_types


@pytest.mark.parametrize("version", ["0.3.0", "0.9.0", "0.27.2", "0.27"])
def test_sdks_below_0_28_know_no_external_ones(version: str) -> None:
    assert known_checkpoint_types(version) == {"training", "sampler"}


@pytest.mark.parametrize("version", ["0.28.0", "0.38.0", "0.100.0", "1.0.0", "", None, "nightly", "9" * 5000 + ".1"])
def test_later_sdks_and_clients_without_a_version_see_all(version: str | None) -> None:
    assert known_checkpoint_types(version) == ALL_TYPES
