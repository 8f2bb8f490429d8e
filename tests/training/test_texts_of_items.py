"""Texts of items teach a model of linear scorers and shape its tree and beam, but nothing is chosen by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig
from tests.training.commands import answer_rows, trained
from tests.training.shared_runs import Killed
from training.linear.prepare import prepare
from training.rankers.log_queries import from_log
from training.specification import linear
from training.specification.linear import LinearConfig
from training.specification.models import SPECIFICATION

WORDS = np.array(
    [f"{first}{last}" for first in ("ba", "co", "di", "fu", "ga", "lo", "mi", "pe") for last in ("ra", "tin", "lop", "nes", "k")]
)


def titled_items(folder: Path, items: int, queries: int, **log: Any) -> dict[str, Any]:
    """The configuration of a model of items with titles of five words, some of which are frequent, so that many titles are alike, and a log
    of so many different queries of two or three words of the title of what was bought.
    """
    rng, share = np.random.default_rng(5), 1 / np.arange(1, len(WORDS) + 1)
    titles = [rng.choice(WORDS, 5, p=share / share.sum()) for _ in range(items)]
    frame = pl.DataFrame({"id": [f"i{row}" for row in range(items)], "title": [" ".join(title) for title in titles]})
    frame.write_parquet(folder / "items.parquet")
    searched: dict[str, str] = {}
    while len(searched) < queries:
        row = int(rng.integers(items))
        searched[" ".join(rng.permutation(titles[row])[: rng.integers(2, 4)])] = f"i{row}"
    pl.DataFrame({"query": list(searched), "item": list(searched.values())}).write_csv(folder / "log.csv")
    data = {"format": "log", "items": str(folder / "items.parquet"), "own_texts": ["title"], **log}
    return {"data": data}


def share_with_all_words(bundle: Bundle) -> float:
    """Of the first three results of queries of two words that some title has."""
    titles, rng = bundle.items.column("title").to_pylist(), np.random.default_rng(6)
    searched = [" ".join(rng.permutation(sorted(set(title.split())))[:2]) for title in titles[::10]]
    answers = zip(searched, answer_rows(bundle, searched, 50, 3), strict=True)
    return float(np.mean([set(query.split()) <= set(titles[row].split()) for query, rows in answers for row in rows]))


def test_nothing_is_chosen_by_texts_of_items(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bundle = trained(tmp_path, titled_items(tmp_path, 2500, 0))
    assert bundle.stacking is None
    assert "validation" not in bundle.manifest.metrics
    assert (bundle.manifest.ranking.gamma, bundle.manifest.data["tested"]) == (0.15, "made of words of the items")
    assert "figures will be of queries made of words of the items" in caplog.text
    assert "no stacking: 0 points with labels that are not texts of items, it takes 2000" in caplog.text
    assert share_with_all_words(bundle) > 0.9


@pytest.mark.parametrize(("least", "gamma"), [(3.0, 0.5), (100.0, 0.15)])
def test_ranks_of_clusters_count_little_where_no_query_trains_the_root(tmp_path: Path, least: float, gamma: float) -> None:
    raw = titled_items(tmp_path, 20, 150, train=str(tmp_path / "log.csv")) | {"linear": {"min_positives": least}}
    assert trained(tmp_path, raw).manifest.ranking.gamma == gamma


@pytest.mark.parametrize("tree", [{}, {"branching": 128}, {"max_leaf": 32}])
def test_many_items_have_small_clusters(tmp_path: Path, tree: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "FEW_ITEMS", 1999)
    bundle = trained(tmp_path, titled_items(tmp_path, 2000, 0) | {"tree": tree})
    clusters = bundle.tree.level(bundle.tree.height - 1)
    largest = bundle.tree.items_below[clusters.start : clusters.stop].max()
    assert (largest <= 8) == (not tree)
    assert bundle.manifest.search.beam_size == 100
    assert share_with_all_words(bundle) > 0.9


def test_a_run_with_a_beam_for_the_number_of_items_is_another_one_than_with_a_named_beam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = titled_items(tmp_path, 100, 0)
    with monkeypatch.context() as patch:
        patch.setattr("training.linear.run.export", lambda *arguments: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            trained(tmp_path, raw)
    with pytest.raises(InvalidConfig, match=r"--resume: .* changed: the configuration"):
        trained(tmp_path, raw | {"search": {"beam_size": 10}}, resume=True)
    assert trained(tmp_path, raw, resume=True).manifest.search.beam_size == 100


def test_queries_of_the_log_are_held_out_and_texts_of_items_are_not(tmp_path: Path) -> None:
    """Two logs of the same queries: one beside the items' texts, one alone; the same number of them chooses."""
    bundle = trained(tmp_path, titled_items(tmp_path, 120, 300, train=str(tmp_path / "log.csv")))
    assert bundle.manifest.data["tested"] == "queries of the log, held out"
    assert (bundle.manifest.data["queries"], bundle.manifest.data["test_queries"]) == (120 + 270, 30)
    assert bundle.manifest.metrics["validation"]["held_out"] == 4 * 67
    texts = set(bundle.items.column("title").to_pylist())
    assert not texts & set(bundle.heldout().column("text").to_pylist())
    parts = from_log(bundle, None, "training", False)
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (243, 27, 30), "nor does a ranker learn from them"


