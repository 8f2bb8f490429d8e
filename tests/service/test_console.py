"""The console's page and files: what a browser is told with them, and that nothing else of the disk is served."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.http.console import FOLDER, HEADERS, accepts_gzip, read_files
from tests.service.running import Running, problem, run

MAX_BYTES = 60_000
"""Of all files together, compressed."""


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[Running]:
    with run(models, retrieve_keys=("retrieve-key-000001",), admin_keys=("admin-key-00000001",)) as started:
        yield started


def test_the_page_needs_no_key_and_has_a_strict_policy(running: Running) -> None:
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


def test_every_file_comes_as_it_was_read(running: Running) -> None:
    for path, file in read_files().items():
        for encoding, content in (("identity", file.content), ("gzip", gzip.decompress(file.zipped))):
            answer = running.client.get(path, headers={"Accept-Encoding": encoding})
            assert answer.status_code == 200, path
            assert answer.headers.get("content-encoding", "identity") == encoding, path
            assert answer.content == content == file.content, path
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path


def test_comments_of_a_style_sheet_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>/* text */</p>\n")
    (tmp_path / "style.css").write_text("p { q: r; }\n")
    (tmp_path / "a.css").write_text("/* The look,\n   all of it. */\n\na { b: c; } /* why */\n/* two */\nd { e: f; }\n")
    files = read_files(tmp_path)
    assert files["/"].content == b"<p>/* text */</p>\n"
    assert files["/console/style.css"].content == b"p { q: r; }\n\na { b: c; } /* why */\nd { e: f; }\n"


def test_vendored_files_are_those_that_their_makers_published() -> None:
    folder = FOLDER / "vendor"
    sums = {name: digest for digest, name in (line.split() for line in (folder / "SHA256SUMS").read_text().splitlines())}
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.*") if path.suffix != ".txt"}


def test_what_a_browser_has_already_is_not_sent_again(running: Running) -> None:
    first = running.client.get("/")
    for named in (first.headers["etag"], f'"other", {first.headers["etag"]}', "*"):
        again = running.client.get("/", headers={"If-None-Match": named})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert running.client.get("/", headers={"If-None-Match": 'W/"other"'}).status_code == 200


def test_a_changed_file_has_another_tag(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>one")
    one = read_files(tmp_path)["/"]
    (tmp_path / "index.html").write_text("<p>two")
    two = read_files(tmp_path)["/"]
    assert one.tag != two.tag
    assert read_files(tmp_path)["/"] == two


def test_files_that_are_no_assets_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "views").mkdir()
    for name in ("index.html", "app.js", "views/lab.js", "views/lab.css", "SHA256SUMS", "notes.md", ".hidden"):
        (tmp_path / name).write_text(name)
    assert set(read_files(tmp_path)) == {"/", "/console/app.js", "/console/style.css"}


@pytest.mark.parametrize(
    "path",
    [
        "/console",
        "/console/",
        "/console/index.html",
        "/console/SHA256SUMS",
        "/console/../settings.py",
        "/console/%2e%2e/settings.py",
        "/console/..%2fsettings.py",
        "/console//etc/passwd",
        "/console/%00",
    ],
)
def test_nothing_else_is_there(running: Running, path: str) -> None:
    assert problem(running.client.get(path))["status"] == 404


def test_the_console_can_be_switched_off(models: Path) -> None:
    with run(models, console=False) as without:
        for path in read_files():
            assert problem(without.client.get(path))["status"] == 404, path
        assert without.client.get("/docs").status_code == 200


def test_all_files_together_are_small() -> None:
    sizes = {path: len(file.zipped) for path, file in read_files().items()}
    assert sum(sizes.values()) <= MAX_BYTES, sizes


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("", False),
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("gzip; q=0", False),
        ("gzip;q=0.000", False),
        ("*", True),
        ("*;q=0, gzip", True),
        ("*, gzip;q=0", False),
        ("identity", False),
        (";;,,q=", False),
    ],
)
def test_gzip_is_sent_where_it_is_accepted(header: str, allowed: bool) -> None:
    assert accepts_gzip(header) is allowed
