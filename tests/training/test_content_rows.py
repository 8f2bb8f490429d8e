"""Rows with a part from content: updates are those of two tables, and untouched items have their content's row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.linear_model import Ridge
from torch import Tensor

from espalier.checks.random_bundles import random_tree
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree
from training.data.csr import as_matrix
from training.deep.content_ridge import PENALTY, predicted, ridge
from training.deep.content_rows import ContentRows, add_content
from training.deep.scorers.model import NodeScorer, new_scorer
from training.specification.scorers import ProductScorer

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
    """Also with weight decay, of what items have of their own and of W."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 4, empty_share=0.2)
    features, seen_I = features_of(rng, tree.item_count), rng.random(tree.item_count) < 0.8
    model = model_over(tree, seed)
    add_content(model, features, tree, seen_I, fitted=True)
    assert model.content_table is not None
    content = ContentRows(features, tree, seen_I, 0.3, CPU)
    target_ND = torch.randn(model.node_rows.shape)

    dense_IF = torch.from_numpy(as_matrix(features).toarray())
    leaf_I = torch.from_numpy(tree.leaf_of_item)
    own_ND = model.node_rows.detach().clone()
    own_ND[leaf_I] -= dense_IF @ model.content_table.detach()
    own, table = torch.nn.Parameter(own_ND), torch.nn.Parameter(model.content_table.detach().clone())
    parameters = [model.node_rows, model.content_table]
    ours, theirs = (torch.optim.AdamW(of, lr=0.05, weight_decay=decay) for of in (parameters, [own, table]))
    for step in range(6):
        ours.zero_grad()
        with content.dropped(model, step):
            step_of(target_ND, model.node_rows).backward()
        with content.followed(model, 1 - 0.05 * decay):
            ours.step()

        theirs.zero_grad()
        draw_I = torch.rand(tree.item_count, generator=torch.Generator().manual_seed(step))
        kept_I = torch.from_numpy(seen_I) & (draw_I >= 0.3)
        assert 0 < int(kept_I.sum()) < tree.item_count
        kept_N = torch.ones(tree.node_count)
        kept_N[leaf_I] = kept_I.float()
        rows_ND = (own * kept_N[:, None]).index_add(0, leaf_I, dense_IF @ table)
        step_of(target_ND, rows_ND).backward()
        theirs.step()
    whole_ND = own.detach().index_add(0, leaf_I, dense_IF @ table.detach())
    assert_allclose(model.content_table.detach(), table.detach(), atol=1e-5)
    assert_allclose(model.node_rows.detach(), whole_ND, atol=1e-5)
    unseen = torch.from_numpy(np.flatnonzero(~seen_I))
    assert_allclose(model.node_rows.detach()[leaf_I[unseen]], (dense_IF @ model.content_table.detach())[unseen], rtol=1e-5, atol=1e-6)


def test_inside_a_step_dropped_items_have_their_contents_row_and_then_their_own_again() -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 4)
    features, seen_I = features_of(rng, tree.item_count), np.ones(tree.item_count, np.bool_)
    model = model_over(tree, 5)
    add_content(model, features, tree, seen_I, fitted=True)
    before_ND = model.node_rows.detach().clone()
    content = ContentRows(features, tree, seen_I, 0.5, CPU)

    def fails() -> None:
        with content.dropped(model, 1):
            rows_ID.append(model.node_rows.detach()[torch.from_numpy(tree.leaf_of_item)])
            raise ZeroDivisionError

    rows_ID: list[Tensor] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert_array_equal(model.node_rows.detach(), before_ND)
    own_I = (rows_ID[0] == before_ND[torch.from_numpy(tree.leaf_of_item)]).all(1).numpy()
    assert 0 < own_I.sum() < tree.item_count
    assert model.content_table is not None
    by_content_ID = as_matrix(features).toarray() @ model.content_table.detach().numpy()
    assert_allclose(rows_ID[0][~own_I], by_content_ID[~own_I], rtol=1e-5, atol=1e-6)


def test_the_first_table_is_that_of_ridge_regression() -> None:
    rng = np.random.default_rng(3)
    features, known_I = features_of(rng, 60), rng.random(60) < 0.7
    vectors_ID = rng.normal(size=(60, 4)).astype(np.float32)
    vectors_ID[~known_I] = 1e6  # must not matter
    dense_IF = as_matrix(features).toarray()
    fit = Ridge(alpha=PENALTY, fit_intercept=False).fit(dense_IF[known_I], vectors_ID[known_I])
    assert_allclose(ridge(features, vectors_ID, known_I), fit.coef_.T, atol=1e-5)
    assert_allclose(predicted(features, vectors_ID, known_I), dense_IF @ fit.coef_.T, atol=1e-4)


def test_a_table_of_random_rows_starts_at_zero() -> None:
    tree = random_tree(np.random.default_rng(1), 3, 3)
    model = model_over(tree, 1)
    add_content(model, features_of(np.random.default_rng(2), tree.item_count), tree, np.arange(tree.item_count) > 0, fitted=False)
    assert model.content_table is not None
    assert not model.content_table.any()
    assert not model.node_rows[int(tree.leaf_of_item[0])].any()
