"""Which validation users training and export choose by, and by what ranking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training.deep.validation as validation
from training.deep.first_model import build_model
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.topology import Topology
from training.specification.deep import DeepConfig
from training.specification.models import deep_config


def prepared(folder: Path, **sections: Any) -> tuple[DeepConfig, Prepared]:
    """40 users whose second half holds one item of their first and five new ones; half of them are validation users."""
    rng = np.random.default_rng(1)
    lines = ["user,item"]
    for user in range(40):
        items = rng.permutation(30)[:11]
        lines += [f"u{user},i{item}" for item in [*items[:6], items[0], *items[6:]]]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    data = {"log": str(folder / "log.csv"), "split": {"test_share": 0.1, "validation_share": 0.5}}
    base: dict[str, Any] = {"kind": "otm-robust", "name": "x", "data": data}
    config = deep_config(base | {"scorer": {"node_dim": 4, "hidden": [4]}} | sections)
    return config, prepare(config, None, folder / "work")


@pytest.mark.parametrize(("exclude_seen", "relevant"), [(True, 5), (False, 6)])
def test_seen_items_count_as_relevant_only_where_the_search_returns_them(tmp_path: Path, exclude_seen: bool, relevant: int) -> None:
    config, data = prepared(tmp_path, search={"exclude_seen": exclude_seen})
    assert {len(pair.relevant) for pair in validation.validation_pairs(config, data, 100)} == {relevant}


@pytest.mark.parametrize("count", [1, 3, 7, 20, 100])
def test_at_most_so_many_users_are_taken_from_all_over(tmp_path: Path, count: int) -> None:
    config, data = prepared(tmp_path)
    users = [pair.user for pair in validation.validation_pairs(config, data, count)]
    everybody = [pair.user for pair in data.split.validation]
    assert users == everybody[:: -(-len(everybody) // count)]
    assert 0 < len(users) <= count


@pytest.mark.parametrize(
    ("kind", "objective", "search", "ranking"),
    [
        ("otm-robust", {"gamma": 0.25}, {}, ("logit", 0.25)),
        ("otm-robust", {"gamma": 0.25}, {"gamma": 0.75}, ("logit", 0.75)),
        ("tdm", {}, {}, ("logit", 0.0)),
        ("plt", {}, {}, ("log_activation", 1.0)),
        ("hsm", {}, {"gamma": 1}, ("log_activation", 1.0)),
    ],
)
def test_weights_are_chosen_by_the_ranking_that_is_served_or_trained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    objective: dict[str, Any],
    search: dict[str, Any],
    ranking: tuple[str, float],
) -> None:
    config, data = prepared(tmp_path, kind=kind, objective=objective, search=search)
    tree = build_tree(config, data)
    asked = []
    search_pairs = validation.search_pairs

    def noted(*arguments: Any) -> Any:
        asked.append((arguments[5], arguments[4]))
        return search_pairs(*arguments)

    monkeypatch.setattr(validation, "search_pairs", noted)
    pairs = validation.validation_pairs(config, data, 5)
    recall = validation.validation_recall(config, Topology(tree, torch.device("cpu")), build_model(config, tree, data).eval(), pairs)
    assert asked == [ranking]
    assert recall == 1.0  # m is larger than the catalogue
