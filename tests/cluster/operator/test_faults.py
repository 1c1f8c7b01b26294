"""The way to the API server fails: what was meant happens all the same, once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
from support.kubernetes.api_proxy import ApiProxy
from support.kubernetes.kubectl import KubectlUser, Kubelet, whole_namespace
from support.operator.operators import (
    comes_to_rest,
    condition_of,
    eventually,
    operator_program,
    pool_manifest,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.kube.resources import EVENTS, POOLS, SERVICES, SESSIONS, WATCHED, ApiCall

WRITES = ("create", "patch", "update", "delete")


async def test_settled_objects_cause_no_requests(hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy) -> None:
    """Counted on the wire and by the operator itself; watches, and the lease of the leader, are left out."""
    async with running(settings_for(hands.namespace, resync_seconds=0.5, lease_seconds=60)) as operator:
        for number in range(3):
            await hands.create(SESSIONS, session_manifest(f"tiny-{number}"))
            await hands.create(POOLS, pool_manifest(f"tiny-{number}", replicas=number))
        for number in range(3):
            await comes_to_rest(hands, "WorkerReady", f"tiny-{number}")
            reason = "ReplicasReady" if number else "ScaledToZero"
            await comes_to_rest(hands, reason, f"tiny-{number}", resource=POOLS)
            await eventually(partial(has_reported, hands, f"tiny-{number}"), "the worker has told of its slots")
        await at_rest(proxy)
        before = (counted(proxy), counted_by_itself(operator.metrics.render()))
        await asyncio.sleep(5)
        after = (counted(proxy), counted_by_itself(operator.metrics.render()))
    assert after == before
    assert before[0] == before[1]


async def at_rest(proxy: ApiProxy) -> None:
    """Wait for what follows the status: an Event, and the last report of a worker."""
    calls = -1
    while calls != len(proxy.calls):
        calls = len(proxy.calls)
        await asyncio.sleep(3)


async def has_reported(hands: KubectlUser, name: str) -> bool:
    return bool(condition_of(await hands.get(SESSIONS, name), "SlotsAvailable")["status"] == "True")


def counted(proxy: ApiProxy) -> Counter[tuple[str, str]]:
    return Counter((call.verb, call.resource) for call in proxy.calls if is_counted(call.verb, call.resource))


def counted_by_itself(page: bytes) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for line in page.decode().splitlines():
        if line.startswith("tinsmith_operator_api_requests_total{"):
            labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
            verb, resource = labels["verb"].strip('"'), labels["resource"].strip('"')
            if is_counted(verb, resource):
                counts[verb, resource] += int(float(line.rpartition(" ")[2]))
    return counts


def is_counted(verb: str, resource: str) -> bool:
    return verb != "watch" and resource != "leases"


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_writes_that_fail_now_and_then_change_nothing_in_the_end(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy, status: int
) -> None:
    chance = random.Random(status)
    proxy.fault = lambda call: status if call.verb in WRITES and chance.random() < 0.25 else None
    await a_life(hands)


async def test_reads_and_watches_that_fail_change_nothing_in_the_end(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Six refusals in a row, which come up at times, would have the watch wait for a minute.
    monkeypatch.setattr("tinsmith_operator.runtime.handlers.LONGEST_BACKOFF_SECONDS", 2.0)
    chance = random.Random(1)
    proxy.fault = lambda call: 503 if call.verb in ("get", "list", "watch") and chance.random() < 0.3 else None
    await a_life(hands)


async def test_writes_are_not_repeated_when_their_answers_are_lost(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy
) -> None:
    chance = random.Random(2)
    proxy.lose_answers_of = lambda call: call.verb in WRITES and call.resource != "leases" and chance.random() < 0.5
    uids = await a_life(hands)
    assert len(uids) == 1, "the claim names the worker, and was made twice"


async def a_life(hands: KubectlUser) -> set[str]:
    """Through suspend and resume; the worker ids on the way."""
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        ready = await comes_to_rest(hands, "WorkerReady")
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
        await comes_to_rest(hands, "Suspended")
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": False}})
        again = await comes_to_rest(hands, "WorkerReady")
    return {ready["status"]["workerId"], again["status"]["workerId"]}


async def test_each_kind_is_listed_once_at_the_start(hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy) -> None:
    """A list of a large cluster is the dearest thing that an operator asks for."""
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
    requests = zip(proxy.calls, proxy.queries, strict=True)
    whole = Counter(call.resource for call, query in requests if call.verb == "list" and begins_a_list(query))
    del whole[EVENTS.plural]
    assert whole == {resource.plural: 1 for resource in WATCHED}


def begins_a_list(query: dict[str, str]) -> bool:
    """Return true for the first page of a list, and not for the probe of a kind."""
    return "continue" not in query and query.get("limit") != "1"


async def test_objects_deleted_during_a_broken_watch_are_created_again(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy
) -> None:
    """The watch cannot be resumed (410), and the new list that Kopf makes does not tell what is missing from it."""
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        gone = Gone()
        proxy.fault = gone
        proxy.cut_watches()
        await eventually(gone.all_away, "no watch of services is open")
        await hands.delete(SERVICES, "tiny")
        gone.answer = 410

        async def is_back() -> Any:
            return await hands.get(SERVICES, "tiny")

        await eventually(is_back, "the Service is back")


class Gone:
    """No watch of Services can be opened, until its version is answered as gone, once."""

    def __init__(self) -> None:
        self.answer = 503
        self.refused = 0

    def __call__(self, call: ApiCall) -> int | None:
        if (call.verb, call.resource) != ("watch", "services") or self.answer == 0:
            return None
        self.refused += 1
        answer = self.answer
        if answer == 410:
            self.answer = 0
        return answer

    async def all_away(self) -> bool:
        return self.refused > 0


async def test_nothing_of_the_watching_frameworks_is_ever_written(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy
) -> None:
    """Kopf by default marks objects with finalizers and annotations."""
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest())
        await comes_to_rest(hands, "WorkerReady")
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
        await comes_to_rest(hands, "Suspended")
        for manifest in await whole_namespace(hands):
            metadata = manifest["metadata"]
            marks = [*metadata.get("finalizers", []), *metadata.get("annotations", {})]
            assert not [mark for mark in marks if "kopf" in mark.lower() or "zalando" in mark.lower()]
            writers = {entry["manager"] for entry in metadata.get("managedFields", [])}
            assert not [writer for writer in writers if "kopf" in writer.lower()]
    written = {call.resource for call in proxy.calls if call.verb in WRITES}
    assert written == {
        "events",
        "leases",
        "networkpolicies",
        "persistentvolumeclaims",
        "secrets",
        "services",
        "statefulsets",
        "trainingsessions/status",
    }


async def test_finalizers_of_other_operators_built_on_the_same_framework_stay(
    hands: KubectlUser, kubelet: Kubelet, proxy: ApiProxy
) -> None:
    kopf_finalizer = "kopf.zalando.org/KopfFinalizerMarker"
    async with running(settings_for(hands.namespace)):
        manifest = session_manifest()
        manifest["metadata"]["finalizers"] = [kopf_finalizer]
        await hands.create(SESSIONS, manifest)
        ready = await comes_to_rest(hands, "WorkerReady")
        assert ready["metadata"]["finalizers"] == [kopf_finalizer]
        await hands.patch(SESSIONS, "tiny", {"metadata": {"finalizers": None}})


async def test_an_operator_that_can_watch_no_more_ends_and_says_why(hands: KubectlUser, proxy: ApiProxy) -> None:
    """Rather than seem alive and see nothing; the kubelet starts it anew."""
    async with operator_program(settings_for(hands.namespace)) as program:
        await eventually(lambda: seen(proxy, "watch", "services"), "the Services are watched")
        proxy.fault = lambda call: 409 if (call.verb, call.resource) == ("watch", "services") else None
        proxy.cut_watches()
        assert await program.ended() == 1
    assert "The watch of the cluster failed" in program.log


async def seen(proxy: ApiProxy, verb: str, resource: str) -> bool:
    return any((call.verb, call.resource) == (verb, resource) for call in proxy.calls)
