"""Item tables, query logs and matrices that somebody else made are read, or refused by name; relevance of labels as data."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csc_array, csr_array, save_npz

from espalier.errors import EspalierError, InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.live.fields import Columns
from espalier.logs.log_values import BadRows
from espalier.masks.filters import ItemFilters
from espalier.text.sparse_rows import MAX_FEATURES
from training import __main__ as commands
from training.data import item_content as content_module
from training.data import query_logs
from training.data.csr import read_by_columns, read_by_rows
from training.data.item_content import ItemContent, item_content
from training.data.item_tables import item_table
from training.data.query_logs import labelled, read_log
from training.data.relevance import LabelRelevance, Smoothing, distribution, inverse_propensities, is_graded, scale_of
from training.linear import prepare as preparing
from training.linear.prepare import prepare, read_points
from training.specification.deep import ContentConfig
from training.specification.linear import RELEVANCE_OPTIONS, LinearConfig, LogData, NpzData
from training.specification.log_format import TextTable
from training.specification.models import read_config

TEXT = '\ufeffid,title,year,price,live\r\n1,"Toy, ""Story""",1995,2.5,True\r\n02,Heat,,3,FALSE\r\n'
COLUMNS: dict[str, list[Any]] = {
    "id": ["1", "02"],
    "title": ['Toy, "Story"', "Heat"],
    "year": [1995, None],
    "price": [2.5, 3.0],
    "live": [True, False],
}


@pytest.mark.parametrize("name", ["items.csv", "items.csv.gz", "items.tsv", "items.parquet"])
def test_a_table_of_any_format_has_the_same_columns(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(TEXT.encode()))
    elif name.endswith(".csv"):
        file.write_text(TEXT)
    elif name.endswith(".tsv"):
        file.write_text('id\ttitle\tyear\tprice\tlive\n1\t"Toy, ""Story"""\t1995\t2.5\ttrue\n02\tHeat\t\t3\tfalse\n')
    else:
        pq.write_table(pa.table(COLUMNS), file)
    table = item_table(file, pa.array(["02", "1", "3"]), TextTable()).to_table()
    assert [str(kind) for kind in table.schema.types[2:]] == ["int64", "double", "bool"]
    assert table.column("id").to_pylist() == ["02", "1", "3"]
    for column, (first, second) in COLUMNS.items():
        assert column == "id" or table.column(column).to_pylist() == [second, first, None]


def test_text_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    for text, expected in (
        ("name,year\na,1\n", "a column named 'id'"),
        ("", "a column named 'id'"),
        ("id,a\n1,2,3\n", r"items.csv: line 2: got '1,2,3', expected 2 fields, not 3; data\.items_format\.bad_rows = .skip. leaves"),
        ("id;a\n1;2\n", "a column named 'id', or data.items_id = .*; .* data.items_format.separator"),
    ):
        file.write_text(text)
        with pytest.raises((InvalidConfig, InvalidData), match=expected):
            item_table(file, pa.array(["1"]), TextTable())


def test_columns_of_codes_and_of_numbers_that_are_too_large_stay_text(tmp_path: Path) -> None:
    file = tmp_path / "items.csv"
    file.write_text("id,postcode,long,mixed,small,none\n1,01067,9223372036854775808,1,-1e-3,\n2,80331,2,x,2.50,\n")
    table = item_table(file, pa.array(["1", "2"]), TextTable()).to_table()
    found = {name: table.column(name).to_pylist() for name in table.column_names[1:]}
    assert found == {
        "postcode": ["01067", "80331"],
        "long": ["9223372036854775808", "2"],
        "mixed": ["1", "x"],
        "small": [-0.001, 2.5],
        "none": [None, None],
    }


