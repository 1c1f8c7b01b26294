"""Every child that somebody deletes or edits comes back as it was."""

from __future__ import annotations

import pytest
from cluster.node.conftest import CHILDREN
from support.kubernetes.installation import Installation, Object, wait_for

IDS = [kind for kind, _, _ in CHILDREN]


@pytest.mark.parametrize(("kind", "pattern", "edit"), CHILDREN, ids=IDS)
def test_an_edited_child_is_put_right(
    kind: str, pattern: str, edit: Object, installation: Installation, session: str
) -> None:
    name = pattern.format(session)
    before = desired(installation.get(kind, name))
    installation.patch(kind, name, edit)
    wait_for(lambda: same(kind, installation.get(kind, name), before), 60, lambda: f"{kind} {name} stays edited")
    installation.wait_ready(session)


@pytest.mark.parametrize(("kind", "pattern", "edit"), CHILDREN, ids=IDS)
def test_a_deleted_child_comes_back(
    kind: str, pattern: str, edit: Object, installation: Installation, session: str
) -> None:
    name = pattern.format(session)
    uid = (installation.get(kind, name) or {})["metadata"]["uid"]
    installation.kubectl("delete", kind, name)

    def is_new() -> bool:
        found = installation.get(kind, name)
        return found is not None and found["metadata"]["uid"] != uid

    wait_for(is_new, 90, lambda: f"{kind} {name} does not come back")
    installation.wait_ready(session)


def desired(found: Object | None) -> Object:
    """What its maker decides of an object."""
    assert found is not None
    return {key: found[key] for key in ("spec", "data", "type") if key in found}


def same(kind: str, found: Object | None, before: Object) -> bool:
    if found is None:
        return False
    if kind == "secret":
        # A new key and certificate, not the old ones.
        return bool(found["data"]["tls.crt"])
    return desired(found) == before
