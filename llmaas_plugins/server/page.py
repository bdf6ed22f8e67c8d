"""The page at ``/``: static files, which read the service's own routes from a browser.

The files contain nothing about the service, so they need no key. The page asks for one where the
service has keys, and sees what that key opens.
"""

# No `from __future__ import annotations`: FastAPI reads the types of nested functions.

import hashlib
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

__all__ = ["make_page_router"]

_INDEX = "index.html"
_KINDS = {".html": "text/html", ".css": "text/css", ".mjs": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def make_page_router() -> APIRouter:
    """Return the routes of the page's files, which are read once."""
    router = APIRouter(include_in_schema=False)
    found = {
        file.name: file.read_bytes() for file in files(__package__).joinpath("page_files").iterdir()
    }

    @router.api_route("/", methods=["GET", "HEAD"])
    def index(request: Request) -> Response:
        return _answer(request, _INDEX, found[_INDEX])

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    def file(request: Request, name: str) -> Response:
        if name not in found:
            raise HTTPException(404, f"The page has no file {name!r}.")
        return _answer(request, name, found[name])

    return router


def _answer(request: Request, name: str, content: bytes) -> Response:
    """Return a file, or 304 if the browser has it."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}
    kept = request.headers.get("If-None-Match", "")
    if kept == "*" or tag in (one.strip().removeprefix("W/") for one in kept.split(",")):
        return Response(status_code=304, headers=headers)
    kind = _KINDS[f".{name.rpartition('.')[2]}"]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)
