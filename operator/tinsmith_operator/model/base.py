"""How the cluster's camelCase becomes ours, and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer
from pydantic.alias_generators import to_camel


def format_time(moment: datetime) -> str:
    """As Kubernetes writes a time: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> datetime | None:
    """As Kubernetes writes a time; None where it writes none."""
    return datetime.fromisoformat(text) if text else None


Time = Annotated[datetime, PlainSerializer(format_time, return_type=str)]

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, as the API server speaks it."""


class Resource(BaseModel):
    """A part of a custom resource.

    Unknown fields are ignored: the API server has checked them, and a newer CRD may know more than we do.
    """

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")

    def to_manifest(self) -> Manifest:
        """As the API server speaks it, without what is unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
