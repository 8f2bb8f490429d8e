"""`espalier predict`: whom it answers, in one process and in several, what it goes on from, and what it says of wrong files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import espalier
from espalier.errors import InvalidQuery
from espalier.file_lock import file_lock
from espalier.model import Model
from espalier.queries import HistoryKind
from espalier_cli import predict as module
from espalier_cli.embed import main as embed_main
from espalier_cli.predict import main as predict
from tests.cli.conftest import HISTORIES, SAMPLE


def run(*arguments: object) -> int:
    return predict([str(argument) for argument in arguments], "espalier predict")


@pytest.fixture
def quick(queries: Path, tmp_path: Path) -> list[object]:
    """Options: the sample answers the queries in this process."""
    return ["--model", SAMPLE, "--queries", queries, "--out", tmp_path / "top.parquet", "--workers", 1]


def test_a_file_is_answered_as_a_model_answers(queries: Path, tmp_path: Path) -> None:
    out = tmp_path / "top.parquet"
    assert run("--model", SAMPLE, "--queries", queries, "--out", out, "--m", 4, "--exclude-seen", "--fields", "title") == 0
    found = pq.read_table(out)
    assert found.column_names == ["user", "most", "only", "items", "scores", "title"]
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    asked = model.search(HISTORIES, m=4, exclude_seen=True, fields=["title"]).to_pylist()
    for b, row in enumerate(found.to_pylist()):
        own = [one for one in asked if one["query"] == b]
        assert row["items"] == [one["item"] for one in own]
        assert row["scores"] == [one["score"] for one in own]
        assert row["title"] == [one["title"] for one in own]
    assert {file.name for file in tmp_path.iterdir()} == {"users.parquet", "top.parquet"}


def test_a_log_is_answered_for_each_of_its_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log of a spreadsheet, read as training reads it: users are texts, and times say the order."""
    log, out = tmp_path / "log.csv", tmp_path / "top.parquet"
    events = [("007", "nginx", "31.12.2024 23:59"), ("7", "perl", "03.03.2024 08:00"), ("007", "postgresql", "01.02.2024 09:00")]
    text = "who;what;when;price\n" + "".join(f"{user};{item};{at};1,5\n" for user, item, at in events)
    log.write_text(text, "utf-16")
    asked = ["--model", SAMPLE, "--queries", log, "--out", out, "--workers", 1, "--m", 3]
    named, model = ["--user", "who", "--item", "what", "--time"], espalier.open(SAMPLE, "cpu", frame="arrow")
    for time, histories in (("when", (["postgresql", "nginx"], ["perl"])), ("file", (["nginx", "postgresql"], ["perl"]))):
        assert run(*asked, *named, time) == 0
        rows = pq.read_table(out).to_pylist()
        assert [row["who"] for row in rows] == ["007", "7"]
        assert [row["items"] for row in rows] == [model.search([own], m=3).column("item").to_pylist() for own in histories]
    log.write_text(text.replace("who;what", "User_ID;item"))
    assert run(*asked, "--user", 0, "--item", 1) == 1  # the line of names is no event
    assert "column user: got '0', expected one of ['User_ID', 'item', 'when', 'price']: say which with --user" in capsys.readouterr().err
    log.write_text("who,what\na,1\nb,2\n")
    assert run(*asked, *named[:4]) == 1
    assert "--item: got 'what', expected ids that the model knows" in capsys.readouterr().err


