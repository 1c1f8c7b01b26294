"""What routes read from bodies: JSON objects, requests, samples, training data. Only after the key has been checked."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from tinsmith_rpc import worker_pb2
from tinsmith_rpc.zstd_frames import FrameInvalid, declared_bytes, unpack, unpacked_bytes

from tinsmith_server.errors import BodyTooLarge, TooBusy, Unprocessable
from tinsmith_server.routes.dependencies import ApiKey, ServicesDep, Tenant, path_of
from tinsmith_server.routes.uploads import AccountDep, Body, limit_of, over, receive
from tinsmith_server.services.accounts.body_budget import Account
from tinsmith_server.services.assembly import Services
from tinsmith_server.services.failures import rejection
from tinsmith_server.services.sampling import sample_requests
from tinsmith_server.services.sampling.sample_requests import SampleSubmission, sample_submission
from tinsmith_server.services.training.custom_losses import custom_loss_id
from tinsmith_server.services.training.submit_requests import CallKey, JsonOperation, json_operation
from tinsmith_server.wire.head import Head, HeadUnreadable, read_head
from tinsmith_server.wire.ids import CustomLossId, operation_number
from tinsmith_server.wire.json_bodies import GRAPH, PLAIN, PROMPT, BadJson, Shape, read_object
from tinsmith_server.wire.json_training import training_shape
from tinsmith_server.wire.token_counts import trained_tokens
from tinsmith_server.wire.validation_errors import sentence

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

# What is read from less takes about a millisecond, whatever it is; a thread costs a fifth of that.
INLINE_BYTES = 16 * 1024
# Of a training body that is not kept: its head, which says whose it is.
HEAD_BYTES = 64 * 1024
# What the body of a route may be made of, other than `PLAIN`.
SHAPES = {"/retrieve_futures": Shape(values=64 * 1024)}
# Bytes of arrays, as against those of the text that they are read from.
TEXT_IN_MEMORY = 2

STABLE_REINFORCE_NOTE = (
    "stable_reinforce has no public formula; this server runs it as cispo with the same inputs, and a penalty by "
    "kl_coeff of its own (setting map_stable_reinforce)"
)


async def off_the_loop(
    services: Services,
    tenant: str,
    size: int,
    work: Callable[[], T],
    during: AbstractContextManager[None] | None = None,
) -> T:
    """Run `work` on a body of `size` bytes where nobody waits for it but its sender; `during` is open while it runs.

    One at a time, and tenants in turn: Python lets one thread run at a time anyhow.
    """
    if size <= INLINE_BYTES:
        return work()
    async with services.admission.body_lock.held(tenant):
        with during or nullcontext():
            return await asyncio.to_thread(work)


async def whole_body(request: Request, services: Services, account: Account, *, grows: bool = False) -> bytes:
    """Raises BodyTooLarge. For `grows` see `receive`."""
    path = path_of(request)
    limit = limit_of(path, services.settings)
    body = await receive(request, limit, account, grows=grows)
    if not body.complete:
        raise BodyTooLarge(over(path, limit))
    return body.content


async def read_json_object(
    request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep
) -> dict[str, Any]:
    """Raises BodyTooLarge, and Unprocessable for anything but a JSON object."""
    body, shape = await whole_body(request, services, account), SHAPES.get(path_of(request), PLAIN)
    try:
        return await off_the_loop(services, tenant, len(body), lambda: read_object(body, shape))
    except BadJson as error:
        raise Unprocessable(str(error)) from error


JsonObject = Annotated[dict[str, Any], Depends(read_json_object)]


def body_as(model: type[M]) -> Callable[[dict[str, Any]], M]:
    """A dependency that validates the body. Only for requests without a future: its errors are 422s."""

    def validate(content: dict[str, Any]) -> M:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise Unprocessable(sentence(error)) from error

    async def validated(content: JsonObject) -> M:
        # Not a plain function: FastAPI would send each call to a thread.
        return validate(content)

    return validated  # type: ignore[return-value]


def sample_as(form: Callable[[dict[str, Any]], T]) -> Callable[..., Awaitable[T]]:
    """A dependency that reads a sample in one of its forms.

    Raises Unprocessable where its JSON cannot be read, and what the form raises.
    """

    async def read(request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey) -> T:
        services.admission.rates.sampled.admit(services.keys.counted_as(key))
        body = await whole_body(request, services, account)
        try:
            return await off_the_loop(services, tenant, len(body), lambda: form(read_object(body, PROMPT)))
        except BadJson as error:
            raise Unprocessable(str(error)) from error

    return read


Sample = Annotated[SampleSubmission, Depends(sample_as(sample_submission))]
PlainSample = Annotated[sample_requests.PlainSample, Depends(sample_as(sample_requests.plain_sample))]


async def read_custom_loss(
    request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep
) -> CustomLossId:
    """What has the whole loss in it. Raises Unprocessable for one that the workers would not run."""
    body = await whole_body(request, services, account)

    def packed() -> CustomLossId:
        return custom_loss_id(read_object(body, GRAPH))

    try:
        return await off_the_loop(services, tenant, len(body), packed)
    except BadJson as error:
        raise Unprocessable(str(error)) from error


CustomLoss = Annotated[CustomLossId, Depends(read_custom_loss)]


async def read_forward_backward(
    request: Request, response: Response, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey
) -> worker_pb2.SubmitRequest:
    """The operation as the worker is given it, but for the epoch.

    The SDK's message travels in it as it came, or as it would have come from an SDK of today. Raises Unprocessable
    only when model_id or seq_id cannot be read; the rest is the future's business, and a body that cannot be run is
    not kept.
    """
    if request.headers.get("content-type", "").startswith("application/json"):
        return await _from_json("forward_backward_input", request, response, tenant, services, account, key)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    path, limit = path_of(request), services.settings.max_body_bytes
    body = await receive(request, limit, account, beginning=HEAD_BYTES, grows=encoding != "identity")
    head = await _head(services, tenant, body, encoding)
    operation = worker_pb2.SubmitRequest(
        model_id=head.model_id, seq_id=operation_number(head.seq_id), kind=worker_pb2.FORWARD_BACKWARD
    )
    if not body.complete:
        operation.rejection.CopyFrom(rejection(over(path, limit)))
    elif encoding == "identity":
        operation.payload = body.content
    else:
        keep = _keep_gzip if encoding == "gzip" else _keep_zstd
        try:
            await keep(operation, body.content, limit, services, account)
        except BodyTooLarge:
            operation.rejection.CopyFrom(rejection(over(path, limit)))
        except FrameInvalid as error:
            operation.rejection.CopyFrom(rejection(f"the {encoding} body is damaged: {error}"))
        account.received()
    await _charge(services, account, services.keys.counted_as(key), operation)
    _note_loss(services, response, head.loss_fn)
    return operation


async def read_forward(
    request: Request, response: Response, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey
) -> worker_pb2.SubmitRequest:
    """The same without gradients, in JSON alone: later SDKs send a forward_backward that asks for none."""
    return await _from_json("forward_input", request, response, tenant, services, account, key)


ForwardBackward = Annotated[worker_pb2.SubmitRequest, Depends(read_forward_backward)]
Forward = Annotated[worker_pb2.SubmitRequest, Depends(read_forward)]


async def _from_json(
    call: CallKey,
    request: Request,
    response: Response,
    tenant: str,
    services: Services,
    account: Account,
    key: str | None,
) -> worker_pb2.SubmitRequest:
    """Of a body over the limit nobody knows whose it is, since that stands at its end: BodyTooLarge."""
    body, limit = await whole_body(request, services, account, grows=True), services.settings.max_body_bytes
    # Numbers of a few digits take more room than their text.
    room = min(TEXT_IN_MEMORY * len(body), limit)
    await account.take(room)
    account.received()

    def operation() -> JsonOperation:
        return json_operation(read_object(body, training_shape(limit)), call, limit)

    try:
        read = await off_the_loop(services, tenant, len(body), operation)
    except BadJson as error:
        raise Unprocessable(str(error)) from error
    account.give_back(room - min(room, len(read.request.payload)))
    await _charge(services, account, services.keys.counted_as(key), read.request)
    _note_loss(services, response, read.loss_fn)
    return read.request


def _note_loss(services: Services, response: Response, loss_fn: str | None) -> None:
    if loss_fn == "stable_reinforce" and services.settings.map_stable_reinforce:
        response.headers["x-deprecation-note"] = STABLE_REINFORCE_NOTE


async def _charge(services: Services, account: Account, key: str, operation: worker_pb2.SubmitRequest) -> None:
    """Waits for the key's rate, and counts the tokens on it."""
    if not services.admission.rates.trained.limits or operation.HasField("rejection"):
        return
    await services.admission.rates.trained.admit_late(key)
    unpacked = declared_bytes(operation.payload) if operation.zstd else None
    size, count = max(unpacked or 0, len(operation.payload)), partial(trained_tokens, operation.payload, unpacked)
    # One body is counted at a time, so what it unpacks to needs no room of its own, for which bodies would wait.
    tokens = await off_the_loop(services, account.tenant, size, count, account.overdrawn(unpacked or 0))
    services.admission.rates.trained.charge(key, tokens)


