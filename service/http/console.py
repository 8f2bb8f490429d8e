"""The console at `/`: one page and the files that it names, from memory, each with what a browser needs to be told.

The files lie in service/console and are read once. JavaScript modules are sent as one file (console_modules.py), and lines of comments stay
on the disk. The files hold no data, so no key is needed. Knows files and headers, not what the page does.
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
from ..http.console_modules import joined

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
MODULES = "app.js"
"""The module that runs first, and the file of all of them."""
STYLES = "style.css"
"""The first of the style sheets, and the file of all of them."""
STYLE_COMMENT = re.compile(rb"^ */\*.*?\*/\n", re.M | re.S)
"""Whole lines of comments in a style sheet."""


class File(NamedTuple):
    """A file as it is answered. tag: its entity tag, one for both encodings and therefore weak."""

    content: bytes
    zipped: bytes
    media_type: str
    tag: str


def read_files(folder: Path = FOLDER) -> Mapping[str, File]:
    """The files of the console by their path on the service.

    Raises OSError where there is no page, ValueError for modules that cannot be joined.
    """
    files = {PAGE: _file(folder / "index.html", (folder / "index.html").read_bytes())}
    sheets = sorted(folder.rglob("*.css"), key=lambda path: (path.name != STYLES, path))
    styles = b"".join(STYLE_COMMENT.sub(b"", path.read_bytes()) for path in sheets)
    files[ASSETS + STYLES] = _file(Path(STYLES), styles)
    modules: dict[str, str] = {}
    vendored: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.suffix not in MEDIA_TYPES or path.suffix == ".css" or name == "index.html":
            continue
        if path.suffix == ".js" and path.parent.name != VENDORED:
            modules[name] = path.read_text(encoding="utf-8")
            continue
        if path.suffix == ".js":
            vendored.append(name)
        files[ASSETS + name] = _file(path, path.read_bytes())
    if modules:
        files[ASSETS + MODULES] = _file(Path(MODULES), joined(modules, vendored, MODULES).encode())
    return files


def add_console(app: FastAPI) -> None:
    for path, file in _files().items():
        app.add_route(path, _answering(file), include_in_schema=False)


@cache
def _files() -> Mapping[str, File]:
    """The console's files, read and compressed once a process."""
    return read_files()


def _file(path: Path, content: bytes) -> File:
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
    return File(content, gzip.compress(content, 9, mtime=0), MEDIA_TYPES[path.suffix], tag)


def _answering(file: File) -> Callable[[Request], Awaitable[Response]]:

    async def answer(request: Request) -> Response:
        headers = HEADERS | {"ETag": file.tag}
        if matches(request.headers.get("If-None-Match", ""), file.tag.removeprefix("W/")):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return Response(file.zipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return answer
