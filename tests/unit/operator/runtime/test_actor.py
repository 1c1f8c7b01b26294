from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest
from support.operator.fake_cluster import FakeCluster
from support.simulated_time import simulated_time
from tinsmith_operator.api.names import CONFIGURATION_ANNOTATION, MANAGED_BY_LABEL, MANAGER
from tinsmith_operator.api.training_session import TrainingSession, parse_session
from tinsmith_operator.ca.certificates import read_facts
from tinsmith_operator.ca.issuer import Issuer
from tinsmith_operator.common.actions import (
    AddFinalizer,
    Apply,
    Create,
    Delete,
    Emit,
    EventType,
    IssueCertificate,
    RemoveFinalizer,
    WriteStatus,
)
from tinsmith_operator.common.drift import as_stored, holds
from tinsmith_operator.errors import AlreadyExists, Conflict, NotFound, NotLeading, Refused, Unavailable
from tinsmith_operator.kube.cache import Cache, trimmed
from tinsmith_operator.kube.events import Events
from tinsmith_operator.kube.resources import SECRETS, SERVICES, SESSIONS, Key, Ref
from tinsmith_operator.runtime.actor import BELIEVED_SECONDS, Actor

SESSION = Ref(SESSIONS.kind, "tin", "tiny")
SERVICE = Ref(SERVICES.kind, "tin", "tiny")
SECRET = Ref(SECRETS.kind, "tin", "tiny-tls")
SPEC = {"model": {"name": "m", "source": {"type": "Hub", "hub": {"repository": "a/b"}}}}
MANAGED = {MANAGED_BY_LABEL: MANAGER}
EVENT = Emit(EventType.NORMAL, "Ready", "It is ready.")


