"""TLS between processes: a router and its shards, and a host that follows another one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from service.tls import calling
from tests.certificates import Authority
from tests.service.processes import Service, exit_code, service
from tests.service.router.test_process import QUERY
from tests.service.running import small_model
from tests.service.shards.cutting import cut, whole_bundle
from tests.waiting import until

pytestmark = pytest.mark.slow
SERVE = ("service",)
WRITE, INTERNAL = "a-write-key-of-a-test", "an-internal-key-of-a-test"


@contextmanager
def mutual(
    authority: Authority, name: str, folder: Path, workers: int = 1, program: Sequence[str] = SERVE, **more: str
) -> Iterator[Service]:
    """A service with a certificate that it shows its clients and the services that it calls, all of whom must show one. The test does."""
    pair = authority.signs(name)
    names = {"CERTIFICATE": pair.certificate, "KEY": pair.key, "CLIENT_CA": authority.ca, "CA": authority.ca}
    names |= {"CLIENT_CERTIFICATE": pair.certificate, "CLIENT_KEY": pair.key}
    settings = {f"ESPALIER_TLS_{key}": str(file) for key, file in names.items()}
    with service(folder, workers, program, **settings, **more) as running:
        running.tls = calling(authority.ca, *pair).current()
        yield running


def test_a_router_and_its_shards_know_each_other(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cut(whole_bundle(tmp_path / "models"), tmp_path / "shards", 2)
    with ExitStack() as ends:
        keys = {"ESPALIER_INTERNAL_KEYS": INTERNAL}
        shards = ends.enter_context(mutual(authority, "shards", tmp_path / "shards", 1, SERVE, **keys))
        second = {"ESPALIER_ADMIN_ADDRESS": "127.0.0.1:0", "ESPALIER_TIMEOUT_MS": "5000"}
        program = "service.router", "--shards", f"https://localhost:{shards.port}"
        router = ends.enter_context(mutual(authority, "router", tmp_path / "models", 1, program, **keys, **second))
        status, answer = router.request("POST", "/retrieve", QUERY)
        assert (status, answer["coverage"]["items"]) == (200, 1.0)
        assert router.request("GET", "/metrics")[0] == 404
        assert router.asked(router.admin_port, "GET", "/metrics")[0] == 200
        router.process.terminate()
        assert exit_code(router) == 0


def test_a_host_follows_another_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    small_model(tmp_path / "models" / "first", kind="product")
    shutil.copytree(tmp_path / "models" / "first", tmp_path / "models" / "second")
    with ExitStack() as ends:
        first = ends.enter_context(mutual(authority, "first", tmp_path / "models" / "first", ESPALIER_WRITE_KEYS=WRITE))
        follows = {"ESPALIER_FOLLOW": f"https://localhost:{first.port}", "ESPALIER_FOLLOW_KEY": "an-admin-key-of-a-test"}
        second = ends.enter_context(mutual(authority, "second", tmp_path / "models" / "second", 1, SERVE, **follows))
        body = {"events": [["item-1"]]}
        assert first.request("PUT", "/models/books/items/new", body, Authorization=f"Bearer {WRITE}")[0] == 201

        def found() -> bool:
            _, answer = second.request("POST", "/retrieve", {"queries": [{"history": ["item-1"]}], "m": 40, "beam_size": 64})
            return "new" in [item["id"] for item in answer["results"][0]["items"]]

        until(found)
