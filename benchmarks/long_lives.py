"""What a long life of one model costs a worker: memory while it lives, and a start beside one with an empty journal.

The real queues and journal, without an engine: operations are accepted, take their turns, get results of 600 bytes, are
snapshot and forgotten, ten in each second of a clock that is made up. Beside it a journal that nobody has tidied,
as releases before this one left them: its first start, and what it takes to forget what is past.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.forgetting import Forgetting
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import Database, Operation, OperationResult
from tinsmith_trainer.oplog.model_queues import ModelQueues, Ready
from tinsmith_trainer.oplog.retention import Retention
from tinsmith_trainer.oplog.tidying import (
    KEEP_ALL_SECONDS,
    KEEP_CLOSED_MODELS,
    KEEP_OPERATIONS,
    KEEP_RESULT_BYTES,
    KEEP_RESULTS_SECONDS,
    TIDY_SECONDS,
)
from tinsmith_trainer.training.operation_results import Stamp, write_operation_result
from tinsmith_trainer.training.snapshotting import MOST_UNSAVED_OPERATIONS

OPERATIONS = 1_000_000
GOAL_SECONDS = 2.0
STARTS = 5
AT_ONCE = 100
PER_SECOND = 10
BODY, RESULT = bytes(400), bytes(600)
MODEL = "c0ffee00-0000-4000-8000-000000000000:train:0"
RETENTION = Retention(KEEP_RESULTS_SECONDS, KEEP_RESULT_BYTES, KEEP_OPERATIONS, KEEP_ALL_SECONDS, KEEP_CLOSED_MODELS)


@dataclass(slots=True)
class Clock:
    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class TimedJournal(Journal):
    """Knows the longest time for which one of its jobs kept everybody waiting; the sync of the disk is not counted."""

    longest_seconds = 0.0

    def read(self, run: Callable[[Database], Any]) -> Future[Any]:
        return super().read(self._timed(run))

    def write(self, run: Callable[[Database], Any], *, must_succeed: bool = False) -> Future[Any]:
        return super().write(self._timed(run), must_succeed=must_succeed)

    def _timed(self, run: Callable[[Database], Any]) -> Callable[[Database], Any]:
        def timed(db: Database) -> Any:
            started = time.perf_counter()
            try:
                return run(db)
            finally:
                self.longest_seconds = max(self.longest_seconds, time.perf_counter() - started)

        return timed


class EveryModel:
    """Has room for all."""

    def among(self, ready: Sequence[Ready]) -> tuple[Sequence[Ready], float]:
        return ready, math.inf


class Life:
    """One model's, as a worker leads it but for the engine."""

    def __init__(self, folder: Path) -> None:
        self.journal = TimedJournal(folder / "journal.sqlite")
        self.clock = Clock()
        self.longest_forgetting_seconds = 0.0
        self._queues = ModelQueues(self.journal, places=1, on_finished=lambda *_: None, clock=self.clock)
        self._next = 0
        self._tidied_at = self.clock.now

    def go_on(self, operations: int, *, tidies: bool) -> None:
        end = self._next + operations
        while self._next < end:
            numbers = range(self._next, min(self._next + AT_ONCE, end))
            self._next = numbers.stop
            for accepted in [self._accept(number) for number in numbers]:
                accepted.result()
            for number in numbers:
                self._run(number)
            self.journal.settle()
            self.clock.now += len(numbers) / PER_SECOND
            if tidies and self.clock.now - self._tidied_at >= TIDY_SECONDS:
                self.tidy()

    def tidy(self) -> None:
        self._tidied_at, self.journal.longest_seconds = self.clock.now, 0.0
        asyncio.run(Forgetting(self.journal).round(RETENTION, 0, self.clock.now))
        self.longest_forgetting_seconds = max(self.longest_forgetting_seconds, self.journal.longest_seconds)

    def _accept(self, number: int) -> Future[None]:
        kind = worker_pb2.FORWARD_BACKWARD if number else worker_pb2.CREATE_MODEL
        return self._queues.accept(Operation(MODEL, number, kind, False, self.clock.now), BODY)

    def _run(self, number: int) -> None:
        ready = self._queues.wait_for_turns(EveryModel())
        assert ready is not None
        assert not callable(ready)
        [(queue, turn, entry)] = ready
        self._queues.take_payload(entry)
        self._queues.finish(queue, turn)
        result, stamp = OperationResult(RESULT, forward_only=False), Stamp(1, self.clock.now)

        def write(db: Database) -> None:
            write_operation_result(db, entry.operation, result, stamp)
            if number % MOST_UNSAVED_OPERATIONS == 0:
                journal_tables.record_snapshot(db, MODEL, number, "snapshot", "digest")

        written = self.journal.write(write, must_succeed=True)
        written.add_done_callback(lambda _: self._queues.publish(queue, entry, None))


