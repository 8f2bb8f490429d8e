"""Cold starts: the protocol of histories, what the set of texts hides, and its rows on a made-up shop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks.papers.product_search.cold_texts import Pair, Texts, measured, report, row_of, with_hidden_items
from benchmarks.quality.cold_start import protocol
from espalier.errors import InvalidData
from espalier.search import NO_ITEM
from training.specification.models import deep_config

COLOURS = ["red", "green", "blue", "yellow", "black", "white", "purple", "orange"]
THINGS = ["teapot", "kettle", "lamp", "chair", "spoon", "ladder", "bucket", "mirror"]


@pytest.mark.parametrize(("order", "kind"), [("file", "otm-sequence"), ("none", "otm-robust")])
def test_a_set_keeps_its_kind_and_settings(order: str, kind: str) -> None:
    raw: dict[str, Any] = {
        "kind": kind,
        "name": "books",
        "data": {"log": "log.csv", "format": {"order": order}},
        "optimiser": {"learning_rate": 0.01},
    }
    before = deep_config(raw)
    config = protocol(before, 0.1, "auto", 30, None)
    assert (config.kind, config.content.columns, config.optimiser.steps) == (kind, "auto", 30)
    assert config.data.split.unseen_items == 0.1
    changed = {"content", "optimiser", "data"}
    assert config.model_dump(exclude=changed) == before.model_dump(exclude=changed)
    assert config.optimiser.learning_rate == 0.01
    assert protocol(before, 0.1, "auto", 10**6, None).optimiser.steps == before.optimiser.steps


@pytest.mark.slow
def test_placed_items_are_found(tmp_path: Path) -> None:
    """Coloured things, of which every eighth is hidden, each of another colour and kind."""
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    patterns = ("cheap {}", "buy a good {}", "for my kitchen a {}")
    train: list[Pair] = [(pattern.format(name), [row]) for row, name in enumerate(names) for pattern in patterns]
    test: list[Pair] = [(f"{name}, please", [row]) for row, name in enumerate(names)]
    hidden_I = np.array([k // 8 == k % 8 for k in range(len(names))])
    rows = {row["ranking"]: row for row in measured(Texts(names, hidden_I, train, test), tmp_path)}
    assert list(rows) == ["not placed", "placed", "retrained with own texts", "retrained with everything", "cosine to centroids"]
    assert rows["not placed"]["hidden@100"] == rows["not placed"]["shown@100"] == 0
    for name in list(rows)[1:]:
        assert rows[name]["hidden@10"] > 85, name
        assert rows[name]["old@10"] > 85, name


def test_recall_is_counted_by_group() -> None:
    data = Texts(["a"] * 4, np.array([True, False, False, False]), [], [("x", [0, 1]), ("y", [2, 3])])
    row = row_of("some", data, np.array([[0, NO_ITEM], [2, 1]]), 0.0)
    assert (row["hidden@10"], row["old@10"], row["all@10"]) == (100, 25, 50)
    assert row["shown@10"] == 33.3


def test_a_tenth_of_the_described_items_is_hidden(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"lib{k}" for k in range(40)]
    packages = pl.DataFrame(
        {
            "package": names + [f"tool{k}" for k in range(200)],
            "depends": [""] * 40 + [",".join(rng.choice(names, 3, replace=False)) for _ in range(200)],
            "description": [f"library number {k}" if k < 30 else None for k in range(40)] + [f"tool number {k}" for k in range(200)],
        }
    )
    data = with_hidden_items(packages)
    assert (len(data.texts), data.hidden_I.sum()) == (40, 3)
    assert all(data.texts[row] for row in np.flatnonzero(data.hidden_I))
    assert (len(data.train), len(data.test)) == (180, 20)
    assert {text for text, _ in data.train}.isdisjoint(text for text, _ in data.test)
    with pytest.raises(InvalidData, match=r"--data: .* the file of the set debian-depends"):
        report(tmp_path, tmp_path)
