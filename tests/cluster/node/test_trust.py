"""The trust of a worker: it accepts calls of the API server and of the operator only."""

from __future__ import annotations

import pytest
from support.kubernetes.installation import Installation
from support.kubernetes.worker_call import describe


@pytest.mark.parametrize(
    ("how", "answer"),
    [("with its certificate", "answered"), ("without a certificate", "refused"), ("plain", "refused")],
)
def test_a_client_without_our_certificate_cannot_call_the_worker(
    how: str, answer: str, installation: Installation, session: str
) -> None:
    said = describe(installation, session, how)
    assert said.split()[0] == answer, said


def test_a_worker_has_no_token_and_writes_nothing_to_its_root(installation: Installation, session: str) -> None:
    look = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io'), os.access('/', os.W_OK), os.getuid())"
    answer = installation.kubectl("exec", f"{session}-0", "--", "python3", "-c", look)
    assert answer.split() == ["False", "False", "65532"]
