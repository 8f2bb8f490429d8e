"""A bundle in each precision: which are written, what they weigh, and that int8 answers like float16 where it holds the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.quality.row_precision import measure
from tests.espalier.placement.test_placer import product_bundle


def test_a_bundle_is_measured_in_its_own_precision_and_narrower_ones(tmp_path: Path) -> None:
    for own, expected in (("float32", ["float32", "float16", "int8"]), ("int8", ["int8"])):
        bundle = product_bundle(tmp_path / own, dtype=own)  # type: ignore[arg-type]  # a tuple's strings
        rows = measure(bundle, tmp_path / f"{own}-written", 8, [5, 10])
        assert [row["rows"] for row in rows] == expected
        assert all(np.isfinite([row["recall@5"], row["recall@10"], row["ms"]]).all() for row in rows)
        assert [row["rows_mb"] for row in rows] == sorted((row["rows_mb"] for row in rows), reverse=True)
