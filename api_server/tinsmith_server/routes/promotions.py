"""Calls for stable names of saved samplers: set, list, roll back and remove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from tinsmith_server.routes.http.bodies import body_as
from tinsmith_server.routes.http.dependencies import API_PREFIX, ServicesDep, Tenant
from tinsmith_server.routes.http.openapi import takes
from tinsmith_server.services.checkpoints.promotions import Expected
from tinsmith_server.store.records import Promotion
from tinsmith_server.wire.plain_requests import PromoteRequest
from tinsmith_server.wire.responses import Empty, PromotionResponse, PromotionsResponse

router = APIRouter(prefix=f"{API_PREFIX}/promotions", tags=["promotions"])


@router.get("", summary="The path of each name")
async def list_promotions(tenant: Tenant, services: ServicesDep) -> PromotionsResponse:
    return _all(await services.promotions.list(tenant))


@router.get("/{name}", summary="The path of a name and its earlier paths, newest first")
async def promotion_history(name: str, tenant: Tenant, services: ServicesDep) -> PromotionsResponse:
    return _all(await services.promotions.history(tenant, name))


@router.put("/{name}", summary="Make a name refer to a saved sampler", openapi_extra=takes(PromoteRequest))
async def promote(
    name: str, body: Annotated[PromoteRequest, Depends(body_as(PromoteRequest))], tenant: Tenant, services: ServicesDep
) -> PromotionResponse:
    expected = body.expected_path if "expected_path" in body.model_fields_set else Expected.ANYTHING
    return _one(await services.promotions.promote(tenant, name, body.model_path, expected))


@router.post("/{name}/rollback", summary="Roll a name back to its previous path")
async def roll_back(
    name: str, tenant: Tenant, services: ServicesDep, expected_number: Annotated[int | None, Query(ge=1)] = None
) -> PromotionResponse:
    """Roll a name back. `expected_number` is the number of the change to undo.

    If this change is already undone, nothing changes.
    """
    return _one(await services.promotions.roll_back(tenant, name, expected_number))


@router.delete("/{name}", summary="Remove a name")
async def remove_promotion(name: str, tenant: Tenant, services: ServicesDep) -> Empty:
    await services.promotions.remove(tenant, name)
    return Empty()


def _one(promotion: Promotion) -> PromotionResponse:
    return PromotionResponse(
        name=promotion.name,
        model_path=promotion.tinker_path,
        time=promotion.at,
        number=promotion.number,
        is_rollback=promotion.is_rollback,
    )


def _all(promotions: Sequence[Promotion]) -> PromotionsResponse:
    return PromotionsResponse(promotions=[_one(one) for one in promotions])
