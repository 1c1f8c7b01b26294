from __future__ import annotations

import pytest
from tinsmith_trainer.worker.peers import API_SERVER, OPERATOR, SAMPLER, refusal

DESCRIBE, SNAPSHOT, SUBMIT, STREAM_SAVE = (
    f"/tinsmith.rpc.v1.Worker/{call}" for call in ("Describe", "Snapshot", "Submit", "StreamSave")
)


@pytest.mark.parametrize("call", [DESCRIBE, SNAPSHOT, SUBMIT, STREAM_SAVE])
def test_the_api_server_may_do_everything(call: str) -> None:
    assert refusal(frozenset({API_SERVER}), call) is None


def test_the_operator_may_describe_and_snapshot_and_no_more() -> None:
    assert refusal(frozenset({OPERATOR}), DESCRIBE) is None
    assert refusal(frozenset({OPERATOR}), SNAPSHOT) is None
    for call in (SUBMIT, STREAM_SAVE):
        assert "may only ask" in (refusal(frozenset({OPERATOR}), call) or "")


def test_a_sampler_may_get_a_save_that_it_can_name_and_no_more() -> None:
    """Its certificate names its pool, too, which admits it to nothing."""
    names = frozenset({SAMPLER, "pool-uid.worker.tinsmith.internal"})
    assert refusal(names, STREAM_SAVE) is None
    for call in (DESCRIBE, SNAPSHOT, SUBMIT):
        assert "may only get a save" in (refusal(names, call) or "")


def test_another_workers_certificate_gets_no_saves() -> None:
    assert refusal(frozenset({"uid-2.worker.tinsmith.internal"}), STREAM_SAVE) is not None


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (set(), "no name"),
        ({"uid-1.worker.tinsmith.internal"}, "uid-1.worker.tinsmith.internal"),
        ({f"x.{API_SERVER}"}, f"x.{API_SERVER}"),
        ({"a", "b"}, "a, b"),
    ],
)
def test_nobody_else_may_do_anything(names: set[str], shown: str) -> None:
    assert (refusal(frozenset(names), DESCRIBE) or "").endswith(f"the client's certificate is for {shown}.")
