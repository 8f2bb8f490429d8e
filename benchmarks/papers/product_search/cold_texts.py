"""Cold starts of texts: items that a trained model has never seen, put into it by their text alone and folded.

    python -m benchmarks.cold_texts --texts DIR --json F

A package's description → what it depends on, of packages with at least 3 dependants; an item's own text is the description of the package
of that name. A tenth of the items with a text is hidden, drawn by a seed: no training query has them as an answer. A tenth of the
descriptions are the test queries. Then the hidden items come, with their text.

not placed                   the model of the old items alone
placed                       that model with the hidden items put in and folded
retrained with own texts     trained anew, with the hidden items' own texts as their only training queries
retrained with everything    trained on all: for these items no cold start
cosine to centroids          exact search: the cosine to the mean of an item's training queries, or to a hidden item's own text

Rows: {"ranking", "hidden@m", "old@m", "all@m", "shown@m", "seconds"}. Recall in % is the mean over test queries of the share of what is
right that is found: of the right items that were hidden (over the queries that have some), of the old ones, of all. `shown` is the share of
hidden items among all that were returned. `seconds` is the time from the old bundle, or from the log, to a bundle on disk.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from scipy.sparse import csr_array, vstack

from benchmarks.papers.product_search.text_report import best
from benchmarks.papers.product_search.text_sets import SETS, dependencies, read_frame
from benchmarks.quality.live_quality import put_placed
from benchmarks.report_file import command_line, print_row, write_report
from espalier.arrays import Bool, Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidData
from espalier.live.operations import ItemBody
from espalier.live.state import LiveState
from espalier.metrics import precision_recall_f
from espalier.placement.placer import Placer
from espalier.queries import TextKind, encode_texts
from espalier.search import NO_ITEM, SearchParams
from espalier.text.blocks import TextBlock
from training.data.csr import as_matrix
from training.linear.label_features import label_features
from training.linear.prepare import prepare
from training.linear.run import fit_and_export
from training.live.publish_fold import publish_fold
from training.specification.linear import LinearConfig, LinearSearch, LogData
from training.specification.models import config_of

Row = dict[str, Any]
Pair = tuple[str, list[int]]
"""A text and the numbers of its relevant items."""
SET = "debian-depends"
FILE = SETS[SET]
HIDDEN_SHARE, TEST_SHARE = 0.1, 0.1
MS = (10, 50, 100)
BEAM, M = 50, max(MS)


@dataclass(frozen=True, eq=False)
class Texts:
    """texts: each item's own, empty where it has none; hidden_I: bool; pairs of training and of test, whose texts differ."""

    texts: list[str]
    hidden_I: Bool
    train: list[Pair]
    test: list[Pair]


def with_hidden_items(frame: pl.DataFrame) -> Texts:
    """The set of a table with the columns package, depends and description."""
    items, pairs = dependencies(frame)
    described = dict(frame.select("package", pl.col("description").fill_null("")).iter_rows())
    texts = [described.get(name, "") for name in items]
    items_with_text = np.random.default_rng(1).permutation(np.flatnonzero([bool(text) for text in texts]))
    hidden_I = np.zeros(len(texts), np.bool_)
    hidden_I[items_with_text[: round(HIDDEN_SHARE * len(items_with_text))]] = True
    order = np.random.default_rng(0).permutation(len(pairs))
    test, train = ([pairs[b] for b in np.sort(part).tolist()] for part in np.split(order, [int(TEST_SHARE * len(pairs))]))
    training_texts = {text for text, _ in train}
    return Texts(texts, hidden_I, train, [(text, rows) for text, rows in dict(test).items() if text not in training_texts])


def trained(data: Texts, pairs: Sequence[Pair], items: Int64, folder: Path) -> Bundle:
    """A model of some items, trained on the answers among them."""
    item_set = set(items.tolist())
    (folder / "work").mkdir(parents=True)
    for name, split_pairs in (("train", pairs), ("test", data.test)):
        rows = [(text, str(row)) for text, relevant_rows in split_pairs for row in relevant_rows if row in item_set]
        pl.DataFrame(rows, schema=["query", "item"], orient="row").write_parquet(folder / f"{name}.parquet")
    _table(data, items).write_parquet(folder / "items.parquet")
    max_features = len({text for text, relevant_rows in pairs if not item_set.isdisjoint(relevant_rows)})
    blocks = [TextBlock(unit="word", n=1, max_features=max_features), TextBlock(unit="word", n=2, max_features=max_features)]
    config = LinearConfig(
        name="cold-start",
        search=LinearSearch(beam_size=BEAM, m=M),
        data=LogData(format="log", train=folder / "train.parquet", test=folder / "test.parquet", items=folder / "items.parquet"),
        text=(*blocks, TextBlock(unit="char", n=3, max_features=max_features)),
    )
    return fit_and_export(config, folder / "model" / "1", folder / "work", threads=1)


def _table(data: Texts, items: Int64) -> pl.DataFrame:
    texts = [data.texts[row] or None for row in items.tolist()]
    return pl.DataFrame({"id": [str(row) for row in items.tolist()], "text": texts}, schema={"id": pl.String, "text": pl.String})


