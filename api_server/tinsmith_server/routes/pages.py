"""Pages for a browser: a front page, and a page of all calls in Swagger UI.

The pages load nothing from other servers.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse

from tinsmith_server.routes.dialects.requests import SHORT, base_url

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

_STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .3rem 1.5rem .3rem 0; vertical-align: top; }
code { overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { background: #181a1b; color: #e8e6e3; } a { color: #8ab4f8; } }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_FRONT_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; {_NOTHING_ELSE}"
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

router = APIRouter()


@router.get("/", tags=["service"], summary="What this is", response_class=JSONResponse)
async def front_page(request: Request) -> Response:
    """Describe the server. A browser gets a page, and other clients get JSON."""
    headers = {"Vary": "Accept"}
    if prefers_html(request.headers.get("accept", "")):
        policy = {"Content-Security-Policy": _FRONT_POLICY}
        return HTMLResponse(_front_page(request), headers=headers | _HEADERS | policy)
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


def _front_page(request: Request) -> str:
    clients = (
        ("tinker SDK", "TINKER_BASE_URL", base_url(request, "")),
        ("OpenAI's clients", "base_url", base_url(request, SHORT)),
        ("Anthropic's clients", "base_url", base_url(request, "")),
    )
    rows = "\n".join(
        f"<tr><td>{client}</td><td><code>{name}</code></td><td><code>{escape(url)}</code></td></tr>"
        for client, name, url in clients
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tinsmith {escape(VERSION)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>Tinsmith {escape(VERSION)}</h1>
<p>A self-hosted server for the Tinker fine-tuning API. Programs train LoRA adapters here with the tinker SDK, and
sample from base models and adapters with the SDK or with OpenAI's and Anthropic's clients. Each needs an API key.</p>
<table>
<tr><th>Client</th><th>Setting</th><th>Value</th></tr>
{rows}
</table>
<p><a href="docs">All calls</a>, and the same as <a href="openapi.json">OpenAPI document</a>.
<code>tinsmith doctor</code> checks that your programs can use this server. The documentation is the folder
<code>docs</code> of Tinsmith's source.</p>
</body>
</html>
"""


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