@dataclass(frozen=True, slots=True)
class Lived:
    """Resident memory after a tenth of the life and after all of it; the longest that forgetting held the journal."""

    early_mib: float
    late_mib: float
    longest_forgetting_ms: float
    journal_mib: float


@dataclass(frozen=True, slots=True)
class Start:
    """From opening the journal until every model is in place again, in a process that has imported everything."""

    seconds: float
    resident_mib: float


@dataclass(frozen=True, slots=True)
class Catch:
    """What a journal that was never tidied takes to be: in all, and without letting anybody through."""

    seconds: float
    longest_forgetting_ms: float


@dataclass(frozen=True, slots=True)
class Figures:
    operations: int
    life: Lived
    empty_start: Start
    start: Start
    untidied_start: Start
    catching_up: Catch
    start_after_it: Start


def live(folder: Path, operations: int, *, tidies: bool) -> Lived:
    life = Life(folder)
    life.go_on(operations // 10, tidies=tidies)
    early = resident_mib()
    life.go_on(operations - operations // 10, tidies=tidies)
    late, size = resident_mib(), life.journal.size_bytes()
    life.journal.close()
    return Lived(early, late, 1000 * life.longest_forgetting_seconds, size / 1024**2)


def start_on(folder: Path) -> Start:
    started = time.perf_counter()
    journal = Journal(folder / "journal.sqlite")
    journal.read(journal_tables.count_to_replay).result()
    queues = ModelQueues(journal, places=1, on_finished=lambda *_: None)
    assert len(queues.recover()) == 1
    seconds = time.perf_counter() - started
    resident = resident_mib()
    journal.close()
    return Start(seconds, resident)


def catch_up(folder: Path, operations: int) -> Catch:
    life = Life(folder)
    life.clock.now += operations / PER_SECOND
    started = time.perf_counter()
    life.tidy()
    seconds = time.perf_counter() - started
    life.journal.close()
    return Catch(seconds, 1000 * life.longest_forgetting_seconds)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


def in_new_process(run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(run, *arguments, **named).result()


def starts_on(folder: Path, count: int) -> Start:
    starts = [in_new_process(start_on, folder) for _ in range(count)]
    return Start(
        *(statistics.median(figures) for figures in zip(*(asdict(one).values() for one in starts), strict=True))
    )


def measure(scratch: Path, operations: int, starts: int) -> Figures:
    empty, tidied, untidied = (scratch / name for name in ("empty", "tidied", "untidied"))
    for folder in (empty, tidied, untidied):
        folder.mkdir(parents=True)
    in_new_process(live, empty, 1, tidies=False)
    life = in_new_process(live, tidied, operations, tidies=True)
    in_new_process(live, untidied, operations, tidies=False)
    return Figures(
        operations,
        life,
        starts_on(empty, starts),
        starts_on(tidied, starts),
        starts_on(untidied, 1),
        in_new_process(catch_up, untidied, operations),
        starts_on(untidied, starts),
    )


def draw(figures: Figures) -> Table:
    life, empty, untidied, caught = figures.life, figures.empty_start, figures.untidied_start, figures.catching_up
    longer = figures.start.seconds - empty.seconds
    table = Table("", "seconds", "resident", title=f"A life of {figures.operations:,} operations")
    table.add_row("after a tenth of it", "", f"{life.early_mib:.1f} MiB")
    table.add_row(f"after all of it, journal {life.journal_mib:.1f} MiB", "", f"{life.late_mib:.1f} MiB")
    table.add_row("longest step of forgetting", f"{life.longest_forgetting_ms / 1000:.4f}", "")
    table.add_section()
    for name, start in (("start on an empty journal", empty), ("start after it", figures.start)):
        table.add_row(name, f"{start.seconds:.4f}", f"{start.resident_mib:.1f} MiB")
    colour = "green" if longer <= GOAL_SECONDS else "red"
    table.add_row(f"difference, goal {GOAL_SECONDS:g} s", f"[{colour}]{longer:.4f}", "")
    table.add_section()
    table.add_row("first start, never tidied", f"{untidied.seconds:.4f}", f"{untidied.resident_mib:.1f} MiB")
    table.add_row("tidying it", f"{caught.seconds:.4f}", "")
    table.add_row("longest step of that", f"{caught.longest_forgetting_ms / 1000:.4f}", "")
    after = figures.start_after_it
    table.add_row("next start", f"{after.seconds:.4f}", f"{after.resident_mib:.1f} MiB")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="of the one model")
    parser.add_argument("--starts", type=int, default=STARTS, help="of each kind")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(Path(scratch), options.operations, options.starts)
    if options.json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        Console().print(draw(figures))


if __name__ == "__main__":
    main()
