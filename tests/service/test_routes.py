"""What HTTP expects of every route: HEAD, Allow, addresses that are not there."""

from __future__ import annotations

import http.client
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from tests.service.processes import service
from tests.service.running import Running, problem, run

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
STATIC = "/static-offline-docs/swagger-ui.css"


@pytest.fixture(scope="module")
def open_service(models: Path) -> Iterator[Running]:
    with run(models, admin_keys=("admin-key-00000001",)) as running:
        yield running


def routes(running: Running) -> dict[str, set[str]]:
    """Path with `books` and an item in it → the methods that all its routes take together."""
    found: dict[str, set[str]] = {STATIC: {"GET", "HEAD"}}
    for route in running.app.routes:
        if isinstance(route, APIRoute | Route):
            path = route.path_format.format(name="books", id="item-1", node=0)
            methods = set(route.methods or ())
            found.setdefault(path, set()).update(methods | ({"HEAD"} if "GET" in methods else set()))
    assert len(found) >= 14
    return found


def test_every_path_names_all_methods_that_it_takes(open_service: Running) -> None:
    checked = 0
    for path, methods in routes(open_service).items():
        for method in METHODS:
            answer = open_service.client.request(method, path)
            if method in methods:
                assert answer.status_code != 405, f"{method} {path}"
            elif answer.status_code == 405:
                assert answer.headers["allow"] == ", ".join(sorted(methods)), f"{method} {path}"
                assert method == "HEAD" or problem(answer)["status"] == 405
                checked += 1
            else:
                assert (path, answer.status_code) in {(f"/models/books/{name}", 401) for name in ("load", "unload", "default", "removed")}
    assert checked >= 80


def test_head_is_answered_as_get_without_the_body(open_service: Running) -> None:
    paths = [path for path, methods in routes(open_service).items() if "GET" in methods] + ["/nothing", "/models/films"]
    assert {"/livez", "/readyz", "/metrics", "/models", "/docs", "/openapi.json", "/"} <= set(paths)
    for path in paths:
        get, head = open_service.client.get(path), open_service.client.request("HEAD", path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert get.content, path
        names = {"content-type", "content-length", "etag", "www-authenticate"} - ({"content-length"} if path == "/metrics" else set())
        assert {n: head.headers.get(n) for n in names} == {n: get.headers.get(n) for n in names}, path


def test_head_of_readyz_says_when_the_service_is_not_ready(models: Path) -> None:
    with run(models) as running:
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


@pytest.mark.parametrize(
    "path",
    [
        "/models/",
        "/livez/",
        "/retrieve/",
        "/docs/",
        "/models/books/",
        "//evil.example/models/",
        "/console",
        "/console/",
        "/console/nothing.js",
        "/nothing",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_an_address_that_is_not_there_leads_nowhere(open_service: Running, method: str, path: str) -> None:
    """Least of all to where the Host header points."""
    answer = open_service.client.request(method, f"http://test{path}", headers={"Host": "evil.example", "X-Forwarded-Host": "evil.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers
    assert "evil" not in answer.text
    assert method == "HEAD" or problem(answer)["status"] == 404


def test_what_is_not_there_leaves_no_trace(open_service: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a line nor a series nor a byte of an unread body for each of a flood of addresses."""
    caplog.set_level(logging.DEBUG, "service")

    def series() -> set[str]:
        return set(re.findall(r"^(\S+) ", open_service.client.get("/metrics").text, re.MULTILINE))

    before = series()
    for i in range(100):
        assert open_service.client.get(f"/nothing/{i}").status_code == 404
        assert open_service.client.request("PATCH", f"/models/model-{i}/removed/{i}").status_code == 405
        assert open_service.client.post(f"/models/model-{i}", content=b"x" * 10).status_code == 405
        assert open_service.client.get(f"/models/model-{i}").status_code == 404
        assert open_service.client.get(f"/models/model-{i}/items").status_code == 404
    assert series() == before
    assert [record.name for record in caplog.records if record.name.startswith("service")] == []


def test_the_documentation_page_brings_all_that_it_needs(open_service: Running) -> None:
    page = open_service.client.get("/docs").text
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(named) >= 3
    for address in (*named, "/openapi.json"):
        assert address.startswith("/"), address
        answer = open_service.client.get(address)
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")


def test_the_documentation_page_runs_its_own_scripts_alone_and_stands_in_no_frame(open_service: Running) -> None:
    answer = open_service.client.get("/docs")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
