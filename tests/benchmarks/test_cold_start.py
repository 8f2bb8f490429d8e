"""The cold-start benchmark: what its sets hide, its rows on a made-up shop, and that a second run goes on from the first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from benchmarks.quality.cold_start_sets import Pair, Task, depends, psearch, read_set

from benchmarks.quality import cold_start
from benchmarks.quality.cold_start import Report, row_of, run
from espalier.errors import InvalidConfig, InvalidData
from espalier.search import NO_ITEM

pytestmark = pytest.mark.slow

COLOURS = ["red", "green", "blue", "yellow", "black", "white", "purple", "orange"]
THINGS = ["teapot", "kettle", "lamp", "chair", "spoon", "ladder", "bucket", "mirror"]


def shop(own: bool) -> Task:
    """Coloured things, of which every eighth is hidden, each of another colour and kind."""
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    patterns = ("cheap {}", "buy a good {}", "for my kitchen a {}")
    train: list[Pair] = [(pattern.format(name), [row]) for row, name in enumerate(names) for pattern in patterns]
    test: list[Pair] = [(f"{name}, please", [row]) for row, name in enumerate(names)]
    hidden = np.array([k // 8 == k % 8 for k in range(len(names))])
    return Task("psearch" if own else "debian-depends", names, hidden, [(train, test)], own)


@pytest.mark.parametrize("own", [True, False])
def test_rows_are_made_once_and_placed_items_are_found(own: bool, tmp_path: Path) -> None:
    task, file = shop(own), tmp_path / "rows.json"
    run(task, Report(file, task), tmp_path, choosing=False)
    content = json.loads(file.read_text())
    assert (content["hidden"], content["test_queries"], content["test_queries_with_hidden"]) == (8, 64, 8)
    rows = {row["ranking"]: row for row in content["rows"]}
    assert list(rows) == ["not placed", "placed", "placed, own text alone", "retrained with own texts", "retrained with everything",
                          "cosine to centroids"]  # fmt: skip
    assert rows["not placed"]["hidden@100"] == rows["not placed"]["shown@100"] == 0
    for name in list(rows)[1:]:
        assert rows[name]["hidden@10"] > 85, name
        assert rows[name]["old@10"] > 85, name
    (tmp_path / "second").mkdir()
    run(task, Report(file, task), tmp_path / "second", choosing=False)  # an empty folder: nothing to place is there
    assert json.loads(file.read_text())["rows"] == content["rows"]
    with pytest.raises(InvalidConfig, match="a file of the set other"):
        Report(file, Task("other", task.texts, task.hidden, task.folds, own))


def test_choosing_tries_every_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = shop(own=True)
    variants = {name: cold_start.VARIANTS[name] for name in ("as it is", "share 0")}
    monkeypatch.setattr(cold_start, "VARIANTS", variants)
    report = Report(None, task)
    run(task, report, tmp_path, choosing=True)
    assert [row["ranking"] for row in report.content["choose"]] == ["not placed", "as it is", "share 0"]


def test_recall_is_counted_by_group() -> None:
    task = Task("any", ["a"] * 4, np.array([True, False, False, False]), [([], [("x", [0, 1]), ("y", [2, 3])])], False)
    folds = [cold_start.Fold(task, 0, Path())]
    row = row_of("some", folds, [np.array([[0, NO_ITEM], [2, 1]])], 0.0)
    assert (row["hidden@10"], row["old@10"], row["all@10"]) == (100, 25, 50)
    assert row["shown@10"] == 33.3


def test_sets_hide_a_tenth_and_choose_without_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = [f"lib{k}" for k in range(40)]
    packages = pl.DataFrame(
        {
            "package": names + [f"tool{k}" for k in range(200)],
            "depends": [""] * 40 + [",".join(rng.choice(names, 3, replace=False)) for _ in range(200)],
            "description": [f"library number {k}" if k < 30 else None for k in range(40)] + [f"tool number {k}" for k in range(200)],
        }
    )
    task = depends(packages)
    assert (len(task.texts), task.hidden.sum()) == (40, 3)
    assert all(task.texts[row] for row in np.flatnonzero(task.hidden))
    (train, test) = task.folds[0]
    assert (len(train), len(test)) == (180, 20)
    chosen = depends(packages, choosing=True)
    assert len(chosen.texts) == 37
    assert chosen.hidden.sum() == 3
    asked = {text for text, _ in chosen.folds[0][1]}
    assert asked <= {text for text, _ in train}
    assert asked.isdisjoint(text for text, _ in chosen.folds[0][0])
    hidden = {task.texts[row] for row in np.flatnonzero(task.hidden)}
    assert hidden.isdisjoint(chosen.texts)

    rows = [(f"query {k % 20}", f"title {k}", str(1 + k % 4)) for k in range(200)]
    shop = psearch(pl.DataFrame(rows, schema=["query", "product_title", "median_relevance"], orient="row"))
    assert (len(shop.texts), shop.hidden.sum(), len(shop.folds), shop.own) == (200, 20, 5, True)
    asked_texts = [text for _, some in shop.folds for text, _ in some]
    assert len(asked_texts) == len(set(asked_texts)) == 10
    for training, some in shop.folds:
        assert {text for text, _ in training}.isdisjoint(text for text, _ in some)
    with pytest.raises(InvalidData, match=r"--data: .* the file of the set psearch"):
        read_set(tmp_path, "psearch")
