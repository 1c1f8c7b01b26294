"""The results that a worker keeps in memory stay within their bytes, whatever the operations came to."""

from __future__ import annotations

import pytest
from tinsmith_trainer.errors import Failure
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.worker.service import RESULT_ENTRY_BYTES, ResultCache

MESSAGE = "datum 0: the loss is not finite" * 8
FAILED = OperationResult(None, protobuf=False, failure=Failure("user", MESSAGE))
RESULTS = {
    "failed": FAILED,
    "succeeded": OperationResult(bytes(len(MESSAGE)), protobuf=False, failure=None),
    "empty": OperationResult(b"", protobuf=False, failure=None),
    "forgotten by the journal": OperationResult(None, protobuf=False, failure=None),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=list(RESULTS))
def test_only_the_latest_results_are_kept(result: OperationResult) -> None:
    cache = ResultCache(100 * RESULT_ENTRY_BYTES)
    for seq_id in range(1000):
        cache.put(("m", seq_id), result)

    kept = [seq_id for seq_id in range(1000) if cache.get(("m", seq_id)) is not None]

    assert 50 <= len(kept) <= 100
    assert kept == list(range(1000 - len(kept), 1000))


def test_the_latest_result_is_kept_however_large_it_is() -> None:
    """Asked for in a loop, it would be read each time by the thread that all submissions wait for."""
    cache = ResultCache(1000)
    large = OperationResult(bytes(5000))
    cache.put(("m", 1), RESULTS["succeeded"])
    cache.put(("m", 2), large)
    assert cache.get(("m", 2)) is large
    assert cache.get(("m", 1)) is None
    cache.put(("m", 3), RESULTS["empty"])
    assert cache.get(("m", 2)) is None
