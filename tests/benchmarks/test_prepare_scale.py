"""`benchmarks.prepare_scale`: its log is a function of its numbers, and its phases run once each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.speed import topical_log
from benchmarks.speed.topical_log import item_of, topic_of, write_log
from tests import ROOT


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topical_log, "BLOCK", 1 << 12)
    monkeypatch.setattr(topical_log, "JITTER", 1 << 14)


def test_a_log_is_a_function_of_its_numbers_and_whole(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_log(tmp_path / name, items=5000, events=60_000)
    one, two = (pl.read_parquet(tmp_path / name / "**" / "*.parquet", hive_partitioning=False) for name in ("one", "two"))
    assert one.equals(two)
    assert len(one) == 60_000
    assert one["item"].n_unique() > 4900
    assert one["user"].n_unique() > 0.95 * 60_000 / topical_log.EVENTS_OF_A_USER
    assert not one["time"].is_sorted()


def test_users_keep_to_few_topics_and_some_items_are_popular(tmp_path: Path) -> None:
    write_log(tmp_path / "log", items=20_000, events=60_000)
    log = pl.read_parquet(tmp_path / "log" / "**" / "*.parquet", hive_partitioning=False)
    numbers = item_of(log["item"].to_list())
    assert numbers.min() >= 0
    assert numbers.max() < 20_000
    topics = log.with_columns(topic=topic_of(numbers))
    visits = topics.group_by("user", "topic").len()
    of_three = pl.col("len").sort(descending=True).head(3).sum() / pl.col("len").sum()
    assert visits.group_by("user").agg(of_three)["len"].to_numpy().mean() > 0.8  # at random .3
    count = np.sort(np.bincount(numbers))[::-1]
    assert count[:200].sum() > 0.05 * 60_000  # at random .01


@pytest.mark.slow
def test_phases_that_are_done_are_not_done_again(tmp_path: Path) -> None:
    def run(*arguments: str) -> dict[str, dict[str, float]]:
        command = [sys.executable, "-m", "benchmarks.prepare_scale", "--quick", "--work", str(tmp_path / "work"), *arguments]
        subprocess.run([*command, "--json", str(tmp_path / "f.json")], cwd=ROOT, check=True, capture_output=True)
        phases: dict[str, dict[str, float]] = json.loads((tmp_path / "f.json").read_text())["phases"]
        return phases

    first = run("--until", "prepare")
    assert list(first) == ["log", "prepare"]
    whole = run()
    assert list(whole) == ["log", "prepare", "tree", "train"]
    assert {name: whole[name] for name in first} == first
    assert whole["prepare"]["items"] > 2900
    assert whole["tree"]["purity"] > 0.6
    assert whole["train"]["peak_gb"] > 0.1
    refused = subprocess.run(
        [sys.executable, "-m", "benchmarks.prepare_scale", "--items", "7", "--events", "9", "--work", str(tmp_path / "work")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "holds the phases of" in refused.stderr
