"""Series of runs: each step once, whichever replica adds it; reports are merged; old points become means."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.server.store_records import NOW, a_model, a_session, later
from tinsmith_server.store import run_series
from tinsmith_server.store.queries import runs
from tinsmith_server.store.records import RunReport, RunStep
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

RUN = "session-1:train:0"


@pytest.fixture
async def stores(replicas: tuple[Store, Store]) -> tuple[Store, Store]:
    await replicas[0].create_session(a_session(), None)
    await replicas[0].add_model(a_model())
    return replicas


def steps(*numbers: int, run_id: str = RUN) -> list[RunStep]:
    return [RunStep(run_id, 3 * number, number, later(number), tokens=10, loss=1.0 / number) for number in numbers]


def report(step: int, run_id: str = RUN, **values: float) -> RunReport:
    return RunReport(run_id, step, 0, NOW, values)


async def positions(store: Store) -> Sequence[int]:
    return [step.position for step in await store.run_steps(RUN, 0, 100_000)]


async def test_steps_that_two_replicas_add_at_once_and_again_are_there_once(stores: tuple[Store, Store]) -> None:
    added = [stores[number % 2].add_steps(steps(*range(1, 4 + number))) for number in range(6)]
    assert await asyncio.gather(*added) == [set()] * 6
    assert await positions(stores[0]) == list(range(3, 27, 3))
    assert await stores[1].add_steps(steps(2, 3)) == set()
    progress = (await stores[1].progress_of([RUN, "another"]))[RUN]
    assert (progress.step, progress.position, progress.at, progress.unfolded) == (8, 24, later(8), 8)
    assert [one.position for one in await stores[0].run_steps(RUN, 6, 2)] == [9, 12]


async def test_steps_of_an_unknown_run_do_not_keep_those_of_others_away(stores: tuple[Store, Store]) -> None:
    mixed = [*steps(1), *steps(1, run_id="gone:train:0"), *steps(2)]
    assert await stores[0].add_steps(mixed) == {"gone:train:0"}
    assert await positions(stores[0]) == [3, 6]


async def test_old_steps_become_means_and_a_folded_step_does_not_come_back(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FULL_STEPS", 20), ("SLACK", 5)):
        monkeypatch.setattr(run_series, name, value)
        monkeypatch.setattr(runs, name, value)
    await stores[0].add_steps(steps(*range(1, 48)))
    await stores[0].fold_series()
    await stores[1].fold_series()
    kept = await stores[0].run_steps(RUN, 0, 100)
    assert [(one.step, one.steps) for one in kept[:3]] == [(10, 10), (20, 10), (21, 1)]
    assert kept[0].loss == pytest.approx(sum(1 / number for number in range(1, 11)) / 10)
    assert len(kept) == 29
    await stores[0].add_steps(steps(3, 10, 15))
    assert len(await positions(stores[0])) == 29


async def test_reports_of_a_step_are_merged_and_each_change_has_a_revision_of_its_own(
    stores: tuple[Store, Store],
) -> None:
    at_once = [stores[n % 2].add_reports(RUN, [report(5, **{f"v{n}": n}), report(6, w=n)], 10_000) for n in range(6)]
    assert all(await asyncio.gather(*at_once))
    five, six = await stores[0].run_reports(RUN, 0, 10)
    assert (five.step, six.step) == (5, 6)
    assert five.values == {f"v{n}": n for n in range(6)}
    assert (five.revision, six.revision) == (11, 12)
    assert await stores[0].add_reports(RUN, [report(5, v0=9.0)], 10_000)
    [changed] = await stores[1].run_reports(RUN, 12, 10)
    assert (changed.revision, changed.values["v0"], changed.values["v5"]) == (13, 9.0, 5)


async def test_a_report_over_the_limit_changes_nothing(stores: tuple[Store, Store]) -> None:
    assert await stores[0].add_reports(RUN, [report(1, a=1.0)], 20)
    assert not await stores[0].add_reports(RUN, [report(2, a=1.0), report(3, a=1.0)], 20)
    assert [one.step for one in await stores[0].run_reports(RUN, 0, 10)] == [1]


async def test_a_step_with_many_values_counts_whenever_it_is_written(stores: tuple[Store, Store]) -> None:
    """Otherwise small requests could make the store write many megabytes each."""
    added = [await stores[0].add_reports(RUN, [report(1, **{f"name{n}": 1.0})], 100) for n in range(5)]
    assert added == [True, True, True, False, False]


async def test_of_many_old_reports_every_tenth_stays(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FULL_STEPS", 20), ("SLACK", 5), ("MOST_REPORTS", 23)):
        monkeypatch.setattr(runs, name, value)
    await stores[0].add_reports(RUN, [report(step, a=step) for step in range(70)], 10_000)
    await stores[0].fold_series()
    assert [one.step for one in await stores[0].run_reports(RUN, 0, 100)] == [20, 30, 40, *range(50, 70)]


async def test_runs_with_thinned_reports_do_not_delay_other_runs(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FULL_STEPS", 20), ("SLACK", 5), ("MOST_REPORTS", 40), ("RUNS_AT_ONCE", 1)):
        monkeypatch.setattr(runs, name, value)
    second = a_model(model_seq_id=1).model_id
    await stores[0].add_model(a_model(model_seq_id=1))
    await stores[0].add_reports(RUN, [report(10 * step, a=step) for step in range(50)], 10_000)
    await stores[0].add_reports(second, [report(step, second, a=step) for step in range(70)], 10_000)
    await stores[0].fold_series()
    await stores[0].fold_series()
    assert len(await stores[0].run_reports(RUN, 0, 100)) == 40
    assert len(await stores[0].run_reports(second, 0, 100)) == 25
    before = await stores[0].progress_of([RUN, second])
    await stores[0].add_reports(second, [report(step, second, a=step) for step in range(60, 76)], 10_000)
    after = await stores[0].progress_of([RUN, second])
    assert after[RUN] == before[RUN]
    assert after[second].reports == before[second].reports + 6
    await stores[0].fold_series()
    assert len(await stores[0].run_reports(second, 0, 100)) == 26


async def test_the_digest_of_a_tenants_runs_changes_with_each_step_report_length_and_end(
    stores: tuple[Store, Store],
) -> None:
    seen = [await stores[0].runs_digest("ada")]
    await stores[0].add_steps(steps(1))
    seen.append(await stores[0].runs_digest("ada"))
    await stores[1].add_reports(RUN, [report(1, a=1.0)], 100)
    seen.append(await stores[0].runs_digest("ada"))
    await stores[1].add_reports(RUN, [], 100, total_steps=40)
    seen.append(await stores[0].runs_digest("ada"))
    await stores[1].end_model(RUN, "released")
    seen.append(await stores[0].runs_digest("ada"))
    assert len({str(one) for one in seen}) == 5
    assert await stores[0].runs_digest("ada") == seen[-1]
    assert await stores[0].runs_digest("bob") == [0]


async def test_the_digest_holds_for_the_highest_numbers_of_operations(stores: tuple[Store, Store]) -> None:
    second = a_model(model_seq_id=1)
    await stores[0].add_model(second)
    highest = RunStep(RUN, 2**63 - 1, 2**63 - 1, NOW, tokens=10)
    await stores[0].add_steps([highest, replace(highest, run_id=second.model_id)])
    assert await stores[0].runs_digest("ada") == await stores[1].runs_digest("ada")
