"""Items by their own words: rows of documents against the formula, and queries made of words."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose
from scipy.sparse import csr_array

from espalier.bundle import Bundle
from espalier.bundle_writer import with_parts
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt, InvalidConfig, InvalidData, InvalidQuery
from espalier.live.operations import ItemBody
from espalier.placement.evidence import Evidence
from espalier.placement.linear_placement import LinearPlacement
from espalier.text.blocks import TextBlock
from espalier.text.vectoriser import Vectoriser, words_of
from tests.service.running import bearer, ids, run
from tests.training.commands import answer_rows, trained
from training.data.csr import as_matrix
from training.data.query_logs import texts_of
from training.data.xmc import LabelledPoints
from training.linear import own_texts
from training.linear.label_features import label_features
from training.linear.own_texts import OwnTexts, column_weights, made_queries, text_rows
from training.specification.linear import LinearOptions

TITLES = ["red lamp red", "blue lamp", "chair", "", "red chair and table"]
NOTES = ["a lamp of red glass for any table and any chair", "", "a chair", "nothing known", "wood"]
WORDS = (TextBlock(unit="word", n=1), TextBlock(unit="word", n=2))


def own(folder: Path, *columns: str, **data: Any) -> dict[str, Any]:
    """The configuration of a model of a folder's items by some of their columns."""
    return {"data": {"format": "log", "items": str(folder / "items.parquet"), "own_texts": columns} | data}


def test_a_document_says_less_with_a_second_occurrence_and_a_rare_word_a_little_more() -> None:
    vectoriser = Vectoriser.fit([*TITLES, *NOTES], (*WORDS, TextBlock(unit="char", n=3)))
    features = vectoriser.features_of(np.arange(vectoriser.width))
    idf = dict(zip(features, vectoriser.arrays()["idf"].tolist(), strict=True))
    row = as_matrix(vectoriser.documents(["red lamp red"])).toarray()[0]
    ngrams = [("red", 2, 1.0), ("lamp", 1, 1.0), ("red lamp", 1, 0.5), ("lamp red", 1, 0.5)]
    letters = [(name, 2, 0.5) for name in ("_re…", "…red…", "…ed_")] + [(name, 1, 0.5) for name in ("_la…", "…lam…", "…amp…", "…mp_")]
    expected = {name: weight * count / (count + 1.2) * idf[name] ** 0.5 for name, count, weight in ngrams + letters}
    assert {features[at]: value for at, value in enumerate(row.tolist()) if value} == pytest.approx(expected, rel=1e-5)
    query = as_matrix(vectoriser.transform(["red lamp red"])).toarray()[0]
    assert_allclose(np.linalg.norm(query), 1, rtol=1e-6)


def test_own_rows_combine_columns_by_the_length_of_their_texts_and_longer_texts_have_longer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    vectoriser = Vectoriser.fit([*TITLES, *NOTES], WORDS)
    titles, notes = (as_matrix(vectoriser.documents(texts)).toarray() for texts in (TITLES, NOTES))
    monkeypatch.setattr(own_texts, "SHORT", 3)
    rows, median = text_rows(vectoriser, [TITLES, NOTES], column_weights([TITLES, NOTES]))
    expected = np.sqrt(titles**2 + (3 / np.mean([11, 2, 2, 1])) ** (2 / 3) * notes**2)  # titles have two and a half words
    length = np.linalg.norm(expected, axis=1)
    assert_allclose(rows.toarray(), expected / np.sqrt(length * np.median(length))[:, None], atol=1e-6)
    assert median == pytest.approx(np.median(length))
    assert np.linalg.norm(rows.toarray(), axis=1)[0] > 1.2, "the longest text"
    rows, median = text_rows(vectoriser, [TITLES], [1.0])
    assert median == pytest.approx(np.median(np.linalg.norm(titles, axis=1)[[0, 1, 2, 4]])), "an item without a text does not count"
    assert rows[[3]].nnz == 0
    with pytest.raises(InvalidData, match=r"data\.own_texts: got '1 different texts of 1 items', expected at least three, and words"):
        text_rows(vectoriser, [["unheard"], [""]], [1.0, 1.0])


