"""What routes are given: the services, the tenant that a key speaks for, and which part of a list."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from tinsmith_server.services.assembly import Services

# What the SDK sends by itself, and however often it likes.
UNCOUNTED = frozenset({"/client/config", "/client/dynamic_config", "/session_heartbeat", "/retrieve_future"})

_header = APIKeyHeader(name="X-API-Key", auto_error=False, description="A key that starts with `tml-`.")
_bearer = HTTPBearer(auto_error=False, description="The same key, as other makers' clients send it.")


async def get_services(request: Request) -> Services:
    # Not a plain function: FastAPI would send each call to a thread.
    services: Services = request.app.state.services
    return services


async def api_key(
    key: Annotated[str | None, Security(_header)],
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
) -> str | None:
    """In either header."""
    return key or (bearer.credentials if bearer is not None else None)


ApiKey = Annotated[str | None, Depends(api_key)]


async def authenticate(request: Request, services: Annotated[Services, Depends(get_services)], key: ApiKey) -> str:
    """The tenant. Raises AuthenticationFailed, and TooBusy for a key that asks for too much in a minute."""
    tenant = await services.keys.authenticate(key)
    if path_of(request) not in UNCOUNTED:
        services.admission.rates.admit_request(services.keys.counted_as(key))
    return tenant


def path_of(request: Request) -> str:
    """The route's template, without the prefix of all of them."""
    return str(request.scope["route"].path).removeprefix("/api/v1")


ServicesDep = Annotated[Services, Depends(get_services)]
Tenant = Annotated[str, Depends(authenticate)]
Limit = Annotated[int, Query(ge=1, le=1000)]
# A store counts in 64 bits, also the rows behind the offset.
Offset = Annotated[int, Query(ge=0, lt=2**62)]
