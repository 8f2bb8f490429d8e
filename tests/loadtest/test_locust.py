"""Locust's side of the load tests, headless against a real service, in processes of its own: its import changes how a process waits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from espalier.tree import complete_tree
from loadtest.plan import SHAPES
from loadtest.target import Json
from tests import ROOT
from tests.loadtest.stub import made_up, results
from tests.service.models.registry import add_version
from tests.service.processes import KEY, service

pytestmark = [pytest.mark.slow]

SECONDS, WRITE = "2", "a-key-that-may-write"
REFUSED = "refused (429)"
NAMES = {f"beam {beam}, m {m}" for beam in (4, 16) for m in (3, 40)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with two versions of `books`, whose items have a shelf."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("models")
    shelves = {"shelf": ["low", "high"] * 16}
    make_bundle(folder, rng, complete_tree(rng.permutation(32), 2), name="books", columns=shelves)
    add_version(folder, 2)
    (folder / "books" / "serving.json").write_text('{"generation": 1, "versions": [1], "default": 1}')
    return folder


class Locust:
    """`locust --headless` in a process of its own."""

    def __init__(self, url: str, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json", "--host", url]
        command += ["--models", str(folder), "--rate", "20", "--seconds", SECONDS, "--beam-mix", "4:1,16:3", "--m-mix", "3:1,40", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> tuple[int, dict[str, Json], str]:
        """Exit code, statistics by name, log."""
        out, log = self.process.communicate(timeout=60)
        return self.process.returncode, {entry["name"]: entry for entry in json.loads(out or "[]")}, log


@pytest.mark.release
def test_every_shape_of_load_stops_by_itself_without_a_failure(folder: Path) -> None:
    with service(folder, 1) as running:
        url = f"http://127.0.0.1:{running.port}"
        options = {shape: ["--shape", shape] for shape in SHAPES}
        options["steady"] += ["--filter-share", "0.5", "--filter", '{"shelf": ["low"]}', "--exclude-seen"]
        options["reload"] += ["--admin-key", KEY, "--reload-every", "0.1"]
        for given in options.values():
            given += ["--max-refused", "0.5"]  # a machine that is busy loading versions may refuse some
        started = {shape: Locust(url, folder, *given) for shape, given in options.items()}
        ended = {shape: locust.end() for shape, locust in started.items()}
        _, described = running.request("GET", "/models/books")
        loads = running.metric('espalier_reload_total{model="books",outcome="loaded"}')
    for shape, (code, stats, log) in ended.items():
        assert code == 0, f"{shape}: {log}"
        assert sum(entry["num_failures"] for name, entry in stats.items() if name != REFUSED) == 0
        assert {name.removesuffix(", filtered") for name in stats} - {"reload", REFUSED} <= NAMES
        assert any("filtered" in name for name in stats) == (shape == "steady")
        assert ("reload" in stats) == (shape == "reload")
    assert ended["reload"][1]["reload"]["num_requests"] >= 2
    assert loads >= 2
    assert described["version"] == 1


@pytest.mark.release
def test_items_are_put_beside_the_retrievals_and_deleted_in_the_end(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    make_bundle(tmp_path, rng, complete_tree(rng.permutation(32), 2), name="books")
    with service(tmp_path, 1, ESPALIER_WRITE_KEYS=WRITE) as running:
        url = f"http://127.0.0.1:{running.port}"
        code, stats, log = Locust(url, tmp_path, "--write-rate", "20", "--write-key", WRITE).end()
        _, described = running.request("GET", "/models/books")
    assert code == 0, log
    assert stats["put"]["num_failures"] == 0
    assert described["live"]["sequence"] >= 2 * stats["put"]["num_requests"] > 20  # a put and a delete each
    assert described["live"]["items"] == 0


@pytest.mark.release
def test_the_exit_code_tells_what_went_wrong(tmp_path: Path) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"history": ["item-1"]}\n')
    mine = ("--queries", str(queries), "--seconds", "1")
    with made_up(lambda body: (429, {})) as refuses, made_up(lambda body: (200, results(body["m"] - 1))) as lacks:
        cases = [
            (Locust(refuses, tmp_path, *mine), 1, {REFUSED}, "requests were refused, more than --max-refused 0.01"),
            (Locust(refuses, tmp_path, *mine, "--max-refused", "1"), 0, {REFUSED}, "loadtest: books version 1, 1 queries"),
            (Locust(lacks, tmp_path, *mine, "--m-mix", "3"), 1, NAMES, "requests failed, more than --max-failed 0.01"),
            (Locust(lacks, tmp_path), 1, set(), "books/1/manifest.json"),
        ]
        for locust, wanted, names, message in cases:
            code, stats, log = locust.end()
            assert code == wanted, log
            assert message in log
            assert set(stats) <= names
            assert all(entry["num_failures"] == entry["num_requests"] > 0 for entry in stats.values())


def test_the_options_are_described_and_those_of_the_described_commands_exist() -> None:
    """Locust's own --help does not know what a locustfile adds."""
    page = (ROOT / "docs/judge.md").read_text().partition("### A mix of requests: Locust\n")[2].partition("\n## ")[0]
    added = set(re.findall(r'add\("(--[a-z-]+)"', (ROOT / "loadtest/locustfile.py").read_text()))
    assert set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)) == added
    commands = re.findall(r"^locust -f .*$", page, re.MULTILINE)
    assert len(commands) >= 5
    assert {word for command in commands for word in re.findall(r"(?<=\s)--[a-z-]+", command)} <= {*added, "--host", "--headless"}


def test_locust_loads_the_file_by_its_path_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py"), "--list"]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True).stdout
    assert {"Retriever", "Writer", "Reloader"} <= set(listed.split())
