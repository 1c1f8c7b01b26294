"""The fields of SessionTemplates that this server reads, and the sessions that it may create from a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from tinsmith_server.fleet.kubernetes.api import FIELD_MANAGER, GROUP_VERSION, KIND, Manifest
from tinsmith_server.fleet.kubernetes.training_session import (
    TEMPLATE_LABEL,
    MetadataPart,
    Part,
    SpecPart,
    TrainingSession,
)


class TemplateSpecPart(SpecPart):
    max_sessions: int = Field(default=1, ge=1)


class _SessionTemplate(Part):
    metadata: MetadataPart
    spec: TemplateSpecPart


@dataclass(frozen=True, slots=True)
class SessionTemplate:
    """A template, from which this server creates sessions when models wait for a place."""

    name: str
    namespace: str
    spec: TemplateSpecPart
    deleted: bool

    def suits(self, base_model: str, rank: int, sampling: bool) -> bool:
        spec = self.spec
        return (
            not self.deleted
            and spec.model.name == base_model
            and rank <= spec.adapters.max_rank
            and (spec.sampling != "None" or not sampling)
        )

    def next_name(self, sessions: Mapping[str, TrainingSession]) -> str | None:
        """Return the name of the next session, or None if the limit of sessions is reached.

        The result depends only on the names that exist in the namespace. So two servers that need a session try to
        create the same session, and only one server succeeds. The operator uses the same names for warm sessions.
        """
        if sum(session.template == self.name for session in sessions.values()) >= self.spec.max_sessions:
            return None
        number = next(n for n in range(1, len(sessions) + 2) if f"{self.name}-{n}" not in sessions)
        return f"{self.name}-{number}"

    def manifest(self, name: str) -> Manifest:
        labels = {"app.kubernetes.io/managed-by": FIELD_MANAGER, TEMPLATE_LABEL: self.name}
        return {
            "apiVersion": GROUP_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
            "spec": {"templateRef": {"name": self.name}},
        }


def parse_template(manifest: Manifest) -> SessionTemplate:
    """Return the template. Raises pydantic's ValidationError for an invalid object."""
    parsed = _SessionTemplate.model_validate(manifest)
    return SessionTemplate(
        name=parsed.metadata.name,
        namespace=parsed.metadata.namespace,
        spec=parsed.spec,
        deleted=parsed.metadata.deletion_timestamp is not None,
    )
