"""A log with the live items of a journal, and without those that are gone.

Items that the log lacks are added to its catalogue. Each of their events becomes the list of a new training user: the items that led to
the event, then the item itself. Events of items that the log has are not added: the log already holds them. Items that are gone are
removed from the catalogue, from all lists and from the relevant items.

Legend: I items of the log, J items of the joined one, U users, E events.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from espalier.arrays import Int64
from espalier.errors import InvalidData
from espalier.items import ItemTable

from ..data.cut_lists import counts_by_user
from ..data.grouping import user_chunks
from ..data.interactions import Interactions
from ..data.splits import FINAL, Split
from ..evaluate import in_rows
from ..live.catalogue import JournalItems

log = logging.getLogger(__name__)

JOINED_FILE, JOINED_VECTORS = "joined.int32", "joined-vectors.float32"
"""Names, inside the work folder, of the files behind the joined lists and vectors."""
BLOCK = 1 << 22
"""Events, or numbers of vectors, that are written at a time."""


def with_journal(split: Split, journal: JournalItems, work: Path) -> Split:
    """The split with the items of a journal. Files of joined lists lie in `work`. Raises InvalidData if nothing is left."""
    log_lists = split.lists
    log_ids = log_lists.item_ids.to_pylist()
    logged_ids = set(log_ids)
    new_ids = [item_id for item_id in journal.put if item_id not in logged_ids]
    ids = sorted({*log_ids, *new_ids} - journal.gone.keys(), key=str.encode)
    row_of = {item_id: row for row, item_id in enumerate(ids)}
    row_I = np.array([row_of.get(item_id, -1) for item_id in log_ids], np.int64)
    lists, vectors = _new_lists(new_ids, journal, row_of, log_lists)

    def join_lists(old_lists: Interactions, users: Int64, folder: Path) -> tuple[Interactions, Int64]:
        folder.mkdir(exist_ok=True)
        joined = renumbered_lists(old_lists, pa.array(ids, pa.large_string()), row_I, lists, vectors, folder)
        has_events = np.flatnonzero(np.diff(joined.offset_U1))
        return joined, np.intersect1d(np.append(users, old_lists.user_count + np.arange(len(lists))), has_events)

    joined, train = join_lists(log_lists, split.train, work)
    log.info("journal: %d items join the log's, %d leave; %d events train new items", len(new_ids), int((row_I < 0).sum()), len(lists))
    pairs = [in_rows(queries, row_I) for queries in (split.validation, split.test)]
    if not len(train) or not pairs[0]:
        raise InvalidData("log", f"{len(train)} training users and {len(pairs[0])} validation queries", "some of both once items are gone")
    final = None if split.final is None else join_lists(*split.final, work / FINAL)
    return replace(split, lists=joined, train=train, validation=pairs[0], test=pairs[1], final=final)


def with_live_fields(items: ItemTable, journal: JournalItems, after: int) -> ItemTable:
    """An item table with the fields of live items: of items without a value in the table, and of items put after the sequence `after`.
    Raises InvalidData if a value is not of its column's type.
    """
    table = items.to_table()
    field_names = [name for name in table.column_names if name != "id"]
    is_blank = np.ones(len(items), np.bool_)
    for name in field_names:
        is_blank &= np.asarray(table.column(name).is_null())
    put_ids = [item_id for item_id, operation in journal.put.items() if operation.body.fields is not None]
    ids, rows = [], []
    for item_id, row in zip(put_ids, items.rows_of(put_ids).tolist(), strict=True):
        if row >= 0 and (is_blank[row] or journal.put[item_id].sequence > after):
            ids.append(item_id)
            rows.append(row)
    source = np.arange(len(items))
    source[rows] = len(items) + np.arange(len(rows))
    for name in field_names:
        dtype = table.schema.field(name).type
        values = [(journal.put[item_id].body.fields or {}).get(name) for item_id in ids]
        try:
            column = pa.chunked_array([*table.column(name).chunks, pa.array(values, dtype)], dtype)
        except (pa.ArrowException, OverflowError) as error:
            raise InvalidData(f"items.{name}", str(error), f"values of {dtype}, as in data.items") from error
        table = table.set_column(table.column_names.index(name), name, column.take(pa.array(source)))
    return ItemTable.build(table)


def _new_lists(
    new_ids: Sequence[str], journal: JournalItems, row_of: dict[str, int], log_lists: Interactions
) -> tuple[list[list[int]], list[list[float]]]:
    """The lists of item rows that train new items, and for a log of vectors the vector of each list."""
    lists, vectors = [], []
    for item_id in new_ids:
        for event in journal.put[item_id].body.events:
            if not isinstance(event, list):
                continue
            if log_lists.vectors_UF is not None:
                if len(event) == log_lists.vectors_UF.shape[1]:
                    vectors.append(event)
                    lists.append([row_of[item_id]])
                continue
            history = [row_of[str(other)] for other in event if str(other) in row_of and other != item_id]
            if history:
                lists.append([*history, row_of[item_id]])
    return lists, vectors


def renumbered_lists(
    log_lists: Interactions, ids: pa.Array, row_I: Int64, lists: list[list[int]], vectors: list[list[float]], work: Path
) -> Interactions:
    """The log with item i at row `row_I[i]` (−1: left out), and more lists after those of its users."""
    count_U = np.zeros(log_lists.user_count, np.int64)
    for first, last in user_chunks(log_lists.offset_U1, BLOCK):
        offset = log_lists.offset_U1[first : last + 1]
        count_U[first:last] = counts_by_user(row_I[log_lists.item_of_event_E[offset[0] : offset[-1]]] >= 0, offset)
    if not count_U.any() and not lists:
        raise InvalidData("log", f"{log_lists.event_count} events, all with items that are gone", "events with other items")
    offset_U1 = np.append(0, np.cumsum(count_U))
    ends = offset_U1[-1] + np.cumsum([len(rows) for rows in lists], dtype=np.int64)
    with tempfile.NamedTemporaryFile(dir=work, prefix=".reading-", delete=False) as file:
        for begin in range(0, log_lists.event_count, BLOCK):
            rows = row_I[log_lists.item_of_event_E[begin : begin + BLOCK]]
            rows[rows >= 0].astype(np.int32).tofile(file)
        np.array([row for rows in lists for row in rows], np.int32).tofile(file)
    os.replace(file.name, work / JOINED_FILE)
    if log_lists.vectors_UF is not None and vectors:
        with tempfile.NamedTemporaryFile(dir=work, prefix=".reading-", delete=False) as file:
            step = max(1, BLOCK // log_lists.vectors_UF.shape[1])
            for begin in range(0, log_lists.user_count, step):
                np.asarray(log_lists.vectors_UF[begin : begin + step], np.float32).tofile(file)
            np.array(vectors, np.float32).tofile(file)
        os.replace(file.name, work / JOINED_VECTORS)
        shape = log_lists.user_count + len(vectors), log_lists.vectors_UF.shape[1]
        log_lists = replace(log_lists, vectors_UF=np.memmap(work / JOINED_VECTORS, np.float32, "r", shape=shape))
    categories = log_lists.category_of_item_I
    if categories is not None:
        log_categories, categories = categories, np.full(len(ids), -1, np.int32)
        categories[row_I[row_I >= 0]] = log_categories[row_I >= 0]
    users = [*log_lists.user_ids.to_pylist(), *(f"live event {number}" for number in range(len(lists)))] if lists else None
    return replace(
        log_lists,
        user_ids=log_lists.user_ids if users is None else pa.array(users, pa.large_string()),
        item_ids=ids,
        offset_U1=np.append(offset_U1, ends).astype(np.int64),
        item_of_event_E=np.memmap(work / JOINED_FILE, np.int32, "r"),
        category_of_item_I=categories,
        time_of_event_E=None,
    )
