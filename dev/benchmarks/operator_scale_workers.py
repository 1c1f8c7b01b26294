"""Stand-ins for all workers: one gRPC server that answers Describe over mutual TLS, as an idle worker does.

`operator_scale.py` runs this program. The arguments are the directory of the certificates and the port.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.ca.certificates import OPERATOR_NAME, Leaf, Use, new_authority
from tinsmith_operator.runtime.worker_client import Target
from tinsmith_rpc import worker_pb2

FILES = ("certificate", "key", "authority")
HOST = "127.0.0.1"


def make_certificates(directory: Path) -> None:
    """Write the certificates of all workers and of the operator. One wildcard stands for all workers."""
    authority, now = new_authority("scale", datetime.now(UTC)), datetime.now(UTC)
    for name, dns_name, use in (
        ("workers", worker_dns_name("*"), Use.SERVER),
        ("operator", OPERATOR_NAME, Use.CLIENT),
    ):
        leaf = authority.issue((dns_name,), use, now)
        for file in FILES:
            (directory / f"{name}.{file}").write_bytes(getattr(leaf, file))


def read_leaf(directory: Path, name: str) -> Leaf:
    certificate, key, authority = ((directory / f"{name}.{file}").read_bytes() for file in FILES)
    return Leaf(certificate, key, authority, datetime.max.replace(tzinfo=UTC))


def local(target: Target, port: int) -> Target:
    """Return the target at the address of the stand-in."""
    return Target(target.pod_uid, f"{HOST}:{port}", target.worker_id)


async def describe(_request: worker_pb2.DescribeRequest, _context: Any) -> worker_pb2.DescribeReply:
    """Answer as a worker that holds nothing and does nothing."""
    return worker_pb2.DescribeReply(epoch=1, model_places=8, idle_seconds=60.0, snapshot_seconds=1.0)


def handler() -> grpc.GenericRpcHandler:
    method = grpc.unary_unary_rpc_method_handler(
        describe,
        request_deserializer=worker_pb2.DescribeRequest.FromString,
        response_serializer=worker_pb2.DescribeReply.SerializeToString,
    )
    service = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
    return grpc.method_handlers_generic_handler(service, {"Describe": method})


async def main() -> None:
    leaf = read_leaf(Path(sys.argv[1]), "workers")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(),))
    credentials = grpc.ssl_server_credentials(
        [(leaf.key, leaf.certificate)], root_certificates=leaf.authority, require_client_auth=True
    )
    server.add_secure_port(f"{HOST}:{sys.argv[2]}", credentials)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