@pytest.mark.parametrize("name", ["items.csv", "items.parquet"])
def test_rows_that_match_are_counted_and_few_are_warned_of(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    file, ids = tmp_path / name, ["a1", "a2", "b3"]
    if name.endswith(".csv"):
        file.write_text("id\n" + "\n".join(ids) + "\n")
    else:
        pq.write_table(pa.table({"id": ids}), file)
    with caplog.at_level("INFO"):
        item_table(file, pa.array(["a1", "a2"]), TextTable())
        item_table(file, pa.array(["1", "2", "b3"]), TextTable())
    matched, few = caplog.records
    assert (matched.levelname, matched.message) == ("INFO", f"{name}: rows for 2 of 2 items; 1 unused rows")
    assert few.levelname == "WARNING"
    assert (
        few.message == f"WARNING: {name}: rows for 1 of 3 items; 2 unused rows. Item '1' has none, for example; ids there are such as 'a1'"
    )


def test_values_of_parquet_that_json_lacks_become_values_that_it_has(tmp_path: Path) -> None:
    nanoseconds = pa.array([1_735_689_600_000_000_003, None], pa.timestamp("ns", "Europe/Berlin"))
    columns: dict[str, tuple[pa.Array, list[Any]]] = {
        "price": (pa.array([Decimal("19.99"), None]), [19.99, None]),
        "weight": (pa.array([0.1, None], pa.float32()), [0.1, None]),
        "shelf": (pa.array(["a", None]).dictionary_encode(), ["a", None]),
        "tags": (pa.ListArray.from_arrays([0, 2, 2], pa.array(["x", "y"]).dictionary_encode()), [["x", "y"], []]),
        "prices": (pa.array([None, [Decimal("1.5"), None]]), [None, [1.5, None]]),
        "view": (pa.array(["v", None]).cast(pa.string_view()), ["v", None]),
        "day": (pa.array([date(2025, 1, 31), None]), ["2025-01-31", None]),
        "since": (nanoseconds, ["2025-01-01T00:00:00.000000003Z", None]),
        "local": (pa.array([datetime(2025, 1, 1, 12, 30), None]), ["2025-01-01T12:30:00", None]),
        "opens": (pa.array([time(8, 30), None]), ["08:30:00", None]),
    }
    pq.write_table(pa.table({"id": ["b", "a"]} | {name: values for name, (values, _) in columns.items()}), tmp_path / "items.parquet")
    items = item_table(tmp_path / "items.parquet", pa.array(["b", "a"]), TextTable())
    for name, (_, expected) in columns.items():
        assert items.values(name, np.arange(2)) == expected
    written = Columns(items).typed({name: expected[0] for name, (_, expected) in columns.items() if name != "prices"})
    assert written == {name: expected[0] for name, (_, expected) in columns.items() if name != "prices"}
    assert ItemFilters([], items, 0).fields == ("id", *columns)


@pytest.mark.parametrize(("name", "row"), [("items.csv", "line 3"), ("items.parquet", r"row 1 \(from 0\)")])
def test_rows_without_an_id_are_refused(tmp_path: Path, name: str, row: str) -> None:
    file = tmp_path / name
    if name.endswith(".csv"):
        file.write_text("id,title\na,A\n,B\nb,B\n")
    else:
        pq.write_table(pa.table({"id": ["a", None, "b"]}), file)
    with pytest.raises(
        InvalidData, match=rf"{name}: {row}, column id: got (''|null), expected an id in column 'id'; 1 of 3 rows have none"
    ):
        item_table(file, pa.array(["a"]), TextTable())


# -- content ------------------------------------------------------------------------------------------------------------


def table(**columns: Any) -> ItemTable:
    count = len(next(iter(columns.values()), []))
    return ItemTable.build(pa.table({"id": [f"i{row}" for row in range(count or 3)], **columns}))


def content_of(items: ItemTable, **config: Any) -> ItemContent:
    content = item_content(items, ContentConfig(**({"columns": "auto"} | config)))
    assert content is not None
    return content


def names(items: ItemTable, **config: Any) -> list[str]:
    content = item_content(items, ContentConfig(**({"columns": "auto"} | config)))
    return [] if content is None else [column.name for column in content.info.columns]


def test_auto_takes_what_it_can_use() -> None:
    items = table(
        title=["a", "a", "b"],
        tags=[["x"], ["x"], None],
        year=[1, 2, None],
        same=[4, 4, 4],
        when=pa.array([0, 1, 2], pa.timestamp("s")),
        counts=[[1], [2], []],
        infinite=[np.inf, 1.0, 2.0],
    )
    assert names(items) == ["title", "tags", "year", "infinite"]
    assert names(items, columns=("year",)) == ["year"]
    assert names(items, columns=()) == []


def test_nothing_shared_is_no_content() -> None:
    assert names(table()) == []
    assert names(table(title=["a", "b", "c"])) == []


def test_whole_numbers_that_no_float_holds_are_rounded() -> None:
    """Such as times in nanoseconds."""
    content = content_of(table(when=[2**60 + 1, 2**60 + 2**40, 2**60 + 2**41]))
    assert content.rows.values.reshape(3, 2)[:, 1].tolist() == pytest.approx([-1.2247, 0, 1.2247], abs=1e-3)


@pytest.mark.parametrize("column", ["id", "nothing", "when"])
def test_a_column_that_cannot_be_used_is_named(column: str) -> None:
    items = table(title=["a", "a", "b"], when=pa.array([0, 1, 2], pa.timestamp("s")))
    with pytest.raises(InvalidConfig, match=rf"content\.columns: got '{column}'"):
        item_content(items, ContentConfig(columns=(column,)))


@pytest.mark.parametrize(
    "column", [["only1", "only2", "only3", "only4"], ["the same"] * 4, ["!!!"] * 4, [None] * 3 + ["a"], [[], [], ["x"], []], [["x"]] * 4]
)
def test_a_column_without_a_feature_is_refused_by_name_and_left_out_by_auto(column: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    items = table(title=["a", "a", "b", "b"], other=column)
    with pytest.raises(InvalidConfig, match=r"content\.columns: got 'other', expected a column with a value or word that at least 2 items"):
        item_content(items, ContentConfig(columns=("title", "other")))
    assert content_of(items).known_I.all()
    assert "distinguishes items" not in caplog.text
    for lone in (table(other=column), table(other=[4] * 4)):
        caplog.clear()
        assert item_content(lone, ContentConfig(columns="auto")) is None
        assert "no column of the item table distinguishes items" in caplog.text
    caplog.clear()
    assert item_content(items, ContentConfig()) is None
    assert "distinguishes items" not in caplog.text


def test_features_have_a_limit_values_before_words() -> None:
    items = table(tags=[[f"t{i % 20}" for i in range(row, row + 9)] for row in range(60)], title=["one two three four five six"] * 60)
    small, large = (content_of(items, features=features) for features in (16, 64))
    assert (small.info.features, small.info.values, small.info.blocks) == (16, 15, ())
    assert large.info.values == 21  # twenty tags, and the title as a whole
    assert (large.rows.width, small.rows.width) == (large.info.features, 16)


def test_blocks_of_items_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    items = table(title=[f"w{row % 7} v{row % 3}" for row in range(50)], price=[float(row) for row in range(50)])
    whole = content_of(items)
    monkeypatch.setattr(content_module, "BLOCK", 3)
    parts = content_of(items)
    for name in ("indptr", "indices", "values"):
        np.testing.assert_array_equal(getattr(whole.rows, name), getattr(parts.rows, name))


# -- relevance ------------------------------------------------------------------------------------------------------------


def log_of_file(file: Path, query: str, item: str, numbers: dict[str, str], **form: str) -> pl.DataFrame:
    data = LogData.model_validate({"format": "log", "train": file, **form})
    return query_logs.read_log(file, query, item, numbers, data, BadRows(data.bad_rows, "data"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_log_of_texts_without_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"log\.csv: got 'no rows', expected at least one query with its item"):
        log_of_file(write(tmp_path / "log.csv", "query,item\n"), "query", "item", {})


def test_items_of_a_log_of_texts_are_ids_as_in_other_logs(tmp_path: Path) -> None:
    file = tmp_path / "log.parquet"

    def items(*values: object) -> list[str]:
        pl.DataFrame({"query": [f"q{row}" for row in range(len(values))], "item": values}, strict=False).write_parquet(file)
        return log_of_file(file, "query", "item", {}, bad_rows="skip")["item"].to_list()

    assert items(3.0, float("nan"), 17.0, None, 5.0) == ["3", "17", "5"], "pandas makes floats where integers are missing"
    assert items(3, 17) == ["3", "17"]
    assert items("3.0", "", " x") == ["3.0", " x"], "texts stay as written"
    for wrong in (3.5, 3e17, True, date(2026, 1, 1)):
        with pytest.raises(InvalidData, match=r"^log\.parquet: column item: got .*, expected strings"):
            items(wrong)
    pl.DataFrame({"id": [3.0, 17.0], "title": ["a", "b"]}).write_parquet(file)
    assert item_table(file, None, TextTable()).column("id").to_pylist() == ["3", "17"], "so are those of the item table"


@pytest.mark.parametrize("empty", ["", None])
@pytest.mark.parametrize("role", ["query", "item"])
def test_empty_texts_of_parquet_are_missing_as_in_csv(tmp_path: Path, role: str, empty: str | None) -> None:
    log = pl.DataFrame({"query": ["q", "r"], "item": ["a", "b"]}).with_columns(pl.Series(role, ["x", empty]))
    log.write_parquet(tmp_path / "log.parquet")
    expected = "a text" if role == "query" else "an item id"
    with pytest.raises(InvalidData, match=rf"row 1 \(from 0\), column {role}: got (''|null), expected {expected}"):
        log_of_file(tmp_path / "log.parquet", "query", "item", {})
    assert len(log_of_file(tmp_path / "log.parquet", "query", "item", {}, bad_rows="skip")) == 1


@pytest.mark.parametrize("weight", [-0.5, 1e10, 1e-10])
def test_wrong_weights_of_a_matrix_say_where(tmp_path: Path, weight: float) -> None:
    scipy.sparse.save_npz(tmp_path / "x.npz", csr_array(np.eye(2)))
    scipy.sparse.save_npz(tmp_path / "y.npz", csr_array(np.array([[1.0, 0, 2], [0, weight, 0]])))
    data = NpzData(format="npz", train=tmp_path / "x.npz", train_labels=tmp_path / "y.npz")
    with pytest.raises(InvalidData, match=r"y\.npz, row 1, label 1: got .*, expected 0, or a number from 1e-09 to 1e.09"):
        read_points(data)


# -- clicks ---------------------------------------------------------------------------------------------------------------


def test_views_and_clicks_of_equal_pairs_are_added_up_and_smoothed(tmp_path: Path) -> None:
    rows = [("a", "x", 3, 1), ("a", "x", 1, 1), ("a", "y", 6, 0), ("b", "y", 10, 3)]
    pl.DataFrame(rows, schema=["text", "ad", "shown", "hit"], orient="row").write_parquet(tmp_path / "log.parquet")
    pairs = log_of_file(tmp_path / "log.parquet", "text", "ad", {"views": "shown", "clicks": "hit"})
    smoothing = Smoothing.of(pairs["views"].to_numpy(), pairs["clicks"].to_numpy(), 5)
    assert smoothing.prior == 5 / 20
    texts = labelled(pairs, {"x": 0, "y": 1}, smoothing)
    prior = 5 * 5 / 20
    assert_allclose(texts.labels.toarray(), [[(2 + prior) / (4 + 5), 0], [0, (3 + prior) / (10 + 5)]], rtol=1e-6)
    assert texts.labels.nnz == 2, "what nobody clicked is not relevant, however often it was shown"


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=9), st.floats(0, 1e9))
def test_rates_lie_between_the_pair_and_the_log(counts: list[tuple[int, float]], strength: float) -> None:
    views = np.array([n for n, _ in counts], np.float64)
    clicks = np.floor(views * [share for _, share in counts])
    smoothing = Smoothing.of(views, clicks, strength)
    rates = smoothing.rates(views, clicks)
    low, high = np.minimum(clicks / views, smoothing.prior), np.maximum(clicks / views, smoothing.prior)
    clicked = clicks > 0
    assert (rates[~clicked] == 0).all()
    assert (rates[clicked] >= low[clicked] - 1e-9).all()
    assert (rates[clicked] <= high[clicked] + 1e-9).all()


WEIGHTS = r"expected 0, or a number from 1e-09 to 1e\+09 in column 'times'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("query,item\nq,x\n\n,y\n", "line 4, column query: got null"),
        ('\nquery,item\n"q\nq",x\nq,y\n\n,z\n', "line 7, column query: got null"),
        ("query,item\r\nq,x\r\n,y\r\n", "line 3, column query: got null, expected a text in column 'query'"),
        ("query,item\nx,y\ny,\n", "line 3, column item: got null, expected an item id in column 'item'"),
        ("query,bought\nx,y\n", r"column item: got 'item', expected one of \['query', 'bought'\]"),
        *(
            (f"query,item,times\nq,y,1\nq,x,{times}\n", f"line 3, column weight: got '{times}', {WEIGHTS}")
            for times in ("-2", "nan", "many")
        ),
        *(
            (f"query,item,views,clicks\nq,y,1,1\nq,x,{row}\n", f"line 3, column {expected}")
            for row, expected in (
                ("0,0", "views: got '0', expected a number above 0"),
                ("-1,0", "views: got '-1', expected a number above 0"),
                ("2,3", "clicks: got '3', expected a number from 0 to that of the views"),
                ("2,-1", "clicks: got '-1', expected a number from 0 to"),
                ("2,nan", "clicks: got 'nan', expected a number from 0 to"),
                ("many,1", "views: got 'many', expected a number above 0"),
                ("1e10,1", "views: got '1e10', expected a number above 0, at most 1e.09"),
                (",1", "views: got null, expected a number above 0"),
            )
        ),
    ],
)
def test_a_wrong_log_says_which_line_of_an_editor(tmp_path: Path, text: str, expected: str) -> None:
    numbers = {"weight": "times"} if "times" in text else {"views": "views", "clicks": "clicks"} if "views" in text else {}
    with pytest.raises(InvalidData, match=expected):
        log_of_file(write(tmp_path / "log.csv", text), "query", "item", numbers)


