"""`espalier embed`: writes a model's item rows and the states of queries as Parquet, for your own index, ranker or plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from espalier.errors import MISSING, EspalierError, InvalidInput
from espalier.frames import as_table
from espalier.model import open_model
from espalier_cli.predict import check_queries, check_written, query_values, write_table


def main(arguments: Sequence[str], prog: str) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="Write node rows of items, and states of queries, as lists of 32-bit numbers.")
    parser.add_argument("--model", required=True, help="models/NAME/VERSION, or models/NAME for the highest version")
    parser.add_argument("--items", help="Parquet file to write: id and row")
    parser.add_argument("--queries", help="Parquet file with a column of queries, as `espalier predict` reads it")
    parser.add_argument("--column", help="that column (default: history or vector, as the model has them)")
    parser.add_argument("--states", help="Parquet file to write: the other columns of the queries, and state")
    options = parser.parse_args(arguments)
    try:
        _embed(options)
    except (EspalierError, OSError, pa.ArrowException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _embed(options: argparse.Namespace) -> None:
    if options.items is None and options.states is None:
        raise InvalidInput("--items, --states", MISSING, "at least one file to write")
    if (options.states is None) != (options.queries is None):
        raise InvalidInput("--states" if options.states is None else "--queries", MISSING, "both files, --queries and --states")
    if options.column is not None and options.queries is None:
        raise InvalidInput("--column", options.column, "--queries with it")
    written = [(option, Path(file)) for option, file in (("--items", options.items), ("--states", options.states)) if file is not None]
    others = [] if options.queries is None else [Path(options.queries)]
    for option, file in written:
        check_written(option, file, *others)
        others.append(file)
    model = open_model(options.model, "cpu")
    if options.items is not None:
        rows, items = model.item_rows(), model.bundle.items
        write_table(pa.table({"id": items.ids_of(np.arange(len(items))), "row": _lists(rows)}), Path(options.items))
    if options.states is not None:
        column = options.column or model.bundle.manifest.query.kind
        table = as_table("--queries", options.queries, (column,))
        if "state" in table.column_names:
            raise InvalidInput("--queries", "state", "no column of this name: the states are called so")
        if column not in table.column_names:
            raise InvalidInput("--column", column, f"one of the columns {', '.join(table.column_names)}")
        check_queries(table.schema.field(column), model)
        states = model.states(query_values(table.column(column), column, 0, model))
        write_table(table.drop_columns([column]).append_column("state", _lists(states)), Path(options.states))


def _lists(rows_NS: NDArray[np.float32]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows_NS).reshape(-1)), rows_NS.shape[1])
