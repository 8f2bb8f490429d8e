"""Points and texts with the live items of a journal as labels, and without those that are gone.

A label that the data lack is trained on, in this order: its events and its text, which are points; its fields, if columns of the item table
are texts; otherwise the first points of the items in its `like`. Events of labels that the data have are not added again.

Legend: B points, I items, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa
from scipy.sparse import csr_array, hstack, vstack

from espalier.errors import InvalidData, InvalidQuery
from espalier.items import ItemTable
from espalier.queries import FeaturesKind, encode_features

from ..data.csr import Csr, as_matrix
from ..data.xmc import LabelledPoints
from ..live.catalogue import JournalItems
from ..live.joined_log import with_live_fields

LIKE_POINTS = 16
"""Points that a label without points of its own takes from each item in its `like`."""


def joined_items(items: ItemTable, journal: JournalItems, after: int) -> ItemTable:
    """The items that are not gone, in their order, then new ones in the order of their operations; fields as in `with_live_fields`."""
    table = items.to_table()
    ids = table.column("id").to_pylist()
    kept_rows = [row for row, item_id in enumerate(ids) if item_id not in journal.gone]
    known_ids = set(ids)
    added_ids = [item_id for item_id in journal.put if item_id not in known_ids]
    nulls = [None] * len(added_ids)
    blank = pa.table({name: pa.array(added_ids if name == "id" else nulls, table.schema.field(name).type) for name in table.column_names})
    joined = pa.concat_tables([table.take(pa.array(kept_rows, pa.int64())), blank])
    if not len(joined):
        raise InvalidData("items", f"{len(ids)} items, all gone", "an item that is there")
    return with_live_fields(ItemTable.build(joined), journal, after)


def new_ids(before: ItemTable, after: ItemTable) -> list[str]:
    """The ids that joined."""
    ids = after.column("id").to_pylist()
    return [item_id for item_id, row in zip(ids, before.rows_of(ids).tolist(), strict=True) if row < 0]


def without_gone(pairs: pl.DataFrame, journal: JournalItems) -> pl.DataFrame:
    """Pairs of `query` and `item` without items that are gone."""
    return pairs.filter(~pl.col("item").is_in([*journal.gone]))


def live_pairs(added_ids: Sequence[str], journal: JournalItems, columns: Sequence[str]) -> pl.DataFrame:
    """Pairs of `query` and `item` from the texts and text events of new items, with a 1 in other columns."""
    pairs = []
    for item_id in added_ids:
        body = journal.put[item_id].body
        texts = [event for event in body.events if isinstance(event, str)] + ([] if body.text is None else [body.text])
        pairs += [(text, item_id) for text in texts if text]
    live = pl.DataFrame(pairs, schema={"query": pl.String, "item": pl.String}, orient="row")
    return live.with_columns(pl.lit(1.0).alias(name) for name in columns if name not in live.columns).select(columns)


def with_live_texts(columns: list[list[str]], added_ids: Sequence[str], journal: JournalItems, items: ItemTable) -> list[list[str]]:
    """The texts of all items by column. A new item without any gets the text of its put operation in the first column, or without events
    the texts of the items in its `like`."""
    for item_id, row in zip(added_ids, items.rows_of(list(added_ids)).tolist(), strict=True):
        body = journal.put[item_id].body
        if columns and body.text and not any(texts[row] for texts in columns):
            columns[0][row] = body.text
        like = items.rows_of(list(body.like))
        if len(like) and not body.events and not any(texts[row] for texts in columns):
            for texts in columns:
                texts[row] = " ".join(filter(None, (texts[other] for other in like[like >= 0].tolist())))
    return columns


def joined_points(points: LabelledPoints, before: ItemTable, after: ItemTable) -> LabelledPoints:
    """The points with the items of another table as labels."""
    row_of = before.rows_of(after.column("id").to_pylist())
    kept_labels = points.labels.tocsc()[:, row_of[row_of >= 0]].tocsr()
    new_labels = csr_array((len(points), int(np.count_nonzero(row_of < 0))), dtype=points.labels.dtype)
    return LabelledPoints(points.points, csr_array(hstack([kept_labels, new_labels], format="csr")))


def with_live_points(points: LabelledPoints, added_ids: Sequence[str], journal: JournalItems, items: ItemTable) -> LabelledPoints:
    """The points with those events of new items that are sparse vectors. Raises InvalidData for features that the points lack."""
    width, pairs, labels = points.points.shape[1], [], []
    rows = items.rows_of(list(added_ids)).tolist()
    for item_id, row in zip(added_ids, rows, strict=True):
        for event in journal.put[item_id].body.events:
            if isinstance(event, dict):
                pairs.append((event.get("indices", []), event.get("values", [])))
                labels.append(row)
    if not pairs:
        return points
    try:
        events = as_matrix(encode_features(FeaturesKind(width=width), pairs).features)
    except InvalidQuery as error:
        raise InvalidData(f"events of live items, {error.field}", error.value, error.expected) from error
    ones = csr_array((np.ones(len(labels), np.float32), (np.arange(len(labels)), labels)), shape=(len(labels), points.labels.shape[1]))
    return LabelledPoints(csr_array(vstack([points.points, events], format="csr")), csr_array(vstack([points.labels, ones], format="csr")))


def with_likes(labels: Csr, added_ids: Sequence[str], journal: JournalItems, items: ItemTable) -> Csr:
    """float32[B, I]: the labels; new items without a point get the first LIKE_POINTS points of each item in their `like`."""
    counts_I = np.bincount(labels.indices, minlength=labels.shape[1])
    by_label, row, column = labels.tocsc(), [], []
    for item_id, label in zip(added_ids, items.rows_of(list(added_ids)).tolist(), strict=True):
        if counts_I[label]:
            continue
        like = items.rows_of(list(journal.put[item_id].body.like))
        points = [by_label.indices[by_label.indptr[i] : by_label.indptr[i + 1]][:LIKE_POINTS] for i in like[like >= 0].tolist()]
        like_points = np.unique(np.concatenate([np.empty(0, np.int64), *points]))
        row += like_points.tolist()
        column += [label] * len(like_points)
    added = csr_array((np.ones(len(row), np.float32), (np.array(row, np.int64), np.array(column, np.int64))), shape=labels.shape)
    return csr_array(labels + added)
