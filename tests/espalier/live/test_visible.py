"""What queries may get of trained and live items, with masks and exclusions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_tree
from espalier.checks.random_live import random_state
from espalier.engines.live.visible import Visibility
from espalier.live.masks import live_mask
from espalier.live.overlay import Overlay
from espalier.manifest import Ranking
from espalier.masks.eligibility import forest_mask
from espalier.search import NO_ITEM, SearchParams
from espalier.tree import Tree

BATCH = 8


def eligible_rows(overlay: Overlay, passing_I: np.ndarray, passing_R: np.ndarray, exclude_E: np.ndarray) -> set[int]:
    """By definition: trained items whose leaves count, and live ones."""
    trained = np.flatnonzero(passing_I & ~np.isin(np.arange(overlay.items), overlay.hidden)).tolist()
    live = overlay.item_R[overlay.eligible_R & passing_R].tolist()
    return {*trained, *live} - set(exclude_E.tolist())


def open_parents(tree: Tree, overlay: Overlay, rows: set[int]) -> set[int]:
    leaves = overlay.trees[0]
    live = {int(parent) for parent, handle in zip(leaves.parent_X, leaves.handle_X, strict=True) if int(overlay.item_R[handle]) in rows}
    hidden = set(overlay.hidden.tolist())
    return live | {int(tree.parent[tree.leaf_of_item[row]]) for row in rows if row < overlay.items and row not in hidden}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_eligible_items_and_open_parents_are_those_of_the_fold(tmp_path: Path, seed: int, masked: bool) -> None:
    """Also where the last eligible leaf of a parent is excluded, live or trained."""
    rng = np.random.default_rng(seed)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 3, empty_share=0.2), Ranking(own="logit", gamma=1))
    tree, overlay = bundle.tree, random_state(rng, bundle, new=10, parents=np.array(bundle.tree.level(2))[:4]).overlay()
    passing_I, passing_R = np.ones(overlay.items, np.bool_), np.ones(overlay.handles, np.bool_)
    mask = None
    if masked:
        passing_I, passing_R = rng.random(overlay.items) < 0.5, rng.random(overlay.handles) < 0.5
        passing_R[overlay.item_R < overlay.items] = passing_I[overlay.item_R[overlay.item_R < overlay.items]]
        mask = live_mask([tree], overlay, forest_mask([tree], passing_I), passing_R)
    rows_there = np.concatenate([[NO_ITEM], np.arange(overlay.items), overlay.item_R])
    exclude_BE = rng.choice(rows_there, (BATCH, 20))
    seen = Visibility(tree, 0).of(overlay, replace(SearchParams.uniform(BATCH, 2, 3, exclude_BE), mask_B=(mask,) * BATCH))
    for b in range(BATCH):
        rows = eligible_rows(overlay, passing_I, passing_R, exclude_BE[b])
        assert seen.eligible_B[b] == len(rows)
        live_R = seen.live_BR[b]
        assert live_R is not None
        assert {int(overlay.item_R[handle]) for handle in np.flatnonzero(live_R)} == {row for row in rows if row in overlay.item_R}
        assert seen.exclude_BE is not None
        gone = seen.exclude_BE[b][seen.exclude_BE[b] != NO_ITEM]
        assert (gone < overlay.items).all()
        own = None if seen.mask_B is None else seen.mask_B[b]
        eligible_N = (tree.items_below > 0 if own is None else own.eligible_N).copy()
        excluded_leaves = tree.leaf_of_item[gone]
        closed = set()
        for parent in np.unique(tree.parent[excluded_leaves[eligible_N[excluded_leaves]]]).tolist():  # what the wrapped engine closes
            children = np.arange(tree.first_child[parent], tree.first_child[parent + 1])
            if not (eligible_N[children] & ~np.isin(children, excluded_leaves)).any():
                closed.add(parent)
        found = {parent for parent in tree.level(2) if eligible_N[parent]} - closed
        assert found == open_parents(tree, overlay, rows)


def test_a_memory_gets_a_mask_without_the_live_items_that_a_query_excludes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tree = random_tree(rng, 3, 3)
    bundle = make_bundle(tmp_path, rng, tree, "product", memory=random_memory(rng, tree.item_count, 3, integer=True))
    overlay = random_state(rng, bundle, new=10, deleted=0, changed=0).overlay()
    handle = int(np.flatnonzero(overlay.eligible_R)[0])
    seen = Visibility(tree, 0).of(overlay, SearchParams.uniform(1, 2, 3, overlay.item_R[[[handle]]]))
    assert seen.mask_B is not None
    assert seen.mask_B[0] is not None
    assert seen.mask_B[0].live_R is not None
    assert not seen.mask_B[0].live_R[handle]
    assert seen.eligible_B.tolist() == [overlay.eligible - 1]


def test_a_mask_that_knows_no_live_items_lets_none_of_them_pass(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 3), Ranking(own="logit", gamma=1))
    overlay = random_state(rng, bundle, new=10, deleted=0, changed=0).overlay()
    mask = forest_mask([bundle.tree], rng.random(overlay.items) < 0.5)
    seen = Visibility(bundle.tree, 0).of(overlay, SearchParams.uniform(1, 2, 3, mask=mask))
    assert seen.eligible_B.tolist() == [mask.items]
    assert seen.live_BR[0] is not None
    assert not seen.live_BR[0].any()
