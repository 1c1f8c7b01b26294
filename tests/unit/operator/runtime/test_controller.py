from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from support.simulated_time import now, simulated_time
from tinsmith_operator.api.owner import Unreadable
from tinsmith_operator.errors import Conflict, NotLeading, Refused, Unavailable
from tinsmith_operator.kube.rate_limit import MOST_OVERTAKEN, Priority, RateLimit
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.logs import in_reconcile, outside_of_reconciles
from tinsmith_operator.metrics import Metrics
from tinsmith_operator.runtime.controller import ROUNDS_AT_ONCE, Controller, Identify
from tinsmith_operator.runtime.reconcile import ReconcileResult
from tinsmith_operator.runtime.workqueue import WorkQueue

KEY = Key("tin", "tiny", "TrainingSession")
SETTLED = ReconcileResult(acted=False)
ACTED = ReconcileResult(acted=True)


def unchanged(_: Key) -> object:
    return None


class Run:
    """A controller whose reconciles end as told: the last answer is repeated.

    hears_of_itself: as of every write that changed something, while the key still runs.
    """

    def __init__(self, *answers: ReconcileResult | Exception) -> None:
        self.answers = list(answers)
        self.at: list[float] = []
        self.metrics = Metrics()
        self.queue: WorkQueue[Key] = WorkQueue()
        self.acts = asyncio.Event()
        self.acts.set()
        self.requested = "once"
        self.hears_of_itself = False
        self.controller = Controller(self.queue, self.reconcile, lambda _: self.requested, self.metrics, self.acts)

    async def reconcile(self, key: Key) -> ReconcileResult:
        assert key == KEY
        self.at.append(now())
        if self.hears_of_itself:
            self.controller.enqueue(key)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def go(self, seconds: float, then: Callable[[], None] | None = None) -> None:
        task = asyncio.create_task(self.controller.run())
        self.queue.add(KEY)
        if then is not None:
            asyncio.get_running_loop().call_later(seconds / 2, then)
        await asyncio.sleep(seconds)
        task.cancel()

    def counted(self) -> str:
        return self.metrics.render().decode()


@simulated_time
async def test_a_session_at_rest_is_left_alone() -> None:
    run = Run(SETTLED)
    await run.go(3600)
    assert run.at == [0]


@simulated_time
async def test_a_session_that_was_acted_upon_is_checked_again_at_once() -> None:
    run = Run(ACTED, ACTED, SETTLED)
    await run.go(3600)
    assert run.at == [0, 0, 0]


@simulated_time
async def test_a_session_is_checked_again_when_the_decision_says_so() -> None:
    run = Run(ReconcileResult(acted=False, requeue_after_seconds=100), SETTLED)
    await run.go(3600)
    assert run.at == [0, 100]


@simulated_time
@pytest.mark.parametrize("hears_of_itself", [False, True], ids=["in silence", "hearing of its own writes"])
async def test_a_session_that_never_comes_to_rest_is_acted_upon_ever_more_rarely(hears_of_itself: bool) -> None:
    run = Run(ACTED)
    run.hears_of_itself = hears_of_itself
    await run.go(3600)
    assert ROUNDS_AT_ONCE < len(run.at) < ROUNDS_AT_ONCE + 30
    assert run.at[ROUNDS_AT_ONCE] == 0
    assert run.at[-1] > 1800


@simulated_time
async def test_foreign_changes_do_not_requeue_an_unsettled_session_sooner() -> None:
    run = Run(ReconcileResult(acted=True, requeue_after_seconds=1))
    task = asyncio.create_task(hear_of_it(run, every_seconds=1))
    await run.go(3600)
    task.cancel()
    assert len(run.at) < ROUNDS_AT_ONCE + 30


async def hear_of_it(run: Run, every_seconds: float) -> None:
    while True:
        await asyncio.sleep(every_seconds)
        run.controller.enqueue(KEY)


@simulated_time
async def test_a_session_that_never_came_to_rest_is_served_at_once_when_something_else_is_asked_of_it() -> None:
    """A change of its spec, as one that ends the struggle, or its deletion."""
    run = Run(ACTED)

    def ask() -> None:
        run.requested = "anew"
        run.answers = [ACTED, ACTED, SETTLED]
        run.controller.enqueue(KEY)

    await run.go(3600, then=ask)
    assert run.at[-3:] == [1800, 1800, 1800]


