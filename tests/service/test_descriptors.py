"""Descriptors: what a service needs besides connections is left for it, and too few are refused."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from service.__main__ import main
from service.http.connections import RESERVE
from tests.service.listening import get, listening
from tests.service.models.registry import run
from tests.waiting import until

Limit = Callable[[int], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Let the system give this process so many descriptors and no more."""

    def give(most: int) -> None:
        monkeypatch.setattr("resource.getrlimit", lambda _: (most, most))
        monkeypatch.setattr("resource.setrlimit", lambda _, wanted: pytest.fail(f"{wanted} is above the limit"))

    return give


def open_in(folder: Path) -> list[str]:
    """Files of the folder that this process has a descriptor of."""
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            files.append(os.readlink(descriptor))
    return [file for file in files if file.startswith(f"{folder}/")]


@contextmanager
def opened(count: int) -> Iterator[None]:
    """So many files are open meanwhile."""
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for file in files:
            os.close(file)


def test_what_is_open_for_other_things_takes_no_room_of_connections(models: Path, limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    def promised() -> int:
        """Descriptors of all connections that may be open, by the log."""
        return int(re.findall(r"at most (\d+) connections are taken", caplog.text)[-1]) + 2 * RESERVE

    limit(2000)
    with opened(300), listening(models, max_connections=5000):
        before = promised()
        assert before + 300 <= 2000
        with opened(500):  # as where many versions are loaded later
            until(lambda: promised() + 800 <= 2000, "there is room for them")


def test_where_all_connections_have_room_all_are_taken(models: Path, limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    limit(2000)
    with listening(models, max_connections=1000) as running:
        assert running.ask(get("/livez")).status == 200
    assert "connections are taken" not in caplog.text


def test_a_version_that_is_loaded_keeps_no_file_open(models: Path, tmp_path: Path) -> None:
    """Where it did, connections would have no room beside some dozens of versions. What is mapped needs no descriptor."""
    shutil.copytree(models / "books", tmp_path / "books")
    with run(tmp_path) as running:
        loaded = running.registry.choose("books", None)
        assert loaded.held
        folder = tmp_path / "books" / str(loaded.version)
        assert folder.is_dir()
        until(lambda: not open_in(folder), "what looks for new versions has closed what it read")


def test_too_few_descriptors_are_refused_with_what_is_needed(
    models: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ESPALIER_MODELS", str(models))
    monkeypatch.setenv("ESPALIER_DEVICE", "cpu")
    monkeypatch.setattr("service.__main__.Server.serve_on", lambda server, listening: listening.close())
    limit(64)
    assert main(["--port", "0"]) == 1
    found = re.search(r"may have 64 open files \(ulimit -n\), expected at least (\d+)", capsys.readouterr().err)
    assert found
    limit(int(found[1]) - 1)
    assert main(["--port", "0"]) == 1
    limit(int(found[1]))
    assert main(["--port", "0"]) == 0
