"""Answers for all users of a log at once, as in a nightly job: `espalier predict` compared to the batch call of `implicit`.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.batch_predict --log FILE --user U --item I --model models/NAME --json F

Both answer every user with the m best items that are not in the user's list, with as many processes or threads as there are cores. implicit
multiplies a user's vector, which its fit has made, with the vectors of all items; the model encodes the user's history and searches its
tree. Seconds of `predict` are of the whole command, with reading, writing and the start of its processes; of implicit of the call alone,
which flatters it. Fitting is not counted. implicit wants OPENBLAS_NUM_THREADS=1 in the environment, since it has threads of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy import sparse

from benchmarks.report_file import command_line, print_row, write_report
from espalier.logs.log_events import histories
from espalier.model import open_model


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--log", required=True, help="CSV or Parquet, an interaction a row")
    parser.add_argument("--user", required=True)
    parser.add_argument("--item", required=True)
    parser.add_argument("--time")
    parser.add_argument("--model", required=True)
    parser.add_argument("--m", type=int, default=50)
    parser.add_argument("--factors", type=int, default=128)
    options = parser.parse_args()
    lists = histories(Path(options.log), options.user, options.item, options.time).lists
    rows = [predicted(options, len(lists)), of_implicit(options, list(lists.values()))]
    for row in rows:
        print_row(row)
    write_report(options.json, {"log": Path(options.log).name, "users": len(lists), "m": options.m, "rows": rows})


def predicted(options: argparse.Namespace, users: int) -> dict[str, object]:
    """The row of the command `espalier predict`."""
    with tempfile.TemporaryDirectory() as folder:
        predict_options = ["--queries", options.log, "--user", options.user, "--item", options.item, "--m", options.m, "--exclude-seen"]
        predict_options += ["--model", options.model, "--out", f"{folder}/top.parquet"] + (["--time", options.time] if options.time else [])
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "espalier_cli", "predict", *map(str, predict_options)], check=True, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
    items = len(open_model(options.model, "cpu").bundle.items)
    return {"method": "espalier predict", "items": items, "seconds": seconds, "queries_per_s": users / seconds}


def of_implicit(options: argparse.Namespace, lists: list[list[str]]) -> dict[str, object]:
    """implicit's `recommend` of all users, after a short fit."""
    from implicit.als import AlternatingLeastSquares

    names, columns = np.unique(np.array([item for user_items in lists for item in user_items]), return_inverse=True)
    offsets = np.cumsum([0, *map(len, lists)])
    matrix = sparse.csr_matrix((np.ones(len(columns), np.float32), columns, offsets), (len(lists), len(names)))
    matrix.sum_duplicates()
    model = AlternatingLeastSquares(factors=options.factors, iterations=3, random_state=1)
    model.fit(matrix, show_progress=False)
    begin = time.perf_counter()
    model.recommend(np.arange(len(lists)), matrix, N=options.m, filter_already_liked_items=True)
    seconds = time.perf_counter() - begin
    return {
        "method": f"implicit, {options.factors} factors",
        "items": len(names),
        "seconds": seconds,
        "queries_per_s": len(lists) / seconds,
    }


if __name__ == "__main__":
    main()
