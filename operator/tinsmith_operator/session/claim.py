"""Creates, annotates and grows the PersistentVolumeClaim of the journal."""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.common.actions import Action, Apply, Create, Delete
from tinsmith_operator.common.drift import apply_to, as_stored, is_in_place, spec_fields_of_ours
from tinsmith_operator.common.observed import Observed
from tinsmith_operator.session.situation import Situation
from tinsmith_operator.session.upgrade import PIN_ANNOTATIONS

FIXED_FIELDS = ("accessModes", "storageClassName", "volumeMode")
"""Of a claim's spec, once it is there."""


def ensure_claim(situation: Situation) -> tuple[Action, ...]:
    """Makes it, and says on it which image may write to it."""
    observed, live, desired = situation.observed, situation.claim, situation.desired_claim
    if (unused := situation.unused_claim) is not None:
        return _delete(unused)
    if observed.claim is None:
        return () if _is_made_by_others(situation) or observed.claim_holder is not None else (Create(desired),)
    if live is None or situation.claim_is_terminating:
        return ()
    if _is_made_by_others(situation):
        return _annotate(observed, live, desired)
    return _annotate(observed, live, with_size(_as_it_is(desired, live), size_of(live)))


def grow_claim(situation: Situation) -> tuple[Apply, ...]:
    """Apart from the rest, and last: a storage class may refuse it, and nothing else must wait for that.

    A growth that came to nothing is taken back where the spec takes it back: Kubernetes lets a claim ask for less as
    long as it asks for more than its volume has.
    """
    live, desired = situation.claim, situation.desired_claim
    if live is None or situation.claim_is_terminating or _is_made_by_others(situation):
        return ()
    if (live.get("status") or {}).get("phase") != "Bound":
        return ()
    # A claim that an earlier session left behind may be larger; no volume shrinks.
    asks, wanted, has = (parse_quantity(size) for size in (size_of(live), size_of(desired), volume_size(live) or 0))
    if wanted == asks or (wanted < asks and (not has or wanted <= has)):
        return ()
    grown = _as_it_is(desired, live)
    if as_stored(grown, live) == situation.observed.stored.get(grown["kind"]):
        return ()
    return (apply_to(live, grown),)


def _is_made_by_others(situation: Situation) -> bool:
    return situation.session.spec.storage.existing_claim is not None


def size_of(claim: Manifest) -> str:
    return str(claim["spec"]["resources"]["requests"]["storage"])


def volume_size(claim: Manifest) -> str | None:
    """Return the size of the claim's volume; None while there is none."""
    size = ((claim.get("status") or {}).get("capacity") or {}).get("storage")
    return str(size) if size is not None else None


def _delete(claim: Manifest) -> tuple[Delete, ...]:
    """Delete that very version: once the claim has a volume, it stays."""
    metadata = claim["metadata"]
    if "deletionTimestamp" in metadata:
        return ()
    why = "it never had a volume, and the spec asks for another one"
    return (
        Delete(claim["kind"], metadata["name"], metadata["uid"], why, resource_version=metadata["resourceVersion"]),
    )


def with_size(claim: Manifest, size: str) -> Manifest:
    return {**claim, "spec": {**claim["spec"], "resources": {"requests": {"storage": size}}}}


def _as_it_is(wanted: Manifest, live: Manifest) -> Manifest:
    """With what is ours of the live claim and cannot be changed any more. What an apply of ours leaves out that an
    earlier one named would be taken away, and the API server refuses that: a storage class that the spec names no more.

    Nothing of others': a default class that we named would be ours, and an operator from before a rollback, which does
    not name it, would be refused.
    """
    named = wanted["spec"].keys() | spec_fields_of_ours(live)
    fixed = {name: live["spec"][name] for name in FIXED_FIELDS if name in live["spec"] and name in named}
    return {**wanted, "spec": {**wanted["spec"], **fixed}}


def _annotate(observed: Observed, live: Manifest, wanted: Manifest) -> tuple[Apply, ...]:
    said = live["metadata"].get("annotations") or {}
    outdated = {name for name in PIN_ANNOTATIONS & said.keys() if name not in wanted["metadata"]["annotations"]}
    return (apply_to(live, wanted),) if outdated or not is_in_place(observed, live, wanted) else ()
