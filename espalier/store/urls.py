"""The URL of a store, checked before anything is opened. Knows no library of stores, so that settings can be checked without one."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

SCHEMES = ("s3", "gs", "az", "file")


def check_url(url: str) -> str:
    """A store's URL without a slash at its end. Raises ValueError, which does not repeat what may be secret."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError("expected s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///FOLDER")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("expected no keys and no parameters in the URL; keys come from the environment, as AWS_SECRET_ACCESS_KEY")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ValueError("expected file:///FOLDER, with an absolute path")
    if parts.scheme != "file" and not parts.netloc:
        raise ValueError(f"expected {parts.scheme}://NAME/PATH, with the name of the bucket or container")
    if any(part in (".", "..") for part in unquote(parts.path).split("/")):
        raise ValueError("expected a path without `.` and `..`")
    return url.rstrip("/")
