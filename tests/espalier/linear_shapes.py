"""Bundles of linear scorers of any shape, of one tree or a forest, and calls of them: what hypothesis draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from benchmarks.random_bundles import make_linear_bundle, random_masks, random_queries, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.search import SearchParams

Shape = dict[str, Any]


def linear_shapes(**changed: st.SearchStrategy[Any]) -> st.SearchStrategy[Shape]:
    """Shapes for `draw_linear`, and how many threads search; `changed` are keys that are drawn otherwise."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 2**32 - 1),
        "branching_height": st.sampled_from([(2, 6), (3, 4), (8, 2), (32, 2), (2, 1)]),
        "ragged": st.booleans(),
        "trees": st.integers(1, 4),
        "empty_share": st.sampled_from([0.0, 0.2, 0.9]),
        "own": st.sampled_from(["logit", "log_activation"]),
        "activation": st.sampled_from(["sigmoid", "l1-hinge", "l2-hinge", "l3-hinge", "l4-hinge"]),
        "gamma": st.sampled_from([0.0, 0.5, 1.0]),
        "exclude": st.sampled_from([0, 3, 40]),
        "passing": st.sampled_from([None, 0.0, 0.05, 0.5]),
        "width": st.sampled_from([1, 20, 300]),
        "threads": st.sampled_from([1, 2]),
        "batch": st.sampled_from([1, 3, 40]),
    }
    return st.fixed_dictionaries(drawn | changed)


def draw_linear(
    folder: Path, shape: Shape, integer: bool, most_beam: int = 40, most_m: int = 50
) -> tuple[Bundle, QueryBatch, SearchParams]:
    rng = np.random.default_rng(shape["seed"])
    branching, height = shape["branching_height"]
    tree = random_tree(rng, height, branching, shape["ragged"], shape["empty_share"])
    others = [tree_over(rng, tree.item_count, int(rng.integers(2, 9))) for _ in range(shape["trees"] - 1)]
    # whole numbers stay whole in the logits and hinges alone
    activation: Any = "l3-hinge" if integer and shape["activation"] == "sigmoid" else shape["activation"]
    ranking = Ranking(activation=activation, own=shape["own"], gamma=shape["gamma"])
    bundle = make_linear_bundle(folder, rng, tree, ranking, integer, f"m{rng.integers(1 << 60)}", shape["width"], others=others)
    batch: int = shape["batch"]
    queries = random_queries(rng, bundle, batch, integer)
    exclude = rng.integers(-1, tree.item_count, (batch, shape["exclude"])) if shape["exclude"] else None
    masks = None if shape["passing"] is None else random_masks(rng, tree, batch, shape["passing"], others)
    return bundle, queries, SearchParams(rng.integers(1, most_beam, batch), rng.integers(1, most_m, batch), exclude, mask_B=masks)