def test_queries_are_made_of_two_to_five_words_of_an_item() -> None:
    ids = [f"i{row}" for row in range(400)]
    columns = [[f"alpha{row} beta{row} gamma{row} delta{row} epsilon{row} zeta{row}" for row in range(400)], [""] * 400]
    made = made_queries(ids, columns, 0.5, seed=1)
    assert made.equals(made_queries(ids, columns, 0.5, seed=1))
    assert made["item"].n_unique() == len(made) == 200
    queries, known, misspelt = made["query"].to_list(), 0, 0
    for query, item in zip(queries, made["item"].to_list(), strict=True):
        own = columns[0][int(item[1:])].split()
        said = query.split()
        places = [own.index(word) for word in said if word in own]
        assert 2 <= len(said) <= 5
        assert places == sorted(places)
        known, misspelt = known + len(places), misspelt + len(said) - len(places)
        assert all(sorted(word) in [sorted(other) for other in own] for word in said)
    assert 0.05 < misspelt / (known + misspelt) < 0.15
    assert set(map(len, map(str.split, queries))) == {2, 3, 4, 5}
    assert made_queries(ids, [["one"] * 400], 1.0, seed=1)["query"].unique().to_list() == ["one"]
    assert made_queries(ids, [[""] * 400], 1.0, seed=1).is_empty()
    chinese = made_queries(["a"], [["紅茶 杯子"]], 1.0, seed=2)["query"].item()
    assert 2 <= len(chinese.split()) <= 4, "each character is a word"


def test_a_text_has_words_in_any_script() -> None:
    assert words_of("Café 27-inch MFC-9340, 紅茶と杯") == ["cafe", "27", "inch", "mfc", "9340", "紅", "茶", "と", "杯"]
    characters = "".join(f"a{chr(code)}B {chr(code)}" for code in range(128))
    assert words_of(characters) == words_of(f"{characters} 紅")[:-1], "ASCII has a way of its own"
    assert column_weights([["a b", "", "a b c d e f"], ["紅" * 64], [""]]) == pytest.approx([1, 0.5, 1])
    assert column_weights([["紅" * 32]], 1) == pytest.approx([0.25])


def test_texts_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [[f"thing{row} part{row % 7}" for row in range(20)], [f"kind{row % 3}" for row in range(20)]]
    vectoriser = Vectoriser.fit([text for texts in columns for text in texts], (TextBlock(unit="word", n=1),))
    whole = OwnTexts.of(vectoriser, columns, [1.0, 0.5], 2, 20.0)
    monkeypatch.setattr(own_texts, "BLOCK", 3)
    blocks = OwnTexts.of(vectoriser, columns, [1.0, 0.5], 2, 20.0)
    assert_allclose(blocks.rows.toarray(), whole.rows.toarray())
    assert whole.is_near.any()
    assert blocks.is_near.tolist() == whole.is_near.tolist()


def test_queries_of_an_item_count_beside_its_own_texts_the_more_there_are() -> None:
    points = csr_array(np.eye(5, dtype=np.float32)[[0, 1, 2, 2, 0, 2]])
    labels = csr_array(np.eye(4, dtype=np.float32)[[0, 1, 1, 1, 3, 2]])
    length = np.array([[1], [4], [2], [0]], np.float32)
    own_B = np.array([False, False, False, False, False, True])  # the last is a text of an item, and nobody asked for it
    data = LabelledPoints(points, labels, own_B, own_B)
    words = np.zeros((4, 5), np.float32)
    words[2, 1] = 1.5
    rows = csr_array(length * np.eye(5, dtype=np.float32)[[3, 3, 4, 4]] + words)
    searched, is_near = rows.toarray(), rows.indices == 1
    tree_rows, centroids = label_features(data, OwnTexts(rows, is_near, (), 1, 5), LinearOptions())
    one, three = 1 / (1 + 5), 3 / (3 + 5)
    second = three * np.array([0, 1, 2, 0, 0]) / np.sqrt(5)
    queries = np.array([[one, 0, 0, 0, 0], second, [0, 0, 0, 0, 0], [one, 0, 0, 0, 0]])
    texts = np.eye(5)[[3, 3, 4, 4]] * [[1], [1], [1], [0]]
    length = np.linalg.norm(searched, axis=1, keepdims=True)
    directions = queries + searched / np.where(length > 0, length, 1)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    assert_allclose(centroids.toarray(), directions * [[1], [4 ** (1 - three)], [2.5], [1]], atol=1e-6)
    both = np.hstack([queries, texts])
    assert_allclose(tree_rows.toarray(), both / np.linalg.norm(both, axis=1, keepdims=True), atol=1e-6, err_msg="from directions")
    for asked_B, own_queries in ((own_B, math.inf), (np.ones(6, np.bool_), 5.0)):  # queries weigh nothing, or there are none
        without = LabelledPoints(points, labels, asked_B, asked_B)
        tree_rows, centroids = label_features(without, OwnTexts(rows, is_near, (), 1, own_queries), LinearOptions())
        assert_allclose(tree_rows.toarray(), texts, atol=1e-6)
        assert_allclose(centroids.toarray(), searched)