def test_queries_of_the_same_words_are_one_query_which_is_learned_from_or_held_out(tmp_path: Path) -> None:
    """Of a log with queries in capitals, too, all test queries were learned from: with the other letters."""
    rng, rows = np.random.default_rng(1), []
    for _ in range(50):
        text = " ".join(f"wört{number}" for number in rng.integers(30, size=3))
        rows += [
            (form, f"item{number}") for number, form in enumerate((text, text.title(), text.upper().replace("Ö", "O\u0308"), text + "!"))
        ]
    pl.DataFrame(rows, schema=["query", "item"], orient="row").write_csv(tmp_path / "log.csv")
    data = {"format": "log", "train": str(tmp_path / "log.csv"), "test_share": 0.2}
    config = SPECIFICATION.checked({"kind": "xr-linear", "name": "words", "data": data})
    assert isinstance(config, LinearConfig)
    prepared = prepare(config)
    assert (len(prepared.train), len(prepared.test)) == (40, 10)
    assert set(np.diff(prepared.train.labels.indptr)) == set(np.diff(prepared.test.labels.indptr)) == {4}, "each has the items of all forms"
    assert prepared.written_queries.to_pylist() == [text for text, _ in rows[::4] if text in {*prepared.written_queries.to_pylist()}]


def test_which_queries_are_held_out_depends_on_their_words_alone(tmp_path: Path) -> None:
    """Not on the order of the log, and hardly on what else is in it: queries of the old log are not asked of the next model, but for those
    that were asked of the last one."""
    config = SPECIFICATION.checked(titled_items(tmp_path, 120, 330, train=str(tmp_path / "log.csv")) | {"kind": "xr-linear", "name": "a"})
    assert isinstance(config, LinearConfig)
    frame = pl.read_csv(tmp_path / "log.csv")

    def held_out(rows: pl.DataFrame) -> set[str]:
        rows.with_columns(pl.col("query").str.to_uppercase()).write_csv(tmp_path / "log.csv")
        return {*prepare(config).written_queries.to_pylist()}

    first = held_out(frame[:300])
    assert held_out(frame[:300].reverse()) == first
    later = held_out(frame)
    assert (len(first), len(later)) == (30, 33)
    assert len(later & {*frame[:300]["query"].str.to_uppercase()} - first) <= 3


def test_a_log_of_the_items_own_texts_chooses_nothing(tmp_path: Path) -> None:
    """In other letters, with accents and with other signs, too."""
    raw = titled_items(tmp_path, 300, 0, train=str(tmp_path / "log.csv"))
    text = pl.col("title").str.to_uppercase().str.replace_many(["A", "E", " "], ["Á", "E\u0301", ", "]).alias("query")
    pl.read_parquet(tmp_path / "items.parquet").select(text, pl.col("id").alias("item")).write_csv(tmp_path / "log.csv")
    bundle = trained(tmp_path, raw)
    assert bundle.manifest.data["tested"] == "made of words of the items"
    assert "validation" not in bundle.manifest.metrics
    with pytest.raises(InvalidConfig, match="0 training queries that are not texts of items"):
        from_log(bundle, None, "training", False)
    with pytest.raises(InvalidConfig, match="0 training points have labels that are not texts of items, a network takes 10"):
        trained(tmp_path, raw | {"stacking": {"model": "network"}}, "any/2")


def test_test_queries_that_are_in_the_log_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"format": "log", "train": str(tmp_path / "log.csv"), "test": str(tmp_path / "test.csv")}
    (tmp_path / "log.csv").write_text("query,item\nred lamp,lamp\nred chair,chair\n")
    for text, repeats in (("Red LAMP!", True), ("green lamp", False)):
        (tmp_path / "test.csv").write_text(f"query,item\nblue lamp,lamp\n{text},lamp\n")
        config = SPECIFICATION.checked({"kind": "xr-linear", "name": "lamps", "data": data})
        assert isinstance(config, LinearConfig)
        caplog.clear()
        prepare(config)
        assert ("1 of 2 test queries are in the log, too" in caplog.text) == ("test queries" in caplog.text) == repeats
