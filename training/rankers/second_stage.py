"""A ranker for a model: trained on the model's candidates, measured, and added to a new version of its bundle."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from espalier.bundle import Bundle
from espalier.bundle_writer import with_ranker
from espalier.errors import InvalidConfig, InvalidData
from espalier.manifest import GraphScorer, RankerInfo
from espalier.placement.linear_placement import text_columns
from espalier.queries import HistoryKind, TextKind
from espalier.rank_features import HISTORY, LEAF, NAME, RETRIEVAL, TEXT, check_names, needs_node_rows
from espalier.rerank.features import RankFeatures, is_numeric
from espalier.search import Engine

from ..publish import publish
from ..rankers.candidates import Candidates, retrieve
from ..rankers.export import ranker_onnx
from ..rankers.fit import Epoch, Ranker, fit_ranker
from ..rankers.graded_queries import QuerySplit
from ..specification.ranker import RankerConfig

log = logging.getLogger(__name__)

REPORTED_M = 10
MIN_VALIDATION_QUERIES = 1000


@dataclass(frozen=True)
class StageConfig:
    """How a ranker is added.

    depth     candidates that it learns to order, and that it orders unless a request says otherwise
    features  its inputs; empty: all that the bundle and the queries have
    queries   most training queries; a tenth as many choose the weights, at least MIN_VALIDATION_QUERIES
    ranker    the rank function and its training
    """

    depth: int
    features: tuple[str, ...]
    queries: int
    ranker: RankerConfig


def default_features(bundle: Bundle, split: QuerySplit) -> tuple[str, ...]:
    """All features that the bundle and the queries have."""
    manifest = bundle.manifest
    columns = [f"attribute.{name}" for name in bundle.items.fields if is_numeric(bundle.items.column(name).type)]
    caller_features = [features for part in (split.train, split.valid, split.test) for features in part.caller_features]
    query = {f"query.{name}" for features in caller_features for name in features.query}
    item = {f"item.{name}" for features in caller_features for numbers in features.items.values() for name in numbers}
    history = HISTORY if isinstance(manifest.query, HistoryKind) else ()
    built_in = [name for name in (*RETRIEVAL, *LEAF, *history) if isinstance(manifest.scorer, GraphScorer) or not needs_node_rows(name)]
    texts = text_columns(bundle) if isinstance(manifest.query, TextKind) else ()
    built_in += [prefix + column for column in texts for prefix in TEXT]
    return (*built_in, *columns, *sorted(query), *sorted(item))


def features_of(bundle: Bundle, names: Sequence[str], split: QuerySplit) -> RankFeatures:
    """The features by name; without names, all of valid names. Raises InvalidConfig if neither bundle nor queries have one."""
    available = default_features(bundle, split)
    usable = [name for name in available if NAME.fullmatch(name)]
    if not names:
        names = usable
        if len(names) < len(available):
            unusable = ", ".join(repr(name) for name in available if name not in names)
            log.warning("left out of the ranker's features: %s. Expected column names of at most 64 characters without spaces", unusable)
    try:
        check_names(names)
    except ValueError as error:
        raise InvalidConfig("--features", ",".join(names), str(error)) from error
    for name in names:
        if name not in available:
            raise InvalidConfig("--features", name, f"some of {', '.join(usable)}")
    return RankFeatures(bundle, names)


def add_ranker(bundle: Bundle, engine: Engine, split: QuerySplit, config: StageConfig, out: Path, notes: dict[str, Any]) -> Bundle:
    """Train a ranker and write the bundle with it to models/NAME/VERSION, verified, with its gain on test queries.

    notes  further entries of the manifest's description of the training
    """
    begin = time.perf_counter()
    if not 2 <= config.depth <= bundle.manifest.search.max_m:
        raise InvalidConfig("--depth", config.depth, f"2 to {bundle.manifest.search.max_m}, the model's largest m")
    features = features_of(bundle, config.features, split)
    train, valid, test = collect(bundle, engine, features, split, config)
    log.info(
        "%d training, %d validation and %d test queries, %.0f s",
        *(0 if part is None else len(part.relevant) for part in (train, valid, test)),
        time.perf_counter() - begin,
    )
    m = min(REPORTED_M, bundle.manifest.search.max_m)
    measured = {name: part for name, part in (("validation", valid), ("test", test)) if part is not None}
    metrics = {name: {"retrieved": candidates.quality(None, m)} for name, candidates in measured.items()}
    ranker = fit(train, valid, config.ranker)
    for name, candidates in measured.items():
        scores_R = ranker.scores(candidates.ranking.features_RF)
        metrics[name]["reranked"] = candidates.quality(scores_R, m, config.depth)
        log.info("%s, %d results, best %d re-ranked: %s", name, m, config.depth, _figures(metrics[name]))
        if metrics[name]["reranked"]["ndcg"] < metrics[name]["retrieved"]["ndcg"]:
            log.warning("%s: the ranker orders worse than retrieval alone. More judgements or other features may help", name)
    if test is None:
        log.warning("test: not measured, the model has no test queries")
    names = train.ranking.feature_names
    training = notes | {"config": config.ranker.model_dump(), "queries": len(train.relevant), "m": m, "metrics": metrics}
    info = RankerInfo(features=names, depth=config.depth, max_depth=bundle.manifest.search.max_m, training=training)
    graph = ranker_onnx(ranker)
    return publish(out, lambda folder: with_ranker(bundle, folder, info, graph, features.texts), Bundle.golden)


def collect(
    bundle: Bundle, engine: Engine, features: RankFeatures, split: QuerySplit, config: StageConfig
) -> tuple[Candidates, Candidates, Candidates | None]:
    """The candidates of the training, validation and test queries; None without test queries. Those of the last two are at least
    REPORTED_M, if the model can find so many. Raises InvalidData where no query of a split has a relevant item.
    """
    beam_size, seed = bundle.manifest.search.beam_size, config.ranker.seed
    splits = {
        "training": split.train.sample(config.queries, seed),
        "validation": split.valid.sample(max(MIN_VALIDATION_QUERIES, config.queries // 10), seed),
        "test": split.test,
    }
    for name, queries in splits.items():
        if not any(map(len, queries.items)) and (name != "test" or len(queries)):
            expected = "at least one: take more queries, or another --seed" if split.file else "at least one, or --judgements"
            raise InvalidData(split.file or "the model's log", f"no relevant item in its {len(queries)} {name} queries", expected)
    measured_depth = max(config.depth, min(REPORTED_M, bundle.manifest.search.max_m))
    train = retrieve(engine, features, splits["training"], config.depth, beam_size, "for training")
    valid = retrieve(engine, features, splits["validation"], measured_depth, beam_size, "for validation")
    test = retrieve(engine, features, split.test, measured_depth, beam_size, "for the test") if len(split.test) else None
    return train, valid, test


def fit(train: Candidates, valid: Candidates, config: RankerConfig) -> Ranker:
    """`fit_ranker`, with a progress bar."""
    with tqdm(total=config.max_epochs, desc=f"{config.kind}, {config.loss}", unit="epoch", disable=None) as bar:

        def report(epoch: Epoch) -> None:
            bar.set_postfix(
                loss=f"{epoch.loss:.4f}", ndcg="" if epoch.validation is None else f"{epoch.validation:.4f}", rate=epoch.learning_rate
            )
            bar.update()

        return fit_ranker(train.ranking, valid.ranking, config, report)


def _figures(rows: dict[str, dict[str, float]]) -> str:
    return "; ".join(f"{name} {', '.join(f'{metric} {value:.4f}' for metric, value in figures.items())}" for name, figures in rows.items())
