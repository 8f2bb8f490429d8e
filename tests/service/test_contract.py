"""What holds for every route of docs/openapi.json: keys, names, parameters, bodies, HEAD and Allow; and addresses that are none."""

from __future__ import annotations

import gzip
import inspect
import json
import logging
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from tests import ROOT
from tests.service.fake_catalogue import FakeCatalogue, FakeCatalogues
from tests.service.running import Json, Running, bearer, counted, problem, run

KEYS = {"retrieve": "retrieve-key-0001", "write": "write-key-00000001", "admin": "admin-key-00000001", "internal": "internal-key-0001"}
ACCESS: dict[str, Sequence[str]] = {
    "": ["get /livez", "get /readyz", "get /metrics"],
    "retrieve": [
        *("post /retrieve", "post /retrieve/stream", "get /models", "get /models/{name}", "get /models/{name}/items"),
        *("get /models/{name}/facets", "get /models/{name}/tree", "get /models/{name}/tree/{node}"),
    ],
    "private": ["get /models/{name}/heldout", "get /models/{name}/health", "post /models/{name}/frontier"],
    "write": [f"{method} /models/{{name}}/items/{{id}}" for method in ("put", "get", "delete")] + ["post /models/{name}/items"],
    "admin": [
        *("get /models/{name}/samples", "get /models/{name}/changes", "put /models/{name}/removed", "get /models/{name}/removed"),
        *("post /models/{name}/load", "post /models/{name}/unload", "post /models/{name}/default"),
        *(f"{method} /models/{{name}}/candidate" for method in ("put", "delete", "get")),
        *("put /models/{name}/removed/{id}", "delete /models/{name}/removed/{id}"),
    ],
    "internal": ["post /internal/search", "get /internal/shards"],
}
"""What a route needs; a `private` one an admin key where there are any keys, and else none."""
BODIES: dict[str, Json] = {
    "post /retrieve": {"model": "books", "queries": [{"history": []}]},
    "post /models/{name}/frontier": {"beam_size": [4]},
    "put /models/{name}/items/{id}": {"events": [["item-1"]]},
    "post /models/{name}/load": {"version": 2},
    "post /models/{name}/unload": {"version": 1},
    "post /models/{name}/default": {"version": 2},
    "put /models/{name}/candidate": {"version": 9, "share": 0.1},
    "put /models/{name}/removed": {"ids": []},
}
MISSING = {
    "post /retrieve": "queries",
    "post /models/{name}/frontier": "beam_size",
    "put /models/{name}/removed": "ids",
    **{name: "version" for name, body in BODIES.items() if "version" in body},
}
"""The field that an empty object lacks."""
NEEDED = {"get /models/{name}/facets": {"column": "title"}, "get /models/{name}/tree": {"item": "item-1"}}
STATUSES = {
    "post /models/{name}/unload": 404,  # version 1 is not loaded
    "put /models/{name}/candidate": 404,  # there is no version 9
    "put /models/{name}/items/{id}": 201,
    "post /internal/search": 422,
}
"""What is answered to whoever is let in, unless it is 200."""
MAX_BODY = 2000


@dataclass(frozen=True)
class Operation:
    """A method of a path, and what the document says of it."""

    method: str
    path: str
    said: Json

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def takes(self) -> str | None:
        """The content type of its body."""
        return next(iter(self.said["requestBody"]["content"])) if "requestBody" in self.said else None

    @property
    def access(self) -> str:
        return next(access for access, names in ACCESS.items() if self.name in names)

    def ask(self, running: Running, key: str | None = KEYS["admin"], model: str = "books", **rest: Any) -> httpx.Response:
        """A request that is right, but for what is given. rest: of httpx; headers are added."""
        headers = ({} if self.takes is None else {"Content-Type": self.takes}) | ({} if key is None else bearer(key))
        body = BODIES.get(self.name)
        rest["headers"] = headers | rest.get("headers", {})
        rest.setdefault("content", b"" if body is None else json.dumps(body).encode())
        rest["params"] = NEEDED.get(self.name, {}) | rest.get("params", {})
        return running.client.request(self.method.upper(), self.path.format(name=model, id="item-1", node=0), **rest)


