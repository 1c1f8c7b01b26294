"""The number of crashes at the same work, and its consequence."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.oplog import journal_tables, result_tables
from tinsmith_trainer.oplog.attempts import Attempts, verdict
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import Operation
from tinsmith_trainer.process.in_flight_marker import InFlightMarker, InFlightWork, Interruption

LIMIT = 3
KINDS = [kind for kind in worker_pb2.OperationKind.values() if kind != worker_pb2.OPERATION_KIND_UNSPECIFIED]
ANSWERED = ("replay", "restore", "snapshot")
WORKS = [
    InFlightWork("operation", "a", 1),
    InFlightWork("operation", "a", 2),
    InFlightWork("replay", "a", 1),
    InFlightWork("restore", "b", 0),
]


def operation(kind: worker_pb2.OperationKind.ValueType = worker_pb2.FORWARD_BACKWARD) -> Operation:
    return Operation("a", 1, kind, zstd=False, accepted_at=0.0)


@contextmanager
def life(folder: Path) -> Iterator[tuple[Attempts, InFlightMarker, Journal]]:
    """One process, from its start to whatever ends it."""
    journal, marker = Journal(folder / "journal"), InFlightMarker(folder / "running")
    attempts = Attempts(journal, marker, LIMIT)
    attempts.recover()
    yield attempts, marker, journal
    journal.close()
    marker.close()


def verdict_of(attempts: Attempts, work: InFlightWork, operation: Operation | None = None) -> str:
    refusal = attempts.refusal(work, operation)
    if refusal is None:
        return "run"
    return "fail" if refusal.fails else "quarantine"


def ends_at(folder: Path, work: InFlightWork) -> None:
    with life(folder) as (_, marker, _):
        marker.set(work)


@given(st.sampled_from(KINDS), st.integers(0, 5), st.integers(1, 5))
def test_an_operation_without_an_answer_fails_at_the_limit_and_a_release_waits(
    kind: worker_pb2.OperationKind.ValueType, ended: int, limit: int
) -> None:
    expected = "run" if ended < limit else "quarantine" if kind == worker_pb2.RELEASE_MODEL else "fail"
    assert verdict(InFlightWork("operation", "a", 1), kind, ended, limit) == expected


@pytest.mark.parametrize("purpose", ANSWERED)
def test_an_answered_operation_never_fails(purpose: str) -> None:
    work = InFlightWork(purpose, "a", 1)  # type: ignore[arg-type]
    assert verdict(work, worker_pb2.OPTIM_STEP, LIMIT - 1, LIMIT) == "run"
    assert verdict(work, worker_pb2.OPTIM_STEP, LIMIT, LIMIT) == "quarantine"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([None, *WORKS]), max_size=8))
def test_each_end_is_counted_once_for_the_work_that_it_came_in(ends: list[InFlightWork | None]) -> None:
    """None means that the process ended between two calls."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for work in ends:
            with life(folder) as (_, marker, _):
                if work is not None:
                    marker.set(work)
        with life(folder) as (attempts, _, _):
            for work in WORKS:
                assert (verdict_of(attempts, work, operation()) == "run") == (ends.count(work) < LIMIT)


def test_a_start_that_dies_after_it_counted_does_not_count_again(tmp_path: Path) -> None:
    ends_at(tmp_path, WORKS[0])
    for _ in range(2 * LIMIT):
        journal, marker = Journal(tmp_path / "journal"), InFlightMarker(tmp_path / "running")
        left = marker.left_behind
        assert left is not None
        journal.write(lambda db, left=left: result_tables.count_interruption(db, left)).result()  # type: ignore[misc]
        journal.close()  # and before the marker was cleared, it ended
    with life(tmp_path) as (attempts, _, journal):
        assert verdict_of(attempts, WORKS[0], operation()) == "run"
        [(count, _)] = journal.read(result_tables.read_interruptions).result().values()
        assert count == 1


