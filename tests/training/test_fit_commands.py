"""The commands fit, evaluate and inspect on a log with planted clusters, and what they say is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from espalier.bundle import Bundle, find_versions
from tests.pictures import Pictures
from tests.training.commands import command, written_toml
from tests.training.planted import CLUSTERS, SIZE, planted_log, settings


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_log(tmp_path_factory.mktemp("data"))


@dataclass(frozen=True)
class Fit:
    """What a fit was given."""

    config: Path
    out: Path


@pytest.fixture(scope="module")
def fit(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """A fit of a few steps."""
    folder = tmp_path_factory.mktemp("fit")
    out = folder / "models" / "shop" / "2"
    config = written_toml(folder / "planted.toml", settings(log, "tdm", optimiser={"steps": 40}))
    fitted = command("fit", "--config", config, "--out", out, "--device", "cpu")
    assert (fitted.status, fitted.err.count("error")) == (0, 0)
    return Fit(config, out)


def test_a_fit_leaves_a_version_and_nothing_else_and_is_never_overwritten(fit: Fit) -> None:
    assert find_versions(fit.out.parents[1]) == {"shop": (2,)}
    assert [file.name for file in fit.out.parent.iterdir()] == ["2"]  # nothing left of the work
    assert Bundle.open(fit.out).manifest.name == "shop"
    before = fit.out.stat().st_mtime_ns
    refused = command("fit", "--config", fit.config, "--out", fit.out)
    assert (refused.status, fit.out.stat().st_mtime_ns) == (1, before)
    assert "never overwritten" in refused.err


def test_evaluate_and_inspect_show_what_was_fitted(fit: Fit, log: Path, tmp_path: Path, pictures: Pictures) -> None:
    out = fit.out
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    options = ("--beam", "4,16", "--m", "5,10", "--batch", 8, "--exclude-seen", "--json", report, "--plot", plot)
    assert command("evaluate", "--model", out, *options).status == 0
    written = json.loads(report.read_text())
    assert written.keys() - {"version"} == {"model", "engine", "arithmetic", "queries", "rows", "warnings"}
    assert (written["model"], written["engine"], written["queries"]) == ("shop", "compiled-cpu", 30)
    assert [(row["beam_size"], row["m"], row["batch"]) for row in written["rows"]] == [(4, 5, 8), (4, 10, 8), (16, 5, 8), (16, 10, 8)]
    for row in written["rows"]:
        against = {"recall_against"} if row["beam_size"] == 16 else set()
        assert row.keys() - against == {"beam_size", "m", "batch", "precision", "recall", "f", "ndcg", "ms_per_query"}
        assert 0 < row["recall"] <= 1
        assert 0 < row["precision"] <= 1
        assert row["ms_per_query"] > 0
    assert pictures.lines(plot) == {
        f"recall@{m}": [(row["ms_per_query"], row["recall"]) for row in written["rows"] if row["m"] == m] for m in (5, 10)
    }

    again = command("evaluate", "--model", out, "--data", log, "--beam", "16", "--m", "10", "--exclude-seen", "--engine", "reference")
    assert "shop version 2 on reference, 30 queries, seen items excluded" in again.out
    assert f"{written['rows'][3]['recall']:.4f}" in again.out  # the held-out queries are all 30 test users

    shown = command("inspect", "--model", out)
    assert "shop version 2: tdm" in shown.out
    assert f"tree: {CLUSTERS * SIZE} items, 255 nodes, 8 levels" in shown.out
    assert shown.out.count("item-") > 10


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"optimiser": {"steps": 0}}, {}, "optimiser.steps: got 0, expected"),
        ({"data": {"log": "nowhere.csv"}}, {}, "log: got 'nowhere.csv', expected a file that exists"),
        ({}, {"--out": "planted/one"}, "--out: got"),
        ({}, {"--out": "planted/0"}, "--out: got"),
        ({}, {"--out": "planted/01"}, "--out: got"),
        ({}, {"--out": "Bad Name/1"}, "--out: got 'Bad Name', expected a model name"),
        ({}, {"--config": "none.toml"}, "--config: got"),
    ],
)
def test_a_bad_option_or_key_of_a_fit_is_named(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], options: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"--config": written_toml(tmp_path / "planted.toml", settings(log, "tdm") | changed), "--out": "planted/9", "--device": "cpu"}
    outcome = command("fit", *(part for pair in (given | options).items() for part in pair))
    assert outcome.status == 1
    assert f"error: {message}" in outcome.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--beam", "four", "--beam: got 'four', expected whole numbers"),
        ("--m", "0", "--m: got 0, expected 1 to 64"),
        ("--m", "65", "--m: got 65, expected 1 to 64"),
        ("--beam", "33", "--beam: got 33, expected 1 to 32"),
        ("--engine", "abacus", "engine 'abacus': expected one of"),
        ("--model", "nowhere", "nowhere/manifest.json: missing"),
        ("--data", "nowhere.csv", "log: got"),
    ],
)
def test_a_bad_option_of_evaluate_is_named(fit: Fit, option: str, value: str, message: str) -> None:
    given = {"--model": fit.out, "--beam": "4", "--m": "5"} | {option: value}
    outcome = command("evaluate", *(part for pair in given.items() for part in pair))
    assert outcome.status == 1
    assert f"error: {message}" in outcome.err
