"""The benchmark of short histories: every row is what the model answers to that part of each test query's history.

The log: each user has ten of the twelve items of a group, so whoever knows one of them knows the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.quality import short_histories
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.metrics import precision_recall_f
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from training.data.splits import EvaluationPair, Split, without_seen
from training.deep.export import export
from training.deep.fit import fit
from training.deep.prepare import build_tree, prepare
from training.specification.models import deep_config

Int64 = NDArray[np.int64]
ITEMS, GROUP, LENGTH, NEIGHBOURS = 204, 12, 6, 8
KINDS: dict[str, Callable[[list[int]], list[int]]] = {
    "whole": lambda rows: rows,
    "last 10": lambda rows: rows,  # none has more than five
    "last 5": lambda rows: rows[-5:],
    "last 2": lambda rows: rows[-2:],
    "last 1": lambda rows: rows[-1:],
    "none": lambda rows: [],
    "each item twice": lambda rows: [row for row in rows for _ in range(2)][-LENGTH:],
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    lists = [group * GROUP + rng.permutation(GROUP)[:10] for group in rng.integers(ITEMS // GROUP, size=300)]
    lines = [f"u{user},i{item}" for user, items in enumerate(lists) for item in items]
    file = tmp_path_factory.mktemp("log") / "log.csv"
    file.write_text("user,item\n" + "\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def trained(log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Split]:
    """Three steps of training, with a memory."""
    raw: dict[str, Any] = {
        "kind": "otm-robust",
        "name": "groups",
        "data": {"log": log, "format": {"order": "file", "min_user_events": 2}},
        "instances": {"windows": [LENGTH]},
        "scorer": {"node_dim": 4, "hidden": [4]},
        "optimiser": {"steps": 3, "batch": 20, "precision": "float32"},
        "search": {"beam_size": 16, "m": 10, "exclude_seen": False},
        "memory": {"neighbours": NEIGHBOURS, "weight": 2.0},
    }
    config, work = deep_config(raw), tmp_path_factory.mktemp("work")
    prepared = prepare(config, None, work)
    tree = build_tree(config, prepared)
    model = fit(config, prepared, tree, torch.device("cpu"), work, resume=False)
    return export(config, prepared, tree, model, tmp_path_factory.mktemp("models") / "groups" / "1"), prepared.split


Report = Callable[..., dict[str, Any]]


@pytest.fixture
def report(trained: tuple[Bundle, Split], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report of the command with more options."""

    def run(*more: str) -> dict[str, Any]:
        out = tmp_path / "out" / "rows.json"
        files = ["--model", str(trained[0].path), "--log", str(log), "--json", str(out)]
        monkeypatch.setattr(sys, "argv", ["short_histories", *files, *more])
        short_histories.main()
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return run


def recalls(found_BM: Int64, pairs: list[EvaluationPair]) -> dict[str, float]:
    return {f"recall@{m}": float(precision_recall_f(found_BM, [pair.relevant for pair in pairs], m)[1].mean()) for m in (10, 50, 200)}


def assert_same(row: dict[str, Any], expected: dict[str, float]) -> None:
    assert {name: row[name] for name in expected} == pytest.approx(expected), (row["system"], row["history"])


def test_the_tree_is_asked_with_the_named_part_of_every_history(trained: tuple[Bundle, Split], report: Report) -> None:
    bundle, split = trained
    pairs, kind = list(split.test), bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    found = report("--beams", "5,16")
    assert (found["model"], found["log"], found["queries"], found["length"]) == ("groups", "log.csv", len(pairs), LENGTH)
    rows = [row for row in found["rows"] if row["system"] == "tree"]
    assert [(row["beam_size"], row["history"]) for row in rows] == [(beam, name) for beam in (5, 16) for name in KINDS]
    engine = open_engine(bundle, "cpu")
    for row in rows:
        histories = [np.array(KINDS[row["history"]](pair.history.tolist()), np.int64) for pair in pairs]
        result = engine.search(pad_histories(kind, histories), SearchParams.uniform(len(pairs), row["beam_size"], 200))
        assert_same(row, recalls(result.item_rows_BM, pairs))
        assert_same(row, {"items": float(np.mean([len(history) for history in histories])), "complete": float(result.complete_B.mean())})
        assert row["recall@10_se"] > 0
        assert row["ms_per_query"] > 0
    engine.close()
    by_name = {row["history"]: row for row in rows if row["beam_size"] == 16}
    assert by_name["last 1"]["recall@10"] > 2 * by_name["none"]["recall@10"]
    assert by_name["none"]["complete"] < 1  # a beam of 16 cannot fill 200 places


def test_popular_items_and_the_memorys_row_are_the_baselines(trained: tuple[Bundle, Split], report: Report) -> None:
    bundle, split = trained
    pairs, memory = list(split.test), bundle.memory
    assert memory is not None
    found = report()["rows"]
    assert sorted({row["beam_size"] for row in found if row["system"] == "tree"}) == [
        16,
        200,
    ]  # the model's own, and m
    rows = {row["system"]: row for row in found if row["system"] != "tree"}
    assert {name: row["history"] for name, row in rows.items()} == {
        "popularity": "none",
        "neighbours": "last 1",
        "neighbours, then popular": "last 1",
    }
    lists = [split.lists.item_of_event_E[slice(*split.lists.offset_U1[user : user + 2])] for user in split.train]
    users_I = np.bincount(np.concatenate([np.unique(items) for items in lists]), minlength=ITEMS)
    popular = sorted(range(ITEMS), key=lambda item: (-users_I[item], item))
    assert_same(rows["popularity"], recalls(np.array([popular[:200]] * len(pairs)), pairs) | {"complete": 1})
    alone, filled = [], []
    for pair in pairs:
        entries = slice(*memory.offset[pair.history[-1] : pair.history[-1] + 2])
        value = dict(zip(memory.item[entries].tolist(), memory.value[entries].tolist(), strict=True))
        best = sorted((item for item in value if value[item] > 0), key=lambda item: (-value[item], item))
        alone.append(best + [-1] * (200 - len(best)))
        filled.append((best + [item for item in popular if item not in best])[:200])
    assert_same(rows["neighbours"], recalls(np.array(alone), pairs) | {"complete": 0})
    assert_same(rows["neighbours, then popular"], recalls(np.array(filled), pairs) | {"complete": 1})


def test_seen_items_are_those_that_the_model_was_asked_with(trained: tuple[Bundle, Split], report: Report) -> None:
    bundle, split = trained
    pairs, kind = without_seen(split.test), bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    found = report("--exclude-seen", "--beams", "1000", "--queries", "9")
    pairs = pairs[:: -(-len(pairs) // 9)]
    assert found["queries"] == len(pairs) <= 9
    rows = [row for row in found["rows"] if row["system"] == "tree"]
    engine = open_engine(bundle, "cpu")
    for row in rows:
        assert row["beam_size"] == bundle.tree.leaf_count
        histories = [np.array(KINDS[row["history"]](pair.history.tolist()), np.int64) for pair in pairs]
        params = SearchParams.uniform(len(pairs), row["beam_size"], 200, np.stack(histories))  # all histories have five items
        assert_same(row, recalls(engine.search(pad_histories(kind, histories), params).item_rows_BM, pairs))
    engine.close()
    # Five seen items leave 199, fewer than 200.
    assert [row["complete"] for row in rows] == [1] * len(KINDS)


def test_no_queries_are_refused(report: Report) -> None:
    with pytest.raises(SystemExit, match="--queries: got 0, expected at least 1"):
        report("--queries", "0")
