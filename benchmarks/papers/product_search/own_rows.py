"""What the rows of items' own words could be instead: lengths that they are divided by, and weights of columns. Nothing is trained.

    python -m benchmarks.own_rows --data DIR --set psearch --json F

Sets and figures are those of `own_words.py`. All items are scored by the inner product of the query's row with theirs, as leaves are
without a log. Queries: half of the set's, those by which BM25F is chosen there, at most 700 (`asked`); and 1,000 that `made_queries` makes
(`made`).
Rows: {"columns", "power", "queries", "ndcg10", "recall10", "recall100"}; a row is divided by its length to the power.

Legend: B queries, I products, F features.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.product_search.own_words import Find, figures
from benchmarks.papers.product_search.product_sets import SETS, Products, products_of
from benchmarks.report_file import command_line, print_row, write_report
from espalier.errors import EspalierError
from espalier.text.vectoriser import Vectoriser
from training.data.csr import Csr, as_matrix
from training.linear.own_texts import column_weights, combined, made_queries, squares
from training.specification.linear import LinearConfig

POWERS = (1.0, 0.75, 0.5, 0.0)
MOST_ASKED, MOST_MADE_QUERIES = 700, 1000


def best_of_rows(queries: Mapping[str, int], rows_BF: Csr, own_IF: Csr) -> Find:
    """The hundred largest products, the lower row first of equal ones."""
    transposed_FI = own_IF.T.tocsr()

    def find(query: str) -> Any:
        score_I = (rows_BF[[queries[query]]] @ transposed_FI).toarray()[0]
        return np.argsort(-score_I, kind="stable")[:100]

    return find


def rows_of(products: Products) -> list[dict[str, Any]]:
    """The rows, printed as they come."""
    columns = list(products.fields.values())
    ids = [str(row) for row in range(len(columns[0]))]
    config = LinearConfig.model_validate(
        {"kind": "xr-linear", "name": "rows", "data": {"format": "log", "items": "items.parquet", "own_texts": list(products.fields)}}
    )
    vectoriser = Vectoriser.fit(list(dict.fromkeys(text for texts in columns for text in texts if text)), config.blocks)
    made_log = made_queries(ids, columns, 1.0, seed=1)
    made_log = made_log.sample(min(MOST_MADE_QUERIES, len(made_log)), seed=0)
    judged_queries = list(products.right)[::2][:MOST_ASKED]
    made_answers = {query: {int(item): 1} for query, item in zip(made_log["query"], made_log["item"], strict=True)}
    query_sets: dict[str, tuple[Sequence[str], Products]] = {
        "asked": (judged_queries, products),
        "made": (list(made_answers), Products(products.fields, made_answers)),
    }
    square_rows = [squares(as_matrix(vectoriser.documents(texts))) for texts in columns]
    rows: list[dict[str, Any]] = []
    for rule, power in itertools.product((True, False), POWERS):
        weights = column_weights(columns) if rule else [1.0] * len(columns)
        own_IF = combined(square_rows, weights)
        length_I = np.sqrt(own_IF.multiply(own_IF).sum(axis=1))
        scale_I = np.where(length_I > 0, length_I, 1.0) ** -power
        scaled_IF = own_IF.multiply(scale_I[:, None]).tocsr()
        for name, (queries, judged_products) in query_sets.items():
            row_of_query = {query: row for row, query in enumerate(queries)}
            find = best_of_rows(row_of_query, as_matrix(vectoriser.transform(queries)), scaled_IF)
            row = {"columns": "by their length" if rule else "alike", "power": power, "queries": name}
            rows.append(row | figures(find, judged_products, queries))
            print_row(rows[-1])
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the sets")
    parser.add_argument("--set", choices=SETS, required=True)
    parser.add_argument("--items", type=int, default=20_000, help="of the set `mixed`")
    options = parser.parse_args()
    try:
        products = products_of(options.data, options.set, options.items)
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None
    write_report(options.json, {"set": options.set, "rows": rows_of(products)})


if __name__ == "__main__":
    main()
