"""RayClusters are looked for when a session needs them, and watched as soon as the cluster knows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from support.operator.fake_cluster import FakeCluster
from support.simulated_time import simulated_time
from tinsmith_operator.errors import NotFound, OperatorError, Refused, Unavailable
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import RAY_CLUSTERS
from tinsmith_operator.kube.watch_stream import ListAnswered
from tinsmith_operator.runtime.ray_cluster_informer import LISTED_WITHIN_SECONDS, RayClusterInformer

LOOK_SECONDS = 30.0


class FakeWatch:
    """Lists its kind in each namespace as it begins; `end` ends it as an error of the cluster would."""

    def __init__(self, house: House, on_list: ListAnswered) -> None:
        self._house = house
        self._on_list = on_list
        self.end = asyncio.Event()

    async def run(self) -> None:
        if self._house.blind_watches:
            self._house.blind_watches -= 1
            await asyncio.Event().wait()
        for namespace in self._house.namespaces:
            if namespace in self._house.cluster.forbidden:
                self._on_list(namespace, RAY_CLUSTERS.plural, "403", None)
            else:
                self._on_list(
                    namespace, RAY_CLUSTERS.plural, "200", {"items": [], "metadata": {"resourceVersion": "1"}}
                )
        await self.end.wait()
        raise OperatorError("the kind is gone")

    async def stop(self) -> None:
        self._house.open.remove(self)


class House:
    def __init__(self, *namespaces: str) -> None:
        self.namespaces = namespaces or ("tin",)
        self.cluster = FakeCluster()
        self.open: list[FakeWatch] = []
        self.changes = 0
        self.blind_watches = 0  # watches that look for the kind too early, and then never end
        self.rays = RayClusterInformer(
            cast(Any, self.cluster),
            Cache(lambda _: None),
            Scope(self.namespaces),
            changed=self._note_change,
            open_watch=self._open,
            look_again_seconds=LOOK_SECONDS,
        )

    @property
    def lists(self) -> int:
        return [verb for verb, _, _ in self.cluster.requests].count("list")

    def lacks_kuberay(self, looks: int = 100) -> None:
        self.cluster.failures["list"] = [NotFound("the server could not find the requested resource")] * looks

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.rays.run())
        try:
            await asyncio.sleep(0.1)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _open(self, on_list: ListAnswered) -> FakeWatch:
        self.open.append(FakeWatch(self, on_list))
        return self.open[-1]

    def _note_change(self) -> None:
        self.changes += 1


@simulated_time
async def test_the_operator_lists_no_rayclusters_while_no_session_needs_them() -> None:
    house = House()
    async with house.running():
        await asyncio.sleep(3600)
        assert house.cluster.requests == []
        assert house.open == []


@simulated_time
async def test_once_wanted_they_are_watched_and_known() -> None:
    house = House()
    async with house.running():
        house.rays.enable()
        await asyncio.sleep(0.1)
        assert house.rays.knows("tin")
        assert house.rays.problem("tin") is None
        assert house.changes == 1
        listed = house.lists
        await asyncio.sleep(3600)
        assert house.lists == listed, "at rest it asks nothing"


@simulated_time
async def test_a_cluster_without_kuberay_is_reported_once_and_checked_until_kuberay_exists() -> None:
    house = House()
    house.lacks_kuberay()
    async with house.running():
        house.rays.enable()
        await asyncio.sleep(10 * LOOK_SECONDS + 0.1)
        assert house.rays.problem("tin") == "The cluster has no RayClusters: KubeRay is not installed."
        assert not house.rays.knows("tin")
        assert (house.open, house.changes) == ([], 1)
        house.cluster.failures["list"].clear()
        await asyncio.sleep(LOOK_SECONDS)
        assert house.rays.knows("tin")
        assert house.rays.problem("tin") is None


@simulated_time
async def test_an_api_server_that_is_away_is_not_taken_for_a_cluster_without_kuberay() -> None:
    house = House()
    house.cluster.failures["list"] = [Unavailable("away")] * 3
    async with house.running():
        house.rays.enable()
        await asyncio.sleep(1)
        assert house.rays.problem("tin") is None
        assert house.open == []
        await asyncio.sleep(10)
        assert house.rays.knows("tin")


@simulated_time
async def test_when_kuberay_is_taken_away_its_kind_is_searched_again() -> None:
    house = House()
    async with house.running():
        house.rays.enable()
        await asyncio.sleep(0.1)
        house.lacks_kuberay()
        house.open[0].end.set()
        await asyncio.sleep(LOOK_SECONDS + 0.1)
        assert house.open == []
        assert not house.rays.knows("tin")
        assert house.rays.problem("tin") is not None


@simulated_time
async def test_a_watch_that_began_before_it_could_see_the_kind_is_begun_again() -> None:
    house = House()
    house.blind_watches = 1
    async with house.running():
        house.rays.enable()
        await asyncio.sleep(LISTED_WITHIN_SECONDS + LOOK_SECONDS + 0.2)
        assert house.rays.knows("tin")
        assert len(house.open) == 1


@simulated_time
async def test_a_namespace_where_they_may_not_be_listed_says_so_and_holds_up_no_other() -> None:
    house = House("tin", "closed")
    house.cluster.forbidden.add("closed")
    async with house.running():
        house.rays.enable()
        await asyncio.sleep(0.1)
        assert house.rays.knows("tin")
        assert "in namespace closed" in str(house.rays.problem("closed"))
        assert house.rays.problem("tin") is None


@simulated_time
async def test_an_operator_without_any_right_to_them_says_so() -> None:
    house = House()
    house.cluster.failures["list"] = [Refused("forbidden")]
    async with house.running():
        house.rays.enable()
        await asyncio.sleep(0.1)
        assert "may not list rayclusters.ray.io in namespace tin" in str(house.rays.problem("tin"))
        assert house.open == []


@pytest.mark.parametrize("looks", [0, 3])
@simulated_time
async def test_wanting_them_again_changes_nothing(looks: int) -> None:
    house = House()
    house.lacks_kuberay(looks)
    async with house.running():
        for _ in range(5):
            house.rays.enable()
            await asyncio.sleep(LOOK_SECONDS)
        assert len(house.open) == 1
