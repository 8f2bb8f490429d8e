"""The three benchmarks of methods by name, on small logs: their rows, what is resumed, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.papers.otm import otm_real
from benchmarks.quality import fixed_split, leaderboard, next_item
from espalier.errors import InvalidConfig
from training.baselines.methods import METHODS
from training.retrieval.task import Fitted, Task
from training.specification.models import deep_config, read_deep_config

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
def log(tmp_path: Path) -> Path:
    """Everybody walks around a ring of items: the next one follows from the last one."""
    rng = np.random.default_rng(1)
    lines = ["user,item"]
    for user in range(USERS):
        first, length = rng.integers(ITEMS), rng.integers(6, 10)
        lines += [f"u{user},i{(first + step) % ITEMS}" for step in range(length)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path / "log.csv"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a benchmark's main with options and gives back its JSON."""

    def call(benchmark: Any, *options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--threads", "1", "--json", str(tmp_path / "rows.json"), *options])
        benchmark.main()
        report: dict[str, Any] = json.loads((tmp_path / "rows.json").read_text())
        return report

    return call


def refused(task: Task) -> Fitted:
    raise InvalidConfig("memory", "9 GB", "at most 1 GB")


def test_next_item_has_a_row_for_each_method_seed_and_beam(
    log: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leaderboard, "METHODS", METHODS | {"ease": refused})
    options = ["--log", str(log), "--config", str(log.with_name("config.toml")), "--seeds", "2", "--beams", "2,32"]
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
    printed = capsys.readouterr().out
    assert f"hr10 {rows['recipe', 2, 20]['hr10']:.4f} ± " in printed


def test_next_item_leaves_the_last_two_items_out_of_what_is_learned(log: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    tasks: list[Task] = []

    def asked(task: Task) -> Fitted:
        tasks.append(task)
        return METHODS["popularity"](task)

    monkeypatch.setattr(leaderboard, "METHODS", {"asked": asked} | METHODS)
    run(next_item, "--log", str(log), "--config", str(log.with_name("config.toml")), "--methods", "asked", "--minutes", "2")
    task = tasks[0]
    assert str(task.metric) == "recall@10"
    assert task.exclude_seen
    assert task.seconds == 120
    by_user = {pair.user: pair for pair in task.split.test}
    for user, pair in by_user.items():
        assert pair.history[:-1].tolist() == task.split.lists.of(user).tolist()


def test_a_fixed_split_is_two_files_of_users(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(2)
    train, test = [], []
    for user in range(USERS):
        items = [f"i{item * 5 + user % 5}" for item in rng.permutation(30)[:9]]
        train.append(" ".join([f"u{user}", *items[:6]]))
        test.append(" ".join([f"u{user}", *items[6:]]))
    (tmp_path / "train.txt").write_text("\n".join(train) + "\n")
    (tmp_path / "test.txt").write_text("\n".join(test) + "\n")
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
        (["--set", "other", "--data", "."], "--set: got 'other'"),
        (["--set", "amazon-book-kgat"], "--data: got None"),
        (["--set", "amazon-book-kgat", "--train", "here"], "--set: got 'amazon-book-kgat'"),
    ],
)
def test_a_fixed_split_says_what_is_missing(options: Sequence[str], message: str, run: Run) -> None:
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        run(fixed_split, *options)


def test_otm_real_knows_the_recipe_baselines_and_fusions(log: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[bool] = []

    def slow(task: Task) -> Fitted:
        tuned.append(task.exclude_seen)
        return METHODS["popularity"](task)

    monkeypatch.setattr(otm_real, "BASELINES", METHODS | {"ease": refused, "sasrec": slow})
    monkeypatch.setattr(otm_real, "METHODS", (*otm_real.METHODS, "ease", "sasrec"))
    report = run(
        otm_real, "--log", str(log), "--config", str(log.with_name("config.toml")), "--beams", "2,all",
        "--methods", "recipe,neighbours,ease,sasrec,tdm", "--steps", "40",
    )  # fmt: skip
    rows = report["rows"]
    assert {row["method"] for row in rows} == {"recipe", "neighbours", "sasrec", "tdm"}
    assert [left["method"] for left in report["left_out"]] == ["ease"]
    assert tuned == [True], "once, as the configuration's search.exclude_seen says"
    of_recipe = [row for row in rows if row["method"] == "recipe"]
    assert {(row["beam_size"], row["m"], row["exclude_seen"]) for row in of_recipe} == {
        (beam, m, seen) for beam in (2, 20) for m in (10, 50, 200) for seen in (False, True)
    }
    assert {row["steps"] for row in of_recipe} == {40}
    keys = {"method", "seed", "m", "beam_size", "exclude_seen", "gamma", "precision", "recall", "f", "recall_se", "train_seconds"}
    assert all(keys <= row.keys() for row in rows)
    assert {row["beam_size"] for row in rows if row["method"] == "neighbours"} == {None}
    assert {(fit["method"], fit["exclude_seen"]) for fit in report["fits"]} == {
        (method, seen) for method in ("recipe", "neighbours", "sasrec") for seen in (False, True)
    }
    ahead = {(row["first"], row["second"], row["metric"]): row["mean"] for row in report["differences"]}
    at = {(row["method"], row["exclude_seen"]): row["recall"] for row in rows if row["m"] == 10 and row["beam_size"] is None}
    for seen, of in ((False, "raw"), (True, "seen excluded")):
        mean = ahead[f"neighbours, {of}", f"sasrec, {of}", "recall@10"]
        assert mean == pytest.approx(at["neighbours", seen] - at["sasrec", seen])
    assert len(ahead) == 3 * 2 * 3


def test_the_recipe_is_what_the_configuration_says(log: Path) -> None:
    """Whatever its kind: nothing of it is replaced."""
    config = read_deep_config(log.with_name("config.toml"))
    for kind in ("otm-robust", "plt"):
        raw = config.model_dump(mode="json") | {"kind": kind, "objective": {}}
        changed = next_item.protocol(deep_config(raw), "log")
        assert changed.kind == kind
        assert (changed.scorer, changed.optimiser, changed.instances) == (config.scorer, config.optimiser, config.instances)
        assert (changed.data.split.kind, changed.search.m, changed.search.beam_size) == ("last", 10, 8)
