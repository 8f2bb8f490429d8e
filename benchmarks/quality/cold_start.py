"""Cold starts: items that a trained model of texts has never seen, placed into it by `python -m training place`.

    python -m benchmarks.cold_start --data DIR --set debian-depends|psearch [--choose] --json F

A tenth of the items that have a text of their own is hidden, drawn by a seed: no training query has them as an answer, and no own text of
theirs is a training query. Then they come as new items, with their text.

debian-depends  a package's description → what it depends on, of packages with at least 3 dependants; an item's own text is the
                description of the package of that name (those without one are never hidden). A tenth of the descriptions are the test
                queries. The description of a hidden item may be a training query, with what it depends on itself as the answers.
psearch         a shop's query → products judged 3 or 4 of 4 by people; an item's own text is its title, and the titles of all items that
                are not hidden are training queries beside the queries of four fifths of the log; each fifth is tested in turn.

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
training queries, and tries variants of how items are placed; espalier/placement/linear_rows.py does what it came to.

Rows are printed as they come and kept in the file, whose rows are not made again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from benchmarks.quality.cold_start_sets import SETS, Task, read_set
from benchmarks.text.report import RowFile
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError, InvalidData
from espalier.metrics import precision_recall_f
from espalier.placement.linear_rows import Placing
from espalier.queries import TextKind, encode_texts
from espalier.search import NO_ITEM, SearchParams
from espalier.text.blocks import TextBlock
from training.data.csr import as_matrix
from training.linear.placing import place
from training.linear.prepare import prepare
from training.linear.run import fit_and_export
from training.specification.linear import LinearConfig, LinearOptions, LinearSearch, LogData
from training.specification.models import config_of

Int64 = NDArray[np.int64]
Row = dict[str, Any]
Ranking = Callable[[int], tuple[Int64, float]]
"""What a ranking finds for the test queries of a fold, and the seconds that its bundle took."""
MS = (10, 50, 100)
BEAM, M = 50, max(MS)
VARIANTS: dict[str, Placing] = {
    "as it is": Placing(),
    **{f"room {value}": Placing(room=value) for value in (2, 16)},
    **{f"neighbours {value}": Placing(neighbours=value) for value in (1, 10)},
    **{f"share {value:g}": Placing(share=value) for value in (0, 0.25, 1)},
    **{f"bias_quantile {value:g}": Placing(bias_quantile=value) for value in (0.1, 0.4, 0.5)},
}


# -- models -------------------------------------------------------------------------------------------------------------------


class Fold:
    """A fold of a task with its folder: what of it is trained, placed and measured."""

    def __init__(self, task: Task, number: int, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
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
        test = [(text, str(row)) for text, some in self.test for row in some if row in set(rows.tolist())]
        log.write_parquet(folder / "train.parquet")
        pl.DataFrame(test, schema=["query", "item"], orient="row").write_parquet(folder / "test.parquet")
        self._items(rows).write_parquet(folder / "items.parquet")
        most = log["query"].n_unique()
        config = LinearConfig(
            name="cold-start", search=LinearSearch(beam_size=BEAM, m=M), linear=LinearOptions(),
            data=LogData(format="log", train=folder / "train.parquet", test=folder / "test.parquet", items=folder / "items.parquet"),
            text=tuple(TextBlock(unit=u, n=n, max_features=most) for u, n in (("word", 1), ("word", 2), ("char", 3))),  # type: ignore[arg-type]
        )  # fmt: skip
        work = self.folder / f"{name}-work"
        work.mkdir()
        return fit_and_export(config, self.folder / name / "1", work, threads=1)

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
        prepared = prepare(config_of(model.manifest, LinearConfig))
        texts = [self.task.texts[row] for row in self.new.tolist()]
        rows = csr_array(vstack([prepared.centroids, as_matrix(model.vectoriser.transform(texts))]))
        number = np.concatenate([self.old, self.new])
        by_feature, queries = rows.T.tocsr(), as_matrix(model.vectoriser.transform([text for text, _ in self.test]))
        parts = []
        for begin in range(0, len(self.test), 256):
            cosine = (queries[begin : begin + 256] @ by_feature).toarray()
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


def measure(report: Report, part: str, name: str, folds: Sequence[Fold], make: Ranking) -> None:
    """Make the row unless the report has it."""
    if not report.has(part, ranking=name):
        found, seconds = zip(*(make(k) for k in range(len(folds))), strict=True)
        report.add(part, row_of(name, folds, found, float(np.mean(seconds))))


class Rankings:
    """The rankings of all folds of a task; each gives what a fold's test queries find, and the seconds that its bundle took."""

    def __init__(self, task: Task, work: Path) -> None:
        self.folds = [Fold(task, number, work / str(number)) for number in range(len(task.folds))]
        self._old: dict[int, tuple[Bundle, float]] = {}

    def old(self, k: int) -> tuple[Bundle, float]:
        """The model of the old items of fold k, trained once."""
        if k not in self._old:
            self._old[k] = _timed(lambda: self.folds[k].trained("old"))
        return self._old[k]

    def not_placed(self, k: int) -> tuple[Int64, float]:
        bundle, seconds = self.old(k)
        return self.folds[k].found(bundle), seconds

    def placed(self, name: str, how: Placing) -> Ranking:
        def make(k: int) -> tuple[Int64, float]:
            before, _ = self.old(k)
            bundle, seconds = _timed(lambda: self.folds[k].placed(before, name.replace(" ", "-"), how))
            return self.folds[k].found(bundle), seconds

        return make

    def retrained(self, of_hidden: str) -> Ranking:
        def make(k: int) -> tuple[Int64, float]:
            bundle, seconds = _timed(lambda: self.folds[k].trained(of_hidden, of_hidden))
            return self.folds[k].found(bundle), seconds

        return make

    def nearest(self, k: int) -> tuple[Int64, float]:
        return self.folds[k].nearest(self.old(k)[0]), 0.0


def _timed(make: Callable[[], Bundle]) -> tuple[Bundle, float]:
    begin = time.perf_counter()
    return make(), time.perf_counter() - begin


def run(task: Task, report: Report, work: Path, choosing: bool) -> None:
    """All rankings, or the variants of placing."""
    rankings = Rankings(task, work)
    made: dict[str, Ranking] = {"not placed": rankings.not_placed}
    if choosing:
        made |= {name: rankings.placed(name, how) for name, how in VARIANTS.items()}
    else:
        made |= {
            "placed": rankings.placed("placed", Placing()),
            "placed, own text alone": rankings.placed("own", Placing(share=0)),
            "retrained with own texts": rankings.retrained("texts"),
            "retrained with everything": rankings.retrained("everything"),
            "cosine to centroids": rankings.nearest,
        }
    for name, make in made.items():
        measure(report, "choose" if choosing else "rows", name, rankings.folds, make)


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
