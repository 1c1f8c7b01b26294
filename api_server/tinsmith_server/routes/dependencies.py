"""What routes are given: the services, the tenant that a key speaks for, and which part of a list."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.security import APIKeyHeader
from starlette.requests import HTTPConnection
from typing_extensions import override

from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.assembly import Services

API_PREFIX = "/api/v1"

# What the SDK sends by itself, and however often it likes.
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
    """The header of Tinker's clients, or that of others: in one step, since every call takes it."""

    @override
    async def __call__(self, request: HTTPConnection) -> str | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return await super().__call__(request) or (token if scheme.lower() == "bearer" else None)


_api_key = KeyHeader(
    name="X-API-Key",
    auto_error=False,
    description="A key that starts with `tml-`; `Authorization: Bearer` takes it, too.",
)
ApiKey = Annotated[str | None, Security(_api_key)]


async def get_services(request: Request) -> Services:
    # Not a plain function: FastAPI would send each call to a thread.
    services: Services = request.app.state.services
    return services


async def authenticate(request: Request, services: Annotated[Services, Depends(get_services)], key: ApiKey) -> str:
    """The tenant. Raises AuthenticationFailed, and TooBusy for a key that asks for too much in a minute."""
    tenant = await services.keys.authenticate(key)
    if path_of(request) not in UNCOUNTED:
        services.admission.admit_request(key)
    return tenant


def path_of(request: Request) -> str:
    """The route's template, without the prefix of all of them."""
    return str(request.scope["route"].path).removeprefix(API_PREFIX)


async def read_idempotency_key(request: Request) -> str | None:
    """Of one call: the same key at another call is another key. Raises Unprocessable for one that nobody can keep."""
    key = request.headers.get("idempotency-key") or request.headers.get("x-idempotency-key")
    if not key:
        return None
    if len(key) > MOST_KEY_CHARACTERS or not key.isprintable():
        raise Unprocessable(f"an idempotency key has {MOST_KEY_CHARACTERS} printable characters at most")
    return f"{path_of(request)}:{key}"


IdempotencyKey = Annotated[str | None, Depends(read_idempotency_key)]
ServicesDep = Annotated[Services, Depends(get_services)]
Tenant = Annotated[str, Depends(authenticate)]
Limit = Annotated[int, Query(ge=1, le=1000)]
# A store counts in 64 bits, also the rows behind the offset.
Offset = Annotated[int, Query(ge=0, lt=2**62)]
