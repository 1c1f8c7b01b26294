"""The peers that may call a worker over the network. A peer is identified by the name in the peer's certificate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from typing_extensions import override

log = structlog.get_logger(__name__)

API_SERVER = "api-server.tinsmith.internal"
OPERATOR = "operator.tinsmith.internal"
SAMPLER = "sampler.tinsmith.internal"
CALLS = {
    OPERATOR: frozenset({"/tinsmith.rpc.v1.Worker/Describe", "/tinsmith.rpc.v1.Worker/Snapshot"}),
    SAMPLER: frozenset({"/tinsmith.rpc.v1.Worker/StreamSave"}),
}
"""The calls that peers with limited rights may make."""
WHAT_THEY_DO = {
    OPERATOR: "ask how this worker is doing (Describe) and have its adapters saved (Snapshot)",
    SAMPLER: "get a save that an API server has named (StreamSave)",
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Serve: TypeAlias = Callable[[Any, Any], Any]


def names_of_peer(context: Context) -> frozenset[str]:
    """Return the names in the caller's certificate.

    A caller on a Unix socket has no certificate, so the result is empty.
    """
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return frozenset(name.decode(errors="replace") for name in names)


def worker_name(worker_id: str) -> str:
    """Return the name in the certificate of the worker with this ID."""
    return f"{worker_id}.worker.tinsmith.internal"


def is_operator(context: Context) -> bool:
    return OPERATOR in names_of_peer(context)


def refusal(names: frozenset[str], call: str) -> str | None:
    """Return why a caller with these names may not make this call, or None if the call is allowed."""
    if API_SERVER in names or any(call in CALLS[name] for name in names & CALLS.keys()):
        return None
    for name in sorted(names & CALLS.keys()):
        return f"{name} may only {WHAT_THEY_DO[name]}; {call} is for {API_SERVER}."
    shown = ", ".join(sorted(names)) or "no name"
    return f"This worker serves {API_SERVER}, {OPERATOR} and {SAMPLER}; the client's certificate is for {shown}."


def wrapped(handler: Handler, around: Callable[[Serve, Any, Context], Awaitable[Any]]) -> Handler:
    """Return a handler that calls `around` with the function of this handler, the request and the context.

    The worker has no call that takes a stream.
    """
    serve: Serve | None = handler.unary_unary or handler.unary_stream
    assert serve is not None, "a call that takes a stream would not be wrapped"
    make = grpc.unary_unary_rpc_method_handler if handler.unary_unary else grpc.unary_stream_rpc_method_handler
    return make(
        partial(around, serve),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class AdmitPeers(grpc.aio.ServerInterceptor):
    """An interceptor that answers PERMISSION_DENIED before a call reaches the worker.

    A call with a streamed answer writes the answer to the stream directly, without a generator.
    """

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = handler_call_details.method

        async def admit(serve: Serve, request: Any, context: Context) -> Any:
            reason = refusal(names_of_peer(context), call)
            if reason is not None:
                await _deny(context, reason)
            return await serve(request, context)

        return wrapped(handler, admit)


async def _deny(context: Context, reason: str) -> NoReturn:
    log.warning("call refused", peer=context.peer(), reason=reason)
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
    raise AssertionError("abort returned")
