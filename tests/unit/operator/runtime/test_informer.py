from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from support.operator.fake_cluster import FakeCluster
from support.simulated_time import now, simulated_time
from tinsmith_operator.errors import OperatorError, Unavailable
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import OWNERS, POOLS, RECONCILED, SERVICES, SESSIONS, WATCHED, Key, Ref, Resource
from tinsmith_operator.runtime.informer import LOOK_FOR_KIND_SECONDS, RETRY_SECONDS, Informer

SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "tiny", "namespace": "tin"}}
PLACE = Ref("Service", "tin", "tiny")


class House:
    def __init__(self, *namespaces: str, cluster_wide: bool = False) -> None:
        self.entered: list[str | None] = []
        self.cluster = FakeCluster()
        self.enqueued: list[Key] = []
        self.cache = Cache(self.enqueued.append)
        scope = Scope(None if cluster_wide else namespaces or ("tin",))
        self.informer = Informer(cast(Any, self.cluster), self.cache, scope, self.entered.append)

    async def watch(self, namespace: str | None) -> None:
        """Report lists as Kopf does, one for each kind."""
        for resource in WATCHED:
            await self.watch_one(namespace, resource)

    async def watch_one(self, namespace: str | None, resource: Resource) -> None:
        if namespace in self.cluster.forbidden:
            self.informer.on_list(namespace, resource.plural, "403", None)
        else:
            answer = await self.cluster.list_answer(resource, namespace)
            self.informer.on_list(namespace, resource.plural, "200", answer)


@simulated_time
async def test_it_is_complete_when_every_kind_was_listed() -> None:
    house = House()
    for resource in WATCHED:
        assert not house.informer.complete.is_set()
        assert f"{resource.plural} in namespace tin" in house.informer.missing
        assert not house.informer.knows("tin")
        await house.watch_one("tin", resource)
    assert house.informer.complete.is_set()
    assert house.informer.missing == []
    assert house.informer.refused == []
    assert house.informer.knows("tin")
    assert house.entered == ["tin"]


@simulated_time
async def test_deletions_during_a_broken_watch_are_noticed_after_the_next_list() -> None:
    house = House()
    house.cache.note(house.cluster.put(SERVICE))
    house.cache.read(PLACE, Key("tin", "tiny", "TrainingSession"))
    del house.cluster.objects[PLACE]
    await house.watch_one("tin", SERVICES)
    assert house.cache.peek(PLACE) is None
    assert house.enqueued == [Key("tin", "tiny", "TrainingSession")]


@simulated_time
async def test_a_list_that_was_not_answered_says_nothing() -> None:
    """Kopf retries without a limit."""
    house = House()
    house.cache.note(house.cluster.put(SERVICE))
    for code in ("500", "error"):
        house.informer.on_list("tin", SERVICES.plural, code, None)
    assert house.cache.peek(PLACE) is not None
    assert f"{SERVICES.plural} in namespace tin" in house.informer.missing


@simulated_time
async def test_objects_created_since_the_list_stay() -> None:
    """Our own writes are in the cache at once, and the list may have been under way."""
    house = House()
    before = await house.cluster.list_answer(SERVICES, "tin")
    house.cache.note(house.cluster.put(SERVICE))
    house.informer.on_list("tin", SERVICES.plural, "200", before)
    assert house.cache.peek(PLACE) is not None


@simulated_time
async def test_a_list_of_a_kind_that_is_not_watched_means_nothing() -> None:
    house = House()
    house.cache.note(house.cluster.put(SERVICE))
    empty = {"items": [], "metadata": {"resourceVersion": "1000"}}
    for namespace, plural in ((None, "namespaces"), ("elsewhere", "services"), ("tin", "events")):
        house.informer.on_list(namespace, plural, "200", empty)
    assert house.cache.peek(PLACE) is not None


# ---- a CRD that is missing, or is deleted

