"""A trained model in a notebook: open it from its folder, search with ids, texts, vectors or features, get a data frame.

    model = espalier.open("models/debian-depends/1")
    model.search([["nginx", "postgresql"]], m=5, fields=["title"])

Knows bundles and frames. Does not know how a model is trained (fitting.py), nor HTTP: espalier_client calls a running service.

Legend: B queries, M results.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from espalier.arrays import Float32, Int64
from espalier.bundle import Bundle, versions_in
from espalier.bundle_writer import with_parts
from espalier.checks.heldout import HeldOut, Unknown, read_heldout, whole_histories
from espalier.engines import open_engine
from espalier.errors import InvalidInput, InvalidQuery
from espalier.frames import IDS, WHOLE, Frame, as_file, as_frame, installed_frame
from espalier.items import one_array
from espalier.logs.log_events import histories, read_table
from espalier.logs.parquet_logs import first_rows, is_parquet
from espalier.manifest import GraphScorer
from espalier.masks.filters import ItemFilters
from espalier.metrics import ndcg_at_m, precision_recall_f, reciprocal_rank_at_m
from espalier.queries import (
    FeaturesKind,
    HistoryKind,
    QueryBatch,
    TextKind,
    VectorKind,
    encode_features,
    encode_histories,
    encode_texts,
    encode_vectors,
    pad_histories,
)
from espalier.search import NO_ITEM, Device, NodeMask, SearchParams, SearchResult, check_finite, padded
from espalier.text.sparse_rows import SparseRows
from espalier.wording import in_python

if TYPE_CHECKING:  # it imports ONNX Runtime, which is an extra
    from espalier.engines.encoder import QueryEncoder

logger = logging.getLogger(__name__)

ANSWER_COLUMNS = ("query", "rank", "item", "score")
BATCH = 256
"""Most queries of one engine call."""
MAX_EXCLUDED = 1 << 20
"""Most entries of a call's padded array of excluded items: one user may have seen a large part of the catalogue."""
MASK_BYTES = 256 << 20
"""Most bytes of all cached masks of filters."""


@dataclass(frozen=True)
class Ask:
    """The options of a search, for all its queries; None: the model's default.

    exclude_seen  leave out the items of a query's history
    """

    m: int | None = None
    beam_size: int | None = None
    filter: Mapping[str, object] | None = None
    exclude_filter: Mapping[str, object] | None = None
    exclude_seen: bool = False


class Answers(NamedTuple):
    """The items of some queries, one query after the other.

    count_B  int64[B]: the number of items of each query
    """

    count_B: Int64
    ids: pa.Array
    scores: pa.Array
    fields: dict[str, pa.Array]