async def _head(services: Services, tenant: str, body: Body, encoding: str) -> Head:
    """Raises Unprocessable. What is compressed is never small."""
    size = len(body.content) if encoding == "identity" else INLINE_BYTES + 1
    try:
        return await off_the_loop(services, tenant, size, lambda: read_head(body.content, encoding))
    except HeadUnreadable as error:
        raise Unprocessable(str(error)) from error


async def read_telemetry_body(request: Request, services: ServicesDep) -> bytes:
    """What fits; a batch over the limit is not worth an error to the client. Without a key: those share a budget."""
    with services.admission.telemetry.account("") as account, suppress(TooBusy, HTTPException):
        body = await receive(request, limit_of(path_of(request), services.settings), account)
        if body.complete:
            return body.content
    return b""


async def _keep_zstd(
    operation: worker_pb2.SubmitRequest, frame: bytes, limit: int, services: Services, account: Account
) -> None:
    """As it came, where it declares its size; else unpacked, since a worker does not know the limit.

    Raises BodyTooLarge, FrameInvalid.
    """
    declared = declared_bytes(frame)
    size = declared
    if size is None:
        size = await off_the_loop(services, account.tenant, limit, partial(unpacked_bytes, frame, limit))
    if size > limit:
        raise BodyTooLarge(f"a body of {size} bytes or more")
    if declared is not None:
        operation.payload, operation.zstd = frame, True
    else:
        await account.take(size)
        operation.payload = await off_the_loop(services, account.tenant, size, partial(unpack, frame, size))


async def _keep_gzip(
    operation: worker_pb2.SubmitRequest, content: bytes, limit: int, services: Services, account: Account
) -> None:
    """Unpacked: workers know zstd alone. Raises BodyTooLarge, FrameInvalid."""
    await account.take(limit)
    operation.payload = await off_the_loop(services, account.tenant, limit, partial(_gunzipped, content, limit))
    account.give_back(limit - len(operation.payload))


def _gunzipped(content: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        unpacked = decompressor.decompress(content, limit + 1)
    except zlib.error as error:
        raise FrameInvalid(str(error)) from error
    if len(unpacked) > limit:
        raise BodyTooLarge(f"a body of {len(unpacked)} bytes or more")
    if not decompressor.eof:
        raise FrameInvalid("it ends before its checksum")
    if decompressor.unused_data:
        raise FrameInvalid("something follows its end")
    return unpacked
