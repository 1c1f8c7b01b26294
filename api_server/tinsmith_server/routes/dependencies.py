"""What routes are given: the services, and the tenant that a key speaks for."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader

from tinsmith_server.services.assembly import Services

_api_key = APIKeyHeader(name="X-API-Key", auto_error=False, description="A key that starts with `tml-`.")


async def get_services(request: Request) -> Services:
    # Not a plain function: FastAPI would send each call to a thread.
    services: Services = request.app.state.services
    return services


async def authenticate(
    services: Annotated[Services, Depends(get_services)], key: Annotated[str | None, Security(_api_key)]
) -> str:
    return await services.keys.authenticate(key)


ServicesDep = Annotated[Services, Depends(get_services)]
Tenant = Annotated[str, Depends(authenticate)]