class Model:
    """See the module. frame: the library of the data frames that it returns; by default pandas or polars if installed, else Arrow."""

    def __init__(self, bundle: Bundle, device: Device = "auto", engine: str | None = None, frame: Frame | None = None) -> None:
        bundle.check_whole()
        self.bundle, self.frame = bundle, frame or installed_frame()
        self.engine = open_engine(bundle, device, engine)
        self._opened_with = device, engine
        self._owns_folder = False

    def owns(self, folder: Path) -> None:
        """Delete a folder when the model's bundle is garbage-collected, which reads its files when they are needed."""
        self._owns_folder = self.bundle.path.is_relative_to(folder)
        weakref.finalize(self.bundle, shutil.rmtree, folder, ignore_errors=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickling opens the same folder; a folder that is deleted with the model goes into the pickle."""
        if not self._owns_folder:
            return open_model, (self.bundle.path.absolute(), *self._opened_with, self.frame)
        files = {file.name: file.read_bytes() for file in self.bundle.path.iterdir()}
        return _unpickled, (files, self.name, self.version, *self._opened_with, self.frame)

    def __repr__(self) -> str:
        return f"<Model {self.name} version {self.version}: {len(self.bundle.items)} items, {self.bundle.manifest.query.kind} queries>"

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def version(self) -> int:
        return self.bundle.manifest.version

    def search(
        self,
        queries: Any,
        m: int | None = None,
        *,
        beam_size: int | None = None,
        filter: Mapping[str, object] | None = None,
        exclude_filter: Mapping[str, object] | None = None,
        exclude_seen: bool = False,
        fields: Sequence[str] = (),
    ) -> Any:
        """The best items of each query: a data frame with query (position, from 0), rank (from 1), item (id), score and the fields.

        queries  of histories: lists of item ids, the newest last (ids that the model does not know are skipped); of texts: strings; of
                 vectors: an array [B, width]; of features: a matrix [B, width], of SciPy or an array, or (indices, values) pairs
        filter, exclude_filter  as in a request: {"section": ["games"], "year": {"min": 1990}}
        Raises InvalidQuery, which names the field, if the model cannot take a value.
        """
        fields = _listed("fields", fields, "a list of columns")
        if taken := sorted({*ANSWER_COLUMNS} & {*fields}):
            raise InvalidQuery("fields", ", ".join(taken), f"no columns {', '.join(ANSWER_COLUMNS)}: those of the answers are called so")
        batch, seen = self.with_seen(queries)
        answers = self.answers(batch, Ask(m, beam_size, filter, exclude_filter, exclude_seen), fields, seen)
        query = np.repeat(np.arange(len(batch)), answers.count_B)
        rank = 1 + np.arange(len(query)) - np.repeat(np.cumsum(answers.count_B) - answers.count_B, answers.count_B)
        columns = dict(zip(ANSWER_COLUMNS, (query, rank, answers.ids, answers.scores), strict=True))
        return as_frame(pa.table(columns | {name: values for name, values in answers.fields.items() if name != "id"}), self.frame)

    def answers(
        self,
        queries: QueryBatch,
        ask: Ask,
        fields: Sequence[str] = (),
        seen: Sequence[Int64] | None = None,
        m_B: Int64 | None = None,
        filters: Sequence[Mapping[str, object] | None] | None = None,
    ) -> Answers:
        """Search for encoded queries and look up fields of the items; other arguments as in `results`. Raises InvalidQuery."""
        for field in fields:
            if field not in self.bundle.items.fields:
                raise InvalidQuery("fields", field, f"some of {', '.join(self.bundle.items.fields)}")
        results = list(self.results(queries, ask, seen, m_B, filters))
        pairs = [(result, np.arange(result.item_rows_BM.shape[1]) < result.count_B[:, None]) for result in results]
        rows = np.concatenate([np.empty(0, np.int64), *(result.item_rows_BM[is_item] for result, is_item in pairs)])
        scores = np.concatenate([np.empty(0, np.float32), *(result.scores_BM[is_item] for result, is_item in pairs)])
        count_B = np.concatenate([np.empty(0, np.int64), *(result.count_B for result in results)])
        items = self.bundle.items
        columns = {field: one_array(items.column(field).take(pa.array(rows))) for field in fields}
        return Answers(count_B, pa.array(items.ids_of(rows) if len(rows) else [], pa.string()), pa.array(scores), columns)

    def results(
        self,
        queries: QueryBatch,
        ask: Ask,
        seen: Sequence[Int64] | None = None,
        m_B: Int64 | None = None,
        filters: Sequence[Mapping[str, object] | None] | None = None,
    ) -> Iterator[SearchResult]:
        """Search for encoded queries, at most BATCH at a time.

        seen  the item rows of each whole history, which may be longer than the model reads; only for `exclude_seen`
        m_B, filters  for each query, instead of those of `ask`
        """
        defaults = self.bundle.manifest.search
        m = defaults.m if ask.m is None else ask.m
        m = m if m_B is None else int(m_B.max(initial=1))
        beam_size = defaults.beam_size if ask.beam_size is None else ask.beam_size
        _check_number("m", m, defaults.max_m)
        _check_number("beam_size", beam_size, defaults.max_beam_size)
        if ask.exclude_seen and not isinstance(queries.kind, HistoryKind):
            raise InvalidQuery("exclude_seen", True, f"a model of histories, not of {queries.kind.kind} queries")
        mask = self.mask(ask.filter, ask.exclude_filter)
        excluded_rows = None
        if ask.exclude_seen:
            excluded_rows = [np.unique(row[row >= 0]) for row in (np.asarray(queries.array, np.int64) if seen is None else seen)]
        for positions in _blocks(len(queries), excluded_rows):
            block = queries.take(positions)
            exclude_BE = None if excluded_rows is None else padded([excluded_rows[b] for b in positions.tolist()])
            params = SearchParams.uniform(len(block), beam_size, m, exclude_BE, mask=mask)
            if m_B is not None:
                params = replace(params, m_B=m_B[positions])
            if filters is not None:
                params = replace(params, mask_B=tuple(self.mask(filters[b], ask.exclude_filter) for b in positions.tolist()))
            result = self.engine.search(block, params)
            check_finite(block, result, int(positions[0]))
            yield result

    def encoded(self, queries: Any) -> QueryBatch:
        """Queries as the engine takes them. See `search`."""
        return self.with_seen(queries)[0]

    def with_seen(self, queries: Any) -> tuple[QueryBatch, Sequence[Int64] | None]:
        """Queries as the engine takes them; for histories also the item rows of each whole history (−1: unknown)."""
        kind = self.bundle.manifest.query
        if isinstance(kind, FeaturesKind) and (isinstance(queries, np.ndarray) or hasattr(queries, "tocsr")):
            return self._encoded_matrix(kind, queries), None
        queries = _listed("queries", queries, "a list of queries")
        if isinstance(kind, HistoryKind):
            return encode_histories(kind, self.bundle.items, [_history_of(i, query) for i, query in enumerate(queries)])
        if isinstance(kind, TextKind):
            for i, text in enumerate(queries):
                if not isinstance(text, str):
                    raise InvalidQuery(f"queries[{i}].text", text, "a string")
            return encode_texts(kind, self.bundle.vectoriser, queries), None
        if isinstance(kind, VectorKind):
            return encode_vectors(kind, [_numbers(f"queries[{i}].vector", query, "biuf") for i, query in enumerate(queries)]), None
        return encode_features(kind, [_features_of(i, query) for i, query in enumerate(queries)]), None

    def mask(self, filter: Mapping[str, object] | None, exclude_filter: Mapping[str, object] | None = None) -> NodeMask | None:
        """The node mask of a filter, cached for later calls; None if all items pass."""
        for name, value in (("filter", filter), ("exclude_filter", exclude_filter)):
            if not isinstance(value, Mapping | None):
                raise InvalidQuery(name, value, "a dictionary of columns")
        parsed = self._filters.parse(_plain(filter or {}), _plain(exclude_filter or {}))
        return self._filters.mask(parsed) if parsed else None

    def item_rows(self) -> Float32:
        """float32[I, D]: the node row of each item's leaf, in the order of `bundle.items`. Raises InvalidInput for linear scorers."""
        if not isinstance(self.bundle.manifest.scorer, GraphScorer):
            raise InvalidInput("model", self.bundle.manifest.scorer.kind, "a model of node rows: linear scorers have weights")
        return np.asarray(self.bundle.node_rows_ND[self.bundle.tree.leaf_of_item], np.float32)

    def states(self, queries: Any) -> Float32:
        """float32[B, S]: the states of queries on the leaf level. In inner products as wide as a row."""
        batch, leaf_level = self.encoded(queries), self.bundle.tree.height
        blocks = [batch.take(at) for at in np.split(np.arange(len(batch)), range(BATCH, len(batch), BATCH))]
        return np.concatenate([self._encoder.states(block.array, [leaf_level] * len(block))[:, -1] for block in blocks])

    def explain(self, query: Any, items: Sequence[str], m: int | None = None, *, beam_size: int | None = None) -> Any:
        """Why items came back for a query or did not: a data frame with item, outcome, rank, score, level and cut.

        returned  the item came back at `rank` with `score`
        pruned    on `level` an ancestor was not among the best `beam_size` nodes, or on the last level the item itself not among the best
                  m; `cut` is the key of the last of these. In a forest, level and cut are those of the first tree
        below_m   a tree scored the item, but stacking, or the mean over a forest's trees, put it below the first m
        excluded  the item is in the history, and the model leaves such items out
        unknown   the model has no such item
        """
        items = _listed("items", items, "a list of item ids")
        batch, defaults = self.encoded([query]), self.bundle.manifest.search
        next(self.results(batch, Ask(m, beam_size)))  # raises for wrong values
        m, beam_size = defaults.m if m is None else m, defaults.beam_size if beam_size is None else beam_size
        result = self.engine.search(batch, SearchParams.uniform(1, beam_size, m, trace=True))
        ids = [_id_of(f"items[{i}]", item) for i, item in enumerate(items)]
        rows = self.bundle.items.rows_of(ids).tolist()
        outcomes = [{"item": item} | self._outcome(row, batch, result) for item, row in zip(ids, rows, strict=True)]
        names = {"item": pa.string(), "outcome": pa.string(), "rank": pa.int64(), "score": pa.float32()}
        schema = pa.schema(names | {"level": pa.int64(), "cut": pa.float32()})
        return as_frame(pa.Table.from_pylist(outcomes, schema=schema), self.frame)

    @in_python()
    def evaluate(
        self,
        data: Any = None,
        *,
        user: str = "user",
        item: str = "item",
        time: str | None = None,
        beam_sizes: Sequence[int] | None = None,
        ms: Sequence[int] = (10, 50),
    ) -> Any:
        """Means over queries by beam and m, a data frame: recall, precision, nDCG, hit rate (the share of queries with anything relevant),
        MRR (1 / rank of the first relevant item), and coverage, the share of the catalogue that came back for some query.

        data  a log of users that the model was not trained on, one interaction a row: the first half of each user's items is the
              history, the second half is relevant. Or queries as `held_out` returns them, with columns history and relevant. None: the
              held-out queries of the bundle, at most 1,000
        user, item, time  its columns; without `time` the rows are in order
        Raises InvalidInput if there is no query to measure with.
        """
        defaults = self.bundle.manifest.search
        beam_sizes = _limited("beam_sizes", (defaults.beam_size,) if beam_sizes is None else beam_sizes, defaults.max_beam_size)
        ms = _limited("ms", ms, defaults.max_m)
        if data is None:
            held_out = self._held_out()
            queries, relevant = held_out.queries, held_out.relevant
        else:
            with tempfile.TemporaryDirectory() as folder:
                queries, relevant = self._queries_of(as_file("data", data, Path(folder)), Path(folder), user, item, time)
        rows = []
        for beam_size in beam_sizes:
            item_rows_BM = np.concatenate([result.item_rows_BM for result in self.results(queries, Ask(max(ms), beam_size))])
            for m in ms:
                precision_B, recall_B, _ = precision_recall_f(item_rows_BM, relevant, m)
                figures = {"recall": recall_B, "precision": precision_B, "ndcg": ndcg_at_m(item_rows_BM, relevant, m)}
                figures |= {"hit_rate": (recall_B > 0).astype(np.float64), "mrr": reciprocal_rank_at_m(item_rows_BM, relevant, m)}
                means = {name: float(np.mean(values)) for name, values in figures.items()}
                retrieved = np.unique(item_rows_BM[:, :m])
                means["coverage"] = float(np.count_nonzero(retrieved != NO_ITEM) / len(self.bundle.items))
                rows.append({"beam_size": int(beam_size), "m": int(m), **means, "queries": len(queries)})
        return as_frame(pa.Table.from_pylist(rows), self.frame)

    def held_out(self) -> Any:
        """The held-out queries of a bundle of histories, by ids: a data frame with the lists history and relevant. Another version of the
        model can be evaluated on them, too.
        """
        if not isinstance(self.bundle.manifest.query, HistoryKind):
            raise InvalidInput("model", f"{self.bundle.manifest.query.kind} queries", "a model of histories")
        held_out = self._held_out()
        columns = {"history": whole_histories(self.bundle, held_out), "relevant": map(self.bundle.items.ids_of, held_out.relevant)}
        return as_frame(pa.table({name: pa.array([*lists], pa.list_(pa.string())) for name, lists in columns.items()}), self.frame)

    def save(self, path: Path | str) -> Path:
        """Write the model as models/NAME/VERSION, where a service finds it. Raises BundleExists if that exists."""
        folder = Path(path)
        if not (folder.name.isdecimal() and int(folder.name) >= 1):
            raise InvalidInput("path", str(folder), "models/NAME/VERSION with a version number of at least 1")
        with_parts(self.bundle, folder, {}, {})
        return folder

    # -- internal -------------------------------------------------------------------------------------------------------

    def _held_out(self) -> HeldOut:
        held_out = read_heldout(self.bundle)
        if not len(held_out.queries):
            raise InvalidInput("data", None, f"a log: {self.name} version {self.version} has no held-out queries")
        return held_out

    def _queries_of(self, log: Path, scratch: Path, user: str, item: str, time: str | None) -> tuple[QueryBatch, list[Int64]]:
        """Histories of a log and their relevant item rows, without users whose history or relevant items the model does not know.

        scratch  as in `look`
        """
        if not isinstance(self.bundle.manifest.query, HistoryKind):
            raise InvalidInput("data", "a log of users", f"None: the model takes {self.bundle.manifest.query.kind} queries")
        rows_of = self.bundle.items.rows_of
        names = first_rows(log, scratch, 1).schema.names if is_parquet(log) else ()
        if {"history", "relevant"} <= {*names}:  # all queries count: this version misses the items that it does not know
            table = read_table(log)
            columns = [table.column(name).to_pylist() for name in ("history", "relevant")]
            text_lists = ([[*map(str, ids or ())] for ids in column] for column in columns)
            pairs = [(rows_of(first), self._with_unknown(last)) for first, last in zip(*text_lists, strict=True) if last]
        else:
            lists = [self._with_unknown(ids) for ids in histories(log, user, item, time).lists.values() if len(ids) > 1]
            known = [np.where(rows < len(self.bundle.items), rows, NO_ITEM) for rows in lists]
            halves = [(rows[: len(rows) // 2], rows[len(rows) // 2 :]) for rows in known]  # as the split "users" cuts lists
            pairs = [(first, last[last >= 0]) for first, last in halves if (first >= 0).any() and (last >= 0).any()]
            relevant = [(rows[len(first) :], last) for rows, (first, last) in zip(lists, halves, strict=True)]
            unknown = Unknown.of(relevant, len(pairs))
            if pairs and (unknown.relevant or unknown.queries):
                logger.warning("%s", unknown)
        if not pairs:
            raise InvalidInput("data", log.name, "one user at least with items in both halves that the model knows")
        return pad_histories(self.bundle.manifest.query, [first for first, _ in pairs]), [last for _, last in pairs]

    def _with_unknown(self, ids: Sequence[str]) -> Int64:
        """The rows of items. Each unknown item gets a row of its own beyond the catalogue, which no answer has."""
        rows = self.bundle.items.rows_of(ids)
        unknown = np.flatnonzero(rows < 0)
        row_of: dict[str, int] = {}
        rows[unknown] = [row_of.setdefault(ids[position], len(self.bundle.items) + len(row_of)) for position in unknown.tolist()]
        return rows

    @cached_property
    def _encoder(self) -> QueryEncoder:
        if not isinstance(self.bundle.manifest.scorer, GraphScorer):
            raise InvalidInput("model", self.bundle.manifest.scorer.kind, "a model of node rows: linear scorers make no states")
        from espalier.engines.encoder import QueryEncoder

        return QueryEncoder.open(self.bundle)

    @cached_property
    def _filters(self) -> ItemFilters:
        return ItemFilters([alone.tree for alone in self.bundle.alone], self.bundle.items, MASK_BYTES)

    def _encoded_matrix(self, kind: FeaturesKind, queries: Any) -> QueryBatch:
        if queries.shape[1:] != (kind.width,) or queries.dtype.kind not in "biuf":
            raise InvalidQuery("queries", f"{queries.dtype}{list(queries.shape)}", f"a matrix of numbers, [B, {kind.width}]")
        if isinstance(queries, np.ndarray):
            row_E, indices = np.nonzero(queries)
            values, indptr = queries[row_E, indices], np.searchsorted(row_E, np.arange(len(queries) + 1))
        else:
            matrix = queries.tocsr().copy()
            matrix.sum_duplicates()
            values, indices, indptr = matrix.data, matrix.indices, matrix.indptr
        rows = SparseRows(indptr.astype(np.int64), indices.astype(np.int32), values.astype(np.float32), kind.width).without_zeros()
        batch = QueryBatch(kind, rows.normalised() if kind.unit else rows)
        batch.check(len(self.bundle.items))
        return batch

    def _outcome(self, row: int, queries: QueryBatch, result: SearchResult) -> dict[str, object]:
        if row < 0:
            return {"outcome": "unknown"}
        if self.bundle.memory is not None and self.bundle.memory.leaves_out(queries.array[0], row):
            return {"outcome": "excluded"}
        positions = np.flatnonzero(result.item_rows_BM[0] == row)
        if len(positions):
            return {"outcome": "returned", "rank": int(positions[0]) + 1, "score": float(result.scores_BM[0, positions[0]])}
        searches = [(alone.tree, trace) for alone, trace in zip(self.bundle.alone, result.traces, strict=True)]
        merges_trees = len(searches) > 1 or self.bundle.manifest.stacking is not None
        if merges_trees and any(tree.leaf_of_item[row] in trace[-1].candidates_BC for tree, trace in searches):
            return {"outcome": "below_m"}
        tree, trace = searches[0]
        path = tree.ancestors(tree.leaf_of_item[row])
        for level in trace:
            beam_K = level.nodes_BK[0]
            if path[level.level] not in beam_K:
                cut = float(level.keys_BK[0][beam_K >= 0].min(initial=np.inf))
                return {"outcome": "pruned", "level": level.level, "cut": cut}
        return {"outcome": "pruned"}


def open_model(path: Path | str, device: Device = "auto", engine: str | None = None, frame: Frame | None = None) -> Model:
    """The model in models/NAME/VERSION, or the highest version in models/NAME. Raises BundleError's kinds, and InvalidInput for a shard."""
    folder = Path(path)
    versions = versions_in(folder) if folder.is_dir() and not (folder / "manifest.json").exists() else ()
    return Model(Bundle.open(folder / str(versions[-1]) if versions else folder), device, engine, frame)


@contextmanager
def owned_folder() -> Iterator[Path]:
    """A temporary folder. Deleted if the block raises; otherwise the caller owns it."""
    folder = Path(tempfile.mkdtemp(prefix="espalier-"))
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _unpickled(files: Mapping[str, bytes], name: str, version: int, device: Device, engine: str | None, frame: Frame) -> Model:
    """The model in these files, which are written to a temporary folder that is deleted with it."""
    with owned_folder() as folder:
        path = folder / name / str(version)
        path.mkdir(parents=True)
        for file, content in files.items():
            (path / file).write_bytes(content)
        model = open_model(path, device, engine, frame)
        model.owns(folder)
        return model


def _blocks(count: int, excluded: Sequence[Int64] | None) -> Iterator[Int64]:
    """Positions of the queries of each engine call: BATCH, or fewer if their padded array of excluded items would be too large."""
    begin = 0
    while begin < count:
        end = min(begin + BATCH, count)
        if excluded is not None:
            longest = np.maximum.accumulate([len(row) for row in excluded[begin:end]])
            end = begin + max(1, int(np.count_nonzero(longest * np.arange(1, end - begin + 1) <= MAX_EXCLUDED)))
        yield np.arange(begin, end)
        begin = end


def _listed(field: str, values: Any, expected: str) -> list[Any]:
    """The values of a list or an array. Raises InvalidQuery for anything else, also for a string."""
    if not isinstance(values, str | bytes):
        with suppress(TypeError):  # not iterable
            return list(values)
    raise InvalidQuery(field, values, expected)


def _plain(value: Any) -> Any:
    """Values as JSON has them: numbers and arrays of NumPy, as data frames hold them, become Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _check_number(field: str, value: object, limit: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidQuery(field, value, f"1 to {limit}, as the model allows")


def _limited(field: str, values: Any, limit: int) -> list[int]:
    """The different numbers, one at least, each from 1 to `limit`. Raises InvalidQuery."""
    numbers = _listed(field, values, "a list of numbers")
    if not numbers:
        raise InvalidQuery(field, numbers, "at least one number")
    for i, number in enumerate(numbers):
        _check_number(f"{field}[{i}]", number, limit)
    return list(dict.fromkeys(numbers))


def _history_of(position: int, query: Any) -> list[str]:
    items = _listed(f"queries[{position}].history", query, "a list of item ids, the newest last")
    return [_id_of(f"queries[{position}].history[{i}]", item) for i, item in enumerate(items) if not _is_missing(item)]


def _is_missing(item: object) -> bool:
    """Whether a cell of a data frame is empty."""
    return item is None or (isinstance(item, float | np.floating) and bool(np.isnan(item)))


def _id_of(field: str, value: object) -> str:
    """An item's id as text. A whole float counts as an integer. Raises InvalidQuery for what is no id."""
    if isinstance(value, str):
        return value
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(float(value)) < WHOLE:
        return str(int(value))
    if isinstance(value, bool | np.bool_ | float | np.floating | Collection):
        raise InvalidQuery(field, value.item() if isinstance(value, np.generic) else value, IDS)
    return str(value)


def _features_of(position: int, query: Any) -> tuple[Any, Any]:
    field, expected = f"queries[{position}].features", "a pair: feature numbers, and their values"
    pair = _listed(field, query, expected)
    if len(pair) != 2:
        raise InvalidQuery(field, query, expected)
    return _numbers(f"{field}.indices", pair[0], "iu"), _numbers(f"{field}.values", pair[1], "biuf")


def _numbers(field: str, values: Any, kinds: str) -> Any:
    """A list of numbers as an array. kinds: the kinds of NumPy's dtypes that it may have. Raises InvalidQuery."""
    try:
        numbers = np.asarray(values)
    except ValueError:  # lists of several lengths
        numbers = np.empty(())
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in kinds):
        raise InvalidQuery(field, values, "a list of whole numbers" if kinds == "iu" else "a list of numbers")
    return numbers
