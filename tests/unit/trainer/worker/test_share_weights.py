"""The weight of a tenant's share, as a server sends it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tinsmith_rpc import SHARE_WEIGHT_METADATA
from tinsmith_trainer.worker.grpc_server import share_weight_of


@pytest.mark.parametrize(
    ("sent", "weight"),
    [("2.5", 2.5), ("0.1", 0.1), (None, 1), ("", 1), ("x", 1), ("0", 1), ("-1", 1), ("nan", 1), ("inf", 1)],
)
def test_a_weight_that_is_missing_or_impossible_is_one(sent: str | None, weight: float) -> None:
    metadata = [] if sent is None else [(SHARE_WEIGHT_METADATA, sent)]
    context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
    assert share_weight_of(context) == weight
