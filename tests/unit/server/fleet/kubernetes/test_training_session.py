"""The server's reading of a TrainingSession, and its message for one that is not running."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from support.kubernetes.crds import fill_defaults, root_schema
from support.server.operator_stand_in import spec_of
from tinsmith_server.fleet.kubernetes.session_template import parse_template
from tinsmith_server.fleet.kubernetes.training_session import (
    AdaptersPart,
    TrainingSession,
    parse_session,
    pending_template,
)


def session(*conditions: tuple[str, str, str], deleted: bool = False, **spec: Any) -> TrainingSession:
    metadata = {"name": "tiny", "namespace": "team"} | (
        {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    )
    said = [{"type": type, "status": status, "message": message} for type, status, message in conditions]
    return parse_session({"metadata": metadata, "spec": spec_of(**spec), "status": {"conditions": said}})


def test_missing_fields_of_a_spec_have_the_defaults_of_the_api_server() -> None:
    """The API server stores no `adapters` if the user wrote none."""
    said = spec_of()
    filled = fill_defaults(spec_of(adapters={}), root_schema()["properties"]["spec"])["adapters"]
    assert filled["maxRank"] == 128
    assert parse_session({"metadata": {"name": "tiny", "namespace": "team"}, "spec": said}).spec.adapters == (
        AdaptersPart(slots=filled["slots"], maxRank=filled["maxRank"])
    )


READY = ("Ready", "True", "The worker answers.")
LOADING = ("Ready", "False", "The worker loads the model.")
STALLED = ("Stalled", "True", "There is no such model.")


@pytest.mark.parametrize(
    ("example", "at_work", "coming"),
    [
        (session(), False, True),
        (session(READY), True, False),
        (session(LOADING), False, True),
        (session(LOADING, STALLED), False, False),
        (session(READY, suspend=True), False, False),
        (session(LOADING, suspend=True), False, False),
        (session(READY, deleted=True), False, False),
        (session(("Ready", "Unknown", "The node does not answer.")), False, True),
    ],
)
def test_a_session_is_at_work_or_coming_or_neither(example: TrainingSession, at_work: bool, coming: bool) -> None:
    assert (example.at_work, example.coming) == (at_work, coming)


def test_a_session_leaves_permanently_only_with_its_volume() -> None:
    delete = {"retentionPolicy": {"whenDeleted": "Delete"}}
    assert session(READY, deleted=True, storage=delete).leaving
    assert not session(READY, deleted=True).leaving
    assert not session(READY, storage=delete).leaving


def test_a_rank_or_a_use_that_a_session_does_not_have_does_not_suit_it() -> None:
    trains = session(READY, adapters={"maxRank": 16}, sampling="None")
    assert trains.suits(16, sampling=False)
    assert not trains.suits(17, sampling=False)
    assert not trains.suits(0, sampling=True)


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (session(), "TrainingSession team/tiny is not ready: its operator has not reconciled it yet"),
        (session(LOADING), "TrainingSession team/tiny is not ready: The worker loads the model"),
        (session(READY, deleted=True), "TrainingSession team/tiny is being deleted, but its volume is kept"),
        (
            session(READY, deleted=True, storage={"retentionPolicy": {"whenDeleted": "Delete"}}),
            "TrainingSession team/tiny is being deleted; its models are saved as checkpoints named autosave",
        ),
        (session(READY, suspend=True), "kubectl --namespace team patch trainingsession tiny --type merge"),
    ],
)
def test_a_session_that_is_not_at_work_says_what_is_in_the_way(example: TrainingSession, sentence: str) -> None:
    assert sentence in example.unavailable_reason_text()


def test_fields_of_a_newer_operator_are_passed_over() -> None:
    assert session(READY, parallelism={"nodes": 4}).ready


def test_something_else_under_the_name_of_a_session_is_not_understood() -> None:
    with pytest.raises(ValidationError):
        parse_session({"metadata": {"name": "tiny", "namespace": "team"}, "spec": {}})


FROM_TEMPLATE: dict[str, Any] = {
    "metadata": {"name": "tiny", "namespace": "team"},
    "spec": {"templateRef": {"name": "t"}},
}


def test_a_session_from_a_template_has_the_spec_of_its_copy_and_its_own_suspension() -> None:
    copy = {"name": "t", "generation": 1, "spec": json.dumps(spec_of(adapters={"slots": 3}))}
    own = {**FROM_TEMPLATE["spec"], "suspend": True}
    read = parse_session({**FROM_TEMPLATE, "spec": own, "status": {"template": copy}})
    assert (read.model, read.spec.adapters.slots, read.spec.suspend) == ("org/tiny", 3, True)
    assert pending_template({**FROM_TEMPLATE, "status": {"template": copy}}) is None


def test_a_session_without_the_copy_has_the_spec_of_the_template() -> None:
    assert pending_template(FROM_TEMPLATE) == ("team", "t")
    template = parse_template({"metadata": FROM_TEMPLATE["metadata"], "spec": spec_of()})
    assert parse_session(FROM_TEMPLATE, template.spec).model == "org/tiny"
    with pytest.raises(ValidationError):
        parse_session(FROM_TEMPLATE)


def test_a_retired_session_gets_no_more_models_and_answers_for_those_that_it_has() -> None:
    metadata = {**FROM_TEMPLATE["metadata"], "annotations": {"tinsmith.dev/retired-at": "2026-01-01T00:00:00Z"}}
    ready = {"type": "Ready", "status": "True", "message": "The worker answers."}
    retired = parse_session({"metadata": metadata, "spec": spec_of(), "status": {"conditions": [ready]}})
    assert retired.at_work
    assert not retired.suits(rank=8, sampling=False)