def test_no_operation_of_a_shared_call_is_blamed_and_each_runs_alone_until_the_cause_is_known(tmp_path: Path) -> None:
    mine, others = WORKS[0], InFlightWork("operation", "b", 1)
    for _ in range(2 * LIMIT):
        with life(tmp_path) as (_, marker, _):
            marker.set(mine, others)
    with life(tmp_path) as (attempts, _, _):
        for work in (mine, others):
            assert attempts.is_suspect(work)
            assert verdict_of(attempts, work, operation()) == "run"
        assert not attempts.is_suspect(WORKS[1])
    for _ in range(LIMIT):
        ends_at(tmp_path, mine)
    with life(tmp_path) as (attempts, _, _):
        assert verdict_of(attempts, mine, operation()) == "fail"
        assert verdict_of(attempts, others, operation()) == "run"


def test_an_orderly_stop_forgives_all(tmp_path: Path) -> None:
    for _ in range(LIMIT):
        ends_at(tmp_path, WORKS[0])
    with life(tmp_path) as (attempts, _, _):
        assert verdict_of(attempts, WORKS[0], operation()) == "fail"
        attempts.forget_all()
        # What is asked of a snapshot at that very stop, and of an operation whose verdict was read just before.
        assert verdict_of(attempts, WORKS[0], operation()) == "run"
        assert f"ended {LIMIT} times" in attempts._failure_message(WORKS[0], operation())
    with life(tmp_path) as (attempts, _, _):
        assert verdict_of(attempts, WORKS[0], operation()) == "run"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != worker_pb2.RELEASE_MODEL])
def test_the_failure_names_the_operation_the_times_and_the_cure(
    kind: worker_pb2.OperationKind.ValueType, tmp_path: Path
) -> None:
    for _ in range(LIMIT):
        ends_at(tmp_path, WORKS[0])
    with life(tmp_path) as (attempts, _, _):
        refusal = attempts.refusal(WORKS[0], operation(kind))
    assert refusal is not None
    assert refusal.fails
    message = refusal.message
    assert message.startswith(worker_pb2.OperationKind.Name(kind).lower())
    assert "the worker's process ended 3 times" in message
    assert "lack of memory" in message
    assert "more memory" in message.rpartition("later operations continue. ")[2]


@pytest.mark.parametrize(
    ("work", "kind", "what"),
    [
        (InFlightWork("operation", "a", 1), worker_pb2.RELEASE_MODEL, "while release_model ran."),
        (InFlightWork("replay", "a", 1), worker_pb2.OPTIM_STEP, "while optim_step 1 ran again after a restart."),
        (InFlightWork("restore", "a", 4), None, "while its snapshot of operation 4 was loaded."),
    ],
)
def test_the_reason_of_a_model_that_waits_says_what_ends_and_that_nothing_is_lost(
    work: InFlightWork, kind: worker_pb2.OperationKind.ValueType | None, what: str, tmp_path: Path
) -> None:
    for _ in range(LIMIT):
        ends_at(tmp_path, work)
    with life(tmp_path) as (attempts, _, _):
        refusal = attempts.refusal(work, operation(kind) if kind else None)
    assert refusal is not None
    assert not refusal.fails
    assert what in refusal.message
    assert "Nothing is lost" in refusal.message


def test_a_snapshot_removes_the_records_of_deaths_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    works = [InFlightWork(purpose, "a", seq) for purpose in ("snapshot", "restore") for seq in (3, 5)]
    other = InFlightWork("snapshot", "b", 3)

    def fill(db: journal_tables.Database) -> None:
        for work in (*works, other):
            result_tables.count_interruption(db, Interruption(work, "life"))
        result_tables.record_snapshot(db, "a", 5, "file", "digest")

    journal.write(fill).result()
    assert set(journal.read(result_tables.read_interruptions).result()) == {works[1], works[3], other}
    journal.close()


@pytest.mark.parametrize(("ended", "expected"), [(0, "run"), (2, "run"), (3, "fail")])
def test_an_import_fails_at_the_limit(ended: int, expected: str) -> None:
    assert verdict(InFlightWork("import", "a", 0), None, ended, LIMIT) == expected


def test_a_success_forgets_the_interruptions_before_it(tmp_path: Path) -> None:
    for _ in range(LIMIT - 1):
        ends_at(tmp_path, WORKS[2])
    with life(tmp_path) as (attempts, _, _):
        attempts.succeeded(WORKS[2])
    ends_at(tmp_path, WORKS[2])
    with life(tmp_path) as (attempts, _, _):
        assert verdict_of(attempts, WORKS[2], operation()) == "run"
