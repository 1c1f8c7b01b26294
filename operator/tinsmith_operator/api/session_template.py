"""The SessionTemplate: the spec of sessions that users create by name, and how many of them stay warm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from tinsmith_operator.api.base import Manifest, Resource
from tinsmith_operator.api.names import (
    API_VERSION,
    MANAGED_BY_LABEL,
    MANAGER,
    SESSION_KIND,
    TEMPLATE_KIND,
    TEMPLATE_LABEL,
)
from tinsmith_operator.api.owner import Reconciled, identity_of, unreadable
from tinsmith_operator.api.status import SessionTemplateStatus, TemplateCopy

NUMBERS = ("maxSessions", "warm")
"""The fields of a template that are not part of a session's spec."""


class SessionTemplateSpec(Resource):
    """The fields that only templates have. The other fields are those of a session's spec."""

    max_sessions: int = Field(default=1)
    warm: int = Field(default=0)


@dataclass(frozen=True)
class SessionTemplate(Reconciled):
    """A template. `session_spec` is the JSON text of the spec of its sessions. Equal specs have equal texts."""

    KIND = TEMPLATE_KIND
    NOUN = "template"

    spec: SessionTemplateSpec
    session_spec: str
    status: SessionTemplateStatus

    @property
    def copy(self) -> TemplateCopy:
        """The copy for the status of a new session."""
        return TemplateCopy(name=self.name, generation=self.generation, spec=self.session_spec)

    def session(self, number: int) -> Manifest:
        """Return the session with this number. API servers create the same session under the same name."""
        labels = {MANAGED_BY_LABEL: MANAGER, TEMPLATE_LABEL: self.name}
        return {
            "apiVersion": API_VERSION,
            "kind": SESSION_KIND,
            "metadata": {"name": f"{self.name}-{number}", "namespace": self.namespace, "labels": labels},
            "spec": {"templateRef": {"name": self.name}},
        }


def parse_template(body: Mapping[str, Any]) -> SessionTemplate:
    """Return the template. Raises Unreadable with the name of the invalid field."""
    spec: Manifest = body.get("spec") or {}
    try:
        return SessionTemplate(
            **identity_of(body),
            spec=SessionTemplateSpec.model_validate(spec),
            session_spec=_text({name: value for name, value in spec.items() if name not in NUMBERS}),
            status=SessionTemplateStatus.model_validate(body.get("status") or {}),
        )
    except ValidationError as error:
        raise unreadable(TEMPLATE_KIND, body, error) from error


def _text(spec: Manifest) -> str:
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
