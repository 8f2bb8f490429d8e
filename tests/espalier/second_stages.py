"""Bundles of linear scorers with what enters or follows their scores: a tail, or stacking. Random ones, and none of it trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.random_bundles import make_linear_bundle, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.chunks import TreeChunks
from espalier.live.fold import content_of
from espalier.manifest import ManifestDraft, Ranking, StackingInfo, TailInfo
from espalier.stacking import FEATURES, Stacking, StackingNetwork, StackingTables
from espalier.tail import Tail
from espalier.tree import tree_from_children

F, POINTS = 12, 130
SIGMOID = Ranking(own="log_activation", gamma=1)
Form = Literal["product", "gaussian"]


def rewritten(bundle: Bundle, path: Path, trees: Sequence[TreeChunks] = (), **changed: Any) -> Bundle:
    """A bundle of linear scorers with other trees or other parts, at `path`."""
    content = content_of(bundle)
    assert isinstance(content, LinearContent)
    if trees:
        changed |= {"tree": trees[0].tree, "chunks": trees[0].chunks, "others": trees[1:]}
    draft = ManifestDraft(**{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields})
    return write_bundle(path, draft, replace(content, **changed))


def sparse(rng: np.random.Generator, rows: int, columns: int, share: float) -> tuple[Any, Any, Any]:
    """Rows of numbers in (0, 1]: where each begins, columns, values."""
    present = rng.random((rows, columns)) < share
    row, column = np.nonzero(present)
    begin = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    return begin, column.astype(np.int32), (1 - rng.random(len(row))).astype(np.float32)


def random_stacking(rng: np.random.Generator, items: int, candidates: int, power: float = 1.0) -> Stacking:
    posting_begin, posting_point, posting_value = sparse(rng, F, POINTS, 0.3)
    label_begin, label, label_value = sparse(rng, POINTS, items, 0.2)
    beside_begin, beside, beside_share = sparse(rng, items, items, 0.3)
    tables = StackingTables(
        feature_weight=rng.random(F, np.float32) + np.float32(0.1),
        posting_begin=posting_begin,
        posting_point=posting_point.astype(np.uint16),
        posting_value=posting_value.astype(np.float16),
        label_begin=label_begin,
        label=label,
        label_value=label_value,
        beside_begin=beside_begin,
        beside=beside,
        beside_share=beside_share,
        log_count=np.log1p(rng.integers(0, 50, items)).astype(np.float32),
        log_weight=-rng.random(items, np.float32),
    )
    known = len(FEATURES)
    shapes = [(known,), (known,), (known, 5), (5,), (5, 3), (3,), (3,), (1,)]
    network = StackingNetwork(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))
    info = StackingInfo(candidates=candidates, power=power, points=POINTS)
    return Stacking(info, tables, replace(network, scale=np.abs(network.scale)))


def with_stacking(folder: Path, seed: int, candidates: int = 6, trees: int = 1, power: float = 1.0) -> tuple[Bundle, Bundle]:
    """A bundle with stacking, and without."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 3, empty_share=0.1)
    others = [tree_over(rng, tree.item_count, 4) for _ in range(trees - 1)]
    plain = make_linear_bundle(folder, rng, tree, SIGMOID, integer=False, width=F, others=others)
    stacking = random_stacking(rng, tree.item_count, candidates, power)
    return rewritten(plain, folder / "stacked" / "1", stacking=stacking), plain


def random_tail(rng: np.random.Generator, items: int, form: Form, alpha: float) -> Tail:
    dense = rng.normal(size=(items, F)) * (rng.random((items, F)) < 0.4)
    dense[0] = 0
    dense /= np.maximum(np.linalg.norm(dense, axis=1, keepdims=True), 1e-9)
    row, feature = np.nonzero(dense)
    begin = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=items))])
    info = TailInfo(form=form, alpha=alpha, gamma=3.0, entries=len(row))
    return Tail(info, begin, feature.astype(np.int32), dense[row, feature].astype(np.float32), F)


def with_tail(
    folder: Path, seed: int, form: Form = "product", alpha: float = 0.5, trees: int = 2, full: bool = False
) -> tuple[Bundle, Bundle]:
    """A forest with a tail, and without; `full`: its leaves all hold items."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 3, empty_share=0.0 if full else 0.1)
    others = [tree_over(rng, tree.item_count, 4) for _ in range(trees - 1)]
    if full:
        others = [tree_from_children([[3], [tree.item_count - 4, 2, 2]], rng.permutation(tree.item_count))]
    plain = make_linear_bundle(folder, rng, tree, SIGMOID, integer=False, width=F, others=others)
    tail = random_tail(rng, tree.item_count, form, alpha)
    return rewritten(plain, folder / "tailed" / "1", tail=tail), plain
