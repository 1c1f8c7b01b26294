"""The namespaces of a fleet, and the one in which it creates sessions."""

from __future__ import annotations

import pytest
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.kubernetes.watching import Scope, scope_of


@pytest.mark.parametrize(
    ("chosen", "own", "namespaces", "home"),
    [
        ((), "release", ("release",), "release"),
        (("team",), None, ("team",), "team"),
        (("team", "release"), "release", ("team", "release"), "release"),
        (("team", "other"), "release", ("team", "other"), "team"),
        (("*",), "release", None, "release"),
        (("*",), None, None, None),
    ],
)
def test_chosen_namespaces_override_the_namespace_of_the_server(
    chosen: tuple[str, ...], own: str | None, namespaces: tuple[str, ...] | None, home: str | None
) -> None:
    assert scope_of(chosen, own) == Scope(namespaces, home)


def test_outside_of_a_cluster_the_namespaces_must_be_set() -> None:
    with pytest.raises(StartupError, match="set fleet_namespaces"):
        scope_of((), None)


def test_the_whole_cluster_is_watched_at_once_and_a_list_one_by_one() -> None:
    everywhere, some = scope_of(("*",), None), scope_of(("a", "b"), None)
    assert everywhere.watched == (None,)
    assert some.watched == ("a", "b")
    assert everywhere.covers("c")
    assert some.covers("b")
    assert not some.covers("c")
