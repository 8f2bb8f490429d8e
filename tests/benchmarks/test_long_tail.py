"""The synthetic log of a large catalogue, what is counted on it, and what of a comparison's report is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_popularity_has_a_long_tail_and_users_have_favourites() -> None:
    lists = long_tail.long_tail(ITEMS)[1:]
    events_I = np.sort(np.bincount(np.concatenate(lists), minlength=ITEMS))[::-1]
    assert events_I[: ITEMS // 10].sum() > 0.3 * events_I.sum()
    assert np.median(events_I) <= 2
    item_E = np.concatenate([rows for rows in lists if len(rows) > 50])
    assert np.mean(np.diff(item_E) < 20) > 0.5, "neighbouring rows are of a cluster"


def test_a_seed_is_a_log() -> None:
    first, again, other = (long_tail.long_tail(500, seed) for seed in (1, 1, 2))
    assert [rows.tolist() for rows in first] == [rows.tolist() for rows in again] != [rows.tolist() for rows in other]


def test_all_users_count(tmp_path: Path) -> None:
    lists = long_tail.long_tail(ITEMS)
    config = long_tail.write_log(lists, tmp_path)
    pairs = len({(a, b) for rows in lists for a in rows.tolist() for b in rows.tolist() if a != b})
    for method in long_tail.COUNTED:
        found = long_tail.counting(config, method)
        assert (found["method"], found["users"], found["pairs"]) == (method, len(lists), pairs)
        assert found["cpu_seconds"] >= 0
        assert found["most_mib"] > 50


def test_of_a_comparison_rows_what_was_not_judged_and_the_verdict_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"method": "popularity", "figures": {"recall@10": {"mean": 0.1, "se": 0.01}}, "validation": 0.1}]
    told = {"rows": rows, "not_judged": [{"method": "ease", "reason": "862 GiB"}], "verdict": ["one.", "two."], "fits": []}
    asked: list[list[str]] = []

    def compare(command: list[str], check: bool) -> None:
        asked.append(command[1:])
        (tmp_path / "report.json").write_text(json.dumps(told))

    monkeypatch.setattr(subprocess, "run", compare)
    found: dict[str, Any] = long_tail.compared(tmp_path / "config.toml", 0.5, tmp_path / "report.json")
    assert found.pop("seconds") >= 0
    kept = [{name: rows[0][name] for name in ("method", "figures")}]
    assert found == {"minutes": 0.5, "rows": kept, "not_judged": told["not_judged"], "verdict": ["one.", "two."]}
    assert asked[0][:5] == ["-m", "training", "compare", "--config", str(tmp_path / "config.toml")]
    assert asked[0][5:7] == ["--minutes", "0.5"]


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
