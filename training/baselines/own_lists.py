"""A caller's own method in `compare` as a file of its answers, so that it may run anywhere, in any language.

    write_queries   writes its training data and its queries: `train.parquet` (user, item; a user's events in their order) and
                    `queries.parquet` (part, user, history: a list of item ids, oldest first)
    listed_method   reads its answers: columns user, item and rank (the lowest is best), perhaps part

`part` is `validation` or `test`. Without this column, a list answers its user's test query, or the validation query if there is no test
query. A query without a list has an empty answer. Knows splits and files. Does not know metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from espalier.arrays import Int64
from espalier.errors import InvalidConfig, InvalidData, InvalidInput
from espalier.frames import as_table
from espalier.items import ItemTable
from espalier.logs.log_values import RowSource, table_row
from espalier.search import padded

from ..data.splits import EvaluationPair, Split
from ..retrieval.task import Fitted, Method, Task

log = logging.getLogger(__name__)


ENDINGS = (".parquet", ".csv", ".tsv", ".csv.gz", ".tsv.gz")
COLUMNS, PART = ("user", "item", "rank"), "part"
PARTS = ("validation", "test")
"""In this order: a list without a part answers the last query that its user has."""


def write_queries(split: Split, items: ItemTable, folder: Path) -> None:
    """Write the files that the module describes, over existing ones."""
    folder.mkdir(parents=True, exist_ok=True)
    lists, names = split.lists, pa.array(items.ids_of(np.arange(len(items))))
    events = np.concatenate([np.arange(*lists.offset_U1[user : user + 2]) for user in split.train.tolist()])
    user_E = np.repeat(split.train, np.diff(lists.offset_U1)[split.train])
    train_columns = {"user": lists.user_ids.take(user_E), "item": names.take(lists.item_of_event_E[events])}
    pq.write_table(pa.table(train_columns), folder / "train.parquet")
    pairs = _queries_by_part(split)
    ends = np.cumsum([0, *(len(pair.history) for _, pair in pairs)])
    rows = np.concatenate([np.empty(0, np.int64), *(pair.history for _, pair in pairs)])
    query_columns = {
        PART: pa.array([part for part, _ in pairs], pa.string()),
        "user": lists.user_ids.take(np.array([pair.user for _, pair in pairs], np.int64)),
        "history": pa.LargeListArray.from_arrays(ends, names.take(rows)),
    }
    pq.write_table(pa.table(query_columns), folder / "queries.parquet")


def listed_method(option: str, file: Path) -> tuple[str, Method]:
    """The file's name and the method of a file of answers. Raises InvalidConfig if it is no such file."""
    table = _read(option, file)
    name = next((file.name[: -len(ending)] for ending in ENDINGS if file.name.lower().endswith(ending)), "")
    if not name:
        raise InvalidConfig(option, str(file), f"a file with a name, and one of the endings {', '.join(ENDINGS)}")

    def fitted(task: Task) -> Fitted:
        begin = time.perf_counter()
        lists = _lists(option, file, table, task)
        # Queries are identified by their array's id(): two users with equal histories may have different lists. Holding the arrays keeps
        # other arrays from getting their ids.
        no_items = np.empty(0, np.int64)
        list_of = {id(pair.query): (pair.query, lists.get((part, pair.user), no_items)) for part, pair in _queries_by_part(task.split)}
        missing = sum((("test", pair.user) not in lists) for pair in task.split.test)
        if missing == len(task.split.test):
            raise InvalidConfig(option, str(file), "lists of the users of test queries, which --queries-to FOLDER writes; it has none")
        if missing:
            log.warning("%s: no list for %d of %d test queries: they have found nothing", file, missing, len(task.split.test))

        def rank(queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
            found = [(query, list_of.get(id(query), (query, no_items))[1]) for query in queries]
            return padded([best[~np.isin(best, query)][:m] if exclude_seen else best[:m] for query, best in found], m)

        list_bytes = sum(rows.nbytes for rows in lists.values())
        return Fitted(rank, {}, list_bytes, time.perf_counter() - begin)

    return name, fitted


def is_listed(file: Path) -> bool:
    return file.name.lower().endswith(ENDINGS)


def _read(option: str, file: Path) -> pa.Table:
    try:
        table = as_table(option, file, COLUMNS[:2])
    except InvalidInput as error:
        raise InvalidConfig(option, error.value, error.expected) from error
    for column in COLUMNS:
        if table.column_names.count(column) != 1:
            columns = f"{file}, columns {', '.join(table.column_names)}"
            raise InvalidConfig(option, columns, f"columns {', '.join(COLUMNS)}, each once; look at {column}")
    if not len(table):
        raise InvalidConfig(option, f"{file}: no rows", "a row for each item of an answer")
    try:
        ranks = table["rank"].cast(pa.float64(), safe=False)
    except pa.ArrowException as error:
        raise InvalidConfig(option, f"{file}: rank ({error})", "numbers, the lowest for the best item") from error
    table = table.set_column(table.column_names.index("rank"), "rank", ranks)
    parts_in_file = set(map(str, table[PART].to_pylist())) if PART in table.column_names else set()
    if unknown_parts := sorted(parts_in_file - {*PARTS}):
        raise InvalidConfig(option, f"{file}: part {unknown_parts[0]!r}", " or ".join(PARTS))
    return table


def _lists(option: str, file: Path, table: pa.Table, task: Task) -> dict[tuple[str, int], Int64]:
    """(part, user) → item rows, best first, without repeats and without users and items that the log does not have."""
    try:
        source = RowSource(file.name, {"user": "user", "item": "item"}, table_row)
        users, item_names = (source.strings(role, table[role].combine_chunks()) for role in source.columns)
        item_names = item_names.dictionary_encode()
    except InvalidData as error:  # such as a list of items in one row
        raise InvalidConfig(option, str(file), f"an id of a user and an id of an item in each row ({error})") from error
    rows_D = task.items.rows_of(item_names.dictionary.to_pylist())
    if missing := int(np.count_nonzero(rows_D < 0)):
        if missing == len(rows_D):
            raise InvalidConfig(option, str(file), f"items of the log; it has none of the {missing:,} in the file")
        log.warning("%s: %d of %d items are not in the log and are left out", file, missing, len(rows_D))
    row_of_name = np.append(rows_D, -1)
    item_E = row_of_name[pc.fill_null(item_names.indices, -1).to_numpy(zero_copy_only=False)]
    user_E = pc.fill_null(pc.index_in(users, value_set=task.split.lists.user_ids), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    rank_E = pc.fill_null(table["rank"], np.inf).to_numpy()
    if np.isnan(rank_E).any():
        raise InvalidConfig(option, f"{file}: rank nan", "numbers, the lowest for the best item")
    part_E = _parts(table, user_E, task.split)
    rows = np.flatnonzero((item_E >= 0) & (user_E >= 0) & (part_E >= 0))
    rows = rows[np.lexsort((rank_E[rows], user_E[rows], part_E[rows]))]
    key_E = part_E[rows] * (len(task.split.lists.user_ids) + 1) + user_E[rows]
    begins = np.flatnonzero(np.diff(key_E, prepend=-1)).tolist()
    lists: dict[tuple[str, int], Int64] = {}
    for begin, end in pairwise([*begins, len(rows)]):
        item_rows = item_E[rows[begin:end]]
        _, first = np.unique(item_rows, return_index=True)
        lists[PARTS[part_E[rows[begin]]], int(user_E[rows[begin]])] = item_rows[np.sort(first)]
    return lists


def _parts(table: pa.Table, user_E: Int64, split: Split) -> Int64:
    """int64[E]: the position in PARTS of each row's query, −1 for users without a query."""
    if PART in table.column_names:
        return np.asarray(pc.index_in(table[PART].cast(pa.string()), value_set=pa.array(PARTS)).to_numpy(), np.int64)
    part_U = np.full(len(split.lists.user_ids) + 1, -1)  # the last entry is for users that the log does not have
    for part, pair in _queries_by_part(split):
        part_U[pair.user] = PARTS.index(part)
    return part_U[user_E]


def _queries_by_part(split: Split) -> list[tuple[str, EvaluationPair]]:
    """(part, query) pairs, test queries last."""
    return [(part, pair) for part, pairs in zip(PARTS, (split.validation, split.test), strict=True) for pair in pairs]