PATHS = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
OPERATIONS = [Operation(method, path, said) for path, methods in PATHS.items() for method, said in methods.items()]
WITH_BODY = [one for one in OPERATIONS if one.takes is not None]
OF_A_MODEL = [one for one in OPERATIONS if "{name}" in one.path]


def every(operations: Sequence[Operation]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", operations, ids=[one.name for one in operations])


@pytest.fixture(scope="module")
def models(two_versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with `books` in the versions 1 and 2."""
    return Path(shutil.copytree(two_versions, tmp_path_factory.mktemp("contract"), dirs_exist_ok=True))


def catalogues() -> FakeCatalogues:
    return FakeCatalogues(books=FakeCatalogue([f"item-{i}" for i in range(8)]))


@pytest.fixture(scope="module")
def guarded(models: Path) -> Iterator[Running]:
    """A service with keys of all roles."""
    keys: dict[str, Any] = {f"{role}_keys": (key,) for role, key in KEYS.items()}
    with run(models, catalogues=catalogues(), max_body_bytes=MAX_BODY, **keys) as running:
        yield running


# -- keys -----------------------------------------------------------------------------------------------------------------


@every(OPERATIONS)
def test_a_route_asks_for_its_key(guarded: Running, operation: Operation) -> None:
    right = STATUSES.get(operation.name, 200)
    role = "admin" if operation.access == "private" else operation.access
    for key in (None, "no-such-key-at-all", *KEYS.values()):
        answer = operation.ask(guarded, key)
        known = [own for own, value in KEYS.items() if value == key]
        expected = right if not role or {role, "admin"} & {*known} else 403 if known else 401
        assert answer.status_code in ({200, 201} if expected == 201 else {expected}), key
        if answer.status_code >= 400:
            assert problem(answer)["status"] == answer.status_code
        if answer.status_code == 401:
            assert answer.headers["www-authenticate"] == "Bearer"


@every([one for one in OPERATIONS if one.access])
def test_two_keys_are_none(guarded: Running, operation: Operation) -> None:
    """Who checks requests before the service may have looked at the other one."""
    for second in (KEYS["admin"], "no-such-key-at-all"):
        for keys in ((KEYS["admin"], second), (second, KEYS["admin"])):
            headers = [("Authorization", f"Bearer {key}") for key in keys] + [("Content-Type", str(operation.takes))]
            path = operation.path.format(name="books", id="item-1", node=0)
            answer = guarded.client.request(operation.method.upper(), path, params=NEEDED.get(operation.name), headers=headers)
            assert (answer.status_code, "one header" in answer.json()["detail"]) == (401, True)


@pytest.mark.parametrize(
    ("roles", "without_key", "off"),
    [
        ([], {"retrieve": 200, "private": 200, "internal": 200, "write": 403, "admin": 403}, ["admin", "write"]),
        (["retrieve"], {"retrieve": 401, "private": 403, "internal": 403, "write": 403, "admin": 403}, ["admin", "write", "internal"]),
        (["write"], {"retrieve": 200, "private": 403, "internal": 403, "write": 401, "admin": 403}, ["admin", "internal"]),
        (["admin"], {"retrieve": 200, "private": 401, "internal": 403, "write": 403, "admin": 401}, ["write", "internal"]),
        (["internal"], {"retrieve": 200, "private": 403, "internal": 401, "write": 403, "admin": 403}, ["admin", "write"]),
    ],
)
def test_a_route_whose_role_has_no_keys_is_open_or_off(models: Path, roles: list[str], without_key: Json, off: list[str]) -> None:
    """Off for every key, and the answer names the setting."""
    keys: dict[str, Any] = {f"{role}_keys": (KEYS[role],) for role in roles}
    with run(models, catalogues=catalogues(), **keys) as running:
        if "retrieve" not in roles:
            assert running.client.get("/models").json()["keys"] == roles
        for operation in OPERATIONS:
            answer = operation.ask(running, None)
            expected = without_key.get(operation.access, 200)
            assert answer.status_code == (STATUSES.get(operation.name, 200) if expected == 200 else expected), operation.name
            role = "admin" if operation.access == "private" else operation.access
            if expected == 403:
                assert role in off
                assert f"ESPALIER_{role.upper()}_KEYS" in problem(answer)["detail"]
                assert operation.ask(running, KEYS["admin"]).status_code == 403


# -- names and parameters -------------------------------------------------------------------------------------------------


@every(OF_A_MODEL)
@pytest.mark.parametrize("name", ["nobody", "BOOKS", "a%2Fb", "books%2f..%2fbooks", "%2e%2e", ".hidden", "x" * 200])
def test_another_model_is_not_there(guarded: Running, operation: Operation, name: str) -> None:
    answer = operation.ask(guarded, model=name)
    assert answer.status_code in ({404} if name == "nobody" else {404, 405})
    assert problem(answer)["status"] == answer.status_code


@every(OF_A_MODEL)
def test_another_model_is_not_there_whatever_else_is_wrong(guarded: Running, operation: Operation) -> None:
    """Its key is checked before, all else after."""
    params = {"limit": 0, "column": "x" * 999, "version": "x"}
    wrong: list[Json] = [{"content": b"{"}, {"headers": {"Content-Type": "text/plain"}}, {"params": params}]
    for rest in wrong:
        assert operation.ask(guarded, model="nobody", **rest).status_code == 404
        assert operation.ask(guarded, None, model="nobody", **rest).status_code == 401
    if "{id}" in operation.path:
        path = operation.path.format(name="nobody", id="%FF")
        assert guarded.client.request(operation.method.upper(), path, headers=bearer(KEYS["admin"])).status_code == 404


PARAMETERS = [(one, parameter) for one in OPERATIONS for parameter in one.said.get("parameters", []) if parameter["in"] == "query"]
every_parameter = pytest.mark.parametrize(
    ("operation", "parameter"), PARAMETERS, ids=[f"{one.name} {parameter['name']}" for one, parameter in PARAMETERS]
)


def wrong_values(schema: Json) -> list[str]:
    """On both sides of what the schema says of a parameter, and of another type."""
    schema = schema.get("anyOf", [schema])[0]
    if schema["type"] == "integer":
        return ["x", "1.5", str(schema["minimum"] - 1), str(schema["maximum"] + 1), "9" * 40]
    if schema["type"] == "boolean":
        return ["perhaps"]
    short = [""] * ("minLength" in schema)
    return short + (["x" * (schema["maxLength"] + 1)] if "maxLength" in schema else ["{", "[]", "null", "[" * 20_000])


@every_parameter
def test_a_wrong_value_of_a_parameter_is_named(guarded: Running, operation: Operation, parameter: Json) -> None:
    for value in wrong_values(parameter["schema"]):
        refused = problem(operation.ask(guarded, params={parameter["name"]: value}))
        assert (refused["status"], [error["field"] for error in refused["errors"]]) == (422, [parameter["name"]]), value
    if parameter["required"]:
        path = operation.path.format(name="books")
        refused = problem(guarded.client.request(operation.method.upper(), path, headers=bearer(KEYS["admin"])))
        assert (refused["status"], refused["errors"][0]["field"]) == (422, parameter["name"])
        assert refused["detail"] == f"{parameter['name']} is missing; expected ?{parameter['name']}=… in the address"


@every_parameter
def test_a_parameter_that_a_route_lacks_or_that_comes_twice_is_refused(guarded: Running, operation: Operation, parameter: Json) -> None:
    name, value = parameter["name"], NEEDED.get(operation.name, {}).get(parameter["name"], "1")
    names = [one["name"] for one in operation.said["parameters"] if one["in"] == "query"]
    refused = problem(operation.ask(guarded, params={f"{name}s": value}))["errors"]
    assert refused == [{"field": f"{name}s", "value": f'"{value}"', "expected": f"only the parameters {', '.join(names)}"}]
    refused = problem(operation.ask(guarded, params={name: [value, value]}))["errors"]
    assert refused == [{"field": name, "value": f'["{value}", "{value}"]', "expected": "one value"}]
    assert operation.ask(guarded, None, params={f"{name}s": value}).status_code == 401


@every_parameter
def test_the_least_and_the_most_of_a_parameter_are_taken(guarded: Running, operation: Operation, parameter: Json) -> None:
    match parameter["name"]:
        case "limit":
            for limit in (parameter["schema"]["minimum"], parameter["schema"]["maximum"]):
                assert operation.ask(guarded, params={"limit": limit}).status_code == 200
        case "version":
            statuses = [operation.ask(guarded, params={"version": version}).status_code for version in (1, 2, (1 << 63) - 1)]
            assert statuses == ([200] * 3 if operation.path.endswith("samples") else [404, 200, 404])
        case "prefix":
            assert operation.ask(guarded, params={"prefix": "x" * 200}).status_code == 200


# -- bodies ---------------------------------------------------------------------------------------------------------------


@every([*WITH_BODY, *(one for one in OPERATIONS if one.name == "get /models/{name}/items/{id}")])
def test_the_address_of_a_body_or_an_item_takes_no_parameters(guarded: Running, operation: Operation) -> None:
    refused = problem(operation.ask(guarded, params={"m": "5"}))
    assert (refused["status"], refused["errors"]) == (422, [{"field": "m", "value": '"5"', "expected": "no parameters in the address"}])


@every(WITH_BODY)
def test_a_body_of_another_type_or_encoding_is_415(guarded: Running, operation: Operation) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = operation.ask(guarded, headers={"Content-Type": content_type})
        assert answer.status_code == problem(answer)["status"] == 415
    content = {"Content-Encoding": ("gzip", "br", "zstd", "identity, gzip"), "Transfer-Encoding": ("gzip, chunked",)}
    for header, encoding in [(header, encoding) for header, encodings in content.items() for encoding in encodings]:
        answer = operation.ask(guarded, content=gzip.compress(b"{}"), headers={header: encoding})
        assert (answer.status_code, encoding in problem(answer)["detail"]) == (415, True)
        assert answer.headers["accept-encoding"] == "identity"
    plain = operation.ask(guarded, headers={"Content-Encoding": "Identity"})
    assert plain.status_code in (200, 201, STATUSES.get(operation.name))


@every([one for one in WITH_BODY if one.takes == "application/json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"1", b'{"x": ["\xff"]}', b'{"x": "\\ud800"}', b"[" * 1500])
def test_a_body_that_is_no_request_is_422(guarded: Running, operation: Operation, content: bytes) -> None:
    refused = operation.ask(guarded, content=content, headers={"Content-Type": "application/json; charset=utf-8"})
    assert refused.status_code == problem(refused)["status"] == 422
    assert problem(refused)["errors"]
    assert operation.ask(guarded, None, content=content).status_code == 401  # before the body is looked at


@every([one for one in WITH_BODY if one.takes == "application/json"])
def test_what_is_missing_in_a_body_is_said_to_be_missing(guarded: Running, operation: Operation) -> None:
    """And the body itself."""
    for content, field in ((b"", "body"), (b"{}", MISSING.get(operation.name))):
        if field is None:
            continue
        refused = problem(operation.ask(guarded, content=content))
        assert (refused["status"], [(error["field"], "value" in error) for error in refused["errors"]]) == (422, [(field, False)])
        assert refused["detail"].startswith(f"{field} is missing; expected {refused['errors'][0]['expected']}")


@every([one for one in WITH_BODY if one.takes == "application/json"])
def test_a_body_over_the_limit_is_413(guarded: Running, operation: Operation) -> None:
    body = json.dumps(BODIES[operation.name]).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield body
        yield b" " * (MAX_BODY + 1 - len(body))

    for content in (body + b" " * (MAX_BODY + 1 - len(body)), pieces()):
        answer = operation.ask(guarded, content=content)
        assert answer.status_code == problem(answer)["status"] == 413
    fits = operation.ask(guarded, content=body + b" " * (MAX_BODY - len(body)))
    assert fits.status_code in (200, 201, STATUSES.get(operation.name))


# -- methods --------------------------------------------------------------------------------------------------------------

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
STATIC = "/static-offline-docs/swagger-ui.css"


def routes(running: Running) -> dict[str, set[str]]:
    """Path with `books` and an item in it → the methods that all its routes take together, also where they are not documented."""
    found: dict[str, set[str]] = {STATIC: {"GET", "HEAD"}}
    for route in running.app.routes:
        if isinstance(route, APIRoute | Route):
            path = route.path_format.format(name="books", id="item-1", node=0)
            methods = set(route.methods or ())
            found.setdefault(path, set()).update(methods | ({"HEAD"} if "GET" in methods else set()))
    return found


def test_no_check_of_a_request_takes_a_thread(guarded: Running) -> None:
    """There are few of them, and the framework would run a plain function in one."""
    checks = [dependant.call for route in guarded.app.routes if isinstance(route, APIRoute) for dependant in route.dependant.dependencies]
    assert checks
    assert all(map(inspect.iscoroutinefunction, checks))


def test_files_are_sent_whole(guarded: Running) -> None:
    for ranges in ("bytes=0-3", "bytes=5-2,x"):
        answer = guarded.client.get(STATIC, headers={"Range": ranges})
        assert (answer.status_code, len(answer.content)) == (200, int(answer.headers["content-length"]))


def test_every_route_is_in_the_document_with_its_access_and_names_all_its_methods(guarded: Running) -> None:
    assert sorted(name for names in ACCESS.values() for name in names) == sorted(one.name for one in OPERATIONS)
    refused = 0
    for path, methods in routes(guarded).items():
        for method in METHODS:
            answer = guarded.client.request(
                method, path, headers=bearer(KEYS["admin"]) | {"Content-Type": "application/json"}, content=b"{}"
            )
            assert (answer.status_code == 405) == (method not in methods), f"{method} {path}"
            if answer.status_code == 405:
                assert answer.headers["allow"] == ", ".join(sorted(methods)), f"{method} {path}"
                assert method == "HEAD" or problem(answer)["status"] == 405
                refused += 1
    assert refused >= 80


def test_head_is_answered_as_get_without_the_body(guarded: Running) -> None:
    paths = [path for path, methods in routes(guarded).items() if "GET" in methods] + ["/nothing", "/models/films"]
    assert {"/livez", "/readyz", "/metrics", "/models", "/docs", "/openapi.json", "/"} <= set(paths)
    for path in paths:
        get, head = guarded.client.get(path), guarded.client.request("HEAD", path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert get.content, path
        names = {"content-type", "content-length", "etag", "www-authenticate"} - ({"content-length"} if path == "/metrics" else set())
        assert {n: head.headers.get(n) for n in names} == {n: get.headers.get(n) for n in names}, path


def test_head_of_readyz_says_when_the_service_is_not_ready(running: Running) -> None:
    running.app.state.service.registry.leaving = True
    answer = running.client.request("HEAD", "/readyz")
    assert (answer.status_code, answer.content) == (503, b"")


# -- other addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_an_address_that_is_not_there_leads_nowhere(guarded: Running, method: str) -> None:
    """Least of all to where the Host header points."""
    slashes = ["/models/", "/livez/", "/retrieve/", "/docs/", "/models/books/", "/models/books/tree/", "//evil.example/models/"]
    others = ["/models/books/tree/0/1", "/console", "/nothing", "/retrieve%0A", "/models/books/load%0A", "/docs%0A", "/livez%0A"]
    files = ["", "nothing.js", "index.html", "SHA256SUMS", "../settings.py", "%2e%2e/settings.py", "..%2fsettings.py", "/etc/passwd", "%00"]
    for path in (*slashes, *others, *(f"/console/{file}" for file in files)):
        host = {"Host": "evil.example", "X-Forwarded-Host": "evil.example"}
        answer = guarded.client.request(method, f"http://test{path}", headers=host)
        assert (answer.status_code, "location" in answer.headers, "evil" in answer.text) == (404, False, False), path
        assert method == "HEAD" or problem(answer)["status"] == 404


def test_what_is_not_there_leaves_no_trace(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a line nor a series nor a byte of an unread body for each of a flood of addresses."""
    caplog.set_level(logging.DEBUG, "service")
    client, before = guarded.client, counted(guarded).keys()
    for i in range(20):
        assert client.get(f"/nothing/{i}").status_code == 404
        assert client.request("PATCH", f"/models/model-{i}/removed/{i}").status_code == 405
        assert client.post(f"/models/model-{i}", content=b"x" * 10).status_code == 405
        for path in (f"/models/model-{i}", f"/models/model-{i}/items"):
            assert client.get(path, headers=bearer(KEYS["admin"])).status_code == 404
    assert counted(guarded).keys() == before
    assert [record.name for record in caplog.records if record.name.startswith("service")] == []


def test_the_documentation_page_brings_all_that_it_needs(guarded: Running) -> None:
    """From the service itself, where no CDN can be reached; and it runs its own scripts alone, in no frame."""
    page = guarded.client.get("/docs")
    assert "https://" not in page.text
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) >= 3
    for address in (*named, "/openapi.json"):
        assert address.startswith("/"), address
        answer = guarded.client.get(address)
        assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
