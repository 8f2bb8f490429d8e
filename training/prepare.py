"""From a configuration to what training starts with: the log, its split, the item table and the tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.tree import Tree
from training.config import TrainingConfig
from training.data.interactions import Interactions, read_interactions
from training.data.splits import Split, split_users
from training.trees.category import category_tree
from training.trees.embeddings import item_embeddings as embeddings_of
from training.trees.embeddings import spread_unseen
from training.trees.kmeans import kmeans_tree
from training.trees.random import random_tree


@dataclass(frozen=True)
class Prepared:
    """Item rows of `interactions` and of `items` are the same."""

    interactions: Interactions
    split: Split
    items: ItemTable


def prepare(config: TrainingConfig, log: Path | None, work: Path) -> Prepared:
    """Read the log (or `log` instead of the configured one) and the item table; events stay in files under `work`."""
    interactions = read_interactions(log or config.data.log, config.data.format, work)
    split = split_users(interactions, config.data.test_share, config.data.validation_share, seed=config.seed)
    for name, part in (("train", split.train), ("validation", split.validation)):
        if len(part) == 0:
            raise InvalidData("log", f"{interactions.user_count} users", f"enough users for a {name} part")
    return Prepared(interactions, split, item_table(config.data.items, interactions.item_ids))


def item_table(file: Path | None, ids: pa.Array) -> ItemTable:
    """The table of these items: its columns from a Parquet file with a column `id`, null where the file lacks an item."""
    if file is None:
        return ItemTable.build(pa.table({"id": ids}))
    if not file.is_file():
        raise InvalidConfig("data.items", str(file), "a Parquet file that exists")
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise InvalidConfig("data.items", str(file), f"a Parquet file ({error})") from error
    if "id" not in table.column_names:
        raise InvalidConfig("data.items", table.column_names, "a column named 'id'")
    known = table.column("id").cast(pa.large_string()).to_pylist()
    place = {item_id: row for row, item_id in enumerate(known)}
    if len(place) != len(known):
        repeated = next(item_id for row, item_id in enumerate(known) if place[item_id] != row)
        raise InvalidConfig("data.items", repeated, "each id once")
    rows = pa.array([place.get(item_id) for item_id in ids.to_pylist()], pa.int64())
    if rows.null_count == len(rows):
        raise InvalidConfig("data.items", known[:3], f"ids of the log's items, such as {ids[0].as_py()!r}")
    return ItemTable.build(table.take(rows).set_column(table.column_names.index("id"), "id", ids))


def build_tree(config: TrainingConfig, prepared: Prepared) -> Tree:
    """The configured tree over the catalogue, from training users only."""
    interactions, tree = prepared.interactions, config.tree
    if tree.kind == "random":
        return random_tree(interactions.item_count, tree.branching, seed=config.seed)
    if tree.kind == "category":
        if interactions.category_of_item_I is None:
            raise InvalidConfig("tree.kind", tree.kind, "a log with a category column")
        return category_tree(interactions.category_of_item_I, tree.branching, seed=config.seed)
    if tree.earlier_model is None:
        embeddings_ID = item_embeddings(prepared, tree.embedding_dim, config.seed)
    else:
        learned_ID = leaf_rows(Bundle.open(tree.earlier_model), prepared.items)
        embeddings_ID = spread_unseen(learned_ID, interactions.category_of_item_I, seed=config.seed)
    return kmeans_tree(embeddings_ID, tree.branching, seed=config.seed)


def leaf_rows(bundle: Bundle, items: ItemTable) -> NDArray[np.float32]:
    """float32[I, D]: the leaf rows that a bundle learned for these items, zero for items that it does not have."""
    row = bundle.items.rows_of(items.column("id").to_pylist())
    leaves = bundle.tree.leaf_of_item[row]
    return np.where((row >= 0)[:, None], bundle.node_rows_ND[leaves], 0).astype(np.float32)


def item_embeddings(prepared: Prepared, width: int, seed: int) -> NDArray[np.float32]:
    """float32[I, D]: co-occurrence embeddings of all items from training users; D is less than `width` only for tiny catalogues."""
    interactions, train = prepared.interactions, prepared.split.train
    width = max(1, min(width, len(train) - 1, interactions.item_count - 1))
    embeddings = embeddings_of(interactions, train, width, seed=seed)
    return spread_unseen(embeddings, interactions.category_of_item_I, seed=seed)
