"""A method of one's own in `compare` as a file of what it shows, so that it may run anywhere, in any language.

    write_queries   what such a method learns from and what it is asked: `train.parquet` (user, item; a user's events in their order) and
                    `queries.parquet` (part, user, history: a list of item ids, oldest first)
    listed_method   its answers: columns user, item and rank (the lowest is best), perhaps part

`part` is `validation` or `test`. Without that column a list is of its user's test query, else of his validation query. A query without a
list has found nothing. Knows splits and files. Does not know what is measured.
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
from numpy.typing import NDArray

from espalier.errors import InvalidConfig, InvalidInput
from espalier.frames import as_table
from espalier.items import ItemTable
from espalier.search import NO_ITEM

from ..data.splits import EvaluationPair, Split
from ..retrieval.task import Fitted, Method, Task

log = logging.getLogger(__name__)

Int64 = NDArray[np.int64]

ENDINGS = (".parquet", ".csv", ".tsv", ".csv.gz", ".tsv.gz")
COLUMNS, PART = ("user", "item", "rank"), "part"
PARTS = ("validation", "test")
"""Also the order in which a list without a part is looked for a query: the last that its user has."""


def write_queries(split: Split, items: ItemTable, folder: Path) -> None:
    """See the module. What is in these files already is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    lists, names = split.lists, pa.array(items.ids_of(np.arange(len(items))))
    events = np.concatenate([np.arange(*lists.offset_U1[user : user + 2]) for user in split.train.tolist()])
    user_E = np.repeat(split.train, np.diff(lists.offset_U1)[split.train])
    learned = {"user": lists.user_ids.take(user_E), "item": names.take(lists.item_of_event_E[events])}
    pq.write_table(pa.table(learned), folder / "train.parquet")
    pairs = _asked(split)
    ends = np.cumsum([0, *(len(pair.history) for _, pair in pairs)])
    rows = np.concatenate([np.empty(0, np.int64), *(pair.history for _, pair in pairs)])
    asked = {
        PART: pa.array([part for part, _ in pairs], pa.string()),
        "user": lists.user_ids.take(np.array([pair.user for _, pair in pairs], np.int64)),
        "history": pa.LargeListArray.from_arrays(ends, names.take(rows)),
    }
    pq.write_table(pa.table(asked), folder / "queries.parquet")


