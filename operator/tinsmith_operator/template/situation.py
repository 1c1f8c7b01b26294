"""The facts about a template and its members. They are computed once from the observed state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.conditions import ConditionType, Truth
from tinsmith_operator.api.names import RETIRED_ANNOTATION
from tinsmith_operator.api.owner import effective_spec
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.session_template import SessionTemplate
from tinsmith_operator.api.status import Condition, TrainingSessionStatus
from tinsmith_operator.api.training_session import Storage


@dataclass(frozen=True, kw_only=True)
class ObservedTemplate:
    """The observed state of one template.

    - `sessions`: the sessions with the template's label.
    - `free_numbers`: the lowest numbers without a session of that name.
    - `refusals`: the API server's message if the latest creation of a session was refused.
    """

    template: SessionTemplate
    sessions: tuple[Manifest, ...] = ()
    free_numbers: tuple[int, ...] = ()
    refusals: Mapping[str, str]


@dataclass(frozen=True)
class Member:
    """A session that an API server or the operator has created from the template.

    - `is_stale`: its copy differs from the template.
    - `is_unused`: it holds no models, by its status.
    - `is_spent`: it has existed for `spec.activeDeadlineSeconds`.
    - `is_retired`: API servers place no models on it, and it is deleted while it holds none.
    - `is_suspended`: a user has suspended it.
    """

    manifest: Manifest
    ready: Condition | None
    stalled: Condition | None
    is_stale: bool
    is_unused: bool
    deletes_claim: bool

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.ready.status == Truth.TRUE

    @property
    def is_stalled(self) -> bool:
        return self.stalled is not None and self.stalled.status == Truth.TRUE

    @property
    def is_spent(self) -> bool:
        return self.ready is not None and self.ready.reason == Reason.DEADLINE_EXCEEDED

    @property
    def is_leaving(self) -> bool:
        """True if the member is retired or being deleted."""
        metadata = self.manifest["metadata"]
        return "deletionTimestamp" in metadata or RETIRED_ANNOTATION in (metadata.get("annotations") or {})

    @property
    def is_suspended(self) -> bool:
        return bool((self.manifest.get("spec") or {}).get("suspend"))

    @property
    def may_be_warm(self) -> bool:
        return self.is_unused and not (self.is_leaving or self.is_suspended or self.is_spent)

    @property
    def is_replaceable(self) -> bool:
        """True if the operator may delete the member because it is outdated.

        A member that leaves its volume behind stays, because its successor of the same name would use the volume.
        """
        is_outdated = self.is_stale or self.is_spent
        return is_outdated and self.is_unused and self.deletes_claim and not (self.is_leaving or self.is_suspended)


def read_member(manifest: Manifest, template: SessionTemplate) -> Member:
    status = TrainingSessionStatus.model_validate(manifest.get("status") or {})
    return Member(
        manifest,
        ready=status.condition(ConditionType.READY),
        stalled=status.condition(ConditionType.STALLED),
        is_stale=status.template is not None and status.template.spec != template.session_spec,
        is_unused=status.adapters is None or status.adapters.used == 0,
        deletes_claim=Storage.model_validate(effective_spec(manifest).get("storage") or {}).deletes_claim,
    )


@dataclass(frozen=True)
class TemplateSituation:
    """The situation of a template at one moment.

    - `members`: the sessions that count towards `spec.maxSessions`, by name.
    - `warm`: the members without models that stay ready; members with the template's present spec come first.
    - `missing`: how many sessions must be created to have `spec.warm` of them.
    """

    observed: ObservedTemplate
    now: datetime
    members: tuple[Member, ...]
    warm: tuple[Member, ...]
    missing: int

    @property
    def template(self) -> SessionTemplate:
        return self.observed.template

    @property
    def coming(self) -> tuple[Member, ...]:
        """The warm members with the present spec that are not ready."""
        return tuple(each for each in self.warm if not each.is_ready and not each.is_stale)

    @property
    def outdated(self) -> tuple[Member, ...]:
        """The members that the operator replaces."""
        return tuple(each for each in self.members if each.is_replaceable)


def assess_template(observed: ObservedTemplate, now: datetime) -> TemplateSituation:
    template = observed.template
    members = tuple(read_member(each, template) for each in observed.sessions)
    unused = sorted(
        (each for each in members if each.may_be_warm), key=lambda each: (each.is_stale, not each.is_ready, each.name)
    )
    room = max(0, template.spec.max_sessions - len(members))
    missing = min(max(0, template.spec.warm - len(unused)), room)
    return TemplateSituation(observed, now, members, tuple(unused[: template.spec.warm]), missing)
