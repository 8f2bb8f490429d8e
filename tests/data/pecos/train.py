"""Train the model of this folder with PECOS and store PECOS's own predictions: python tests/data/pecos/train.py

Needs libpecos, and nothing of Espalier.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel

POINTS, TEST, FEATURES, LABELS, BEAMS, M = 300, 20, 120, 48, (2, 10), 10

folder = Path(__file__).parent
rng = np.random.default_rng(0)
own = rng.integers(0, FEATURES, (LABELS, 5))  # the features that tell of a label


def points(count: int) -> tuple[Any, Any]:
    """Points of two labels each: most of the features of both, and noise."""
    labels = np.array([rng.choice(LABELS, 2, replace=False) for _ in range(count)])
    dense = np.where(rng.random((count, FEATURES)) < 0.03, rng.random((count, FEATURES)), 0)
    for row, pair in zip(dense, labels, strict=True):
        row[rng.choice(own[pair].ravel(), 7)] += 1
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)
    known = sp.csr_matrix((np.ones(labels.size), labels.ravel(), np.arange(0, labels.size + 1, 2)), (count, LABELS), dtype=np.float32)
    return sp.csr_matrix(dense, dtype=np.float32), known


x, y = points(POINTS)
queries, _ = points(TEST)
features = LabelEmbeddingFactory.create(y, x, method="pifa", threads=1)
clusters = Indexer.gen(features, indexer_type="hierarchicalkmeans", nr_splits=4, max_leaf_size=8, seed=0, threads=1)
model = XLinearModel.train(x, y, C=clusters, threads=1, threshold=0.05)
shutil.rmtree(folder / "model", ignore_errors=True)
model.save(str(folder / "model"))
sp.save_npz(folder / "queries.npz", queries)
for beam in BEAMS:
    sp.save_npz(folder / f"predictions-beam-{beam}.npz", model.predict(queries, beam_size=beam, only_topk=M, threads=1))
print(json.dumps({name: version(name) for name in ("libpecos", "numpy", "scipy")}))
