"""OTM's figures and tables: their parts against brute force, their claims in the small, and the rows on real logs."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import real_logs
from benchmarks.papers.otm import otm_figure2, otm_real, otm_real_trees, otm_table1, otm_table2
from benchmarks.papers.otm.otm_table2 import (
    HEIGHT,
    LEAVES,
    Data,
    level,
    make_data,
    optimal_labels,
    ranks,
)
from espalier.errors import InvalidConfig
from tests.pictures import Pictures
from training.specification.deep import RobustObjective
from training.specification.models import read_deep_config
from training.specification.networks import MlpScorer, ProductScorer
from training.trees.balanced import random_tree


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=40),
    branching=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_a_node_counts_the_instances_that_have_a_target_below(pairs: list[tuple[int, int]], branching: int, seed: int) -> None:
    tree = random_tree(13, branching, seed=seed)
    below: list[set[int]] = [set() for _ in range(tree.node_count)]
    for instance, item in pairs:
        node = int(tree.leaf_of_item[item])
        while node >= 0:
            below[node].add(instance)
            node = int(tree.parent[node])
    instance_E, item_E = np.array(pairs, np.int64).T
    found = otm_figure2.relevant_instances(tree, instance_E, item_E)
    assert [level.tolist() for level in found] == [[len(below[n]) for n in tree.level(h)] for h in range(tree.height + 1)]


pytestmark = pytest.mark.release


def test_a_node_is_relevant_where_an_item_below_is() -> None:
    rng = np.random.default_rng(0)
    leaves = rng.random((3, 8)) < 0.3
    levels = otm_table1.upward(leaves, np.logical_or)
    assert [found.shape[1] for found in levels] == [1, 2, 4, 8]
    for h, found in enumerate(levels):
        np.testing.assert_array_equal(found, leaves.reshape(3, 1 << h, -1).any(2))


def test_exact_probabilities_are_those_of_all_outcomes() -> None:
    eta = np.array([0.1, 0.5, 0.9, 0.3])
    outcomes = np.array(list(itertools.product([False, True], repeat=4)))
    chance = np.where(outcomes, eta, 1 - eta).prod(1)
    expected = [chance @ z for z in otm_table1.upward(outcomes, np.logical_or)]
    found = otm_table1.scores(np.random.default_rng(0), eta)
    for level_, wanted in zip(found["inf"], expected, strict=True):
        np.testing.assert_allclose(1 - np.exp(-level_), wanted)
    for level_, wanted in zip(found["inf float32"], expected, strict=True):
        np.testing.assert_allclose(level_, wanted, rtol=1e-6)


def test_beam_search_keeps_the_best_children_and_of_equals_the_lower() -> None:
    levels = [np.zeros(1), np.array([1.0, 1.0]), np.array([0.1, 0.5, 0.9, 0.5])]
    assert otm_table1.beam_search(levels, 1).tolist() == [1]
    assert otm_table1.beam_search(levels, 2).tolist() == [1, 2]
    assert otm_table1.beam_search(levels, 3).tolist() == [1, 2, 3]


def test_optimal_labels_follow_the_child_of_the_larger_logit() -> None:
    generator = torch.Generator().manual_seed(1)
    y_BM = (torch.rand(4, LEAVES, generator=generator) < 0.1).float()
    g_BN = torch.randint(-1, 2, (4, 2 * LEAVES - 1), generator=generator).float()  # with ties
    labels_BN = optimal_labels(y_BM, g_BN)
    torch.testing.assert_close(level(labels_BN, HEIGHT), y_BM)
    for b in range(4):
        for node in [0, 1, 2, 17, 100, 511, 1022]:
            left, right = 2 * node + 1, 2 * node + 2
            children = (
                [left, right] if g_BN[b, left] == g_BN[b, right] else [left if g_BN[b, left] > g_BN[b, right] else right]
            )  # of equals the positive one
            assert labels_BN[b, node] == max(labels_BN[b, child] for child in children)


@pytest.mark.parametrize("method", otm_table2.METHODS)
def test_every_method_learns(method: str) -> None:
    """A few epochs take most of the regret of untrained nodes away."""
    train, test = make_data(torch.Generator().manual_seed(6), -5.0)
    few = Data(*(part[: 2 * otm_table2.BATCH] for part in (train.x_BD, train.eta_BM, train.y_BM)))
    theta_DN = otm_table2.fit(method, few, torch.Generator().manual_seed(7), epochs=3)
    untrained = otm_table2.regrets(0.01 * torch.randn(len(test.x_BD), 2 * LEAVES - 1, generator=torch.Generator().manual_seed(8)), test)
    assert otm_table2.regrets(ranks(method, test.x_BD @ theta_DN), test)[-1] < 0.8 * untrained[-1]


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
