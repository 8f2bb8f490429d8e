"""The sweep against a real service: what it measures is what `evaluate` measures, and what it cannot measure it says."""

from __future__ import annotations

import csv
import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.bundle import Bundle, GraphContent, write_bundle
from espalier.checks.heldout import read_heldout
from espalier.checks.random_bundles import make_bundle, random_tree
from espalier.engines.onnx.engine import OnnxEngine
from espalier.errors import EspalierError
from espalier.manifest import ManifestDraft
from espalier.metrics import precision_recall_f
from espalier.search import SearchParams
from loadtest import cell as cell_module
from loadtest import loops, report
from loadtest import sweep as sweep_module
from loadtest.cell import Load, measure, recall_at_m, without_items
from loadtest.hardware import hardware
from loadtest.loops import Answered, arrivals, closed_loop, each_once, open_loop, request_bytes, statuses
from loadtest.proposal import MAX_FAILED_SHARE, Point, propose
from loadtest.queries import Query, read_queries
from loadtest.sweep import main
from loadtest.target import Json, ServiceRefused, Target, parse_url
from tests.pictures import Pictures
from tests.service.test_workers import service
from training.evaluate import evaluate, held_out_pairs

pytestmark = pytest.mark.slow

KEY = "a-key-that-may-retrieve"
BEAMS, MS = (2, 8, 32), (3, 20)


