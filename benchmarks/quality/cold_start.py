"""Cold starts: items that a trained model of texts has never seen, placed into it by `python -m training place`.

    python -m benchmarks.cold_start --data DIR --set debian-depends|psearch [--choose] --json F

A tenth of the items that have a text of their own is hidden, drawn by a seed: no training query has them as an answer, and no own text of
theirs is a training query. Then they come as new items, with their text.

debian-depends  a package's description → what it depends on, of packages with at least 3 dependants; an item's own text is the
                description of the package of that name (those without one are never hidden). A tenth of the descriptions is asked. The
                description of a hidden item may be a training query, with what it depends on itself as the answers.
psearch         a shop's query → products judged 3 or 4 of 4 by people; an item's own text is its title, and the titles of all items that
                are not hidden are training queries beside the queries of four fifths of the log; the fifth fold is asked, five times.

Rows, each a ranking of the same catalogue:

not placed                   the model of the old items alone
placed                       that model with the hidden items placed
placed, own text alone       the same without the neighbours' weights
retrained with own texts     trained anew, with the hidden items' own texts as their only training queries
retrained with everything    trained on all: for these items no cold start
cosine to centroids          exact search: the cosine to the mean of an item's training queries, or to a hidden item's own text

Recall is the mean over test queries of the share of what is right that is found: of the right items that were hidden (over the queries that
have some), of the old ones, of all. `shown` is the share of hidden items among all that were returned. `seconds` is the time from the old
bundle, or from the log for those trained anew, to a bundle on disk. --choose hides other items of the training data, asks a part of the
training queries, and tries variants of how items are placed; training/linear/placing.py does what it came to.

Rows are printed as they come and kept in the file, whose rows are not made again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from benchmarks.text.report import RowFile
from benchmarks.text.sets import dependencies, judgements
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError, InvalidData
from espalier.metrics import precision_recall_f
from espalier.queries import TextKind, encode_texts
from espalier.search import NO_ITEM, SearchParams
from espalier.text.blocks import TextBlock
from training.data.csr import as_matrix
from training.linear.config import LinearConfig, LinearOptions, LinearSearch, LogData
from training.linear.placing import Placing, place
from training.linear.prepare import prepare
from training.linear.run import fit_and_export

Int64 = NDArray[np.int64]
Row = dict[str, Any]
Pair = tuple[str, list[int]]
"""A text and the items that are right, by their numbers."""

SETS = {
    "debian-depends": "xmc-debian-bookworm/packages.tsv.gz",
    "psearch": "psearch-crowdflower/crowdflower_train.csv.gz",
}
HIDDEN_SHARE = 0.1
FOLDS = 5
MS = (10, 50, 100)
BEAM, M = 50, max(MS)
VARIANTS: dict[str, Placing] = {
    "as it is": Placing(),
    **{f"room {value}": Placing(room=value) for value in (2, 16)},
    **{f"neighbours {value}": Placing(neighbours=value) for value in (1, 10)},
    **{f"share {value:g}": Placing(share=value) for value in (0, 0.25, 1)},
    **{f"bias_quantile {value:g}": Placing(bias_quantile=value) for value in (0.1, 0.4, 0.5)},
}


@dataclass(frozen=True, eq=False)
class Task:
    """A set with its hidden items.

    texts   each item's own text, empty where it has none · hidden: bool[I]
    folds   training pairs and test pairs; own: items' texts are training queries too
    """

    name: str
    texts: list[str]
    hidden: NDArray[np.bool_]
    folds: list[tuple[list[Pair], list[Pair]]]
    own: bool


def read_set(folder: Path, name: str, choosing: bool = False) -> Task:
    """A named set; `choosing`: one made of its training data alone. Raises InvalidData where its file is missing."""
    file = folder / SETS[name]
    if not file.is_file():
        raise InvalidData("--data", str(folder), f"a folder that holds {SETS[name]}, the file of the set {name}")
    with gzip.open(file, "rb") as stream:
        content = io.BytesIO(stream.read())
    if name == "psearch":
        return psearch(pl.read_csv(content, infer_schema=False), choosing)
    return depends(pl.read_csv(content, separator="\t", quote_char=None, infer_schema=False), choosing)


def depends(frame: pl.DataFrame, choosing: bool = False) -> Task:
    """A description → what the package depends on."""
    items, pairs = dependencies(frame)
    described = dict(frame.select("package", pl.col("description").fill_null("")).iter_rows())
    order = np.random.default_rng(0).permutation(len(pairs))
    test, training = (np.sort(part).tolist() for part in np.split(order, [len(pairs) // 10]))
    fold = _fold([pairs[b] for b in training], [pairs[b] for b in test])
    task = Task("debian-depends", texts := [described.get(name, "") for name in items], _hidden(texts, 1), [fold], own=False)
    return _of_training(task, 10) if choosing else task


def psearch(frame: pl.DataFrame, choosing: bool = False) -> Task:
    """A shop's query → the products that people judged to be right."""
    titles, right = judgements(frame)
    pairs = list(right.items())
    folds = [_fold([pair for k, pair in enumerate(pairs) if k % FOLDS != fold], pairs[fold::FOLDS]) for fold in range(FOLDS)]
    task = Task("psearch", titles, _hidden(titles, 1), folds, own=True)
    return _of_training(task, 4) if choosing else task


