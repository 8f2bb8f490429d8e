"""Models with a journal beside them, whose operations have places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_tree, tree_over
from benchmarks.random_live import random_put
from espalier.bundle import Bundle
from espalier.bundle_writer import with_parts
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from tests.golden import golden_of_histories


class JournalOf:
    """Writes operations of a version, with places at random, as a service would."""

    def __init__(self, bundle: Bundle, seed: int = 0) -> None:
        self.bundle, self.rng, self.state = bundle, np.random.default_rng(seed), LiveState(bundle)
        self.journal = Journal.open(bundle.path.parent / "live.db")

    def put(self, item_id: str, placed: bool = True, at: float = 1.0, parent: int | None = None, **body: Any) -> int:
        """The sequence. placed: whether a place is stored, of a trained item a new row; parent: of the first tree."""
        operation = Operation(0, item_id, "put", ItemBody(**body), at=at)
        with self.journal.writing() as transaction:
            sequence = transaction.append(operation).sequence
            change = Change(sequence, item_id, "put", body.get("fields"), at=at, valid_until=body.get("valid_until"))
            if placed:
                parents = None if parent is None else np.array([parent])
                found = random_put(self.rng, self.state, item_id, sequence, parents=parents)
                change = Change(sequence, item_id, "put", body.get("fields"), found.placements, body.get("valid_until"), at)
                transaction.store_placements(self.bundle.manifest.version, {sequence: found.placements})
        if placed or self.bundle.items.rows_of([item_id])[0] >= 0:
            self.state.apply([change])
        return sequence

    def delete(self, item_id: str) -> int:
        with self.journal.writing() as transaction:
            sequence = transaction.append(Operation(0, item_id, "delete", at=1.0)).sequence
        self.state.apply([Change(sequence, item_id, "delete", at=1.0)])
        return sequence


def history_model(folder: Path, name: str = "books", seed: int = 5, dtype: Any = "float32") -> Bundle:
    """Version 1 of a model of histories with a memory, golden queries and held-out ones."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 4, empty_share=0.1)
    memory = random_memory(rng, tree.item_count, 3)
    bare = make_bundle(folder / "bare", rng, tree, "product", integer=True, name=name, memory=memory, dtype=dtype)
    golden = golden_of_histories(bare, [np.array([0, 1]), np.array([2]), np.array([], np.int64)], [4, 2, 9], [3, 5, 5])
    strings = pa.list_(pa.string())
    heldout = pa.table(
        {"history": pa.array([["item-0"], ["item-1", "item-2"]], strings), "relevant": pa.array([["item-1"], ["item-3"]], strings)}
    )
    return with_parts(bare, folder / name / "1", {}, {"golden.parquet": golden, "heldout.parquet": heldout})


def linear_model(folder: Path, trees: int = 1) -> Bundle:
    """Version 1 of a model of features, of one tree or a forest."""
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 2, 5)
    others = [tree_over(rng, tree.item_count, 3) for _ in range(trees - 1)]
    return make_linear_bundle(folder, rng, tree, Ranking(activation="l3-hinge", own="log_activation", gamma=1), name="books", others=others)
