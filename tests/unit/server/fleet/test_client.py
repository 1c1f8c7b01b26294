"""Calls to a worker or sampler whose image is older than the server."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_server.errors import Unprocessable
from tinsmith_server.fleet.client import GrpcWorkerClient


class OlderWorker(worker_pb2_grpc.WorkerServicer):  # type: ignore[misc]
    """A worker that renders no prompts, and numbers no operations."""

    async def Submit(self, _request: worker_pb2.SubmitRequest, _context: object) -> worker_pb2.SubmitReply:
        return worker_pb2.SubmitReply(epoch=1)


async def test_an_older_image_is_named_as_the_cause_when_it_lacks_a_call_or_a_field(tmp_path: Path) -> None:
    """After another error the SDK would repeat the request without end."""
    server, address = grpc.aio.server(), f"unix:{tmp_path}/worker.sock"
    worker_pb2_grpc.add_WorkerServicer_to_server(OlderWorker(), server)
    server.add_insecure_port(address)
    await server.start()
    client = GrpcWorkerClient(address)
    try:
        assert (await client.submit(worker_pb2.SubmitRequest(), "ada", 2.0)).epoch == 1
        with pytest.raises(Unprocessable, match="cannot number operations: send a seq_id"):
            await client.submit(worker_pb2.SubmitRequest(idempotency_key="a"), "ada", None)
        with pytest.raises(Unprocessable, match="accepts only tokens; ask an administrator to restart it"):
            await client.render_prompt(worker_pb2.RenderPromptRequest(), "ada")
    finally:
        await client.close()
        await server.stop(None)
