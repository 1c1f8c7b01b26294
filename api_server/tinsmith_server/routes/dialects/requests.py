"""Routes of a dialect: bodies that may be conversations, and problems in the dialect's own form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from typing_extensions import override

from tinsmith_server.errors import TinsmithError, TooBusy, Unprocessable
from tinsmith_server.logs import get_logger, redact
from tinsmith_server.routes.bodies import whole_body
from tinsmith_server.routes.dependencies import ApiKey, ServicesDep, Tenant
from tinsmith_server.routes.openapi import PROBLEMS
from tinsmith_server.routes.planned_route import Handler, PlannedRoute
from tinsmith_server.routes.problems import faults_of, http_status
from tinsmith_server.routes.uploads import AccountDep
from tinsmith_server.wire.dialects.texts import CONVERSATION
from tinsmith_server.wire.json_bodies import BadJson, read_object
from tinsmith_server.wire.requests import Request as Body
from tinsmith_server.wire.validation_errors import sentence

log = get_logger(__name__)

M = TypeVar("M", bound=Body)

Problem = Callable[[int, str], dict[str, Any]]
"""A status and a sentence in a dialect's form."""

# Other clients take 422 for a fault of their own form, and show its words to nobody.
BAD_REQUEST = 400


STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}}}
}
"""`responses` of a route whose answer may be a stream."""


def problems_as(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a dialect's router."""
    return {status: {"model": model, "description": "What went wrong."} for status in PROBLEMS}


class DialectRoute(PlannedRoute):
    """Whatever goes wrong is told in the form that the dialect's clients show."""

    problem: Problem

    @override
    def around(self, handle: Handler) -> Handler:
        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except TinsmithError as error:
                return _told(error, self.problem)
            except RequestValidationError as error:
                return JSONResponse(self.problem(BAD_REQUEST, redact(faults_of(error))), BAD_REQUEST)
            except HTTPException as error:
                return JSONResponse(self.problem(error.status_code, str(error.detail)), error.status_code)

        return handled


def status_of(error: TinsmithError) -> int:
    status = http_status(error)
    return BAD_REQUEST if isinstance(error, Unprocessable) else status


def _told(error: TinsmithError, problem: Problem) -> Response:
    status = status_of(error)
    if status >= 500:
        log.warning("request failed", status=status, reason=str(error))
    response = JSONResponse(problem(status, redact(str(error))), status)
    if isinstance(error, TooBusy):
        response.headers["retry-after"] = str(round(error.retry_after_seconds))
    return response


def conversation_as(model: type[M], *, samples: bool = True) -> Callable[..., Awaitable[M]]:
    """A dependency that reads the body. `samples`: it asks for tokens, which keys have a rate of.

    Raises BodyTooLarge, TooBusy, and Unprocessable with what is wrong.
    """

    async def read(request: Request, tenant: Tenant, services: ServicesDep, account: AccountDep, key: ApiKey) -> M:
        if samples:
            services.admission.admit_sample(key)
        body = await whole_body(request, services, account)
        try:
            return await services.admission.off_the_loop(
                tenant, len(body), lambda: model.model_validate(read_object(body, CONVERSATION))
            )
        except BadJson as error:
            raise Unprocessable(str(error)) from error
        except ValidationError as error:
            raise Unprocessable(sentence(error)) from error

    return read
