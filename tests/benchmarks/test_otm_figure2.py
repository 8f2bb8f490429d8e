"""Figure 2 of OTM: what is counted on a level, against counting by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.otm import otm_figure2
from tests.pictures import Pictures
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


def test_shares_fall_and_sum_to_one() -> None:
    np.testing.assert_allclose(otm_figure2.shares(np.array([1, 0, 5, 2])), [5 / 8, 2 / 8, 1 / 8, 0])


def test_an_even_level_has_a_tenth_in_its_head_and_half_in_its_tail() -> None:
    assert otm_figure2.head_and_tail(np.full(256, 1 / 256)) == pytest.approx({"head": 0.1, "tail": 0.5})
    assert otm_figure2.head_and_tail(np.array([0.7, 0.1, 0.1, 0.1])) == pytest.approx({"head": 0.28, "tail": 0.2})


@pytest.mark.slow
def test_the_more_concentrated_log_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pictures: Pictures
) -> None:
    rng = np.random.default_rng(0)
    config = tmp_path / "log.toml"
    config.write_text(
        'kind = "otm-sequence"\nname = "log"\n'
        '[data]\nlog = "any"\nformat = { format = "lists", separator = " " }\n[tree]\nkind = "random"\n'
    )
    studies = []
    for name, power in (("even", 1.0), ("uneven", 6.0)):
        items = (40 * rng.random((60, 12)) ** power).astype(int)
        items[0], items[1:5, :8] = np.arange(12), np.arange(8, 40).reshape(4, 8)  # the same catalogue
        log = tmp_path / name
        log.write_text("\n".join(" ".join(map(str, [user, *row])) for user, row in enumerate(items)))
        report = tmp_path / f"{name}.json"
        arguments = ["otm_figure2", "--log", str(log), "--config", str(config), "--json", str(report)]
        monkeypatch.setattr(sys, "argv", arguments)
        otm_figure2.main()
        studies += [study | {"set": name} for study in json.loads(report.read_text())["studies"]]
    report.write_text(json.dumps({"studies": studies}))
    monkeypatch.setattr(sys, "argv", ["otm_figure2", "--from-json", str(report), "--plot", str(tmp_path / "figure.png")])
    otm_figure2.main()
    assert "by the heads: uneven > even; by the tails: uneven > even" in capsys.readouterr().out
    lines = pictures.lines(tmp_path / "figure.png")
    for study in studies:
        assert [share for _, share in lines[f"{study['set']} (random tree)"]] == study["shares"]
