"""A log with the live items of a journal, and without those that are gone.

Items that the log lacks join its catalogue. Each of their events, the items that led to one and then the item itself, is a list of a user
of its own, who is trained on and never asked for. Items that the log has are not given their events again: by now the log holds what came
of them. Items that are gone leave the catalogue, all lists, and what is relevant.

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

from espalier.errors import InvalidData
from espalier.items import ItemTable

from ..arrays import Int64
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
    """The split with the items of a journal. Files of joined lists lie in `work`. Raises InvalidData where nothing is left of it."""
    before = split.lists
    known = before.item_ids.to_pylist()
    known_ids = set(known)
    new = [item_id for item_id in journal.put if item_id not in known_ids]
    ids = sorted({*known, *new} - journal.gone.keys(), key=str.encode)
    row_of = {item_id: row for row, item_id in enumerate(ids)}
    row_I = np.array([row_of.get(item_id, -1) for item_id in known], np.int64)
    lists, vectors = _events(new, journal, row_of, before)

    def learned(old: Interactions, users: Int64, folder: Path) -> tuple[Interactions, Int64]:
        folder.mkdir(exist_ok=True)
        joined = in_rows_of(old, pa.array(ids, pa.large_string()), row_I, lists, vectors, folder)
        has_events = np.flatnonzero(np.diff(joined.offset_U1))
        return joined, np.intersect1d(np.append(users, old.user_count + np.arange(len(lists))), has_events)

    joined, train = learned(before, split.train, work)
    log.info("journal: %d items join the log's, %d leave; %d events train new items", len(new), int((row_I < 0).sum()), len(lists))
    parts = [in_rows(part, row_I) for part in (split.validation, split.test)]
    if not len(train) or not parts[0]:
        raise InvalidData("log", f"{len(train)} training users and {len(parts[0])} validation queries", "some of both once items are gone")
    final = None if split.final is None else learned(*split.final, work / FINAL)
    return replace(split, lists=joined, train=train, validation=parts[0], test=parts[1], final=final)


def with_live_fields(items: ItemTable, journal: JournalItems, after: int) -> ItemTable:
    """An item table with the fields of live items: of those that it has nothing of, and of those put by an operation after a sequence.

    Raises InvalidData where a value is not of its column's type.
    """
    table = items.to_table()
    named = [name for name in table.column_names if name != "id"]
    blank = np.ones(len(items), np.bool_)
    for name in named:
        blank &= np.asarray(table.column(name).is_null())
    put = [item_id for item_id, operation in journal.put.items() if operation.body.fields is not None]
    ids, rows = [], []
    for item_id, row in zip(put, items.rows_of(put).tolist(), strict=True):
        if row >= 0 and (blank[row] or journal.put[item_id].sequence > after):
            ids.append(item_id)
            rows.append(row)
    source = np.arange(len(items))
    source[rows] = len(items) + np.arange(len(rows))
    for name in named:
        kind = table.schema.field(name).type
        values = [(journal.put[item_id].body.fields or {}).get(name) for item_id in ids]
        try:
            column = pa.chunked_array([*table.column(name).chunks, pa.array(values, kind)], kind)
        except (pa.ArrowException, OverflowError) as error:
            raise InvalidData(f"items.{name}", str(error), f"values of {kind}, as in data.items") from error
        table = table.set_column(table.column_names.index(name), name, column.take(pa.array(source)))
    return ItemTable.build(table)


def _events(
    new: Sequence[str], journal: JournalItems, row_of: dict[str, int], before: Interactions
) -> tuple[list[list[int]], list[list[float]]]:
    """Lists of item rows that train new items, and of a log of vectors the vector of each."""
    lists, vectors = [], []
    for item_id in new:
        for event in journal.put[item_id].body.events:
            if not isinstance(event, list):
                continue
            if before.vectors_UF is not None:
                if len(event) == before.vectors_UF.shape[1]:
                    vectors.append(event)
                    lists.append([row_of[item_id]])
                continue
            led = [row_of[str(other)] for other in event if str(other) in row_of and other != item_id]
            if led:
                lists.append([*led, row_of[item_id]])
    return lists, vectors


def in_rows_of(
    before: Interactions, ids: pa.Array, row_I: Int64, lists: list[list[int]], vectors: list[list[float]], work: Path
) -> Interactions:
    """The log in the rows of other items (`row_I`, −1: left out), and with more lists behind those of its users."""
    kept_U = np.zeros(before.user_count, np.int64)
    for first, last in user_chunks(before.offset_U1, BLOCK):
        offset = before.offset_U1[first : last + 1]
        kept_U[first:last] = counts_by_user(row_I[before.item_of_event_E[offset[0] : offset[-1]]] >= 0, offset)
    if not kept_U.any() and not lists:
        raise InvalidData("log", f"{before.event_count} events, all with items that are gone", "events with other items")
    offset_U1 = np.append(0, np.cumsum(kept_U))
    ends = offset_U1[-1] + np.cumsum([len(rows) for rows in lists], dtype=np.int64)
    with tempfile.NamedTemporaryFile(dir=work, prefix=".reading-", delete=False) as file:
        for begin in range(0, before.event_count, BLOCK):
            rows = row_I[before.item_of_event_E[begin : begin + BLOCK]]
            rows[rows >= 0].astype(np.int32).tofile(file)
        np.array([row for rows in lists for row in rows], np.int32).tofile(file)
    os.replace(file.name, work / JOINED_FILE)
    if before.vectors_UF is not None and vectors:
        with tempfile.NamedTemporaryFile(dir=work, prefix=".reading-", delete=False) as file:
            step = max(1, BLOCK // before.vectors_UF.shape[1])
            for begin in range(0, before.user_count, step):
                np.asarray(before.vectors_UF[begin : begin + step], np.float32).tofile(file)
            np.array(vectors, np.float32).tofile(file)
        os.replace(file.name, work / JOINED_VECTORS)
        shape = before.user_count + len(vectors), before.vectors_UF.shape[1]
        before = replace(before, vectors_UF=np.memmap(work / JOINED_VECTORS, np.float32, "r", shape=shape))
    categories = before.category_of_item_I
    if categories is not None:
        of_known, categories = categories, np.full(len(ids), -1, np.int32)
        categories[row_I[row_I >= 0]] = of_known[row_I >= 0]
    users = [*before.user_ids.to_pylist(), *(f"live event {number}" for number in range(len(lists)))] if lists else None
    return replace(
        before,
        user_ids=before.user_ids if users is None else pa.array(users, pa.large_string()),
        item_ids=ids,
        offset_U1=np.append(offset_U1, ends).astype(np.int64),
        item_of_event_E=np.memmap(work / JOINED_FILE, np.int32, "r"),
        category_of_item_I=categories,
        time_of_event_E=None,
    )
