"""The tables of the quality page say what the reports say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality.quality_table import table
from espalier.errors import InvalidConfig


def next_item(method: str, seed: int, beam: int | None, hr: float, chosen: bool = True) -> dict[str, Any]:
    figures = {"hr10": hr, "hr10_se": 0.01, "ndcg10": hr / 2, "ndcg10_se": 0.005}
    return {"method": method, "seed": seed, "beam_size": beam, "chosen": chosen, "ended": None} | figures


def test_methods_stand_in_the_order_of_what_they_find_with_their_difference_to_the_recipe() -> None:
    rows = [
        next_item("recipe", 1, 200, 0.20),
        next_item("recipe", 2, 200, 0.22),
        next_item("recipe", 1, 50, 0.19, chosen=False),
        next_item("neighbours", 1, None, 0.25) | {"ended": "at its deadline"},
    ]
    difference = {
        "first": "recipe",
        "second": "neighbours",
        "metric": "recall@10",
        "mean": -0.04,
        "low": -0.05,
        "high": -0.03,
        "queries": 9,
    }
    left_out = [{"method": "ease", "seed": 1, "reason": "too large"}]
    lines = table(
        {"set": "x", "rows": rows, "differences": [difference, difference | {"metric": "ndcg@10"}], "left_out": left_out}
    ).splitlines()
    assert lines[2:5] == [
        "| neighbours |  | 1 | 25.00 ± 1.00 | 12.50 ± 0.50 | +4.00 (+3.00 to +5.00) |",
        "| recipe | 200 | 2 | 21.00 ± 1.00 | 10.50 ± 0.50 |  |",
        "| recipe | 50 | 1 | 19.00 ± 1.00 | 9.50 ± 0.50 |  |",
    ]
    assert "ease, seed 1, was left out: too large." in lines
    assert "neighbours, seed 1, ended early: at its deadline." in lines


def test_rows_of_otm_are_those_with_seen_items() -> None:
    rows = [
        {"method": "ials", "seed": 1, "m": m, "beam_size": None, "exclude_seen": seen, "recall": m / 1000 + seen, "recall_se": 0.001}
        for m in (200, 10)
        for seen in (False, True)
    ]
    assert "| ials |  | 1 | 1.00 ± 0.10 | 20.00 ± 0.10 |" in table({"set": "x", "rows": rows, "left_out": []})


def test_a_report_without_rows_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="rows"):
        table({"set": "x", "rows": [], "left_out": []})
