"""Texts of items teach, but nothing is chosen by them: a tree has seen each in another form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidConfig
from espalier.queries import TextKind, encode_texts
from espalier.search import SearchParams
from training.linear.run import fit_and_export
from training.rankers.log_queries import from_log
from training.specification.linear import LinearConfig
from training.specification.models import SPECIFICATION

WORDS = np.array(
    [f"{first}{last}" for first in ("ba", "co", "di", "fu", "ga", "lo", "mi", "pe") for last in ("ra", "tin", "lop", "nes", "k")]
)
ITEMS = 2500


def titles_of(rng: np.random.Generator, count: int) -> list[NDArray[np.str_]]:
    """Titles of five words, some of them frequent, so that many titles are alike."""
    share = 1 / np.arange(1, len(WORDS) + 1)
    return [rng.choice(WORDS, 5, p=share / share.sum()) for _ in range(count)]


def write_shop(folder: Path, items: int, queries: int, **log: Any) -> LinearConfig:
    """A shop whose items have titles, and a log of so many different queries of two or three words of the title of what was bought."""
    rng = np.random.default_rng(5)
    titles = titles_of(rng, items)
    frame = pl.DataFrame({"id": [f"i{row}" for row in range(items)], "title": [" ".join(title) for title in titles]})
    frame.write_parquet(folder / "items.parquet")
    searched: dict[str, str] = {}
    while len(searched) < queries:
        row = int(rng.integers(items))
        searched[" ".join(rng.permutation(titles[row])[: rng.integers(2, 4)])] = f"i{row}"
    pl.DataFrame({"query": list(searched), "item": list(searched.values())}).write_csv(folder / "log.csv")
    data = {"format": "log", "items": str(folder / "items.parquet"), "own_texts": [["title"]], **log}
    raw = {"kind": "xr-linear", "name": "shop", "data": data, "labels": {"kind": "text", "columns": ["title"]}}
    config = SPECIFICATION.checked(raw)
    assert isinstance(config, LinearConfig)
    return config


def fitted(config: LinearConfig, folder: Path) -> Bundle:
    (folder / "work").mkdir()
    return fit_and_export(config, folder / "models" / "shop" / "1", folder / "work", threads=1)


def share_with_all_words(bundle: Bundle) -> float:
    """Of the first three results of queries of two words that some title has."""
    kind, titles, rng = bundle.manifest.query, bundle.items.column("title").to_pylist(), np.random.default_rng(6)
    assert isinstance(kind, TextKind)
    searched = [" ".join(rng.permutation(sorted(set(title.split())))[:2]) for title in titles[::10]]
    params = SearchParams.uniform(len(searched), 50, 3)
    found = open_engine(bundle, "cpu").search(encode_texts(kind, bundle.vectoriser, searched), params)
    return float(np.mean([set(query.split()) <= set(titles[row].split())
                          for query, rows in zip(searched, found.item_rows_BM.tolist(), strict=True) for row in rows]))  # fmt: skip


def test_nothing_is_chosen_by_texts_of_items(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = write_shop(tmp_path, ITEMS, 0)
    bundle = fitted(config, tmp_path)
    assert bundle.stacking is None
    assert "validation" not in bundle.manifest.metrics
    assert (bundle.manifest.ranking.gamma, bundle.manifest.data["tested"]) == (0.5, "texts of items, which the tree has seen")
    assert "figures will be of texts of items, which the tree has seen" in caplog.text
    assert "no stacking: 0 points with labels that are not texts of items, it takes 2000" in caplog.text
    assert share_with_all_words(bundle) > 0.9


def test_queries_of_the_log_are_held_out_and_texts_of_items_are_not(tmp_path: Path) -> None:
    """Two logs of the same queries: one beside the items' texts, one alone; the same number of them chooses."""
    config = write_shop(tmp_path, 120, 300, train=str(tmp_path / "log.csv"))
    bundle = fitted(config, tmp_path)
    assert bundle.manifest.data["tested"] == "queries of the log, held out"
    assert (bundle.manifest.data["queries"], bundle.manifest.data["test_queries"]) == (120 + 270, 30)
    assert bundle.manifest.metrics["validation"]["held_out"] == 5 * 27
    texts = set(bundle.items.column("title").to_pylist())
    assert not texts & set(bundle.heldout().column("text").to_pylist())
    parts = from_log(bundle, None, "training", False)
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (243, 27, 30), "nor does a ranker learn from them"


def test_a_log_of_the_items_own_texts_chooses_nothing(tmp_path: Path) -> None:
    """In other letters and with other signs, too."""
    config = write_shop(tmp_path, 300, 0, train=str(tmp_path / "log.csv"))
    frame = pl.read_parquet(tmp_path / "items.parquet")
    log = frame.select(pl.col("title").str.to_uppercase().str.replace(" ", ", ").alias("query"), pl.col("id").alias("item"))
    log.write_csv(tmp_path / "log.csv")
    bundle = fitted(config, tmp_path)
    assert bundle.manifest.data["tested"] == "texts of items, which the tree has seen"
    with pytest.raises(InvalidConfig, match="0 training queries that are not texts of items"):
        from_log(bundle, None, "training", False)
    wanted = SPECIFICATION.checked(json.loads(config.model_dump_json()) | {"stacking": {"model": "network"}})
    assert isinstance(wanted, LinearConfig)
    with pytest.raises(InvalidConfig, match="0 training points have labels that are not texts of items, a network takes 10"):
        fit_and_export(wanted, tmp_path / "models" / "shop" / "2", tmp_path, threads=1)
    assert "validation" not in bundle.manifest.metrics
