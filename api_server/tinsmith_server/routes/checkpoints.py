"""Checkpoints. The ID of a checkpoint has two path segments: `<kind>/<name>`."""

from __future__ import annotations

from email.utils import format_datetime
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import RedirectResponse, StreamingResponse

from tinsmith_server.errors import BodyTooLarge
from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import (
    API_PREFIX,
    IdempotencyKey,
    Limit,
    Offset,
    ServicesDep,
    Tenant,
    path_of,
)
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.routes.http.uploads import over, parts
from tinsmith_server.services.checkpoints.checkpoints import Types
from tinsmith_server.store.records import Checkpoint
from tinsmith_server.wire.ids import (
    KIND_OF_TYPE,
    VERSION_HEADER,
    CheckpointType,
    PathKind,
    TinkerPath,
    known_checkpoint_types,
)
from tinsmith_server.wire.requests import (
    CopyWeightsRequest,
    TtlRequest,
    UploadFinishRequest,
    UploadStartRequest,
    WeightsInfoRequest,
)
from tinsmith_server.wire.responses import (
    CheckpointResponse,
    CheckpointsResponse,
    CopyWeightsResponse,
    Cursor,
    Empty,
    ExternalUrlsResponse,
    UploadFinishResponse,
    UploadStartResponse,
    WeightsInfoResponse,
)
from tinsmith_server.wire.search import (
    CheckpointSearchPosition,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
)

router = APIRouter(prefix=API_PREFIX, tags=["checkpoints"])

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


def checkpoint_path(run_id: str, kind: PathKind, name: str) -> TinkerPath:
    return TinkerPath(run_id, kind, name)


async def known_types(version: Annotated[str | None, Header(alias=VERSION_HEADER)] = None) -> Types:
    """Return the types of checkpoints that an SDK of this version knows."""
    return known_checkpoint_types(version)


Path = Annotated[TinkerPath, Depends(checkpoint_path)]
KnownTypes = Annotated[Types, Depends(known_types)]


# SDKs below 0.4 use the second path.
@router.get("/training_runs/{run_id}/checkpoints", response_model_exclude_none=True)
@router.get("/models/{run_id}/checkpoints", response_model_exclude_none=True)
async def list_run_checkpoints(
    run_id: str, tenant: Tenant, services: ServicesDep, types: KnownTypes
) -> CheckpointsResponse:
    found = await services.checkpoints.of_run(tenant, run_id, types)
    return CheckpointsResponse(checkpoints=[checkpoint_response(checkpoint) for checkpoint in found])


@router.get("/checkpoints", response_model_exclude_none=True)
async def list_checkpoints(
    tenant: Tenant, services: ServicesDep, types: KnownTypes, limit: Limit = 100, offset: Offset = 0
) -> CheckpointsResponse:
    page = await services.checkpoints.all(tenant, limit, offset, types)
    return CheckpointsResponse(
        checkpoints=[checkpoint_response(checkpoint) for checkpoint in page.rows],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total),
    )


@router.post("/checkpoints/search", openapi_extra=takes(CheckpointSearchRequest), response_model_exclude_none=True)
async def search_checkpoints(
    body: Annotated[CheckpointSearchRequest, Depends(body_as(CheckpointSearchRequest))],
    tenant: Tenant,
    services: ServicesDep,
    types: KnownTypes,
) -> CheckpointSearchResponse:
    page = await services.checkpoint_search.search(tenant, body, types)
    behind = None
    if page.behind is not None:
        behind = CheckpointSearchPosition(last_created_at=page.behind.created_at, last_checkpoint_uuid=page.behind.key)
    found = [checkpoint_response(checkpoint) for checkpoint in page.found]
    return CheckpointSearchResponse(checkpoints=found, next_cursor=behind)


@router.delete(CHECKPOINT)
async def delete_checkpoint(path: Path, tenant: Tenant, services: ServicesDep) -> Empty:
    await services.checkpoints.delete(tenant, path)
    return Empty()


@router.post(CHECKPOINT + "/publish")
async def publish_checkpoint(path: Path, tenant: Tenant, services: ServicesDep) -> Empty:
    await services.checkpoints.publish(tenant, path, public=True)
    return Empty()


