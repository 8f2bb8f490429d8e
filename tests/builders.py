"""The small random bundles of `benchmarks/small_bundles.py`, by the name under which tests know them."""

from benchmarks.small_bundles import (
    Rng,
    make_bundle,
    make_linear_bundle,
    random_chunks,
    random_masks,
    random_queries,
    random_tree,
    sparse_rows,
)

__all__ = [
    "Rng",
    "make_bundle",
    "make_linear_bundle",
    "random_chunks",
    "random_masks",
    "random_queries",
    "random_tree",
    "sparse_rows",
]
