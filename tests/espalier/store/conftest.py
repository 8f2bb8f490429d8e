"""Stores for tests: folders and an S3 server; and versions of a small bundle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from espalier.store.objects import Objects
from tests.object_stores import BUCKET, ENVIRONMENT, make_bucket, s3_server, two_versions


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """An empty store."""
    if request.param == "file":
        return Objects(f"file://{tmp_path}/store", create=True)
    return s3_store(request.getfixturevalue("s3"), monkeypatch)


@pytest.fixture
def s3_only(s3: str, monkeypatch: pytest.MonkeyPatch) -> Objects:
    """An empty S3 store."""
    return s3_store(s3, monkeypatch)


def s3_store(address: str, monkeypatch: pytest.MonkeyPatch) -> Objects:
    parts = urlsplit(address)
    make_bucket(str(parts.hostname), int(parts.port or 0))
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
        monkeypatch.setenv(name, value)
    return Objects(f"s3://{BUCKET}/here")


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return two_versions(tmp_path / "made")


def in_threads(calls: Sequence[Callable[[], object]]) -> None:
    """All at once."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        start.wait()
        call()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
