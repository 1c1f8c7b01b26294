"""The HTTP statuses of errors, the error handlers, and the header that the SDK shows to the user."""

from __future__ import annotations

import math

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tinsmith_server import errors
from tinsmith_server.errors import TinsmithError
from tinsmith_server.logs import get_logger, redact
from tinsmith_server.store.connection import StoreUnavailable, UnstorableValue

log = get_logger(__name__)

HTTP_STATUS: dict[type[TinsmithError], int] = {
    errors.AuthenticationFailed: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Gone: 410,
    errors.BodyTooLarge: 413,
    errors.Unprocessable: 422,
    errors.CheckpointDamaged: 422,
    UnstorableValue: 422,
    errors.TooBusy: 429,
    errors.WorkerUnavailable: 503,
    StoreUnavailable: 503,
    errors.CheckpointRootUnavailable: 503,
    errors.StorageFull: 507,
    TinsmithError: 500,
}
"""The HTTP status of each error.

The SDK would retry for minutes after a 409, so only calls that no SDK makes answer 409.
"""
NOT_FOUND = "Not Found"
"""The answer that Starlette gives for a path without a route."""
UNKNOWN_CALL = (
    "This call does not exist. If a tinker SDK made it, the SDK is newer than the server: "
    "docs/reference/protocol.md lists the SDK versions that work; install one of them, or a newer server."
)


def http_status(error: TinsmithError) -> int:
    """Return the status of the nearest base class in the table."""
    return next(HTTP_STATUS[kind] for kind in type(error).__mro__ if kind in HTTP_STATUS)


def problem(status: int, detail: str) -> JSONResponse:
    """Return the error response. Without a content-length, the SDK would treat a 400 as a proxy's answer."""
    return JSONResponse({"detail": redact(detail)}, status)


def set_user_notice(response: Response, sentence: str) -> None:
    """Set the header with a notice for the user.

    The SDK always shows this header to the user, with a label for deprecations.
    """
    words = " ".join(redact(sentence).split())
    response.headers["x-deprecation-note"] = f"waiting: {words}".encode("ascii", "replace").decode()


def install_problem_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TinsmithError, _tinsmith_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)


async def _tinsmith_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TinsmithError)
    status = http_status(error)
    if status >= 500:
        log.warning("request failed", status=status, reason=str(error))
    response = problem(status, str(error))
    if isinstance(error, errors.TokenRefused):
        response.headers["www-authenticate"] = 'Bearer error="invalid_token"'
    if isinstance(error, errors.TooBusy):
        response.headers["retry-after"] = str(math.ceil(error.retry_after_seconds))
    if isinstance(error, errors.StorageFull):
        set_user_notice(response, str(error))
        # The SDK's inner retries would hide the message for a minute and a half. Its outer retries continue for 300 s.
        response.headers["x-should-retry"] = "false"
    return response


async def _validation_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return problem(422, faults_of(error))


def faults_of(error: RequestValidationError) -> str:
    """Return one sentence with the errors of all parameters."""
    return "; ".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors())


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    response = problem(error.status_code, _detail(request, error))
    response.headers.update(error.headers or {})
    return response


def _detail(request: Request, error: HTTPException) -> str:
    if error.status_code not in {404, 405}:
        return error.detail
    called = f"{request.method} {request.url.path}: {error.detail}"
    return f"{called}. {UNKNOWN_CALL}" if error.detail == NOT_FOUND else called
