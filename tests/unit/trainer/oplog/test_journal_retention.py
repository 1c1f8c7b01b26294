"""The journal forgets nothing that was promised, and no sequence number of an operation."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.disk.free_space import DiskRoom
from tinsmith_trainer.errors import Failure
from tinsmith_trainer.oplog import journal_retention, journal_tables, result_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_retention import JournalRetention
from tinsmith_trainer.oplog.journal_retention import Retention as OfAll
from tinsmith_trainer.oplog.journal_tables import Database, Operation, OperationResult, StoredModel
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.oplog.tidying import CLOCK_TOLERANCE_SECONDS, KEEP_RESULTS_SECONDS, SteadyClock, Tidying

Retention = partial(OfAll, closed_models=10**9)
MODEL = "sess:train:0"
NOW = 1_000_000.0
FAILED = Failure("user", "no")


@dataclass(frozen=True, slots=True)
class Row:
    """`age_seconds`: since it had its result; None: it has none yet."""

    seq_id: int
    age_seconds: float | None = 100.0
    result_bytes: int = 10
    late: bool = False


class InMemory(Journal):
    """Keeps nothing; can be cut off before a write, as a process can."""

    def __init__(self) -> None:
        super().__init__(Path(":memory:"))
        self.writes_left = math.inf
        self.rows_changed: list[int] = []

    def write(self, run: Callable[[Database], Any], *, uses_reserve: bool = False) -> Future[Any]:
        self.writes_left -= 1
        if self.writes_left < 0:
            raise InterruptedError

        def counted(db: Database) -> Any:
            before = db.total_changes()
            result = run(db)
            self.rows_changed.append(db.total_changes() - before)
            return result

        return super().write(counted, uses_reserve=uses_reserve)


@contextmanager
def journal_of(
    rows: Sequence[Row], applied: int, model_id: str = MODEL, phase: journal_tables.ModelPhase = "live"
) -> Iterator[InMemory]:
    journal = InMemory()
    journal.write(lambda db: fill(db, rows, applied, model_id, phase)).result()
    journal.rows_changed.clear()
    yield journal
    journal.close()


def fill(
    db: Database,
    rows: Sequence[Row],
    applied: int,
    model_id: str,
    phase: journal_tables.ModelPhase = "live",
    tenant: str = "",
) -> None:
    journal_tables.insert_model(db, model_id, tenant)
    journal_tables.set_model_phase(db, model_id, phase)
    for row in rows:
        operation = Operation(model_id, row.seq_id, worker_pb2.OPTIM_STEP, False, NOW - 10_000)
        finished_at = NOW - (row.age_seconds or 0)
        journal_tables.insert_operation(db, operation, b"body", FAILED if row.late else None, finished_at)
        if not row.late and row.age_seconds is not None:
            result = OperationResult(bytes(row.result_bytes), event_id=0)
            result_tables.record_result(db, model_id, row.seq_id, result, finished_at)
    result_tables.record_snapshot(db, model_id, applied, "snapshot", "digest")


def forget(journal: Journal, retention: OfAll) -> list[str]:
    return asyncio.run(JournalRetention(journal).round(retention, 0, lambda seconds: NOW - seconds))


def kept(journal: Journal) -> list[int]:
    return [
        seq_id for (seq_id,) in journal.read(lambda db: db.execute("SELECT seq_id FROM operations").fetchall()).result()
    ]


def known(journal: Journal) -> tuple[set[int], list[int]]:
    """Return, as a start reads them, the finished numbers and those of pending operations."""

    def read(db: Database) -> tuple[set[int], list[int]]:
        [model] = journal_tables.read_models(db)
        unsettled = [stored.operation.seq_id for stored in journal_tables.read_unsettled(db, model)]
        return numbers_of(db, model), unsettled

    return journal.read(read).result()


def numbers_of(db: Database, model: StoredModel) -> set[int]:
    return {number for first, last in journal_tables.read_settled(db, model) for number in range(first, last + 1)}


# ---- the rule


@st.composite
def histories(draw: st.DrawFn) -> list[Row]:
    """Numbers with gaps, results of any age, some of them late, some still to come."""
    numbers = draw(st.lists(st.integers(0, 30), unique=True))
    ages = st.one_of(st.none(), st.integers(0, 1000))
    rows = [Row(number, draw(ages), draw(st.integers(0, 50)), draw(st.booleans())) for number in sorted(numbers)]
    return [Row(row.seq_id, row.age_seconds or 1.0, 0, late=True) if row.late else row for row in rows]


retentions = st.builds(
    Retention,
    seconds=st.integers(0, 1000),
    result_bytes=st.integers(0, 500),
    operations=st.integers(0, 10),
    least_seconds=st.integers(0, 1000),
)


@given(histories(), st.integers(-1, 30), retentions)
def test_no_number_is_forgotten_and_nothing_that_a_start_needs(rows: list[Row], applied: int, retention: OfAll) -> None:
    with journal_of(rows, applied) as journal:
        before = known(journal)
        forget(journal, retention)
        assert known(journal) == before
        assert set(before[1]) <= set(kept(journal))


@given(histories(), st.integers(-1, 30), retentions)
def test_a_row_is_deleted_only_when_its_result_is_no_longer_promised(
    rows: list[Row], applied: int, retention: OfAll
) -> None:
    with journal_of(rows, applied) as journal:
        forget(journal, retention)
        gone = [row for row in rows if row.seq_id not in kept(journal)]
    below = [row.seq_id for row in rows if row.seq_id <= applied]
    newest = below[max(len(below) - retention.operations, 0) :]
    for row in gone:
        assert row.age_seconds is not None
        expired = row.age_seconds >= retention.seconds
        crowded_out = row.seq_id not in newest and row.age_seconds >= retention.least_seconds
        assert expired or crowded_out


@st.composite
def tenants(draw: st.DrawFn) -> dict[str, list[Row]]:
    """Histories of three models, without late operations or such as have no result, by tenant."""
    return {
        tenant: [
            Row(number, draw(st.integers(0, 1000)), draw(st.integers(1, 50)))
            for number in range(draw(st.integers(0, 12)))
        ]
        for tenant in ("a", "b", "c")
    }


@given(tenants(), st.integers(0, 400), st.integers(0, 1000))
def test_results_that_do_not_fit_go_by_tenant_the_oldest_of_the_largest_first(
    histories: dict[str, list[Row]], budget: int, least_seconds: int
) -> None:
    with journal_of([], -1) as journal:
        for tenant, rows in histories.items():
            journal.write(partial(fill, rows=rows, applied=-1, model_id=f"model-{tenant}", tenant=tenant)).result()
        forget(journal, Retention(math.inf, budget, operations=10**9, least_seconds=least_seconds))
        left = {tenant: readable(journal, f"model-{tenant}") for tenant in histories}
    part = budget // len(histories)
    for tenant, rows in histories.items():
        old = [row.seq_id for row in rows if (row.age_seconds or 0.0) >= least_seconds]
        gone = [row.seq_id for row in rows if row.seq_id not in left[tenant]]
        assert gone == old[: len(gone)], "the oldest first, by the order in which they came, and none that is young"
        if bytes_of(rows) <= part or sum(map(bytes_of, histories.values())) <= budget:
            assert gone == []
    if not least_seconds:
        assert (
            sum(row.result_bytes for tenant, rows in histories.items() for row in rows if row.seq_id in left[tenant])
            <= budget
        )


def bytes_of(rows: Sequence[Row]) -> int:
    return sum(row.result_bytes for row in rows)


@given(histories(), st.integers(-1, 30), retentions, st.integers(0, 6))
def test_a_round_that_was_cut_off_ends_alike_in_the_next(
    rows: list[Row], applied: int, retention: Retention, writes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_retention, "ROWS_IN_A_STEP", 3)
        with journal_of(rows, applied) as undisturbed, journal_of(rows, applied) as journal:
            forget(undisturbed, retention)
            journal.writes_left = writes
            try:
                forget(journal, retention)
            except InterruptedError:
                journal.writes_left = math.inf
                forget(journal, retention)
            assert kept(journal) == kept(undisturbed)
            assert known(journal) == known(undisturbed)


# ---- in examples


def readable(journal: Journal, model_id: str = MODEL) -> list[int]:
    query = "SELECT seq_id FROM operations WHERE model_id = ? AND result IS NOT NULL ORDER BY seq_id"
    return [seq_id for (seq_id,) in journal.read(lambda db: db.execute(query, (model_id,)).fetchall()).result()]


@pytest.mark.parametrize("is_short", [False, True])
def test_results_below_the_minimum_age_are_removed_only_when_disk_space_is_short(is_short: bool) -> None:
    rows = [Row(number, age_seconds=1000.0 - 50 * number, result_bytes=100) for number in range(5)]
    with journal_of(rows, applied=-1) as journal:
        forget(journal, Retention(math.inf, 100, operations=100, least_seconds=900.0, is_short=is_short))
        assert readable(journal) == ([4] if is_short else [3, 4])


def test_a_clock_that_was_set_back_makes_no_new_result_the_first_to_go() -> None:
    """The older ones say that they finished later."""
    rows = [*(Row(number, age_seconds=1000.0) for number in range(4)), *(Row(number, 4600.0) for number in (4, 5))]
    with journal_of(rows, applied=-1) as journal:
        forget(journal, Retention(math.inf, 20, operations=100, least_seconds=900.0))
        assert readable(journal) == [4, 5]


@pytest.mark.core("durability 10")
async def test_a_clock_that_is_set_forward_drops_nothing(tmp_path: Path) -> None:
    """A wrong time server or a machine that wakes after three days sets a clock forward."""
    now, ran = [NOW], [0.0]
    clock = SteadyClock(lambda: now[0], lambda: ran[0])
    rows = [Row(0, age_seconds=5.0), Row(1, age_seconds=0.0)]
    with journal_of(rows, applied=1) as journal:
        queues = ModelQueues(journal, 1, lambda *_: None)
        tidying = Tidying(journal, queues, SnapshotFolder(tmp_path), DiskRoom(tmp_path), clock)
        now[0] += KEEP_RESULTS_SECONDS + 3600
        await tidying.round(0)
        assert readable(journal) == [0, 1]
        ran[0] += KEEP_RESULTS_SECONDS - 3.0
        await tidying.round(0)
        assert readable(journal) == [1]


AGES = (0.0, 900.0, KEEP_RESULTS_SECONDS)


@given(st.lists(st.tuples(st.floats(-(10.0**6), 10.0**6), st.floats(0.0, 10.0**4)), min_size=1))
def test_no_clock_makes_a_result_older_than_the_time_in_which_the_process_ran(
    moves: list[tuple[float, float]],
) -> None:
    now, ran = [NOW], [0.0]
    clock = SteadyClock(lambda: now[0], lambda: ran[0])
    finished = [(NOW, 0.0)]
    for jump, seconds in moves:
        now[0] += jump + seconds
        ran[0] += seconds
        clock.ago(0.0)
        finished.append((now[0], ran[0]))
        for age in AGES:
            assert all(at > clock.ago(age) - 1e-3 for at, ran_then in finished if ran[0] - ran_then < age)


@given(st.lists(st.tuples(st.floats(0.0, 10.0**6), st.floats(0.0, 10.0**4)), min_size=1))
def test_results_after_a_clock_jump_are_kept_no_longer_than_results_before_it(
    jumps: list[tuple[float, float]],
) -> None:
    """A machine that sleeps at night would keep more with each day."""
    now, ran = [NOW], [0.0]
    clock = SteadyClock(lambda: now[0], lambda: ran[0])
    for jump, seconds in jumps:
        now[0] += jump + seconds
        ran[0] += seconds
        clock.ago(0.0)
    for age in AGES:
        finished_at = now[0]
        now[0] += age + CLOCK_TOLERANCE_SECONDS
        ran[0] += age + CLOCK_TOLERANCE_SECONDS
        assert finished_at <= clock.ago(age) + 1e-3


def test_an_operation_that_waits_for_its_late_answer_holds_back_only_later_ones() -> None:
    rows = [Row(1), Row(2, age_seconds=None), Row(3)]
    with journal_of(rows, applied=3) as journal:
        forget(journal, Retention(0.0, 2**40, operations=0, least_seconds=0.0))
        assert kept(journal) == [2, 3]
        assert known(journal) == ({1, 3}, [2])


def test_an_operation_without_a_row_has_a_result_that_is_gone() -> None:
    with journal_of([Row(1)], applied=1) as journal:
        forget(journal, Retention(0.0, 2**40, operations=0, least_seconds=0.0))
        assert journal.read(lambda db: journal_tables.read_result(db, MODEL, 1)).result() == OperationResult()


def test_all_records_of_a_released_model_are_removed_with_its_last_row() -> None:
    rows = [Row(0, age_seconds=100.0), Row(1, age_seconds=10.0)]
    with journal_of(rows, applied=0, phase="released") as journal:
        assert forget(journal, Retention(50.0, 2**40, operations=100, least_seconds=0.0)) == []
        assert kept(journal) == [1]
        assert forget(journal, Retention(5.0, 2**40, operations=100, least_seconds=0.0)) == [MODEL]
        assert journal.read(journal_tables.read_models).result() == []
        assert not journal.read(lambda db: db.execute("SELECT * FROM forgotten").fetchall()).result()


def test_the_newest_closed_models_of_a_tenant_stay_and_all_models_of_another_tenant() -> None:
    """Creates that fail cost a client nothing, and every one is a model."""
    with journal_of([], -1) as journal:
        for number in range(6):
            for tenant in ("many", "few") if number < 2 else ("many",):
                rows = [Row(0, age_seconds=1000.0)]
                fill_one = partial(fill, rows=rows, applied=0, model_id=f"{tenant}-{number}", tenant=tenant)
                journal.write(partial(fill_one, phase="released")).result()
        journal.write(
            partial(fill, rows=[Row(0, age_seconds=10.0)], applied=0, model_id="young", tenant="few")
        ).result()
        retention = Retention(math.inf, 2**40, operations=100, least_seconds=900.0, closed_models=3)
        assert forget(journal, retention) == ["many-0", "many-1", "many-2"]
        assert forget(journal, replace(retention, closed_models=0, least_seconds=2000.0)) == []


# ---- in steps


def test_much_is_forgotten_in_transactions_that_are_each_small() -> None:
    rows = [Row(number) for number in range(1000)]
    with journal_of(rows, applied=999) as journal:
        forget(journal, Retention(0.0, 2**40, operations=0, least_seconds=0.0))
        assert kept(journal) == []
        assert max(journal.rows_changed) <= journal_retention.ROWS_IN_A_STEP + 2


def test_results_that_are_large_are_forgotten_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_retention, "BYTES_IN_A_STEP", 100)
    rows = [Row(number, result_bytes=60) for number in range(20)]
    with journal_of(rows, applied=9) as journal:
        forget(journal, Retention(0.0, 2**40, operations=0, least_seconds=0.0))
        assert kept(journal) == list(range(10, 20))
        assert max(journal.rows_changed) <= 2 + 2


async def test_a_concurrent_write_waits_for_one_step_and_not_for_the_whole_round() -> None:
    with journal_of([Row(number) for number in range(5000)], applied=4999) as journal:
        nothing_kept = Retention(0.0, 2**40, operations=0, least_seconds=0.0)
        under_way = asyncio.create_task(JournalRetention(journal).round(nothing_kept, 0, lambda seconds: NOW - seconds))
        while not journal.rows_changed:
            await asyncio.sleep(0)
        await asyncio.wrap_future(journal.write(lambda db: journal_tables.set_meta(db, "another", "1")))
        assert not under_way.done()
        await under_way
