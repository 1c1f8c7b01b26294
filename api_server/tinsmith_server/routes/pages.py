"""Pages for a browser: the way to the console, and a page of all calls in Swagger UI.

The pages load nothing from other servers.
"""

from __future__ import annotations

from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse

DOCS_PATH = "/docs"
OPENAPI_PATH = "/openapi.json"
VERSION = version("tinsmith")

# The package that contains Swagger UI's released files.
_SWAGGER = Path(str(files("fastapi_swagger.resources")))
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_START = "start.js"
# Without an empty validator URL, Swagger UI sends the document's address to a server on the internet.
_START_CODE = """"use strict";
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#calls",
  deepLinking: true,
  validatorUrl: "none",
  presets: [SwaggerUIBundle.presets.apis],
});
"""
DOCS_PATHS = frozenset({DOCS_PATH, *(f"{DOCS_PATH}/{name}" for name in (*ASSETS, _START))})

_NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# Swagger UI uses data: URLs for its icons, and sets styles on its elements.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    f"connect-src 'self'; {_NOTHING_ELSE}"
)
# Relative addresses also work behind a proxy that serves this below a path.
_DOCS_PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tinsmith {escape(VERSION)}: API</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="calls"></div>
<noscript>This page needs JavaScript. <a href="openapi.json">openapi.json</a> describes the same calls.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/{_START}"></script>
</body>
</html>
"""

_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

router = APIRouter()


@router.get("/", tags=["service"], summary="What this is", response_class=JSONResponse)
async def front_page(request: Request) -> Response:
    """Describe the server to a program. A browser is redirected to the console.

    The address is relative, so that it works behind a proxy that serves this below a path.
    """
    headers = {"Vary": "Accept"}
    if prefers_html(request.headers.get("accept", "")):
        return RedirectResponse("console/", headers=headers | _HEADERS)
    detail = (
        "Tinsmith serves the Tinker training API here, under /api/v1. /docs describes every call; `tinsmith doctor` "
        "checks that your programs can use it."
    )
    return JSONResponse({"detail": detail}, headers=headers)


def prefers_html(accept: str) -> bool:
    """Return whether the client accepts `text/html` with a higher weight than `application/json`."""
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (word.strip().lower() for word in part.split(";"))
        weights[kind] = next((_weight(each[2:]) for each in parameters if each.startswith("q=")), 1.0)
    return weights.get("text/html", 0.0) > weights.get("application/json", 0.0)


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


@router.get(DOCS_PATH, include_in_schema=False)
async def docs() -> Response:
    return HTMLResponse(_DOCS_PAGE, headers=_HEADERS | {"Content-Security-Policy": _DOCS_POLICY})


@router.get(f"{DOCS_PATH}/{_START}", include_in_schema=False)
async def start() -> Response:
    return Response(_START_CODE, headers=_HEADERS, media_type="text/javascript")


def _add_asset(name: str, media_type: str) -> None:
    async def asset() -> Response:
        return FileResponse(_SWAGGER / name, media_type=media_type, headers=_HEADERS)

    router.add_api_route(f"{DOCS_PATH}/{name}", asset, include_in_schema=False)


for _name, _media_type in ASSETS.items():
    _add_asset(_name, _media_type)
