"""Benchmarks on logs: how they find them, the rows of methods by name, what is resumed and refused; items that are hidden and put in."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import real_logs
from benchmarks.quality import fixed_split, leaderboard, next_item, refit, sessions
from benchmarks.quality.live_sets import HiddenItems, hide
from espalier.errors import InvalidConfig
from espalier.items import ItemTable
from tests.training.logs import log_of, split_of
from training.baselines.methods import METHODS
from training.deep.prepare import Prepared
from training.retrieval.task import Fitted, Task
from training.specification.models import deep_config

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


@pytest.mark.release
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


@pytest.mark.release
def test_a_refit_is_measured_on_the_same_queries_as_the_model_before_it(log: list[str], run: Run, tmp_path: Path) -> None:
    replaced = {"otm-robust": "otm-sequence", "windows = [4, 2]": "targets = 1", "hidden = [8]\n": "", "node_dim = 6": "node_dim = 8"}
    config = CONFIG.replace("batch = 40", "places = 200")
    for old, new in replaced.items():
        config = config.replace(old, new)
    (tmp_path / "config.toml").write_text(config)
    report = run(refit, *log)
    before, after = report["rows"]
    assert [row["refit"] for row in report["rows"]] == [False, True]
    assert before["queries"] == after["queries"] == USERS
    assert report["gain"]["hr10"] == pytest.approx(after["hr10"] - before["hr10"])


@pytest.mark.release
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


def _published(folder: Path, train: object, test: object) -> list[str]:
    for name, content in ((sessions.TRAIN, train), (sessions.TEST, test)):
        (folder / name).write_bytes(pickle.dumps(content))
    return ["--data", str(folder)]


@pytest.mark.release
def test_the_next_item_is_asked_for_after_every_prefix_of_a_session(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(3)
    rings = [[(first + step) % ITEMS for step in range(8)] for first in rng.integers(ITEMS, size=USERS).tolist()]
    prefixes, targets = [[1, 2, 3], [99, 4], [7, 8], [5]], [4, 5, 7, 98]  # 98 and 99 are in no training session
    folder = _published(tmp_path, rings, (prefixes, targets))
    report = run(sessions, *folder, "--methods", "repeats,neighbours,recipe", "--steps", "20", "--beams", "20")
    rows = {row["method"]: row for row in report["rows"]}
    assert all(row["queries"] == len(prefixes) for row in rows.values())
    assert (rows["repeats"]["hr20"], rows["repeats"]["mrr20"]) == (1 / 4, 1 / 8), "7 alone came before, as the one before the last"
    assert rows["neighbours"]["hr20"] == 3 / 4, "20 items are all, and nobody knows 98"
    assert rows["neighbours"]["mrr20"] > rows["repeats"]["mrr20"]


@pytest.mark.parametrize(
    ("train", "test", "told"),
    [
        (print, ([[1]], [2]), "got 'a pickle with builtins.print', expected lists of numbers"),
        ([[1], []], ([[1]], [2]), "got 'all_train_seq.txt', expected sessions of at least one item"),
        ([["a"]], ([[1]], [2]), "got 'all_train_seq.txt', expected sessions of at least one item, which are whole numbers"),
        ([[1]], [[1]], "got 'test.txt', expected two lists"),
        ([[1]], ([], []), "got 'test.txt', expected two lists"),
        ([[1]], ([[1], [2]], [3]), "got 'test.txt: 2 prefixes, 1 items after them', expected as many of both"),
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, run: Run, train: object, test: object, told: str) -> None:
    folder = _published(tmp_path, train, test)
    with pytest.raises(SystemExit, match=f"--data: {re.escape(told)}"):
        run(sessions, *folder)


def test_a_damaged_pickle_is_refused(tmp_path: Path, run: Run) -> None:
    folder = _published(tmp_path, [[1]], ([[1]], [2]))
    (tmp_path / sessions.TRAIN).write_bytes(b"")
    with pytest.raises(SystemExit, match=r"--data: got 'all_train_seq.txt: Ran out of input', expected a pickle"):
        run(sessions, *folder)


# -- names of logs --------------------------------------------------------------------------------------------------------

OUTSIDE = {name: file for name, (_, file) in real_logs.SETS.items() if file is not None}


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    real_logs.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A folder of all named sets, with empty files."""
    for name, file in OUTSIDE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    return tmp_path


def test_named_sets_have_their_configurations_and_files_in_the_order_they_are_named(sets: Path) -> None:
    found = real_logs.load_all(options("--data", str(sets), "--set", ",".join(OUTSIDE)))
    assert [real.name for real in found] == list(OUTSIDE)
    assert all(real.log == sets / real.name / real.config.data.log.name for real in found)
    assert real_logs.load(options("--set", "debian-depends")).log.is_file()


def test_another_log_is_read_as_its_configuration_says_or_by_default(tmp_path: Path) -> None:
    log, config = tmp_path / "clicks.csv", tmp_path / "books.toml"
    log.touch()
    data = 'log = "elsewhere.csv"\nformat = { user = "reader", item = "book" }\n'
    config.write_text(f'kind = "otm-sequence"\nname = "books"\n[data]\n{data}')
    for more, name, user in ((["--config", str(config)], "books", "reader"), ([], "log", "user")):
        real = real_logs.load(options("--log", str(log), *more))
        assert (real.name, real.log, real.config.data.format.model_dump()["user"]) == (name, log, user)


# -- hidden items ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hidden() -> HiddenItems:
    rng = np.random.default_rng(1)
    log = log_of([rng.permutation(12)[:8].tolist() for _ in range(60)], items=12)
    items = pa.table({"id": log.item_ids, "title": [None, *(f"book {row}" for row in range(1, 12))]})
    whole = Prepared(split_of(log, 40, 10, 10), ItemTable.build(items))
    return hide(deep_config({"kind": "otm-sequence", "name": "books", "data": {"log": "log.csv"}}), whole, 0.25, 3, seed=1)


def test_training_knows_nothing_of_hidden_items(hidden: HiddenItems) -> None:
    ids = set(hidden.whole.items.ids_of(hidden.hidden_n))
    assert len(ids) == 3
    assert ids.isdisjoint(hidden.old.items.ids_of(np.arange(len(hidden.old.items))))
    old, whole = hidden.old.split, hidden.whole.split
    for user in old.train.tolist():
        before = [item for item in whole.lists.of(user).tolist() if item not in hidden.hidden_n]
        assert hidden.old.items.ids_of(old.lists.of(user)) == hidden.whole.items.ids_of(np.array(before))
    assert {pair.user for pair in old.test} <= {pair.user for pair in whole.validation}


def test_events_are_what_training_users_had_before(hidden: HiddenItems) -> None:
    for item, users, events in zip(hidden.hidden_n.tolist(), hidden.users, hidden.events, strict=True):
        assert len(set(users)) == len(events) == 3
        for user, event in zip(users, events, strict=True):
            items = hidden.whole.split.lists.of(user).tolist()
            before = [other for other in items[: items.index(item)] if other not in hidden.hidden_n]
            assert hidden.old.items.ids_of(event) == hidden.whole.items.ids_of(np.array(before))
