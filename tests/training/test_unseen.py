"""A tree with content: untouched items have their content's row and are found by it; its bundle says what makes the rows; updates are
those of two tables; `evaluate --unseen` measures it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.linear_model import Ridge
from torch import Tensor

from benchmarks.random_bundles import random_tree
from espalier.bundle import CONTENT, CONTENT_ARRAYS, Bundle
from espalier.bundle_writer import with_parts
from espalier.content import rows as rows_module
from espalier.content.rows import ContentRows
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt, EspalierError, InvalidConfig, InvalidQuery
from espalier.live.operations import ItemBody
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.placement.placer import Placer
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree
from tests.espalier.bundle.parts import model_with
from tests.training.commands import command
from tests.training.content_logs import KINDS, SIZE, write_log
from training.data.csr import as_matrix
from training.deep.content_rows import PENALTY, add_content, content_graph, predict_vectors, ridge
from training.deep.content_rows import ContentRows as TrainedRows
from training.deep.optimiser import Optimiser, mean_share
from training.deep.scorers.model import NodeScorer, new_scorer
from training.deep.scorers.row_table import lookup
from training.deep.topology import Topology
from training.held_out import held_out_log
from training.specification.networks import ProductScorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unseen")
    log, items = write_log(folder)
    (folder / "with.toml").write_text(
        f"""