def with_held_out(folder: Path, bundle: Bundle, heldout: pa.Table) -> Bundle:
    """The same bundle with other held-out queries."""
    manifest = bundle.manifest
    draft = ManifestDraft(**{name: getattr(manifest, name) for name in ManifestDraft.model_fields})
    content = GraphContent(
        tree=bundle.tree,
        node_rows_ND=bundle.node_rows_ND,
        state_levels=bundle.graph_scorer.state_levels,
        state_dim=bundle.graph_scorer.state_dim,
        query_onnx=bundle.graph("query.onnx"),
        scorer_onnx=bundle.graph("scorer.onnx"),
        items=bundle.items,
        golden=bundle.golden(),
        heldout=heldout,
    )
    return write_bundle(folder / manifest.name / str(manifest.version), draft, content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with `books`, whose 60 held-out queries are of all kinds, and `points`, which takes vectors."""
    rng = np.random.default_rng(7)
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("models")
    tree = random_tree(rng, 6, 3)
    books = make_bundle(plain, rng, tree, integer=False, name="books", max_beam_size=64, max_m=40)

    def ids(count: int) -> list[str]:
        known = [f"item-{i}" for i in rng.integers(0, tree.item_count, count)]
        return [*known, "no-such-item"] if rng.random() < 0.3 else known

    histories = [ids(int(rng.integers(1, 12))) for _ in range(60)]  # the model takes the last five
    relevant = [ids(int(rng.integers(0, 25))) + history[-1:] * 2 for history in histories]
    relevant[5], relevant[6] = [], ["no-such-item"]
    strings = pa.list_(pa.string())
    with_held_out(folder, books, pa.table({"history": pa.array(histories, strings), "relevant": pa.array(relevant, strings)}))
    points = make_bundle(plain, rng, tree, kind="vector", integer=False, name="points", max_beam_size=64, max_m=40)
    vectors = rng.normal(size=(20, 4)).tolist()
    wanted = [[f"item-{i}" for i in rng.integers(0, tree.item_count, 5)] for _ in vectors]
    floats = pa.list_(pa.float32())
    with_held_out(folder, points, pa.table({"vector": pa.array(vectors, floats), "relevant": pa.array(wanted, strings)}))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with service(folder, 1, ESPALIER_RETRIEVE_KEYS=KEY) as running:
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture
def sweep(folder: Path, url: str, tmp_path: Path) -> Callable[..., int]:
    """Runs the command with the options that every run has; later ones win."""

    def run(*options: str) -> int:
        usual = ["--url", url, "--key", KEY, "--model", "books", "--models", str(folder), "--out", str(tmp_path), "--seconds", "0.05"]
        return main([*usual, "--beam", "8", "--m", "3", *options])

    return run


def document(folder: Path) -> Json:
    found: Json = json.loads((folder / "sweep.json").read_text())
    return found


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as stream:
        return list(csv.DictReader(stream))


# -- what is measured -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclude_seen", [False, True])
def test_recall_through_http_is_what_evaluate_measures(sweep: Callable[..., int], folder: Path, tmp_path: Path, exclude_seen: bool) -> None:
    assert sweep("--beam", "2,8,32", "--m", "3,20", *["--exclude-seen"] * exclude_seen) == 0
    bundle = Bundle.open(folder / "books" / "1")
    expected = evaluate(bundle, OnnxEngine(bundle, "cpu"), held_out_pairs(bundle), BEAMS, MS, exclude_seen)
    found = {(cell["beam_size"], cell["m"]): cell["recall"] for cell in document(tmp_path)["cells"]}
    assert found == {(row["beam_size"], row["m"]): row["recall"] for row in expected}
    assert len(set(found.values())) > 3


def test_recall_of_vectors_is_that_of_a_direct_search(sweep: Callable[..., int], folder: Path, tmp_path: Path) -> None:
    assert sweep("--model", "points", "--beam", "4,16", "--m", "10") == 0
    bundle = Bundle.open(folder / "points" / "1")
    held_out = read_heldout(bundle)
    for cell in document(tmp_path)["cells"]:
        result = OnnxEngine(bundle, "cpu").search(held_out.queries, SearchParams.uniform(len(held_out.queries), cell["beam_size"], 10))
        assert cell["recall"] == precision_recall_f(result.item_rows_BM, held_out.relevant, 10)[1].mean()


def test_the_files_hold_every_cell_and_loop(
    sweep: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: Pictures
) -> None:
    assert sweep("--beam", "2,8", "--m", "3,20", "--budget-ms", "0.0001,1e6") == 0
    found = rows(tmp_path)
    assert list(found[0]) == ["beam_size", "m", "recall", "p50_ms", "p95_ms", "p99_ms", "requests_per_s", "ms_per_query", "loop"]
    assert [(row["m"], row["beam_size"], row["loop"]) for row in found] == [
        (m, beam, loop) for m in ("3", "20") for beam in ("2", "8") for loop in ("closed", "open")
    ]
    for row in found:
        assert 0 <= float(row["recall"]) <= 1
        assert 0 < float(row["ms_per_query"]) <= float(row["p99_ms"])
        assert 0 < float(row["p50_ms"]) <= float(row["p95_ms"]) <= float(row["p99_ms"])
        assert float(row["requests_per_s"]) > 0
    written = (tmp_path / "sweep.md").read_text()
    best = max((cell for cell in document(tmp_path)["cells"] if cell["m"] == 3), key=lambda cell: cell["recall"])
    assert f"| 1e+06 ms | 3 | open | **{best['beam_size']}** | {best['recall']:.4f} |" in written
    assert "| 0.0001 ms | 20 | open | none |" in written
    queries = len(held_out_pairs(Bundle.open(folder / "books" / "1")))
    assert queries < 60
    for part in (hardware(), "--budget-ms 0.0001,1e6", "books version 1 on `onnx-cpu`", f"Queries: {queries} from the bundle", "Date: 20"):
        assert part in written
    printed = capsys.readouterr()
    assert f"open loop, m 3, p99 within 1e+06 ms: beam {best['beam_size']}" in printed.out
    assert "open loop, m 20, p99 within 0.0001 ms: no beam; the smallest p99 was" in printed.out
    assert printed.err.count("recall") == 4  # a line for each cell, where no progress bar can be shown
    lines = pictures.lines(tmp_path / "frontier.png")
    for m, name in (("3", "closed"), ("20", "open")):
        cells = [row for row in found if (row["m"], row["loop"]) == (m, name)]
        points = lines[f"recall@{m}, {'under load' if name == 'open' else 'one client'}"]
        expected = [(float(row["p99_ms"]), float(row["recall"])) for row in cells]
        assert np.array(points) == pytest.approx(np.array(expected), abs=0.01)
    assert ElementTree.parse(tmp_path / "frontier.svg").getroot().tag.endswith("svg")


def test_few_samples_are_marked(sweep: Callable[..., int], tmp_path: Path) -> None:
    assert sweep("--rate", "100") == 0
    (cell,) = document(tmp_path)["cells"]
    assert cell["loops"]["open"]["samples"] == 5
    line = next(line for line in (tmp_path / "sweep.md").read_text().splitlines() if line.startswith("| 8 |") and "| open |" in line)
    assert " \\* |" in line


def test_queries_from_a_file_without_relevant_items(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: Pictures
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"history": ["item-3", "item-4"]}\n\n{"history": []}\n')
    assert sweep("--queries", str(file), "--models", str(tmp_path / "nowhere")) == 0
    assert {row["recall"] for row in rows(tmp_path)} == {""}
    assert "no query has relevant items" in capsys.readouterr().err
    lines = pictures.lines(tmp_path / "frontier.png")
    assert [height for _, height in lines["m 3, one client"]] == [cell["beam_size"] for cell in document(tmp_path)["cells"]]


def test_queries_from_a_file_are_measured_like_the_same_ones_of_the_bundle(sweep: Callable[..., int], folder: Path, tmp_path: Path) -> None:
    assert sweep("--beam", "8,32") == 0
    expected = [cell["recall"] for cell in document(tmp_path)["cells"]]
    table = Bundle.open(folder / "books" / "1").heldout()
    known = [[item for item in ids if item != "no-such-item"] for ids in table.column("relevant").to_pylist()]
    file = tmp_path / "mine.parquet"
    pq.write_table(table.set_column(1, "relevant", pa.array(known, pa.list_(pa.string()))).append_column("day", pa.array([1] * 60)), file)
    assert sweep("--beam", "8,32", "--queries", str(file)) == 0
    assert [cell["recall"] for cell in document(tmp_path)["cells"]] == expected


# -- resuming -------------------------------------------------------------------------------------------------------------


def test_a_resumed_sweep_keeps_what_is_finished(sweep: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = 0

    def interrupted(*arguments: Any) -> Json:
        nonlocal cells
        cells += 1
        if cells == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(sweep_module, "measure", interrupted)
        assert sweep("--beam", "2,8") == 130
    first = document(tmp_path)["cells"]
    assert [cell["beam_size"] for cell in first] == [2]
    assert len(rows(tmp_path)) == 2
    assert sweep("--beam", "2,8", "--resume") == 0
    second = document(tmp_path)["cells"]
    assert second[:1] == first
    assert [cell["beam_size"] for cell in second] == [2, 8]
    with monkeypatch.context() as patched:
        patched.setattr(sweep_module, "measure", pytest.fail)
        assert sweep("--beam", "2,8", "--resume", "--budget-ms", "1e6") == 0
    assert document(tmp_path)["cells"] == second
    assert "## The beam that a budget buys" in (tmp_path / "sweep.md").read_text()


def test_cells_of_other_settings_are_never_mixed(sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep() == 0
    before = document(tmp_path)
    for options, wanted in (
        (["--seconds", "0.06"], "settings seconds 0.05'"),
        (["--rate", "50"], "settings rate_per_s None'"),
        (["--exclude-seen"], "settings exclude_seen False'"),
        (["--model", "points"], "model name books'"),
    ):
        assert sweep("--resume", *options) == 1
        message = capsys.readouterr().err
        assert "error: --resume: got" in message
        assert wanted in message
        assert document(tmp_path) == before
    assert sweep("--seconds", "0.06") == 0  # without --resume it is measured anew


def test_cells_of_another_model_under_the_same_name_are_never_mixed(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep() == 0
    changed = document(tmp_path)
    changed["identity"]["tree"]["nodes"] += 1
    (tmp_path / "sweep.json").write_text(json.dumps(changed))
    assert sweep("--resume") == 1
    assert "with identity another tree" in capsys.readouterr().err


# -- what cannot be measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--url", "https://127.0.0.1"], "--url: got 'https://127.0.0.1', expected http://HOST:PORT of the service itself: TLS"),
        (["--url", "localhost:8000"], "--url: got 'localhost:8000', expected http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9"], "GET http://127.0.0.1:9/models/books: no answer"),
        (["--model", "films"], "/models/films: 404, "),
        (["--key", "a-key-that-nobody-knows"], "/models/books: 401, "),
        (["--version", "7"], "--version: got 7, expected a version of books that is loaded: 1"),
        (["--beam", "8,65"], "--beam: got 65, expected 1 to 64, the limit of model books"),
        (["--m", "41"], "--m: got 41, expected 1 to 40, the limit of model books"),
        (["--models", "/nowhere"], "--models names the folder with books/1 on this machine, --queries a file of your own"),
        (["--queries", "/nowhere.jsonl"], "No such file or directory: '/nowhere.jsonl'"),
        (["--model", "points", "--exclude-seen"], "--exclude-seen: got 'vector queries'"),
        (["--timeout-ms", "1e9"], "timeout_ms: got 1000000000.0, expected at most 60000"),
    ],
)
def test_what_cannot_be_asked_ends_the_run_at_once(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], wanted: str
) -> None:
    assert sweep(*options) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert wanted in message
    assert not (tmp_path / "sweep.json").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--beam", "8,x"), ("--beam", "0"), ("--m", ""), ("--seconds", "x"), ("--rate", "0"), ("--budget-ms", "nan")]
)
def test_options_that_are_no_numbers_are_refused(
    sweep: Callable[..., int], capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit):
        sweep(option, value)
    assert f"argument {option}: got {value!r}, expected" in capsys.readouterr().err


def test_a_bundle_that_the_service_does_not_serve_is_refused(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    make_bundle(tmp_path / "others", rng, random_tree(rng, 3, 2), name="books")
    assert sweep("--models", str(tmp_path / "others")) == 1
    assert "the bundle that the service serves; its tree is another one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("[1]", "line 1: got \\[1\\], expected an object with one of history"),
        ('{"history": ["a"]}\n{"history"', "line 2: .* a JSON object"),
        ('{"history": ["a"], "vector": [1]}', "line 1: .* an object with one of history, vector, features, text"),
        ('{"history": "item-1"}', "line 1: history: got 'item-1', expected a list of item ids"),
        ('{"history": [], "relevant": [3]}', "line 1: relevant: got \\[3\\], expected a list of item ids"),
        ('{"vector": [1, "2"]}', "line 1: vector: .* a list of finite numbers"),
        ('{"vector": [1]}\n{"history": []}', "got 'history and vector', expected queries of one kind"),
    ],
)
def test_a_wrong_file_of_queries_says_where(tmp_path: Path, lines: str, wanted: str) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_text(lines)
    with pytest.raises(EspalierError, match=wanted):
        read_queries(file)


def test_the_key_is_written_nowhere(sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(f"--key={KEY}") == 0
    printed = capsys.readouterr()
    assert KEY not in printed.out + printed.err + repr(parse_url("http://localhost", KEY))
    assert not [file for file in tmp_path.iterdir() if KEY.encode() in file.read_bytes()]


def test_an_address_may_have_a_prefix_and_be_ipv6() -> None:
    target = parse_url("http://[::1]:8000/behind/", KEY)
    assert (str(target), target.address, target.prefix) == ("http://[::1]:8000/behind", ("::1", 8000), "/behind")
    assert parse_url("http://service").address == ("service", 80)


# -- the loops ------------------------------------------------------------------------------------------------------------


ANSWER: Json = {"engine": "stub", "results": [{"items": [{"id": "a", "score": 1.0}], "complete": True, "degraded": False, "unknown": []}]}
ANSWER |= {"timing": {"ms_per_query": 0.5}}


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


@contextmanager
def stub(answer: Callable[[int, Json], int | None]) -> Iterator[Target]:
    """A server whose answer to the n-th request, given its body, has this status; None closes the connection instead."""
    counted, lock = Counter[str](), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = counted["requests"]
                counted["requests"] += 1
            status = answer(number, body)
            if status is None:
                self.close_connection = True
                return
            content = orjson.dumps(ANSWER if status == 200 else {"title": "no", "status": status})
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Target("127.0.0.1", server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


REQUEST = request_bytes("/retrieve", {"queries": [{"history": []}]})


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Nothing is answered before everything has been asked, so that a loop that waited would ask one thing alone."""
    per_s, seconds, seed = 400.0, 0.1, 3
    due = arrivals(per_s, seconds, seed)
    everything = threading.Barrier(len(due))

    def answer(number: int, body: Json) -> int:
        everything.wait(30)
        return 200

    with stub(answer) as target:
        answered = open_loop(target.address, [REQUEST], per_s, seconds, seed)
    assert statuses(answered) == {"200": len(due)}
    began = sorted(answer.began for answer in answered)
    assert [at - began[0] for at in began] == pytest.approx([at - due[0] for at in due], abs=1e-9)
    assert all(0 <= answer.late_s <= answer.seconds for answer in answered)


@given(st.floats(0.1, 1e4), st.floats(0.01, 20), st.integers(0, 2**32))
def test_arrivals_come_at_their_rate(per_s: float, seconds: float, seed: int) -> None:
    due = arrivals(per_s, seconds, seed)
    assert len(due) == max(1, round(per_s * seconds))
    assert due == sorted(due)
    assert due == arrivals(per_s, seconds, seed)
    assert due[-1] * per_s / len(due) == pytest.approx(1, abs=10 / math.sqrt(len(due)))


def test_every_request_is_sent_once_and_answers_find_their_requests() -> None:
    seen: list[str] = []

    def answer(number: int, body: Json) -> int | None:
        seen.append(body["id"])
        return None if body["id"] == "7" else 200 if int(body["id"]) % 2 else 503

    requests = [request_bytes("/retrieve", {"id": str(i)}) for i in range(40)]
    with stub(answer) as target:
        answered = each_once(target.address, requests, 4)
    assert sorted(seen, key=int) == [str(i) for i in range(40)]
    assert {answer.number: answer.status for answer in answered} == {i: 0 if i == 7 else 200 if i % 2 else 503 for i in range(40)}


def test_lost_connections_are_made_anew() -> None:
    with stub(lambda number, body: None if number % 3 == 0 else 200) as target:
        answered = each_once(target.address, [REQUEST] * 30, 2)
    assert statuses(answered) == {"0": 10, "200": 20}


def test_a_service_that_goes_away_ends_a_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ServiceRefused, match=f"127.0.0.1:{port}: no connection"):
        closed_loop(("127.0.0.1", port), [REQUEST], 1, 0.1)


