"""Bundles as training would export them: with golden queries, and held-out queries that say what was found of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.random_bundles import make_bundle, random_memory
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.search import SearchParams
from espalier.tree import complete_tree
from tests.espalier.bundle.parts import content_of, draft_of
from tests.golden import golden_of_histories
from training.evaluate import with_recall

HELD_OUT, GOLDEN, MS = 24, 6, [2, 5]


def exported(folder: Path, rng: np.random.Generator, said: bool = True, remembers: bool = False) -> Bundle:
    """Golden queries are answered by the reference, held-out queries say their recall if `said`.

    What is relevant to a query is half of what the model finds and as many others, so that recall is neither 0 nor 1.
    """
    tree = complete_tree(rng.permutation(64), 2)
    memory = random_memory(rng, 64, 3, integer=False) if remembers else None
    bare = make_bundle(folder / "bare", rng, tree, integer=False, name="books", memory=memory, beam_size=8, m=5)
    engine = open_engine(bare, "cpu")
    histories = [rng.integers(0, 64, rng.integers(1, 6)) for _ in range(HELD_OUT)]
    column = pa.array([[f"item-{i}" for i in row] for row in histories], pa.list_(pa.string()))
    golden = golden_of_histories(bare, histories[:GOLDEN], [8] * GOLDEN, [5] * GOLDEN)
    unknown = pa.table({"history": column, "relevant": pa.array([["item-0"]] * HELD_OUT)})
    first = write_bundle(folder / "first" / "books" / "1", draft_of(bare), content_of(bare, heldout=unknown))
    queries = read_heldout(first).queries
    found_BM = engine.search(queries, SearchParams.uniform(HELD_OUT, 8, max(MS), None)).item_rows_BM
    relevant = [[f"item-{i}" for i in {*row[row >= 0][::2].tolist(), *rng.integers(0, 64, 3).tolist()}] for row in found_BM]
    content = content_of(bare, golden=golden, heldout=pa.table({"history": column, "relevant": pa.array(relevant)}))
    second = write_bundle(folder / "second" / "books" / "1", draft_of(bare), content)
    table = with_recall(second, engine, MS) if said else second.heldout()
    return write_bundle(folder / "models" / "books" / "1", draft_of(bare), replace(content, heldout=table))
