"""`kubectl tinsmith why`: an answer, and then the evidence, most relevant first. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from tinsmith.cluster.families import Family
from tinsmith.cluster.health import Health, is_outdated, judge, upgrade_hint
from tinsmith.cluster.manifests import (
    Manifest,
    ago,
    conditions_of,
    container_statuses,
    describe_ending,
    describe_state,
    moment,
    name_of,
    namespace_of,
    reference_to,
    uid_of,
)
from tinsmith.console import Branch

MOST_EVENTS = 12
LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class NamespaceFacts:
    """The objects in the family's namespace that may serve as evidence.

    `unread` has a message for each kind that could not be read.
    """

    events: tuple[Manifest, ...] = ()
    quotas: tuple[Manifest, ...] = ()
    unread: tuple[str, ...] = ()


def explain(family: Family, namespace_facts: NamespaceFacts, now: datetime) -> list[Branch]:
    """Return the answer as the first line, followed by the evidence."""
    verdict = judge(family)
    style = {Health.WELL: "green", Health.STUCK: "bold red", Health.UNSEEN: "bold red"}.get(verdict.health, "yellow")
    evidence = [
        *_owner(family),
        *_claim(family),
        *_pods(family, now),
        *_events(family, namespace_facts.events, now),
        *_quotas(family, namespace_facts.quotas),
        *(Branch(sentence, style="dim") for sentence in namespace_facts.unread),
    ]
    return [Branch(f"{family.title} is {verdict.headline}", style=style), Branch(verdict.message), *evidence]


def _owner(family: Family) -> Iterator[Branch]:
    if is_outdated(family):
        yield Branch("the spec has changed; the operator has not processed it yet", style="yellow")
    message = judge(family).message
    conditions = [
        Branch(f"{condition.type} {condition.reason}: {condition.message}")
        for condition in conditions_of(family.owner).values()
        if condition.holds and condition.message != message and condition.type in ("Ready", "Reconciling", "Degraded")
    ]
    if upgrade := upgrade_hint(family):
        conditions.append(Branch(f"{upgrade.type} {upgrade.reason}: {upgrade.message}"))
    if conditions:
        yield Branch("conditions", tuple(conditions))


def _claim(family: Family) -> Iterator[Branch]:
    claim = family.claim
    phase = (claim.get("status") or {}).get("phase") if claim is not None else "Bound"
    if claim is not None and phase != "Bound":
        storage_class = claim["spec"].get("storageClassName") or "the default storage class"
        yield Branch(f"{reference_to(claim)} is {phase}, of {storage_class}")


def _pods(family: Family, now: datetime) -> Iterator[Branch]:
    """Yield a tree for each pod that is not healthy."""
    for pod in family.pods:
        lines = (*_pod_conditions(pod), *_containers(pod, now))
        if lines:
            node = (pod.get("spec") or {}).get("nodeName")
            yield Branch(f"{reference_to(pod)} on {node or 'no node'}", lines)


def _pod_conditions(pod: Manifest) -> Iterator[Branch]:
    for condition in conditions_of(pod).values():
        if not condition.holds and (condition.reason or condition.message):
            text = ": ".join(part for part in (condition.reason, " ".join(condition.message.split())) if part)
            yield Branch(f"not {condition.type}: {text}")


def _containers(pod: Manifest, now: datetime) -> Iterator[Branch]:
    for container in container_statuses(pod):
        before = (container.get("lastState") or {}).get("terminated")
        if container.get("ready") and before is None:
            continue
        yield Branch(f"container {container['name']}: {describe_state(container, now)}")
        if before is not None:
            yield Branch(f"container {container['name']}, the run before: {describe_ending(before, now)}")


def _events(family: Family, events: Iterable[Manifest], now: datetime) -> Iterator[Branch]:
    """Yield the events about the family, newest first."""
    own_events = sorted((event for event in events if concerns(family, event)), key=_time_of, reverse=True)
    if own_events:
        yield Branch("events, newest first", tuple(_event(event, now) for event in own_events[:MOST_EVENTS]))


def concerns(family: Family, event: Manifest) -> bool:
    """Return whether the event is about the family.

    The UID of an Event's object must be the UID of an object of the family. For a deleted pod, the name must match,
    because the next pod of the StatefulSet has the same name.
    """
    about = event.get("involvedObject") or {}
    if about.get("uid") in {uid_of(member) for member in family.members}:
        return True
    place = (about.get("kind"), about.get("namespace"), about.get("name"))
    return place in {(member["kind"], namespace_of(member), name_of(member)) for member in family.members}


def _time_of(event: Manifest) -> datetime:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((read for text in times if (read := moment(text)) is not None), LONG_AGO)


def _event(event: Manifest, now: datetime) -> Branch:
    about = event["involvedObject"]
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    times = f", {count} times" if count > 1 else ""
    message = " ".join((event.get("message") or "").split())
    is_warning = event.get("type") == "Warning"
    kind = "warning " if is_warning else ""
    return Branch(
        f"{ago(_time_of(event), now)}{times}, {kind}{event.get('reason', '')} of "
        f"{about.get('kind', '').lower()}/{about.get('name', '')}: {message}",
        style="yellow" if is_warning else "",
    )


def _quotas(family: Family, quotas: Iterable[Manifest]) -> Iterator[Branch]:
    """Yield the quotas if a quota may prevent the creation of a pod."""
    if family.pods or judge(family).health in (Health.WELL, Health.RESTING):
        return
    for quota in quotas:
        status = quota.get("status") or {}
        used, hard = status.get("used") or {}, status.get("hard") or {}
        lines = tuple(Branch(f"{name}: {used.get(name, '0')} of {limit}") for name, limit in sorted(hard.items()))
        if lines:
            yield Branch(f"{reference_to(quota)}", lines)