def load(target: Target) -> Load:
    queries = [Query("history", ("a",), ("a", "b")), Query("history", ("b",), ("c",))]
    return Load(target, "books", 1, queries, seconds=0.05, rate_per_s=400.0)


def test_failures_are_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth request is refused; a query that was refused is asked again for its recall."""
    monkeypatch.setattr(cell_module, "PAUSE_S", 0)
    with stub(lambda number, body: 429 if number % 4 == 1 else 200) as target:
        cell = measure(load(target), 8, 3)
    assert cell["recall"] == 0.25
    document: Json = {"cells": [cell]}
    told = "\n".join(report.warnings(document))
    for loop in ("closed", "open"):
        measured = cell["loops"][loop]
        assert measured["failed"] == measured["statuses"].get("429", 0)
        assert measured["samples"] == measured["statuses"]["200"]
    opened = cell["loops"]["open"]
    assert (opened["samples"], opened["failed"]) == (15, 5)
    assert "beam 8, m 3, open loop: 5 requests (25.00%) failed, statuses 429: 5; its percentiles are of the answered alone" in told
    assert propose(report.points_of(document), 1e9)[0].best is None


def test_figures_are_medians_of_the_rounds_and_counts_are_sums() -> None:
    with stub(lambda number, body: 200) as target:
        cell = measure(replace(load(target), rounds=3), 8, 3)
    for loop in cell["loops"].values():
        assert loop["p99_ms"] == sorted(loop["rounds_p99_ms"])[1]
        assert loop["statuses"] == {"200": loop["samples"]}
    assert cell["loops"]["open"]["samples"] == 3 * 20
    assert cell["loops"]["open"]["offered_per_s"] == 400


def test_recall_is_left_out_where_a_query_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "PAUSE_S", 0)
    with stub(lambda number, body: 503 if body["queries"][0]["history"] == ["b"] else 200) as target:
        cell = measure(load(target), 8, 3)
    assert cell["recall"] is None
    assert cell["recall_unanswered"] == 1
    assert any("no recall, 1 of its queries were not answered" in warning for warning in report.warnings({"cells": [cell]}))


def test_a_query_that_the_service_refuses_ends_the_cell_and_is_named() -> None:
    with (
        stub(lambda number, body: 422 if body["queries"][0]["history"] == ["b"] else 200) as target,
        pytest.raises(ServiceRefused, match="query 2 of 2: 422"),
    ):
        measure(load(target), 8, 3)


@pytest.mark.parametrize(
    ("lanes", "refuses_from", "expected"), [(1, 1000, 16), (16, 1000, 16), (100, 1000, 128), (10_000, 1000, 512), (64, 64, 32), (64, 16, 4)]
)
def test_the_capacity_is_that_of_as_many_clients_as_it_takes(
    lanes: int, refuses_from: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that answers so many requests at a time, 10 ms each, and refuses some where it has more clients than it likes."""

    def closed(address: Any, requests: Any, clients: int, seconds: float, keep: Any) -> list[Answered]:
        count = int(min(clients, lanes) * seconds * 100)
        body = orjson.dumps(ANSWER)
        return [Answered(i, seconds * i / count, 0.0, 0.01, 429 if clients >= refuses_from and i == 0 else 200, body) for i in range(count)]

    monkeypatch.setattr(cell_module, "closed_loop", closed)
    monkeypatch.setattr(cell_module, "PAUSE_S", 0)
    found, loop = cell_module._capacity(replace(load(Target("127.0.0.1", 1)), seconds=4.0), [REQUEST])
    assert found == expected
    assert loop["requests_per_s"] == pytest.approx(100 * min(found, lanes), rel=0.02)


