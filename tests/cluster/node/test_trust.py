"""Only the API server and the operator may speak to a worker."""

from __future__ import annotations

import pytest
from support.kubernetes.installation import Installation

# Runs in the API server's pod, which has grpc and a network path to the worker.
CALL = """
import grpc, sys
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
target, name, how = sys.argv[1:]
files = '/etc/tinsmith/tls/'
authority = open(files + 'ca.crt', 'rb').read()
own = [open(files + file, 'rb').read() for file in ('tls.key', 'tls.crt')] if how == 'with its certificate' else []
if how == 'plain':
    channel = grpc.insecure_channel(target)
else:
    credentials = grpc.ssl_channel_credentials(authority, *own)
    channel = grpc.secure_channel(target, credentials, [('grpc.ssl_target_name_override', name)])
try:
    worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=60)
    print('answered')
except grpc.RpcError as error:
    print('refused', error.code().name)
"""


@pytest.mark.parametrize(
    ("how", "answer"),
    [("with its certificate", "answered"), ("without a certificate", "refused"), ("plain", "refused")],
)
def test_a_client_without_our_certificate_cannot_call_the_worker(
    how: str, answer: str, installation: Installation, session: str
) -> None:
    status = (installation.get("trainingsession", session) or {})["status"]
    name = f"{status['workerId']}.worker.tinsmith.internal"
    server = f"deployment/{installation.release}-api-server"
    said = installation.kubectl("exec", server, "--", "python3", "-c", CALL, status["endpoint"], name, how)
    assert said.split()[0] == answer, said


def test_a_worker_has_no_token_and_writes_nothing_to_its_root(installation: Installation, session: str) -> None:
    look = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io'), os.access('/', os.W_OK), os.getuid())"
    answer = installation.kubectl("exec", f"{session}-0", "--", "python3", "-c", look)
    assert answer.split() == ["False", "False", "65532"]
