"""A table of products and no log: BM25, BM25F and a tree over the products' words, on queries that people or the texts themselves ask.

    python -m benchmarks.own_words --data DIR --set psearch --json F
    python -m benchmarks.own_words --data DIR --set debian-describe --json F      # and chorus, cranfield
    python -m benchmarks.own_words --data DIR --set mixed --items 100000 --json F

Sets: `product_sets.py`. BM25F is chosen on every other query (weights of the fields, k1, b, by nDCG@10; not on mixed) and BM25, with the
usual options, reads all fields as one; both have the tree's words. bm25s (once more with PyStemmer's English stems) and tantivy, where
they are installed, read all fields as one too, with options and words of their own. The tree has its defaults. Row `xr-linear` learns from
no query; row `xr-linear, a log` learns from the queries by which BM25F is chosen, weighted by their grades. All are measured on the other
half.
Rows: {"system", "options", "ndcg10", "recall10", "recall100", "ms", "train_seconds"}, ms a query, one after the other.

Legend: B queries, I products, F words.
"""

from __future__ import annotations

import importlib.util
import itertools
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.papers.product_search.product_sets import SETS, Products, products_of
from benchmarks.papers.product_search.text_linear import engine_find
from benchmarks.report_file import command_line, print_row, write_report
from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.placement.evidence import OWN_WEIGHTS
from training.baselines.texts import WordIndex, best_of
from training.linear.run import fit_and_export
from training.retrieval.task import Rank
from training.specification.linear import LinearConfig

BEAMS = (10, 50, 100)
"""Beams that are measured beside the model's own."""
LOG = {"query": "query", "item": "item", "weight": "grade", "test_share": 0.0}
WEIGHTS = (0.0, 0.1, 0.3, 1.0)
NOTHING = np.empty(0, np.int64)
"""BM25's answers are not filled up: recall counts what it found."""
K1, B = (0.6, 1.2, 2.0), (0.3, 0.75)
Find = Callable[[str], Int64]


def figures(find: Find, products: Products, queries: Sequence[str]) -> dict[str, float]:
    """Means over the queries, in percent. Right is a grade of 2, or of all where there is no other."""
    discount = 1 / np.log2(np.arange(10) + 2)
    rows = []
    for query in queries:
        grades = products.right[query]
        found_rows = find(query)[:100].tolist()
        gains = np.array([2 ** grades.get(row, 0) - 1 for row in found_rows[:10]])
        ideal = np.sort([2**grade - 1 for grade in grades.values()])[::-1][:10]
        right_rows = {row for row, grade in grades.items() if grade >= min(2, max(grades.values()))}
        ndcg = (gains * discount[: len(gains)]).sum() / (ideal * discount[: len(ideal)]).sum()
        rows.append((ndcg, len(right_rows & set(found_rows[:10])) / len(right_rows), len(right_rows & set(found_rows)) / len(right_rows)))
    return dict(zip(("ndcg10", "recall10", "recall100"), np.round(100 * np.mean(rows, axis=0), 1).tolist(), strict=True))


def milliseconds(find: Find, queries: Sequence[str]) -> float:
    for query in queries[:20]:
        find(query)
    begin = time.perf_counter()
    for query in queries:
        find(query)
    return round(1e3 * (time.perf_counter() - begin) / len(queries), 3)


def answering(rank: Rank) -> Find:
    """A method's 100 best."""

    def find(query: str) -> Int64:
        rows: Int64 = rank([query], 100, False)[0]
        return rows[rows >= 0]

    return find


def by_bm25s(texts: Sequence[str], english: bool = False) -> Find:
    """english: with stems and without stop words of English."""
    bm25s = importlib.import_module("bm25s")
    stemmer = importlib.import_module("Stemmer").Stemmer("english") if english else None
    tokenize = partial(bm25s.tokenize, stopwords="en" if english else None, stemmer=stemmer, show_progress=False)
    index = bm25s.BM25()
    index.index(tokenize(texts), show_progress=False)

    def find(query: str) -> Int64:
        tokens = tokenize([query], return_ids=False)
        rows: Int64 = index.retrieve(tokens, k=100, show_progress=False).documents[0]
        return rows

    return find


def by_tantivy(texts: Sequence[str]) -> Find:
    tantivy = importlib.import_module("tantivy")

    schema = tantivy.SchemaBuilder().add_text_field("text").add_unsigned_field("row", stored=True).build()
    index = tantivy.Index(schema)
    writer = index.writer(200_000_000, 1)
    for row, text in enumerate(texts):
        writer.add_document(tantivy.Document(text=text, row=row))
    writer.commit()
    index.reload()
    searcher = index.searcher()

    def find(query: str) -> Int64:
        parsed = index.parse_query("".join(letter if letter.isalnum() else " " for letter in query.lower()), ["text"])
        return np.array([searcher.doc(address)["row"][0] for _, address in searcher.search(parsed, 100).hits], np.int64)

    return find


