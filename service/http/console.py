"""The console at `/`: one page and the files that it names, from memory, each with what a browser needs to be told.

The files lie in service/console and are read once. Lines of comments stay there: a sixth of what would be sent. They hold no data, so no
key is needed. Knows files and headers, not what the page does.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from service.entity_tags import matches

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
"""Of every answer. no-cache: a browser asks each time whether its copy is the current one, so an upgrade never mixes two releases."""

VENDORED = "vendor"
"""The folder of files that are sent as their makers published them."""
COMMENTS = {".js": re.compile(rb"^ *//.*\n", re.M), ".css": re.compile(rb"^ */\*.*?\*/\n", re.M | re.S)}
"""Lines that hold nothing but comments, by the suffix of a file. So no line of a text in our JavaScript may begin with `//`."""


class File(NamedTuple):
    """A file as it is answered. tag: its entity tag, one for both encodings and therefore weak."""

    content: bytes
    zipped: bytes
    media_type: str
    tag: str


def read_files(folder: Path = FOLDER) -> Mapping[str, File]:
    """The files of the console by their path on the service. Raises OSError where there is no page."""
    files = {PAGE: _read(folder / "index.html")}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix in MEDIA_TYPES and name != "index.html":
            files[ASSETS + name] = _read(path)
    return files


def add_console(app: FastAPI, files: Mapping[str, File]) -> None:
    """Put a route for each file on the application."""
    for path, file in files.items():
        app.add_route(path, _answering(file), include_in_schema=False)


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header allows gzip (RFC 9110, 12.5.3)."""
    allowed = {}
    for part in header.lower().split(","):
        coding, _, parameter = part.partition(";")
        weight = parameter.strip().removeprefix("q=")
        allowed[coding.strip()] = not weight or weight.strip("0.") != ""
    return allowed.get("gzip", allowed.get("*", False))


def _read(path: Path) -> File:
    content = path.read_bytes()
    if path.suffix in COMMENTS and path.parent.name != VENDORED:
        content = COMMENTS[path.suffix].sub(b"", content)
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    return File(content, gzip.compress(content, 9, mtime=0), MEDIA_TYPES[path.suffix], tag)


def _answering(file: File) -> Callable[[Request], Awaitable[Response]]:
    """The function of a file's route."""

    async def answer(request: Request) -> Response:
        headers = HEADERS | {"ETag": file.tag}
        if matches(request.headers.get("If-None-Match", ""), file.tag.removeprefix("W/")):
            return Response(status_code=304, headers=headers)
        if accepts_gzip(request.headers.get("Accept-Encoding", "")):
            return Response(file.zipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return answer
