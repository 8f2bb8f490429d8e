"""`espalier predict`: reads queries from a Parquet file and writes their best items to another, for example in a nightly job.

The queries are read in blocks. A block is answered in this process or, if several may answer, in one of theirs, and written as a file into
a folder beside the output. After a killed run, the next one keeps these files if the model, the input and the options are the same. Knows
files and processes. Does not know how a model searches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from espalier.compile import end_with_parent
from espalier.durable import atomic_write
from espalier.errors import EspalierError, InvalidData, InvalidInput, InvalidQuery
from espalier.file_lock import file_lock
from espalier.hardware import cores
from espalier.logs.log_events import histories
from espalier.logs.parquet_logs import files_of
from espalier.model import Ask, Model, open_model

BLOCK = 4096
"""Queries of a block."""
AHEAD = 2
"""Blocks that are read ahead for each process: a file of any size need not fit into memory."""
ANSWERS = ("items", "scores")
"""Columns of the answers, besides fields."""
REPORT_S = 2.0
"""Seconds between lines of progress."""

TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.null())
EXPECTED = {
    "history": "a column of lists of ids: strings or whole numbers",
    "text": "a column of texts",
    "vector": "a column of lists of numbers",
    "features": "a column of structs of indices, lists of whole numbers, and values, lists of numbers",
}
"""Kind of queries → their column."""

_model: Model | None = None  # in a process that answers


@dataclass(frozen=True)
class Job:
    """The options for all blocks. column: of the queries · m_column, filter_column: m and filter of each query; None: `ask` has them"""

    model: str
    column: str
    m_column: str | None
    filter_column: str | None
    ask: Ask
    fields: tuple[str, ...]


def main(arguments: Sequence[str], prog: str) -> int:
    """Returns the exit code."""
    options = _parser(prog).parse_args(arguments)
    try:
        predict(options)
    except (EspalierError, OSError, pa.ArrowException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print("error: a process that answers has ended; was it killed, or was there no memory? Run it again: it goes on", file=sys.stderr)
        return 1
    return 0


def predict(options: argparse.Namespace) -> None:
    """Write the answers. Raises EspalierError, OSError and ArrowException."""
    out, model = Path(options.out), open_model(options.model, "cpu", frame="arrow")
    check_written("--out", out, Path(options.queries))
    if None not in (options.m, options.m_column):
        raise InvalidInput("--m-column", options.m_column, "no such option with --m")
    if options.workers < 1:
        raise InvalidInput("--workers", options.workers, "at least 1")
    column = options.column or model.bundle.manifest.query.kind
    filters = (_json("--filter", options.filter), _json("--exclude-filter", options.exclude_filter))
    ask = Ask(options.m, options.beam, *filters, options.exclude_seen)
    job = Job(str(model.bundle.path), column, options.m_column, options.filter_column, ask, tuple(options.fields))
    model.answers(model.encoded([]), ask, job.fields)  # raises for wrong options
    total, schema, blocks = _queries(options, column, model)
    other_columns = {name for name in schema.names if name not in (column, job.m_column, job.filter_column)}
    for option, names, taken in (("--fields", {*job.fields}, ANSWERS), ("--queries", other_columns, {*ANSWERS, *job.fields})):
        if reserved := sorted(names & {*taken}):
            raise InvalidInput(option, ", ".join(reserved), f"no columns {', '.join(sorted(taken))}: the answers are called so")
    folder = out.with_name(f".{out.name}.parts")
    folder.mkdir(exist_ok=True)
    with file_lock(folder, InvalidInput("--out", str(out), "a file that no other run is writing now")):  # two runs would share the folder
        _resume(folder, _digest(model, options, job))
        workers = min(options.workers, -(-total // BLOCK))
        with _executor(workers, job, model) as executor:
            _answer(executor, AHEAD * workers if workers > 1 else 0, job, blocks, folder, total)
        _join_blocks(folder, out, _with_items(job, schema.empty_table(), 0, model))
        shutil.rmtree(folder)


def check_written(option: str, out: Path, *others: Path) -> None:
    """Raise InvalidInput unless a file can be written there that is none of the others."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InvalidInput(option, str(out), "a file in a folder that exists")
    if out.exists() and not out.is_file():
        raise InvalidInput(option, str(out), "a file, not a device or a pipe, which would be replaced")
    if out.resolve() in [other.resolve() for other in others]:
        raise InvalidInput(option, str(out), "a file that is not read or written otherwise: it would be replaced")


