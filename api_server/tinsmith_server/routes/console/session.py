"""Calls of the console about its session: login with a key, renewal and logout."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from tinsmith_server.routes.console.cookies import remove_cookie, set_cookie
from tinsmith_server.routes.http.dependencies import ApiKey, ServicesDep, authenticate
from tinsmith_server.services.accounts.console_sessions import ConsoleSession
from tinsmith_server.wire.administration import ConsoleSessionResponse

PATH = "/console/session"

# The console is the only client of these calls, so they are not in the document of the API.
router = APIRouter(prefix=PATH, include_in_schema=False)


@router.post("", dependencies=[Depends(authenticate)])
async def log_in(request: Request, services: ServicesDep, key: ApiKey) -> Response:
    return _with_cookie(request, await services.console_sessions.log_in(key))


@router.get("")
async def current(services: ServicesDep, key: ApiKey) -> Response:
    session = await services.console_sessions.current(key)
    await services.admission.admit_request(key, session.caller.tenant)
    return _content(session)


@router.post("/renew")
async def renew(request: Request, services: ServicesDep, key: ApiKey) -> Response:
    session = await services.console_sessions.renew(key)
    await services.admission.admit_request(key, session.caller.tenant)
    return _with_cookie(request, session)


@router.delete("", status_code=204)
async def log_out(request: Request, services: ServicesDep, key: ApiKey) -> Response:
    """End the session, and remove the cookie. The call needs no valid session, because a cookie may have expired."""
    await services.console_sessions.log_out(key)
    response = Response(status_code=204)
    remove_cookie(request, response)
    return response


def _with_cookie(request: Request, session: ConsoleSession) -> Response:
    """Return the session with a new cookie. A server that requires no keys sets no cookie."""
    response = _content(session)
    if session.token is not None:
        set_cookie(request, response, session.token, session.seconds_left)
    return response


def _content(session: ConsoleSession) -> Response:
    caller = session.caller
    content = ConsoleSessionResponse(
        tenant=caller.tenant,
        role=caller.role,
        key_name=caller.name,
        csrf_token=session.csrf_token,
        expires_at=session.expires_at,
    )
    return Response(content.model_dump_json(), media_type="application/json", headers={"Cache-Control": "no-store"})