PEERS: Mapping[str, tuple[tuple[str, ...], Callable[[Sequence[str]], Find]]] = {
    "bm25s": (("bm25s",), by_bm25s),
    "bm25s, English": (("bm25s", "Stemmer"), partial(by_bm25s, english=True)),
    "tantivy": (("tantivy",), by_tantivy),
}
"""Name → the modules that it needs, and what builds its index."""


def fitted(products: Products, folder: Path, asked: Sequence[str] = ()) -> Bundle:
    """The default model of a table of products, and of the queries `asked`, weighted by their grades. Its item rows are the table's.

    folder  of the model and its data
    """
    count = len(next(iter(products.fields.values())))
    ids = [f"{row:0{len(str(count))}d}" for row in range(count)]
    (folder / "work").mkdir(parents=True)
    pl.DataFrame({"id": ids, **products.fields}).write_parquet(folder / "items.parquet")
    data: dict[str, Any] = {"format": "log", "items": folder / "items.parquet", "own_texts": list(products.fields)}
    if asked:
        log = [(query, ids[row], float(grade)) for query in asked for row, grade in products.right[query].items() if grade]
        pl.DataFrame(log, schema=["query", "item", "grade"], orient="row").write_parquet(folder / "log.parquet")
        data |= LOG | {"train": folder / "log.parquet"}
    config = LinearConfig.model_validate({"kind": "xr-linear", "name": "products", "data": data})
    return fit_and_export(config, folder / "products" / "1", folder / "work")


def rows_of(products: Products, choose: bool = True) -> list[dict[str, Any]]:
    """The rows, printed as they come. choose: BM25F too."""
    queries = list(products.right)
    choosing_queries, test_queries = queries[::2], queries[1::2]
    rows = []

    def add(system: str, options: str, find: Find, seconds: float) -> None:
        rows.append({"system": system, "options": options} | figures(find, products, test_queries))
        rows[-1] |= {"ms": milliseconds(find, test_queries), "train_seconds": round(seconds, 1)}
        print_row(rows[-1])

    _add_baselines(products, choosing_queries if choose else [], add)
    with tempfile.TemporaryDirectory() as name:
        for system, asked in (("xr-linear", ()), ("xr-linear, a log", choosing_queries)):
            begin = time.perf_counter()
            bundle = fitted(products, Path(name) / system, asked)
            seconds = time.perf_counter() - begin
            engine = open_engine(bundle, "cpu")
            columns = ", ".join(f"{weight:.2f}" for weight in bundle.manifest.data[OWN_WEIGHTS])
            for beam in sorted({*BEAMS, bundle.manifest.search.beam_size}):
                add(system, f"beam {beam}, columns {columns}", engine_find(engine, bundle, beam), seconds)
            engine.close()
    return rows


def _add_baselines(products: Products, chosen_by: Sequence[str], add: Callable[[str, str, Find, float], None]) -> None:
    """Rows of what needs no tree. Its indices are gone when one is trained. chosen_by: queries that choose BM25F; none: no BM25F."""
    begin = time.perf_counter()
    words = WordIndex([*products.fields.values()])
    bm25_find = answering(best_of(words.joined().scorer((1.0,), 1.5, 0.75), NOTHING))
    add("bm25", "k1 1.5, b 0.75, all fields as one", bm25_find, time.perf_counter() - begin)
    if chosen_by:
        weights_of = [weights for weights in itertools.product(WEIGHTS, repeat=len(words.of_field)) if max(weights) == 1]
        grid = list(itertools.product(weights_of, K1, B))
        best = max(grid, key=lambda options: figures(answering(best_of(words.scorer(*options), NOTHING)), products, chosen_by)["ndcg10"])
        find = answering(best_of(words.scorer(*best), NOTHING))
        add("bm25f", f"weights {best[0]}, k1 {best[1]}, b {best[2]}", find, time.perf_counter() - begin)
    for peer, (modules, index) in PEERS.items():
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            print(f"{peer}: left out, {missing[0]} is not installed", flush=True)
            continue
        begin = time.perf_counter()
        find = index([" ".join(texts) for texts in zip(*products.fields.values(), strict=True)])
        add(peer, "its own, all fields as one", find, time.perf_counter() - begin)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the sets")
    parser.add_argument("--set", choices=SETS, required=True)
    parser.add_argument("--items", type=int, default=100_000, help="of the set `mixed`")
    options = parser.parse_args()
    try:
        products = products_of(options.data, options.set, options.items)
        rows = rows_of(products, choose=options.set != "mixed")
        items, most_mb = len(next(iter(products.fields.values()))), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        report = {"set": options.set, "items": items, "most_mb": most_mb, "rows": rows}
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None
    write_report(options.json, report)


if __name__ == "__main__":
    main()
