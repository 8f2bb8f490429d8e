"""The synthetic log of a large catalogue, what is counted on it, and what of a comparison's report is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import long_tail

ITEMS = 2000


def test_every_item_has_an_event_and_one_user_a_long_list() -> None:
    lists = long_tail.long_tail(20_000)
    assert len(lists) == 1 + 3 * 20_000 // 100
    assert sorted(set(np.concatenate(lists).tolist())) == list(range(20_000))
    assert all((np.diff(rows) > 0).all() for rows in lists), "each item once"
    lengths = [len(rows) for rows in lists]
    assert lengths[0] == max(lengths) == 20_000 // 10
    assert 2 * 20_000 < sum(lengths) <= 3 * 20_000


def test_all_users_count(tmp_path: Path) -> None:
    lists = long_tail.long_tail(ITEMS)
    config = long_tail.write_log(lists, tmp_path)
    pairs = len({(a, b) for rows in lists for a in rows.tolist() for b in rows.tolist() if a != b})
    for method in long_tail.COUNTED:
        found = long_tail.counting(config, method)
        assert (found["method"], found["users"], found["pairs"]) == (method, len(lists), pairs)
        assert found["cpu_seconds"] >= 0
        assert found["most_mib"] > 50


@pytest.mark.slow
def test_without_a_comparison_it_reports_the_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["long_tail", "--items", "500", "--counting", "--json", str(file)])
    long_tail.main()
    report = json.loads(file.read_text())
    assert report["log"]["items"] == 500
    assert [row["method"] for row in report["counting"]] == list(long_tail.COUNTED)
    assert {row["users"] for row in report["counting"]} == {report["log"]["users"]}
    assert "compare" not in report
