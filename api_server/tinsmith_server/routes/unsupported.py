"""The rest of the protocol. 422 with a sentence: a 404 would look like a wrong URL, and 5xx is repeated for minutes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from tinsmith_server.errors import NotSupportedYet
from tinsmith_server.routes.dependencies import API_PREFIX, Tenant

UNSUPPORTED: tuple[tuple[str, str, str], ...] = (
    ("POST", "/create_custom_loss", "running custom losses on the server"),
)

router = APIRouter(prefix=API_PREFIX, tags=["not supported yet"])


def _refusal(what: str) -> Callable[[Tenant], Awaitable[None]]:
    async def refuse(_tenant: Tenant) -> None:
        raise NotSupportedYet(f"{what} is not supported yet by this server")

    return refuse


for method, path, what in UNSUPPORTED:
    router.add_api_route(path, _refusal(what), methods=[method], name=what, summary=f"Not supported yet: {what}")