def test_what_is_due_and_never_sent_counts_as_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "GRACE_S", 0.1)
    stop = threading.Event()

    def answer(number: int, body: Json) -> int:
        stop.wait(10)
        return 200

    with stub(answer) as target:
        answered = open_loop(target.address, [REQUEST], 500, 0.1, connections=2)
        stop.set()
    assert len(answered) == 50
    assert {answer.status for answer in answered} == {0}
    assert sorted(answer.number for answer in answered) == list(range(50))


def test_an_answer_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "STALL_S", 0.1)
    stop = threading.Event()

    def answer(number: int, body: Json) -> int:
        if number == 0:
            stop.wait(10)
        return 200

    with stub(answer) as target:
        answered = each_once(target.address, [REQUEST] * 3, 1)
        stop.set()
    assert sorted(answer.status for answer in answered) == [0, 200, 200]


def test_what_the_service_refuses_for_good_ends_the_cell() -> None:
    with stub(lambda number, body: 422) as target, pytest.raises(ServiceRefused, match="/retrieve: 422, no"):
        measure(load(target), 8, 3)


@given(st.lists(st.text()), st.lists(st.text()), st.booleans())
def test_what_is_kept_of_an_answer_is_all_but_its_items(items: list[str], unknown: list[str], complete: bool) -> None:
    result = {"items": [{"id": item} for item in items], "complete": complete, "degraded": False, "unknown": unknown}
    answer = {"model": "m", "results": [result], "timing": {"ms_per_query": 1.5}}
    kept = orjson.loads(without_items(orjson.dumps(answer)))
    assert kept["timing"] == answer["timing"]
    assert kept["results"] == [{name: value for name, value in result.items() if name != "items"}]


