"""The fate of a deleted session and of its volume."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support.operator.resources import IMAGE, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.names import CLAIM_FINALIZER
from tinsmith_operator.common.actions import AddFinalizer, Delete, RemoveFinalizer

DELETE = {"retentionPolicy": {"whenDeleted": "Delete"}}
CLAIM = ("PersistentVolumeClaim", "qwen-journal")


def settled_world(**spec: object) -> World:
    world = World(session_manifest(**spec))
    world.settle()
    return world


def ready_reason(world: World) -> str:
    assert world.session is not None
    return str(world.session["status"]["conditions"][0]["reason"])


def test_a_session_that_retains_its_volume_has_no_finalizer() -> None:
    world = settled_world()
    assert world.session is not None
    assert "finalizers" not in world.session["metadata"]
    world.user_deletes_owner()
    assert world.session is None


def test_a_session_that_deletes_its_volume_is_held_before_anything_is_made() -> None:
    world = World(session_manifest(storage=DELETE))
    assert world.decide().actions == (AddFinalizer(CLAIM_FINALIZER),)


def test_a_retained_volume_is_taken_up_again_by_the_next_session_of_that_name() -> None:
    world = settled_world()
    worker_id = world.objects[CLAIM]["metadata"]["uid"]
    world.user_deletes_owner()
    world.settle()
    again = session_manifest()
    again["metadata"]["uid"] = "another-session-uid"
    world.session = again
    world.settle()
    assert world.session["status"]["workerId"] == worker_id


def test_the_worker_runs_on_until_its_adapters_are_saved() -> None:
    world = settled_world(storage=DELETE)
    world.user_deletes_owner()
    world.time_passes(timedelta(seconds=5))
    world.worker_reports(adapters_used=2)
    world.operate()
    assert ready_reason(world) == "WaitingForCheckpoints"
    assert ("StatefulSet", "qwen") in world.objects
    world.worker_reports(adapters_used=0)
    assert [type(action) for action in world.operate()][-1] is Delete
    assert ready_reason(world) == "Deleting"


def test_a_deletion_has_a_time_limit() -> None:
    world = settled_world(storage=DELETE)
    world.user_deletes_owner()
    world.operate()
    world.time_passes(timedelta(seconds=599))
    world.worker_reports(adapters_used=2)
    world.operate()
    assert ("StatefulSet", "qwen") in world.objects
    world.time_passes(timedelta(seconds=1))
    world.operate()
    assert ("StatefulSet", "qwen") not in world.objects


def test_the_grace_begins_when_the_wait_is_reported_and_not_by_the_api_servers_clock() -> None:
    world = settled_world(storage=DELETE)
    world.user_deletes_owner()
    world.time_passes(timedelta(seconds=601))
    for _ in range(2):
        world.operate()
        assert ready_reason(world) == "WaitingForCheckpoints"
    world.time_passes(timedelta(seconds=599))
    world.operate()
    assert ready_reason(world) == "WaitingForCheckpoints"
    world.time_passes(timedelta(seconds=1))
    world.operate()
    assert ready_reason(world) == "Deleting"


def test_the_grace_begins_again_for_a_worker_that_was_on_its_way_for_long() -> None:
    """`Reconciling` was true before, for another reason."""
    world = settled_world(storage=DELETE)
    world.person_deletes(("Pod", "qwen-0"))
    world.kubelet_stops()
    world.controller_works()
    world.operate()
    world.time_passes(timedelta(minutes=20))
    world.user_deletes_owner()
    for _ in range(2):
        world.operate()
        assert ready_reason(world) == "WaitingForCheckpoints"


def test_a_report_by_a_clock_that_is_behind_the_api_servers_counts_all_the_same() -> None:
    world = settled_world(storage=DELETE)
    world.time_passes(timedelta(minutes=10))
    world.user_deletes_owner()
    world.time_passes(timedelta(minutes=-10))
    world.operate()
    world.time_passes(timedelta(seconds=5))
    world.worker_reports(adapters_used=0)
    world.operate()
    assert ready_reason(world) == "Deleting"


def never_ready() -> World:
    """Return a world whose pod exists and never becomes ready."""
    world = World(session_manifest(storage=DELETE))
    for _ in range(4):
        world.operate()
        world.controller_works()
    assert ("Pod", "qwen-0") in world.objects
    return world


def deletes_without_waiting(world: World) -> bool:
    world.user_deletes_owner()
    world.time_passes(timedelta(seconds=5))
    world.operate()
    return ready_reason(world) == "Deleting"


def test_a_worker_that_was_never_ready_has_nothing_to_save() -> None:
    world = never_ready()
    world.container_ends(exit_code=1)
    assert deletes_without_waiting(world)
    world.settle()
    assert (world.session, CLAIM in world.objects) == (None, False)


def test_a_worker_that_was_ready_once_is_waited_for_although_it_crashes_now() -> None:
    world = settled_world(storage=DELETE)
    world.container_ends(exit_code=1)
    world.operate()
    assert not deletes_without_waiting(world)


def test_a_worker_that_was_ready_under_an_operator_that_noted_no_first_time_is_waited_for() -> None:
    world = settled_world(storage=DELETE)
    world.worker_reports()
    world.operate()
    assert world.session is not None
    del world.session["status"]["firstReadyTime"]
    world.report = None
    world.container_ends(exit_code=1)
    assert not deletes_without_waiting(world)


def kept_and_taken_up_again(**spec: object) -> World:
    """Return a volume kept from a deleted session and resumed a day later by one of the same name."""
    world = settled_world()
    world.user_deletes_owner()
    world.settle()
    world.time_passes(timedelta(days=1))
    again = session_manifest(**spec)
    again["metadata"] |= {"uid": "another-session-uid", "creationTimestamp": "2026-01-03T04:00:00Z"}
    world.session = again
    return world


@pytest.mark.parametrize("old_storage", [{"accessMode": "ReadWriteOnce"}, {"storageClassName": "fast"}])
def test_a_volume_from_before_that_the_session_could_not_use_stays(old_storage: dict[str, str]) -> None:
    world = kept_and_taken_up_again(storage={**old_storage, **DELETE})
    world.operate()
    world.settle()
    assert ready_reason(world) == "ClaimMismatch"
    world.user_deletes_owner()
    world.settle()
    assert world.session is None
    assert "deletionTimestamp" not in world.objects[CLAIM]["metadata"]


def test_adapters_on_a_volume_from_before_wake_a_session_that_was_suspended_all_along() -> None:
    world = kept_and_taken_up_again(storage=DELETE, suspend=True)
    world.settle()
    world.user_deletes_owner()
    saves_before_it_goes(world)


def saves_before_it_goes(world: World) -> None:
    """Check that a worker starts once, is asked to save, and does not start again."""
    for step in (world.controller_works, world.kubelet_starts):
        world.operate()
        assert ready_reason(world) == "WaitingForCheckpoints"
        step()
    world.time_passes(timedelta(seconds=5))
    world.worker_reports(adapters_used=2)
    world.operate()
    assert ready_reason(world) == "WaitingForCheckpoints"
    world.worker_reports(adapters_used=0)
    world.operate()
    assert ready_reason(world) == "Deleting"
    deleted = len(world.deleted)
    world.settle()
    assert world.session is None
    assert [each["kind"] for each in world.deleted[deleted:]].count("StatefulSet") == 0
    assert CLAIM not in world.objects


def test_a_worker_is_woken_on_the_image_that_its_volume_knows() -> None:
    world = kept_and_taken_up_again(storage=DELETE, pod={"image": "tinsmith.local/tinsmith/trainer:0.2.0"})
    world.operate(1)
    world.user_deletes_owner()
    world.operate()
    world.controller_works()
    assert f"--image={IMAGE}" in world.objects["Pod", "qwen-0"]["spec"]["containers"][0]["args"]


def test_a_worker_that_was_told_to_stop_when_its_grace_was_over_is_not_woken_again() -> None:
    world = settled_world(storage=DELETE)
    world.user_deletes_owner()
    world.operate()
    world.time_passes(timedelta(seconds=601))
    for work in (world.collector_works, world.kubelet_stops, world.operate):
        world.operate()
        work()
        assert ("StatefulSet", "qwen") not in world.objects
    assert world.session is None


def test_the_time_of_the_first_readiness_stays_unchanged() -> None:
    world = settled_world()
    assert world.session is not None
    first = world.session["status"]["firstReadyTime"]
    assert first == world.session["status"]["conditions"][0]["lastTransitionTime"]
    world.time_passes(timedelta(hours=1))
    world.user_sets(adapters={"slots": 4})
    world.settle()
    assert world.session["status"]["firstReadyTime"] == first


def test_a_worker_that_is_evicted_meanwhile_is_waited_for() -> None:
    world = settled_world(storage=DELETE)
    world.user_deletes_owner()
    world.person_deletes(("Pod", "qwen-0"))
    for step in (world.kubelet_stops, world.controller_works, world.kubelet_starts):
        world.operate()
        assert ready_reason(world) == "WaitingForCheckpoints"
        step()
    world.time_passes(timedelta(seconds=5))
    world.worker_reports(adapters_used=0)
    world.operate()
    assert ready_reason(world) == "Deleting"


def suspended_with_adapters(used: int) -> World:
    world = settled_world(storage=DELETE)
    world.worker_reports(adapters_used=used)
    world.settle()
    world.user_sets(storage=DELETE, suspend=True)
    world.settle()
    assert ready_reason(world) == "Suspended"
    return world


@pytest.mark.parametrize("reported", [2, 0])
def test_a_suspended_session_is_woken_so_that_its_adapters_can_be_saved(reported: int) -> None:
    """Its last report does not matter: it may have loaded an adapter after that."""
    world = suspended_with_adapters(reported)
    world.user_deletes_owner()
    saves_before_it_goes(world)


def test_the_deletion_of_a_suspended_session_that_does_not_wake_ends() -> None:
    world = suspended_with_adapters(2)
    world.user_deletes_owner()
    world.operate()
    world.time_passes(timedelta(seconds=601))
    world.settle()
    assert world.session is None
    assert CLAIM not in world.objects


def test_a_session_that_was_suspended_all_along_is_deleted_at_once() -> None:
    world = settled_world(storage=DELETE, suspend=True)
    world.user_deletes_owner()
    world.operate()
    world.operate()
    assert world.session is None


def test_the_volume_is_deleted_only_when_the_pod_is_gone() -> None:
    world = settled_world(storage=DELETE)
    world.user_deletes_owner()
    world.operate()
    world.time_passes(timedelta(seconds=601))
    world.operate()
    world.collector_works()
    world.operate()
    assert "deletionTimestamp" not in world.objects[CLAIM]["metadata"]
    world.kubelet_stops()
    world.operate()
    assert "deletionTimestamp" in world.objects[CLAIM]["metadata"]
    assert world.session is None


def test_an_existing_claim_stays() -> None:
    world = World(session_manifest(storage={"existingClaim": "mine", **DELETE}))
    world.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "mine"}, "spec": {}})
    world.settle()
    world.user_deletes_owner()
    world.settle()
    assert [name for _, name in world.objects] == ["mine"]


def test_a_worker_that_lost_its_stateful_set_is_waited_for_and_stopped_all_the_same() -> None:
    """`kubectl delete --cascade=orphan`, and then the session: no other controller would ever stop that pod."""
    world = settled_world(storage=DELETE)
    del world.objects["StatefulSet", "qwen"]
    world.objects["Pod", "qwen-0"]["metadata"]["ownerReferences"] = []
    world.user_deletes_owner()
    world.operate()
    assert ready_reason(world) == "WaitingForCheckpoints"
    world.time_passes(timedelta(seconds=5))
    world.worker_reports(adapters_used=0)
    assert [action.kind for action in world.operate() if isinstance(action, Delete)] == ["Pod"]
    world.kubelet_stops()
    world.operate()
    assert world.session is None


def test_a_foreign_pod_of_the_workers_name_holds_no_deletion_up() -> None:
    world = settled_world(storage=DELETE, suspend=True)
    world.add({"kind": "Pod", "metadata": {"name": "qwen-0", "labels": {}}, "spec": {}, "status": {}})
    world.user_deletes_owner()
    world.operate()
    world.operate()
    assert world.session is None
    assert ("Pod", "qwen-0") in world.objects


def test_a_session_that_is_being_deleted_gives_its_turn_to_restart_away() -> None:
    """Its node may be lost, and then it never ends."""
    world = settled_world(storage=DELETE)
    world.change_installation(trainer_image="tinsmith.local/tinsmith/trainer:0.2.0")
    world.settle()
    assert world.decide().wants_turn
    world.has_turn = True
    world.user_deletes_owner()
    for _ in range(5):
        assert world.decide().wants_turn is False
        world.operate()


def test_the_finalizer_goes_when_the_volume_is_to_stay_after_all() -> None:
    world = settled_world(storage=DELETE)
    world.user_sets(storage={})
    assert world.decide().actions == (RemoveFinalizer(CLAIM_FINALIZER),)


def test_a_report_from_before_the_deletion_says_nothing() -> None:
    world = settled_world(storage=DELETE)
    world.worker_reports(adapters_used=0)
    world.time_passes(timedelta(seconds=5))
    world.user_deletes_owner()
    world.operate()
    assert ready_reason(world) == "WaitingForCheckpoints"


def test_a_worker_that_is_first_ready_when_the_deletion_is_seen_is_waited_for() -> None:
    world = never_ready()
    world.kubelet_starts()
    assert not deletes_without_waiting(world)
    world.container_ends(exit_code=1)
    world.operate()
    assert ready_reason(world) == "WaitingForCheckpoints"


def test_adapters_on_a_volume_from_before_are_waited_for_although_this_worker_was_never_ready() -> None:
    world = kept_and_taken_up_again(storage=DELETE)
    for _ in range(4):
        world.operate()
        world.controller_works()
    assert not deletes_without_waiting(world)
