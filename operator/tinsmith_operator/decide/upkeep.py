"""What to do about one child, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tinsmith_operator.decide.actions import Action, Apply, Create, IssueCertificate
from tinsmith_operator.decide.difference import holds
from tinsmith_operator.decide.managed_fields import others_hold_content
from tinsmith_operator.decide.ownership import is_ours
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.owner import Owner


def keep(owner: Owner, live: Manifest | None, wanted: Manifest) -> tuple[Create | Apply, ...]:
    """No request when the live object is what is wanted; none about a stranger's, or one that is on its way out."""
    if live is None:
        return (Create(wanted),)
    if not is_ours(owner, live) or live["metadata"].get("deletionTimestamp"):
        return ()
    if holds(live, wanted) and not others_hold_content(live):
        return ()
    return (apply_to(live, wanted),)


def apply_to(live: Manifest, wanted: Manifest) -> Apply:
    return Apply(wanted, live["metadata"]["uid"], live["metadata"]["resourceVersion"])


def still_refused(refusals: Mapping[str, str], children: Iterable[Action]) -> dict[str, str]:
    """A refusal matters while the object is still asked for: who takes a change back has cured it without a request."""
    asked = {action.manifest["kind"] for action in children if isinstance(action, Create | Apply | IssueCertificate)}
    return {kind: words for kind, words in refusals.items() if kind in asked}
