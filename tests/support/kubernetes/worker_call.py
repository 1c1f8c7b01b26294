"""A call of a worker from inside an API server's pod, with that pod's certificate or without."""

from __future__ import annotations

from support.kubernetes.installation import Installation

# Runs in the API server's pod, which has grpc and a network path to the worker.
_CALL = """
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
    reply = worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=60)
    print('answered', reply.last_snapshot_time)
except grpc.RpcError as error:
    print('refused', error.code().name)
"""


def describe(installation: Installation, session: str, how: str = "with its certificate") -> str:
    """`answered` and the Unix time of the worker's last snapshot, or `refused` and why."""
    status = (installation.get("trainingsession", session) or {})["status"]
    name = f"{status['workerId']}.worker.tinsmith.internal"
    server = f"deployment/{installation.release}-api-server"
    return installation.kubectl("exec", server, "--", "python3", "-c", _CALL, status["endpoint"], name, how)


def last_snapshot_seconds(installation: Installation, session: str) -> float:
    """Return the time of the worker's last snapshot, by its clock."""
    answered, seconds = describe(installation, session).split()
    assert answered == "answered"
    return float(seconds)
