"""The console's page and files: what a browser is told with them, and that nothing else of the disk is served."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.http.console import FOLDER, HEADERS, read_files
from tests.service.running import Running, problem, run

MAX_BYTES = 90_000
"""Of all files together, compressed."""


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[Running]:
    with run(models, retrieve_keys=("retrieve-key-000001",), admin_keys=("admin-key-00000001",)) as started:
        yield started


def test_the_page_and_every_file_come_without_a_key_under_a_strict_policy_and_once(running: Running) -> None:
    answer = running.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == (FOLDER / "index.html").read_text()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    for path, file in read_files().items():
        assert gzip.decompress(file.gzipped) == file.content, path
        for encoding in ("identity", "gzip"):
            answer = running.client.get(path, headers={"Accept-Encoding": encoding})
            assert answer.status_code == 200, path
            assert answer.headers.get("content-encoding", "identity") == encoding, path
            assert answer.content == file.content, path
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path
    first = running.client.get("/")
    for named in (first.headers["etag"], f'"other", {first.headers["etag"]}', "*"):
        again = running.client.get("/", headers={"If-None-Match": named})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert running.client.get("/", headers={"If-None-Match": 'W/"other"'}).status_code == 200


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        *((value, "gzip") for value in ("br, GZIP", "gzip;q=0.1", "gzip ; q=1.000,br;q=0", "deflate;q=0, gzip;q=0.001")),
        *((value, "identity") for value in ("", "br", "identity", "gzip;q=0", "br, gzip; q=0.000", "GZIP;Q=0.0 , br")),
    ],
)
def test_a_file_is_compressed_only_for_who_takes_gzip(running: Running, accepted: str, encoding: str) -> None:
    answer = running.client.get("/", headers={"Accept-Encoding": accepted})
    assert answer.headers.get("content-encoding", "identity") == encoding
    assert answer.text == (FOLDER / "index.html").read_text()


def test_a_changed_file_has_another_tag(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>one")
    one = read_files(tmp_path)["/"]
    (tmp_path / "index.html").write_text("<p>two")
    two = read_files(tmp_path)["/"]
    assert one.tag != two.tag
    assert read_files(tmp_path)["/"] == two


def test_the_files_are_small_whole_and_as_their_makers_published_them() -> None:
    folder = FOLDER / "vendor"
    sums = {name: digest for digest, name in (line.split() for line in (folder / "SHA256SUMS").read_text().splitlines())}
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.*") if path.suffix != ".txt"}
    sizes = {path: len(file.gzipped) for path, file in read_files().items()}
    assert sum(sizes.values()) <= MAX_BYTES, sizes


def test_what_a_module_imports_is_there() -> None:
    imports = re.compile(r'(?:from |import\()"([^"]+)"')
    modules = [path for path in FOLDER.rglob("*.js") if path.parent.name != "vendor"]
    imported = {(path.parent / name).resolve() for path in modules for name in imports.findall(path.read_text())}
    assert imported | {FOLDER / "app.js"} >= {*modules}
    assert [path for path in imported if not path.is_file()] == []


def test_the_page_asks_for_all_modules_of_its_start_at_once() -> None:
    imports = re.compile(r'^(?:import|export)[^;]*? from "([^"]+)"', re.M)
    waiting, needed = [FOLDER / "app.js"], set()
    while waiting:
        module = waiting.pop()
        if module not in needed:
            needed.add(module)
            waiting += [(module.parent / name).resolve() for name in imports.findall(module.read_text())]
    named = re.findall(
        r'<(?:link rel="modulepreload" href|script type="module" src)="console/([^"]+)"', (FOLDER / "index.html").read_text()
    )
    assert sorted(named) == sorted(module.relative_to(FOLDER).as_posix() for module in needed)


def test_files_that_are_no_assets_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "views").mkdir()
    for name in ("index.html", "app.js", "views/lab.js", "style.css", "SHA256SUMS", "notes.md", ".hidden"):
        (tmp_path / name).write_text(name)
    assert set(read_files(tmp_path)) == {"/", "/console/app.js", "/console/views/lab.js", "/console/style.css"}


def test_the_console_can_be_switched_off(models: Path) -> None:
    with run(models, console=False) as without:
        for path in read_files():
            assert problem(without.client.get(path))["status"] == 404, path
        assert without.client.get("/docs").status_code == 200