@router.delete(CHECKPOINT + "/publish")
async def unpublish_checkpoint(path: Path, tenant: Tenant, services: ServicesDep) -> Empty:
    await services.checkpoints.publish(tenant, path, public=False)
    return Empty()


@router.put(CHECKPOINT + "/ttl", openapi_extra=takes(TtlRequest))
async def set_checkpoint_ttl(
    path: Path, body: Annotated[TtlRequest, Depends(body_as(TtlRequest))], tenant: Tenant, services: ServicesDep
) -> Empty:
    await services.checkpoints.set_ttl(tenant, path, body.ttl_seconds)
    return Empty()


@router.get("/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
async def external_weights_urls(
    run_id: str, name: str, request: Request, tenant: Tenant, services: ServicesDep
) -> ExternalUrlsResponse:
    base_url = services.settings.public_url or str(request.base_url)
    links = await services.exports.links(tenant, run_id, name, base_url)
    return ExternalUrlsResponse(urls=links.urls, expires=links.expires)


@router.get(
    "/downloads/{token}/{path:path}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def download(token: str, path: str, services: ServicesDep) -> StreamingResponse:
    """Send a file of a checkpoint. Access needs only the link, which expires, and no key."""
    found = await services.exports.download(token, path)
    return StreamingResponse(
        found.parts, media_type="application/octet-stream", headers={"content-length": str(found.size_bytes)}
    )


@router.get(CHECKPOINT + "/archive", status_code=302, response_class=RedirectResponse)
async def archive_link(path: Path, request: Request, tenant: Tenant, services: ServicesDep) -> RedirectResponse:
    """Redirect to an archive that contains all files of a checkpoint.

    SDKs up to 0.35 read the address of the redirect, but do not follow it.
    """
    base_url = services.settings.public_url or str(request.base_url)
    link = await services.exports.archive_link(tenant, path, base_url)
    return RedirectResponse(link.url, 302, {"expires": format_datetime(link.expires, usegmt=True)})


@router.get(
    "/archives/{token}", response_class=StreamingResponse, responses={200: {"content": {"application/gzip": {}}}}
)
async def archive(token: str, services: ServicesDep) -> StreamingResponse:
    """Send a gzipped tar. Access needs only the link, which expires, and no key."""
    return StreamingResponse(await services.exports.archive(token), media_type="application/gzip")


@router.post("/copy_weights", openapi_extra=takes(CopyWeightsRequest))
async def copy_weights(
    body: Annotated[CopyWeightsRequest, Depends(body_as(CopyWeightsRequest))],
    tenant: Tenant,
    services: ServicesDep,
    key: IdempotencyKey,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> CopyWeightsResponse:
    copy = services.copies.copy(tenant, body, x_tinker_weights_access_token, key)
    return CopyWeightsResponse(tinker_path=await copy)


@router.post("/weights_info", openapi_extra=takes(WeightsInfoRequest), response_model_exclude_none=True)
async def weights_info(
    body: Annotated[WeightsInfoRequest, Depends(body_as(WeightsInfoRequest))], tenant: Tenant, services: ServicesDep
) -> WeightsInfoResponse:
    checkpoint = await services.checkpoints.readable(tenant, body.tinker_path)
    return WeightsInfoResponse(
        base_model=checkpoint.base_model,
        lora_rank=checkpoint.lora_rank,
        train_unembed=checkpoint.train_unembed,
        train_mlp=checkpoint.train_mlp,
        train_attn=checkpoint.train_attn,
        optimizer_config={"type": "adamw"},
    )


def checkpoint_response(checkpoint: Checkpoint) -> CheckpointResponse:
    kind = KIND_OF_TYPE[checkpoint.type]
    return CheckpointResponse(
        checkpoint_id=f"{kind}/{checkpoint.name}",
        checkpoint_type=cast(CheckpointType, checkpoint.type),
        time=checkpoint.created_at,
        tinker_path=str(TinkerPath(checkpoint.run_id, kind, checkpoint.name)),
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=dict(checkpoint.user_metadata) if checkpoint.user_metadata is not None else None,
        expires_at=checkpoint.expires_at,
        base_model=checkpoint.base_model,
    )


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
    """Receive a file. Access needs only the URL, which expires, and no key."""
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