@pytest.mark.parametrize("mark", [";", "\t"])
@pytest.mark.parametrize("row", ["lamp{}x", "lamp, red{}x\nlamp, red, old{}y"])
def test_another_separator_than_the_names_is_named_with_the_key_that_mends_it(tmp_path: Path, mark: str, row: str) -> None:
    file = write(tmp_path / "log.csv", f"query{mark}item\n{row.replace('{}', mark)}\n")
    with pytest.raises(InvalidData, match=f"first line has {mark!r} between fields: say so with data.separator = ".replace("\\", "\\\\")):
        log_of_file(file, "query", "item", {})
    assert log_of_file(file, "query", "item", {}, separator=mark)["item"][0] == "x"
    with pytest.raises(InvalidData, match=r"column query: got 'text', expected one of \['query', 'item'\], once$"):
        log_of_file(file, "text", "item", {}, separator=mark)


# -- propensities, thresholds ---------------------------------------------------------------------------------------------


def test_inverse_propensities_are_those_of_the_published_sets() -> None:
    """The constants C of EURLex-4K and Amazon-670K, and the inverse propensity of a label with one training point."""
    for points, a, b, c, of_one in ((15_539, 0.55, 1.5, 14.320, 9.65), (490_449, 0.6, 2.6, 26.102, 13.10)):
        inverse = inverse_propensities(LabelCounts(np.array([0, 1, 10**9]), points), a, b)
        assert inverse[1] == pytest.approx(1 + c * (1 + b) ** -a, abs=1e-3)
        assert inverse[1] == pytest.approx(of_one, abs=5e-3)
        assert inverse[0] > inverse[1] > inverse[2] >= 1


