"""From a data frame to a model and back to a folder, by the trainer of the command line."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse as sp

import espalier
from espalier.errors import InvalidConfig, InvalidInput, InvalidQuery, MissingExtra
from espalier.fitting import trainer
from espalier.model import Model

GROUPS, OF_GROUP = 8, 12


def log(users: int = 160) -> pl.DataFrame:
    """Users who stay within a group of items."""
    rng = np.random.default_rng(3)
    rows = [(f"u{u}", f"i{u % GROUPS}-{i}", t) for u in range(users) for t, i in enumerate(rng.permutation(OF_GROUP)[:10].tolist())]
    return pl.DataFrame(rows, ["user", "item", "at"], orient="row")


@pytest.fixture(scope="module")
def fitted() -> Model:
    items = pl.DataFrame({"id": [f"i{g}-{i}" for g in range(GROUPS) for i in range(OF_GROUP)]}).with_columns(
        group=pl.col("id").str.slice(1, 1).cast(pl.Int64)
    )
    return espalier.fit(log(), user="user", item="item", time="at", items=items, optimiser={"steps": 20}, refit=False)


def test_a_table_of_items_is_read_as_data_items_are(tmp_path: Path) -> None:
    ids = [f"i{g}-{i}" for g in range(GROUPS) for i in range(OF_GROUP)]
    (tmp_path / "items.csv").write_text("ID,zip,made\n" + "".join(f"{item},{n:05},2020-01-{n % 28 + 1:02}\n" for n, item in enumerate(ids)))
    split = {"kind": "last"}
    model = espalier.fit(log(), user="user", item="item", time="at", items=tmp_path / "items.csv", kind="neighbours", data={"split": split})
    assert model.bundle.manifest.training["data"]["split"]["kind"] == "last"
    found = model.search([["i0-1"]], m=3, filter={"zip": ["00007"], "made": ["2020-01-08"]}, fields=["zip", "made"])
    assert found["item"].to_list() == [ids[7]]
    assert found.row(0, named=True) | {"zip": "00007", "made": "2020-01-08"} == found.row(0, named=True)


def test_a_fitted_model_finds_what_goes_together(fitted: Model, tmp_path: Path) -> None:
    found = fitted.search([["i0-1", "i0-2"], ["i5-3"]], m=5, exclude_seen=True, fields=["group"])
    assert isinstance(found, pl.DataFrame)  # as the log was
    assert np.mean(found["group"].to_numpy() == np.repeat([0, 5], 5)) > 0.8
    assert not {"i0-1", "i0-2"} & set(found["item"][:5])
    assert fitted.evaluate(log(), user="user", item="item", time="at", ms=[10])["recall"][0] > 0.5
    with pytest.raises(
        InvalidInput, match=r"^data frame: column 'at': got .*, expected times in one unit: .*, or say time=.file. if the rows"
    ):
        fitted.evaluate(log().with_columns(at=pl.when(ROW < 99).then(10**9).otherwise(10**12)), time="at")
    with pytest.raises(InvalidInput, match=r'^device: got .tpu., expected "auto", "cpu" or "cuda"$'):
        espalier.open(fitted.bundle.path, "tpu")  # type: ignore[arg-type]
    fitted.save(tmp_path / "shop/1")
    assert espalier.open(tmp_path / "shop").search([["i5-3"]], m=5)["item"].to_list() == fitted.search([["i5-3"]], m=5)["item"].to_list()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of this test alone: others run beside it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_model_without_a_folder_goes_with_its_files(temporary: Path) -> None:
    q = pl.DataFrame({"q": ["red shoe", "blue shoe", "red hat", "green hat"] * 10, "i": ["a", "b", "c", "d"] * 10})
    model = espalier.fit(q, query="q", item="i")
    assert model.search(["blue shoe"], m=1)["item"].to_list() == ["b"]
    with pytest.raises(InvalidQuery, match="exclude_seen: got true, expected a model of histories"):
        model.search(["blue shoe"], m=1, exclude_seen=True)
    with pytest.raises(InvalidQuery, match="queries: got 'blue shoe', expected a list of queries"):
        model.search("blue shoe", m=1)
    assert [*temporary.iterdir()]
    del model
    assert not [*temporary.iterdir()]
    assert espalier.fit(q, query="q", item="i").bundle.label_counts() is not None, "the bundle keeps its files"
    assert not [*temporary.iterdir()]


def test_what_is_wrong_is_named_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(InvalidInput, match=r"column user: got 'who', expected one of .*: say which with user="):
        espalier.fit(log(), user="who", item="item")
    with pytest.raises(InvalidConfig, match=r"optimiser\.step"):
        espalier.fit(log(), user="user", item="item", optimiser={"step": 3})
    with pytest.raises(InvalidConfig, match=r"^out: got"):
        espalier.fit(log(), user="user", item="item", out=tmp_path / "model")
    with pytest.raises(InvalidInput, match="name: got 'shoes', expected 'shop', as in out, or none"):
        espalier.fit(log(), user="user", item="item", out=tmp_path / "shop/1", name="shoes")
    for minutes in (-1, float("nan"), "5"):
        with pytest.raises(InvalidInput, match="minutes: got"):
            espalier.fit(log(), user="user", item="item", minutes=minutes)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="item: got 1, expected the name of a column"):
        espalier.fit(log(), user="user", item=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^log: "):
        espalier.fit([["a", "b"]], user="user", item="item")
    with pytest.raises(InvalidInput, match="data frame: got 'no rows', expected events"):
        espalier.fit(log().head(0), user="user", item="item")
    assert not [*temporary.iterdir()]


ROW = pl.int_range(pl.len())


def nulls(column: str, is_null: pl.Expr) -> pl.DataFrame:
    """The log, with dates, without some values of a column."""
    return log().with_columns(at=pl.from_epoch("at")).with_columns(pl.when(~is_null).then(column))


def times(values: list[Any]) -> pl.DataFrame:
    """The log with other times, in turn."""
    texts = any(isinstance(value, str) for value in values)
    at = [str(value) if texts else value for value in values]
    return log().with_columns(at=pl.Series([at[row % len(at)] for row in range(len(log()))]))


ITEMS = log().select(id="item").unique(maintain_order=True)
NO_USER = r"row 3 \(from 0\), column user: got null, expected an id in column 'user'"
NO_TIME = r"row 3 \(from 0\), column timestamp: got null, expected an ISO 8601 date and time in column 'at'"


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        (nulls("user", ROW % 10 == 3), {}, rf"^data frame: {NO_USER}; or leave such rows out \(pandas: dropna, polars: drop_nulls\)$"),
        (
            nulls("user", ROW % 10 >= 3),
            {},
            r"^data: got '1,120 of 1,600 rows left out .*', expected at most half: name other columns, or leave such",
        ),
        (log(), {"time": "user"}, r'^data frame: column .user.: got .u0., .*: name another column with time="NAME", or say time="file" if'),
        (log().rename({"user": "who"}), {"user": None}, r'^data frame: column user is missing; .*: say which with user="NAME"$'),
        (log().with_columns(user=ROW), {}, r"^data frame: users: got .*, expected users with 2 events .* say so with user=.NAME."),
        (
            times([1_700_000_000, 1_700_000_000_000]),
            {"time": "at"},
            r"expected times in one unit: convert the others, or say time=.file. if",
        ),
        (
            times(["2026-03-08 07:24", "2026-03-08T07:24Z"]),
            {"time": "at"},
            r"^data frame: column .at.: got \['2026-03-08 07:24', '2026-03-08T07:24Z'\], expected times all with a zone .* say time=.file.",
        ),
        (
            log().with_columns(query=pl.col("item")),
            {"user": None, "kind": None},
            r"^kind is missing; expected xr-linear for texts, or .* since data frame has",
        ),
        (
            nulls("user", ROW % 10 == 3),
            {"user": None, "query": "user", "kind": None},
            r"^data frame: row 3 \(from 0\), column query: got null, expected a text in column 'user'; or leave such rows out",
        ),
        (
            log().with_columns(item=pl.concat_list("item")),
            {"user": None, "query": "user", "kind": None},
            r"^data frame: column item: got 'large_list<item: large_string>', expected strings or integers in column 'item'",
        ),
        (
            log().with_columns(item=0.5),
            {"user": None, "query": "user", "kind": None},
            r"^data frame: column item: got 'double 0\.5', expected strings, or whole numbers below 2\^53, in column 'item': convert",
        ),
        (log(), {"items": ITEMS.vstack(ITEMS)}, r"^items: row 96 \(from 0\), column id: got 'i0-.*', expected each id once; row 0"),
        (log(), {"items": pl.DataFrame({"id": ["x"]})}, r"^items: got \['x'\], expected ids of the log's items, such as 'i0-0'"),
        (log(), {"items": pl.DataFrame({"id": ["i0-0", None]})}, r"^items: row 1 \(from 0\), column id: got null, expected an id"),
        (log(), {"items": ITEMS.head(0)}, "^items: got 'no rows', expected at least one item"),
        (log(), {"device": "tpu"}, '^device: got \'tpu\', expected "auto", "cpu" or "cuda"$'),
        (
            log(),
            {"user": None, "query": "user", "kind": None, "device": "cuda"},
            "^device: got 'cuda', expected auto or cpu: linear scorers",
        ),
        (log(), {"out": Path("Model/1")}, "^out: got 'Model', expected a model name"),
        (
            log().with_columns(user=0.5),
            {"user": None},
            r"^data frame: column user: got 'double 0\.5', expected strings, or whole numbers below 2\^53, in column 'user': convert",
        ),
        (
            log().with_columns(user=0.5),
            {},
            r"^data frame: column user: got 'double 0\.5', expected strings, or whole numbers below 2\^53, in column 'user': convert",
        ),
        (log(), {"query": "user"}, "^user, query: got \"'user' and 'user'\", expected one of them: histories have users"),
        (
            log(),
            {"items": pl.DataFrame({"no": ["i0-1", "i0-1"]})},
            r"^items: got \['no'\], expected a column of ids, `id` or with the name of the log's: say which with item=.NAME",
        ),
    ],
)
def test_errors_of_a_frame_name_its_rows_and_what_python_says(data: pl.DataFrame, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        espalier.fit(data, **{"user": "user", "item": "item", "kind": "neighbours"} | columns)
    assert not re.search(r"--|data\.(format|items)|espalier-|parquet", str(refused.value)), "words of commands, or names of temporary files"


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("who,what\na,b\n", {}, r"^log.csv: first line: got .*: say which with user=.NAME. and item=.NAME.; user=.0. if it is an event$"),
        (
            "user,item\n" + "a,b\na,c\na,\n" * 9,
            {},
            r"^log.csv: line 4, column item: got '', expected an id in column 'item'; or leave such",
        ),
        (
            "user,item\n" + "a,b\n" * 1000 + "a\n" * 99,
            {},
            r"^log.csv: line 1002: got 'a', expected 2 fields, not 1; or leave such rows out",
        ),
    ],
)
def test_errors_of_a_file_name_its_lines_and_what_python_says(tmp_path: Path, text: str, columns: dict[str, Any], message: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(InvalidInput, match=message) as refused:
        espalier.fit(tmp_path / "log.csv", **columns)
    assert not re.search(r"--|data\.format", str(refused.value))


def test_what_runs_beside_a_fit_keeps_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two fits and a command, all of which have begun before one of them reads."""
    together, read = threading.Barrier(3), trainer("new_configuration").read_interactions

    def read_together(log: Path, *arguments: Any, **options: Any) -> Any:
        together.wait(60)
        return read(log, *arguments, **options)

    monkeypatch.setattr("training.new_configuration.read_interactions", read_together)
    rows = [f"u{row % 40},i{row % 30},{'2026-03-08' if row == 1300 else row}" for row in range(1600)]
    (tmp_path / "log.csv").write_text("user,item,time\n" + "\n".join(rows) + "\n")

    def fit(row: int) -> None:
        data = log().with_columns(at=pl.when(row == ROW).then(pl.lit("2026-03-08")).otherwise(pl.col("at").cast(pl.String)))
        with pytest.raises(InvalidConfig, match="no such key"):  # after the log was read
            espalier.fit(data, user="user", item="item", time="at", kind="neighbours", nothing=1)

    def command() -> None:
        write = trainer("new_configuration").write_configuration
        write(tmp_path / "log.csv", tmp_path / "new.toml", True, None, dict.fromkeys(("user", "item", "time", "query")))

    with ThreadPoolExecutor() as pool:
        for running in [pool.submit(fit, 1100), pool.submit(fit, 1200), pool.submit(command)]:
            running.result()
    date = "column timestamp: got '2026-03-08', expected an integer"
    other_type = 'or data.format.timestamp_type = "datetime" for dates and times as ISO 8601'
    assert {record.getMessage() for record in caplog.records if record.getMessage().startswith("left out")} == {
        f"left out: data frame: row 1100 (from 0), {date} as in the first rows in column 'at'",
        f"left out: data frame: row 1200 (from 0), {date} as in the first rows in column 'at'",
        f"left out: log.csv: line 1302, {date}, {other_type}, in column 'time'",
    }


