"""The sweep against a real service: what it measures is what `evaluate` measures, and what it cannot measure it says."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.random_bundles import make_bundle, random_tree
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.hardware import hardware
from loadtest import sweep as sweep_module
from loadtest.cell import measure
from loadtest.queries import read_queries
from loadtest.sweep import main
from loadtest.target import Json, ask, parse_url
from tests.espalier.bundle.parts import content_of, draft_of
from tests.pictures import Pictures
from tests.service.processes import service
from training import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.release]

KEY, WRITE = "a-key-that-may-retrieve", "a-key-that-may-write"
BEAMS, MS = (2, 8, 32), (3, 20)


def with_held_out(folder: Path, bundle: Bundle, heldout: pa.Table) -> Bundle:
    """The same bundle with other held-out queries."""
    content = content_of(bundle, heldout=heldout)
    return write_bundle(folder / bundle.manifest.name / str(bundle.manifest.version), draft_of(bundle), content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with `books`, whose 60 held-out queries are of all kinds."""
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
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with service(folder, 1, ESPALIER_RETRIEVE_KEYS=KEY, ESPALIER_WRITE_KEYS=WRITE) as running:
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
    queries = evaluate.labelled(bundle.manifest.query, evaluate.held_out_pairs(bundle), exclude_seen)
    expected = evaluate.measure(bundle, open_engine(bundle, engine="onnx-cpu"), queries, BEAMS, MS)
    found = {(cell["beam_size"], cell["m"]): cell["recall"] for cell in document(tmp_path)["cells"]}
    assert found == {(row["beam_size"], row["m"]): row["recall"] for row in expected}
    assert len(set(found.values())) > 3


def test_the_files_hold_every_cell_and_loop(
    sweep: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: Pictures
) -> None:
    assert sweep("--beam", "2,8", "--m", "3,20", "--budget-ms", "0.0001,1e6", f"--key={KEY}") == 0
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
    queries = len(evaluate.held_out_pairs(Bundle.open(folder / "books" / "1")))
    assert queries < 60
    asked = f"Queries: {queries} from the bundle"
    for part in (hardware(), "--budget-ms 0.0001,1e6", "books version 1 on `compiled-cpu`", asked, "Date: 20"):
        assert part in written
    printed = capsys.readouterr()
    assert f"| 1e+06 ms | 3 | open | **{best['beam_size']}** |" in printed.out
    assert "| 0.0001 ms | 20 | open | none | | smallest p99" in printed.out
    assert KEY not in printed.out + printed.err + repr(parse_url("http://localhost", KEY))
    assert not [file for file in tmp_path.iterdir() if KEY.encode() in file.read_bytes()]
    assert printed.err.count("recall") == 4  # a line for each cell, where no progress bar can be shown
    lines = pictures.lines(tmp_path / "frontier.png")
    for m, name in (("3", "closed"), ("20", "open")):
        cells = [row for row in found if (row["m"], row["loop"]) == (m, name)]
        points = lines[f"recall@{m}, {'under load' if name == 'open' else 'one client'}"]
        expected = [(float(row["p99_ms"]), float(row["recall"])) for row in cells]
        assert np.array(points) == pytest.approx(np.array(expected), abs=0.01)
    assert ElementTree.parse(tmp_path / "frontier.svg").getroot().tag.endswith("svg")


def test_a_third_loop_has_writes_beside_its_retrievals(sweep: Callable[..., int], url: str, tmp_path: Path) -> None:
    assert sweep("--writes", "100", "--write-key", WRITE, "--seconds", "0.5", "--rate", "50", "--budget-ms", "1e6") == 0
    found = document(tmp_path)
    [cell] = found["cells"]
    assert list(cell["loops"]) == ["closed", "open", "mixed"]
    assert cell["writes"]["failed"] == 0
    assert cell["writes"]["samples"] == pytest.approx(50, abs=1)
    assert sum(cell["loops"]["mixed"]["statuses"].values()) == pytest.approx(25, abs=1)
    assert set(cell["loops"]["mixed"]["statuses"]) <= {"200", "429"}  # a busy machine may refuse some
    assert found["settings"]["writes_per_s"] == 100
    assert WRITE not in json.dumps(found)
    assert [row["loop"] for row in rows(tmp_path)] == ["closed", "open", "mixed"]
    text = (tmp_path / "sweep.md").read_text()
    assert "## Writes of the mixed loop" in text
    assert "| mixed |" in text
    assert ask(parse_url(url, KEY), "GET", "/models/books")["live"]["items"] == 0  # what was put is deleted
    assert sweep("--writes", "100") == 1  # without a key


def test_queries_from_a_file_without_relevant_items(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: Pictures
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"history": ["item-3", "item-4"]}\n\n{"history": []}\n')
    assert sweep("--queries", str(file), "--models", str(tmp_path / "nowhere"), "--rate", "100") == 0
    assert {row["recall"] for row in rows(tmp_path)} == {""}
    assert "no query has relevant items" in capsys.readouterr().err
    lines = pictures.lines(tmp_path / "frontier.png")
    (cell,) = document(tmp_path)["cells"]
    assert [height for _, height in lines["m 3, one client"]] == [cell["beam_size"]]
    assert cell["loops"]["open"]["samples"] == 5
    line = next(line for line in (tmp_path / "sweep.md").read_text().splitlines() if line.startswith("| 8 |") and "| open |" in line)
    assert " \\* |" in line  # few samples are marked


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
    ):
        assert sweep("--resume", *options) == 1
        message = capsys.readouterr().err
        assert "error: --resume: got" in message
        assert wanted in message
        assert document(tmp_path) == before
    changed = document(tmp_path)
    changed["identity"]["tree"]["nodes"] += 1  # another model under the same name
    (tmp_path / "sweep.json").write_text(json.dumps(changed))
    assert sweep("--resume") == 1
    assert "with identity another tree" in capsys.readouterr().err
    assert sweep("--seconds", "0.06") == 0  # without --resume it is measured anew


# -- what cannot be measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--url", "https://127.0.0.1"], "--url: got 'https://127.0.0.1', expected http://HOST:PORT of the service itself: TLS"),
        (["--url", "http://127.0.0.1:9"], "GET http://127.0.0.1:9/models/books: no answer"),
        (["--model", "films"], "/models/films: 404, "),
        (["--key", "a-key-that-nobody-knows"], "/models/books: 401, "),
        (["--version", "7"], "--version: got 7, expected a version of books that is loaded: 1"),
        (["--beam", "8,65"], "--beam: got 65, expected 1 to 64, the limit of model books"),
        (["--models", "/nowhere"], "--models names the folder with books/1 on this machine, --queries a file of your own"),
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
        ('{"history": "item-1"}', "line 1: history: got 'item-1', expected a list of item ids"),
        ('{"vector": [1]}\n{"history": []}', "got 'history and vector', expected queries of one kind"),
    ],
)
def test_a_wrong_file_of_queries_says_where(tmp_path: Path, lines: str, wanted: str) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_text(lines)
    with pytest.raises(EspalierError, match=wanted):
        read_queries(file)


def test_an_address_may_have_a_prefix_and_be_ipv6() -> None:
    target = parse_url("http://[::1]:8000/behind/", KEY)
    assert (str(target), target.address, target.prefix) == ("http://[::1]:8000/behind", ("::1", 8000), "/behind")
    assert parse_url("http://service").address == ("service", 80)