name = "with"
kind = "otm-robust"
data = {{ log = "{log}", items = "{items}", split = {{ unseen_items = 0.2 }} }}
instances = {{ windows = [16], targets = 10 }}
scorer = {{ node_dim = 16, hidden = [32], dropout = 0.0 }}
objective = {{ beam_size = 10, random_nodes = 10 }}
optimiser = {{ steps = 100, batch = 64, learning_rate = 0.01, average = 10 }}
search = {{ beam_size = 20, m = 10, max_m = 120, max_beam_size = 128, gamma = 0.5 }}
content = {{ columns = "auto" }}
"""
    )
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    out = folder / "models" / "with" / "1"
    assert command("fit", "--config", folder / "with.toml", "--out", out, "--device", "cpu").status == 0
    return Bundle.open(out)


def fields_of(bundle: Bundle) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = bundle.items.to_table().to_pylist()
    return fields


def test_unseen_items_are_found_by_their_content(folder: Path, bundle: Bundle) -> None:
    report = folder / "report.json"
    options = ("--unseen", "--exclude-seen", "--beam", "64", "--m", "10,20", "--batch", "24")
    assert command("evaluate", "--model", bundle.path, *options, "--json", report).status == 0
    found = {(row["among"], row["m"]): row["recall"] for row in json.loads(report.read_text())["rows"]}
    assert found["unseen", 10] > 0.9  # four of 24 are of the user's kind: any ten hold .42 of them
    assert found["all", 20] > 0.5  # any twenty hold .17


def test_an_item_put_in_by_its_fields_alone_is_found_by_users_of_its_kind(bundle: Bundle) -> None:
    known, state, engine = bundle.items, LiveState(bundle), open_engine(bundle, "cpu")
    body = ItemBody(fields={"title": "Kind2 number 3", "tags": ["k2"], "weight": 0.0})
    (found,) = Placer(bundle).place([body], state.table, state.overlay(), engine.parents)
    assert not isinstance(found, EspalierError)
    parent, row = next(iter(found[0]))
    state.apply([Change(1, "new", "put", body.fields, (Placement(0, parent, state.next_slot(0, parent), row),))])
    engine.set_overlay(state.overlay())
    histories = [known.rows_of([f"item-{item * KINDS + kind}" for item in range(8)]) for kind in range(KINDS)]
    assert isinstance(bundle.manifest.query, HistoryKind)
    queries = pad_histories(bundle.manifest.query, histories)
    found_BM = engine.search(queries, SearchParams.uniform(KINDS, 20, SIZE + 1)).item_rows_BM
    assert (found_BM == len(known)).any(1).tolist() == [kind == 2 for kind in range(KINDS)]
    away = np.linalg.norm(row.values - ContentRows(bundle).of([body.fields or {}])[0])
    assert away > 0.1, "a row by content alone is shorter, and its bias lower"


def test_fields_of_which_the_model_knows_nothing_are_no_evidence(bundle: Bundle) -> None:
    state, engine = LiveState(bundle), open_engine(bundle, "cpu")

    def placed(*bodies: ItemBody) -> list[Any]:
        return Placer(bundle).place(bodies, state.table, state.overlay(), engine.parents)

    for fields in ({"title": "Zebra", "tags": ["new"]}, {"title": None}, {"weight": None}):
        (refused, known) = placed(ItemBody(fields=fields), ItemBody(fields=fields | {"weight": 0.5}))
        assert isinstance(refused, InvalidQuery)
        assert (refused.field, refused.value) == ("fields", fields)
        assert not isinstance(known, EspalierError)
    events = (["item-0", "item-6"],)
    with_unknown, without = (next(iter(found[0])) for found in placed(ItemBody(fields=fields, events=events), ItemBody(events=events)))
    assert with_unknown[0] == without[0]
    assert_array_equal(with_unknown[1].values, without[1].values)


def test_rows_of_fields_are_what_training_computed(bundle: Bundle) -> None:
    held = held_out_log(bundle)
    unseen_I = held.unseen_I
    assert unseen_I.sum() == KINDS * SIZE // 5
    assert unseen_I[np.concatenate([pair.relevant for pair in held.of_unseen()])].all()
    assert len(held.of_unseen()) < len(held.pairs)
    rows_ID = ContentRows(bundle).of(fields_of(bundle))
    leaf_rows_ID = bundle.node_rows_ND[bundle.tree.leaf_of_item]
    assert_allclose(rows_ID[unseen_I], leaf_rows_ID[unseen_I], rtol=1e-3, atol=1e-5)  # which are rounded to float16
    own = np.abs(rows_ID - leaf_rows_ID).max(1)
    assert (own[~unseen_I] > 1e-3).mean() > 0.9, "other items have a part of their own"


def test_an_items_row_does_not_depend_on_others(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BLOCK", 500)  # some hundred items are several blocks
    content, fields = ContentRows(bundle), fields_of(bundle)
    several = content.of(fields * 2)
    assert_array_equal(several[: len(fields)], several[-len(fields) :])
    assert_array_equal(content.of(fields[7:8])[0], several[7])
    assert content.of([]).shape == (0, bundle.graph_scorer.node_dim)


def test_graphs_of_other_shapes_and_numbers_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    info = bundle.manifest.content
    assert info is not None
    width = bundle.graph_scorer.node_dim
    nan = torch.zeros(info.features, width)
    nan[-1, 0] = torch.nan

    def renamed(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = ["surprise" if name == "values" else name for name in node.input]
        next(entry for entry in model.graph.input if entry.name == "values").name = "surprise"

    graphs = {
        "too few features": content_graph(torch.zeros(info.features - 1, width), info.entries),
        "another width": content_graph(torch.zeros(info.features, width + 1), info.entries),
        "not finite": content_graph(nan, info.entries),
        "another input": model_with(bundle, renamed, CONTENT),
        "no graph": b"nothing",
    }
    for version, (why, graph) in enumerate(graphs.items(), start=1):
        other = with_parts(bundle, tmp_path / "m" / str(version), {}, {CONTENT: graph})
        with pytest.raises(BundleCorrupt, match=r"content\.onnx"):
            pytest.fail(f"{why}: {ContentRows(other)}")
    same = with_parts(bundle, tmp_path / "m" / "9", {}, {CONTENT: bundle.graph(CONTENT)})
    assert_array_equal(ContentRows(same).of(fields_of(bundle)[:3]), ContentRows(bundle).of(fields_of(bundle)[:3]))
    with pytest.raises(BundleCorrupt):
        ContentRows(with_parts(bundle, tmp_path / "m" / "10", {}, {CONTENT_ARRAYS: b"nothing"}))


def test_a_log_that_has_moved_is_asked_for(folder: Path, bundle: Bundle) -> None:
    moved = (folder / "log.csv").rename(folder / "moved.csv")
    try:
        with pytest.raises(InvalidConfig, match=r"--data: .*log\.csv.* is not there"):
            held_out_log(bundle)
        assert held_out_log(bundle, moved).unseen_I.any()
    finally:
        moved.rename(folder / "log.csv")


def test_unseen_in_a_log_that_has_grown_is_what_training_did_not_see(folder: Path, bundle: Bundle) -> None:
    grown = folder / "grown.csv"
    lines = [f"more-{user},item-{item * KINDS + user % KINDS}\n" for user in range(60) for item in range(SIZE + 2)]
    grown.write_text((folder / "log.csv").read_text() + "".join(lines))
    held = held_out_log(bundle, grown)
    assert_array_equal(held.unseen_I, held_out_log(bundle).unseen_I)
    assert held.unknown.relevant, "items that came later"


# -- updates of rows with a part from content ---------------------------------------------------------------------------


CPU = torch.device("cpu")
FEATURES = 7


def features_of(rng: np.random.Generator, items: int) -> SparseRows:
    dense = rng.normal(size=(items, FEATURES)) * (rng.random((items, FEATURES)) < 0.5)
    dense[:, 0] = 1
    rows = [np.flatnonzero(row) for row in dense]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    values = np.concatenate([dense[i, row] for i, row in enumerate(rows)]).astype(np.float32)
    return SparseRows(indptr, np.concatenate(rows).astype(np.int32), values, FEATURES)


def model_over(tree: Tree, seed: int) -> NodeScorer:
    torch.manual_seed(seed)
    return new_scorer(ProductScorer(node_dim=4, hidden=(5,), dropout=0.0), [3], tree.node_count)


def step_of(target_ND: Tensor, rows_ND: Tensor) -> Tensor:
    return ((rows_ND - target_ND) ** 2 * torch.arange(1, 5)).sum()


@pytest.mark.parametrize(("seed", "decay"), [(0, 0.0), (1, 0.0), (2, 0.4), (3, 2.0)])
def test_updates_are_those_of_two_tables(seed: int, decay: float) -> None:
    """Also with weight decay, of what items have of their own and of W; and the mean of the weights is that of the sums."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 4, empty_share=0.2)
    features, seen_I = features_of(rng, tree.item_count), rng.random(tree.item_count) < 0.8
    model = model_over(tree, seed)
    add_content(model, features, tree, seen_I, fitted=True)
    assert model.content_table is not None
    dense_IF = torch.from_numpy(as_matrix(features).toarray())
    leaf_I = torch.from_numpy(tree.leaf_of_item)
    own_ND = model.node_rows.detach().clone()
    own_ND[leaf_I] -= dense_IF @ model.content_table.detach()
    own, table = torch.nn.Parameter(own_ND), torch.nn.Parameter(model.content_table.detach().clone())
    content = TrainedRows(features, Topology(tree, CPU), seen_I, 0.3)
    ours = Optimiser(model, (0.9, 0.98), 4, decay, content)
    theirs = torch.optim.AdamW([own, table], lr=0.05, betas=(0.9, 0.98), weight_decay=decay)
    target_ND, sums = torch.randn(model.node_rows.shape), []
    for step in range(6):
        content.draw(step)
        ours.zero_gradients()
        step_of(target_ND, lookup(torch.arange(tree.node_count), model.table)).backward()
        ours.step(0.05)
        ours.average()

        theirs.zero_grad()
        draw_I = torch.rand(tree.item_count, generator=torch.Generator().manual_seed(step))
        kept_I = torch.from_numpy(seen_I) & (draw_I >= 0.3)
        assert 0 < int(kept_I.sum()) < tree.item_count
        kept_N = torch.ones(tree.node_count)
        kept_N[leaf_I] = kept_I.float()
        rows_ND = (own * kept_N[:, None]).index_add(0, leaf_I, dense_IF @ table)
        step_of(target_ND, rows_ND).backward()
        theirs.step()
        sums.append(own.detach().index_add(0, leaf_I, dense_IF @ table.detach()))
    ours.refresh()
    assert_allclose(model.content_table.detach(), table.detach(), atol=1e-5)
    averaged_ND = lookup(torch.arange(tree.node_count), ours.averaged.table)
    expected_ND = sums[0]
    for times in range(1, 6):
        expected_ND = expected_ND.lerp(sums[times], 1 - mean_share(4, times))
    assert_allclose(averaged_ND, expected_ND, atol=1e-5)
    content.join_rows(model)
    assert_allclose(model.node_rows.detach(), sums[-1], atol=1e-5)
    unseen = torch.from_numpy(np.flatnonzero(~seen_I))
    assert_allclose(model.node_rows.detach()[leaf_I[unseen]], (dense_IF @ model.content_table.detach())[unseen], rtol=1e-5, atol=1e-6)


def test_the_first_table_is_that_of_ridge_regression() -> None:
    rng = np.random.default_rng(3)
    features, known_I = features_of(rng, 60), rng.random(60) < 0.7
    vectors_ID = rng.normal(size=(60, 4)).astype(np.float32)
    vectors_ID[~known_I] = 1e6  # must not matter
    dense_IF = as_matrix(features).toarray()
    fit = Ridge(alpha=PENALTY, fit_intercept=False).fit(dense_IF[known_I], vectors_ID[known_I])
    assert_allclose(ridge(features, vectors_ID, known_I), fit.coef_.T, atol=1e-5)
    assert_allclose(predict_vectors(features, vectors_ID, known_I), dense_IF @ fit.coef_.T, atol=1e-4)


def test_a_table_of_random_rows_starts_at_zero() -> None:
    tree = random_tree(np.random.default_rng(1), 3, 3)
    model = model_over(tree, 1)
    add_content(model, features_of(np.random.default_rng(2), tree.item_count), tree, np.arange(tree.item_count) > 0, fitted=False)
    assert model.content_table is not None
    assert not model.content_table.any()
    assert not model.node_rows[int(tree.leaf_of_item[0])].any()
