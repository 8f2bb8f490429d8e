"""A log of query vectors: each the direction of one of 8 clusters with noise, off the origin, with 9 of the 12 items of its cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from training.specification.log_format import VectorsFormat

CLUSTERS, SIZE, QUERIES, WIDTH = 8, 12, 400, 10
FORMAT = VectorsFormat()


def table(seed: int, queries: int = QUERIES) -> pa.Table:
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(7).normal(size=(CLUSTERS, WIDTH))
    cluster = rng.integers(CLUSTERS, size=queries)
    vectors = 50 + 3 * directions[cluster] + rng.normal(size=(queries, WIDTH))
    items = [[f"item-{item * CLUSTERS + c}" for item in rng.permutation(SIZE)[:9]] for c in cluster]
    flat = pa.array(vectors.ravel().astype(np.float32))
    return pa.table({"vector": pa.FixedSizeListArray.from_arrays(flat, WIDTH), "items": items})


def write_log(folder: Path) -> Path:
    file = folder / "vectors.parquet"
    pq.write_table(table(1), file, row_group_size=150)
    return file


def settings(log: Path, **sections: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "kind": "otm-robust",
        "name": "planted",
        "data": {"log": str(log), "format": {"format": "vectors"}},
        "instances": {"targets": 20},
        "scorer": {"node_dim": 12, "hidden": [24], "dropout": 0.0},
        "objective": {"beam_size": 10},
        "optimiser": {"steps": 60, "batch": 50, "learning_rate": 0.01, "average": 1, "validate_every": 30},
        "search": {"beam_size": 20, "m": 10, "max_beam_size": 96, "max_m": 64},
    }
    return plain | {key: plain[key] | value if isinstance(value, dict) else value for key, value in sections.items()}
