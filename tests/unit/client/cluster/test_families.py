"""Owners and their objects, and the family that a user's words select."""

from __future__ import annotations

import pytest
from support.kubernetes import families
from tinsmith.cluster.families import Kind, Target, assemble, choose, list_readable, parse_target, read_families
from tinsmith.cluster.kubectl import Forbidden, KindUnknown, Kubectl, Misused, NotFound
from tinsmith.cluster.manifests import Manifest, name_of
from typing_extensions import override


class Canned(Kubectl):
    """A kubectl with an answer for each resource; an exception is raised."""

    def __init__(self, answers: dict[str, list[Manifest] | Exception]) -> None:
        super().__init__(program="never-run")
        self._answers = answers

    @override
    def find(self, resources: str, selector: str | None = None) -> list[Manifest]:
        found: list[Manifest] = []
        for resource in resources.split(","):
            answer = self._answers.get(resource, [])
            if isinstance(answer, Exception):
                raise answer
            found += answer
        return found


SESSION = families.session()
POOL = families.pool("qwen")


def test_children_are_found_by_their_label_and_claims_by_their_name() -> None:
    other = families.session("other")
    children = [
        families.pod("qwen-0", of=SESSION),
        families.pod("other-0", of=other),
        families.workload(SESSION),
        families.claim(SESSION),
        families.claim(other),
    ]
    [family, _] = assemble({Kind.SESSION: [SESSION, other], Kind.POOL: []}, children)
    assert [name_of(pod) for pod in family.pods] == ["qwen-0"]
    assert family.workload is not None
    assert family.claim is not None
    assert (name_of(family.workload), name_of(family.claim)) == ("qwen", "qwen-journal")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("qwen", Target("qwen")),
        ("session/qwen", Target("qwen", Kind.SESSION)),
        ("pool/qwen", Target("qwen", Kind.POOL)),
        ("tsess/qwen", Target("qwen", Kind.SESSION)),
        ("spool/qwen", Target("qwen", Kind.POOL)),
        ("trainingsession.tinsmith.dev/qwen", Target("qwen", Kind.SESSION)),
        ("samplerpools/qwen", Target("qwen", Kind.POOL)),
    ],
)
def test_a_name_may_say_its_kind(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["pod/qwen", "session/", "a/b/c"])
def test_a_name_of_an_unknown_kind_is_a_misuse(text: str) -> None:
    with pytest.raises(Misused, match="NAME nor session/NAME nor pool/NAME"):
        parse_target(text)


def test_a_name_of_both_kinds_must_be_told_apart() -> None:
    both = assemble({Kind.SESSION: [SESSION], Kind.POOL: [POOL]}, [])
    with pytest.raises(Misused, match="write session/qwen or pool/qwen"):
        choose(both, Target("qwen"))
    assert choose(both, Target("qwen", Kind.POOL)).kind is Kind.POOL


def test_a_name_that_is_not_there_says_what_was_looked_for() -> None:
    with pytest.raises(NotFound, match="no SamplerPool draws here"):
        choose([], Target("draws", Kind.POOL))


def test_unreadable_objects_are_named_and_the_others_are_shown() -> None:
    pods = [families.pod("qwen-0", of=SESSION)]
    found, unread = list_readable(Canned({"pods": pods, "events": Forbidden("You may not.")}), ("pods", "events"), None)
    assert found == pods
    assert unread == ["events not shown: You may not."]


def test_a_cluster_without_pools_shows_its_sessions_and_one_without_both_kinds_is_an_error() -> None:
    no_pools = Canned({Kind.SESSION.resource: [SESSION], Kind.POOL.resource: KindUnknown("no pools")})
    assert [family.name for family in read_families(no_pools).families] == ["qwen"]
    with pytest.raises(KindUnknown, match="no sessions"):
        read_families(Canned({kind.resource: KindUnknown(f"no {kind.word}s") for kind in Kind}))


def group(name: str = "qwen") -> Manifest:
    """Return a session of two nodes."""
    session = families.session(name)
    return {**session, "spec": {**session["spec"], "parallelism": {"nodes": 2}}}


def members_of(session: Manifest) -> list[Manifest]:
    """Return the pods as KubeRay names them; the worker is the second by name."""
    member, head = families.pod("qwen-a-worker-x", of=session), families.pod("qwen-head-x", of=session)
    member["metadata"]["labels"]["app.kubernetes.io/name"] = "tinsmith-worker-member"
    return [member, head]


def test_a_session_of_several_nodes_has_a_ray_cluster_and_its_worker_first() -> None:
    session = group()
    cluster = families.child("RayCluster", "qwen", of=session, spec={"workerGroupSpecs": [{"replicas": 1}]})
    answers: dict[str, list[Manifest] | Exception] = {
        Kind.SESSION.resource: [session],
        "pods": members_of(session),
        "rayclusters.ray.io": [cluster],
    }
    [family] = read_families(Canned(answers)).families
    assert family.workload == cluster
    assert [name_of(pod) for pod in family.pods] == ["qwen-head-x", "qwen-a-worker-x"]


def conversions_of(session: Manifest) -> list[Manifest]:
    pods = [families.pod("qwen-conversion-1", of=session), families.pod("qwen-conversion-2", of=session)]
    for hour, pod in enumerate(pods):
        pod["metadata"]["labels"]["app.kubernetes.io/name"] = "tinsmith-conversion"
        pod["metadata"]["creationTimestamp"] = f"2026-01-02T0{hour}:00:00Z"
    return pods


@pytest.mark.parametrize(
    ("others", "shown"),
    [([], ["qwen-conversion-2", "qwen-conversion-1"]), (members_of(group()), ["qwen-head-x", "qwen-a-worker-x"])],
    ids=["no worker yet", "a worker"],
)
def test_the_conversion_of_a_model_is_shown_until_a_worker_exists(others: list[Manifest], shown: list[str]) -> None:
    session = group()
    answers: dict[str, list[Manifest] | Exception] = {
        Kind.SESSION.resource: [session],
        "pods": [*conversions_of(session), *others],
    }
    [family] = read_families(Canned(answers)).families
    assert [name_of(pod) for pod in family.pods] == shown


@pytest.mark.parametrize("sessions", [[SESSION], [group()]], ids=["not needed", "missing"])
def test_a_cluster_without_kuberay_shows_its_sessions(sessions: list[Manifest]) -> None:
    answers: dict[str, list[Manifest] | Exception] = {
        Kind.SESSION.resource: sessions,
        "rayclusters.ray.io": KindUnknown("no RayClusters"),
    }
    seen = read_families(Canned(answers))
    assert len(seen.families) == 1
    assert seen.unread == ()
