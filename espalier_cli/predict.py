"""`espalier predict`: the best items of many queries, from a Parquet file to another, as a nightly job needs them.

The queries are read in blocks, each answered by one process and written as a part beside the output. A run that was killed goes on with the
parts that are there, if the model, the input and the options are the same. Knows files and processes. Does not know how a model searches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from espalier.compile import end_with_parent
from espalier.errors import EspalierError, InvalidInput
from espalier.file_lock import file_lock
from espalier.frames import as_table, column_of, lists_of
from espalier.model import Ask, Model, open_model

BLOCK = 4096
"""Queries of a part."""
AHEAD = 2
"""Blocks that wait for each process, so that a file of any size is never in memory as a whole."""
SAID_S = 2.0
COLUMNS = {"history": "history", "text": "text", "vector": "vector", "features": "features"}
"""Where the queries are, by their kind, if no option says so."""

_model: Model | None = None  # of a process that answers


@dataclass(frozen=True)
class Job:
    """What is asked of every block. column: of the queries · m, filter: columns that say it for each query, or None for all"""

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
    except KeyboardInterrupt:
        return 130
    return 0


def predict(options: argparse.Namespace) -> None:
    """Write the answers. Raises EspalierError, OSError and ArrowException."""
    out, model = Path(options.out), open_model(options.model, "cpu")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InvalidInput("--out", str(out), "a file in a folder that exists")
    if options.workers < 1:
        raise InvalidInput("--workers", options.workers, "at least 1")
    column = options.column or COLUMNS[model.bundle.manifest.query.kind]
    filters = (_json("--filter", options.filter), _json("--exclude-filter", options.exclude_filter))
    ask = Ask(options.m, options.beam, *filters, options.exclude_seen)
    job = Job(str(model.bundle.path), column, options.m_column, options.filter_column, ask, tuple(options.fields))
    model.search([], ask.m, beam_size=ask.beam_size, fields=job.fields)  # says what is wrong with them
    model.mask(*filters)
    total, schema, blocks = _queries(options, column, model)
    written = {"items", "scores", *job.fields}
    if taken := sorted(written & {name for name in schema.names if name not in (column, job.m_column, job.filter_column)}):
        raise InvalidInput("--queries", ", ".join(taken), f"no columns {', '.join(sorted(written))}: the answers are called so")
    parts = out.with_name(f".{out.name}.parts")
    parts.mkdir(exist_ok=True)
    with file_lock(parts, InvalidInput("--out", str(out), "a file that no other run is writing now")):  # whose parts it would take
        _resume(parts, _digest(model, options, job))
        _answer(options, job, blocks, parts, total)
        _joined(parts, out, _with_items(job, schema.empty_table(), 0, model))
        shutil.rmtree(parts)


def _answer(options: argparse.Namespace, job: Job, blocks: Iterator[pa.Table], parts: Path, total: int) -> None:
    """Write the parts that are not there yet. total: how many queries there are."""
    began = said = time.perf_counter()
    done, fresh = 0, 0
    with ProcessPoolExecutor(options.workers, get_context("spawn"), _open, (job,)) as pool:
        waiting: list[tuple[Path, Future[pa.Table | str] | None]] = []

        def finish() -> None:
            nonlocal done, fresh, said
            file, answered = waiting.pop(0)
            if answered is not None:
                table = answered.result()
                if isinstance(table, str):
                    raise EspalierError(table)
                pq.write_table(table, file.with_suffix(".new"))
                file.with_suffix(".new").rename(file)
                fresh += len(table)
            done += pq.read_metadata(file).num_rows
            now = time.perf_counter()
            if now - said > SAID_S or done == total:
                said = now
                print(f"{done:,} of {total:,} queries, {fresh / (now - began):,.0f}/s", file=sys.stderr, flush=True)

        for number, block in enumerate(blocks):
            file = parts / f"{number:08}.parquet"
            waiting.append((file, None if file.exists() else pool.submit(_answered, job, block, number * BLOCK)))
            while len(waiting) > AHEAD * options.workers:
                finish()
        while waiting:
            finish()


def _queries(options: argparse.Namespace, column: str, model: Model) -> tuple[int, pa.Schema, Iterator[pa.Table]]:
    """How many queries there are, their columns, and blocks of them. Raises InvalidInput where a column is missing."""
    file = Path(options.queries)
    if options.user is not None:
        if column == options.user:
            raise InvalidInput("--column", column, "another name than that of the users")
        table = as_table("--queries", file, (options.user, options.item))
        lists = lists_of(table, options.user, options.item, options.time)
        if left_out := len(table) - sum(map(len, lists.values())):
            print(f"{left_out:,} of {len(table):,} rows were left out: they have no user or no item", file=sys.stderr)
        known = model.bundle.items.rows_of([item for one in lists.values() for item in one]) if lists else None
        if known is not None and (known < 0).all():
            raise InvalidInput("--item", options.item, "ids that the model knows: it knows none of them")
        users = pa.array([*lists], column_of(table, "--user", options.user).type)
        made = pa.table({options.user: users, column: pa.array([*lists.values()], pa.list_(pa.string()))})
        size = len(made)
        # taken, not sliced: a slice would carry the whole table to each process
        return size, made.schema, (made.take(pa.array(range(at, min(at + BLOCK, size)))) for at in range(0, size, BLOCK))
    if not file.is_file():
        raise InvalidInput("--queries", str(file), "a Parquet file that exists")
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise InvalidInput("--queries", str(file), "Parquet, a row a query; or with --user and --item a log, which may be CSV") from error
    schema = parquet.schema_arrow
    for option, name in (("--column", column), ("--m-column", options.m_column), ("--filter-column", options.filter_column)):
        if name is not None and name not in schema.names:
            raise InvalidInput(option, name, f"one of the columns {', '.join(schema.names)}")
    if options.m_column is not None and not pa.types.is_integer(schema.field(options.m_column).type):
        raise InvalidInput("--m-column", str(schema.field(options.m_column).type), "a column of whole numbers")
    filters = pa.null() if options.filter_column is None else schema.field(options.filter_column).type
    if filters not in (pa.string(), pa.large_string(), pa.null()):
        raise InvalidInput("--filter-column", str(filters), "a column of texts, JSON or null")
    return parquet.metadata.num_rows, schema, (pa.Table.from_batches([batch]) for batch in parquet.iter_batches(BLOCK))


def _open(job: Job) -> None:
    global _model
    end_with_parent()
    _model = open_model(job.model, "cpu", frame="arrow")


def _answered(job: Job, block: pa.Table, first: int) -> pa.Table | str:
    """A block of queries from a row on, answered; or what is wrong with it."""
    if _model is None:
        raise RuntimeError("a process that answers opens the model first")
    try:
        return _with_items(job, block, first, _model)
    except EspalierError as error:  # which may be made of parts, and could not come from another process as it is
        return str(error)


def _with_items(job: Job, block: pa.Table, first: int, model: Model) -> pa.Table:
    """A block with its queries replaced by lists of items and scores, and of fields that were asked for."""
    queries, seen = model.with_seen(_values(block.column(job.column).to_pylist(), job.column, first, model))
    m_B = None if job.m_column is None else _numbers(block.column(job.m_column).to_pylist(), job.m_column, first)
    filters = None
    if job.filter_column is not None:
        filters = [_both(job, first + at, text) for at, text in enumerate(block.column(job.filter_column).to_pylist())]
    answers = model.answers(queries, job.ask, job.fields, seen, m_B, filters)
    offsets = pa.array(np.append(0, np.cumsum(answers.count_B)), pa.int32())
    kept = [name for name in block.column_names if name not in (job.column, job.m_column, job.filter_column)]
    columns = {name: block.column(name) for name in kept}
    lists = {"items": answers.ids, "scores": answers.scores} | answers.fields
    return pa.table(columns | {name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()})


def _values(values: list[Any], column: str, first: int, model: Model) -> list[Any]:
    """Queries as `Model.encoded` takes them. Raises InvalidInput for one that is missing."""
    for place, value in enumerate(values, first):
        if value is None:
            raise InvalidInput(f"{column}[{place}]", None, f"a {model.bundle.manifest.query.kind} query in every row")
    if model.bundle.manifest.query.kind == "features":
        return [(value["indices"], value["values"]) for value in values]
    return values


def _numbers(values: list[int | None], column: str, first: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    for place, value in enumerate(values, first):
        if value is None or value < 1:
            raise InvalidInput(f"{column}[{place}]", value, "at least 1")
    return np.array(values, np.int64)


def _both(job: Job, place: int, text: str | None) -> Mapping[str, object]:
    """The filter of all queries and a query's own. Raises InvalidInput where both are about one column."""
    own, for_all = _json(f"{job.filter_column}[{place}]", text) or {}, job.ask.filter or {}
    if twice := sorted(own.keys() & for_all.keys()):
        raise InvalidInput(f"{job.filter_column}[{place}]", ", ".join(twice), "columns that --filter does not have")
    return {**for_all, **own}


