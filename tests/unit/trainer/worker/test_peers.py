from __future__ import annotations

import pytest
from tinsmith_trainer.worker.peers import API_SERVER, OPERATOR, refusal

DESCRIBE, SNAPSHOT, SUBMIT = (f"/tinsmith.rpc.v1.Worker/{call}" for call in ("Describe", "Snapshot", "Submit"))


@pytest.mark.parametrize("call", [DESCRIBE, SNAPSHOT, SUBMIT])
def test_the_api_server_may_do_everything(call: str) -> None:
    assert refusal(frozenset({API_SERVER}), call) is None


def test_the_operator_may_describe_and_snapshot_and_no_more() -> None:
    assert refusal(frozenset({OPERATOR}), DESCRIBE) is None
    assert refusal(frozenset({OPERATOR}), SNAPSHOT) is None
    assert "may only ask" in (refusal(frozenset({OPERATOR}), SUBMIT) or "")


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
