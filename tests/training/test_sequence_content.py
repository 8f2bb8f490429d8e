"""A tree with a sequence encoder takes content: untouched items follow theirs, are found by it, are no negatives; runs go on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from espalier.bundle import Bundle
from espalier.content.rows import rows_of_items
from espalier.engines import open_engine
from tests.training.content_logs import KINDS, SIZE, write_log
from training.data.csr import as_matrix
from training.deep.first_model import build_model
from training.deep.fit import steps_of
from training.deep.prepare import Prepared, build_tree, prepare
from training.deep.run import fit_and_export
from training.deep.scorers.model import NodeScorer
from training.deep.scorers.sequence import SequenceQuery
from training.deep.sequence.rules import with_rules
from training.deep.sequence.steps import SequenceSteps
from training.deep.topology import Topology
from training.evaluate import evaluate
from training.held_out import held_out_log
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log, items = write_log(tmp_path_factory.mktemp("sequences"))
    return {
        "kind": "otm-sequence",
        "name": "with",
        "data": {"log": str(log), "items": str(items), "format": {"order": "file"}, "split": {"kind": "users", "unseen_items": 0.2}},
        "instances": {"targets": 5},
        "scorer": {"kind": "sequence", "node_dim": 16, "window_hidden": 16, "layers": 1, "length": 16, "dropout": 0.1},
        "objective": {"negatives": 60, "whole": 100},
        "optimiser": {"steps": 120, "places": 300, "learning_rate": 1e-2, "warm_steps": 10, "average": 20, "validate_every": 40},
        "search": {"beam_size": 20, "m": 10, "max_m": 120, "max_beam_size": 128, "gamma": 0.5},
        "content": {"columns": "auto"},
        "memory": {"weight": 0},
    }


def ready(raw: dict[str, Any], work: Path, **sections: dict[str, Any]) -> tuple[DeepConfig, Prepared]:
    work.mkdir(exist_ok=True)
    config = deep_config(raw | {name: raw.get(name, {}) | section for name, section in sections.items()})
    prepared = prepare(config, None, work)
    return with_rules(config, prepared), prepared


@pytest.fixture(scope="module")
def bundle(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    trained = fit_and_export(deep_config(raw), None, tmp_path_factory.mktemp("models") / "with" / "1", CPU, resume=False)
    assert trained is not None
    return trained


def content_rows_of(model: NodeScorer, prepared: Prepared) -> np.ndarray:
    """float64[I, D]: c · W."""
    assert model.content_table is not None
    assert prepared.content is not None
    return np.asarray(as_matrix(prepared.content.rows).toarray() @ model.content_table.detach().numpy())


# -- what is learned and served -------------------------------------------------------------------------------------------


def test_the_bundle_gives_the_rows_of_unseen_items_to_both_readers(bundle: Bundle) -> None:
    """From their fields alone; others have a part of their own, too."""
    unseen_I = held_out_log(bundle).unseen_I
    assert unseen_I.sum() == KINDS * SIZE // 5
    found = evaluate(bundle, open_engine(bundle), held_out_log(bundle).of_unseen(), [64], [20], True, batch=24)[0]
    assert found["recall"] > 0.5, "four of 24 are of the user's kind; any 20 of all items hold .17 of them"
    rows_ID = rows_of_items(bundle, bundle.items.to_table().to_pylist())
    leaf_rows_ID = bundle.node_rows_ND[bundle.tree.leaf_of_item]
    assert_allclose(rows_ID[unseen_I], leaf_rows_ID[unseen_I], rtol=1e-4, atol=1e-5)
    for share in (slice(0, 8), slice(8, 16)):
        own_I = np.abs(rows_ID - leaf_rows_ID)[:, share].max(1)
        assert (own_I[~unseen_I] > 1e-3).mean() > 0.9
        assert rows_ID[:, share].std(0).min() > 1e-3, "content enters every column, that of the bias too"


# -- the first rows -------------------------------------------------------------------------------------------------------


def test_an_untouched_item_starts_at_its_contents_row_with_a_bias_in_the_range_of_items_like_it(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    config, prepared = ready(raw, tmp_path / "log")
    tree = build_tree(config, prepared)
    model = build_model(config, tree, prepared)
    rows_ID = model.node_rows.detach().numpy()[tree.leaf_of_item]
    unseen_I = ~prepared.seen_I
    assert_allclose(rows_ID[unseen_I], content_rows_of(model, prepared)[unseen_I], rtol=1e-4, atol=1e-5)
    assert isinstance(model.encoder, SequenceQuery)
    for part in model.encoder.each:
        bias_I = rows_ID[:, part.columns.stop - 1]
        low, high = bias_I[~unseen_I].min(), bias_I[~unseen_I].max()
        assert low <= bias_I[unseen_I].min() <= bias_I[unseen_I].max() <= high


# -- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_rows_of_untouched_items_follow_their_content_at_every_update(raw: dict[str, Any], tmp_path: Path, decay: float) -> None:
    config, prepared = ready(raw, tmp_path / "log", optimiser={"weight_decay": decay})
    tree = build_tree(config, prepared)
    model = build_model(config, tree, prepared)
    steps = steps_of(config, model, Topology(tree, CPU), prepared)
    unseen = np.flatnonzero(~prepared.seen_I)
    before_ID = content_rows_of(model, prepared)
    for step in range(12):
        steps.make(step)
        rows_ID = model.node_rows.detach().numpy()[tree.leaf_of_item]
        assert_allclose(rows_ID[unseen], content_rows_of(model, prepared)[unseen], rtol=1e-4, atol=1e-5)
    assert np.abs(content_rows_of(model, prepared) - before_ID)[unseen].max(1).min() > 1e-3


def test_weight_decay_shrinks_what_an_item_has_of_its_own(raw: dict[str, Any], tmp_path: Path) -> None:
    """Seen in items without their own part in a step: nothing else moves it in the first update."""
    config, prepared = ready(raw, tmp_path / "log", optimiser={"weight_decay": 10.0, "warm_steps": 0})
    tree = build_tree(config, prepared)
    model = build_model(config, tree, prepared)
    leaf_I = torch.from_numpy(tree.leaf_of_item)

    def own_parts() -> np.ndarray:
        return np.asarray(model.node_rows.detach()[leaf_I].numpy() - content_rows_of(model, prepared))

    before_ID = own_parts()
    steps_of(config, model, Topology(tree, CPU), prepared).make(0)
    assert model.node_rows.grad is not None
    dropped_I = ~model.node_rows.grad[leaf_I].any(1).numpy() & prepared.seen_I
    assert 0 < dropped_I.sum() < prepared.seen_I.sum()
    kept = 1 - config.optimiser.learning_rate * 10
    assert_allclose(own_parts()[dropped_I], kept * before_ID[dropped_I], atol=1e-4)


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("whole", [1, 1000])
def test_untouched_items_are_negatives_only_of_models_without_content(
    raw: dict[str, Any], tmp_path: Path, content: bool, whole: int
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "objective": {"whole": whole, "negatives": 4000},
        "content": {"columns": "auto" if content else []},
    }
    config, prepared = ready(raw, tmp_path / "log", **sections)
    tree = build_tree(config, prepared)
    steps = steps_of(config, build_model(config, tree, prepared), Topology(tree, CPU), prepared)
    assert isinstance(steps, SequenceSteps)
    target = int(np.flatnonzero(prepared.seen_I)[0])
    leaves = steps.columns.levels(torch.tensor([[target]]), torch.Generator().manual_seed(1))[-1]
    column_S = leaves.nodes_M if leaves.column_S is None else leaves.nodes_M[leaves.column_S]
    counted = set(tree.leaf_item[column_S[torch.isfinite(leaves.offset_S)].numpy() - tree.leaf_offset].tolist())
    assert counted == set(np.flatnonzero(prepared.seen_I).tolist() if content else range(KINDS * SIZE))


def test_a_step_counts_the_gradient_of_the_content_table_in_its_norm(raw: dict[str, Any], tmp_path: Path) -> None:
    config, prepared = ready(raw, tmp_path / "log")
    tree = build_tree(config, prepared)
    model = build_model(config, tree, prepared)
    model.node_rows.data *= 20  # so that the gradient is large
    steps_of(config, model, Topology(tree, CPU), prepared).make(0)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert model.content_table is not None
    assert model.content_table.grad is not None
    assert float(torch.stack([gradient.norm() for gradient in gradients]).norm()) == pytest.approx(1, rel=1e-3)


def test_training_goes_on_from_a_bundle_with_content(raw: dict[str, Any], bundle: Bundle, tmp_path: Path) -> None:
    """Its rows are where it starts; a new W is fitted to those of touched items."""
    earlier = raw | {"earlier_model": str(bundle.path)}
    config, prepared = ready(earlier, tmp_path / "log", tree={"kind": "earlier"}, scorer={"init": "earlier"})
    tree = build_tree(config, prepared)
    rows_ID = build_model(config, tree, prepared).node_rows.detach().numpy()[tree.leaf_of_item]
    before_ID = bundle.node_rows_ND[bundle.tree.leaf_of_item[bundle.items.rows_of(prepared.items.column("id").to_pylist())]]
    seen_I = prepared.seen_I
    assert_allclose(rows_ID[seen_I], before_ID[seen_I], atol=1e-6)
    error, size = (np.square(part[~seen_I]).mean() for part in (rows_ID - before_ID, before_ID))
    assert error < 0.5 * size
