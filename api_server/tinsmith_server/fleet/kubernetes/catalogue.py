"""The catalogue: the sessions that this server may create when models wait for a slot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.kubernetes.api import FIELD_MANAGER, GROUP_VERSION, KIND, Manifest
from tinsmith_server.fleet.kubernetes.training_session import ENTRY_LABEL, SpecPart, TrainingSession

# A session's name has at most 52 characters. The names made here end with `-<n>`.
LONGEST_NAME = 46


class CatalogueEntry(BaseModel):
    """A TrainingSession that this server may create. The cluster validates `spec` when the session is created."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=LONGEST_NAME)]
    max_sessions: Annotated[int, Field(ge=1, le=9999)] = 1
    spec: dict[str, Any]

    @property
    def parsed(self) -> SpecPart:
        return SpecPart.model_validate(self.spec)

    def suits(self, base_model: str, rank: int, sampling: bool) -> bool:
        spec = self.parsed
        return (
            spec.model.name == base_model
            and rank <= spec.adapters.max_rank
            and (spec.sampling != "None" or not sampling)
        )

    def next_name(self, sessions: Mapping[str, TrainingSession]) -> str | None:
        """Return the name of the next session, or None if the limit of sessions is reached.

        The result depends only on the names that exist in the namespace. So two servers that need a session try to
        create the same session, and only one server succeeds.
        """
        if sum(session.entry == self.name for session in sessions.values()) >= self.max_sessions:
            return None
        number = next(n for n in range(1, len(sessions) + 2) if f"{self.name}-{n}" not in sessions)
        return f"{self.name}-{number}"

    def manifest(self, name: str, namespace: str) -> Manifest:
        labels = {"app.kubernetes.io/managed-by": FIELD_MANAGER, ENTRY_LABEL: self.name}
        return {
            "apiVersion": GROUP_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
            "spec": self.spec,
        }


def read_catalogue(path: Path | None) -> tuple[CatalogueEntry, ...]:
    """Read the catalogue. Raises StartupError with the invalid entry and field."""
    if path is None:
        return ()
    try:
        content = json.loads(path.read_text())
        entries = TypeAdapter(tuple[CatalogueEntry, ...]).validate_python(content)
    except OSError as error:
        raise StartupError(f"cannot read the catalogue {path}: {error.strerror}") from error
    except ValidationError as error:
        raise StartupError(f"the catalogue {path} cannot be used: {_sentence(error)}") from error
    except ValueError as error:
        raise StartupError(f"the catalogue {path} is not JSON: {error}") from error
    for entry in entries:
        _check_spec(entry, path)
    _check_names([entry.name for entry in entries], path)
    return entries


def _check_spec(entry: CatalogueEntry, path: Path) -> None:
    try:
        _ = entry.parsed
    except ValidationError as error:
        raise StartupError(f"the catalogue {path} cannot be used: {entry.name}.spec.{_sentence(error)}") from error


def _check_names(names: list[str], path: Path) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise StartupError(f"the catalogue {path} cannot be used: the entry {twice[0]} occurs twice")


def _sentence(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    what = "the field is unknown" if problem["type"] == "extra_forbidden" else problem["msg"].lower()
    return f"{place}: {what}" if place else what


def names_of(entries: Iterable[CatalogueEntry]) -> set[str]:
    """Return the base models of the entries."""
    return {entry.parsed.model.name for entry in entries}
