"""Conversions of Kubernetes' values: camelCase, times and quantities."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer
from pydantic.alias_generators import to_camel


def format_time(moment: datetime) -> str:
    """Write a time in Kubernetes' format: in UTC, with whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> datetime | None:
    """Read a time that Kubernetes wrote. Return None for an empty text."""
    return datetime.fromisoformat(text) if text else None


Time = Annotated[datetime, PlainSerializer(format_time, return_type=str)]

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""


@dataclass(frozen=True)
class LiveObject:
    """A Kubernetes object in the latest version that the API server returned."""

    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.manifest["metadata"]["uid"])

    @property
    def is_terminating(self) -> bool:
        return "deletionTimestamp" in self.manifest["metadata"]


class Resource(BaseModel):
    """A part of a custom resource. Unknown fields are ignored, because a newer CRD may have more fields."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")

    def to_manifest(self) -> Manifest:
        """Return the JSON form, without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


_FORM = re.compile(r"^([+-]?[0-9.]+)(?:([eE][+-]?[0-9]+)|([numkMGTPE]?|[KMGTPE]i))$")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_LARGEST = Decimal(2**63 - 1)
"""The largest quantity. Kubernetes reads every larger quantity as the largest quantity."""
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def parse_quantity(quantity: int | float | str) -> Decimal:
    """Return the value of a quantity. Raises ValueError for an invalid quantity."""
    match = _FORM.match(str(quantity))
    try:
        if match is not None:
            return min(_LARGEST, _amount(match[1], match[2], match[3] or ""))
    except (InvalidOperation, ValueError):
        pass  # a number without digits, or too large to be one
    raise ValueError(f"{quantity!r} is not a quantity such as 500m, 16Gi or 1")


def _amount(digits: str, exponent: str | None, suffix: str) -> Decimal:
    number = Decimal(digits)
    if exponent:
        return number.scaleb(int(exponent[1:]))
    return number * 2 ** _BINARY[suffix] if suffix in _BINARY else number.scaleb(_DECIMAL[suffix])
