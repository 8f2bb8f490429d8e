"""Cold starts: the protocol of histories, what the set of texts hides, and its rows on a made-up shop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.papers.product_search.cold_texts import Texts, row_of
from benchmarks.quality.cold_start import protocol
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


def test_recall_is_counted_by_group() -> None:
    data = Texts(["a"] * 4, np.array([True, False, False, False]), [], [("x", [0, 1]), ("y", [2, 3])])
    row = row_of("some", data, np.array([[0, NO_ITEM], [2, 1]]), 0.0)
    assert (row["hidden@10"], row["old@10"], row["all@10"]) == (100, 25, 50)
    assert row["shown@10"] == 33.3