def test_a_query_of_people_that_is_a_text_of_items_is_learned_from(tmp_path: Path) -> None:
    brands = [f"brand{'vwxyz'[row % 5]}" for row in range(100)]
    titles = [f"thing{row} part{row % 7} kind{row % 3}" for row in range(100)]
    pl.DataFrame({"id": [f"p{row}" for row in range(100)], "brand": brands, "title": titles}).write_parquet(tmp_path / "items.parquet")
    pl.DataFrame({"query": ["brandx"] * 2 + ["Brandy"], "item": ["p17", "p42", "p8"]}).write_csv(tmp_path / "log.csv")
    bundle = trained(tmp_path, own(tmp_path, "brand", "title", train=str(tmp_path / "log.csv")))
    assert bundle.manifest.data["tested"] == "made of words of the items", "it is not held out"
    assert {*answer_rows(bundle, ["brandx"], 100, 2)[0]} == {17, 42}


@pytest.mark.parametrize("queries", [0, 2, 3])
def test_the_root_holds_all_clusters_unless_queries_train_it(tmp_path: Path, queries: int) -> None:
    """Two queries an item are too few to train anything. Of 150 clusters of 2 items, 128 are children of one node."""
    numbers = range(300)
    pl.DataFrame({"id": [f"p{n}" for n in numbers], "title": [f"thing{n} part{n % 7}" for n in numbers]}).write_parquet(
        tmp_path / "items.parquet"
    )
    log = [(f"thing{n} number{query}", f"p{n}") for n in numbers for query in range(queries)]
    pl.DataFrame(log, schema=["query", "item"], orient="row").write_csv(tmp_path / "log.csv")
    data = {"train": str(tmp_path / "log.csv"), "test_share": 0.0} if queries else {}
    raw = own(tmp_path, "title", **data) | {"tree": {"max_leaf": 2}, "linear": {"min_positives": 3.0, "cost": 1.0, "gamma": 0.5}}
    tree = trained(tmp_path, raw).tree
    assert tree.level_size(1) == (256 if queries < 3 else 2)
    assert tree.height == (2 if queries < 3 else 3)
    given = raw | {"tree": {"max_leaf": 2, "branching": 128}}
    assert trained(tmp_path, given, "any/2").tree.level_size(1) == 2


@pytest.mark.parametrize("values", [[b"\xff", b"a"], [[["a"]], [["b"]]]])
def test_a_column_that_holds_no_texts_is_named(tmp_path: Path, values: list[object]) -> None:
    pl.DataFrame({"id": ["a", "b"], "what": values}).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(InvalidData, match="column what: got 'values of"):
        trained(tmp_path, own(tmp_path, "what"))


@pytest.mark.parametrize("name", ["Title", "titel"])
def test_a_column_has_the_name_that_fields_of_live_items_have(tmp_path: Path, name: str) -> None:
    pl.DataFrame({"id": ["a", "b", "c"], "title": ["red lamp", "blue lamp", "chair"]}).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(InvalidConfig, match=rf"data\.own_texts: got '{name}', expected some of the item table's columns: id, title"):
        trained(tmp_path, own(tmp_path, name))