@given(st.data(), st.integers(1, 8))
def test_recall_of_ids_is_recall_of_rows(data: st.DataObject, m: int) -> None:
    queries = data.draw(st.integers(1, 5))
    found = [data.draw(st.lists(st.integers(0, 12), unique=True, max_size=m)) for _ in range(queries)]
    relevant = [data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=9)) for _ in range(queries)]
    rows_BM = np.array([[*rows, *[-1] * (m - len(rows))] for rows in found], np.int64)
    expected = precision_recall_f(rows_BM, [np.array(rows) for rows in relevant], m)[1].mean()

    def ids(lists: list[list[int]]) -> list[list[str]]:
        return [[f"id {row}" for row in rows] for rows in lists]

    assert recall_at_m(ids(found), ids(relevant), m) == expected


# -- the proposal ---------------------------------------------------------------------------------------------------------


POINTS = st.lists(
    st.builds(
        Point,
        beam_size=st.integers(1, 1000),
        m=st.sampled_from([10, 50]),
        loop=st.sampled_from(["closed", "open"]),
        recall=st.none() | st.floats(0, 1),
        p99_ms=st.just(float("nan")) | st.floats(0.01, 100),
        requests_per_s=st.just(100.0),
        samples=st.integers(0, 1000),
        failed_share=st.sampled_from([0.0, 0.005, 0.5]),
    ),
    max_size=20,
)