class House:
    """An actor and what it acts on."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.enqueued: list[Key] = []
        self.cache = Cache(self.enqueued.append)
        client = cast(Any, self.cluster)
        self.issuer = Issuer(
            client, namespace="tin", release="tinsmith", authority_secret="ca", api_server_secret="client"
        )
        self.actor = Actor(client, self.cache, self.issuer, Events(client, "operator-0"))
        self.cluster.put(manifest(SESSION, generation=1) | {"spec": SPEC})
        self.cache.note(self.cluster.objects[SESSION])

    @property
    def session(self) -> TrainingSession:
        return parse_session(self.cluster.objects[SESSION])

    def events(self) -> list[tuple[str, int]]:
        return [(each["reason"], each["count"]) for ref, each in self.cluster.objects.items() if ref.kind == "Event"]

    async def act(self, *actions: Any) -> None:
        await self.actor.act(self.session, actions)


def manifest(ref: Ref, **metadata: Any) -> dict[str, Any]:
    api_version = SESSIONS.api_version if ref.kind == SESSIONS.kind else "v1"
    return {
        "apiVersion": api_version,
        "kind": ref.kind,
        "metadata": {"name": ref.name, "namespace": ref.namespace, "labels": MANAGED, **metadata},
    }


@pytest.fixture
def house() -> House:
    return House()


def guard_of(house: House, ref: Ref) -> tuple[str, str]:
    metadata = house.cluster.objects[ref]["metadata"]
    return metadata["uid"], metadata["resourceVersion"]


async def test_created_objects_are_in_the_cache_before_a_watch_event(house: House) -> None:
    await house.act(Create(manifest(SERVICE)))
    assert house.cache.peek(SERVICE) == house.cluster.objects[SERVICE]


async def test_a_foreign_object_under_the_name_is_looked_at_and_left_alone(house: House) -> None:
    foreign = house.cluster.put(manifest(SERVICE, labels={}) | {"spec": {"of": "another owner"}})
    with pytest.raises(AlreadyExists):
        await house.act(Create(manifest(SERVICE)), WriteStatus({}))
    assert house.cluster.objects[SERVICE] == foreign
    assert house.cache.peek(SERVICE) == trimmed(foreign)
    assert "apply" not in [verb for verb, _, _ in house.cluster.requests]


@simulated_time
async def test_a_foreign_object_that_no_watch_shows_is_believed_for_a_minute() -> None:
    house = House()
    house.cluster.put(manifest(SECRET, labels={}))
    house.cache.read(SECRET, Key("tin", "tiny", "TrainingSession"))
    with pytest.raises(AlreadyExists):
        await house.act(Create(manifest(SECRET)))
    await asyncio.sleep(BELIEVED_SECONDS - 1)
    assert house.cache.peek(SECRET) is not None
    house.enqueued.clear()
    await asyncio.sleep(2)
    assert house.cache.peek(SECRET) is None
    assert house.enqueued == [Key("tin", "tiny", "TrainingSession")]


async def test_an_apply_first_takes_over_the_fields_of_the_operators_post(house: House) -> None:
    own_entry = {"manager": MANAGER, "operation": "Update", "fieldsV1": {"f:spec": {}}}
    foreign_entry = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status"}
    house.cache.note(house.cluster.put(manifest(SERVICE, managedFields=[own_entry, foreign_entry])))
    await house.act(Apply(manifest(SERVICE), *guard_of(house, SERVICE)))
    assert [verb for verb, _, _ in house.cluster.requests] == ["get", "own", "apply"]
    assert house.cluster.objects[SERVICE]["metadata"]["managedFields"] == [
        {**own_entry, "operation": "Apply"},
        foreign_entry,
    ]


async def test_an_apply_that_fails_after_the_fields_were_taken_over_leaves_the_object_unfinished(
    house: House,
) -> None:
    """Otherwise another manager's values would count as the operator's own."""
    others = {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {"f:ports": {}}}}
    annotations = {CONFIGURATION_ANNOTATION: "a hash", "example.com/mine": "kept"}
    wanted = manifest(SERVICE, annotations=annotations)
    house.cache.note(house.cluster.put(manifest(SERVICE, annotations=annotations, managedFields=[others])))
    house.cluster.failures["apply"] = [Conflict("another writer was faster")]
    with pytest.raises(Conflict):
        await house.act(Apply(wanted, *guard_of(house, SERVICE)))
    live = house.cluster.objects[SERVICE]
    assert live["metadata"]["annotations"] == {"example.com/mine": "kept"}
    assert not holds(live, wanted)


async def test_an_apply_to_a_changed_object_changes_nothing_and_reads_it_again(house: House) -> None:
    house.cache.note(house.cluster.put(manifest(SERVICE)))
    uid, version = guard_of(house, SERVICE)
    newer = house.cluster.put(manifest(SERVICE, uid=uid) | {"spec": {"newer": True}})
    with pytest.raises(Conflict):
        await house.act(Apply(manifest(SERVICE) | {"spec": {"ours": True}}, uid, version))
    assert house.cluster.objects[SERVICE] == newer
    assert house.cache.peek(SERVICE) == newer


@pytest.mark.parametrize(
    ("answer", "is_there"),
    [
        ({"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": 30}, True),
        ({"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": 0, "finalizers": ["x"]}, True),
        ({"deletionTimestamp": "2026-01-02T03:04:05Z", "deletionGracePeriodSeconds": 0}, False),
        ({}, False),
    ],
    ids=["takes its time", "is held by a finalizer", "without a node", "at once"],
)
async def test_an_answer_that_comes_after_the_end_was_told_brings_nothing_back(
    house: House, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], is_there: bool
) -> None:
    live = house.cluster.put(manifest(SERVICE))
    house.cache.note(live)
    uid, version = live["metadata"]["uid"], live["metadata"]["resourceVersion"]

    async def delete(*_: Any) -> dict[str, Any]:
        last_version = str(int(version) + 1)
        if not is_there:
            house.cache.note_end(SERVICE, uid, int(last_version))
        return {**live, "metadata": {**live["metadata"], **answer, "resourceVersion": last_version}}

    monkeypatch.setattr(house.cluster, "delete", delete)
    await house.act(Delete(SERVICE.kind, SERVICE.name, uid, "why"))
    assert (house.cache.peek(SERVICE) is not None) is is_there


def remade_while_it_is_looked_for(house: House, monkeypatch: pytest.MonkeyPatch, ref: Ref) -> dict[str, Any]:
    """Delete and recreate the object: the next GET finds nothing, and the watch reports a new one before its answer."""
    successor = house.cluster.put(house.cluster.objects[ref] | {"metadata": manifest(ref)["metadata"]})
    del house.cluster.objects[ref]

    async def get(*_: Any) -> None:
        house.cache.note_end(ref, house.cache.peek(ref)["metadata"]["uid"], 100)  # type: ignore[index]
        house.cache.note(successor)
        raise NotFound("it was not there yet")

    monkeypatch.setattr(house.cluster, "get", get)
    return successor


async def test_a_session_created_again_while_its_predecessor_is_looked_for_is_not_forgotten(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = house.session
    successor = remade_while_it_is_looked_for(house, monkeypatch, SESSION)
    with pytest.raises(NotFound):
        await house.actor.act(old, [WriteStatus({"epoch": 1})])
    assert house.cache.peek(SESSION) == successor
    assert house.cache.reconciled() == [Key("tin", "tiny", "TrainingSession")]


async def test_a_child_created_again_while_its_predecessor_is_looked_for_is_not_forgotten(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.cache.note(house.cluster.put(manifest(SERVICE)))
    uid, version = guard_of(house, SERVICE)
    successor = remade_while_it_is_looked_for(house, monkeypatch, SERVICE)
    house.cluster.failures["apply"] = [Conflict("it is gone")]
    with pytest.raises(Conflict):
        await house.act(Apply(manifest(SERVICE), uid, version))
    assert house.cache.peek(SERVICE) == successor


async def test_a_certificate_is_issued_into_the_secret_with_everything_a_worker_needs(house: House) -> None:
    await house.issuer.refresh()
    labelled = manifest(SECRET, labels={MANAGED_BY_LABEL: MANAGER}) | {"type": "kubernetes.io/tls"}
    await house.act(IssueCertificate(labelled, ("w.worker.tinsmith.internal",), None, None))
    facts = read_facts(house.cluster.objects[SECRET])
    assert facts is not None
    assert facts.dns_names == ("w.worker.tinsmith.internal",)
    assert facts.authority_fingerprint == house.issuer.authority.fingerprint
    before = house.cluster.objects[SECRET]["data"]
    await house.act(IssueCertificate(labelled, ("w.worker.tinsmith.internal",), *guard_of(house, SECRET)))
    assert house.cluster.objects[SECRET]["data"] != before


async def test_finalizers_and_status_of_one_decision_follow_each_other(house: House) -> None:
    """The second write goes to the version that the first one made."""
    await house.act(AddFinalizer("tinsmith.dev/claim"), WriteStatus({"epoch": 3}))
    written = house.cluster.objects[SESSION]
    assert written["metadata"]["finalizers"] == ["tinsmith.dev/claim"]
    assert written["status"] == {"epoch": 3}
    await house.act(RemoveFinalizer("tinsmith.dev/claim"))
    assert house.cluster.objects[SESSION]["metadata"]["finalizers"] == []


async def test_a_status_for_an_older_session_is_not_written(house: House) -> None:
    old = house.session
    newer = house.cluster.put(house.cluster.objects[SESSION])
    with pytest.raises(Conflict):
        await house.actor.act(old, [WriteStatus({"epoch": 3})])
    assert house.cluster.objects[SESSION] == newer
    assert house.cache.peek(SESSION) == newer


async def test_the_first_failure_ends_the_round(house: House) -> None:
    house.cluster.failures["create"] = [NotLeading("no lease")]
    with pytest.raises(NotLeading):
        await house.act(Create(manifest(SERVICE)), WriteStatus({"epoch": 3}))
    assert "status" not in house.cluster.objects[SESSION]


@pytest.mark.parametrize(
    ("verb", "error"),
    [("create", NotLeading("no lease")), ("create", Unavailable("down")), ("apply", Unavailable("no answer"))],
    ids=["lease renewed late", "event not answered", "status not answered"],
)
async def test_an_event_that_was_not_written_is_written_once_in_the_next_round(
    house: House, verb: str, error: Exception
) -> None:
    house.cluster.failures[verb] = [error]
    with contextlib.suppress(NotLeading, Unavailable):
        await house.act(WriteStatus({"epoch": 3}), EVENT)
    assert house.events() == []
    await house.act(*((WriteStatus({"epoch": 3}), EVENT) if verb == "apply" else ()))
    assert house.events() == [("Ready", 1)]
    await house.act()
    assert house.events() == [("Ready", 1)]


async def test_an_event_of_a_status_that_was_not_written_is_not_kept(house: House) -> None:
    house.cluster.failures["create"] = [NotLeading("no lease")]
    with pytest.raises(NotLeading):
        await house.act(EVENT, WriteStatus({"epoch": 3}), Emit(EventType.NORMAL, "Suspended", "It is stopped."))
    await house.act()
    assert house.events() == [("Ready", 1)]


async def test_while_no_event_is_answered_the_rest_is_done_and_one_request_is_made_a_round(house: House) -> None:
    other = Emit(EventType.WARNING, "JournalReplaced", "The claim is another one.")
    house.cluster.failures["create"] = [Unavailable("down")]
    await house.act(EVENT, other, WriteStatus({"epoch": 3}))
    assert house.cluster.objects[SESSION]["status"] == {"epoch": 3}
    assert [verb for verb, kind, _ in house.cluster.requests if kind == "Event"] == ["create"]
    await house.act()
    assert house.events() == [("Ready", 1), ("JournalReplaced", 1)]


async def test_a_refusal_is_kept_until_it_succeeds_and_does_not_keep_the_status_from_being_told(house: House) -> None:
    house.cluster.failures["create"] = [Refused("exceeded quota")]
    with pytest.raises(Refused):
        await house.act(Create(manifest(SERVICE)), Create(manifest(SECRET)), WriteStatus({"epoch": 3}))
    assert house.actor.refusals(Key("tin", "tiny", "TrainingSession")) == {"Service": "exceeded quota"}
    assert SECRET not in house.cluster.objects
    assert house.cluster.objects[SESSION]["status"] == {"epoch": 3}
    await house.act(Create(manifest(SERVICE)))
    assert house.actor.refusals(Key("tin", "tiny", "TrainingSession")) == {}


async def test_the_stored_form_is_remembered_until_an_answer_has_the_requested_form(house: House) -> None:
    key, wanted = Key("tin", "tiny", "TrainingSession"), manifest(SERVICE) | {"spec": {"ports": [1]}}
    house.cluster.rewrite = lambda sent: sent.update(spec={"ports": [2]})
    await house.act(Create(wanted))
    live = house.cache.peek(SERVICE)
    assert live is not None
    assert house.actor.stored(key) == {"Service": as_stored(wanted, live)}
    house.cluster.rewrite = lambda sent: None
    await house.act(Apply(wanted, *guard_of(house, SERVICE)))
    assert house.actor.stored(key) == {}


async def test_a_certificate_that_was_stored_otherwise_is_known_by_what_was_wanted_of_its_secret(house: House) -> None:
    key, wanted = Key("tin", "tiny", "TrainingSession"), {**manifest(SECRET), "type": "kubernetes.io/tls"}
    house.cluster.rewrite = lambda sent: sent.update(type="Opaque")
    await house.issuer.refresh()
    await house.act(IssueCertificate(wanted, ("name",), None, None))
    live = house.cache.peek(SECRET)
    assert live is not None
    assert house.actor.stored(key) == {"Secret": as_stored(wanted, live)}
    house.actor.forget(key)
    assert house.actor.stored(key) == {}


async def test_a_status_that_is_refused_keeps_no_child_from_being_kept(house: House) -> None:
    """An older CRD refuses such a status."""
    house.cluster.failures["apply"] = [Refused(".status.group: field not declared in schema")]
    with pytest.raises(Refused, match="field not declared"):
        await house.act(WriteStatus({"epoch": 3}), EVENT, Create(manifest(SERVICE)))
    assert SERVICE in house.cluster.objects
    assert "Event" in [ref.kind for ref in house.cluster.objects]
    assert "status" not in house.cluster.objects[SESSION]
    assert house.actor.refusals(Key("tin", "tiny", "TrainingSession")) == {}, "it says nothing about a child"


async def test_the_same_decision_taken_again_tells_its_event_once(house: House) -> None:
    session = house.session
    await house.actor.act(session, [EVENT])
    await house.actor.act(session, [EVENT])
    events = [ref for ref in house.cluster.objects if ref.kind == "Event"]
    assert len(events) == 1


async def test_the_same_words_about_later_states_are_counted_in_one_event(house: House) -> None:
    for _ in range(3):
        await house.act(EVENT)
        await house.act(EVENT)
        house.cluster.put(house.cluster.objects[SESSION])
    [event] = [live for ref, live in house.cluster.objects.items() if ref.kind == "Event"]
    assert event["count"] == 3
    assert event["lastTimestamp"] >= event["firstTimestamp"]


async def test_deleting_spares_another_object_of_the_name(house: House) -> None:
    house.cluster.put(manifest(SERVICE))
    await house.act(Delete(SERVICE.kind, SERVICE.name, "of-its-predecessor", "test"))
    assert SERVICE in house.cluster.objects