def listed_method(option: str, file: Path) -> tuple[str, Method]:
    """The name, that of the file, and the method of a file of answers. Raises InvalidConfig where it is not one."""
    table = _read(option, file)
    name = next((file.name[: -len(ending)] for ending in ENDINGS if file.name.lower().endswith(ending)), "")
    if not name:
        raise InvalidConfig(option, str(file), f"a file with a name, and one of the endings {', '.join(ENDINGS)}")

    def fitted(task: Task) -> Fitted:
        begin = time.perf_counter()
        lists = _lists(option, file, table, task)
        # who asks is known by the very array that a query is: two users may have the same history, and not the same list. The arrays are
        # kept, so that no other one gets the identity of one that is gone
        nothing = np.empty(0, np.int64)
        list_of = {id(pair.query): (pair.query, lists.get((part, pair.user), nothing)) for part, pair in _asked(task.split)}
        lacking = sum((("test", pair.user) not in lists) for pair in task.split.test)
        if lacking == len(task.split.test):
            raise InvalidConfig(option, str(file), "lists of the users of test queries, which --queries-to FOLDER writes; it has none")
        if lacking:
            log.warning("%s: no list for %d of %d test queries: they have found nothing", file, lacking, len(task.split.test))

        def rank(queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
            found_BM = np.full((len(queries), m), NO_ITEM, np.int64)
            for row_M, query in zip(found_BM, queries, strict=True):
                _, best = list_of.get(id(query), (query, nothing))
                best = best[~np.isin(best, query)][:m] if exclude_seen else best[:m]
                row_M[: len(best)] = best
            return found_BM

        held = sum(rows.nbytes for rows in lists.values())
        return Fitted(rank, {}, held, time.perf_counter() - begin)

    return name, fitted


def is_listed(file: Path) -> bool:
    return file.name.lower().endswith(ENDINGS)


def _read(option: str, file: Path) -> pa.Table:
    try:
        table = as_table(option, file, ("user", "item"))
    except InvalidInput as error:
        raise InvalidConfig(option, error.value, error.expected) from error
    for column in COLUMNS:
        if table.column_names.count(column) != 1:
            columns = f"{file}, columns {', '.join(table.column_names)}"
            raise InvalidConfig(option, columns, f"columns {', '.join(COLUMNS)}, each once; look at {column}")
    if not (pa.types.is_integer(table["rank"].type) or pa.types.is_floating(table["rank"].type)):
        raise InvalidConfig(option, f"{file}: rank of type {table['rank'].type}", "numbers, the lowest for the best item")
    given = set(map(str, table[PART].to_pylist())) if PART in table.column_names else set()
    if wrong := sorted(given - {*PARTS}):
        raise InvalidConfig(option, f"{file}: part {wrong[0]!r}", " or ".join(PARTS))
    return table


def _lists(option: str, file: Path, table: pa.Table, task: Task) -> dict[tuple[str, int], Int64]:
    """Item rows, best first, by part and user; without users and items that the log does not have, and without repeats."""
    try:
        users = table["user"].cast(pa.string()).combine_chunks()
        named = table["item"].cast(pa.string()).combine_chunks().dictionary_encode()
    except pa.ArrowException as error:  # such as a list of items in one row
        raise InvalidConfig(option, str(file), f"an id of a user and an id of an item in each row ({error})") from error
    rows_D = task.items.rows_of(named.dictionary.to_pylist())
    if missing := int(np.count_nonzero(rows_D < 0)):
        if missing == len(rows_D):
            raise InvalidConfig(option, str(file), f"items of the log; it has none of the {missing:,} in the file")
        log.warning("%s: %d of %d items are not in the log and are left out", file, missing, len(rows_D))
    of_named = np.append(rows_D, -1)
    item_E = of_named[pc.fill_null(named.indices, -1).to_numpy(zero_copy_only=False)]
    user_E = pc.fill_null(pc.index_in(users, value_set=task.split.lists.user_ids), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    rank_E = pc.fill_null(table["rank"].cast(pa.float64(), safe=False), np.inf).to_numpy()
    part_E = _parts(table, user_E, task.split)
    kept = np.flatnonzero((item_E >= 0) & (user_E >= 0) & (part_E >= 0))
    kept = kept[np.lexsort((rank_E[kept], user_E[kept], part_E[kept]))]
    key_E = part_E[kept] * (len(task.split.lists.user_ids) + 1) + user_E[kept]
    begins = np.flatnonzero(np.diff(key_E, prepend=-1)).tolist()
    found: dict[tuple[str, int], Int64] = {}
    for begin, end in pairwise([*begins, len(kept)]):
        rows = item_E[kept[begin:end]]
        _, first = np.unique(rows, return_index=True)
        found[PARTS[part_E[kept[begin]]], int(user_E[kept[begin]])] = rows[np.sort(first)]
    return found


def _parts(table: pa.Table, user_E: Int64, split: Split) -> Int64:
    """int64[E]: places in PARTS of what each row answers, −1 of users who are not asked."""
    if PART in table.column_names:
        return np.asarray(pc.index_in(table[PART].cast(pa.string()), value_set=pa.array(PARTS)).to_numpy(), np.int64)
    part_U = np.full(len(split.lists.user_ids) + 1, -1)  # the last: of users that the log does not have
    for part, pair in _asked(split):
        part_U[pair.user] = PARTS.index(part)
    return part_U[user_E]


def _asked(split: Split) -> list[tuple[str, EvaluationPair]]:
    """The queries with their parts, those of the test last."""
    return [(part, pair) for part, pairs in zip(PARTS, (split.validation, split.test), strict=True) for pair in pairs]
