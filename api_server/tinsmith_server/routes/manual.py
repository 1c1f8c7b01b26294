"""The documentation as a site, which `make docs-site` builds into the package.

The pages need a key in the same cases as /docs (setting `pages_need_key`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, RedirectResponse

from tinsmith_server.errors import NotFound
from tinsmith_server.routes.console.bundle import MEDIA_TYPES

SITE = Path(str(files("tinsmith_server"))) / "manual"
START = "index.html"
MANUAL_PATH = "/manual"
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def manual_paths(folder: Path) -> frozenset[str]:
    """Return the paths of the site, for the check of keys."""
    return frozenset({MANUAL_PATH, *(f"{MANUAL_PATH}/{name}" for name in _files_of(folder))})


def manual_pages(folder: Path) -> APIRouter:
    """Return the routes of the files in `folder`.

    Only the files that are in the folder now are served, by their exact names. No other path can name a file.
    """
    found = _files_of(folder)
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _policy(found),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    router = APIRouter(include_in_schema=False)

    @router.get(MANUAL_PATH)
    async def with_slash() -> Response:
        """Redirect to the folder, because the addresses in the pages are relative to it."""
        return RedirectResponse("manual/", headers=headers)

    @router.get(MANUAL_PATH + "/{path:path}")
    async def file(path: str) -> Response:
        name = path or START
        if name not in found:
            raise NotFound(_missing(name, is_built=START in found))
        media_type = MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream")
        return FileResponse(found[name], media_type=media_type, headers=headers)

    return router


def _files_of(folder: Path) -> Mapping[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _policy(found: Mapping[str, Path]) -> str:
    """Return a policy that permits the site's own files, and the scripts that its pages have inline now.

    The theme sets styles on elements, and the search reads pages.
    """
    pages = [path.read_bytes() for name, path in found.items() if name.endswith(".html")]
    scripts = {script for page in pages for script in _INLINE_SCRIPT.findall(page)}
    digests = sorted(base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts)
    sources = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in digests)])
    return (
        f"default-src 'none'; script-src {sources}; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def _missing(name: str, *, is_built: bool) -> str:
    if is_built:
        return f"the manual has no page {name[:200]!r}"
    return "this installation has no manual, because it was not built: run `make docs-site` before you install Tinsmith"
