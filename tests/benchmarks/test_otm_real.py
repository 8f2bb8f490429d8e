"""The benchmark on real logs: its methods are valid configurations, and its rows are what others read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import real_logs
from benchmarks.papers.otm import otm_real, otm_real_trees
from espalier.errors import InvalidConfig
from tests.pictures import Pictures
from training.specification.deep import RobustObjective
from training.specification.models import read_deep_config
from training.specification.networks import MlpScorer, ProductScorer

pytestmark = pytest.mark.slow

CONFIG = read_deep_config(real_logs.CONFIGS / "amazon-games.toml")


def test_every_tree_method_changes_the_configuration_into_a_valid_one() -> None:
    configs = {method: otm_real_trees.method_config(CONFIG, method) for method in otm_real_trees.TREES}
    kinds = {method: method for method in otm_real_trees.TREES} | dict.fromkeys(("tdm-same-scorer", "tdm-random-rows", "jtm"), "tdm")
    assert {method: config.kind for method, config in configs.items()} == kinds
    assert configs["otm-robust"].objective == RobustObjective()
    assert configs["tdm-same-scorer"].scorer == ProductScorer()
    assert {method for method, config in configs.items() if config.objective.gamma} == {"otm-robust"}


def test_a_method_may_be_changed_key_by_key() -> None:
    config = otm_real_trees.method_config(CONFIG, 'otm-robust+objective.gamma=0.25+scorer.kind="mlp"')
    assert (config.objective.gamma, config.scorer.kind) == (0.25, "mlp")
    for order in ('scorer.node_dim=48+scorer.kind="mlp"', 'scorer.kind="mlp"+scorer.node_dim=48'):
        scorer = otm_real_trees.method_config(CONFIG, f"otm-robust+{order}").scorer
        assert scorer == MlpScorer(node_dim=48)
    for wrong in ("otm-robust+gamma=1", "otm-robust+scorer.kind=mlp", "otm-robust+objective.gamma=2"):
        with pytest.raises(InvalidConfig):
            otm_real_trees.method_config(CONFIG, wrong)


def test_rows_are_written_after_every_method_and_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: Pictures
) -> None:
    rng = np.random.default_rng(1)
    lines = [f"u{user},i{item}" for user in range(120) for item in rng.permutation(12)[:8] * 4 + user % 4]
    (tmp_path / "log.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    config = tmp_path / "small.toml"
    config.write_text(
        'kind = "otm-robust"\nname = "small"\n[data]\nlog = "elsewhere"\nformat = { min_user_events = 5 }\n[instances]\nwindows = [4, 2]\n'
        "[scorer]\nnode_dim = 6\nhidden = [8]\n[optimiser]\nsteps = 3\nbatch = 20\n"
    )
    out, plot = tmp_path / "rows.json", tmp_path / "curves.png"
    common = ["otm_real", "--log", str(tmp_path / "log.csv"), "--config", str(config), "--json", str(out), "--beams", "4,all"]

    def run(methods: str, *more: str) -> list[dict[str, object]]:
        monkeypatch.setattr(sys, "argv", [*common, "--methods", methods, *more])
        otm_real.main()
        rows: list[dict[str, object]] = json.loads(out.read_text())["rows"]
        return rows

    first = run("popularity,tdm")
    rows = run("popularity,tdm,jtm", "--plot", str(plot), "--markdown", str(tmp_path / "table.md"))
    assert rows[: len(first)] == first
    at_200 = [row for row in rows if row["m"] == 200 and not row["exclude_seen"]]
    raw = {(row["method"], row["beam_size"]): row["recall"] for row in at_200 if row["gamma"] in (0, None)}
    drawn = pictures.lines(plot)
    assert drawn["jtm, γ = 0"] == [(beam, raw["jtm", beam]) for beam in (4, 48)]
    assert {height for _, height in drawn["popularity"]} == {raw["popularity", None]}
    keys = {"method", "seed", "m", "beam_size", "exclude_seen", "precision", "recall", "f"}
    assert all(keys <= row.keys() for row in rows)
    assert {row["method"] for row in rows} == {"popularity", "tdm", "jtm"}
    assert {row["beam_size"] for row in rows if row["method"] == "jtm"} == {4, 48}
    assert [row["recall"] for row in rows if row["method"] == "tdm" and row["beam_size"] == 48 and row["m"] == 200] == [1.0] * 4
    changes = [row for row in rows if "recall_change" in row]
    assert {(row["beam_size"], row["m"], row["exclude_seen"]) for row in changes} == {(48, 200, False)}
    assert {(row["best_step"], row["steps"]) for row in rows if row["method"] != "popularity"} == {(3, 3)}
    table = (tmp_path / "table.md").read_text().splitlines()
    popular = next(row["recall"] for row in rows if (row["method"], row["m"], row["exclude_seen"]) == ("popularity", 10, True))
    assert [line.count("|") for line in table] == [10] * (2 + len(rows) // 3)
    assert f" / {100 * float(str(popular)):.2f} / " in next(
        line for line in table if line.startswith("| popularity |  |  | excluded | 1 |")
    )
    with pytest.raises(SystemExit, match=r"--json: .* rows of the same run; its steps is None, not 2"):
        run("popularity", "--steps", "2")
    assert all(isinstance(row["recall_change"], float) and row["recall_change"] > 0 for row in changes)  # eight leaves gave way to all
