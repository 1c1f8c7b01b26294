"""Adapters that come in: the calls of the SDK's 0.39 for external weights, and the URLs that its files are sent to."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from tinsmith_server.errors import BodyTooLarge
from tinsmith_server.routes.bodies import body_as
from tinsmith_server.routes.dependencies import API_PREFIX, ServicesDep, Tenant, path_of
from tinsmith_server.routes.openapi import takes
from tinsmith_server.routes.uploads import over, parts
from tinsmith_server.wire.requests import UploadFinishRequest, UploadStartRequest
from tinsmith_server.wire.responses import Empty, UploadFinishResponse, UploadStartResponse

router = APIRouter(prefix=API_PREFIX, tags=["checkpoints"])

FILE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/external_weights_upload_start", openapi_extra=takes(UploadStartRequest))
async def start_upload(
    body: Annotated[UploadStartRequest, Depends(body_as(UploadStartRequest))],
    request: Request,
    tenant: Tenant,
    services: ServicesDep,
) -> UploadStartResponse:
    base_url = services.settings.public_url or str(request.base_url)
    started = await services.imports.start(tenant, body, base_url)
    return UploadStartResponse(upload_id=started.upload_id, urls=started.urls, expires=started.expires)


@router.put("/uploads/{token}/{name}", openapi_extra=FILE_BODY)
async def upload_file(token: str, name: str, request: Request, services: ServicesDep) -> Empty:
    """Without a key: the URL itself is the permission, and ends by itself."""
    upload = await services.imports.upload_of(token)
    limit = services.imports.limit_of(name)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(over(path_of(request), limit))
    with services.admission.bodies.account(upload.tenant) as account:
        await services.imports.receive(upload, name, parts(request, limit, account))
    return Empty()


@router.post("/external_weights_upload_finish", openapi_extra=takes(UploadFinishRequest))
async def finish_upload(
    body: Annotated[UploadFinishRequest, Depends(body_as(UploadFinishRequest))], tenant: Tenant, services: ServicesDep
) -> UploadFinishResponse:
    return UploadFinishResponse(tinker_path=await services.imports.finish(tenant, body.upload_id))