def _answer(executor: Executor, ahead: int, job: Job, blocks: Iterator[pa.Table], folder: Path, total: int) -> None:
    """Answer the blocks that have no file yet. ahead: blocks that may wait for the executor · total: number of queries"""
    began = reported = time.perf_counter()
    done, answered = 0, 0
    pending: list[tuple[Path, Future[pa.Table | str] | None]] = []

    def finish() -> None:
        nonlocal done, answered, reported
        file, future = pending.pop(0)
        if future is not None:
            table = future.result()
            if isinstance(table, str):
                raise EspalierError(table)
            write_table(table, file)
            answered += len(table)
        done += pq.read_metadata(file).num_rows
        now = time.perf_counter()
        if now - reported > REPORT_S or done == total:
            reported = now
            print(f"{done:,} of {total:,} queries, {answered / (now - began):,.0f}/s", file=sys.stderr, flush=True)

    first = 0
    for number, block in enumerate(blocks):
        file = folder / f"{number:08}.parquet"
        pending.append((file, None if file.exists() else executor.submit(_answer_block, job, block, first)))
        first += len(block)  # of a file with dictionaries some blocks are smaller
        while len(pending) > ahead:
            finish()
    while pending:
        finish()


class _ThisProcess(Executor):
    """Answers a block when it is submitted."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **options))
        return future


@contextmanager
def _ignored() -> Iterator[None]:
    """Inside, Ctrl-C does nothing."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextmanager
def _executor(workers: int, job: Job, model: Model) -> Iterator[Executor]:
    """This process or, for more than one worker, processes that answer. Ctrl-C reaches this process alone, which then ends them."""
    global _model
    if workers <= 1:
        _model = model
        yield _ThisProcess()
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _open, (job,)) as pool:
        with _ignored() if threading.current_thread() is threading.main_thread() else nullcontext():
            for _ in range(workers):
                pool.submit(int)  # starts one, as no process is idle yet; it ignores Ctrl-C, too
        try:
            yield pool
        except KeyboardInterrupt:
            for process in active_children():
                process.kill()
            raise


def _queries(options: argparse.Namespace, column: str, model: Model) -> tuple[int, pa.Schema, Iterator[pa.Table]]:
    """The number of queries, their schema, and blocks of them. Raises InvalidInput if a column is missing."""
    file, item = Path(options.queries), options.item or "item"
    of_log, of_queries = ("--item", "--time"), ("--m-column", "--filter-column")
    for option in of_log if options.user is None else of_queries:
        if (value := getattr(options, option[2:].replace("-", "_"))) is not None:
            raise InvalidInput(option, value, f"no such option with{'out' * (options.user is None)} --user")
    if not (file.is_file() if options.user is None else file.exists()):
        raise InvalidInput("--queries", str(file), f"a {'Parquet ' * (options.user is None)}file that exists")
    if options.user is not None:
        if column == options.user:
            raise InvalidInput("--column", column, "another name than that of the users")
        if item == options.user:
            raise InvalidInput("--item", item, "another column than that of the users")
        lists, users = histories(file, options.user, item, options.time)
        rows = model.bundle.items.rows_of([item for items in lists.values() for item in items]) if lists else None
        if rows is not None and (rows < 0).all():
            raise InvalidInput("--item", item, "ids that the model knows: it knows none of them")
        queries = pa.table({options.user: users, column: pa.array([*lists.values()], pa.list_(pa.string()))})
        size = len(queries)
        # take copies rows; a slice would send the whole table to each process
        return size, queries.schema, (queries.take(pa.array(range(begin, min(begin + BLOCK, size)))) for begin in range(0, size, BLOCK))
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise InvalidInput("--queries", str(file), "Parquet, a row a query; or with --user and --item a log, which may be CSV") from error
    schema = parquet.schema_arrow
    if repeated := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise InvalidInput("--queries", ", ".join(repeated), "each column once")
    for option, name in (("--column", column), ("--m-column", options.m_column), ("--filter-column", options.filter_column)):
        if name is not None and name not in schema.names:
            raise InvalidInput(option, name, f"one of the columns {', '.join(schema.names)}")
    check_queries(schema.field(column), model)
    if options.m_column is not None and not pa.types.is_integer(schema.field(options.m_column).type):
        raise InvalidInput("--m-column", str(schema.field(options.m_column).type), "a column of whole numbers")
    filters = pa.null() if options.filter_column is None else schema.field(options.filter_column).type
    if filters not in TEXTS:
        raise InvalidInput("--filter-column", str(filters), "a column of texts, JSON or null")
    return parquet.metadata.num_rows, schema, (pa.Table.from_batches([batch]) for batch in parquet.iter_batches(BLOCK))