@pytest.mark.parametrize("titles", [["red shoe", "blue kettle"], ["red shoe"] * 4 + ["blue kettle"]])
def test_two_different_texts_are_too_few(tmp_path: Path, titles: list[str]) -> None:
    """idf is above 0 if at least two of the texts lack a word."""
    for more in ([], ["green chair"]):
        pl.DataFrame({"id": range(len(titles + more)), "title": titles + more}).write_parquet(tmp_path / "items.parquet")
        with nullcontext() if more else pytest.raises(InvalidData, match=rf"got '2 different texts of {len(titles)} items', .* three, and"):
            assert trained(tmp_path, own(tmp_path, "title")).manifest.data["items"] == len(titles) + 1


def test_arrays_are_texts_and_an_empty_table_is_refused(tmp_path: Path) -> None:
    arrays = pl.DataFrame({"what": [["red", "lamp"], ["blue", "chair"]]}, schema={"what": pl.Array(pl.String, 2)})
    assert texts_of(arrays, ["what"]) == ["red lamp", "blue chair"]
    (tmp_path / "items.csv").write_text("id,title\n")
    with pytest.raises(InvalidConfig, match=r"data\.items: got 'no rows', expected at least one item"):
        trained(tmp_path, own(tmp_path, "title", items=str(tmp_path / "items.csv")))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model of products whose titles and long descriptions share words, without a log."""
    folder = tmp_path_factory.mktemp("own")
    rng = np.random.default_rng(3)
    words = np.array([f"{first}{second}" for first in ("ba", "ko", "mi", "tu", "re") for second in ("lan", "per", "sto", "vik", "zen")])
    titles = [" ".join(rng.permutation(words)[:3]) for _ in range(200)]
    notes = [" ".join(rng.permutation(words)[:15]) for _ in range(200)]
    pl.DataFrame({"id": [f"p{row}" for row in range(200)], "title": titles, "notes": notes}).write_parquet(folder / "items.parquet")
    return trained(folder, own(folder, "title", "notes"), "own/1")


def test_a_table_of_products_is_found_by_words_without_a_log(shop: Bundle) -> None:
    assert shop.manifest.data["tested"] == "made of words of the items"
    assert shop.manifest.search.beam_size == 100
    assert shop.manifest.metrics["test"]["raw"][0]["recall"] > 0.3
    titles, notes = (shop.items.column(name).to_pylist() for name in ("title", "notes"))
    for word in ("balan", "tuzen"):
        first, other_form = answer_rows(shop, [word, f"{word}s"], 50, 5)
        assert all(word in titles[row].split() for row in first), "a word of a title says more than one of a description"
        assert all(word in f"{titles[row]} {notes[row]}" for row in other_form), "letters lead from one form to another"


def test_a_new_item_is_found_by_words_as_if_it_had_been_trained(shop: Bundle) -> None:
    alone = ItemBody(text="balan tuzen balan")
    evidence = Evidence.of(shop, alone, shop.items, takes_fields=True)
    assert evidence.document is not None
    assert_allclose(as_matrix(evidence.document).toarray(), as_matrix(shop.vectoriser.documents([str(alone.text)])).toarray())
    by_fields = Evidence.of(shop, ItemBody(fields={"title": "balan tuzen", "notes": "balan", "price": 3}), shop.items, takes_fields=True)
    assert by_fields.document is not None
    assert_allclose(by_fields.document.values, evidence.document.values)
    with pytest.raises(InvalidQuery, match="fields"):
        Evidence.of(shop, ItemBody(fields={"title": "unheard", "price": 3}), shop.items, takes_fields=True)


def test_the_copy_of_a_trained_product_has_the_weights_of_its_words(shop: Bundle) -> None:
    placement, (rows,) = LinearPlacement(shop), LinearPlacement(shop)._rows
    ratios = []
    for item in range(0, len(shop.items), 7):
        fields = {name: shop.items.values(name, np.array([item]))[0] for name in ("title", "notes")}
        own, length = placement._document_features(Evidence.of(shop, ItemBody(fields=fields), shop.items, takes_fields=True))
        x, (trained, weights) = (own.row(0)[0], rows.length * np.float32(length) * own.row(0)[1]), rows.weights_of(item)
        copy = rows.row(x, [item, item + 1], [1.0, 0.5], keeps=placement.takes_fields)
        own_words = np.intersect1d(x[0], np.intersect1d(copy.feature, trained))
        liked = rows.row(x, (), (), like=(trained, weights), keeps=True)
        assert_allclose(liked.values[np.isin(liked.feature, own_words)], copy.values[np.isin(copy.feature, own_words)])
        ratios.append(copy.values[np.isin(copy.feature, own_words)].sum() / weights[np.isin(trained, own_words)].sum())
    assert np.median(ratios) == pytest.approx(1, abs=0.01)


def test_a_text_counts_if_the_columns_have_no_known_word(shop: Bundle) -> None:
    placement = LinearPlacement(shop)
    for events in ((), ("kosto", "mivik")):
        (without, _), (features, length) = (
            placement._document_features(Evidence.of(shop, ItemBody(text="balan tuzen", fields=fields, events=events), shop.items, True))
            for fields in (None, {"title": "unheard"})
        )
        assert length == 1
        assert_allclose(as_matrix(features).toarray(), as_matrix(without).toarray())
        assert len(features.indices)


def test_columns_may_be_weighed_by_hand_and_live_items_are_weighed_alike(shop: Bundle, tmp_path: Path) -> None:
    bundle = trained(tmp_path, own(shop.path.parents[2], "title", "notes", own_weights=[0.1, 2.0]))
    columns = [[str(text) for text in bundle.items.column(name).to_pylist()] for name in ("title", "notes")]
    rows = text_rows(bundle.vectoriser, columns, (0.1, 2.0))[0].toarray()
    assert abs(rows - text_rows(bundle.vectoriser, columns, column_weights(columns))[0].toarray()).max() > 0.1
    parts = [as_matrix(bundle.vectoriser.documents(texts)).toarray() for texts in columns]
    whole = np.sqrt((0.1 * parts[0]) ** 2 + (2 * parts[1]) ** 2)
    length_I = np.linalg.norm(whole, axis=1)
    assert_allclose(rows, whole / np.sqrt(length_I * np.median(length_I))[:, None], atol=1e-6)
    fields = dict(zip(("title", "notes"), (texts[7] for texts in columns), strict=True))
    evidence = Evidence.of(bundle, ItemBody(fields=fields), bundle.items, takes_fields=True)
    features, length = LinearPlacement(bundle)._document_features(evidence)
    assert_allclose(length * as_matrix(features).toarray()[0], rows[7], atol=1e-6)
    with_queries = Evidence.of(bundle, ItemBody(fields=fields, events=("kosto", "mivik")), bundle.items, takes_fields=True)
    assert LinearPlacement(bundle)._document_features(with_queries)[1] == pytest.approx(length ** (1 / (1 + 2))) != length
    assert answer_rows(bundle, [columns[1][7]], 50, 1) == [[7]]
    assert bundle.manifest.data["own_weights"] == [0.1, 2.0]
    for at, wrong in enumerate(([1.0], [0.1, -2.0], None)):
        damaged = with_parts(bundle, tmp_path / f"damaged{at}" / "1", {"data": bundle.manifest.data | {"own_weights": wrong}}, {})
        with pytest.raises(BundleCorrupt, match=r"own_weights of the manifest is .*, expected 2 numbers above 0"):
            LinearPlacement(damaged)
    damaged = with_parts(bundle, tmp_path / "damaged" / "1", {"data": bundle.manifest.data | {"own_length": 0.0}}, {})
    with pytest.raises(BundleCorrupt, match=r"own_length of the manifest is 0.0, expected a number above 0"):
        LinearPlacement(damaged)


def _counted(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    looked_at: list[str] = []

    def words_of(text: str) -> list[str]:
        looked_at.append(text)
        return text.split()

    monkeypatch.setattr(own_texts, "words_of", words_of)
    column_weights([texts])
    return looked_at


def test_of_many_texts_some_say_how_long_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"t{row}" for row in range(own_texts.COUNTED_TEXTS + 1)]
    assert _counted(texts[:3], monkeypatch) == texts[:3]
    assert _counted(texts[:-1], monkeypatch) == texts[:-1]
    assert _counted(texts, monkeypatch) == texts[::2]


def test_a_product_is_put_with_its_columns_alone(shop: Bundle) -> None:
    key = "a-key-of-sixteen-letters"
    with run(shop.path.parent.parent, lambda opened: open_engine(opened, "cpu"), write_keys=(key,)) as running:

        def put(title: str) -> int:
            body = {"fields": {"title": title}}
            return int(running.client.request("PUT", "/models/own/items/new", json=body, headers=bearer(key)).status_code)

        def found(text: str) -> list[str]:
            answer = running.client.post("/retrieve", json={"model": "own", "queries": [{"text": text}], "m": 3})
            return ids(answer.json()["results"][0])

        assert put("unheard") == 422
        assert put("balan tuzen mivik") == 201
        assert found("balan tuzen mivik")[0] == "new"
        assert put("korlan resto") == 200, "its words change with its column"
        assert found("resto")
        assert "new" not in found("balan tuzen mivik")


PRODUCTS = [
    "Seagate 2TB portable hard drive", "Seagate 4TB desktop hard drive", "Dell 27 inch monitor", "Dell 24 inch monitor",
    "NVIDIA GeForce RTX 3060 graphics card", "NVIDIA GeForce RTX 3070 graphics card", "Brother MFC-9340CDW printer",
    "Brother MFC-9130CW printer", "iPhone 12 Pro case", "iPhone 13 case", "USB-C cable 2m", "USB-C cable 1m", "AA batteries 24 pack",
    "Sony WH-1000XM5 headphones", "Sony WH-1000XM4 headphones", "8x10 picture frame", "5x7 picture frame", "1/4 inch drill bit",
    "3/8 inch drill bit", "T-shirt size XL", "T-shirt size M",
]  # fmt: skip
ASKED = {
    "2tb": 0, "27 inch": 2, '27" monitor': 2, "rtx 3060": 4, "rtx3070": 5, "mfc-9340": 6, "mfc 9130": 7, "mfc9340cdw": 6, "iphone12 pro": 8,
    "usb c 1m": 11, "aa 24": 12, "wh1000xm5": 13, "sony xm4": 14, "8 x 10 frame": 15, "1/4 drill bit": 17, '3/8"': 18, "xl shirt": 19,
    "tshirt m": 20,
}  # fmt: skip
"""Queries, and the product that comes first."""


def test_numbers_units_and_models_are_found_in_the_ways_that_people_write_them(tmp_path: Path) -> None:
    pl.DataFrame({"id": [f"p{row:02d}" for row in range(len(PRODUCTS))], "title": PRODUCTS}).write_parquet(tmp_path / "items.parquet")
    bundle = trained(tmp_path, own(tmp_path, "title", test_share=0.0))
    found = zip(ASKED, answer_rows(bundle, list(ASKED), 100, 1), strict=True)
    assert {query: PRODUCTS[row] for query, (row,) in found} == {query: PRODUCTS[row] for query, row in ASKED.items()}


def test_words_beside_a_misspelt_one_are_not_the_whole_query(tmp_path: Path) -> None:
    titles = ["vault, a password manager", *(f"{what} manager" for what in ("window", "file", "package", "network", "session"))]
    titles += ["password generator", "strength meter of a password", "red lamp", "blue lamp"]
    pl.DataFrame({"id": [f"p{row}" for row in range(10)], "title": titles}).write_parquet(tmp_path / "items.parquet")
    bundle = trained(tmp_path, own(tmp_path, "title", test_share=0.0))
    for found in answer_rows(bundle, ["passwrod manager", "manager passwrd"], 100, 3):
        assert [titles[row] for row in found] == [titles[0], "password generator", "strength meter of a password"]


def test_a_tail_is_made_of_items_own_words_where_nobody_asked_for_anything(tmp_path: Path) -> None:
    pl.DataFrame({"id": [f"i{row}" for row in range(len(TITLES))], "title": TITLES, "note": NOTES}).write_parquet(
        tmp_path / "items.parquet"
    )
    forest = {"tree": {"count": 2, "branching": 2, "max_leaf": 2}, "tail": {"form": "product"}}
    bundle = trained(tmp_path, own(tmp_path, "title", "note", test_share=0.4) | forest)
    assert bundle.tail is not None
    assert (np.diff(bundle.tail.row_begin) > 0).sum() == 5