@given(st.integers(0, 10**9), st.floats(1e-3, 2), st.floats(0.01, 1000))
def test_inverse_propensities_can_be_weights(points: int, a: float, b: float) -> None:
    counts = np.unique(np.array([0, min(1, points), points], np.int64))
    inverse = inverse_propensities(LabelCounts(counts, points), a, b)
    assert (inverse >= 1).all()
    assert (inverse <= 1e9).all()
    assert (np.diff(inverse) <= 0).all()


def test_relevance_is_what_the_configuration_says() -> None:
    training = csr_array(np.array([[2.0, 0, 0, 0], [0.5, 1, 0, 0], [1, 0, 0, 0]], np.float32))
    test = csr_array(np.array([[0, 3.0, 0.25, 0]], np.float32))

    def relevance(**keys: object) -> LabelRelevance:
        return LabelRelevance.of_training(RELEVANCE_OPTIONS.checked(keys), training)

    plain = relevance()
    assert_array_equal(plain.of(test).toarray(), test.toarray())
    assert scale_of(plain.of(training)) == 2
    assert_array_equal(relevance(source="binary").of(test).toarray(), [[0, 1, 1, 0]])
    assert_array_equal(relevance(threshold=1).of(training).toarray(), [[2, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
    assert relevance(threshold=1).of(training).nnz == 3
    scored = relevance(source="inverse-propensity", propensity_a=0.6, propensity_b=2)
    inverse = inverse_propensities(LabelCounts(np.array([3, 1, 0, 0]), 3), 0.6, 2)
    assert_allclose(scored.of(test).toarray(), [[0, inverse[1], inverse[2], 0]], rtol=1e-6)
    assert_array_equal(training.toarray()[1], [0.5, 1, 0, 0], "what was read is not changed")
    assert_array_equal(relevance(threshold=1).counts.counts_I, [3, 1, 0, 0], "training points before the threshold")


def test_the_distribution_of_relevance() -> None:
    relevance = csr_array(np.array([[1, 2, 0], [3, 4, 5]], np.float32))
    assert is_graded(relevance)
    assert not is_graded(csr_array(np.ones((2, 2), np.float32)))
    assert not is_graded(csr_array(np.zeros((2, 2), np.float32)))
    told = distribution(relevance)
    assert (told["labels"], told["mean"]) == (5, 3)
    assert told["quantiles"] == pytest.approx({"0": 1, "0.05": 1.2, "0.25": 2, "0.5": 3, "0.75": 4, "0.95": 4.8, "1": 5})
    assert distribution(csr_array(np.zeros((2, 2), np.float32))) == {"labels": 0}


# -- matrices ---------------------------------------------------------------------------------------------------------------

MATRIX = csr_array(np.array([[0, 2, 0], [1, 0, 4]], np.float32))
ARRAYS = {"format": b"csr", "shape": (2, 3), "data": MATRIX.data, "indices": MATRIX.indices, "indptr": MATRIX.indptr}
NO_MATRIX: dict[str, dict[str, Any]] = {
    "a column that is not there": {"indices": [1, 0, 1 << 30]},
    "a negative column": {"indices": [-(1 << 30), 0, 2]},
    "rows that descend": {"indptr": [0, 1 << 30, 3]},
    "rows that begin below 0": {"indptr": [0, -(1 << 30), 3]},
    "more rows than are there": {"shape": (1 << 30, 3)},
    "columns that no 32 bits can number": {"shape": (2, 1 << 33)},
    "three dimensions": {"shape": (2, 3, 4)},
    "a negative shape": {"shape": (-2, 3)},
    "texts": {"data": ["a", "b", "c"]},
    "complex numbers": {"data": [1j, 2, 3]},
    "objects": {"data": np.array([1, None, 3], object)},
    "numbers that 32 bits make infinite": {"data": [1.0, 1e300, 2.0]},
    "NaN": {"data": [1.0, np.nan, 2.0]},
    "another format": {"format": b"none"},
    "several formats": {"format": [1, 2]},
    "a cell for each of 2^60": {"format": b"coo", "shape": (1 << 60, 3), "row": [0], "col": [0], "data": [1.0]},
    "a diagonal of any length": {"format": b"dia", "shape": (1 << 60, 1 << 60), "data": [[1.0]], "offsets": [0]},
}


@pytest.mark.parametrize("read", [read_by_rows, read_by_columns])
@pytest.mark.parametrize("what", NO_MATRIX)
def test_a_file_that_is_no_matrix_is_refused(tmp_path: Path, what: str, read: Callable[[Path], object]) -> None:
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in (ARRAYS | NO_MATRIX[what]).items()}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(InvalidData, match=r"x\.npz: got"):
        read(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:200])
    with pytest.raises(InvalidData, match=r"x\.npz: got"):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float64])
