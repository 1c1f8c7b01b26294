"""The retries during a storage outage: which calls, how often and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.errors import ServerError, StorageUnavailable
from tinsmith_trainer.training.retries import (
    NEED_STORAGE,
    RELEASE_RETRY_SECONDS,
    STORAGE_WAIT_SECONDS,
    final_message,
    retry_seconds,
)

Kind = worker_pb2.OperationKind
AWAY = StorageUnavailable("The checkpoint a could not be saved to s3://b: no connection")
seconds = st.floats(0, 2 * STORAGE_WAIT_SECONDS)


@pytest.mark.parametrize("kind", NEED_STORAGE, ids=Kind.Name)
def test_saves_and_loads_are_tried_again_until_their_time_is_over(kind: Kind.ValueType) -> None:
    waited, tries = 0.0, 0
    while (pause := retry_seconds(kind, AWAY, waited)) is not None:
        assert pause > 0
        waited, tries = waited + pause, tries + 1
    assert waited == STORAGE_WAIT_SECONDS
    assert tries == 30


@given(error=st.sampled_from([AWAY, ServerError("read-only"), RuntimeError("a fault of ours")]), waited=seconds)
def test_a_release_is_retried_without_a_limit(error: Exception, waited: float) -> None:
    assert retry_seconds(Kind.RELEASE_MODEL, error, waited) == RELEASE_RETRY_SECONDS


def test_a_failed_wait_reports_its_duration_and_the_remedy() -> None:
    assert final_message(Kind.SAVE_WEIGHTS, AWAY) == (
        "The checkpoint a could not be saved to s3://b: no connection. It was tried again for 300 s. "
        "Send the request again when the storage answers."
    )
    assert final_message(Kind.SAVE_WEIGHTS, ServerError("read-only.")) == "read-only."