def test_columns_of_a_log_without_names_are_named_by_their_positions(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("007\tperl\t20\n7\tnginx\t1\n007\tlibc6\t10\nNA\tperl\t5\n")
    asked = ["--model", SAMPLE, "--queries", tmp_path / "log.tsv", "--out", tmp_path / "top.parquet", "--workers", 1, "--m", 3]
    assert run(*asked, "--user", 0, "--item", 1, "--time", 2) == 0
    by_user = {row["0"]: row["items"] for row in pq.read_table(tmp_path / "top.parquet").to_pylist()}
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    assert by_user["007"] == model.search([["libc6", "perl"]], m=3).column("item").to_pylist()
    assert by_user.keys() == {"007", "7", "NA"}


def test_times_in_several_units_are_refused_unless_the_file_is_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("user,item,at\nu,nginx,1700000000000\nu,perl,1700000001\nv,libc6,1700000002\n")
    asked = ["--model", SAMPLE, "--queries", tmp_path / "log.csv", "--out", tmp_path / "top.parquet", "--workers", 1, "--user", "user"]
    assert run(*asked, "--time", "at") == 1
    examples = "'1700000001 (seconds), 1700000000000 (milliseconds)'"
    expected = f"log.csv: column 'at': got {examples}, expected times in one unit: convert the others, or say --time file"
    assert f"error: {expected}" in capsys.readouterr().err
    assert run(*asked, "--time", "file") == 0


def test_every_block_gets_its_own_numbers_and_filters(
    queries: Path, quick: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the file and of the engine begin at other rows."""
    monkeypatch.setattr(module, "BLOCK", 300)
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    ids = model.bundle.items.ids_of(np.arange(700))
    sections = [("libs", "perl", "python")[i % 3] for i in range(700)]
    only = [json.dumps({"section": [section]}) for section in sections]
    pq.write_table(pa.table({"history": [[one] for one in ids], "most": [1 + i % 7 for i in range(700)], "only": only}), queries)
    asked = [*quick, "--m-column", "most", "--filter-column", "only", "--fields", "section"]
    assert run(*asked, "--exclude-filter", '{"section": ["perl"]}') == 0
    found = pq.read_table(tmp_path / "top.parquet")
    assert found.column_names == ["items", "scores", "section"]
    for i, row in enumerate(found.to_pylist()):
        assert row["section"] == ([] if sections[i] == "perl" else [sections[i]] * (1 + i % 7)), i


def test_a_filter_of_all_queries_and_one_of_its_own_both_count(queries: Path, quick: list[object], tmp_path: Path) -> None:
    only = pa.array([json.dumps({"debtags": ["role::program"]}), None], pa.string_view())  # any kind of text
    pq.write_table(pa.table({"history": [["perl"], ["perl"]], "only": only}), queries)
    asked = [*quick, "--m", 10, "--filter-column", "only", "--filter", '{"section": ["perl", "utils"]}']
    assert run(*asked, "--fields", "section", "debtags") == 0
    own, other = pq.read_table(tmp_path / "top.parquet").to_pylist()
    assert {*own["section"], *other["section"]} <= {"perl", "utils"}
    assert own["items"]
    assert all("role::program" in tags for tags in own["debtags"])
    assert not all("role::program" in tags for tags in other["debtags"])


def test_a_history_that_is_longer_than_the_model_reads_is_left_out_as_a_whole(queries: Path, quick: list[object], tmp_path: Path) -> None:
    model = espalier.open(SAMPLE, "cpu", frame="arrow")
    kind = model.bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    found = model.search([["perl"]], m=20).column("item").to_pylist()
    long = [*found, *(["perl"] * (kind.length + 3))]
    answer = model.search([long], m=20, exclude_seen=True).column("item").to_pylist()
    assert len(answer) == 20
    assert not {*found, "perl"} & {*answer}
    pq.write_table(pa.table({"history": [long]}), queries)
    assert run(*quick, "--exclude-seen", "--m", 20) == 0
    assert pq.read_table(tmp_path / "top.parquet").to_pylist()[0]["items"] == answer


def test_no_query_gives_a_file_with_the_same_columns(queries: Path, quick: list[object], tmp_path: Path) -> None:
    pq.write_table(pq.read_table(queries).slice(0, 0), queries)
    assert run(*quick, "--fields", "title") == 0
    table = pq.read_table(tmp_path / "top.parquet")
    assert (table.column_names, len(table)) == (["user", "most", "only", "items", "scores", "title"], 0)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A run that is killed before it joins what it has answered."""

    def killed(*arguments: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "_join_blocks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run(*arguments)

    return killed


def test_parts_of_another_input_or_of_other_options_are_not_taken(
    queries: Path, quick: list[object], tmp_path: Path, interrupted: Callable[..., None]
) -> None:
    interrupted(*quick, "--m", 2)
    assert run(*quick, "--m", 3) == 0
    assert [len(row["items"]) for row in pq.read_table(tmp_path / "top.parquet").to_pylist()] == [3] * 5
    interrupted(*quick, "--m", 2)
    pq.write_table(pq.read_table(queries).slice(1), queries)
    assert run(*quick, "--m", 2) == 0
    assert pq.read_table(tmp_path / "top.parquet").column("user").to_pylist() == list("bcde")


def test_parts_of_a_folder_are_not_taken_when_one_of_its_files_has_changed(tmp_path: Path, interrupted: Callable[..., None]) -> None:
    (tmp_path / "log").mkdir()
    file, out = tmp_path / "log/1.parquet", tmp_path / "top.parquet"
    asked = ["--model", SAMPLE, "--queries", tmp_path / "log", "--user", "user", "--out", out, "--workers", 1, "--m", 1]
    pq.write_table(pa.table({"user": ["a"], "item": ["nginx"]}), file)
    interrupted(*asked)
    with file.open("wb") as same:  # as a copy writes it: the folder keeps its time
        pq.write_table(pa.table({"user": ["a", "b"], "item": ["perl", "nginx"]}), same)
    assert run(*asked) == 0
    assert pq.read_table(out).column("user").to_pylist() == ["a", "b"]


def test_a_killed_run_goes_on_with_its_parts(
    quick: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: Callable[..., None]
) -> None:
    monkeypatch.setattr(module, "BLOCK", 2)
    interrupted(*quick, "--m", 3)
    parts = tmp_path / ".top.parquet.parts"
    assert len([*parts.glob("*.parquet")]) == 3
    answers = {"items": [["a"], ["b"]], "scores": pa.array([[1.0], [1.0]], pa.list_(pa.float32()))}
    marked = pa.table({"user": ["kept", "kept"], "most": [1, 2], "only": [None, "x"]} | answers)
    pq.write_table(marked, parts / "00000000.parquet")
    (parts / "00000001.parquet").unlink()
    assert run(*quick, "--m", 3) == 0
    found = pq.read_table(tmp_path / "top.parquet")
    assert found.column("user").to_pylist() == ["kept", "kept", "c", "d", "e"]  # the first part was not asked again, the second was
    assert not parts.exists()


def test_two_runs_do_not_write_one_file(quick: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".top.parquet.parts").mkdir()
    with file_lock(tmp_path / ".top.parquet.parts"):
        assert run(*quick) == 1
    assert "expected a file that no other run is writing now" in capsys.readouterr().err
    assert not (tmp_path / "top.parquet").exists()
    assert run(*quick) == 0


def test_few_blocks_wait_at_a_time(quick: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, most = 0, 0

    class Pool(module._ThisProcess):
        """Answers when it is asked for the result."""

        def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Any:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)

            class Later:
                def result(self) -> Any:
                    nonlocal waiting
                    waiting -= 1
                    return function(*arguments)

            return Later()

    def executor(workers: int, job: module.Job, model: Any) -> Any:
        monkeypatch.setattr(module, "_model", model)
        return nullcontext(Pool())

    monkeypatch.setattr(module, "_executor", executor)
    monkeypatch.setattr(module, "BLOCK", 1)
    for workers, waiting_at_most in ((1, 1), (2, 2 * module.AHEAD + 1)):
        most = 0
        assert run(*quick, "--workers", workers) == 0
        assert most == waiting_at_most


def test_several_processes_answer_as_one_does(
    queries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And they say what is wrong with a query."""
    monkeypatch.setattr(module, "BLOCK", 2)
    asked = ["--model", SAMPLE, "--queries", queries, "--fields", "title", "--out"]
    for workers in (1, 2):
        assert run(*asked, tmp_path / f"by-{workers}.parquet", "--workers", workers) == 0
    assert pq.read_table(tmp_path / "by-1.parquet") == pq.read_table(tmp_path / "by-2.parquet")
    pq.write_table(pa.table({"history": [*HISTORIES, None]}), queries)
    assert run(*asked, tmp_path / "none.parquet", "--workers", 2) == 1
    assert "error: history[5]: got null, expected a history" in capsys.readouterr().err
    assert not (tmp_path / "none.parquet").exists()


def test_what_is_wrong_is_said_with_its_row_in_the_file(
    queries: Path, quick: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a column of categories Arrow reads smaller blocks at the end of a row group."""
    monkeypatch.setattr(module, "BLOCK", 4)
    columns = {"kind": pa.array(["a", "b"] * 5).dictionary_encode(), "history": pa.array([["perl"]] * 10)}
    columns |= {"only": pa.array([None] * 10, pa.string()), "most": pa.array([1] * 10, pa.uint64())}
    for column, value, said in (
        ("history", None, "history[7]: got null, expected a history"),
        ("only", "{", "only[7]: got '{', expected JSON"),
        ("only", '{"nope": ["x"]}', "only[7]: filter.nope: got 'nope', expected"),
        ("most", 0, "most[7]: got 0, expected 1 to 1000"),
        ("most", 2**64 - 1, "most[7]: got 18446744073709551615, expected 1 to 1000"),
    ):
        cells = columns[column].to_pylist()
        wrong = pa.array([*cells[:7], value, *cells[8:]], columns[column].type)
        pq.write_table(pa.table(columns | {column: wrong}), queries, row_group_size=3)
        assert run(*quick, "--filter-column", "only", "--m-column", "most") == 1
        assert f"error: {said}" in capsys.readouterr().err
    repeated = pa.Table.from_arrays([columns["history"], columns["most"], columns["most"]], ["history", "user", "user"])
    pq.write_table(repeated, queries)
    assert run(*quick) == 1
    assert "error: --queries: got 'user', expected each column once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--column", "nothing"], "error: --column: got 'nothing', expected one of the columns user, history, most, only"),
        (["--filter", "{"], "error: --filter: got '{', expected JSON"),
        (["--filter", '{"colour": ["red"]}'], "error: filter.colour: got"),
        (["--m", "1000000"], "error: m: got 1000000, expected 1 to 1000"),
        (["--beam", "0"], "error: beam_size: got 0, expected 1 to"),
        (["--m-column", "user"], "error: --m-column: got 'string', expected a column of whole numbers"),
        (["--filter-column", "history"], "error: --filter-column: got 'list<element: string>'"),
        (
            ["--filter-column", "only", "--filter", '{"section": ["games"]}'],
            "error: only[1]: got 'section', expected columns that --filter",
        ),
        (["--user", "user", "--column", "user"], "error: --column: got 'user', expected another name"),
        (["--user", "user", "--m-column", "most"], "error: --m-column: got 'most', expected no such option with --user"),
        (["--user", "user", "--item", "user"], "error: --item: got 'user', expected another column"),
        (["--time", "at"], "error: --time: got 'at', expected no such option without --user"),
        (["--m", "3", "--m-column", "most"], "error: --m-column: got 'most', expected no such option with --m"),
        (["--column", "most"], "error: --column: got 'most: int64', expected a column of lists of ids"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    quick: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(*quick, *arguments) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "top.parquet").exists()


def test_no_file_that_is_read_or_written_otherwise_is_replaced(queries: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, link, new = queries.read_bytes(), tmp_path / "link.parquet", tmp_path / "new.parquet"
    link.symlink_to(queries)
    embed = partial(embed_main, prog="espalier embed")
    asked = ["--model", str(SAMPLE), "--queries", str(queries)]
    os.mkfifo(tmp_path / "pipe")
    for out in (link, tmp_path / "pipe"):
        assert run("--model", SAMPLE, "--queries", queries, "--out", out, "--workers", 1) == 1
    assert (tmp_path / "pipe").is_fifo()
    assert embed([*asked, "--states", str(link)]) == 1
    assert embed([*asked, "--items", str(new), "--states", str(new)]) == 1
    said = capsys.readouterr().err
    assert [line.partition(":")[2].partition(":")[0].strip() for line in said.splitlines()] == ["--out", "--out", "--states", "--states"]
    assert (queries.read_bytes(), new.exists()) == (content, False)


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of features."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("models") / "labels" / "1"
    espalier.XRLinear().fit(rng.random((40, 5)), rng.random((40, 3)) < 0.5).save(folder)
    return folder


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([{"indices": [0], "values": [1.0]}] * 9 + [{"indices": [99], "values": [1.0]}], "features[9].indices: got 99"),
        (["a", "b"], "--column: got 'features: string', expected a column of structs of indices"),
        ([{"indices": [0.5], "values": [1.0]}], "--column: got 'features: struct<indices: list<element: double>"),
        (
            [{"indices": [0], "values": [1.0]}, {"indices": None, "values": None}],
            "features[1]: got (None, None), expected a features query",
        ),
        ([{"indices": [0, None], "values": [1.0, 2.0]}], "features[0]: got ([0, None], [1.0, 2.0]), expected a features query"),
    ],
)
def test_queries_of_features_are_checked(
    queries: Path,
    quick: list[object],
    labels: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cells: Any,
    said: str,
) -> None:
    monkeypatch.setattr(module, "BLOCK", 4)
    pq.write_table(pa.table({"features": cells}), queries)
    assert run(*quick, "--model", labels) == 1
    assert f"error: {said}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def odd_names() -> Model:
    """Of items one of which is called None, with fields called as the answers are."""
    ids = ["None", *(f"i{k}" for k in range(7))]
    log = pa.table({"user": [f"u{k % 20}" for k in range(80)], "item": [ids[k // 10] for k in range(80)]})
    items = pa.table({"id": ids, "score": range(8), "items": range(8)})
    return espalier.fit(log, user="user", item="item", items=items, kind="neighbours")


def test_a_null_among_the_items_of_a_history_is_no_item(odd_names: Model) -> None:
    assert "None" in odd_names.search([[None]], m=8, exclude_seen=True)["item"].to_pylist()


def test_fields_called_as_the_answers_are_refused(
    odd_names: Model, quick: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidQuery, match=r"fields: got 'score', expected no columns query, rank, item, score"):
        odd_names.search([["i1"]], fields=["items", "score"])
    odd_names.save(tmp_path / "shop/1")
    asked = [*quick, "--model", tmp_path / "shop", "--fields"]
    assert run(*asked, "items") == 1
    assert "error: --fields: got 'items', expected no columns items, scores" in capsys.readouterr().err
    assert run(*asked, "score") == 0
    assert pq.read_table(tmp_path / "top.parquet").column_names[-3:] == ["items", "scores", "score"]