def search_texts(bundle: Bundle, texts: Sequence[str]) -> Int64:
    """int64[B, M]: item numbers, then NO_ITEM."""
    kind = bundle.manifest.query
    if not isinstance(kind, TextKind):
        raise InvalidData("bundle", kind.kind, "a model of texts")
    engine = open_engine(bundle, "cpu")
    rows_BM = engine.search(encode_texts(kind, bundle.vectoriser, texts), SearchParams.uniform(len(texts), BEAM, M)).item_rows_BM
    engine.close()
    number_I = np.array(bundle.items.ids_of(np.arange(len(bundle.items))), np.int64)
    return np.where(rows_BM >= 0, number_I[np.maximum(rows_BM, 0)], NO_ITEM)


def put_in(model: Bundle, data: Texts, items: Int64, out: Path) -> Bundle:
    """The model with some items put into it, each by its text."""
    state, engine = LiveState(model), open_engine(model, "cpu")
    bodies = [ItemBody(fields={"text": data.texts[row]}, text=data.texts[row]) for row in items.tolist()]
    placements = Placer(model, ("text",)).place(bodies, state.table, state.overlay(), engine.parents)
    engine.close()
    put_placed(state, [str(row) for row in items.tolist()], placements)
    return publish_fold(model, state, out)


def nearest(model: Bundle, data: Texts, texts: Sequence[str]) -> Int64:
    """As `search_texts`, by the cosine to centroids, of the same features as the model of the old items."""
    config = config_of(model.manifest, LinearConfig)
    prepared = prepare(config)
    _, centroids = label_features(prepared.train, prepared.own_texts, config.linear)
    hidden_item_rows = as_matrix(model.vectoriser.transform([data.texts[row] for row in np.flatnonzero(data.hidden_I).tolist()]))
    by_feature = csr_array(vstack([centroids, hidden_item_rows])).T.tocsr()
    number_I = np.concatenate([np.flatnonzero(~data.hidden_I), np.flatnonzero(data.hidden_I)])
    found_BM = np.full((len(texts), M), NO_ITEM, np.int64)
    for found_M, text in zip(found_BM, texts, strict=True):
        cosines = as_matrix(model.vectoriser.transform([text])) @ by_feature
        rows = number_I[cosines.indices[best(cosines.data, M)]]
        found_M[: len(rows)] = rows
    return found_BM


def row_of(ranking: str, data: Texts, found_BM: Int64, seconds: float) -> Row:
    """Recall in percent over the test queries."""
    row: Row = {"ranking": ranking}
    for group, counted_I in (("hidden", data.hidden_I), ("old", ~data.hidden_I), ("all", np.ones_like(data.hidden_I))):
        relevant = [np.array([item for item in rows if counted_I[item]], np.int64) for _, rows in data.test]
        judged_queries = np.flatnonzero([len(rows) > 0 for rows in relevant])
        for m in MS:
            recall_B = precision_recall_f(found_BM[judged_queries], [relevant[b] for b in judged_queries.tolist()], m)[1]
            row[f"{group}@{m}"] = round(100 * float(recall_B.mean()), 1)
    for m in (MS[0], M):
        returned = found_BM[:, :m]
        row[f"shown@{m}"] = round(100 * float(data.hidden_I[returned[returned != NO_ITEM]].mean()), 1)
    row["seconds"] = round(seconds, 1)
    print_row(row)
    return row


def measured(data: Texts, folder: Path) -> list[Row]:
    """A row for each ranking. The folder must be empty."""
    old, new, everything = np.flatnonzero(~data.hidden_I), np.flatnonzero(data.hidden_I), np.arange(len(data.texts))
    old_set = set(old.tolist())
    old_pairs = [(text, [row for row in rows if row in old_set]) for text, rows in data.train]
    own_text_pairs = [(data.texts[row], [row]) for row in new.tolist()]
    texts = [text for text, _ in data.test]
    begin = time.perf_counter()
    model = trained(data, old_pairs, old, folder / "old")
    old_s = time.perf_counter() - begin

    def row(ranking: str, make: Callable[[], Bundle]) -> Row:
        begin = time.perf_counter()
        bundle = make()
        seconds = time.perf_counter() - begin
        return row_of(ranking, data, search_texts(bundle, texts), seconds)

    return [
        row_of("not placed", data, search_texts(model, texts), old_s),
        row("placed", lambda: put_in(model, data, new, folder / "model" / "2")),
        row("retrained with own texts", lambda: trained(data, own_text_pairs + old_pairs, everything, folder / "own")),
        row("retrained with everything", lambda: trained(data, data.train, everything, folder / "everything")),
        row_of("cosine to centroids", data, nearest(model, data, texts), 0.0),
    ]


def report(folder_of_sets: Path, folder: Path) -> Row:
    """The set's sizes and rows. Raises InvalidData where its file is missing."""
    data = with_hidden_items(read_frame(folder_of_sets, SET))
    sizes = {"items": len(data.texts), "hidden": int(data.hidden_I.sum()), "test_queries": len(data.test)}
    return {"set": SET} | sizes | {"rows": measured(data, folder)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--texts", type=Path, required=True, metavar="DIR", help=f"the folder that holds {FILE}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_report(options.json, report(options.texts, Path(folder)))


if __name__ == "__main__":
    main()
