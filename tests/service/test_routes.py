"""Addresses: those that are not there, and the pages that bring other files. tests/service/test_contract.py has what all routes share."""

from __future__ import annotations

import http.client
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.processes import service
from tests.service.running import Running, counted, problem, run
from tests.service.test_contract import STATIC


@pytest.fixture(scope="module")
def open_service(models: Path) -> Iterator[Running]:
    with run(models, admin_keys=("admin-key-00000001",)) as running:
        yield running


def test_head_of_readyz_says_when_the_service_is_not_ready(running: Running) -> None:
    running.app.state.service.registry.leaving = True
    answer = running.client.request("HEAD", "/readyz")
    assert (answer.status_code, answer.content) == (503, b"")


@pytest.mark.slow
def test_head_leaves_a_connection_in_order(tmp_path: Path, models: Path) -> None:
    """Over a socket a body after HEAD would be taken for the next answer."""
    shutil.copytree(models / "books", tmp_path / "models" / "books")
    with service(tmp_path / "models", 1) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        for path in ("/livez", "/metrics", "/openapi.json", STATIC, "/nothing"):
            statuses = []
            for method in ("HEAD", "GET"):
                connection.request(method, path)
                answer = connection.getresponse()
                body = answer.read()
                statuses.append(answer.status)
                assert bool(body) == (method == "GET"), path
            assert statuses[0] == statuses[1]
        connection.close()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_an_address_that_is_not_there_leads_nowhere(open_service: Running, method: str) -> None:
    """Least of all to where the Host header points."""
    slashes = ["/models/", "/livez/", "/retrieve/", "/docs/", "/models/books/", "/models/books/tree/", "//evil.example/models/"]
    others = ["/models/books/tree/0/1", "/console", "/console/", "/console/nothing.js", "/nothing"]
    for path in (*slashes, *others):
        host = {"Host": "evil.example", "X-Forwarded-Host": "evil.example"}
        answer = open_service.client.request(method, f"http://test{path}", headers=host)
        assert (answer.status_code, "location" in answer.headers, "evil" in answer.text) == (404, False, False), path
        assert method == "HEAD" or problem(answer)["status"] == 404


def test_what_is_not_there_leaves_no_trace(open_service: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a line nor a series nor a byte of an unread body for each of a flood of addresses."""
    caplog.set_level(logging.DEBUG, "service")
    client, before = open_service.client, counted(open_service).keys()
    for i in range(20):
        assert client.get(f"/nothing/{i}").status_code == 404
        assert client.request("PATCH", f"/models/model-{i}/removed/{i}").status_code == 405
        assert client.post(f"/models/model-{i}", content=b"x" * 10).status_code == 405
        assert client.get(f"/models/model-{i}").status_code == 404
        assert client.get(f"/models/model-{i}/items").status_code == 404
    assert counted(open_service).keys() == before
    assert [record.name for record in caplog.records if record.name.startswith("service")] == []


def test_the_documentation_page_brings_all_that_it_needs(open_service: Running) -> None:
    """From the service itself, where no CDN can be reached; and it runs its own scripts alone, in no frame."""
    page = open_service.client.get("/docs")
    assert "https://" not in page.text
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) >= 3
    for address in (*named, "/openapi.json"):
        assert address.startswith("/"), address
        answer = open_service.client.get(address)
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
