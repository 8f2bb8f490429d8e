"""The console at `/`: one page and its files, served from memory with security and caching headers.

The files are in service/console and are read once. JavaScript modules are sent as one file (console_modules.py), without lines of comments.
The files have no data of the service, so they need no key. Knows files and headers, not what the page does.
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
from ..http.console_modules import join_modules

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
"""Headers of every answer. no-cache: a browser always asks whether its copy is current, so an upgrade never mixes two releases."""

VENDORED = "vendor"
"""The folder of third-party files, which are sent unchanged."""
MODULES = "app.js"
"""The module that runs first. The file with all modules has the same name."""
STYLE_COMMENT = re.compile(rb"^ */\*.*?\*/\n", re.M | re.S)
"""Whole lines of comments in a style sheet."""
WEIGHT_0 = re.compile(r"\s*q=0(\.0*)?\s*")
"""The weight of a coding that the client does not take."""


class File(NamedTuple):
    """A file in both encodings. tag: its entity tag, which is weak because both encodings have the same."""

    content: bytes
    gzipped: bytes
    media_type: str
    tag: str


def read_files(folder: Path = FOLDER) -> Mapping[str, File]:
    """The files of the console by URL path.

    Raises OSError if the page is missing, ValueError if modules cannot be joined.
    """
    files = {PAGE: _file(folder / "index.html", (folder / "index.html").read_bytes())}
    modules: dict[str, str] = {}
    vendored: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.suffix not in MEDIA_TYPES or name == "index.html":
            continue
        if path.suffix == ".js" and path.parent.name != VENDORED:
            modules[name] = path.read_text(encoding="utf-8")
            continue
        if path.suffix == ".js":
            vendored.append(name)
        content = path.read_bytes()
        files[ASSETS + name] = _file(path, STYLE_COMMENT.sub(b"", content) if path.suffix == ".css" else content)
    if modules:
        files[ASSETS + MODULES] = _file(Path(MODULES), join_modules(modules, vendored, MODULES).encode())
    return files


def add_console(app: FastAPI) -> None:
    for path, file in _files().items():
        app.add_route(path, _answer_function(file), include_in_schema=False)


@cache
def _files() -> Mapping[str, File]:
    """The console's files, read and compressed once in a process."""
    return read_files()


def _file(path: Path, content: bytes) -> File:
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    return File(content, gzip.compress(content, 9, mtime=0), MEDIA_TYPES[path.suffix], tag)


def _takes_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header names gzip with a weight above 0 (RFC 9110, section 12.5.3)."""
    codings = [coding.partition(";") for coding in accept_encoding.lower().split(",")]
    return any(name.strip() == "gzip" and not WEIGHT_0.fullmatch(weight) for name, _, weight in codings)


def _answer_function(file: File) -> Callable[[Request], Awaitable[Response]]:

    async def answer(request: Request) -> Response:
        headers = HEADERS | {"ETag": file.tag}
        if matches(request.headers.get("If-None-Match", ""), file.tag.removeprefix("W/")):
            return Response(status_code=304, headers=headers)
        if _takes_gzip(request.headers.get("Accept-Encoding", "")):
            return Response(file.gzipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return answer