@simulated_time
async def test_a_request_during_the_last_reconcile_is_not_delayed() -> None:
    run = Run(*[ACTED] * ROUNDS_AT_ONCE, ACTED, SETTLED)
    reconcile = run.reconcile

    async def interrupted(key: Key) -> ReconcileResult:
        outcome = await reconcile(key)
        if len(run.at) == ROUNDS_AT_ONCE + 1:
            run.requested = "anew"
            run.controller.enqueue(key)
        return outcome

    run.controller = Controller(run.queue, interrupted, lambda _: run.requested, run.metrics, run.acts)
    await run.go(3600)
    assert run.at == [0] * (ROUNDS_AT_ONCE + 2)


@simulated_time
@pytest.mark.parametrize(
    ("error", "result"),
    [
        (Conflict("changed"), "conflict"),
        (Refused("quota"), "refused"),
        (Unavailable("down"), "unavailable"),
        (KeyError("a bug"), "error"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_failure_is_tried_again_with_growing_pauses(error: Exception, result: str) -> None:
    run = Run(error, error, error, SETTLED)
    await run.go(3600)
    pauses = [after - before for before, after in zip(run.at, run.at[1:], strict=False)]
    assert len(pauses) == 3
    assert pauses == sorted(pauses)
    assert f'tinsmith_operator_reconciles_total{{result="{result}"}} 3.0' in run.counted()
    assert "tinsmith_operator_retries_total 3.0" in run.counted()


@simulated_time
async def test_a_session_met_while_the_lease_was_renewed_late_is_checked_again_in_the_same_term() -> None:
    """A late renewal ends no term, so no other event enqueues every session."""
    run = Run(NotLeading("late"), SETTLED)
    await run.go(3600)
    assert run.at == [0, 1]


@simulated_time
async def test_a_resync_spreads_the_keys_over_its_period() -> None:
    times: list[tuple[float, str]] = []
    began = asyncio.get_running_loop().time()

    async def reconcile(key: Key) -> ReconcileResult:
        times.append((asyncio.get_running_loop().time() - began, key.name))
        return SETTLED

    known: list[Key] = []
    acts = asyncio.Event()
    acts.set()
    controller = Controller(WorkQueue(), reconcile, unchanged, Metrics(), acts)
    tasks = [asyncio.create_task(controller.run()), asyncio.create_task(controller.resync(lambda: [*known], 60))]
    await asyncio.sleep(30)
    known += [Key("tin", name, "TrainingSession") for name in "abc"]
    await asyncio.sleep(155)
    assert times == [(80, "a"), (100, "b"), (120, "c"), (140, "a"), (160, "b"), (180, "c")]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@simulated_time
async def test_other_tasks_have_their_turn_between_any_two_keys_at_rest() -> None:
    """Otherwise a resync of hundreds of keys would delay the renewal of the Lease."""
    seen: list[str] = []

    async def reconcile(key: Key) -> ReconcileResult:
        seen.append("key")
        return SETTLED

    async def beat() -> None:
        while True:
            seen.append("heartbeat")
            await asyncio.sleep(0)

    queue: WorkQueue[Key] = WorkQueue()
    acts = asyncio.Event()
    acts.set()
    for number in range(100):
        queue.add(Key("tin", f"tiny-{number}", "TrainingSession"))
    tasks = [
        asyncio.create_task(Controller(queue, reconcile, unchanged, Metrics(), acts).run()),
        asyncio.create_task(beat()),
    ]
    while queue.depth or queue.running:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert seen.count("key") == 100
    assert not [pair for pair in pairwise(seen) if pair == ("key", "key")]


@simulated_time
async def test_nothing_is_done_while_another_operator_leads() -> None:
    run = Run(SETTLED)
    run.acts.clear()
    await run.go(100, then=run.acts.set)
    assert run.at == [50]


@simulated_time
async def test_a_key_that_comes_when_the_lease_was_just_lost_waits_for_the_next_term() -> None:
    run = Run(SETTLED)
    task = asyncio.create_task(run.controller.run())
    await asyncio.sleep(1)
    run.acts.clear()
    run.queue.add(KEY)
    await asyncio.sleep(100)
    assert run.at == []
    run.acts.set()
    await asyncio.sleep(1)
    assert len(run.at) == 1
    task.cancel()


@simulated_time
@pytest.mark.parametrize("error", [Unreadable("a newer CRD"), ValueError("a bug")], ids=["unreadable", "a bug"])
async def test_a_poisoned_session_holds_up_no_other(error: Exception) -> None:
    """One at a time, and the poisoned one first."""
    seen: list[str] = []

    async def reconcile(key: Key) -> ReconcileResult:
        seen.append(key.name)
        if key.name == "poisoned":
            raise error
        return SETTLED

    queue: WorkQueue[Key] = WorkQueue()
    acts = asyncio.Event()
    acts.set()
    task = asyncio.create_task(Controller(queue, reconcile, unchanged, Metrics(), acts).run())
    for name in ("poisoned", "tiny", "poisoned", "small"):
        queue.add(Key("tin", name, "TrainingSession"))
    await asyncio.sleep(0.01)
    task.cancel()
    assert seen == ["poisoned", "tiny", "small"]


def lines_of(run: Run, identify: Identify, seconds: float = 0.05) -> list[dict[str, Any]]:
    """Return the log lines as written, except time and logger."""

    said: list[dict[str, Any]] = []

    @simulated_time
    async def live() -> None:
        run.controller = Controller(run.queue, run.reconcile, lambda _: "once", run.metrics, run.acts, identify)
        with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
            await run.go(seconds)
        said.extend(dict(line) for line in lines)

    live()
    return said


def test_every_line_of_a_reconcile_names_its_object_and_its_run() -> None:
    run = Run(RuntimeError("a bug"), SETTLED)
    generation = iter([1, 2])
    first, second = lines_of(run, lambda _: {"uid": "u-1", "generation": next(generation)}, 0.03)
    assert (first["event"], second["event"]) == ("reconcile failed", "put back")
    for line in (first, second):
        said = [line[name] for name in ("namespace", "kind", "name", "uid", "generation")]
        assert said == ["tin", "TrainingSession", "tiny", "u-1", 1]
    assert first["reconcile"] == second["reconcile"]
    assert structlog.contextvars.get_contextvars() == {}


def test_a_task_that_outlives_its_reconcile_has_no_log_context_of_it() -> None:
    said: list[dict[str, Any]] = []

    async def background() -> None:
        said.append(structlog.contextvars.get_contextvars())

    @simulated_time
    async def live() -> None:
        with in_reconcile("tin", "TrainingSession", "tiny"):
            await asyncio.create_task(background(), context=outside_of_reconciles())

    live()
    assert said == [{}]


# ---- many busy sessions at the request rate

WORKERS = 4
CREATES = 4


class BusyInstallation:
    """A thousand sessions whose status changes each minute, which is more than the rate allows, and a few new ones."""

    def __init__(self) -> None:
        self.limit = RateLimit(per_second=10, burst=50)
        self.queue: WorkQueue[Key] = WorkQueue()
        self.acts = asyncio.Event()
        self.acts.set()
        self.turns = 0
        self.turns_to_create: dict[Key, int] = {}
        self.controller = Controller(self.queue, self.reconcile, unchanged, Metrics(), self.acts)

    async def reconcile(self, key: Key) -> ReconcileResult:
        began = self.turns
        await self.request(Priority.STATUS)
        if key.name.startswith("new"):
            for _ in range(CREATES):
                await self.request(Priority.ORDINARY)
            self.turns_to_create[key] = self.turns - began
        return SETTLED

    async def request(self, priority: Priority) -> None:
        await self.limit.wait(priority)
        self.turns += 1

    async def keep_busy(self, sessions: int) -> None:
        while True:
            for number in range(sessions):
                self.queue.add(Key("tin", f"busy-{number}", "TrainingSession"))
                await asyncio.sleep(60 / sessions)


@simulated_time
async def test_a_thousand_busy_sessions_keep_no_new_one_from_being_created_and_no_list_from_being_sent() -> None:
    busy = BusyInstallation()
    tasks = [asyncio.create_task(busy.controller.run()) for _ in range(WORKERS)]
    tasks.append(asyncio.create_task(busy.keep_busy(1000)))
    await asyncio.sleep(20)
    for number in range(3):
        busy.queue.add(Key("tin", f"new-{number}", "TrainingSession"))
    asked_at = now()
    await busy.request(Priority.ESSENTIAL)
    list_waited_seconds = now() - asked_at
    await asyncio.sleep(60)
    for task in tasks:
        task.cancel()
    assert list_waited_seconds < WORKERS / 10
    longest_wait = WORKERS + MOST_OVERTAKEN
    assert len(busy.turns_to_create) == 3
    assert max(busy.turns_to_create.values()) <= (1 + CREATES) * longest_wait
    assert busy.turns > 600, "the rate is used up all the time"
