"""The console at `/`: one page and its files, served from memory with security and caching headers.

The files are in service/console and are read once. They have no data of the service, so they need no key. Knows files and headers, not what
the page does.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ..entity_tags import matches

FOLDER = Path(__file__).parent.parent / "console"
PAGE, ASSETS = "/", "/console/"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""By the suffix of a file. Files with other suffixes are not served."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
"""Headers of every answer. no-cache: a browser always asks whether its copy is current, so a page that is loaded after an upgrade has only
files of the new release."""
GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))", re.I)
"""In the Accept-Encoding of a client that takes gzip: a weight of 0 refuses it (RFC 9110, 12.4.2)."""


class File(NamedTuple):
    """A file in both encodings. tag: its entity tag, which is weak because both encodings have the same."""

    content: bytes
    gzipped: bytes
    media_type: str
    tag: str


def read_files(folder: Path = FOLDER) -> Mapping[str, File]:
    """The files of the console by URL path. Raises OSError if the page is missing."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.suffix in MEDIA_TYPES}
    return {PAGE: _file(folder / "index.html"), **{ASSETS + name: _file(folder / name) for name in sorted(names - {"index.html"})}}


_cached_files = cache(read_files)  # once in a process


def add_console(app: FastAPI) -> None:
    for path, file in _cached_files().items():
        app.add_route(path, _answer_function(file), include_in_schema=False)


def _file(path: Path) -> File:
    content = path.read_bytes()
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    return File(content, gzip.compress(content, 9, mtime=0), MEDIA_TYPES[path.suffix], tag)


def _answer_function(file: File) -> Callable[[Request], Awaitable[Response]]:

    async def answer(request: Request) -> Response:
        headers = HEADERS | {"ETag": file.tag}
        if matches(request.headers.get("If-None-Match", ""), file.tag.removeprefix("W/")):
            return Response(status_code=304, headers=headers)
        if GZIP.search(request.headers.get("Accept-Encoding", "")):
            return Response(file.gzipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return answer
