"""Folders of the package that are served as they are: the console and the manual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, RedirectResponse

from tinsmith_server.errors import NotFound

START = "index.html"
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
SAFETY_HEADERS = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


def files_of(folder: Path) -> Mapping[str, Path]:
    """Return the files that are in the folder now, by their paths below it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """A folder at `path`, such as `/console`.

    Only the files in `found` are served, by their exact names. No other path can name a file. `subject` and
    `not_there` are for the message about a missing file: what the folder is, and why all of it may be missing.
    """

    path: str
    found: Mapping[str, Path]
    policy: str
    subject: str
    not_there: str
    caching: Callable[[str], str] = lambda _name: "no-cache"

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)
        router.add_api_route(self.path, self._with_slash)
        router.add_api_route(f"{self.path}/{{name:path}}", self._file)
        return router

    async def _with_slash(self) -> Response:
        """Redirect to the folder, because the addresses in its pages are relative to it."""
        return RedirectResponse(f"{self.path.removeprefix('/')}/", headers=self._headers("no-cache"))

    async def _file(self, name: str) -> Response:
        name = name or START
        if name not in self.found:
            raise NotFound(self._missing(name))
        media_type = MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream")
        return FileResponse(self.found[name], media_type=media_type, headers=self._headers(self.caching(name)))

    def _headers(self, caching: str) -> dict[str, str]:
        return {**SAFETY_HEADERS, "Content-Security-Policy": self.policy, "Cache-Control": caching}

    def _missing(self, name: str) -> str:
        return f"the {self.subject} has no file {name[:200]!r}" if START in self.found else self.not_there
