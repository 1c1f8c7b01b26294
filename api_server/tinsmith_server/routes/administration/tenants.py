"""Calls of admins for tenants: list them with their use, and set their limits."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, ServicesDep
from tinsmith_server.routes.http.dependencies import Tenant as CallerTenant
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.services.accounts.limits import as_dict
from tinsmith_server.store.records import TenantLimits
from tinsmith_server.wire.administration import (
    LimitsRequest,
    TenantEntry,
    TenantLimitsResponse,
    TenantsResponse,
    TenantUse,
)

router = APIRouter(prefix=f"{API_PREFIX}/tenants", tags=["administration"])


@router.get("", summary="All tenants, with their limits and their use", response_model_exclude_none=True)
async def list_tenants(_tenant: CallerTenant, services: ServicesDep) -> TenantsResponse:
    return TenantsResponse(
        tenants=[
            TenantEntry(
                tenant=one.limits.tenant,
                keys=one.totals.keys,
                limits=TenantLimitsResponse(**as_dict(one.limits)),
                used=TenantUse(
                    adapters=one.totals.adapters,
                    queued_operations=services.queued_operations(one.limits.tenant),
                    checkpoint_bytes=one.totals.checkpoint_bytes,
                ),
            )
            for one in await services.limits.tenants()
        ]
    )


@router.put(
    "/{tenant}/limits",
    summary="Replace all limits of a tenant",
    openapi_extra=takes(LimitsRequest),
    response_model_exclude_none=True,
)
async def set_limits(
    tenant: str,
    body: Annotated[LimitsRequest, Depends(body_as(LimitsRequest))],
    _tenant: CallerTenant,
    services: ServicesDep,
) -> TenantLimitsResponse:
    """Replace all limits of a tenant. Other servers apply them within seconds."""
    limits = TenantLimits(tenant, **body.model_dump())
    await services.limits.set(limits)
    return TenantLimitsResponse(**as_dict(limits))