def _fold(train: list[Pair], test: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Without the test texts that are training texts."""
    known = {text for text, _ in train}
    return train, [(text, rows) for text, rows in dict(test).items() if text not in known]


def _hidden(texts: Sequence[str], seed: int) -> NDArray[np.bool_]:
    able = np.flatnonzero([bool(text) for text in texts])
    hidden = np.zeros(len(texts), np.bool_)
    hidden[np.random.default_rng(seed).permutation(able)[: round(HIDDEN_SHARE * len(able))]] = True
    return hidden


def _of_training(task: Task, part: int) -> Task:
    """A set of the training pairs of the first fold: one of `part` is asked, and among the items that were not hidden others are."""
    kept = np.flatnonzero(~task.hidden)
    place = np.full(len(task.texts), -1)
    place[kept] = np.arange(len(kept))
    pairs = [(text, [int(place[row]) for row in rows if place[row] >= 0]) for text, rows in task.folds[0][0]]
    pairs = [pairs[b] for b in np.random.default_rng(0).permutation(len(pairs)) if pairs[b][1]]
    texts = [task.texts[row] for row in kept.tolist()]
    count = len(pairs) // part
    return Task(task.name, texts, _hidden(texts, 2), [_fold(pairs[count:], pairs[:count])], task.own)


# -- models -------------------------------------------------------------------------------------------------------------------


class Fold:
    """A fold of a task with its folder: what of it is trained, placed and measured."""

    def __init__(self, task: Task, number: int, folder: Path) -> None:
        self.task, self.folder = task, folder
        self.train, self.test = task.folds[number]
        self.old, self.new = np.flatnonzero(~task.hidden), np.flatnonzero(task.hidden)
        self.right = [np.array(rows, np.int64) for _, rows in self.test]

    def trained(self, name: str, of_hidden: str = "nothing") -> Bundle:
        """A model of the old items; with `of_hidden` "texts" or "everything" of all."""
        task, folder = self.task, self.folder / f"{name}-data"
        folder.mkdir()
        rows = np.arange(len(task.texts)) if of_hidden != "nothing" else self.old
        own = [(text, [row]) for row, text in enumerate(task.texts) if task.own or (of_hidden == "texts" and task.hidden[row])]
        known = set(self.old.tolist()) if of_hidden != "everything" else set(rows.tolist())
        answers = [(text, [row for row in answers if row in known]) for text, answers in self.train]
        pairs = [(text, own_row) for text, own_row in own if own_row[0] in set(rows.tolist())] + answers
        log = pl.DataFrame([(text, str(row)) for text, some in pairs for row in some], schema=["query", "item"], orient="row")
        asked = [(text, str(row)) for text, some in self.test for row in some if row in set(rows.tolist())]
        log.write_parquet(folder / "train.parquet")
        pl.DataFrame(asked, schema=["query", "item"], orient="row").write_parquet(folder / "test.parquet")
        self._items(rows).write_parquet(folder / "items.parquet")
        most = log["query"].n_unique()
        config = LinearConfig(
            algorithm="xr-linear", name="cold-start", threads=1, search=LinearSearch(beam_size=BEAM, m=M), linear=LinearOptions(),
            data=LogData(format="log", train=folder / "train.parquet", test=folder / "test.parquet", items=folder / "items.parquet"),
            text=tuple(TextBlock(unit=u, n=n, max_features=most) for u, n in (("word", 1), ("word", 2), ("char", 3))),  # type: ignore[arg-type]
        )  # fmt: skip
        work = self.folder / f"{name}-work"
        work.mkdir()
        return fit_and_export(config, self.folder / name / "1", work)

    def placed(self, model: Bundle, name: str, how: Placing) -> Bundle:
        """The hidden items in a model of the old ones."""
        self._items(self.new).write_parquet(self.folder / "new.parquet")
        return place(model.path, self.folder / "new.parquet", ("text",), self.folder / name / "2", how)

    def found(self, bundle: Bundle) -> Int64:
        """int64[B, M] item numbers, NO_ITEM where there are fewer."""
        kind = bundle.manifest.query
        if not isinstance(kind, TextKind):
            raise InvalidData("bundle", kind.kind, "a model of texts")
        engine = open_engine(bundle, "cpu")
        queries = encode_texts(kind, bundle.vectoriser, [text for text, _ in self.test])
        rows_BM = engine.search(queries, SearchParams.uniform(len(queries), BEAM, M)).item_rows_BM
        engine.close()
        number = np.array(bundle.items.ids_of(np.arange(len(bundle.items))), np.int64)
        return np.where(rows_BM >= 0, number[np.maximum(rows_BM, 0)], NO_ITEM)

    def nearest(self, model: Bundle) -> Int64:
        """Exact search by the cosine to centroids, of the same features as the model of the old items."""
        prepared = prepare(LinearConfig.model_validate(model.manifest.training))
        texts = [self.task.texts[row] for row in self.new.tolist()]
        rows = csr_array(vstack([prepared.centroids, as_matrix(model.vectoriser.transform(texts))]))
        number = np.concatenate([self.old, self.new])
        by_feature, asked = rows.T.tocsr(), as_matrix(model.vectoriser.transform([text for text, _ in self.test]))
        parts = []
        for begin in range(0, len(self.test), 256):
            cosine = (asked[begin : begin + 256] @ by_feature).toarray()
            best = np.argsort(-cosine, axis=1, kind="stable")[:, :M]
            parts.append(np.where(np.take_along_axis(cosine, best, 1) > 0, number[best], NO_ITEM))
        return np.concatenate(parts)

    def _items(self, rows: Int64) -> pl.DataFrame:
        texts = [self.task.texts[row] or None for row in rows.tolist()]
        return pl.DataFrame({"id": [str(row) for row in rows.tolist()], "text": texts}, schema={"id": pl.String, "text": pl.String})


# -- measuring ----------------------------------------------------------------------------------------------------------------


def row_of(name: str, folds: Sequence[Fold], found: Sequence[Int64], seconds: float) -> Row:
    """Recall in percent over the test queries of all folds."""
    hidden = folds[0].task.hidden
    row: Row = {"ranking": name}
    for group, wanted in (("hidden", hidden), ("old", ~hidden), ("all", np.ones_like(hidden))):
        for m in MS:
            recalls = []
            for fold, found_BM in zip(folds, found, strict=True):
                right = [rows[wanted[rows]] for rows in fold.right]
                some = np.flatnonzero([len(rows) > 0 for rows in right])
                recalls.append(precision_recall_f(found_BM[some], [right[b] for b in some.tolist()], m)[1])
            row[f"{group}@{m}"] = round(100 * float(np.concatenate(recalls).mean()), 1)
    for m in (MS[0], M):
        returned = np.concatenate([found_BM[:, :m].ravel() for found_BM in found])
        row[f"shown@{m}"] = round(100 * float(hidden[returned[returned != NO_ITEM]].mean()), 1)
    row["seconds"] = round(seconds, 1)
    return row


class Report(RowFile):
    """The rows of a set with hidden items."""

    def __init__(self, file: Path | None, task: Task) -> None:
        right = [np.array(rows) for _, test in task.folds for _, rows in test]
        super().__init__(
            file,
            {
                "set": task.name,
                "items": len(task.texts),
                "hidden": int(task.hidden.sum()),
                "test_queries": len(right),
                "test_queries_with_hidden": sum(bool(task.hidden[rows].any()) for rows in right),
            },
        )


def measure(report: Report, part: str, name: str, folds: Sequence[Fold], make: Callable[[int], tuple[Int64, float]]) -> None:
    """Make the row that the report lacks; `make`: what a fold's ranking finds, and the seconds that it took to be made."""
    if not report.has(part, ranking=name):
        found, seconds = zip(*(make(k) for k in range(len(folds))), strict=True)
        report.add(part, row_of(name, folds, found, float(np.mean(seconds))))


def run(task: Task, report: Report, work: Path, choosing: bool) -> None:
    """All rankings, or the variants of placing."""
    folds = []
    for number in range(len(task.folds)):
        folder = work / str(number)
        folder.mkdir()
        folds.append(Fold(task, number, folder))
    models: dict[int, tuple[Bundle, float]] = {}

    def timed(make: Callable[[], Bundle]) -> tuple[Bundle, float]:
        begin = time.perf_counter()
        return make(), time.perf_counter() - begin

    def model(k: int) -> Bundle:
        if k not in models:
            models[k] = timed(lambda: folds[k].trained("old"))
        return models[k][0]

    def not_placed(k: int) -> tuple[Int64, float]:
        return folds[k].found(model(k)), models[k][1]

    def placed(name: str, how: Placing) -> Callable[[int], tuple[Int64, float]]:
        def make(k: int) -> tuple[Int64, float]:
            before = model(k)
            bundle, seconds = timed(lambda: folds[k].placed(before, name.replace(" ", "-"), how))
            return folds[k].found(bundle), seconds

        return make

    def retrained(of_hidden: str) -> Callable[[int], tuple[Int64, float]]:
        def make(k: int) -> tuple[Int64, float]:
            bundle, seconds = timed(lambda: folds[k].trained(of_hidden, of_hidden))
            return folds[k].found(bundle), seconds

        return make

    if choosing:
        measure(report, "choose", "not placed", folds, not_placed)
        for name, how in VARIANTS.items():
            measure(report, "choose", name, folds, placed(name, how))
        return
    measure(report, "rows", "not placed", folds, not_placed)
    measure(report, "rows", "placed", folds, placed("placed", Placing()))
    measure(report, "rows", "placed, own text alone", folds, placed("own", Placing(share=0)))
    measure(report, "rows", "retrained with own texts", folds, retrained("texts"))
    measure(report, "rows", "retrained with everything", folds, retrained("everything"))
    measure(report, "rows", "cosine to centroids", folds, lambda k: (folds[k].nearest(model(k)), 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the sets")
    parser.add_argument("--set", choices=SETS, required=True)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where models lie meanwhile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        task = read_set(args.data, args.set, args.choose)
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            run(task, Report(args.json, task), Path(folder), args.choose)
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
