"""The benchmarks of methods by name, on small logs: their rows, what is resumed, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import fixed_split, leaderboard, next_item
from espalier.errors import InvalidConfig
from training.baselines.methods import METHODS
from training.retrieval.task import Fitted, Task

pytestmark = pytest.mark.slow

USERS, ITEMS = 150, 20
CONFIG = """
kind = "otm-robust"
name = "cycle"
[data]
log = "elsewhere"
format = { min_user_events = 5 }
[instances]
windows = [4, 2]
[scorer]
node_dim = 6
hidden = [8]
dropout = 0.0
[optimiser]
steps = 120
batch = 40
learning_rate = 0.03
average = 10
validate_every = 40
[search]
beam_size = 8
"""
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def log(tmp_path: Path) -> list[str]:
    """Options that name a log in which everybody walks around a ring of items: the next one follows from the last one."""
    rng = np.random.default_rng(1)
    lines = ["user,item"]
    for user in range(USERS):
        first, length = rng.integers(ITEMS), rng.integers(6, 10)
        lines += [f"u{user},i{(first + step) % ITEMS}" for step in range(length)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.toml").write_text(CONFIG)
    return ["--log", str(tmp_path / "log.csv"), "--config", str(tmp_path / "config.toml")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a benchmark's main with options and gives back its JSON."""

    def call(benchmark: Any, *options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--threads", "1", "--json", str(tmp_path / "rows.json"), *options])
        benchmark.main()
        report: dict[str, Any] = json.loads((tmp_path / "rows.json").read_text())
        return report

    return call


def test_next_item_has_a_row_for_each_method_seed_and_beam(log: list[str], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(task: Task) -> Fitted:
        raise InvalidConfig("memory", "9 GB", "at most 1 GB")

    monkeypatch.setattr(leaderboard, "METHODS", METHODS | {"ease": refused})
    options = [*log, "--seeds", "2", "--beams", "2,32"]
    first = run(next_item, *options, "--methods", "neighbours,popularity,ease")
    assert {(left["method"], left["seed"], left["reason"]) for left in first["left_out"]} == {
        ("ease", seed, "memory: got '9 GB', expected at most 1 GB") for seed in (1, 2)
    }
    report = run(next_item, *options, "--methods", "neighbours,popularity,recipe")
    rows = {(row["method"], row["seed"], row["beam_size"]): row for row in report["rows"]}
    assert report["rows"][:4] == first["rows"], "not run again"
    expected = {(method, seed, None) for method in ("neighbours", "popularity") for seed in (1, 2)}
    assert rows.keys() == expected | {("recipe", seed, beam) for seed in (1, 2) for beam in (2, 20)}, "20 leaves are all"
    for row in rows.values():
        assert {"hr10", "ndcg10", "hr10_se", "ndcg10_se", "train_seconds", "bytes"} <= row.keys()
        assert row["queries"] == USERS
    assert rows["neighbours", 1, None]["ndcg10"] > 0.95, "the next item of the ring is known, and nothing seen comes back"
    assert rows["recipe", 1, 20]["hr10"] > rows["popularity", 1, None]["hr10"]
    assert [row for row in report["differences"] if (row["first"], row["second"], row["metric"]) == ("neighbours", "recipe", "ndcg@10")]


def test_a_fixed_split_is_two_files_of_users(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(2)
    lists = [[f"i{item * 5 + user % 5}" for item in rng.permutation(30)[:9]] for user in range(USERS)]
    for name, part in (("train.txt", slice(6)), ("test.txt", slice(6, None))):
        (tmp_path / name).write_text("".join(" ".join([f"u{user}", *items[part]]) + "\n" for user, items in enumerate(lists)))
    files = ["--train", str(tmp_path / "train.txt"), "--test", str(tmp_path / "test.txt")]
    report = run(fixed_split, *files, "--methods", "neighbours,popularity,recipe", "--steps", "20", "--beams", "50")
    rows = {row["method"]: row for row in report["rows"]}
    assert {"seed", "beam_size", "recall20", "ndcg20", "recall20_se"} <= rows["recipe"].keys()
    assert (rows["neighbours"]["beam_size"], rows["recipe"]["beam_size"]) == (None, 50)
    assert rows["neighbours"]["recall20"] > 0.5 > 0.3 > rows["popularity"]["recall20"], "20 of 24 others of a cluster, or of all 150"
    assert rows["neighbours"]["queries"] == USERS
    assert report["config"]["data"]["format"]["order"] == "none"
    assert (report["config"]["data"]["log"], report["config"]["data"]["split"]["test"]) == ("train.txt", "test.txt"), "no folders"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--set: got None, expected one of amazon-book-kgat"),
        (["--train", "missing", "--test", "missing"], "--train: got 'missing', expected a file that exists"),
        (["--train", "missing"], "--test: got None"),
        (["--set", "amazon-book-kgat"], "--data: got None"),
        (["--set", "amazon-book-kgat", "--train", "here"], "--set: got 'amazon-book-kgat'"),
    ],
)
def test_a_fixed_split_says_what_is_missing(options: Sequence[str], message: str, run: Run) -> None:
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        run(fixed_split, *options)
