"""Dependencies of routes: the services, the tenant of the key, and the page of a list."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.security import APIKeyHeader
from starlette.requests import HTTPConnection
from typing_extensions import override

from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.accounts.callers import act_as
from tinsmith_server.services.accounts.roles import check_role
from tinsmith_server.services.assembly import Services

API_PREFIX = "/api/v1"

# Calls that the SDK makes by itself, at its own rate.
UNCOUNTED = frozenset(
    {
        "/client/config",
        "/client/dynamic_config",
        "/session_heartbeat",
        "/retrieve_future",
        "/retrieve_future/{request_id}",
        "/retrieve_futures",
    }
)
MOST_KEY_CHARACTERS = 200


class KeyHeader(APIKeyHeader):
    """The header with the key, in the form of Tinker's clients or of other clients.

    Both headers are read in one step, because every call needs a key.
    """

    @override
    async def __call__(self, request: HTTPConnection) -> str | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return await super().__call__(request) or (token if scheme.lower() == "bearer" else None)


_api_key = KeyHeader(
    name="X-API-Key",
    auto_error=False,
    description="A key that starts with `tml-`; `Authorization: Bearer` works as well.",
)
ApiKey = Annotated[str | None, Security(_api_key)]


async def get_services(request: Request) -> Services:
    # This is a coroutine, because FastAPI would run each call of a plain function in a thread.
    services: Services = request.app.state.services
    return services


async def authenticate(request: Request, services: Annotated[Services, Depends(get_services)], key: ApiKey) -> str:
    """Return the key's tenant.

    Raises AuthenticationFailed, Forbidden for a call that the key's role does not allow, and TooBusy for a key that is
    over its request rate.
    """
    caller, path = await services.keys.caller(key), path_of(request)
    check_role(caller.role, request.method, path)
    act_as(caller)
    if path not in UNCOUNTED:
        await services.admission.admit_request(key, caller.tenant)
    return caller.tenant


def path_of(request: Request) -> str:
    """Return the template of the route, without the common prefix."""
    return str(request.scope["route"].path).removeprefix(API_PREFIX)


async def read_idempotency_key(request: Request) -> str | None:
    """Return the idempotency key. Raises Unprocessable for a key that is too long."""
    key = request.headers.get("idempotency-key") or request.headers.get("x-idempotency-key")
    if not key:
        return None
    if len(key) > MOST_KEY_CHARACTERS or not key.isprintable():
        raise Unprocessable(f"an idempotency key must have at most {MOST_KEY_CHARACTERS} printable characters")
    return f"{path_of(request)}:{key}"


IdempotencyKey = Annotated[str | None, Depends(read_idempotency_key)]
ServicesDep = Annotated[Services, Depends(get_services)]
Tenant = Annotated[str, Depends(authenticate)]
Limit = Annotated[int, Query(ge=1, le=1000)]
# The store counts rows in 64 bits. The sum of offset and limit must fit.
Offset = Annotated[int, Query(ge=0, lt=2**62)]