CRD = pytest.mark.parametrize("resource", RECONCILED, ids=lambda resource: resource.plural)
SESSION = {"apiVersion": SESSIONS.api_version, "kind": SESSIONS.kind, "metadata": {"name": "s", "namespace": "tin"}}
POOL = {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": {"name": "p", "namespace": "tin"}}


@simulated_time
async def test_a_cluster_without_either_crd_is_refused_with_the_cure() -> None:
    house = House()
    house.cluster.missing = {owner.plural for owner in OWNERS}
    with pytest.raises(OperatorError, match=r"trainingsessions\.tinsmith\.dev.*samplerpools.*kubectl apply -f crds/"):
        await house.informer.check_kinds()


@CRD
@simulated_time
async def test_an_operator_that_starts_without_one_crd_watches_everything_else_and_says_which(
    resource: Resource,
) -> None:
    house = House("a", "b")
    house.cluster.missing = {resource.plural}
    house.cluster.discovered.remove(resource.plural)
    known = await house.informer.check_kinds()
    assert set(known) == set(WATCHED) - {resource}
    for namespace in ("a", "b"):
        for each in known:
            await house.watch_one(namespace, each)
    assert house.informer.complete.is_set()
    assert house.informer.missing == []
    assert house.informer.knows("a")
    [sentence] = house.informer.unknown
    assert f"{resource.plural}.tinsmith.dev is not installed. Install the CRD" in sentence


@CRD
@simulated_time
async def test_a_kind_that_is_installed_later_is_found_once_the_api_server_tells_of_it(resource: Resource) -> None:
    house = House()
    house.cluster.missing = {resource.plural}
    house.cluster.discovered.remove(resource.plural)
    waiting = asyncio.create_task(house.informer.wait_for_kind(resource))
    await asyncio.sleep(100)
    house.cluster.missing = set()
    await asyncio.sleep(LOOK_FOR_KIND_SECONDS * 2)
    assert not waiting.done()
    house.cluster.discovered.add(resource.plural)
    await waiting


@simulated_time
async def test_a_crd_that_is_deleted_takes_its_objects_away_and_leaves_the_other_kind_known() -> None:
    house = House()
    for owner in (SESSION, POOL):
        house.cluster.put(owner)
    await house.watch("tin")
    house.informer.on_list("tin", POOLS.plural, "404", None)
    assert house.cache.reconciled() == [Key("tin", "s", SESSIONS.kind)]
    assert house.informer.knows("tin")
    assert len(house.informer.unknown) == 1
    await house.watch_one("tin", POOLS)
    assert sorted(house.cache.reconciled()) == [Key("tin", "p", POOLS.kind), Key("tin", "s", SESSIONS.kind)]
    assert house.informer.unknown == []
    assert house.entered == ["tin", "tin"], "everything in it is looked at anew"


@simulated_time
async def test_a_built_in_kind_that_is_not_found_is_no_missing_crd() -> None:
    house = House()
    house.cache.note(house.cluster.put(SERVICE))
    house.informer.on_list("tin", SERVICES.plural, "404", None)
    assert house.cache.peek(PLACE) is not None
    assert house.informer.unknown == []


@simulated_time
async def test_an_api_server_that_is_not_up_yet_is_waited_for() -> None:
    house = House()
    house.cluster.failures["list"] = [Unavailable("down")] * 100
    await house.informer.check_kinds()
    assert now() == 100 * RETRY_SECONDS


@simulated_time
async def test_a_kind_that_is_installed_and_not_told_of_yet_is_waited_for() -> None:
    """Kopf looks for the kinds once, and a watch that found none would never end and seem alive."""
    house = House()
    house.cluster.discovered.remove(POOLS.plural)
    waiting = asyncio.create_task(house.informer.check_kinds())
    await asyncio.sleep(100)
    assert not waiting.done()
    house.cluster.discovered.add(POOLS.plural)
    await waiting


# ---- several namespaces


@simulated_time
async def test_a_namespace_that_is_forbidden_is_named_and_holds_up_no_other() -> None:
    house = House("a", "b")
    house.cluster.forbidden = {"b"}
    await house.informer.check_kinds()
    await house.watch("b")
    assert not house.informer.complete.is_set()
    await house.watch("a")
    assert house.informer.complete.is_set()
    assert (house.informer.knows("a"), house.informer.knows("b")) == (True, False)
    [sentence] = house.informer.refused
    assert sentence.startswith("The operator does nothing in namespace b, because it may not list")
    assert "bind the operator's Role" in sentence


@simulated_time
async def test_a_namespace_that_comes_later_is_entered_once_every_kind_in_it_is_known() -> None:
    house = House("a", "b")
    house.cluster.forbidden = {"b"}
    await house.watch("a")
    await house.watch("b")
    house.cluster.forbidden = set()
    for resource in WATCHED:
        assert "b" not in house.entered
        await house.watch_one("b", resource)
    assert house.entered == ["a", "b"]
    assert house.informer.knows("b")
    assert house.informer.refused == []


@simulated_time
async def test_one_kind_that_is_forbidden_keeps_its_whole_namespace_unknown() -> None:
    """Decisions about a session depend on all of its children."""
    house = House("a", "b")
    await house.watch("a")
    for resource in WATCHED:
        house.cluster.forbidden = {"b"} if resource is SERVICES else set()
        await house.watch_one("b", resource)
    assert house.informer.complete.is_set()
    assert not house.informer.knows("b")
    assert "may not list services there" in house.informer.refused[0]


@simulated_time
async def test_nothing_is_complete_while_every_namespace_is_forbidden() -> None:
    house = House("a", "b")
    house.cluster.forbidden = {"a", "b"}
    await house.watch("a")
    await house.watch("b")
    assert not house.informer.complete.is_set()
    assert len(house.informer.refused) == 2


@simulated_time
async def test_the_informer_waits_while_every_namespace_is_forbidden() -> None:
    house = House("a", "b")
    house.cluster.forbidden = {"a", "b"}
    waiting = asyncio.create_task(house.informer.check_kinds())
    await asyncio.sleep(100)
    assert not waiting.done()
    assert len(house.informer.refused) == 2
    house.cluster.forbidden = {"a"}
    await asyncio.sleep(RETRY_SECONDS)
    assert waiting.done()


@simulated_time
async def test_a_part_with_rights_that_were_taken_away_is_known_no_more() -> None:
    house = House("a", "b")
    await house.watch("a")
    await house.watch("b")
    house.informer.on_list("b", SERVICES.plural, "403", None)
    assert (house.informer.knows("a"), house.informer.knows("b")) == (True, False)


@simulated_time
async def test_the_whole_cluster_is_one_part_and_knows_every_namespace() -> None:
    house = House(cluster_wide=True)
    house.cluster.put(SERVICE)
    assert not house.informer.knows("tin")
    await house.watch(None)
    assert house.informer.knows("tin")
    assert house.informer.knows("any")
    assert house.cache.peek(PLACE) is not None


@simulated_time
async def test_the_list_of_the_cluster_reveals_deletions_in_every_namespace() -> None:
    house = House(cluster_wide=True)
    house.cache.note(house.cluster.put(SERVICE))
    del house.cluster.objects[PLACE]
    await house.watch(None)
    assert house.cache.peek(PLACE) is None


@simulated_time
async def test_the_list_of_one_namespace_says_nothing_of_another() -> None:
    house = House("a", "tin")
    house.cache.note(house.cluster.put(SERVICE))
    await house.watch("a")
    assert house.cache.peek(PLACE) is not None


def page(*names: str, after: str | None = None, version: int = 50) -> dict[str, Any]:
    items = [{"metadata": {"name": name, "namespace": "tin", "uid": name, "resourceVersion": "5"}} for name in names]
    return {"items": items, "metadata": {"resourceVersion": str(version), **({"continue": after} if after else {})}}


async def test_a_list_of_several_pages_is_known_with_its_last_one_and_not_before() -> None:
    house = House()
    for resource in WATCHED:
        if resource is not SERVICES:
            await house.watch_one("tin", resource)
    house.cache.note({**SERVICE, "metadata": {**SERVICE["metadata"], "uid": "gone", "resourceVersion": "4"}})
    house.informer.on_list("tin", SERVICES.plural, "200", page("a", "b", after="next"), True)
    assert not house.informer.knows("tin")
    assert house.cache.peek(PLACE) is not None, "it may be on the next page"
    house.informer.on_list("tin", SERVICES.plural, "200", page("c"), False)
    assert house.informer.knows("tin")
    assert house.cache.peek(PLACE) is None
    assert [house.cache.peek(Ref("Service", "tin", name)) is not None for name in "abc"] == [True] * 3


async def test_a_restarted_list_discards_its_earlier_pages() -> None:
    house = House()
    house.informer.on_list("tin", SERVICES.plural, "200", page("a", after="next"), True)
    house.informer.on_list("tin", SERVICES.plural, "200", page("b", after="next", version=60), True)
    house.informer.on_list("tin", SERVICES.plural, "200", page("c", version=60), False)
    assert house.cache.peek(Ref("Service", "tin", "a")) is None
