"""The operator dies between any two of its writes, and another one takes over: the state in the end is the same."""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlUser, Kubelet, whole_namespace
from support.operator.operators import Writes, comes_to_rest, eventually, running, session_manifest, settings_for
from tinsmith_operator.kube.resources import SESSIONS

# Of the longest life there are fewer; `test_every_write_is_a_cut_point` says when this must grow.
MOST_WRITES = 64
# Every life makes these. How many more depends on the machine: changes of the status that come together are one write,
# and a life that goes on as soon as it has come to where it should lets more of them come together than one that rests.
FEWEST_WRITES = 40
QUIET_LOOKS = 8
NEW_IMAGE = "docker.io/tinsmith/trainer:0.2.0"
DELETES = {"retentionPolicy": {"whenDeleted": "Delete"}}

Step = Callable[[KubectlUser], Awaitable[Any]]
Life = tuple[tuple[str, Step, Step], ...]
"""What is done, in words; how; and what is waited for."""


async def create(hands: KubectlUser) -> None:
    await hands.create(SESSIONS, session_manifest(storage=DELETES))


def change(reason: str, **spec: Any) -> tuple[Step, Step]:
    return (
        lambda hands: hands.patch(SESSIONS, "tiny", {"spec": spec}),
        lambda hands: comes_to_rest(hands, reason),
    )


async def is_gone(hands: KubectlUser) -> None:
    """With its children: the garbage collector takes half a minute to hear of a CRD that was just installed."""

    async def look() -> bool:
        objects = await whole_namespace(hands)
        return not any(item["kind"] == SESSIONS.kind or item["metadata"].get("ownerReferences") for item in objects)

    await eventually(look, "the session is gone")


LIFE: Life = (
    ("created", create, lambda hands: comes_to_rest(hands, "WorkerReady")),
    ("suspended", *change("Suspended", suspend=True)),
    ("resumed", *change("WorkerReady", suspend=False)),
    ("upgraded", *change("WorkerReady", pod={"image": NEW_IMAGE})),
    ("deleted", lambda hands: hands.delete(SESSIONS, "tiny"), is_gone),
)


@asynccontextmanager
async def succession(hands: KubectlUser, cut_before: int) -> AsyncIterator[Writes]:
    """An operator that dies before that write, and one that takes over; 0 is one that lives."""
    settings = settings_for(hands.namespace, identity="the-same-pod")
    first = Writes(cut_before)
    ends = asyncio.Event()

    async def reign() -> None:
        async with running(settings, first):
            await either(first.was_cut, ends)
        if not ends.is_set():
            async with running(settings):
                await ends.wait()

    reigning = asyncio.create_task(reign())
    try:
        yield first
    finally:
        ends.set()
        await reigning


async def either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def live(
    hands: KubectlUser,
    cut_before: int,
    expected: dict[str, str] | None = None,
    life: Life | None = None,
    counting_from: str | None = None,
) -> tuple[dict[str, str], int]:
    """The normalised namespace after each step of the life, and how many writes the first operator made.

    expected: what it must come to after each step; without it, whatever has not changed for a while.
    counting_from: the step with which the count of writes begins, the cut's and the answer's.
    """
    states: dict[str, str] = {}
    uncounted = 0
    async with succession(hands, cut_before if counting_from is None else 0) as writes:
        for name, begin, rests in life or LIFE:
            if name == counting_from:
                uncounted = writes.count
                writes.cut_before = uncounted + cut_before
            await begin(hands)
            await rests(hands)
            states[name] = await (quiet(hands) if expected is None else coming_to(hands, expected[name], name))
    return states, writes.count - uncounted


async def quiet(hands: KubectlUser) -> str:
    """The state, once it has stayed for longer than it takes a worker to report."""
    state, unchanged = await normalised(hands), 0
    while unchanged < QUIET_LOOKS:
        await asyncio.sleep(0.2)
        now = await normalised(hands)
        state, unchanged = now, unchanged + 1 if now == state else 0
    return state


async def coming_to(hands: KubectlUser, expected: str, step: str) -> str:
    async def is_there() -> bool:
        return await normalised(hands) == expected

    try:
        await eventually(is_there, step)
    except AssertionError:
        difference = difflib.unified_diff(
            expected.splitlines(), (await normalised(hands)).splitlines(), "undisturbed", "survived", n=8, lineterm=""
        )
        pytest.fail(f"after it was {step}:\n" + "\n".join(difference))
    return expected


async def normalised(hands: KubectlUser) -> str:
    """What is there, without what differs from run to run: names that stand for UIDs, no times, no keys."""
    objects = [item for item in await whole_namespace(hands) if not is_replica(item)]
    uids = {item["metadata"]["uid"]: f"uid of {item['kind']} {item['metadata']['name']}" for item in objects}
    text = json.dumps([bare(item) for item in objects], indent=1, sort_keys=True)
    for uid, name in uids.items():
        text = text.replace(uid, name)
    text = text.replace(hands.namespace, "the-namespace")
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "uid of what is gone", text)
    # Hashes are of manifests that name UIDs.
    hashes = "tinsmith.dev/asked|tinsmith.dev/configuration|tinsmith.dev/inputs|controller-revision-hash"
    text = re.sub(rf'"({hashes})": "[^"]+"', r'"\1": "a hash"', text)
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "some time", text)


def bare(item: dict[str, Any]) -> dict[str, Any]:
    dropped = {"resourceVersion", "managedFields", "creationTimestamp", "generation"}
    metadata = {name: value for name, value in item["metadata"].items() if name not in dropped}
    # The revision counts templates; the pod's own status is ours to write.
    rest = {name: value for name, value in item.items() if name not in ("metadata", "data")}
    if item["kind"] in ("StatefulSet", "Deployment", "PodDisruptionBudget", "Pod"):
        rest.pop("status", None)
    if item["kind"] in ("TrainingSession", "SamplerPool"):
        rest = {**rest, "status": bare_status(item["status"])}
    return {**rest, "metadata": metadata, "data": sorted(item.get("data", {}))}


def is_replica(item: dict[str, Any]) -> bool:
    """A pod whose name is drawn by lot. The Deployment, with its count of revisions, tells how it came to be."""
    return item["kind"] == "Pod" and "pod-template-hash" in item["metadata"].get("labels", {})


def bare_status(status: dict[str, Any]) -> dict[str, Any]:
    """Without what counts generations."""
    conditions = [{**condition, "observedGeneration": 0} for condition in status["conditions"]]
    return {**status, "conditions": conditions}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Filled by the first test that needs it."""
    return {}


async def reference(undisturbed: dict[str, Any], hands: KubectlUser) -> tuple[dict[str, str], int]:
    if not undisturbed:
        states, writes = await live(hands, cut_before=0)
        undisturbed.update(states=states, writes=writes)
    return undisturbed["states"], undisturbed["writes"]


async def test_every_write_is_a_cut_point(hands: KubectlUser, kubelet: Kubelet, undisturbed: dict[str, Any]) -> None:
    _, writes = await reference(undisturbed, hands)
    assert FEWEST_WRITES <= writes <= MOST_WRITES


@pytest.mark.parametrize("cut_before", range(1, MOST_WRITES + 1))
async def test_a_successor_ends_where_an_undisturbed_operator_does(
    hands: KubectlUser, kubelet: Kubelet, undisturbed: dict[str, Any], cut_before: int
) -> None:
    states, writes = await reference(undisturbed, hands)
    if cut_before > writes:
        return
    _, made = await live(hands, cut_before, states)
    assert made >= min(cut_before, FEWEST_WRITES), "the operator should have died"
