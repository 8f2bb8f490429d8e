"""Checks the URL of a store. Imports no library of stores, so that settings can be checked without one."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

SCHEMES = ("s3", "gs", "az", "file")
_EXPECTED = "expected s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///FOLDER"
_NAME = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")


def check_url(url: str) -> str:
    """A store's URL without a slash at its end. Raises ValueError, whose message has no part of the URL: it may be secret."""
    try:
        split_url = urlsplit(url)
        path = unquote(split_url.path, errors="strict")
        url.encode()
    except ValueError:  # brackets in the name, or bytes that are not UTF-8
        raise ValueError(_EXPECTED) from None
    if split_url.scheme not in SCHEMES:
        raise ValueError(_EXPECTED)
    if split_url.username is not None or split_url.password is not None or split_url.query or split_url.fragment:
        raise ValueError("expected no keys and no parameters in the URL; keys come from the environment, as AWS_SECRET_ACCESS_KEY")
    if split_url.scheme == "file" and (split_url.netloc or not split_url.path.strip("/")):
        raise ValueError("expected file:///FOLDER, with an absolute path")
    if split_url.scheme != "file" and not split_url.netloc:
        raise ValueError(f"expected {split_url.scheme}://NAME/PATH, with the name of the bucket or container")
    if split_url.scheme != "file" and not _NAME.fullmatch(split_url.netloc):
        raise ValueError(f"expected {split_url.scheme}://NAME/PATH, with a name of letters, digits, `.`, `_` and `-`, and no port")
    if any(name in (".", "..") for name in path.split("/")):
        raise ValueError("expected a path without `.` and `..`")
    if "//" in path.strip("/") or not (url + path).isprintable():
        raise ValueError("expected a path without empty parts and control characters")
    return url.rstrip("/")
