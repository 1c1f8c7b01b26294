from __future__ import annotations

import pytest
from support.operator.resources import FROM_HUB, make_session, session_manifest
from tinsmith_operator.api.owner import Unreadable
from tinsmith_operator.api.serving_spec import SourceType
from tinsmith_operator.api.status import TrainingSessionStatus
from tinsmith_operator.api.training_session import WhenDeleted, parse_session


def test_a_session_reads_as_it_is_written() -> None:
    session = make_session(source=FROM_HUB, storage={"retentionPolicy": {"whenDeleted": "Delete"}})
    assert session.spec.model.source.type is SourceType.HUB
    assert session.spec.storage.retention_policy.when_deleted is WhenDeleted.DELETE
    assert session.claim_name == "qwen-journal"


def test_fields_of_a_newer_crd_are_left_alone() -> None:
    assert make_session(parallelism={"nodes": 2}).spec.adapters.slots == 8


def test_a_foreign_condition_may_lack_fields_of_the_operators_conditions() -> None:
    foreign_condition = {
        "type": "example.com/Approved",
        "status": "True",
        "reason": "Budgeted",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    manifest = session_manifest() | {"status": {"conditions": [foreign_condition]}}
    [condition] = parse_session(manifest).status.conditions
    assert condition.to_manifest() == foreign_condition


def test_an_unreadable_session_is_named_with_its_field() -> None:
    with pytest.raises(Unreadable, match=r"research/qwen cannot be read: engine: .* Install the CRD"):
        parse_session(session_manifest(engine="abacus"))


def test_an_existing_claim_is_never_deleted_with_the_session() -> None:
    storage = {"existingClaim": "mine", "retentionPolicy": {"whenDeleted": "Delete"}}
    assert make_session(storage=storage).spec.storage.deletes_claim is False


def test_a_status_survives_being_written_and_read() -> None:
    written = TrainingSessionStatus(observed_generation=3, worker_id="w", epoch=0)
    assert TrainingSessionStatus.model_validate(written.to_manifest()) == written
