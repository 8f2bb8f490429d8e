"""Lists without an order under `otm-sequence`: shuffled, read as one window, and found from the first step on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.queries import HistoryKind, pad_histories
from espalier.search import Engine, SearchParams
from tests.training.runs import begun
from training.deep.first_model import INVERSE_TEMPERATURE
from training.deep.run import fit_and_export
from training.deep.scorers.sequence import SequenceQuery
from training.deep.scorers.window_states import WindowStates
from training.specification.deep import SequenceConfig
from training.specification.models import deep_config

CPU = torch.device("cpu")
GROUPS, SIZE = 6, 8


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Users who touch most items of one group, in ascending order."""
    rng, lines = np.random.default_rng(2), ["user,item"]
    for user in range(180):
        items = np.sort(rng.choice(SIZE, 6, replace=False)) + SIZE * (user % GROUPS)
        lines += [f"u{user},i{item:02d}" for item in items]
    file = tmp_path_factory.mktemp("log") / "log.csv"
    file.write_text("\n".join(lines) + "\n")
    return {
        "kind": "otm-sequence",
        "name": "sets",
        "data": {"log": str(file), "format": {"order": "none", "min_user_events": 4}},
        "scorer": {"node_dim": 16, "dropout": 0.0},
        "optimiser": {"steps": 30, "places": 200, "validate_every": 10},
        "search": {"beam_size": 20, "m": 5, "max_beam_size": 64, "max_m": 20},
    }


@pytest.fixture(scope="module")
def bundle(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    made = fit_and_export(deep_config(raw), None, tmp_path_factory.mktemp("models") / "sets" / "1", CPU, resume=False)
    assert made is not None
    return made


def test_the_history_of_a_set_is_one_window_and_its_targets_are_all_alike(raw: dict[str, Any], tmp_path: Path) -> None:
    run = begun(raw, tmp_path)
    assert isinstance(run.config, SequenceConfig)
    assert run.config.nearness == 0
    assert isinstance(run.model.encoder, SequenceQuery)
    (part,) = run.model.encoder.each
    assert isinstance(part.reader, WindowStates)
    assert part.reader.windows == (run.config.history_length,)


def test_a_step_learns_items_of_the_same_list_in_any_order(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(raw, tmp_path)
    group_I = np.array([int(item[1:]) // SIZE for item in run.prepared.interactions.item_ids.to_pylist()])
    ascending = []
    for _ in range(3):
        batch = next(run.steps.batches)
        place = batch.target_BT >= 0
        assert_array_equal(group_I[batch.history_BT[place]], group_I[batch.target_BT[place]])
        ascending.append((batch.history_BT[place] < batch.target_BT[place]).mean())
    assert 0.3 < np.mean(ascending) < 0.7


def test_a_model_begins_as_the_search_for_items_near_the_mean_of_a_history(raw: dict[str, Any], tmp_path: Path) -> None:
    run = begun(raw, tmp_path)
    tree, model = run.tree, run.model
    group_I = np.array([int(item[1:]) // SIZE for item in run.prepared.interactions.item_ids.to_pylist()])
    for group in range(GROUPS):
        items = np.flatnonzero(group_I == group)
        leaves = torch.from_numpy(tree.leaf_of_item[items[:3]])
        with torch.no_grad():
            state_D = model.state(leaves[None])[0, -1, :-1]
            rows_nD = model.node_rows[tree.leaf_offset :, :-1]
            mean_D = model.node_rows[leaves, :-1].mean(0)
            torch.testing.assert_close(state_D, mean_D * INVERSE_TEMPERATURE / (run.config.scorer.init_std**2 * 15), rtol=1e-4, atol=1e-4)
            nearest = torch.argsort(rows_nD @ state_D, descending=True)[:SIZE].numpy()
        assert set(tree.leaf_item[nearest].tolist()) == set(items.tolist())


@pytest.mark.parametrize("make", [ReferenceEngine, partial(open_engine, device="cpu")])
def test_a_bundle_of_sets_answers_with_the_rest_of_the_set_whatever_the_order(bundle: Bundle, make: Callable[[Bundle], Engine]) -> None:
    opened, kind = make(bundle), bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    id_of = bundle.items.ids_of(np.arange(len(bundle.items)))
    row = {item: place for place, item in enumerate(id_of)}
    for group in range(GROUPS):
        history = np.array([row[f"i{SIZE * group + k:02d}"] for k in range(5)])
        queries = pad_histories(kind, [history, history[::-1].copy()])
        found = opened.search(queries, SearchParams.uniform(2, 20, 3, np.stack([history, history])))
        assert {id_of[item][:1] + str(int(id_of[item][1:]) // SIZE) for item in found.item_rows_BM[0]} == {f"i{group}"}
        assert_array_equal(found.item_rows_BM[0], found.item_rows_BM[1])
    opened.close()


@pytest.mark.parametrize(("items", "children"), [(10, 2), (1 << 15, 2), (89_578, 10), (100_001, 11), (340_000, 9), (10**6, 10)])
def test_nodes_of_large_trees_have_more_children_unless_a_number_is_said(raw: dict[str, Any], items: int, children: int) -> None:
    assert deep_config(raw).tree.children(items) == children
    assert deep_config(raw | {"tree": {"branching": 5}}).tree.children(items) == 5
