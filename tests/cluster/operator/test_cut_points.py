"""An operator dies between any two of its writes, as does each of its successors: the state in the end is the same."""

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
from tinsmith_operator.settings import Settings

# Each successor makes so many writes and dies before its next one. With a first operator that dies before its first,
# second, … eighth write, some operator dies before every write of the life.
WRITES_PER_REIGN = 8
# Every life makes these. How many more depends on the machine: changes of the status that come together are one write,
# and a life without pauses between its steps combines more of them than one that rests.
FEWEST_WRITES = 40
QUIET_LOOKS = 8
NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"
DELETES = {"retentionPolicy": {"whenDeleted": "Delete"}}

Step = Callable[[KubectlUser], Awaitable[Any]]
Life = tuple[tuple[str, Step, Step], ...]
"""The action, in words; the function; and the condition after it."""


async def create(hands: KubectlUser) -> None:
    await hands.create(SESSIONS, session_manifest(storage=DELETES))


def change(reason: str, **spec: Any) -> tuple[Step, Step]:
    return (
        lambda hands: hands.patch(SESSIONS, "tiny", {"spec": spec}),
        lambda hands: comes_to_rest(hands, reason),
    )


async def is_gone(hands: KubectlUser) -> None:
    """Wait until it is gone with its children: the garbage collector learns of a new CRD after half a minute."""

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


class Succession:
    """Operators of one namespace, each of which dies before a certain write of its own; the next one takes over."""

    def __init__(self, first_cut: int, writes_per_reign: int) -> None:
        """first_cut: before which of its writes the first operator dies (from 1); 0 is one that lives."""
        self._cut_before = first_cut
        self._later_cuts = writes_per_reign + 1 if first_cut else 0
        self._ends = asyncio.Event()
        self.reigns: list[Writes] = []

    @property
    def deaths(self) -> int:
        return sum(writes.was_cut.is_set() for writes in self.reigns)

    @asynccontextmanager
    async def over(self, hands: KubectlUser) -> AsyncIterator[None]:
        reigning = asyncio.create_task(self._reign(settings_for(hands.namespace, identity="the-same-pod")))
        try:
            yield
        finally:
            self._ends.set()
            await reigning

    async def _reign(self, settings: Settings) -> None:
        while not self._ends.is_set():
            writes = Writes(self._cut_before)
            self.reigns.append(writes)
            async with running(settings, writes):
                await either(writes.was_cut, self._ends)
            self._cut_before = self._later_cuts


async def either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def live(
    hands: KubectlUser,
    life: Life,
    expected: dict[str, str] | None = None,
    first_cut: int = 0,
    writes_per_reign: int = WRITES_PER_REIGN,
) -> tuple[dict[str, str], Succession]:
    """Return the normalised namespace after each step of the life, and its operators.

    expected: the state after each step; without it, a state that has not changed for a while.
    """
    states: dict[str, str] = {}
    succession = Succession(first_cut, writes_per_reign)
    async with succession.over(hands):
        for name, begin, rests in life:
            await begin(hands)
            await rests(hands)
            states[name] = await (quiet(hands) if expected is None else coming_to(hands, expected[name], name))
    return states, succession


async def quiet(hands: KubectlUser) -> str:
    """Return the state, once it has stayed for longer than a worker takes to report."""
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
        # A look is a list of every kind.
        await eventually(is_there, step, pause_seconds=0.2)
    except AssertionError:
        difference = difflib.unified_diff(
            expected.splitlines(), (await normalised(hands)).splitlines(), "undisturbed", "survived", n=8, lineterm=""
        )
        pytest.fail(f"after it was {step}:\n" + "\n".join(difference))
    return expected


async def normalised(hands: KubectlUser) -> str:
    """Return the objects without what differs from run to run: names instead of UIDs, no times, no keys."""
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
    """Return true for a pod with a random name. The Deployment and its revisions show its origin."""
    return item["kind"] == "Pod" and "pod-template-hash" in item["metadata"].get("labels", {})


def bare_status(status: dict[str, Any]) -> dict[str, Any]:
    """Return the status without generation counts."""
    conditions = [{**condition, "observedGeneration": 0} for condition in status["conditions"]]
    return {**status, "conditions": conditions}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """Return the undisturbed run, which the first test that needs it makes."""
    return {}


async def reference(undisturbed: dict[str, str], hands: KubectlUser) -> dict[str, str]:
    if not undisturbed:
        states, succession = await live(hands, LIFE)
        assert succession.reigns[0].count >= FEWEST_WRITES
        undisturbed.update(states)
    return undisturbed


@pytest.mark.parametrize("first_cut", range(1, WRITES_PER_REIGN + 1))
async def test_successors_end_where_an_undisturbed_operator_does(
    hands: KubectlUser, kubelet: Kubelet, undisturbed: dict[str, str], first_cut: int
) -> None:
    states = await reference(undisturbed, hands)
    _, succession = await live(hands, LIFE, states, first_cut)
    assert succession.deaths >= (FEWEST_WRITES - first_cut) // WRITES_PER_REIGN