def test_matrices_of_all_number_types_and_formats_are_read(tmp_path: Path, dtype: type[np.generic]) -> None:
    whole: Any = MATRIX.astype(dtype)
    for stored in (whole, csc_array(whole), whole.tocoo(), whole.tobsr()):
        save_npz(tmp_path / "x.npz", stored)
        for found in (read_by_rows(tmp_path / "x.npz"), read_by_columns(tmp_path / "x.npz")):
            assert found.dtype == np.float32
            assert_array_equal(found.toarray(), whole.toarray())


# -- logs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("query", [{"a": 1}, {"a": 2}], None),
        ("query", [b"\xff", b"\xfe"], "t.parquet.*query.*"),
        ("item", [["a"], ["b"]], r"t.parquet: column item: got .large_list<item: large_string>., expected strings or integers"),
        ("weight", [[1.0], [2.0]], r"t.parquet: column weight: got 'a column of List\(Float64\)'"),
        ("weight", ["1", "x"], r"t.parquet: row 1 \(from 0\), column weight: got 'x'"),
    ],
)
def test_columns_that_hold_no_such_values_are_named(tmp_path: Path, column: str, values: list[Any], expected: str | None) -> None:
    columns: dict[str, list[Any]] = {"query": ["a", "b"], "item": ["x", "y"], "weight": [1.0, 2.0]}
    pl.DataFrame(columns | {column: values}).write_parquet(tmp_path / "t.parquet")
    with nullcontext() if expected is None else pytest.raises(InvalidData, match=expected):
        assert len(read_log(tmp_path / "t.parquet", "query", "item", {"weight": "weight"}, TextTable(), BadRows("refuse", "data"))) == 2


