"""The files of the console, which the package contains. The files hold no data, so they need no key."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, RedirectResponse

from tinsmith_server.errors import NotFound

BUNDLE = Path(str(files("tinsmith_server"))) / "console_bundle"
START = "index.html"
CONSOLE_PATH = "/console"

# The system's own table of media types differs between systems. With `nosniff`, a wrong type makes a file useless.
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# A bundler adds a digest of the content to the name: index-D1g3sT0f.js.
_HASHED = re.compile(r"[.-][A-Za-z0-9_-]{8,}\.\w+")
_FOREVER = "public, max-age=31536000, immutable"


def console_files(folder: Path) -> APIRouter:
    """Return the routes of the files in `folder`.

    Only the files that are in the folder now are served, by their exact names. No other path can name a file.
    """
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    router = APIRouter(include_in_schema=False)

    @router.get(CONSOLE_PATH)
    async def with_slash() -> Response:
        """Redirect to the folder, because the addresses in the page are relative to it."""
        return RedirectResponse("console/", headers=HEADERS)

    @router.get(CONSOLE_PATH + "/{path:path}")
    async def file(path: str) -> Response:
        name = path or START
        if name not in found:
            raise NotFound(_missing(name, is_installed=START in found))
        caching = _FOREVER if _HASHED.search(Path(name).name) else "no-cache"
        media_type = MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream")
        return FileResponse(found[name], media_type=media_type, headers=HEADERS | {"Cache-Control": caching})

    return router


def _missing(name: str, *, is_installed: bool) -> str:
    if is_installed:
        return f"the console has no file {name[:200]!r}"
    return "this installation has no console, because its files were not built: install a released package or image"