@given(POINTS, st.floats(0.01, 120))
def test_the_proposed_beam_is_the_best_within_the_budget(points: list[Point], budget_ms: float) -> None:
    proposals = propose(points, budget_ms)
    assert {(proposal.m, proposal.loop) for proposal in proposals} == {(point.m, point.loop) for point in points}
    assert [proposal.loop for proposal in proposals if proposal.m == 10] in ([], ["open"], ["closed"], ["open", "closed"])
    for proposal in proposals:
        mine = [point for point in points if (point.m, point.loop) == (proposal.m, proposal.loop)]
        answered = [point for point in mine if point.failed_share <= MAX_FAILED_SHARE and point.p99_ms > 0]
        measured = [point for point in answered if point.recall is not None] or answered
        within = [point for point in measured if point.p99_ms <= budget_ms]
        if proposal.best is None:
            assert not within
            assert (proposal.fastest is None) == (not answered)
        else:
            assert proposal.best in within
            assert all((point.recall or 0) <= (proposal.best.recall or 0) for point in within)
            assert proposal.best.recall is not None or proposal.best.beam_size == max(point.beam_size for point in within)


@given(POINTS, st.floats(0.01, 120), st.floats(1, 10))
def test_a_larger_budget_never_buys_less(points: list[Point], budget_ms: float, times: float) -> None:
    for small, large in zip(propose(points, budget_ms), propose(points, budget_ms * times), strict=True):
        if small.best is not None:
            assert large.best is not None
            assert (large.best.recall or 0) >= (small.best.recall or 0)