def _open(job: Job) -> None:
    global _model
    end_with_parent()
    _model = open_model(job.model, "cpu", frame="arrow")


def _answer_block(job: Job, block: pa.Table, first: int) -> pa.Table | str:
    """The answers of a block that begins at row `first`; or an error message."""
    if _model is None:
        raise RuntimeError("a process that answers opens the model first")
    try:
        return _with_items(job, block, first, _model)
    except EspalierError as error:  # some errors cannot be pickled between processes
        return str(error)


def _with_items(job: Job, block: pa.Table, first: int, model: Model) -> pa.Table:
    """A block with the query column replaced by lists of items, scores and requested fields."""
    values = query_values(block.column(job.column), job.column, first, model)
    try:
        queries, seen = model.with_seen(values)
    except InvalidQuery as error:
        raise _of_row(error, job.column, first) from error
    m_B = None if job.m_column is None else _numbers(block.column(job.m_column).to_pylist(), job.m_column, first, model)
    filters = None
    if job.filter_column is not None:
        filters = [_joined_filter(job, first + row, text) for row, text in enumerate(block.column(job.filter_column).to_pylist())]
    try:
        answers = model.answers(queries, job.ask, job.fields, seen, m_B, filters)
    except InvalidQuery:
        for row, query_filter in enumerate(filters or (), first):
            _check_filter(query_filter, f"{job.filter_column}[{row}]", job, model)
        raise
    offsets = pa.array(np.append(0, np.cumsum(answers.count_B)), pa.int32())
    other_columns = [name for name in block.column_names if name not in (job.column, job.m_column, job.filter_column)]
    columns = {name: block.column(name) for name in other_columns}
    lists = dict(zip(ANSWERS, (answers.ids, answers.scores), strict=True)) | answers.fields
    return pa.table(columns | {name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()})


def _of_row(error: InvalidQuery, column: str, first: int) -> InvalidInput:
    """An error of a query of a block, with the query's number, from 0, among all: `vector[5000]` for `queries[904].vector`."""
    query = re.fullmatch(r"queries\[(\d+)\](?:\.\w+)?(.*)", error.field)
    return error if query is None else InvalidData(f"{column}[{first + int(query[1])}]{query[2]}", error.value, error.expected)


def _check_filter(query_filter: Mapping[str, object], name: str, job: Job, model: Model) -> None:
    """Raise InvalidData with the row of a filter that the model refuses."""
    try:
        model.mask(query_filter, job.ask.exclude_filter)
    except InvalidQuery as error:
        raise InvalidData(f"{name}: {error.field}", error.value, error.expected) from error


def check_queries(column: pa.Field, model: Model) -> None:
    """Raise InvalidInput if a column cannot hold the model's queries."""

    def is_list(values: pa.DataType, *holds: Callable[[pa.DataType], bool]) -> bool:
        tests = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
        return any(test(values) for test in tests) and any(hold(values.value_type) for hold in (*holds, pa.types.is_null))

    def is_text(values: pa.DataType) -> bool:
        return values.value_type in TEXTS if pa.types.is_dictionary(values) else values in TEXTS

    numbers, kind, values = (pa.types.is_integer, pa.types.is_floating), model.bundle.manifest.query.kind, column.type
    if kind == "features":
        names = {"indices", "values"} <= {field.name for field in values} if pa.types.is_struct(values) else False
        fits = names and is_list(values.field("indices").type, numbers[0]) and is_list(values.field("values").type, *numbers)
    else:
        fits = {"history": is_list(values, is_text, numbers[0]), "vector": is_list(values, *numbers), "text": is_text(values)}[kind]
    if not fits:
        raise InvalidInput("--column", f"{column.name}: {values}", EXPECTED[kind])


