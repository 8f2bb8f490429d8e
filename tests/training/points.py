"""Points of sparse features with labels that show in them, and the files that they are read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, random_array, save_npz

from training.data.csr import Csr, normalised
from training.data.xmc import LabelledPoints


def unit(dense: Any) -> Csr:
    """Rows of length 1."""
    return normalised(csr_array(np.asarray(dense, np.float32)))


def random_points(rng: np.random.Generator, points: int, features: int, labels: int, density: float = 0.2) -> LabelledPoints:
    """Points whose features tell their labels: each label has features of its own, beside noise."""
    own = [np.sort(rng.permutation(labels)[: rng.integers(0, 4)]) for _ in range(points)]
    dense = random_array((points, features), density=density, rng=rng).toarray()
    for b, some in enumerate(own):
        dense[b, some % features] += 2
        dense[b, (7 * some + 3) % features] += 1
    labels_from = np.concatenate([[0], np.cumsum([len(some) for some in own])])
    flat = np.concatenate([*own, np.empty(0, np.int64)]).astype(np.int32)
    ones = np.ones(len(flat), np.float32)
    return LabelledPoints(unit(dense), csr_array((ones, flat, labels_from), shape=(points, labels)))


def points_of_degrees(count: int) -> LabelledPoints:
    """Points of 60 features whose 30 labels have degrees of relevance: each label its own, from 1 to 4."""
    data = random_points(np.random.default_rng(1), count, 60, 30, density=0.02)
    data.labels.data[:] = (1 + data.labels.indices % 4).astype(np.float32)
    return data


def as_xmc(data: LabelledPoints) -> str:
    """The text of an XMC file without weights of labels."""
    points, lines = data.points, [f"{len(data)} {data.points.shape[1]} {data.labels.shape[1]}"]
    for b in range(len(data)):
        entries = slice(points.indptr[b], points.indptr[b + 1])
        pairs = (f"{f}:{v:.6g}" for f, v in zip(points.indices[entries], points.data[entries], strict=True))
        lines.append(",".join(map(str, data.labels_of(b))) + " " + " ".join(pairs))
    return "\n".join(lines) + "\n"


def npz_files(folder: Path, **parts: LabelledPoints) -> dict[str, str]:
    """The `data` section of matrices that are written here: `train`, and `test` where it is given."""
    data = {"format": "npz"}
    for name, part in parts.items():
        for key, matrix in ((name, part.points), (f"{name}_labels", part.labels)):
            data[key] = str(folder / f"{key}.npz")
            save_npz(data[key], matrix)
    return data
