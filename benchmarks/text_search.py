"""Search for items by text: XR-Linear beside BM25, centroids, neighbours, DSSM and one-versus-all, on the same training pairs.

    python -m benchmarks.text_search --data DIR --set debian-describe|debian-depends|psearch [--systems a,b,…] --json F
    python -m benchmarks.text_search --data DIR --set NAME --sweep beam|threshold --json F [--plot F.png]
    python -m benchmarks.text_search --data DIR --set NAME --choose --json F

The protocol is that of Chang et al. 2021 (papers' product search), Tables 2 to 4 and Figure 4; the sets are what is at hand, and none is a
shop's log:

debian-describe  a part of a package's description → the package. Training queries: the first 12 words of each description, and the
                 package's name with its section; test queries: words 13 to 36 of 5,000 packages that have at least 24. No test text is a
                 training text. Right is every package whose description has these same words there, as packages of one source do. It is a
                 set of *lexical* search: two short texts an item, one item a text, nobody's clicks. Nothing here can be learned from
                 behaviour, which is what the paper's method is for.
debian-depends   a package's description → the packages that it depends on, of those with at least 3 dependants; a tenth of the describing
                 packages is held out. The words of a description are not those of what is depended on, so that relations have to be
                 learned. Packages of one source share sentences and dependencies, and are on both sides of the split, which favours
                 neighbours: `recall100_apart` is over the test queries that share no run of 8 words with a training query.
psearch          a shop's query → products judged 3 or 4 of 4 by people. 261 queries are too few to learn from, and each product was judged
                 for the query that found it: the queries are dealt into 5 folds, all products' titles and the queries of four folds are
                 training queries, the fifth fold is asked. So nearly every right answer has its own title as its only training text:
                 a set of cold starts. Products that nobody judged for a query count as wrong. Figures are over all queries of the 5 folds.

All systems learn from the same pairs. Recall is the mean over test queries. ms_p50 is the median over single test queries on one thread,
from the text to 100 item rows. train_cpu_s is CPU time of reading texts and training (compiled code from its cache; HNSW's index counts).
model_mb is what lies on disk (XR-Linear's bundle, with item ids and held-out queries) or the arrays that a search reads. XR-Linear is
searched by the product's engine, from a bundle written by the product's exporter. BM25 wants `pip install bm25s`; a system that cannot run
is named and left out. N-gram configurations take most frequent ones, in shares of T = 2 · training texts: words T · words and pairs T / 2
each · T each · words, pairs and character trigrams T / 2 each.

--choose trains variants on a part of the training data and judges them by the rest: debian-describe on the first 6 words and names, judged
by words 7 to 12; debian-depends on nine tenths of its training packages; psearch on all titles and three of the four folds' queries, once
for all folds, so that these 51 queries are test queries of other folds.
--sweep prunes one trained model, or searches it with several beams.

Rows are printed as they come and kept in the file, whose rows are not made again. Legend: B queries, I items, M results, F features.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.util
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from espalier.bundle import Bundle
from espalier.chunks import Chunks
from espalier.errors import EspalierError, InvalidConfig, InvalidData
from espalier.metrics import precision_recall_f
from espalier.queries import TextBlock, TextKind, encode_texts
from espalier.search import NO_ITEM, Engine, SearchParams, open_engine
from espalier.sparse import SparseRows
from espalier.text import Vectoriser, normalise
from espalier.tree import Tree
from loadtest.hardware import hardware
from training.baselines.ann import AnnIndex, faiss_is_installed
from training.data.query_logs import LabelledTexts, labelled
from training.data.xmc import LabelledPoints
from training.linear.config import LinearConfig, LinearOptions, LinearSearch, LinearTree, LogData
from training.linear.export import export
from training.linear.fit import fit_linear
from training.linear.label_features import pifa
from training.linear.prepare import Prepared, prepare
from training.trees.hierarchical_kmeans import hierarchical_kmeans

Int64 = NDArray[np.int64]
Row = dict[str, Any]
Find = Callable[[str], Int64]
"""A text → int64[≤ M] item rows, best first."""

MS = (10, 50, 100)
M = max(MS)
BEAMS = (10, 50)
CHOOSE_BEAMS = (*BEAMS, 400)
SWEEP_BEAMS = (1, 5, 10, 15, 20, 25, 30, 50, 75, 100)
SWEEP_THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.45)
TEXTS = ("words", "words+pairs", "words+pairs more", "words+pairs+trigrams")
KNOWN_ONLY = ", unknown 0"
NEIGHBOURS = 50
RUN = 8
"""Words in a row that two texts share when they are not `apart`."""
MOST_LABELS = 10_000
"""For one-versus-all."""
FOLDS = 5
TEST_ITEMS = 5000
SETS = {
    "debian-describe": "xmc-debian-bookworm/packages.tsv.gz",
    "debian-depends": "xmc-debian-bookworm/packages.tsv.gz",
    "psearch": "psearch-crowdflower/crowdflower_train.csv.gz",
}
WORD = re.compile(r"\w+")


# -- sets -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fold:
    """Training pairs, and test texts with the item rows that are right; `apart`: those that share no run of words with training texts."""

    train: LabelledTexts
    texts: list[str]
    relevant: list[Int64]
    apart: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Task:
    """own_texts: each item's own text, which only DSSM's item tower reads."""

    name: str
    own_texts: list[str]
    folds: list[Fold]


def read_set(folder: Path, name: str, choosing: bool = False) -> Task:
    """A named set; `choosing`: one made of its training data alone. Raises InvalidData where its file is missing."""
    file = folder / SETS[name]
    if not file.is_file():
        raise InvalidData("--data", str(folder), f"a folder that holds {SETS[name]}, the file of the set {name}")
    with gzip.open(file, "rb") as stream:
        frame = pl.read_csv(
            io.BytesIO(stream.read()),
            separator="\t" if ".tsv" in file.name else ",",
            quote_char=None if ".tsv" in file.name else '"',
            infer_schema=False,
        )
    return {"debian-describe": describe, "debian-depends": depends, "psearch": psearch}[name](frame, choosing)


def describe(frame: pl.DataFrame, choosing: bool = False) -> Task:
    """Part of a description → the package."""
    begin, first, least, end = (0, 6, 12, 12) if choosing else (0, 12, 24, 36)
    words = [text.split() for text in frame["description"].fill_null("").to_list()]
    names = [f"{name} {section}" for name, section in frame.select("package", "section").iter_rows()]
    pairs = [(" ".join(own[begin:first]), row) for row, own in enumerate(words) if own] + [(name, row) for row, name in enumerate(names)]
    train = _pairs(pairs)
    known = set(train.texts)
    same: dict[str, list[int]] = defaultdict(list)
    for row, own in enumerate(words):
        if len(own) >= least:
            same[" ".join(own[first:end])].append(row)
    askable = [row for row, own in enumerate(words) if len(own) >= least and " ".join(own[first:end]) not in known]
    chosen = np.sort(np.random.default_rng(0).permutation(askable)[:TEST_ITEMS]).tolist()
    texts = list(dict.fromkeys(" ".join(words[row][first:end]) for row in chosen))
    return Task("debian-describe", names, [_fold(train, texts, [np.array(same[text]) for text in texts])])


def depends(frame: pl.DataFrame, choosing: bool = False) -> Task:
    """A description → what the package depends on."""
    needs = [sorted(set(filter(None, (value or "").split(",")))) for value in frame["depends"].to_list()]
    dependants = Counter(name for own in needs for name in own)
    items = sorted(name for name, count in dependants.items() if count >= 3)
    row_of = {name: row for row, name in enumerate(items)}
    texts = frame["description"].fill_null("").to_list()
    known = [(text, [row_of[name] for name in own if name in row_of]) for text, own in zip(texts, needs, strict=True)]
    known = [(text, rows) for text, rows in known if rows and text]
    order = np.random.default_rng(0).permutation(len(known))
    test, training = np.split(order, [len(known) // 10])
    if choosing:
        test, training = np.split(training, [len(training) // 10])
    train = _pairs([(known[b][0], row) for b in np.sort(training).tolist() for row in known[b][1]])
    trained = set(train.texts)
    asked = {known[b][0]: np.array(known[b][1]) for b in np.sort(test).tolist() if known[b][0] not in trained}
    # An item whose dependants are all held out cannot be found: it stays, as the paper's cold starts do.
    return Task("debian-depends", items, [_fold(train, list(asked), list(asked.values()))])


def psearch(frame: pl.DataFrame, choosing: bool = False) -> Task:
    """A shop's query → the products that people judged to be right."""
    titles = list(dict.fromkeys(frame["product_title"].to_list()))
    row_of = {title: row for row, title in enumerate(titles)}
    right: dict[str, set[int]] = defaultdict(set)
    for query, title, relevance in frame.select("query", "product_title", "median_relevance").iter_rows():
        if float(relevance) >= 3:
            right[query].add(row_of[title])
    queries = [sorted(right)[b] for b in np.random.default_rng(0).permutation(len(right))]
    own = list(row_of.items())
    folds = []
    for fold in range(FOLDS):
        test = queries[fold::FOLDS]
        training = [query for query in queries if query not in set(test)]
        if choosing:
            test, training = training[: len(training) // 4], training[len(training) // 4 :]
        train = _pairs(own + [(query, row) for query in training for row in sorted(right[query])])
        folds.append(_fold(train, test, [np.array(sorted(right[query])) for query in test]))
    return Task("psearch", titles, folds[:1] if choosing else folds)


def _pairs(pairs: Sequence[tuple[str, int]]) -> LabelledTexts:
    frame = pl.DataFrame({"query": [text for text, _ in pairs], "item": [str(row) for _, row in pairs]}).with_columns(weight=pl.lit(1.0))
    return labelled(frame, {str(row): row for row in range(1 + max(row for _, row in pairs))})


def _fold(train: LabelledTexts, texts: list[str], relevant: list[Int64]) -> Fold:
    seen = {run for text in train.texts for run in _runs(text)}
    return Fold(train, texts, [rows.astype(np.int64) for rows in relevant], np.array([seen.isdisjoint(_runs(text)) for text in texts]))


def _runs(text: str) -> set[int]:
    words = WORD.findall(text.lower())
    return {hash(tuple(words[k : k + RUN])) for k in range(len(words) - RUN + 1)}


# -- XR-Linear ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """One configuration of a trained system."""

    config: str
    find: Find
    model_mb: float
    train_cpu_s: float
    close: Callable[[], object] = lambda: None


NO_PRIOR = LinearOptions(prior=0)


@dataclass(frozen=True)
class Recipe:
    """How XR-Linear is trained. No whole tree: all items are children of the root.

    unknown  0: n-grams outside the vocabulary are nothing; 1: they are one feature that all share
    """

    texts: str = "words+pairs+trigrams"
    options: LinearOptions = NO_PRIOR
    tree: LinearTree = field(default_factory=LinearTree)
    whole_tree: bool = True
    unknown: int = 1


LOW_COST = LinearOptions(cost=0.1, threshold=0.01, prior=0)
CHOSEN: dict[str, Recipe] = {
    "psearch": Recipe(options=LOW_COST, unknown=0),
}
"""What --choose came to; see benchmarks/results."""


WITH_PRIOR: dict[str, Recipe] = {
    "psearch": Recipe(options=LinearOptions(prior=8, cost=0.03), unknown=0),
    "debian-depends": Recipe(options=LinearOptions(prior=4, cost=0.1, negatives="teacher"), unknown=0),
    "debian-describe": Recipe(options=LinearOptions(prior=2), unknown=0),
}
"""Weights drawn to the centroids, with options that were chosen on validation queries as `choose` makes them."""


def blocks_of(texts: str, train: LabelledTexts, unknown: int = 1) -> tuple[TextBlock, ...]:
    """The n-grams of a text configuration; see the module."""
    most = 2 * len(train)
    shares = {"words": (most, 0, 0), "words+pairs": (most // 2, most // 2, 0), "words+pairs more": (most, most, 0)}
    counts = shares.get(texts, (most // 2,) * 3)
    kinds: tuple[tuple[Literal["word", "char"], int], ...] = (("word", 1), ("word", 2), ("char", 3))
    return tuple(
        TextBlock(unit=unit, n=n, max_features=count, unknown=unknown) for (unit, n), count in zip(kinds, counts, strict=True) if count
    )


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained model before it is written."""

    config: LinearConfig
    prepared: Prepared
    tree: Tree
    chunks: Chunks
    train_cpu_s: float

    def write(self, folder: Path) -> Bundle:
        return export(self.config, self.prepared, self.tree, self.chunks, folder / "text-search" / "1")


def fit(task: Task, fold: Fold, recipe: Recipe, folder: Path) -> Fitted:
    """Train as `training.linear.run` does, from a log in `folder`."""
    width = len(str(len(task.own_texts)))
    ids = [f"{row:0{width}d}" for row in range(len(task.own_texts))]
    _log(fold.train.texts, [fold.train.labels[a:b] for a, b in _spans(fold.train)], ids).write_parquet(folder / "train.parquet")
    _log(fold.texts, fold.relevant, ids).write_parquet(folder / "test.parquet")
    pl.DataFrame({"id": ids}).write_parquet(folder / "items.parquet")
    data = LogData(format="log", train=folder / "train.parquet", test=folder / "test.parquet", items=folder / "items.parquet")
    config = LinearConfig(
        algorithm="xr-linear", name="text-search", threads=1, data=data, text=blocks_of(recipe.texts, fold.train, recipe.unknown),
        tree=recipe.tree, linear=recipe.options, search=LinearSearch(m=M),
    )  # fmt: skip
    begin = time.process_time()
    prepared = prepare(config)
    branching, max_leaf = (recipe.tree.branching, recipe.tree.max_leaf) if recipe.whole_tree else (2, max(2, len(ids)))
    tree = hierarchical_kmeans(prepared.labels, branching, max_leaf, config.seed)
    chunks = fit_linear(prepared.train, tree, config.linear, 1, config.seed, centroids=prepared.centroids)
    return Fitted(config, prepared, tree, chunks, time.process_time() - begin)


def _log(texts: Sequence[str], rows: Iterable[NDArray[Any]], ids: Sequence[str]) -> pl.DataFrame:
    return pl.DataFrame({"query": texts, "item": [[ids[row] for row in own.tolist()] for own in rows]}).explode("item")


def _spans(texts: LabelledTexts) -> list[tuple[int, int]]:
    return list(itertools.pairwise(texts.labels_from.tolist()))


def engine_find(engine: Engine, bundle: Bundle, beam: int) -> Find:
    kind, vectoriser = bundle.manifest.query, bundle.vectoriser
    if not isinstance(kind, TextKind) or vectoriser is None:
        raise InvalidData("bundle", kind.kind, "a model of texts")
    return lambda text: engine.search(encode_texts(kind, vectoriser, [text]), SearchParams.uniform(1, beam, M)).item_rows_BM[0]


def xr_linear(recipe: Recipe, beams: Sequence[int], named: str, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    fitted = fit(task, fold, recipe, folder)
    bundle = fitted.write(folder)
    engine = open_engine(bundle, "cpu")
    return [
        Trained(f"{named}, beam {beam}", engine_find(engine, bundle, beam), disk_mb(bundle), fitted.train_cpu_s, engine.close)
        for beam in beams
    ]


def one_versus_all(texts: str, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    if len(task.own_texts) > MOST_LABELS:
        raise InvalidData(
            "items", len(task.own_texts), f"at most {MOST_LABELS} for one-versus-all, whose training is theirs times the points"
        )
    fitted = fit(task, fold, Recipe(texts, whole_tree=False), folder)
    bundle = fitted.write(folder)
    engine = open_engine(bundle, "cpu")
    return [Trained(texts, engine_find(engine, bundle, 1), disk_mb(bundle), fitted.train_cpu_s, engine.close)]


def disk_mb(bundle: Bundle) -> float:
    return sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file()) / 1e6


def pruned(chunks: Chunks, threshold: float) -> Chunks:
    """The chunks without weights below the threshold."""
    keep = np.abs(chunks.entry_weight) >= threshold
    counts = np.bincount(np.repeat(np.arange(len(chunks.row_feature)), np.diff(chunks.row_entry))[keep], minlength=len(chunks.row_feature))
    used = counts > 0
    return replace(
        chunks,
        chunk_row=np.concatenate([[0], np.cumsum(used)])[chunks.chunk_row].astype(np.int64),
        row_feature=chunks.row_feature[used],
        row_entry=np.concatenate([[0], np.cumsum(counts[used])]).astype(np.int64),
        entry_child=chunks.entry_child[keep],
        entry_weight=chunks.entry_weight[keep],
    )


# -- cheap baselines --------------------------------------------------------------------------------------------------------


def bm25(task: Task, fold: Fold, folder: Path) -> list[Trained]:
    """Okapi BM25 of an item's training texts, one after the other."""
    if importlib.util.find_spec("bm25s") is None:
        raise InvalidConfig("--systems", "bm25", "the package bm25s (pip install bm25s)")
    library: Any = importlib.import_module("bm25s")
    begin = time.process_time()
    documents: list[list[str]] = [[] for _ in task.own_texts]
    for text, (a, b) in zip(fold.train.texts, _spans(fold.train), strict=True):
        words = WORD.findall(normalise(text))
        for row in fold.train.labels[a:b].tolist():
            documents[row] += words
    index = library.BM25(k1=1.5, b=0.75)
    index.index(documents, show_progress=False)
    seconds = time.process_time() - begin
    vocabulary = set(index.vocab_dict)

    def find(text: str) -> Int64:
        words = [word for word in WORD.findall(normalise(text)) if word in vocabulary]
        if not words:
            return np.empty(0, np.int64)
        scores = index.get_scores(words)
        rows = np.flatnonzero(scores)
        return rows[best(scores[rows])]

    arrays = sum(value.nbytes for value in index.scores.values() if isinstance(value, np.ndarray))
    return [Trained("k1 1.5, b 0.75", find, arrays / 1e6, seconds)]


def best(scores: NDArray[Any], m: int = M) -> Int64:
    """The positions of the m largest, largest first; ties by position."""
    if len(scores) > m:
        kept = np.sort(np.argpartition(-scores, m - 1)[:m])
        return kept[np.argsort(-scores[kept], kind="stable")]
    return np.argsort(-scores, kind="stable")


def as_matrix(rows: SparseRows) -> csr_array[Any, tuple[int, int]]:
    return csr_array((rows.values, rows.indices, rows.indptr), shape=(len(rows), rows.width))


def _mb(vectoriser: Vectoriser, *matrices: csr_array[Any, tuple[int, int]]) -> float:
    arrays = [*vectoriser.arrays().values(), *(array for matrix in matrices for array in (matrix.data, matrix.indices, matrix.indptr))]
    return sum(array.nbytes for array in arrays) / 1e6


def centroid(texts: str, task: Task, fold: Fold, folder: Path, unknown: int = 1) -> list[Trained]:
    """The cosine to the normalised sum of an item's training queries, as an inverted index."""
    begin = time.process_time()
    vectoriser = Vectoriser.fit(fold.train.texts, blocks_of(texts, fold.train, unknown))
    centroids = pifa(points_of(vectoriser, fold.train, len(task.own_texts)))
    by_feature = as_matrix(centroids).T.tocsr()
    seconds = time.process_time() - begin

    def find(text: str) -> Int64:
        scores = as_matrix(vectoriser.transform([text])) @ by_feature
        rows: Int64 = scores.indices.astype(np.int64)
        return rows[best(scores.data)]

    return [Trained(texts + KNOWN_ONLY * (unknown == 0), find, _mb(vectoriser, by_feature), seconds)]


def neighbours(texts: str, task: Task, fold: Fold, folder: Path, unknown: int = 1) -> list[Trained]:
    """The nearest training queries by the cosine vote for their items with it."""
    begin = time.process_time()
    vectoriser = Vectoriser.fit(fold.train.texts, blocks_of(texts, fold.train, unknown))
    points = points_of(vectoriser, fold.train, len(task.own_texts))
    by_feature = as_matrix(points.points).T.tocsr()
    seconds = time.process_time() - begin
    labels_from, labels = points.labels_from, points.labels

    def find(text: str) -> Int64:
        scores = as_matrix(vectoriser.transform([text])) @ by_feature
        nearest = best(scores.data, NEIGHBOURS)
        near = scores.indices[nearest]
        if not len(near):
            return np.empty(0, np.int64)
        own = [labels[labels_from[b] : labels_from[b + 1]] for b in near.tolist()]
        rows, place = np.unique(np.concatenate(own), return_inverse=True)
        votes = np.bincount(place, np.repeat(scores.data[nearest], [len(rows) for rows in own]))
        return rows[best(votes)].astype(np.int64)

    return [
        Trained(
            texts + KNOWN_ONLY * (unknown == 0), find, _mb(vectoriser, by_feature) + (labels.nbytes + labels_from.nbytes) / 1e6, seconds
        )
    ]


def points_of(vectoriser: Vectoriser, texts: LabelledTexts, items: int) -> LabelledPoints:
    return LabelledPoints(vectoriser.transform(texts.texts), texts.labels_from, texts.labels, items, texts.weights)


def fused(ours: Trained, theirs: Trained) -> Trained:
    """Two systems' lists by reciprocal ranks: Σ 1 / (60 + rank) (Cormack et al. 2009)."""

    def find(text: str) -> Int64:
        lists = [found[found != NO_ITEM] for found in (ours.find(text), theirs.find(text))]
        rows, place = np.unique(np.concatenate(lists), return_inverse=True)
        worth = np.concatenate([1 / (61.0 + np.arange(len(found))) for found in lists])
        return rows[best(np.bincount(place, worth, len(rows)))]

    return Trained(ours.config, find, ours.model_mb + theirs.model_mb, ours.train_cpu_s + theirs.train_cpu_s, ours.close)


def with_centroids(recipe: Recipe, beam: int, named: str, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    """XR-Linear fused with the centroids of the same n-grams."""
    return [fused(xr_linear(recipe, [beam], named, task, fold, folder)[0], centroid(recipe.texts, task, fold, folder, recipe.unknown)[0])]


# -- DSSM -------------------------------------------------------------------------------------------------------------------

DIM, BUCKETS, BATCH = 128, 1 << 17, 512
EF_SEARCH = (100, 400)


@cache
def word_features(word: str) -> tuple[int, ...]:
    """The buckets of a word and of its character trigrams."""
    padded = f" {word} "
    grams = [f"w{word}", *(padded[k : k + 3] for k in range(len(padded) - 2))]
    return tuple(zlib.crc32(gram.encode()) % BUCKETS for gram in grams)


class TwoTowers(torch.nn.Module):
    """⟨q/‖q‖, v⟩ / τ with q = A·mean of the text's rows, v = B·mean of the item's own text's rows + a row of the item's own.

    As in Nigam et al. 2019 a shallow encoder with hashed words and trigrams, but with a softmax over the items of the batch, corrected by
    how often they come (Yi et al. 2019), and with the item's own row, without which items are only what they are called.
    """

    def __init__(self, items: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = torch.nn.EmbeddingBag(BUCKETS, DIM, mode="mean", sparse=True)
        self.own = torch.nn.Embedding(items, DIM, sparse=True)
        torch.nn.init.normal_(self.rows.weight, std=0.1)
        torch.nn.init.zeros_(self.own.weight)
        self.of_query, self.of_item = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)
        self.temperature = 0.05

    def queries(self, bags: Sequence[Int64]) -> torch.Tensor:
        return torch.nn.functional.normalize(self.of_query(self._means(bags)), dim=1)

    def items(self, rows: Int64, bags: Sequence[Int64]) -> torch.Tensor:
        vectors: torch.Tensor = self.of_item(self._means(bags)) + self.own(torch.from_numpy(rows))
        return vectors

    def _means(self, bags: Sequence[Int64]) -> torch.Tensor:
        begin = np.cumsum([0, *map(len, bags)])[:-1]
        means: torch.Tensor = self.rows(torch.from_numpy(np.concatenate(bags)), torch.from_numpy(begin))
        return means


def bag_of(text: str) -> Int64:
    return np.array([f for word in WORD.findall(normalise(text)) for f in word_features(word)] or [0], np.int64)


def train_towers(task: Task, fold: Fold, item_bags: Sequence[Int64], cpu_s: float, most_epochs: int = 20) -> TwoTowers:
    """At most `cpu_s` CPU seconds, or epochs, over all training texts, each with one of its items at a time."""
    begin = time.process_time()
    model = TwoTowers(len(task.own_texts))
    bags = [bag_of(text) for text in fold.train.texts]
    first, labels = fold.train.labels_from, fold.train.labels.astype(np.int64)
    counts = np.diff(first)
    pairs = np.repeat(np.arange(len(bags)), counts) * len(task.own_texts) + labels  # ascending
    often = np.bincount(labels, np.repeat(1 / counts, counts), len(task.own_texts)).clip(1e-3) / len(bags)
    log_often = torch.from_numpy(np.log(often)).float()
    sparse = torch.optim.SparseAdam([*model.rows.parameters(), *model.own.parameters()], lr=3e-3)
    dense = torch.optim.Adam([*model.of_query.parameters(), *model.of_item.parameters()], lr=1e-3)
    rng = np.random.default_rng(0)
    for epoch in range(most_epochs):
        order = rng.permutation(len(bags))
        losses: list[float] = []
        for start in range(0, len(order), BATCH):
            if time.process_time() - begin > cpu_s:
                print(f"  DSSM ends in epoch {epoch + 1}, {time.process_time() - begin:.0f} CPU s", flush=True)
                return model
            chosen = order[start : start + BATCH]
            rows = labels[first[chosen] + (rng.random(len(chosen)) * counts[chosen]).astype(np.int64)]
            queries, items = model.queries([bags[b] for b in chosen]), model.items(rows, [item_bags[row] for row in rows])
            wanted = chosen[:, None] * len(task.own_texts) + rows[None]
            right = pairs[np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)] == wanted
            np.fill_diagonal(right, False)
            logits = queries @ items.T / model.temperature - log_often[rows]
            loss = torch.nn.functional.cross_entropy(logits.masked_fill(torch.from_numpy(right), -1e9), torch.arange(len(rows)))
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            sparse.step()  # type: ignore[no-untyped-call]
            dense.step()
            losses.append(loss.item())
        print(f"  DSSM epoch {epoch + 1}: loss {np.mean(losses):.3f}, {time.process_time() - begin:.0f} CPU s", flush=True)
    return model


def dssm(cpu_s: float, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    torch.set_num_threads(1)
    begin = time.process_time()
    item_bags = [bag_of(text) for text in task.own_texts]
    model = train_towers(task, fold, item_bags, cpu_s)
    items = len(task.own_texts)
    with torch.inference_mode():
        parts = [np.arange(start, min(start + 4096, items)) for start in range(0, items, 4096)]
        vectors = np.concatenate([model.items(rows, [item_bags[row] for row in rows]).numpy() for rows in parts])
    seconds = time.process_time() - begin

    def encode(text: str) -> NDArray[np.float32]:
        with torch.inference_mode():
            return model.queries([bag_of(text)]).numpy()

    def exact(text: str) -> Int64:
        return best((encode(text) @ vectors.T)[0])

    mb = (vectors.nbytes + 4 * (BUCKETS * DIM + DIM * DIM + DIM)) / 1e6
    trained = [Trained("exact", exact, mb, seconds)]
    if not faiss_is_installed():
        print("dssm, HNSW is left out: faiss is not installed (pip install -e '.[ann]' -c constraints.txt)", flush=True)
        return trained
    begin = time.process_time()
    index = AnnIndex("hnsw", vectors)
    seconds += time.process_time() - begin

    def near(effort: int, text: str) -> Int64:
        found: Int64 = index.search(encode(text), M, effort)[0]
        return found

    mb += items * 4 * (1 + 2 * 32) / 1e6  # 64 links of an item on the lowest layer
    return trained + [Trained(f"HNSW, efSearch {effort}", partial(near, effort), mb, seconds) for effort in EF_SEARCH]


# -- measuring ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A system with the configurations that one training gives, in this order."""

    system: str
    configs: tuple[str, ...]
    train: Callable[[Task, Fold, Path], list[Trained]]


def jobs_of(name: str, dssm_cpu_s: float = 240) -> list[Job]:
    def beams(named: str) -> tuple[str, ...]:
        return tuple(f"{named}, beam {beam}" for beam in BEAMS)

    cheap, most = (TEXTS[0], TEXTS[3]), TEXTS[3]
    known = most + KNOWN_ONLY
    jobs = [Job("centroid", (texts,), partial(centroid, texts)) for texts in cheap]
    jobs.append(Job("centroid", (known,), partial(centroid, most, unknown=0)))
    jobs += [Job("neighbours", (texts,), partial(neighbours, texts)) for texts in cheap]
    jobs.append(Job("neighbours", (known,), partial(neighbours, most, unknown=0)))
    jobs.append(Job("bm25", ("k1 1.5, b 0.75",), bm25))
    jobs += [Job("xr-linear", beams(texts), partial(xr_linear, Recipe(texts), BEAMS, texts)) for texts in TEXTS]
    jobs.append(Job("xr-linear", beams(known), partial(xr_linear, Recipe(most, unknown=0), BEAMS, known)))
    if name in WITH_PRIOR:
        jobs.append(Job("xr-linear", beams("prior"), partial(xr_linear, WITH_PRIOR[name], BEAMS, "prior")))
    jobs.append(Job("dssm", ("exact", *(f"HNSW, efSearch {effort}" for effort in EF_SEARCH)), partial(dssm, dssm_cpu_s)))
    jobs.append(Job("fused", beams(TEXTS[0])[-1:], partial(with_centroids, Recipe(TEXTS[0]), BEAMS[-1], TEXTS[0])))
    jobs += [Job("one-versus-all", (texts,), partial(one_versus_all, texts)) for texts in cheap]
    if name in CHOSEN:
        jobs.append(Job("xr-linear", beams("chosen"), partial(xr_linear, CHOSEN[name], BEAMS, "chosen")))
        jobs.append(Job("fused", beams("chosen")[-1:], partial(with_centroids, CHOSEN[name], BEAMS[-1], "chosen")))
    return jobs


def measure(find: Find, fold: Fold) -> tuple[dict[int, NDArray[np.float64]], NDArray[np.float64]]:
    """Recall of every test query by m, and its milliseconds."""
    found_BM = np.full((len(fold.texts), M), NO_ITEM, np.int64)
    ms_B = np.zeros(len(fold.texts))
    for text in fold.texts[:20]:
        find(text)
    for b, text in enumerate(fold.texts):
        begin = time.perf_counter()
        found = find(text)
        ms_B[b] = (time.perf_counter() - begin) * 1e3
        found_BM[b, : len(found)] = found
    return {m: precision_recall_f(found_BM, fold.relevant, m)[1] for m in MS}, ms_B


def row_of(parts: Sequence[tuple[Trained, Fold]], system: str) -> Row:
    """The row of one configuration, trained on every fold: recall and milliseconds over all test queries, the rest a mean over folds."""
    measured = [measure(trained.find, fold) for trained, fold in parts]
    row: Row = {"system": system, "config": parts[0][0].config}
    for m in MS:
        row[f"recall{m}"] = round(100 * float(np.concatenate([recall[m] for recall, _ in measured]).mean()), 2)
    apart = np.concatenate([fold.apart for _, fold in parts])
    recall_B = np.concatenate([recall[M] for recall, _ in measured])
    row[f"recall{M}_apart"] = round(100 * float(recall_B[apart].mean()), 2) if apart.any() else None
    row["ms_p50"] = round(float(np.median(np.concatenate([ms_B for _, ms_B in measured]))), 4)
    row["train_cpu_s"] = round(float(np.mean([trained.train_cpu_s for trained, _ in parts])), 2)
    row["model_mb"] = round(float(np.mean([trained.model_mb for trained, _ in parts])), 2)
    return row


class Report:
    """Rows in a file, written after every one."""

    def __init__(self, file: Path | None, task: Task) -> None:
        self._file = file
        fold = task.folds[0]
        self.content: Row = {
            "set": task.name,
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": f"{hardware()}, one thread used",
            "items": len(task.own_texts),
            "training_texts": len(fold.train),
            "training_pairs": len(fold.train.labels),
            "test_queries": sum(len(fold.texts) for fold in task.folds),
            "test_queries_apart": sum(int(fold.apart.sum()) for fold in task.folds),
        }
        earlier: Row = json.loads(file.read_text()) if file is not None and file.is_file() else {}
        if earlier.get("set", task.name) != task.name:
            raise InvalidConfig("--json", str(file), f"a file of the set {task.name}, not of {earlier['set']}")
        self.content |= {key: value for key, value in earlier.items() if isinstance(value, list)}
        print("  ".join(f"{key} {value}" for key, value in self.content.items() if not isinstance(value, list)), flush=True)

    def rows(self, part: str) -> list[Row]:
        rows: list[Row] = self.content.setdefault(part, [])
        return rows

    def has(self, part: str, **wanted: object) -> bool:
        return any(all(row.get(key) == value for key, value in wanted.items()) for row in self.rows(part))

    def add(self, part: str, row: Row) -> None:
        self.rows(part).append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(".part")
            written.write_text(json.dumps(self.content, indent=1) + "\n")
            written.replace(self._file)


def run(task: Task, jobs: Sequence[Job], report: Report, work: Path) -> None:
    """Make the rows that the report lacks."""
    for number, job in enumerate(jobs):
        if all(report.has("rows", system=job.system, config=config) for config in job.configs):
            continue
        print(f"[{number + 1} / {len(jobs)}] {job.system}: {job.configs[0]}", flush=True)
        by_fold = []
        try:
            for fold in task.folds:
                with tempfile.TemporaryDirectory(dir=work) as folder:  # a bundle that is open outlives its folder
                    by_fold.append(job.train(task, fold, Path(folder)))
        except EspalierError as error:
            print(f"{job.system} ({job.configs[0]}) is left out: {error}", flush=True)
            continue
        for trained in zip(*by_fold, strict=True):
            if not report.has("rows", system=job.system, config=trained[0].config):
                report.add("rows", row_of(list(zip(trained, task.folds, strict=True)), job.system))
        for each in by_fold:
            each[0].close()


# -- sweeps, choosing -----------------------------------------------------------------------------------------------------------


def sweep_beam(task: Task, report: Report, work: Path, recipe: Recipe) -> None:
    """Table 4: one model, several beams."""
    if all(report.has("beam", beam_size=beam) for beam in SWEEP_BEAMS):
        return
    by_fold = []
    for fold in task.folds:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            by_fold.append(xr_linear(recipe, SWEEP_BEAMS, recipe.texts, task, fold, Path(folder)))
    for beam, trained in zip(SWEEP_BEAMS, zip(*by_fold, strict=True), strict=True):
        if not report.has("beam", beam_size=beam):
            row = row_of(list(zip(trained, task.folds, strict=True)), "xr-linear")
            report.add("beam", {"beam_size": beam} | row | {"queries_per_s": round(1e3 / row["ms_p50"])})
    for each in by_fold:
        each[0].close()


def sweep_threshold(task: Task, report: Report, work: Path, recipe: Recipe, beam: int = 10) -> None:
    """Table 3: the model of the first fold trained without a threshold, then pruned.

    resident_mb is the growth of a fresh process's resident set while the model is opened and asked 1,000 test queries.
    """
    if all(report.has("threshold", threshold=threshold) for threshold in SWEEP_THRESHOLDS):
        return
    fold = task.folds[0]
    with tempfile.TemporaryDirectory(dir=work) as name:
        fitted = fit(task, fold, replace(recipe, options=recipe.options.model_copy(update={"threshold": 0.0})), Path(name))
        for threshold in SWEEP_THRESHOLDS:
            if report.has("threshold", threshold=threshold):
                continue
            with tempfile.TemporaryDirectory(dir=work) as folder:
                bundle = replace(fitted, chunks=pruned(fitted.chunks, threshold)).write(Path(folder))
                engine = open_engine(bundle, "cpu")
                trained = Trained(f"{recipe.texts}, beam {beam}", engine_find(engine, bundle, beam), disk_mb(bundle), fitted.train_cpu_s)
                row = row_of([(trained, fold)], "xr-linear")
                engine.close()
                resident = resident_mb(bundle, beam, fold.texts[:1000], Path(name))
            weights = int((np.abs(fitted.chunks.entry_weight) >= threshold).sum())
            report.add("threshold", {"threshold": threshold} | row | {"weights": weights, "resident_mb": round(resident, 1)})


def resident_mb(bundle: Bundle, beam: int, texts: Sequence[str], folder: Path) -> float:
    """How much a fresh process grows."""
    asked = folder / "asked.json"
    asked.write_text(json.dumps([beam, texts]))
    command = [sys.executable, "-m", "benchmarks.text_search", "--resident", str(bundle.path), "--json", str(asked)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resident_growth(bundle: Path, asked: Path) -> float:
    """What `resident_mb` has computed in the fresh process."""

    def now() -> float:
        return int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1e3

    beam, texts = json.loads(asked.read_text())
    before = now()
    opened = Bundle.open(bundle)
    find = engine_find(open_engine(opened, "cpu"), opened, beam)
    for text in texts:
        find(text)
    return now() - before


VARIANTS: dict[str, Recipe] = {}
"""What --choose tries: one change at a time, then some together."""


def _variant(changed: str, max_leaf: int = LinearTree().max_leaf, texts: str = Recipe.texts, unknown: int = 1, **options: Any) -> None:
    VARIANTS[changed] = Recipe(texts, LinearOptions(**({"prior": 0} | options)), LinearTree(max_leaf=max_leaf), unknown=unknown)


_variant("defaults")
_variant("threshold 0.01", threshold=0.01)
_variant("cost 4", cost=4.0)
_variant("cost 16, threshold 0.01", cost=16.0, threshold=0.01)
_variant("cost 0.25, threshold 0.01", cost=0.25, threshold=0.01)
_variant("negatives teacher, threshold 0.01", negatives="teacher", threshold=0.01)
_variant("beam_size 50, threshold 0.01", beam_size=50, threshold=0.01)
_variant("max_leaf 100, threshold 0.01", max_leaf=100, threshold=0.01)
_variant("max_leaf 400, threshold 0.01", max_leaf=400, threshold=0.01)
_variant("words, threshold 0.01", texts="words", threshold=0.01)
_variant("words, cost 0.25, threshold 0.01", texts="words", cost=0.25, threshold=0.01)
_variant("words, cost 0.05, threshold 0.005", texts="words", cost=0.05, threshold=0.005)
_variant("words, cost 0.01, threshold 0.001", texts="words", cost=0.01, threshold=0.001)
_variant("words, cost 0.05, threshold 0.005, max_leaf 100", texts="words", cost=0.05, threshold=0.005, max_leaf=100)
_variant("words, cost 0.05, threshold 0.005, negatives teacher", texts="words", cost=0.05, threshold=0.005, negatives="teacher")
_variant("unknown 0", unknown=0)
_variant("words, unknown 0, threshold 0.01", texts="words", unknown=0, threshold=0.01)
_variant("words, unknown 0, cost 0.1, threshold 0.01", texts="words", unknown=0, cost=0.1, threshold=0.01)
_variant("words, unknown 0, cost 0.01, threshold 0.001", texts="words", unknown=0, cost=0.01, threshold=0.001)
_variant("words, unknown 0, cost 0.1, threshold 0.01, max_leaf 100", texts="words", unknown=0, cost=0.1, threshold=0.01, max_leaf=100)
_variant(
    "words, unknown 0, cost 0.1, threshold 0.01, negatives teacher",
    texts="words", unknown=0, cost=0.1, threshold=0.01, negatives="teacher",
)  # fmt: skip
_variant("unknown 0, cost 0.1, threshold 0.01", unknown=0, cost=0.1, threshold=0.01)
_variant("unknown 0, cost 4, threshold 0.01", unknown=0, cost=4.0, threshold=0.01)
_variant("unknown 0, cost 0.1, threshold 0.01, bias 0", unknown=0, cost=0.1, threshold=0.01, bias=0.0)
_variant("unknown 0, cost 0.1, threshold 0.01, l1-hinge", unknown=0, cost=0.1, threshold=0.01, activation="l1-hinge")
_variant("unknown 0, cost 0.1, threshold 0.01, sigmoid", unknown=0, cost=0.1, threshold=0.01, activation="sigmoid")


def choose(task: Task, report: Report, work: Path, only: str = "") -> None:
    """The variants whose names match `only`, each also fused with the centroids of its own n-grams, and the centroids alone."""
    fold = task.folds[0]
    for texts, unknown in ((TEXTS[0], 1), (TEXTS[3], 1), (TEXTS[3], 0)):
        trained = centroid(texts, task, fold, work, unknown)[0]
        if not report.has("choose", variant=f"centroid {trained.config}"):
            report.add("choose", {"variant": f"centroid {trained.config}"} | row_of([(trained, fold)], "centroid"))
    for named, recipe in VARIANTS.items():
        if report.has("choose", variant=named) or not re.search(only, named):
            continue
        with tempfile.TemporaryDirectory(dir=work) as folder:
            found = xr_linear(recipe, CHOOSE_BEAMS, "any", task, fold, Path(folder))
        for beam, trained in zip(CHOOSE_BEAMS, found, strict=True):
            report.add("choose", {"variant": named, "beam_size": beam} | row_of([(trained, fold)], "xr-linear"))
        both = fused(found[len(BEAMS) - 1], centroid(recipe.texts, task, fold, work, recipe.unknown)[0])
        report.add("choose", {"variant": named, "beam_size": BEAMS[-1]} | row_of([(both, fold)], "fused"))
        found[0].close()


def plot(report: Report, sweep: str, file: Path) -> None:
    """Figure 4 (beam): queries/s against recall@100, other systems as single points; Table 3 (threshold): recall and megabytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    rows = report.rows(sweep)
    name, xlabel = (f"recall{M}", "queries/s of one thread") if sweep == "beam" else ("model_mb", "MB on disk")
    if sweep == "beam":
        axes.plot([row["queries_per_s"] for row in rows], [row[name] for row in rows], marker="o", label="xr-linear (numbers: beam)")
        for row in rows:
            at = (row["queries_per_s"], row[name])
            axes.annotate(str(row["beam_size"]), at, textcoords="offset points", xytext=(0, 6), ha="center", fontsize=7)
        for row in report.rows("rows"):
            if row["system"] != "xr-linear":
                label = f"{row['system']}, {row['config']}"
                axes.plot([1e3 / row["ms_p50"]], [row[name]], "D" if row["system"] == "dssm" else "s", label=label)
        axes.set(xscale="log", ylabel=f"recall@{M}, %")
    else:
        for m in MS:
            axes.plot([row[name] for row in rows], [row[f"recall{m}"] for row in rows], marker="o", label=f"recall@{m}")
        for row in rows:
            at = (row[name], row[f"recall{M}"])
            axes.annotate(f"{row['threshold']:g}", at, textcoords="offset points", xytext=(0, 6), ha="center", fontsize=7)
        axes.set(xscale="log", ylabel="recall, % (numbers: threshold)")
    axes.set(xlabel=xlabel, title=report.content["set"])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def warm_up(work: Path) -> None:
    """Compile, or load what an earlier run has compiled, outside of what is timed."""
    texts = [f"{colour} {thing}" for colour in ("red", "green", "blue", "black") for thing in ("lamp", "chair", "table")]
    fold = _fold(_pairs([(text, row) for row, text in enumerate(texts)]), texts, [np.array([row]) for row in range(len(texts))])
    with tempfile.TemporaryDirectory(dir=work) as folder:
        small = Recipe("words", tree=LinearTree(branching=2, max_leaf=2))
        for trained in xr_linear(small, [1, 2], "any", Task("any", texts, [fold]), fold, Path(folder)):
            trained.find("red lamp")
        trained.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder that holds the sets")
    parser.add_argument("--set", choices=SETS)
    parser.add_argument("--systems", help="some of xr-linear, bm25, centroid, neighbours, dssm, one-versus-all, fused; all by default")
    parser.add_argument("--sweep", choices=("beam", "threshold"))
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--variants", default="", metavar="REGEX", help="only those variants of --choose")
    parser.add_argument("--dssm-cpu-s", type=float, default=240, help="CPU seconds that DSSM may train, of each fold")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where models lie meanwhile")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--resident", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.resident:
        print(resident_growth(args.resident, args.json))
        return
    if args.data is None or args.set is None:
        parser.error("--data and --set are needed: the folder that holds the sets, and which")
    jobs = jobs_of(args.set, args.dssm_cpu_s)
    wanted = args.systems.split(",") if args.systems else [job.system for job in jobs]
    known = {"xr-linear", "bm25", "centroid", "neighbours", "dssm", "one-versus-all", "fused"}
    if unknown := set(wanted) - known:
        parser.error(f"--systems: got {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(known))}")
    try:
        task = read_set(args.data, args.set, args.choose)
        report = Report(args.json, task)
        warm_up(args.work)
        if args.choose:
            choose(task, report, args.work, args.variants)
        elif args.sweep == "beam":
            sweep_beam(task, report, args.work, Recipe())
        elif args.sweep == "threshold":
            sweep_threshold(task, report, args.work, Recipe())
        else:
            run(task, [job for job in jobs if job.system in wanted], report, args.work)
        if args.plot and args.sweep:
            plot(report, args.sweep, args.plot)
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
