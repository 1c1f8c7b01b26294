"""The events that may happen around an object of ours, in any order, and the rules that hold after them.

They apply to the models of a session, of a session of several pods and of a pool (`ModelCluster`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hypothesis import strategies as st
from support.operator.model_cluster import ModelCluster, Place
from tinsmith_operator.api.base import Manifest

Step: TypeAlias = Callable[[Any], Any]
"""Something that happens to a ModelCluster of one kind."""

when_deleted = st.fixed_dictionaries({"whenDeleted": st.sampled_from(["Retain", "Delete"])})


def step(name: str, do: Step) -> Step:
    """ReferenceKind, so that hypothesis can show what it found."""
    do.__name__ = do.__qualname__ = name
    return do


def steps(
    own: Sequence[Step], children: Sequence[Place], specs: st.SearchStrategy[Manifest], *more: st.SearchStrategy[Step]
) -> st.SearchStrategy[Step]:
    """Draw the steps of a history.

    own: the events of this kind alone. In addition the operator works or dies in the middle, people delete or edit one
    of `children`, and the user sets one of `specs`.
    """
    fixed = [
        step("operate", lambda world: world.operate()),
        *own,
        *(step(f"delete {place}", lambda world, place=place: world.person_deletes(place)) for place in children),
        *(step(f"edit {place}", lambda world, place=place: world.person_edits(place)) for place in children),
    ]
    dying = st.integers(0, 4).map(lambda cut: step(f"die after {cut}", lambda world: world.operate(cut)))
    changing = specs.map(lambda spec: step(f"set {spec}", lambda world: world.user_sets(**spec)))
    return st.one_of(st.sampled_from(fixed), dying, changing, *more)


def live_through(world: ModelCluster, life: Sequence[Step]) -> None:
    for each in life:
        each(world)


def decides_alike_and_changes_nothing(world: ModelCluster) -> bool:
    seen = copy.deepcopy(world.observe())
    return world.decide() == world.decide() and world.observe() == seen


def tells_nothing_more(world: ModelCluster) -> bool:
    """Check that an object at rest causes no more events."""
    told = len(world.events)
    for _ in range(5):
        world.operate()
    return len(world.events) == told


def come_to_rest_with_and_without_a_death(
    cut_short: ModelCluster, undisturbed: ModelCluster, after: Manifest, *, cut: int, at: int
) -> None:
    """Settle two worlds with the spec `after`; one operator dies in round `at`, after `cut` actions."""
    for world in (cut_short, undisturbed):
        world.settle()
        world.user_sets(**after)
    for round_ in range(at + 1):
        cut_short.operate(cut if round_ == at else None)
        cut_short.cluster_works()
    cut_short.settle()
    undisturbed.settle()


def a_foreign_object(world: ModelCluster, place: Place) -> Manifest:
    """Put an object of another owner at this place."""
    kind, name = place
    metadata = {"name": name, "labels": {"app": "theirs"}}
    return copy.deepcopy(world.add({"kind": kind, "metadata": metadata, "spec": {"replicas": 0}}))
