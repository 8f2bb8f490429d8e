"""Locust's side of the load tests, headless against a real service, in processes of its own: its import changes how a process waits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.checks.random_bundles import make_bundle
from espalier.errors import EspalierError, InvalidConfig
from espalier.tree import complete_tree
from loadtest.plan import SHAPES, SPIKE, complaints, conditions, mix, plan_of, shaped, users, versions, wrong_in
from loadtest.target import Json
from tests import ROOT
from tests.service.models.registry import add_version
from tests.service.processes import KEY, service

pytestmark = pytest.mark.slow

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


@contextmanager
def stub(answer: Callable[[Json], tuple[int, Json]]) -> Iterator[str]:
    """A service with a model of ten items, and one's own answers to POST /retrieve."""
    limits = {"max_beam_size": 64, "max_m": 64}
    model = {"name": "books", "version": 1, "state": "ready", "query": {"kind": "history"}, "search": limits, "tree": {"items": 10}}
    model["versions"] = [{"version": 1, "state": "ready"}]

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_GET(self) -> None:
            self.say(200, {"models": [model]} if self.path == "/models" else model)

        def do_POST(self) -> None:
            self.say(*answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def say(self, status: int, document: Json) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def results(count: int, complete: bool = True) -> Json:
    return {"results": [{"items": [{}] * count, "complete": complete}]}


def test_the_exit_code_tells_what_went_wrong(tmp_path: Path) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"history": ["item-1"]}\n')
    mine = ("--queries", str(queries), "--seconds", "1")
    with stub(lambda body: (429, {})) as refuses, stub(lambda body: (200, results(body["m"] - 1))) as lacks:
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


# -- the plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"rate": 0.0}, "--rate: got 0.0, expected a number above 0"),
        ({"seconds": float("inf")}, "--seconds: got inf, expected a number above 0"),
        ({"filter_share": 1.5}, "--filter-share: got 1.5, expected 0 to 1"),
        ({"filter_share": 0.5}, "--filter: got '', expected a filter"),
        ({"beam_mix": "8,65:0"}, "--beam-mix: got 65, expected 1 to 64, the limit of model books"),
        ({"m_mix": "65"}, "--m-mix: got 65, expected 1 to 64, the limit of model books"),
        ({"shape": "reload"}, "--admin-key: got None, expected a key of the role admin"),
        ({"shape": "reload", "admin_key": KEY}, "--versions: got [1], expected two versions or more"),
        ({"write_rate": -1.0}, "--write-rate: got -1.0, expected a number of at least 0"),
        ({"write_rate": 5.0}, "--write-key: got None, expected a key of the role write"),
        ({}, "models/books/1/manifest.json"),
    ],
)
def test_a_test_that_cannot_be_done_says_why(tmp_path: Path, options: dict[str, object], wanted: str) -> None:
    texts = dict.fromkeys(("model", "key", "admin_key", "write_key", "versions", "queries", "filter"), "")
    usual = {
        "rate": 20.0,
        "seconds": 1.0,
        "reload_every": 1.0,
        "filter_share": 0.0,
        "write_rate": 0.0,
        "beam_mix": "8",
        "m_mix": "8",
        "shape": "steady",
        "seed": 0,
    }
    given = Namespace(**texts | usual | {"models": tmp_path / "models", "exclude_seen": False} | options)
    with stub(lambda body: (200, {})) as url, pytest.raises(EspalierError, match=re.escape(wanted)):
        plan_of(url, given)
    with pytest.raises(InvalidConfig, match="--host: got None"):
        plan_of(None, given)


def test_mixes_filters_and_versions_are_read() -> None:
    assert mix("50:1,100:8.5,400") == ([50, 100, 400], [1.0, 8.5, 1.0])
    assert conditions("") == {}
    assert conditions('{"section": ["libs"]}') == {"section": ["libs"]}
    assert (versions(""), versions("1,2")) == ([], [1, 2])


@pytest.mark.parametrize("text", ["", "x", "0", "5:-1", "5:0", "5:nan", "5:1:1"])
def test_a_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="expected VALUE:WEIGHT"):
        mix(text)


@given(st.sampled_from(SHAPES), st.floats(0.1, 2000), st.floats(0, 1))
def test_there_are_never_no_users_and_never_more_than_a_spike_has(shape: str, rate: float, passed: float) -> None:
    most = users(rate)
    assert rate / most <= 5
    assert 1 <= shaped(shape, most, passed) <= (SPIKE if shape == "spike" else 1) * most


def test_the_shapes() -> None:
    assert [shaped("ramp", 10, passed) for passed in (0, 0.25, 0.5, 1)] == [1, 3, 5, 10]
    assert [shaped("spike", 10, passed) for passed in (0, 0.32, 0.34, 0.6, 0.67, 1)] == [10, 10, 30, 30, 10, 10]
    assert {shaped("steady", 10, passed) for passed in (0, 0.5, 1)} == {10}


@pytest.mark.parametrize(
    ("found", "complete", "eligible", "wrong"),
    [(5, True, 100, False), (4, True, 100, True), (4, False, 100, False), (4, True, 4, False), (4, True, 0, False), (6, True, 0, True)],
)
def test_an_answer_has_as_many_items_as_there_can_be(found: int, complete: bool, eligible: int, wrong: bool) -> None:
    assert (wrong_in(results(found, complete), 5, eligible) is not None) == wrong
    assert wrong_in({}, 5, eligible) == "0 results to one query"


def test_what_was_not_good_enough() -> None:
    assert complaints(1000, 10, 10, 0, 0.01, 0.01) == []
    assert len(complaints(1000, 11, 11, 1, 0.01, 0.01)) == 3
    assert complaints(0, 0, 0, 0, 1, 1) == ["no request was sent"]
