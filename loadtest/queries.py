"""The queries of a load test, each with its relevant ids: the held-out queries of a bundle, or those of a file.

Knows bundles on disk, Parquet and JSON lines. Does not know how queries are sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.errors import BundleNotFound, InvalidConfig, InvalidData
from espalier.queries import KIND_NAMES

from .target import Json

Kind = Literal["history", "vector", "features", "text"]
LONGEST_HISTORY = 1000
"""A service takes no longer history by default (`ESPALIER_MAX_HISTORY`)."""


@dataclass(frozen=True)
class Query:
    """One query in the service's form, and its relevant ids.

    values  item ids, oldest first; or a vector; or sparse features, {"indices": […], "values": […]}; or a text
    """

    kind: Kind
    values: tuple[str, ...] | tuple[float, ...] | dict[str, list[Any]] | str
    relevant: tuple[str, ...] = ()

    def body(self, exclude_seen: bool = False) -> Json:
        """Its entry in `queries` of POST /retrieve."""
        values = list(self.values) if isinstance(self.values, tuple) else self.values
        return {self.kind: values, **({"exclude_seen": True} if exclude_seen else {})}


def queries_of(model: Json, models: Path, file: Path | None) -> list[Query]:
    """The queries of a file; without one, the held-out queries of the version that `model` (an answer of GET /models) serves.

    Raises BundleNotFound, InvalidConfig or InvalidData.
    """
    if file is not None:
        queries, source = read_queries(file), str(file)
    else:
        source = str(models / model["name"] / str(model["version"]))
        queries = held_out(open_served(model, models))
    if not queries:
        raise InvalidData(source, "no queries", "at least one")
    if queries[0].kind != model["query"]["kind"]:
        raise InvalidData(source, f"{queries[0].kind} queries", f"{model['query']['kind']} queries, which model {model['name']} takes")
    return queries


def open_served(model: Json, models: Path) -> Bundle:
    """The bundle that a service serves, opened in a models folder on this machine. Raises BundleNotFound or InvalidConfig."""
    path = models / model["name"] / str(model["version"])
    try:
        bundle = Bundle.open(path, verify=False)
    except BundleNotFound as error:
        raise BundleNotFound(
            f"{error}; --models names the folder with {model['name']}/{model['version']} on this machine, --queries a file of your own"
        ) from error
    if model["tree"] is not None and bundle.manifest.tree.model_dump(mode="json") != model["tree"]:
        raise InvalidConfig("--models", str(path), "the bundle that the service serves; its tree is another one")
    return bundle


def held_out(bundle: Bundle) -> list[Query]:
    """A bundle's held-out queries as in `espalier evaluate`, but histories have at most their last LONGEST_HISTORY known ids."""
    heldout, items, kind = read_heldout(bundle), bundle.items, bundle.manifest.query.kind
    relevant = [tuple(items.ids_of(rows)) for rows in heldout.relevant]
    queries = bundle.heldout().column(kind).take(pa.array(heldout.table_row_B)).to_pylist()
    if kind == "history":
        rows_of_queries = (items.rows_of(ids) for ids in queries)
        queries = [tuple(items.ids_of(rows[rows >= 0][-LONGEST_HISTORY:])) for rows in rows_of_queries]
    elif kind == "vector":
        queries = list(map(tuple, queries))
    return [Query(kind, query, ids) for query, ids in zip(queries, relevant, strict=True)]


def read_queries(file: Path) -> list[Query]:
    """Queries from Parquet or JSON lines: `history` (list of ids), `vector` (list of numbers), `features` (lists `indices` and `values`) or
    `text`, and optionally `relevant` (list of ids).

    Raises InvalidData with the row and the key, and OSError.
    """
    with file.open("rb") as stream:
        is_parquet = stream.read(4) == b"PAR1"
    rows = _parquet(file) if is_parquet else _lines(file)
    queries = [_query(row, f"{file}, {'row' if is_parquet else 'line'} {number}") for number, row in rows]
    if len({query.kind for query in queries}) > 1:
        raise InvalidData(str(file), " and ".join(sorted({query.kind for query in queries})), "queries of one kind")
    return queries


def _parquet(file: Path) -> list[tuple[int, Any]]:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise InvalidData(str(file), str(error), "a readable Parquet file") from error
    present = [name for name in (*KIND_NAMES, "relevant") if name in table.column_names]
    return list(enumerate(table.select(present).to_pylist(), 1))


def _lines(file: Path) -> list[tuple[int, Any]]:
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except ValueError as error:
                raise InvalidData(f"{file}, line {number}", line[:80], f"a JSON object ({error})") from error
    return rows


def _query(row: Any, source: str) -> Query:
    kinds: list[Kind] = [] if not isinstance(row, dict) else [kind for kind in KIND_NAMES if row.get(kind) is not None]
    if len(kinds) != 1:
        raise InvalidData(source, row, f"an object with one of {', '.join(KIND_NAMES)}")
    kind = kinds[0]
    values, relevant = row[kind], row.get("relevant") or []
    if kind == "history":
        _check_ids(values, f"{source}: history")
    elif kind == "vector" and not _are_numbers(values):
        raise InvalidData(f"{source}: vector", values, "a list of finite numbers")
    elif kind == "features" and not _are_features(values):
        raise InvalidData(f"{source}: features", values, "an object of `indices` and `values`, lists of finite numbers")
    elif kind == "text" and not isinstance(values, str):
        raise InvalidData(f"{source}: text", values, "a string")
    _check_ids(relevant, f"{source}: relevant")
    return Query(kind, tuple(values) if isinstance(values, list) else values, tuple(relevant))


def _are_features(values: object) -> bool:
    return isinstance(values, dict) and values.keys() == {"indices", "values"} and all(map(_are_numbers, values.values()))


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _check_ids(ids: object, source: str) -> None:
    if not isinstance(ids, list) or not all(isinstance(item_id, str) for item_id in ids):
        raise InvalidData(source, ids, "a list of item ids, which are strings")


def without_seen(queries: Sequence[Query]) -> list[Query]:
    """The queries without their history in `relevant`: `exclude_seen` never returns these, and they must not count as missed."""
    if queries and queries[0].kind != "history":
        raise InvalidConfig("--exclude-seen", f"{queries[0].kind} queries", "history queries: others have no history")
    return [replace(query, relevant=tuple(item for item in query.relevant if item not in set(query.values))) for query in queries]


def digest(queries: Sequence[Query]) -> str:
    content = json.dumps([(query.kind, query.values, query.relevant) for query in queries])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
