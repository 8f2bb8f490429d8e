"""Several workers whose models come from an S3 server. Real processes, with a real engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from espalier.store.objects import Objects
from espalier.store.publishing import publish
from tests.object_stores import BUCKET, ENVIRONMENT, s3_server
from tests.service.models.registry import add_version
from tests.service.processes import Service, service
from tests.service.running import small_model
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Where training has put version 1 of `books`."""
    small_model(tmp_path / "trained")
    return tmp_path / "trained"


def serves(running: Service, version: int) -> bool:
    """Whether requests of several connections, which go to both workers, are answered by this version; one may be late."""
    answers = [running.request("POST", "/retrieve", {"queries": [{"history": ["item-3"]}], "timeout_ms": 10_000}) for _ in range(8)]
    return all(status == 200 and answer["version"] == version for status, answer in answers)


def test_workers_serve_what_is_published_and_go_on_without_the_store(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as address:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        store = Objects(f"s3://{BUCKET}/search")
        publish(store, [models / "books" / "1"])
        size = sum(file.stat().st_size for file in (models / "books" / "1").iterdir() if file.name != "manifest.json")
        (tmp_path / "cache").mkdir()
        settings = {"ESPALIER_STORE": store.url, "ESPALIER_STORE_POLL_S": "0.2", "ESPALIER_RETRIEVE_KEYS": ""}
        with service(tmp_path / "cache", 2, **settings) as running:
            until(lambda: serves(running, 1), within_s=60)
            assert running.metric("espalier_store_bytes_total") == size  # one of them brought it
            publish(store, [add_version(models, 2)])
            until(lambda: serves(running, 2), within_s=60)
            for pid in running.workers():  # one of them follows the store
                os.kill(pid, signal.SIGKILL)
                until(lambda: len(running.workers()) == 2 and running.request("GET", "/readyz")[0] == 200, within_s=60)
            publish(store, [add_version(models, 3)])
            until(lambda: serves(running, 3), within_s=60)
            status, answer = running.request("POST", "/models/books/default", {"version": 1})
            assert (status, "set-default" in answer["detail"]) == (409, True)
            assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in "".join(running.log)
    with service(tmp_path / "cache", 2, **settings) as running:  # the server is gone
        until(lambda: serves(running, 3), within_s=60)
        assert running.request("GET", "/readyz")[0] == 200
        until(lambda: running.metric('espalier_store_failures_total{reason="unreachable"}') > 0)
