"""Dependencies that read bodies: JSON objects, requests, samples or training data.

Each dependency checks the key before it reads the body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import BodyTooLarge, TooBusy, Unprocessable
from tinsmith_server.routes.http.dependencies import ApiKey, ServicesDep, Tenant, path_of
from tinsmith_server.routes.http.uploads import AccountDep, limit_of, over, receive
from tinsmith_server.services.accounts.body_budget import Account
from tinsmith_server.services.assembly import Services
from tinsmith_server.services.sampling import sample_requests
from tinsmith_server.services.sampling.sample_requests import SampleSubmission, any_sample
from tinsmith_server.services.training.custom_losses import custom_loss_id
from tinsmith_server.services.training.operation_bodies import TrainingBody, TrainingOperation
from tinsmith_server.services.training.submit_requests import CallKey
from tinsmith_server.wire.ids import CustomLossId
from tinsmith_server.wire.json_bodies import GRAPH, PLAIN, PROMPT, BadJson, Shape, read_object, sentence

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

# The number of bytes that are read of a training body over the limit. They contain the head, which names the model.
HEAD_BYTES = 64 * 1024
# The limits on the content of bodies, for routes that do not use `PLAIN`.
SHAPES = {"/retrieve_futures": Shape(values=64 * 1024)}


async def whole_body(request: Request, services: Services, account: Account, *, grows: bool = False) -> bytes:
    """Return the body. Raises BodyTooLarge if the body is over the limit.

    For `grows` see `receive`.
    """
    path = path_of(request)
    limit = limit_of(path, services.settings)
    body = await receive(request, limit, account, grows=grows)
    if not body.complete:
        raise BodyTooLarge(over(path, limit))
    return body.content


async def read_json_object(
    request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep
) -> dict[str, Any]:
    """Return the JSON object in the body. Raises BodyTooLarge, and Unprocessable if the body is not a JSON object."""
    body, shape = await whole_body(request, services, account), SHAPES.get(path_of(request), PLAIN)
    try:
        return await services.admission.off_the_loop(tenant, len(body), lambda: read_object(body, shape))
    except BadJson as error:
        raise Unprocessable(str(error)) from error


JsonObject = Annotated[dict[str, Any], Depends(read_json_object)]


def body_as(model: type[M]) -> Callable[[dict[str, Any]], M]:
    """Return a dependency that validates the body.

    The dependency answers errors with 422, so it suits only requests without a future.
    """

    def validate(content: dict[str, Any]) -> M:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise Unprocessable(sentence(error)) from error

    async def validated(content: JsonObject) -> M:
        # This is a coroutine, because FastAPI would run each call of a plain function in a thread.
        return validate(content)

    return validated  # type: ignore[return-value]


def sample_as(form: Callable[[dict[str, Any]], T]) -> Callable[..., Awaitable[T]]:
    """Return a dependency that reads a sample in this form.

    The dependency raises Unprocessable for invalid JSON, and the errors that `form` raises.
    """

    async def read(request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey) -> T:
        services.admission.admit_sample(key)
        body = await whole_body(request, services, account)
        try:
            return await services.admission.off_the_loop(tenant, len(body), lambda: form(read_object(body, PROMPT)))
        except BadJson as error:
            raise Unprocessable(str(error)) from error

    return read


AnySample = Annotated[SampleSubmission | sample_requests.PlainSample, Depends(sample_as(any_sample))]
PlainSample = Annotated[sample_requests.PlainSample, Depends(sample_as(sample_requests.plain_sample))]


async def read_custom_loss(
    request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep
) -> CustomLossId:
    """Read a custom loss, and return its ID. The ID contains the whole loss.

    Raises Unprocessable for an invalid loss.
    """
    body = await whole_body(request, services, account)

    def packed() -> CustomLossId:
        return custom_loss_id(read_object(body, GRAPH))

    try:
        return await services.admission.off_the_loop(tenant, len(body), packed)
    except BadJson as error:
        raise Unprocessable(str(error)) from error


CustomLoss = Annotated[CustomLossId, Depends(read_custom_loss)]


async def read_forward_backward(
    request: Request, response: Response, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey
) -> worker_pb2.SubmitRequest:
    """Return the operation of a training call. The body is protobuf, or JSON from SDKs below 0.22.3."""
    if request.headers.get("content-type", "").startswith("application/json"):
        return await _from_json("forward_backward_input", request, response, services, account, key)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    path, limit = path_of(request), services.settings.max_body_bytes
    body = await receive(request, limit, account, beginning=HEAD_BYTES, grows=encoding != "identity")
    read = TrainingBody(body.content, encoding, body.complete, over(path, limit))
    return _operation(await services.operation_bodies.from_protobuf(read, account, key), response)


async def read_forward(
    request: Request, response: Response, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey
) -> worker_pb2.SubmitRequest:
    """Return the operation of a call without gradients.

    SDKs from 0.22.3 on send a call without gradients as a forward_backward without a loss.
    """
    return await _from_json("forward_input", request, response, services, account, key)


ForwardBackward = Annotated[worker_pb2.SubmitRequest, Depends(read_forward_backward)]
Forward = Annotated[worker_pb2.SubmitRequest, Depends(read_forward)]


async def _from_json(
    call: CallKey, request: Request, response: Response, services: Services, account: Account, key: str | None
) -> worker_pb2.SubmitRequest:
    """Return the operation in a JSON body.

    Raises BodyTooLarge for a body over the limit, because the model's name is at the end of a body.
    """
    body = await whole_body(request, services, account, grows=True)
    return _operation(await services.operation_bodies.from_json(body, call, account, key), response)


def _operation(read: TrainingOperation, response: Response) -> worker_pb2.SubmitRequest:
    if read.note is not None:
        response.headers["x-deprecation-note"] = read.note
    return read.request


async def read_telemetry_body(request: Request, services: ServicesDep) -> bytes:
    """Return the body, or an empty body if the body is over the limit, because telemetry must not cause errors.

    All senders without a key share one budget.
    """
    with services.admission.telemetry.account("") as account, suppress(TooBusy, HTTPException):
        body = await receive(request, limit_of(path_of(request), services.settings), account)
        if body.complete:
            return body.content
    return b""
