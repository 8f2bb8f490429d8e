"""A method of one's own beside those that `compare` knows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from espalier.errors import InvalidConfig
from espalier.items import ItemTable
from espalier.search import NO_ITEM
from tests.training.commands import command
from tests.training.logs import written_log
from training.baselines.own_method import _answer_rows, own_method
from training.compare.compare import CompareOptions

METHOD = """
from collections import Counter

class Popular:
    def fit(self, lists):
        self.best = [item for item, _ in Counter(item for one in lists for item in one).most_common()]

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
        assert rows["Popular"][metric]["mean"] == pytest.approx(figure["mean"], abs=0.02), metric  # ties have another order


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
    for own in (["--own", f"{module}:popularity"], ["--own", f"{module}:Popular", "--own", f"{module}:Popular"]):
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
