"""A sampler that is gone: when a server looks for it again before it gives a sample up."""

from __future__ import annotations

import pytest
from support.server.fake_fleet import FakeFleet, FakeReplica
from support.server.http_server import TestedServer, one_server
from tinsmith_server.services.rows import RowCache
from tinsmith_server.services.sampling.dispatch import MISSING_SECONDS

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_server.services.sampling.dispatch.UNSEEN_SECONDS", 0.0)


async def test_a_sampler_that_the_fleet_did_not_list_is_not_looked_for_at_each_poll(
    server: TestedServer, fleet: FakeFleet
) -> None:
    """A holder of a key can make up ids of samplers, and each search is a list of the whole fleet."""
    await fleet.add_replica(FakeReplica("p1", "tiny-1"))
    submitted = (await server.sample(await server.sampler())).json()["request_id"]
    made_up = f"{submitted.partition('@')[0]}@00000000"
    answers = {(await server.result(made_up)).status_code for _ in range(6)}
    assert answers == {410}
    assert fleet.refreshes <= 2, "one of each server"


@one_server
async def test_a_sampler_that_was_gone_is_searched_again_once_it_has_been_back(
    server: TestedServer, fleet: FakeFleet
) -> None:
    """A worker may be suspended and resumed: samples that it took since are not lost with the earlier ones."""
    await fleet.add_replica(FakeReplica("p1", "tiny-1"))
    submitted = (await server.sample(await server.sampler())).json()["request_id"]
    away = fleet.replicas.pop("p1")
    assert (await server.result(submitted)).status_code == 410
    fleet.replicas["p1"] = away
    assert (await server.result(submitted)).status_code == 200
    fleet.unseen["p1"] = fleet.replicas.pop("p1")
    assert (await server.result(submitted)).status_code == 200


@one_server
async def test_asking_for_a_gone_sampler_does_not_put_off_the_next_look(
    server: TestedServer, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [0.0]
    monkeypatch.setattr(server.services.dispatch, "_missing", RowCache(MISSING_SECONDS, clock=lambda: times[-1]))
    await fleet.add_replica(FakeReplica("p1", "tiny-1"))
    submitted = (await server.sample(await server.sampler())).json()["request_id"]
    away = fleet.replicas.pop("p1")
    assert (await server.result(submitted)).status_code == 410
    times.append(0.6 * MISSING_SECONDS)
    assert (await server.result(submitted)).status_code == 410
    fleet.unseen["p1"] = away
    times.append(1.2 * MISSING_SECONDS)
    assert (await server.result(submitted)).status_code == 200
