"""Only the API server and the operator may speak to a worker."""

from __future__ import annotations

import pytest
from support.installation import Installation

# Runs in the API server's pod, which has grpc and a network path to the worker, without using its certificate.
CALL_WITHOUT_CERTIFICATE = """
import grpc, sys
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
authority = open('/etc/tinsmith/tls/ca.crt', 'rb').read()
options = [('grpc.ssl_target_name_override', sys.argv[2])]
if sys.argv[3] == 'plain':
    channel = grpc.insecure_channel(sys.argv[1])
else:
    channel = grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials(authority), options)
try:
    worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=10)
    print('answered')
except grpc.RpcError as error:
    print('refused', error.code().name)
"""


@pytest.mark.parametrize("how", ["plain", "without a certificate"])
def test_a_client_without_our_certificate_cannot_call_the_worker(
    how: str, installation: Installation, session: str
) -> None:
    status = (installation.get("trainingsession", session) or {})["status"]
    name = f"{status['workerId']}.worker.tinsmith.internal"
    server = f"deployment/{installation.release}-api-server"
    python = ["python3", "-c", CALL_WITHOUT_CERTIFICATE, status["endpoint"], name, how]
    answer = installation.kubectl("exec", server, "--", *python)
    assert answer.split()[0] == "refused", answer


def test_a_worker_has_no_token_and_writes_nothing_to_its_root(installation: Installation, session: str) -> None:
    look = "import os; print(os.path.exists('/var/run/secrets/kubernetes.io'), os.access('/', os.W_OK), os.getuid())"
    answer = installation.kubectl("exec", f"{session}-0", "--", "python3", "-c", look)
    assert answer.split() == ["False", "False", "65532"]
