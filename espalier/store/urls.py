"""The URL of a store, checked before anything is opened. Knows no library of stores, so that settings can be checked without one."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

SCHEMES = ("s3", "gs", "az", "file")
_EXPECTED = "expected s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///FOLDER"
_NAME = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")


def check_url(url: str) -> str:
    """A store's URL without a slash at its end. Raises ValueError, which does not repeat what may be secret."""
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
        url.encode()
    except ValueError:  # of brackets in the name, and of what is no UTF-8
        raise ValueError(_EXPECTED) from None
    if parts.scheme not in SCHEMES:
        raise ValueError(_EXPECTED)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("expected no keys and no parameters in the URL; keys come from the environment, as AWS_SECRET_ACCESS_KEY")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError("expected file:///FOLDER, with an absolute path")
    if parts.scheme != "file" and not parts.netloc:
        raise ValueError(f"expected {parts.scheme}://NAME/PATH, with the name of the bucket or container")
    if parts.scheme != "file" and not _NAME.fullmatch(parts.netloc):
        raise ValueError(f"expected {parts.scheme}://NAME/PATH, with a name of letters, digits, `.`, `_` and `-`, and no port")
    if any(part in (".", "..") for part in path.split("/")):
        raise ValueError("expected a path without `.` and `..`")
    if "//" in path.strip("/") or not (url + path).isprintable():
        raise ValueError("expected a path without empty parts and control characters")
    return url.rstrip("/")
