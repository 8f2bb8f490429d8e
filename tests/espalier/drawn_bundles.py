"""Random bundles of every kind of model, as hypothesis draws them: for tests of what must hold for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from benchmarks.random_bundles import Rng, make_bundle, make_linear_bundle, random_memory, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.chunks import TreeChunks
from espalier.manifest import Ranking
from espalier.packed_chunks import rounded
from tests.espalier.second_stages import F, random_stacking, random_tail, rewritten

KINDS = ("history", "product", "vector", "history sequence", "history memory", "product memory", "product sequence memory")
"""Of `make_bundle`, the first word being its kind."""
TREES: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32 - 1),
    "ragged": st.booleans(),
    "empty_share": st.sampled_from([0.0, 0.2, 0.9]),
    "gamma": st.sampled_from([0.0, 0.5, 1.0]),
}
graphs = st.fixed_dictionaries(
    TREES
    | {
        "kind": st.sampled_from(KINDS),
        "branching_height": st.sampled_from([(2, 3), (2, 6), (3, 4), (8, 2), (32, 2), (6, 1)]),
        "dtype": st.sampled_from(["float32", "float16", "int8"]),
    }
)
linear = st.fixed_dictionaries(
    TREES
    | {
        "kind": st.sampled_from(["linear", "linear tail", "linear stacking"]),
        "branching_height": st.sampled_from([(2, 3), (3, 4), (8, 2), (6, 1)]),
        "dtype": st.sampled_from(["float32", "float16"]),
        "trees": st.integers(1, 3),
        "own": st.sampled_from(["logit", "log_activation"]),
    }
)


def is_exact(shape: dict[str, Any]) -> bool:
    """Whether all arithmetic of a bundle of integers is exact."""
    return shape["kind"] in KINDS or (shape["kind"] == "linear" and shape["own"] == "logit")


def drawn_bundle(folder: Path, rng: Rng, shape: dict[str, Any], integer: bool = True) -> Bundle:
    """A bundle of a shape that was drawn from `graphs` or `linear`, or has more than these say.

    Whole numbers stay whole in logits and hinges alone, so that integer bundles rank by these. Slopes are by channel, and exact.
    """
    kind: Any
    kind, *parts = shape["kind"].split()
    branching, height = shape["branching_height"]
    tree = random_tree(rng, height, branching, shape["ragged"], shape["empty_share"])
    name = f"m{rng.integers(1 << 60)}"
    if kind != "linear":
        memory = random_memory(rng, tree.item_count, int(rng.integers(1, 6)), integer) if "memory" in parts else None
        return make_bundle(
            folder, rng, tree, kind, shape["gamma"], "logit" if integer else shape.get("own", "logit"), integer, name=name,
            dtype=shape["dtype"], memory=memory, encoder="sequence" if "sequence" in parts else "levels",
            slope=(rng.integers(-4, 9, 6) / 4).astype(np.float32),
        )  # fmt: skip
    others = [tree_over(rng, tree.item_count, int(rng.integers(2, 6))) for _ in range(max(shape["trees"], 1 + ("tail" in parts)) - 1)]
    own: Any = "log_activation" if parts else shape["own"]  # as second stages need it
    activation: Any = shape.get("activation", "l3-hinge")
    ranking = Ranking(activation="l3-hinge" if integer and activation == "sigmoid" else activation, own=own, gamma=shape["gamma"])
    bundle = make_linear_bundle(folder, rng, tree, ranking, integer, name, shape.get("width", F), others=others, max_m=1000)
    changed: dict[str, Any] = {}
    if shape.get("dtype") == "float16":
        narrow = [TreeChunks(tree, rounded(chunks) or chunks) for tree, chunks in bundle.trees]
        changed |= {"chunks": narrow[0].chunks, "others": narrow[1:]}
    if "tail" in parts:
        changed["tail"] = random_tail(rng, tree.item_count, "product" if rng.random() < 0.5 else "gaussian", 0.5)
    if "stacking" in parts:
        changed["stacking"] = random_stacking(rng, tree.item_count, candidates=6)
    return rewritten(bundle, folder / f"{name}-changed" / "1", **changed) if changed else bundle
