"""gRPC's health service on a port of its own, for probes that know no TLS.

`liveness` is SERVING while the event loop answers at all, also before the model is loaded.
`readiness`, and the empty name, are SERVING while the worker takes work.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from tinsmith_trainer.errors import ServerError

LIVENESS = "liveness"
READINESS = ("readiness", "")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """What the probes of this process are told."""

    def __init__(self) -> None:
        self._servicer = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def serve(self, address: str) -> int:
        """Alive and not ready from now on; returns the port. Raises ServerError when it is taken."""
        await self._servicer.set(LIVENESS, SERVING)
        await self.set_ready(False)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ServerError(f"Health cannot be served on {address}: {error}. Choose a free address.") from error
        await self._server.start()
        return port

    async def set_ready(self, ready: bool) -> None:
        for service in READINESS:
            await self._servicer.set(service, SERVING if ready else NOT_SERVING)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0)
