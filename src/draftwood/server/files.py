"""The page's files, out of the package. Nothing else can be reached: names are looked up, never opened as they come."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".woff2": "font/woff2",
}
HEADERS = {
    "Cache-Control": "no-cache",  # ask every time whether it is still the same
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_file(name: str, request: Request, folder: Path = FOLDER) -> Response:
    """One of the page's files, by its name below the folder."""
    known = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in KINDS}
    if name not in known:
        raise HTTPException(404)
    content = known[name].read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=KINDS[known[name].suffix])