def query_values(cells: pa.ChunkedArray, column: str, first: int, model: Model) -> list[Any]:
    """The cells of a column, of which `first` is the first row, as `Model.encoded` takes queries. Raises InvalidData for null."""
    kind: str = model.bundle.manifest.query.kind
    values: list[Any] = cells.to_pylist()
    if kind == "features":
        values = [value and (value["indices"], value["values"]) for value in values]
    for row, value in enumerate(values, first):
        if value is None or (kind == "features" and (None in value or None in value[0])):
            raise InvalidData(f"{column}[{row}]", value, f"a {kind} query in every row")
    return values


def _numbers(values: list[int | None], column: str, first: int, model: Model) -> np.ndarray[Any, np.dtype[np.int64]]:
    limit = model.bundle.manifest.search.max_m
    for row, value in enumerate(values, first):
        if value is None or not 1 <= value <= limit:
            raise InvalidData(f"{column}[{row}]", value, f"1 to {limit}, as the model allows")
    return np.array(values, np.int64)


def _joined_filter(job: Job, row: int, text: str | None) -> Mapping[str, object]:
    """The filter of all queries with one query's own filter. Raises InvalidInput if both have a column."""
    query_filter, common_filter = _json(f"{job.filter_column}[{row}]", text) or {}, job.ask.filter or {}
    if repeated := sorted(query_filter.keys() & common_filter.keys()):
        raise InvalidInput(f"{job.filter_column}[{row}]", ", ".join(repeated), "columns that --filter does not have")
    return {**common_filter, **query_filter}


def _json(field: str, text: str | None) -> Mapping[str, object] | None:
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidInput(field, text, f"JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidInput(field, text, "an object of columns, as a request has it")
    return value


def _digest(model: Model, options: argparse.Namespace, job: Job) -> str:
    """SHA-256 of everything that the answers depend on."""
    manifest = (model.bundle.path / "manifest.json").read_bytes()
    queries = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(Path(options.queries))]
    text = repr((job, options.user, options.item, options.time, queries))
    return hashlib.sha256(manifest + text.encode()).hexdigest()


def _resume(folder: Path, digest: str) -> None:
    """Delete the files of an earlier run, unless its model, input and options were the same."""
    digest_file = folder / "of"
    if not (digest_file.exists() and digest_file.read_text() == digest):
        for file in folder.iterdir():
            file.unlink()
        digest_file.write_text(digest)


def _join_blocks(folder: Path, out: Path, empty: pa.Table) -> None:
    """Write all blocks, in order, to one file, and rename it when it is complete. empty: the table if there is no query."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        write_table(empty, out)
        return
    with atomic_write(out) as part, pq.ParquetWriter(part, pq.read_schema(files[0])) as writer:
        for file in files:
            writer.write_table(pq.read_table(file))


def write_table(table: pa.Table, file: Path) -> None:
    """Write a file in one step."""
    with atomic_write(file) as part:
        pq.write_table(table, part)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Answer many queries: a row a query, with the best items and their scores as lists. Goes on where a killed run ended.",
    )
    parser.add_argument("--model", required=True, help="models/NAME/VERSION, or models/NAME for the highest version")
    parser.add_argument("--queries", required=True, help="Parquet: a row a query; or with --user a log, an interaction a row (CSV, too)")
    parser.add_argument("--out", required=True, help="Parquet file to write: the other columns of the queries, then items and scores")
    parser.add_argument("--column", help="column of the queries (default: history, text, vector or features, as the model has them)")
    user = "column of the users of a log, whose histories are made of it: a name, or in text without a header a position from 0"
    parser.add_argument("--user", help=user)
    parser.add_argument("--item", help="column of the items of a log (default item)")
    parser.add_argument("--time", help="column of the times of a log; `file`, the default: the rows are in order")
    parser.add_argument("--m", type=int, help="items a query (default: the model's)")
    parser.add_argument("--m-column", help="column that says how many items each query wants")
    parser.add_argument("--beam", type=int, help="beam size (default: the model's)")
    parser.add_argument("--filter", help="""a filter for all queries, JSON: '{"section": ["games"]}'""")
    parser.add_argument("--exclude-filter", help="likewise, what must not come back")
    parser.add_argument("--filter-column", help="column with a filter for each query, JSON or null")
    parser.add_argument("--exclude-seen", action="store_true", help="leave out the items of the history")
    parser.add_argument("--fields", nargs="*", default=[], help="columns of the items to write as lists, too")
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: %(default)s, the cores)")
    return parser
