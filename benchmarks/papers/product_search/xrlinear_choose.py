"""What the options of linear scorers were chosen by: python -m benchmarks.xrlinear_peers --data DIR --set NAME --choose.

C and γ are not among them any more: `fit` chooses them on every set.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.papers.xreg.xmc_figures import quality
from benchmarks.report_file import print_row
from espalier.chunks import Chunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.tree import Tree
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.linear.fit import fit_linear
from training.linear.label_features import pifa
from training.specification.linear import LinearOptions
from training.trees.hierarchical_kmeans import hierarchical_kmeans

BRANCHING, MAX_LEAF = 128, 32
M = 100
Row = dict[str, Any]


def train(data: LabelledPoints, options: LinearOptions, branching: int = BRANCHING, max_leaf: int = MAX_LEAF) -> tuple[Tree, Chunks]:
    labels = pifa(data)
    tree = hierarchical_kmeans(labels, branching, max_leaf, 0)
    return tree, fit_linear(data, tree, options, centroids=labels)


VARIANTS: tuple[tuple[tuple[int, int] | None, dict[str, Any]], ...] = (
    ((BRANCHING, MAX_LEAF), {}),
    ((16, 100), {}),
    ((64, 64), {}),
    ((256, 16), {}),
    (None, {}),
    ((BRANCHING, MAX_LEAF), {"gamma": 1.0}),
    ((BRANCHING, MAX_LEAF), {"gamma": 0.3}),
    ((BRANCHING, MAX_LEAF), {"gamma": 0.3, "beam_size": 20}),
    ((BRANCHING, MAX_LEAF), {"negatives": "teacher"}),
    ((BRANCHING, MAX_LEAF), {"prior": 0.0}),
    ((BRANCHING, MAX_LEAF), {"prior": 4.0}),
    ((BRANCHING, MAX_LEAF), {"threshold": 0.1}),
    ((BRANCHING, MAX_LEAF), {"threshold": 0.15}),
    ((BRANCHING, MAX_LEAF), {"cost": 0.5}),
    ((BRANCHING, MAX_LEAF), {"cost": 2.0}),
    ((BRANCHING, MAX_LEAF), {"loss": "logistic"}),
    ((BRANCHING, MAX_LEAF), {"loss": "logistic", "cost": 10.0}),
    ((BRANCHING, MAX_LEAF), {"loss": "logistic", "cost": 30.0}),
)
"""Trees (none: one-versus-all) and options that are compared."""


def choose(data: LabelledPoints) -> list[Row]:
    """Options trained on four fifths of the training points and measured on the rest: means over two such splits."""
    rows = []
    for shape, changed in VARIANTS:
        split_figures = [_judged(data, split, shape or (2, data.labels.shape[1]), LinearOptions(**changed)) for split in range(2)]
        means = {name: round(float(np.mean([row[name] for row in split_figures])), 3) for name in split_figures[0]}
        rows.append({"branching": shape and shape[0], "max_leaf": shape and shape[1], "changed": changed} | means)
        print_row(rows[-1])
    return rows


def _judged(data: LabelledPoints, split: int, shape: tuple[int, int], options: LinearOptions) -> dict[str, float]:
    order = np.random.default_rng(split).permutation(len(data))
    validation, training = (data.take(np.sort(part)) for part in np.split(order, [len(order) // 5]))
    begin = time.process_time()
    tree, chunks = train(training, options, *shape)
    row = {"train_cpu_s": time.process_time() - begin, "model_mb": chunks.nbytes / 1e6}
    search = ChunkSearch(tree, chunks, options.ranking)
    points = as_rows(validation.points)
    leaves_BM = search.search(points, BeamParams.uniform(len(validation), 10, M)).leaves_BM
    found_items = np.where(leaves_BM >= 0, tree.leaf_item[leaves_BM - tree.leaf_offset], -1)
    batch_params = BeamParams.uniform(len(validation), 10, 10)
    begin = time.process_time()
    search.search(points, batch_params)
    row["ms_in_a_batch"] = 1e3 * (time.process_time() - begin) / len(validation)
    return row | quality(found_items, validation, training)
