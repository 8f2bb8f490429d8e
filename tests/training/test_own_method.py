"""A method of one's own beside those that `compare` knows: a class, and a file of what it shows."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from espalier.errors import InvalidConfig
from espalier.items import ItemTable
from espalier.search import NO_ITEM
from tests.training.commands import command
from tests.training.logs import written_log
from training.baselines.own_lists import listed_method
from training.baselines.own_method import _answer_rows, own_method
from training.compare.compare import CompareOptions
from training.data.interactions import Interactions
from training.data.splits import EvaluationPair, Split
from training.retrieval.task import Metric, Task
from training.specification.deep import DeepConfig
from training.specification.models import read_config

METHOD = """
from collections import Counter

class Popular:
    def fit(self, lists):
        users = Counter(item for one in lists for item in set(one))
        self.best = sorted(users, key=lambda item: (-users[item], item))

    def recommend(self, histories, m):
        return [self.best[:m] for _ in histories]

half_done = object()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_methods.py").write_text(METHOD)
    (tmp_path / "failing.py").write_text("1 / 0\n")
    written_log(tmp_path / "log.csv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    return "my_methods"


def test_it_is_measured_as_the_baseline_that_it_equals(module: str) -> None:
    outcome = command("compare", "log.csv", "--methods", "popularity", "--own", f"{module}:Popular", "--json", "report.json")
    assert outcome.status == 0, outcome.err
    rows = {row["method"]: row["figures"] for row in json.loads(Path("report.json").read_text())["rows"]}
    for metric, figure in rows["popularity"].items():
        assert rows["Popular"][metric]["mean"] == pytest.approx(figure["mean"]), metric


def test_what_it_needs_is_measured_before_others(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(given: CompareOptions, _: object) -> None:
        asked.append(given)
        raise InvalidConfig("nothing", None, "more than to see what is asked")

    monkeypatch.setattr("training.compare.command.compare", noted)
    assert command("compare", "log.csv", "--methods", "popularity,item-cf", "--own", f"{module}:Popular").status == 1
    assert list(asked[0].methods) == ["Popular", "popularity", "item-cf"]


def test_answers_are_cut_to_what_the_log_has() -> None:
    items = ItemTable.build(pa.table({"id": ["a", "b", "c", "d"]}))

    class Fixed:
        def fit(self, lists: object) -> None: ...

        def recommend(self, histories: Sequence[Sequence[str]], m: int) -> list[list[str]]:
            asked.append((histories, m))
            return [["c", "nobody", "a", "c", "d", "b"]] * len(histories)

    asked: list[tuple[Sequence[Sequence[str]], int]] = []
    queries = [np.array([0, -1, 2]), np.array([], np.int64)]
    assert _answer_rows(Fixed(), items, queries, m=3, exclude_seen=True).tolist() == [[3, 1, NO_ITEM], [2, 0, 3]]
    assert asked == [([["a", "c"], []], 5)]
    assert _answer_rows(Fixed(), items, queries, m=2, exclude_seen=False).tolist() == [[2, 0], [2, 0]]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("my_methods:Unknown", " .AttributeError"),
        ("no_such_module:X", " .ModuleNotFoundError"),
        ("my_methods", " .AttributeError"),
        ("my_methods:half_done", ""),
        ("failing:X", " .ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_named(module: str, where: str, reason: str) -> None:
    with pytest.raises(InvalidConfig, match=f"--own: got '{where}', expected module:name of .* `recommend`{reason}"):
        own_method("--own", where)


def test_a_log_or_a_configuration_is_compared(tmp_path: Path) -> None:
    for arguments in ([], ["log.csv", "--config", "log.toml"]):
        outcome = command("compare", *arguments)
        assert outcome.status == 1
        assert "LOG: got" in outcome.err
    outcome = command("compare", "--config", "log.toml", "--user", "u")
    assert "--user: got 'u', expected nothing beside --config" in outcome.err


def test_a_method_that_fails_is_named_and_the_others_are_measured(module: str, tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(
        METHOD + "\nclass Broken(Popular):\n    def recommend(self, histories, m):\n        return {}[m]\n"
    )
    outcome = command("compare", "log.csv", "--methods", "popularity", "--own", f"{module}:Broken", "--json", "report.json")
    assert outcome.status == 0, outcome.err
    report = json.loads(Path("report.json").read_text())
    assert {row["method"] for row in report["rows"]} == {"popularity"}
    assert "a method that does not raise KeyError" in str(report["not_judged"])


def test_a_name_that_is_taken_is_refused(module: str, tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(METHOD + "\npopularity = Popular()\n")
    (tmp_path / "fusion:a.csv").write_text("user,item,rank\nu1,i1,1\n")
    taken = [[f"{module}:popularity"], [f"{module}:Popular", f"{module}:Popular"], [str(tmp_path / "fusion:a.csv")]]
    for own in ([word for source in sources for word in ("--own", source)] for sources in taken):
        outcome = command("compare", "log.csv", "--methods", "popularity", *own)
        assert outcome.status == 1
        assert "expected a name that no other method has" in outcome.err


def test_an_interrupt_leaves_what_was_done_and_says_so_in_the_exit_code(module: str, tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(
        METHOD + "\nclass Endless(Popular):\n    def recommend(self, histories, m):\n        raise KeyboardInterrupt\n"
    )
    own = ["--own", f"{module}:Popular", "--own", f"{module}:Endless"]
    outcome = command("compare", "log.csv", "--methods", "popularity", *own, "--json", "report.json")
    assert (outcome.status, "interrupted: methods that are missing were not run" in outcome.out) == (130, True)
    assert outcome.err.endswith("Interrupted.\n")
    assert "Popular" in {row["method"] for row in json.loads(Path("report.json").read_text())["rows"]}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("80000 requested and 4096 written")])
def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("training.new_configuration.write_configuration", full)
    outcome = command("new", tmp_path / "log.csv")
    assert outcome.status == 1
    assert "MiB are free here" in outcome.err
    assert "TMPDIR" in outcome.err
    monkeypatch.setattr("training.live.publish_fold.fold", full)
    outcome = command("fold", "--model", "models/books/1", "--out", tmp_path / "books" / "2")
    assert (outcome.status, f"MiB are free in {tmp_path}, " in outcome.err) == (1, True), outcome.err
    monkeypatch.setattr("training.shard.command.shard", full)
    outcome = command("shard", "--model", "models/books/1", "--shards", "2", "--out", tmp_path / "shards")
    assert (outcome.status, f"MiB are free in {tmp_path}, " in outcome.err) == (1, True), outcome.err


# -- as a file of what it shows -------------------------------------------------------------------------------------------


LAST = '[data.split]\nkind = "last"\n'


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert command("new", written_log(tmp_path / "log.csv"), "--out", "log.toml").status == 0
    file = tmp_path / "log.toml"  # many events repeat items, but answers without seen items are simpler to compute by hand
    file.write_text(file.read_text().replace("exclude_seen = false", "exclude_seen = true"))
    return file


def popular(history: list[str], counts: Counter[str]) -> list[str]:
    """What the popularity baseline shows, by hand: of as many users the lower id first, as item rows are sorted."""
    return [item for item, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0])) if item not in history]


def answers(folder: Path, parts: bool) -> pa.Table:
    learned, asked = (pq.read_table(folder / name).to_pylist() for name in ("train.parquet", "queries.parquet"))
    counts = Counter(item for user, item in {(row["user"], row["item"]) for row in learned})
    rows = [
        {"user": query["user"], "item": item, "rank": rank} | ({"part": query["part"]} if parts else {})
        for query in reversed(asked)
        for rank, item in reversed([*enumerate(popular(query["history"], counts))])
    ]
    return pa.Table.from_pylist(rows)


@pytest.mark.parametrize(("split", "parts"), [("", False), ("", True), (LAST, True)])
def test_lists_are_measured_as_the_method_that_made_them(log: Path, tmp_path: Path, split: str, parts: bool) -> None:
    if split:
        log.write_text(log.read_text() + split)
    assert command("compare", "--config", log, "--queries-to", "asked").status == 0
    pq.write_table(answers(tmp_path / "asked", parts), "mine.parquet")
    said = command("compare", "--config", log, "--methods", "popularity", "--own", "mine.parquet", "--json", "report.json")
    assert said.status == 0, said.err
    rows = {row["method"]: row for row in json.loads(Path("report.json").read_text())["rows"]}
    for metric, figure in rows["popularity"]["figures"].items():
        assert rows["mine"]["figures"][metric]["mean"] == pytest.approx(figure["mean"], abs=0.02), metric  # ties have another order
    assert rows["mine"]["validation"] == pytest.approx(rows["popularity"]["validation"], abs=0.02)


def test_what_is_written_is_what_methods_learn_from_and_are_asked(log: Path, tmp_path: Path) -> None:
    assert command("compare", "--config", log, "--queries-to", "asked").status == 0
    learned, asked = (pq.read_table(tmp_path / "asked" / name) for name in ("train.parquet", "queries.parquet"))
    whole: dict[str, list[str]] = {}
    for row in pyarrow.csv.read_csv("log.csv").to_pylist():
        whole.setdefault(row["user"], []).append(row["item"])
    by_user: dict[str, list[str]] = {}
    for row in learned.to_pylist():
        by_user.setdefault(row["user"], []).append(row["item"])
    assert by_user.items() <= whole.items()
    queries = {row["user"]: row for row in asked.to_pylist()}
    assert queries.keys() == whole.keys() - by_user.keys()
    assert all(row["history"] == whole[user][: len(whole[user]) // 2] for user, row in queries.items())
    assert Counter(row["part"] for row in queries.values()).keys() == {"validation", "test"}


class TestRows:
    """Which list a query gets, on a split by hand."""

    items = ItemTable.build(pa.table({"id": ["a", "b", "c", "d"]}))
    history = np.array([0, 1])

    def task(self, log: Path) -> Task:
        users, ids = pa.array(["u", "v", "w"]), pa.array(["a", "b", "c", "d"])
        lists = Interactions(users, ids, np.array([0, 2, 4, 6]), np.array([0, 1] * 3, np.int32), None, (), "", "file")
        config = read_config(log)
        assert isinstance(config, DeepConfig)
        test = [EvaluationPair(user, self.history.copy(), np.array([2])) for user in (0, 1)]
        split = Split(lists, np.array([2]), [EvaluationPair(0, np.array([0]), np.array([1]))], test, config.data.split)
        return Task(split, self.items, Metric("recall", 2), False, config.windowed_instances)

    def ranked(self, log: Path, rows: list[dict[str, Any]], exclude_seen: bool = False) -> list[list[int]]:
        task = self.task(log)
        pq.write_table(pa.Table.from_pylist(rows), "mine.parquet")
        rank = listed_method("--own", Path("mine.parquet"))[1](task).rank
        found_BM = rank([pair.query for pair in (*task.split.test, *task.split.validation)], m=3, exclude_seen=exclude_seen)
        lists: list[list[int]] = found_BM.tolist()
        return lists

    def test_users_of_one_history_have_lists_of_their_own(self, log: Path) -> None:
        shown = {"u": "dac", "v": "cb"}
        rows = [{"user": user, "item": item, "rank": rank} for user, items in shown.items() for rank, item in enumerate(items)]
        assert self.ranked(log, rows) == [[3, 0, 2], [2, 1, NO_ITEM], [NO_ITEM] * 3]
        assert self.ranked(log, rows, exclude_seen=True)[:2] == [[3, 2, NO_ITEM], [2, NO_ITEM, NO_ITEM]]

    def test_ranks_order_and_what_the_log_does_not_have_is_left_out(self, log: Path) -> None:
        rows: list[dict[str, Any]] = [
            {"user": "u", "item": "c", "rank": 7.5},
            {"user": "u", "item": "nothing", "rank": 0.0},
            {"user": "nobody", "item": "a", "rank": 0.0},
            {"user": "u", "item": "d", "rank": -1.0},
            {"user": "u", "item": "d", "rank": 9.0},
            {"user": "u", "item": "a", "rank": None},
            {"user": "u", "item": None, "rank": 1.0},
        ]
        assert self.ranked(log, rows)[0] == [3, 2, 0]

    def test_a_part_says_which_query_of_a_user_is_answered(self, log: Path) -> None:
        rows = [{"user": "u", "item": item, "rank": 1, "part": part} for part, item in (("validation", "c"), ("test", "d"))]
        assert self.ranked(log, rows) == [[3, NO_ITEM, NO_ITEM], [NO_ITEM] * 3, [2, NO_ITEM, NO_ITEM]]

    def test_ranks_of_any_size_and_types_of_other_libraries_are_read(self, log: Path) -> None:
        rows: list[dict[str, Any]] = [
            {"user": "u", "item": "d", "rank": -(2**62) - 1, "part": "test"},
            {"user": "u", "item": "a", "rank": 2**62},
        ]
        assert self.ranked(log, rows[:1])[0] == [3, NO_ITEM, NO_ITEM]
        assert self.ranked(log, [{key: row[key] for key in ("user", "item", "rank")} for row in rows])[0] == [3, 0, NO_ITEM]

    def test_items_that_the_log_does_not_have_and_lists_in_a_row_are_named(self, log: Path) -> None:
        with pytest.raises(InvalidConfig, match="items of the log; it has none of the 1 in the file"):
            self.ranked(log, [{"user": "u", "item": "z", "rank": 1}])
        with pytest.raises(InvalidConfig, match="an id of a user and an id of an item in each row"):
            self.ranked(log, [{"user": "u", "item": ["a", "b"], "rank": 1}])
        with pytest.raises(InvalidConfig, match=r"rank nan', expected numbers"):
            self.ranked(log, [{"user": "u", "item": "a", "rank": float("nan")}])

    def test_lists_of_nobody_who_is_asked_are_refused(self, log: Path) -> None:
        with pytest.raises(InvalidConfig, match="lists of the users of test queries"):
            self.ranked(log, [{"user": "w", "item": "a", "rank": 1}])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"user": ["u"], "item": ["a"]}, "each once; look at rank"),
        ({"user": ["u"], "item": ["a"], "rank": ["first"]}, "numbers, the lowest for the best item"),
        ({"user": ["u"], "item": ["a"], "rank": [1], "part": ["train"]}, "expected validation or test"),
        ({"user": [], "item": [], "rank": []}, "a row for each item of an answer"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, columns: dict[str, list[Any]], expected: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
    with pytest.raises(InvalidConfig, match=expected):
        listed_method("--own", tmp_path / "mine.parquet")


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="a file that exists"):
        listed_method("--own", tmp_path / "none.parquet")
    (tmp_path / "mine.parquet").write_text("no Parquet")
    with pytest.raises(InvalidConfig, match=r"--own: got .*, expected a Parquet file"):
        listed_method("--own", tmp_path / "mine.parquet")


@pytest.mark.parametrize(("option", "value"), [("--methods", "popularity"), ("--beam", "50"), ("--log-to", "tensorboard:runs")])
def test_what_is_written_stands_alone(log: Path, option: str, value: str) -> None:
    said = command("compare", "--config", log, "--queries-to", "asked", option, value)
    assert (said.status, f"{option}: got {value!r}, expected nothing beside --queries-to" in said.err) == (1, True)


def test_another_file_of_that_name_is_measured_again(log: Path, tmp_path: Path) -> None:
    assert command("compare", "--config", log, "--queries-to", "asked").status == 0
    found = []
    table = answers(tmp_path / "asked", False)
    for part in (table, table.filter(pc.greater(table["rank"], 20)), table):
        pq.write_table(part, "mine.parquet")
        asked = ["compare", "--config", log, "--json", "report.json", "--methods"]
        assert command(*asked, "popularity,fusion:mine:popularity", "--own", "mine.parquet").status == 0
        assert command(*asked, "popularity").status == 0, "a run without it forgets nothing of it"
        rows = {row["method"]: row for row in json.loads(Path("report.json").read_text())["rows"]}
        found.append([rows[name]["figures"]["recall@10"]["mean"] for name in ("mine", "fusion:mine:popularity")])
    assert found[0] == found[2]
    assert found[0][0] > found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.parametrize(("name", "known"), [("als.v1.parquet", "als.v1"), ("MINE.PARQUET", "MINE"), (".parquet", None)])
def test_the_name_is_that_of_the_file(tmp_path: Path, name: str, known: str | None) -> None:
    table = pa.table({"user": ["u"], "item": ["a"], "rank": [1]})
    pq.write_table(table, tmp_path / name)
    if known is None:
        with pytest.raises(InvalidConfig, match="a file with a name"):
            listed_method("--own", tmp_path / name)
    else:
        assert listed_method("--own", tmp_path / name)[0] == known


def test_a_changed_module_is_measured_again(module: str) -> None:
    found = []
    for answers in ("self.best", "['nothing']"):
        Path("my_methods.py").write_text(METHOD.replace("self.best[:m]", answers))
        sys.modules.pop(module, None)
        asked = ["compare", "log.csv", "--methods", "popularity", "--own", f"{module}:Popular", "--json", "report.json"]
        assert command(*asked).status == 0
        found.append({row["method"]: row["figures"]["recall@10"]["mean"] for row in json.loads(Path("report.json").read_text())["rows"]})
    assert found[0]["Popular"] > found[1]["Popular"] == 0
