"""The sessions that a catalogue allows, and the errors of an unreadable one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.server.operator_stand_in import spec_of
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet.kubernetes.api import KubernetesApi
from tinsmith_server.fleet.kubernetes.catalogue import CatalogueEntry, read_catalogue
from tinsmith_server.fleet.kubernetes.fleet import SessionProvisioner
from tinsmith_server.fleet.kubernetes.training_session import TrainingSession, parse_session
from tinsmith_server.fleet.kubernetes.waking import Waker


def entry(**fields: Any) -> dict[str, Any]:
    return {"name": "tiny", "maxSessions": 2, "spec": spec_of(), **fields}


def written(folder: Path, content: object) -> Path:
    file = folder / "catalogue.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def sessions(*names: str, of: str | None = "tiny") -> dict[str, TrainingSession]:
    labels = {"tinsmith.dev/catalogue-entry": of} if of else {}
    metadata = [{"name": name, "namespace": "team", "labels": labels} for name in names]
    return {one["name"]: parse_session({"metadata": one, "spec": spec_of()}) for one in metadata}


def test_no_file_allows_nothing() -> None:
    assert read_catalogue(None) == ()


def test_entries_are_read_with_the_defaults_of_the_resource(tmp_path: Path) -> None:
    (read,) = read_catalogue(written(tmp_path, [entry()]))
    assert (read.name, read.max_sessions, read.parsed.adapters.slots, read.parsed.sampling) == (
        "tiny",
        2,
        8,
        "Colocated",
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[", "is not JSON"),
        ({"name": "tiny"}, "cannot be used"),
        ([entry(maxSession=1)], r"0\.maxSession: the field is unknown"),
        ([entry(name="Tiny")], r"0\.name: string should match"),
        ([entry(name="x" * 47)], r"0\.name: string should have at most 46"),
        ([entry(maxSessions=0)], r"0\.maxSessions: input should be greater"),
        ([entry(spec={})], r"tiny\.spec\.model: field required"),
        ([entry(spec=spec_of(sampling="Often"))], r"tiny\.spec\.sampling"),
        ([entry(), entry()], "the entry tiny occurs twice"),
    ],
    ids=["json", "list", "key", "name", "length", "count", "spec", "sampling", "twice"],
)
def test_a_catalogue_that_cannot_be_used_is_a_sentence_at_the_start(
    tmp_path: Path, content: object, sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        read_catalogue(written(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read the catalogue .*none\.json: No such file"):
        read_catalogue(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("present", "name"),
    [
        ({}, "tiny-1"),
        (sessions("tiny-1"), "tiny-2"),
        (sessions("tiny-2"), "tiny-1"),
        (sessions("tiny-1", "tiny-2"), None),
        (sessions("tiny-1", of=None), "tiny-2"),
        ({**sessions("tiny-1", "tiny-2", of=None), **sessions("tiny-3")}, "tiny-4"),
        (sessions("other-1", "other-2", of="other"), "tiny-1"),
    ],
)
def test_the_next_name_follows_from_the_existing_names(present: dict[str, TrainingSession], name: str | None) -> None:
    assert CatalogueEntry.model_validate(entry()).next_name(present) == name


async def provided(existing: dict[str, TrainingSession], catalogue: Sequence[CatalogueEntry], **need: Any) -> str:
    api = KubernetesApi()
    provisioner = SessionProvisioner(api, catalogue, "team", lambda _made: None, Waker(api.want))
    asked = {"base_model": spec_of()["model"]["name"], "rank": 8, "sampling": False, **need}
    return await provisioner.provide({(one.namespace, one.name): one for one in existing.values()}, **asked)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (True, "no SamplerPool and no TrainingSession samples from org/absent at LoRA rank 8; ask an administrator"),
        (False, "no TrainingSession trains org/absent at LoRA rank 8; ask an administrator"),
    ],
)
async def test_a_model_that_no_resource_serves_is_named_with_its_rank_and_use(sampling: bool, message: str) -> None:
    assert (await provided({}, (), base_model="org/absent", sampling=sampling)).startswith(message)


async def test_a_stalled_session_is_explained_and_no_second_one_is_created(tmp_path: Path) -> None:
    """A second session of the same spec would stall in the same way."""
    states = [("Ready", "False", "There is no such model."), ("Stalled", "True", "")]
    status = {"conditions": [{"type": type, "status": state, "message": text} for type, state, text in states]}
    metadata = {"name": "tiny-1", "namespace": "team", "labels": {"tinsmith.dev/catalogue-entry": "tiny"}}
    stalled = parse_session({"metadata": metadata, "spec": spec_of(), "status": status})
    catalogue = read_catalogue(written(tmp_path, [entry()]))
    text = await provided({"tiny-1": stalled}, catalogue)
    assert text == "TrainingSession team/tiny-1 is not ready: There is no such model"
