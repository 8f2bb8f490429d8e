"""Versions of a model that are wrong, although their checksums and their golden queries are right: only a probe sees them.

Golden queries are answered anew by the damaged model, as they would be by a wrong export, so that loading cannot refuse it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.checks.golden import encode_table
from espalier.tree import Tree
from tests.espalier.bundle.parts import content_of, draft_of
from tests.golden import golden_of_histories


def swap_leaves(content: GraphContent, rng: np.random.Generator) -> GraphContent:
    """A quarter of the items in each other's leaves, as an export with a stale item table would have them."""
    leaf_item = np.array(content.tree.leaf_item)
    swapped = rng.choice(np.flatnonzero(leaf_item >= 0), len(leaf_item) // 4, replace=False)
    leaf_item[swapped] = leaf_item[np.roll(swapped, 1)]
    return replace(content, tree=Tree(content.tree.level_offset, content.tree.first_child, leaf_item))


def shuffle_level(content: GraphContent, rng: np.random.Generator) -> GraphContent:
    """The node rows of one inner level among each other."""
    level = content.tree.height - 2
    begin, end = content.tree.level_offset[level : level + 2]
    rows_ND = np.array(content.stored_rows)
    rows_ND[begin:end] = rng.permutation(rows_ND[begin:end])
    return replace(content, stored_rows=rows_ND)


def noise(content: GraphContent, rng: np.random.Generator) -> GraphContent:
    """Noise of their own size on all node rows, as a failed conversion to fewer bits would leave."""
    rows_ND = np.array(content.stored_rows)
    return replace(content, stored_rows=(rows_ND + rng.normal(0, rows_ND.std(), rows_ND.shape)).astype(rows_ND.dtype))


DAMAGES: dict[str, Callable[[GraphContent, np.random.Generator], GraphContent]] = {
    "a quarter of the items swapped": swap_leaves,
    "one level's rows shuffled": shuffle_level,
    "noise on all rows": noise,
}


def damaged(bundle: Bundle, models: Path, version: int, damage: str, seed: int = 0) -> Bundle:
    """A version under `models` that is wrong and passes every check at load: what held-out queries should find is as it was."""
    content = DAMAGES[damage](content_of(bundle), np.random.default_rng(seed))
    draft = draft_of(bundle, version=version)
    golden = bundle.golden()
    histories = [row[row >= 0] for row in encode_table(bundle, golden).array.astype(np.int64)]
    with tempfile.TemporaryDirectory() as folder:
        bare = write_bundle(Path(folder) / draft.name / str(version), draft, content)
        golden = golden_of_histories(bare, histories, golden.column("beam_size").to_pylist(), golden.column("m").to_pylist())
    return write_bundle(models / draft.name / str(version), draft, replace(content, golden=golden))
