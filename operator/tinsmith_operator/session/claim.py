"""The PersistentVolumeClaim of the journal: how the operator creates, annotates and enlarges this claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.volumes import build_claim, build_claim_annotations
from tinsmith_operator.common.actions import Action, Annotate, Apply, Create, Delete
from tinsmith_operator.common.drift import apply_to, as_stored, holds, is_in_place, own_spec_fields
from tinsmith_operator.common.observed import Observed
from tinsmith_operator.common.ownership import OwnedObjects
from tinsmith_operator.session.upgrade import PIN_ANNOTATIONS

FIXED_FIELDS = ("accessModes", "storageClassName", "volumeMode")
"""The fields of a claim's spec that cannot be changed."""


@dataclass(frozen=True)
class ClaimPlan:
    """The present claim and the desired claim.

    - `usable`: the existing claim, if the session may use it.
    - `desired`: the desired claim. For a claim that a user created, `desired` contains only the fields that the
      operator writes.
    - `unused`: the session's claim, if the claim never had a volume and differs from the spec. The operator must delete
      an unused claim and create a new claim.
    - `mismatch`: an immutable field in which the session's claim differs from the spec.
    """

    usable: Manifest | None
    desired: Manifest
    unused: Manifest | None
    mismatch: str | None

    @property
    def is_terminating(self) -> bool:
        """True if the claim was deleted. A deleted claim vanishes when no pod uses the claim any more."""
        return self.usable is not None and "deletionTimestamp" in self.usable["metadata"]

    @property
    def volume_size(self) -> str | None:
        """The size of the claim's volume, or None if the claim has no volume."""
        size = (((self.usable or {}).get("status") or {}).get("capacity") or {}).get("storage")
        return str(size) if size is not None else None


def plan_claim(observed: Observed, owned: OwnedObjects, annotations: Mapping[str, str]) -> ClaimPlan:
    """Return the plan. `annotations` are the annotations that the operator writes on the claim."""
    session = observed.session
    desired = build_claim(session, annotations) or build_claim_annotations(session, annotations)
    mismatch = _mismatch(session, owned.claim) if owned.claim is not None else None
    unused = _unused_claim(observed, owned, desired, differs=mismatch is not None)
    return ClaimPlan(_usable_claim(observed, owned, mismatch), desired, unused, mismatch)


def ensure_claim(observed: Observed, plan: ClaimPlan) -> tuple[Action, ...]:
    """Create the claim, and annotate the claim with the image that may use the volume."""
    live, desired = plan.usable, plan.desired
    if plan.unused is not None:
        return _delete(plan.unused)
    if observed.claim is None:
        return () if _is_made_by_others(observed) or observed.claim_holder is not None else (Create(desired),)
    if live is None or plan.is_terminating:
        return ()
    if _is_made_by_others(observed):
        return _annotate(observed, live, desired)
    return _annotate(observed, live, with_size(_as_it_is(desired, live), size_of(live)))


def grow_claim(observed: Observed, plan: ClaimPlan) -> tuple[Apply, ...]:
    """Change the size of the claim. The resize is the last action, because a storage class may refuse the resize.

    A user can revert a refused growth in the spec. Kubernetes allows a smaller requested size if this size is still
    larger than the size of the volume.
    """
    live, desired = plan.usable, plan.desired
    if live is None or plan.is_terminating or _is_made_by_others(observed):
        return ()
    if (live.get("status") or {}).get("phase") != "Bound":
        return ()
    # A claim that an earlier session left may be larger, and a volume cannot shrink.
    current, new, volume = (parse_quantity(size) for size in (size_of(live), size_of(desired), plan.volume_size or 0))
    if new == current or (new < current and (not volume or new <= volume)):
        return ()
    grown = _as_it_is(desired, live)
    if as_stored(grown, live) == observed.stored.get(grown["kind"]):
        return ()
    return (apply_to(live, grown),)


def _is_made_by_others(observed: Observed) -> bool:
    return observed.session.spec.storage.existing_claim is not None


def size_of(claim: Manifest) -> str:
    return str(claim["spec"]["resources"]["requests"]["storage"])