def _json(field: str, text: str | None) -> Mapping[str, object] | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidInput(field, text, f"JSON ({error})") from error
    if not isinstance(found, dict):
        raise InvalidInput(field, text, "an object of columns, as a request has it")
    return found


def _digest(model: Model, options: argparse.Namespace, job: Job) -> str:
    """Of all that the answers depend on."""
    stat = os.stat(options.queries)
    manifest = (model.bundle.path / "manifest.json").read_bytes()
    asked = repr((job, options.user, options.item, options.time, str(Path(options.queries).absolute()), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(manifest + asked.encode()).hexdigest()


def _resume(parts: Path, digest: str) -> None:
    """Keep the parts of a run of the same model, input and options; drop those of any other."""
    mark = parts / "of"
    if not (mark.exists() and mark.read_text() == digest):
        for file in parts.iterdir():
            file.unlink()
        mark.write_text(digest)


def _joined(parts: Path, out: Path, empty: pa.Table) -> None:
    """Write one file of all parts, in their order, and put it in its place when it is whole. empty: what there is without a query."""
    files = sorted(parts.glob("*.parquet"))
    new = out.with_name(f".{out.name}.new")
    if not files:
        pq.write_table(empty, new)
    else:
        with pq.ParquetWriter(new, pq.read_schema(files[0])) as writer:
            for file in files:
                writer.write_table(pq.read_table(file))
    new.rename(out)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Answer many queries: a row a query, with the best items and their scores as lists. Goes on where a killed run ended.",
    )
    parser.add_argument("--model", required=True, help="models/NAME/VERSION, or models/NAME for the highest version")
    parser.add_argument("--queries", required=True, help="Parquet: a row a query; or with --user a log, an interaction a row (CSV, too)")
    parser.add_argument("--out", required=True, help="Parquet file to write: the other columns of the queries, then items and scores")
    parser.add_argument("--column", help="column of the queries (default: history, text, vector or features, as the model has them)")
    parser.add_argument("--user", help="column of the users, where the file is a log: the history of each is made of it")
    parser.add_argument("--item", default="item", help="column of the items of a log (default %(default)s)")
    parser.add_argument("--time", help="column of the times of a log (default: the rows are in order)")
    parser.add_argument("--m", type=int, help="items a query (default: the model's)")
    parser.add_argument("--m-column", help="column that says how many items each query wants")
    parser.add_argument("--beam", type=int, help="beam size (default: the model's)")
    parser.add_argument("--filter", help="""a filter for all queries, JSON: '{"section": ["games"]}'""")
    parser.add_argument("--exclude-filter", help="likewise, what must not come back")
    parser.add_argument("--filter-column", help="column with a filter for each query, JSON or null")
    parser.add_argument("--exclude-seen", action="store_true", help="leave out the items of the history")
    parser.add_argument("--fields", nargs="*", default=[], help="columns of the items to write as lists, too")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: %(default)s, the cores)")
    return parser
