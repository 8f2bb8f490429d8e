"""XR-Linear in the text-search benchmark: trained, exported and searched as the product does it.

Knows the n-gram configurations and recipes; one-versus-all is the same without a tree. N-grams are the most frequent ones, in shares of
T = 2 · training texts: words T · words and pairs T / 2 each · T each · words, pairs and character trigrams T / 2 each.

Legend: I items, M results.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import polars as pl

from benchmarks.papers.product_search.text_report import Find, M, Trained
from benchmarks.papers.product_search.text_sets import Fold, Task, item_rows
from espalier.arrays import Array
from espalier.bundle import Bundle
from espalier.chunks import Chunks, TreeChunks
from espalier.engines import open_engine
from espalier.errors import InvalidData
from espalier.queries import TextKind, encode_texts
from espalier.search import Engine, SearchParams
from espalier.text.blocks import TextBlock
from espalier.tree import Tree
from training.data.query_logs import LabelledTexts
from training.linear.choosing import Choice
from training.linear.export import export
from training.linear.fit import fit_linear, trains_root
from training.linear.label_features import label_features
from training.linear.prepare import Prepared, prepare
from training.specification.linear import LinearConfig, LinearOptions, LinearSearch, LinearTree, LogData
from training.trees.hierarchical_kmeans import hierarchical_kmeans

BEAMS = (10, 50)
TEXTS = ("words", "words+pairs", "words+pairs more", "words+pairs+trigrams")
MOST_LABELS = 10_000
"""For one-versus-all."""
PUBLISHED = LinearOptions(prior=0, gamma=1)
"""Weights are regularised towards 0, as in the paper."""


@dataclass(frozen=True)
class Recipe:
    """How XR-Linear is trained. Without `whole_tree`, all items are children of the root."""

    texts: str = "words+pairs+trigrams"
    options: LinearOptions = field(default_factory=LinearOptions)
    tree: LinearTree = field(default_factory=LinearTree)
    whole_tree: bool = True


def blocks_of(texts: str, train: LabelledTexts) -> tuple[TextBlock, ...]:
    """The n-grams of a text configuration; see the module."""
    limit = 2 * len(train)
    shares = {"words": (limit, 0, 0), "words+pairs": (limit // 2, limit // 2, 0), "words+pairs more": (limit, limit, 0)}
    counts = shares.get(texts, (limit // 2,) * 3)
    kinds: tuple[tuple[Literal["word", "char"], int], ...] = (("word", 1), ("word", 2), ("char", 3))
    return tuple(TextBlock(unit=unit, n=n, max_features=count) for (unit, n), count in zip(kinds, counts, strict=True) if count)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained model before it is written."""

    config: LinearConfig
    prepared: Prepared
    tree: Tree
    chunks: Chunks
    train_cpu_s: float

    def write(self, folder: Path) -> Bundle:
        trees = [TreeChunks(self.tree, self.chunks)]
        return export(self.config, Choice(self.config.linear, None), self.prepared, trees, folder / "text-search" / "1")


def fit(task: Task, fold: Fold, recipe: Recipe, folder: Path) -> Fitted:
    """Train as `training.linear.run` does, from a log in `folder`."""
    width = len(str(len(task.own_texts)))
    ids = [f"{row:0{width}d}" for row in range(len(task.own_texts))]
    _log(fold.train.texts, item_rows(fold.train), ids).write_parquet(folder / "train.parquet")
    _log(fold.texts, fold.relevant, ids).write_parquet(folder / "test.parquet")
    pl.DataFrame({"id": ids}).write_parquet(folder / "items.parquet")
    data = LogData(format="log", train=folder / "train.parquet", test=folder / "test.parquet", items=folder / "items.parquet")
    config = LinearConfig(
        name="text-search", data=data, text=blocks_of(recipe.texts, fold.train),
        tree=recipe.tree, linear=recipe.options, search=LinearSearch(m=M),
    )  # fmt: skip
    begin = time.process_time()
    prepared = prepare(config)
    labels, centroids = label_features(prepared.train, prepared.own_texts, config.linear)
    branching, max_leaf = 2, max(2, len(ids))
    if recipe.whole_tree:
        branching, max_leaf, _ = recipe.tree.shape_of(*centroids.shape, trains_root(prepared.train, config.linear))
    tree = hierarchical_kmeans(labels, branching, max_leaf, config.seed)
    chunks = fit_linear(prepared.train, tree, config.linear, 1, config.seed, centroids=centroids)
    return Fitted(config, prepared, tree, chunks, time.process_time() - begin)


def _log(texts: Sequence[str], rows: Iterable[Array], ids: Sequence[str]) -> pl.DataFrame:
    return pl.DataFrame({"query": texts, "item": [[ids[row] for row in text_rows.tolist()] for text_rows in rows]}).explode("item")


def engine_find(engine: Engine, bundle: Bundle, beam: int) -> Find:
    kind, vectoriser = bundle.manifest.query, bundle.vectoriser
    if not isinstance(kind, TextKind) or vectoriser is None:
        raise InvalidData("bundle", kind.kind, "a model of texts")
    return lambda text: engine.search(encode_texts(kind, vectoriser, [text]), SearchParams.uniform(1, beam, M)).item_rows_BM[0]


def xr_linear(recipe: Recipe, beams: Sequence[int], config_name: str, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    fitted = fit(task, fold, recipe, folder)
    bundle = fitted.write(folder)
    engine = open_engine(bundle, "cpu")
    return [
        Trained(f"{config_name}, beam {beam}", engine_find(engine, bundle, beam), disk_mb(bundle), fitted.train_cpu_s, engine.close)
        for beam in beams
    ]


def one_versus_all(texts: str, task: Task, fold: Fold, folder: Path) -> list[Trained]:
    if len(task.own_texts) > MOST_LABELS:
        raise InvalidData(
            "items", len(task.own_texts), f"at most {MOST_LABELS} for one-versus-all, whose training is theirs times the points"
        )
    fitted = fit(task, fold, Recipe(texts, PUBLISHED, whole_tree=False), folder)
    bundle = fitted.write(folder)
    engine = open_engine(bundle, "cpu")
    return [Trained(texts, engine_find(engine, bundle, 1), disk_mb(bundle), fitted.train_cpu_s, engine.close)]


def disk_mb(bundle: Bundle) -> float:
    return sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file()) / 1e6
