"""Calls of admins for keys: list, create and revoke."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from tinsmith_server.errors import NotFound
from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, ServicesDep, Tenant
from tinsmith_server.routes.http.dependencies import ApiKey as ApiKeySecret
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.store.records import ApiKey
from tinsmith_server.wire.administration import CreateKeyRequest, KeyEntry, KeysResponse, NewKeyResponse
from tinsmith_server.wire.responses import Empty

router = APIRouter(prefix=f"{API_PREFIX}/keys", tags=["administration"])


async def lasting_credential(services: ServicesDep, key: ApiKeySecret) -> None:
    await services.keys.check_lasting(key)


BY_A_KEY = [Depends(lasting_credential)]
KeyId = Annotated[int, Path(ge=1, lt=2**63)]


@router.get("", summary="All keys, without their secrets", response_model_exclude_none=True)
async def list_keys(_tenant: Tenant, services: ServicesDep) -> KeysResponse:
    return KeysResponse(keys=[_entry(key) for key in await services.keys.list()])


@router.post(
    "",
    summary="Create a key",
    openapi_extra=takes(CreateKeyRequest),
    response_model_exclude_none=True,
    dependencies=BY_A_KEY,
)
async def create_key(
    body: Annotated[CreateKeyRequest, Depends(body_as(CreateKeyRequest))], _tenant: Tenant, services: ServicesDep
) -> NewKeyResponse:
    """Create a key. Only this answer contains the secret of the key."""
    made = await services.keys.create(body.tenant, body.name, body.role)
    return NewKeyResponse(**_entry(made.record).model_dump(), key=made.secret)


@router.delete("/{key_id}", summary="Revoke a key; the last key of an admin is refused with 409", dependencies=BY_A_KEY)
async def revoke_key(key_id: KeyId, _tenant: Tenant, services: ServicesDep) -> Empty:
    """Revoke a key. Other servers refuse the key within seconds."""
    if await services.keys.revoke(key_id) is None:
        raise NotFound(f"there is no key {key_id}")
    return Empty()


def _entry(key: ApiKey) -> KeyEntry:
    return KeyEntry(
        key_id=key.key_id,
        prefix=key.prefix,
        tenant=key.tenant,
        name=key.name,
        role=key.role,
        created_at=key.created_at,
        revoked_at=key.revoked_at,
    )
