"""A TrainingSession as the rest of the operator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from typing_extensions import override

from tinsmith_operator.api.names import CLAIM_FINALIZER, SESSION_KIND, SESSION_LABEL, claim_name
from tinsmith_operator.api.owner import Owner, identity_of, unreadable
from tinsmith_operator.api.spec import TrainingSessionSpec
from tinsmith_operator.api.status import TrainingSessionStatus


@dataclass(frozen=True)
class TrainingSession(Owner):
    KIND = SESSION_KIND
    NOUN = "session"
    LABEL = SESSION_LABEL
    APPLICATION = "tinsmith-worker"
    COMPONENT = "worker"

    spec: TrainingSessionSpec
    status: TrainingSessionStatus

    @property
    @override
    def workload_name(self) -> str:
        return self.name

    @property
    def has_finalizer(self) -> bool:
        return CLAIM_FINALIZER in self.finalizers

    @property
    def claim_name(self) -> str:
        """Of the volume with the worker's journal."""
        return self.spec.storage.existing_claim or claim_name(self.name)


def parse_session(body: Mapping[str, Any]) -> TrainingSession:
    """Raises Unreadable, which names the field."""
    try:
        return TrainingSession(
            **identity_of(body),
            spec=TrainingSessionSpec.model_validate(body.get("spec", {})),
            status=TrainingSessionStatus.model_validate(body.get("status") or {}),
        )
    except ValidationError as error:
        raise unreadable(SESSION_KIND, body, error) from error