def _delete(claim: Manifest) -> tuple[Delete, ...]:
    """Delete this version of the claim. A claim that has got a volume in the meantime is not deleted."""
    metadata = claim["metadata"]
    if "deletionTimestamp" in metadata:
        return ()
    why = "it never had a volume, and the spec asks for another claim"
    return (
        Delete(claim["kind"], metadata["name"], metadata["uid"], why, resource_version=metadata["resourceVersion"]),
    )


def with_size(claim: Manifest, size: str) -> Manifest:
    return {**claim, "spec": {**claim["spec"], "resources": {"requests": {"storage": size}}}}


def _as_it_is(desired: Manifest, live: Manifest) -> Manifest:
    """Return the desired claim. Immutable fields that the operator manages keep their live values.

    An apply removes fields that only an earlier apply contained, but the API server refuses the removal of a storage
    class. If the cluster chose the storage class, the field is left out. The operator must not become the manager of a
    storage class that the cluster chose.
    """
    named = desired["spec"].keys() | own_spec_fields(live)
    fixed = {name: live["spec"][name] for name in FIXED_FIELDS if name in live["spec"] and name in named}
    return {**desired, "spec": {**desired["spec"], **fixed}}


def _annotate(observed: Observed, live: Manifest, desired: Manifest) -> tuple[Apply | Annotate, ...]:
    """Bring the annotations of the claim up to date, by one small write if nothing else differs."""
    metadata, annotations = live["metadata"], desired["metadata"]["annotations"]
    if (metadata.get("annotations") or {}).keys() & (PIN_ANNOTATIONS - annotations.keys()):
        return (apply_to(live, desired),)
    if is_in_place(observed, live, desired):
        return ()
    if not holds({**live, "metadata": {**metadata, "annotations": annotations}}, desired):
        return (apply_to(live, desired),)
    place = (desired["kind"], metadata["name"], metadata["uid"], metadata["resourceVersion"])
    return (Annotate(*place, annotations, desired),)


def _unused_claim(observed: Observed, owned: OwnedObjects, desired: Manifest, *, differs: bool) -> Manifest | None:
    """Return the session's claim if the claim never had a volume and differs from the spec.

    The API server does not allow changes of a claim without a volume, so the operator must create the claim again.
    """
    claim, session, writer = owned.claim, observed.session, owned.writer
    if claim is None or observed.claim_holder is not None or _has_volume(claim):
        return None
    if writer is not None and writer.has_started:
        return None
    # Ignore the changes of a webhook. Otherwise the claim would be deleted again after each change.
    if as_stored(desired, claim) == observed.stored.get(claim["kind"]):
        return None
    resources = {"requests": {"storage": session.spec.storage.size}}
    has_another_size = not holds(claim["spec"]["resources"], resources)
    return claim if has_another_size or differs or _names_a_class_no_more(session, claim) else None


def _mismatch(session: TrainingSession, claim: Manifest) -> str | None:
    """Return the immutable field in which a claim of an earlier session differs from the spec."""
    storage, spec = session.spec.storage, claim["spec"]
    if spec.get("accessModes") != [storage.access_mode.value]:
        return f"accessMode {', '.join(spec.get('accessModes') or ())}, not {storage.access_mode.value}"
    storage_class = storage.storage_class_name
    if storage_class is not None and spec.get("storageClassName") != storage_class:
        return f"storageClassName {spec.get('storageClassName')}, not {storage_class}"
    return None


def _has_volume(claim: Manifest) -> bool:
    """Return whether the claim has a volume now or had a volume earlier.

    Kubernetes binds a claim to a volume only once.
    """
    return "volumeName" in claim["spec"] or (claim.get("status") or {}).get("phase", "Pending") != "Pending"


def _names_a_class_no_more(session: TrainingSession, claim: Manifest) -> bool:
    was_named = "storageClassName" in own_spec_fields(claim)
    return was_named and session.spec.storage.storage_class_name is None


def _usable_claim(observed: Observed, owned: OwnedObjects, mismatch: str | None) -> Manifest | None:
    claim = observed.claim
    if observed.claim_holder is not None or observed.claim_reader is not None:
        return None
    if claim is None or _is_made_by_others(observed):
        return claim
    return claim if owned.claim is not None and mismatch is None else None
