"""Empty stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from espalier.store.objects import Objects
from tests.object_stores import BUCKET, ENVIRONMENT, make_bucket, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server."""
    with s3_server() as address:
        yield address


@pytest.fixture
def s3_only(s3: str, monkeypatch: pytest.MonkeyPatch) -> Objects:
    parts = urlsplit(s3)
    make_bucket(str(parts.hostname), int(parts.port or 0))
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": s3}).items():
        monkeypatch.setenv(name, value)
    return Objects(f"s3://{BUCKET}/here")


@pytest.fixture
def files(tmp_path: Path) -> Objects:
    """In a folder."""
    return Objects(f"file://{tmp_path}/store", create=True)


@pytest.fixture(params=["files", "s3_only"])
def store(request: pytest.FixtureRequest) -> Objects:
    found: Objects = request.getfixturevalue(request.param)
    return found
