"""The folders of the package that a browser reads: the console, and the manual that `make docs-site` builds.

The console's files hold no data, so they need no key. The manual's pages need a key in the same cases as /docs (setting
`pages_need_key`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter

from tinsmith_server.routes.http.static_files import StaticFiles, files_of

BUNDLE = Path(str(files("tinsmith_server"))) / "console_bundle"
CONSOLE_PATH = "/console"
CONSOLE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
NO_CONSOLE = "this installation has no console, because its files were not built: install a released package or image"
# A bundler adds a digest of the content to the name: index-D1g3sT0f.js.
_HASHED = re.compile(r"[.-][A-Za-z0-9_-]{8,}\.\w+")
_FOREVER = "public, max-age=31536000, immutable"

SITE = Path(str(files("tinsmith_server"))) / "manual"
MANUAL_PATH = "/manual"
NO_MANUAL = (
    "this installation has no manual, because it was not built: run `make docs-site` before you install Tinsmith"
)
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def console_files(folder: Path) -> APIRouter:
    """Return the routes of the files in `folder`. A file with a digest in its name never changes."""
    return StaticFiles(CONSOLE_PATH, files_of(folder), CONSOLE_POLICY, "console", NO_CONSOLE, _caching).router()


def _caching(name: str) -> str:
    return _FOREVER if _HASHED.search(Path(name).name) else "no-cache"


def manual_paths(folder: Path) -> frozenset[str]:
    """Return the paths of the site, for the check of keys."""
    return frozenset({MANUAL_PATH, *(f"{MANUAL_PATH}/{name}" for name in files_of(folder))})


def manual_pages(folder: Path) -> APIRouter:
    """Return the routes of the files in `folder`."""
    found = files_of(folder)
    return StaticFiles(MANUAL_PATH, found, _policy(found), "manual", NO_MANUAL).router()


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
