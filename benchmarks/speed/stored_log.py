"""A prepared log and its tree as files, so that the phases of a benchmark need not run in one process.

Knows what training prepares. Does not know how.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather

from espalier.items import ItemTable
from espalier.tree import Tree
from training.data.interactions import EVENTS_FILE, Interactions
from training.data.splits import EvaluationPair, Split
from training.deep.prepare import Prepared
from training.specification.splits import UserSplit


def save_prepared(prepared: Prepared, folder: Path) -> None:
    """Write everything but the events, which lie in the work folder, of a log that was split by users."""
    lists = prepared.interactions
    folder.mkdir(parents=True, exist_ok=True)
    prepared.items.write(folder / "items.arrow")
    feather.write_feather(pa.table({"id": lists.user_ids}), folder / "users.feather", "uncompressed")
    np.savez(folder / "split.npz", offset_U1=lists.offset_U1, train=prepared.split.train)
    for name, pairs in (("validation", prepared.split.validation), ("test", prepared.split.test)):
        feather.write_feather(_table(pairs), folder / f"{name}.feather")
    (folder / "log.json").write_text(json.dumps({"fingerprint": lists.fingerprint, "order": lists.order}) + "\n")


def load_prepared(folder: Path, events: Path) -> Prepared:
    """What `save_prepared` wrote, over the events of a work folder."""
    items = ItemTable.open(folder / "items.arrow")
    split, log = np.load(folder / "split.npz"), json.loads((folder / "log.json").read_text())
    lists = Interactions(
        user_ids=feather.read_table(folder / "users.feather").column("id").combine_chunks(),
        item_ids=items.column("id").combine_chunks(),
        offset_U1=split["offset_U1"],
        item_of_event_E=np.memmap(events / EVENTS_FILE, np.int32, mode="r"),
        category_of_item_I=None,
        category_names=(),
        fingerprint=log["fingerprint"],
        order=log["order"],
    )
    validation, test = (_pairs(feather.read_table(folder / f"{name}.feather")) for name in ("validation", "test"))
    return Prepared(Split(lists, split["train"], validation, test, UserSplit()), items)


def save_tree(tree: Tree, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("level_offset", "first_child", "leaf_item"):
        np.save(folder / f"{name}.npy", getattr(tree, name))


def load_tree(folder: Path) -> Tree:
    return Tree(*(np.load(folder / f"{name}.npy") for name in ("level_offset", "first_child", "leaf_item")))


def _table(pairs: Sequence[EvaluationPair]) -> pa.Table:
    lists = {name: pa.array([getattr(pair, name) for pair in pairs], pa.list_(pa.int64())) for name in ("history", "relevant")}
    return pa.table({"user": [pair.user for pair in pairs], **lists})


def _pairs(table: pa.Table) -> list[EvaluationPair]:
    return [
        EvaluationPair(row["user"], np.array(row["history"], np.int64), np.array(row["relevant"], np.int64)) for row in table.to_pylist()
    ]