@pytest.mark.parametrize(("column", "message"), [("user", NO_USER), ("at", NO_TIME)])
def test_few_rows_that_cannot_be_read_are_left_out_with_a_warning(column: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    model = espalier.fit(nulls(column, ROW % 25 == 3), user="user", item="item", time="at", kind="neighbours")
    assert model.bundle.manifest.data["events"] == 1536
    warnings = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert re.match(f"left out: data frame: {message}$", warnings[0])
    assert re.match(r"rows left out: 64 \(.*: 64\); rows read: 1536$", warnings[1])


def test_users_that_are_whole_floats_are_integers() -> None:
    data = log().with_columns(
        user=pl.col("user").str.slice(1).cast(pl.Float64), item=pl.col("item").str.replace("i(.)-", "${1}0").cast(pl.Float64)
    )
    items = data.select(id="item").unique().with_columns(group=pl.col("id") // 100)
    model = espalier.fit(data, item="item", user="user", kind="neighbours", items=items)
    found = model.search([["501", "502"]], m=5, fields=["group"])
    assert set(found["item"]) <= {f"{item:.0f}" for item in data["item"]}
    assert found["group"].null_count() == 0


def test_a_folder_of_another_model_is_no_obstacle_and_time_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model/1").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        model = espalier.fit(log(60), user="user", item="item", time="none", minutes=1e-6, seed=3)
    assert model.bundle.manifest.training["seed"] == 3
    (steps,) = [record.getMessage() for record in caplog.records if re.match(r"\d+ steps in", record.getMessage())]
    assert steps.startswith("0 steps")
    for order in ("none", "file"):
        assert espalier.fit(log(60), user="user", item="item", time=order, kind="neighbours").search([["i0-1"]], m=2).height == 2
    split = {"split": {"kind": "last"}}
    model = espalier.fit(log(60), user="user", item="item", kind="neighbours", minutes=1e-6, name="shop", data=split)
    assert model.bundle.manifest.data["learned_validation"], "a model without steps learns from the validation events, too"
    assert model.bundle.manifest.name == "shop"


def test_a_trainer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.fitting.sibling", lambda _: "no_such_trainer")
    with pytest.raises(MissingExtra, match=r"pip install 'espalier\[train\]'"):
        trainer("versions")


def test_an_estimator_learns_labels_of_sparse_rows() -> None:
    rng = np.random.default_rng(1)
    dense = rng.random((300, 40)) * (rng.random((300, 40)) < 0.2)
    dense = dense[(dense[:, :20] > 0.4).any(axis=1)]
    X, Y = sp.csr_matrix(dense), sp.csr_matrix((dense[:, :20] > 0.4).astype(np.float32))
    model = espalier.XRLinear(seed=2).fit(X, Y)
    assert model.model_ is not None
    assert model.model_.bundle.manifest.data["queries"] == X.shape[0], "of all points"
    found = model.predict(X, m=3)
    assert found.shape == (X.shape[0], 3)
    assert np.mean([Y[b, found[b, 0]] > 0 for b in range(len(found))]) > 0.9
    assert model.predict(dense, m=3).tolist() == found.tolist()
    twice = sp.csr_matrix((np.append(X.data / 2, X.data / 2), np.append(X.indices, X.indices), X.indptr * 2), X.shape)
    twice.indices = np.concatenate([np.tile(X.indices[b:e], 2) for b, e in zip(X.indptr, X.indptr[1:], strict=False)])
    twice.data = np.concatenate([np.tile(X.data[b:e] / 2, 2) for b, e in zip(X.indptr, X.indptr[1:], strict=False)])
    assert model.predict(twice, m=3).tolist() == found.tolist(), "entries that stand there twice are added up"
    pairs = [(row.nonzero()[0].tolist(), row[row > 0].tolist()) for row in dense[:9]]
    assert model.predict(pairs, m=3).tolist() == found[:9].tolist()
    with pytest.raises(InvalidInput, match=r"queries: got 'float64\[282, 39\]', expected a matrix of numbers, \[B, 40\]"):
        model.predict(dense[:, 1:])
    scores = model.decision_function(X, m=3)
    assert scores.shape == Y.shape
    np.testing.assert_array_equal(np.asarray(scores[np.arange(len(found)), found[:, 0]]).ravel(), scores.max(axis=1).toarray().ravel())
    assert espalier.XRLinear(**model.get_params()).fit(X, Y).predict(X, m=3).tolist() == found.tolist()
    assert model.set_params(seed=5, test_share=0.5).get_params() == {"unit": True, "test_share": 0.5, "seed": 5}
    halved = espalier.XRLinear(test_share=0.5).fit(X, Y).model_
    assert halved is not None
    assert halved.bundle.manifest.data["queries"] == X.shape[0] - round(X.shape[0] / 2)
    with pytest.raises(InvalidInput, match=r"Y: got '3 rows'"):
        model.fit(X, Y[:3])
    with pytest.raises(InvalidInput, match="not fitted"):
        espalier.XRLinear().predict(X)