def prepared(folder: Path, data: str) -> None:
    (folder / "any.toml").write_text(f'kind = "xr-linear"\nname = "any"\n[data]\n{data}')
    config = read_config(folder / "any.toml")
    assert isinstance(config, LinearConfig)
    prepare(config)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (None, r"data\.items: got .*items\.parquet', expected a Parquet, CSV or TSV file that exists"),
        (b"PAR1 and nothing else", r"data\.items: got .*items\.parquet', expected a readable Parquet file"),
        ([{"a": 1}, {"a": 2}], "column id: got 'struct.*', expected strings or integers in column 'id'"),
    ],
)
def test_a_table_that_has_no_items_is_named(tmp_path: Path, items: Any, expected: str) -> None:
    (tmp_path / "log.csv").write_text("query,item\na b,x\nc d,y\n")
    if isinstance(items, bytes):
        (tmp_path / "items.parquet").write_bytes(items)
    elif items is not None:
        pl.DataFrame({"id": items}).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(EspalierError, match=expected):
        prepared(tmp_path, f'format = "log"\ntrain = "{tmp_path}/log.csv"\nitems = "{tmp_path}/items.parquet"\n')


# -- points -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["", "1:0,2:0"])
def test_points_without_any_label_teach_nothing(tmp_path: Path, first: str) -> None:
    (tmp_path / "p.txt").write_text("20 5 3\n" + f"{first} 1:1\n" * 20)
    with pytest.raises(InvalidData, match="got '20 training points without a label of a weight above 0', expected labels to learn from"):
        prepared(tmp_path, f'format = "xmc"\ntrain = "{tmp_path}/p.txt"\n')


