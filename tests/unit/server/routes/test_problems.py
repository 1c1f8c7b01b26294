"""The table of errors and statuses."""

from __future__ import annotations

import pytest
from tinsmith_server import errors
from tinsmith_server.errors import TinsmithError
from tinsmith_server.routes.http.problems import HTTP_STATUS, http_status
from tinsmith_server.store.connection import BadStoreUrl, StoreUnavailable


def all_errors(kind: type[TinsmithError] = TinsmithError) -> list[type[TinsmithError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_that_the_sdk_takes_well(kind: type[TinsmithError]) -> None:
    status = http_status(kind("what happened"))
    assert status in HTTP_STATUS.values()
    # Only calls that no SDK makes raise Conflict.
    assert status not in {400, 402, 408} | ({409} if kind is not errors.Conflict else set())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.WorkerUnstartable("x"), 503),
        (errors.WorkerUnavailable("x"), 503),
        (StoreUnavailable("x"), 503),
        (BadStoreUrl("x"), 500),
    ],
)
def test_the_nearest_class_decides(error: TinsmithError, status: int) -> None:
    assert http_status(error) == status
