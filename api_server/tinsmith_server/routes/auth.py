"""What a key can learn of itself and do with itself: the calls of `tinker auth`."""

from __future__ import annotations

from fastapi import APIRouter

from tinsmith_server.routes.dependencies import API_PREFIX, ApiKey, ServicesDep, Tenant
from tinsmith_server.routes.planned_route import PlannedRoute
from tinsmith_server.wire.responses import (
    Empty,
    KeyDetails,
    KeyResponse,
    OrganizationName,
    TokenResponse,
    UserAddress,
)

router = APIRouter(prefix=API_PREFIX, tags=["auth"], route_class=PlannedRoute)


@router.post("/auth/token", summary="Exchange a key for a token that ends in an hour")
async def exchange(_tenant: Tenant, key: ApiKey, services: ServicesDep) -> TokenResponse:
    return TokenResponse(jwt=await services.keys.token_for(key))


@router.get("/auth/apikey/me", summary="The key that asks")
async def own_key(tenant: Tenant, key: ApiKey, services: ServicesDep) -> KeyResponse:
    record = await services.keys.record_of(key)
    return KeyResponse(
        key_id=record.key_id if record else 0,
        name=record.name if record else "the server's own key",
        note=record.prefix if record else "",
        details=KeyDetails(org_details=OrganizationName(name=tenant), user_details=UserAddress(email=tenant)),
    )


@router.delete("/auth/apikey/me", summary="Revoke the key that asks")
async def revoke_own_key(_tenant: Tenant, key: ApiKey, services: ServicesDep) -> Empty:
    await services.keys.revoke_own(key)
    return Empty()