@pytest.mark.parametrize(("what", "first"), [("labels", "20 5 {}"), ("features", "20 {} 5")])
def test_a_first_line_cannot_ask_for_any_number_of_items_or_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, first: str
) -> None:
    assert preparing.MAX_LABELS == MAX_FEATURES == 67_108_864
    monkeypatch.setattr(preparing, f"MAX_{what.upper()}", 1000)
    data = f'format = "xmc"\ntrain = "{tmp_path}/p.txt"\n'
    (tmp_path / "p.txt").write_text(first.format(1001) + "\n" + "0 1:1\n" * 20)
    with pytest.raises(InvalidData, match=rf"p\.txt: got '1001 {what}', expected at most 1000"):
        prepared(tmp_path, data)
    (tmp_path / "p.txt").write_text(first.format(1000) + "\n" + "0 1:1\n" * 20)
    prepared(tmp_path, data)


def test_points_without_features_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("20 0 5\n" + "0\n" * 20)
    with pytest.raises(InvalidData, match=r"p\.txt: got '0 features', expected at least 1"):
        prepared(tmp_path, f'format = "xmc"\ntrain = "{tmp_path}/p.txt"\n')
    save_npz(tmp_path / "x.npz", csr_array((20, 0), dtype=np.float32))
    save_npz(tmp_path / "y.npz", csr_array(np.eye(20, dtype=np.float32)))
    with pytest.raises(InvalidData, match=r"x\.npz: got '0 features', expected at least 1"):
        prepared(tmp_path, f'format = "npz"\ntrain = "{tmp_path}/x.npz"\ntrain_labels = "{tmp_path}/y.npz"\n')


def test_a_command_without_memory_ends_with_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr(commands, "app", without_memory)
    assert commands.main() == 1
    assert capsys.readouterr().err == "error: out of memory Unable to allocate 8.00 TiB\n"
