"""The tokenizer of a base model, for programs on machines that have no files of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from tinsmith_server.routes.dependencies import API_PREFIX, ServicesDep, Tenant

ZIP: dict[int | str, dict[str, Any]] = {200: {"content": {"application/zip": {}}}}

router = APIRouter(prefix=API_PREFIX, tags=["service"])


@router.get(
    "/models/{base_model:path}/tokenizer",
    summary="The tokenizer's files of a base model, as a zip archive",
    response_class=Response,
    responses=ZIP,
)
async def tokenizer(base_model: str, _tenant: Tenant, services: ServicesDep) -> Response:
    """Every key may have it, as every key may train and sample every base model."""
    archive = await services.tokenizers.archive(base_model)
    return Response(archive.content, media_type="application/zip")
