"""`espalier compare` for texts: BM25, BM25F, centroids, the nearest queries, one-versus-all and the tree, on the same queries.

Test queries are those that `fit` holds out: of `data.test`, of the log, or, without a log, made of words of the items. The report says
which. Other queries of the log, or made ones, choose the options of baselines. The tree has its configuration and is measured at each
serving beam. The metric is nDCG@10.

Knows a configuration, names of methods and a time. Does not know how methods learn and answer.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import TextKind, encode_texts
from espalier.search import Engine, SearchParams

from ..baselines.texts import METHODS, METRIC, Learned, TextTask
from ..compare.contest import RECIPE, REFUSALS, Entry, reason_of
from ..compare.figures import Figures
from ..compare.report import Key, Report, differences, fields_of, measure, new_report, save
from ..compare.verdict import best_baseline, verdict
from ..data.csr import Csr
from ..data.query_logs import LabelledTexts
from ..linear.label_features import label_features
from ..linear.own_texts import made_queries
from ..linear.prepare import OF_ITEMS, OF_LOG, Prepared, prepare
from ..linear.run import fit_and_export, shape_of
from ..retrieval.task import NO_DEADLINE, Deadline, Fitted, Metric
from ..specification.linear import WEIGHTS_OF_ONE_NODE, LinearConfig, LogData, TailOptions

log = logging.getLogger(__name__)

ONE_VERSUS_ALL = "one-versus-all"
NAMES = (*METHODS, ONE_VERSUS_ALL, RECIPE)
METRICS = (METRIC, Metric("recall", 10), Metric("recall", 100))
STRONG = "bm25f"
MOST_VALIDATION, VALIDATION_SHARE, LEAST_VALIDATION = 1000, 0.1, 30
MOST_QUERIES = 5000
RELEVANCE = "Which to use is open: relevance was counted as yes or no here, and a model of kind xreg says how much (see evaluate)."
MADE = (
    "Which to use is open: made queries have the items' own words, from all columns alike, and people's have not; give some of people in "
    "data.test."
)
MOST_WORK = 2e9
"""Most items times stored numbers of the training points for one-versus-all, which then takes a minute or two."""


@dataclass(frozen=True)
class TextQuestion:
    """A query of a user, or a made one."""

    user: int
    query: str
    relevant: Int64


def compare_texts(
    config: LinearConfig, names: Sequence[str] | None, seconds: float | None, beams: Sequence[int], json_file: Path | None
) -> Report:
    """The report: `rows`, `fits`, `not_judged`, `differences` and the two sentences of the `verdict`; see `compare`.

    names    methods; None: all that fit the data
    seconds  after which no further baseline begins; None: no limit
    Raises InvalidConfig if the data are not texts, InvalidData if there is no test query.
    """
    if not isinstance(config.data, LogData):
        raise InvalidConfig("data.format", config.data.format, "log: compare judges histories, vectors and texts")
    if json_file is not None:
        _refuse_other_files(json_file)
    begin = time.monotonic()
    prepared = prepare(config)
    config = config.with_beam(len(prepared.items), shape_of(config, prepared))
    tests = questions_of(prepared)
    deadline = Deadline(None if seconds is None else begin + seconds)
    task = task_of(config, prepared, deadline)
    report = _empty_report(config, prepared, task, tests)
    figures: dict[Key, Figures] = {}
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            for name in sorted(_default_methods(config, prepared, task) if names is None else names, key=lambda name: name == RECIPE):
                log.info("%s …", name)
                try:
                    if name == RECIPE:
                        entry = _tree_entry(name, config, Path(folder) / name, beams, opened)
                    elif deadline.is_over():
                        raise InvalidConfig("--minutes", f"{(seconds or 0) / 60:g}", "more: no time was left")
                    elif name == ONE_VERSUS_ALL:
                        entry = _tree_entry(name, _one_node_config(config, prepared), Path(folder) / name, beams, opened)
                    else:
                        fitted = METHODS[name](task)
                        entry = Entry(name, {None: fitted}, None, {None: max(trial.figure for trial in fitted.trials)})
                except REFUSALS as refusal:
                    log.warning("%s is not judged: %s", name, refusal)
                    report["not_judged"].append({"method": name, "reason": reason_of(refusal)})
                    continue
                measure(entry, tests, METRICS, METRIC, False, config.seed, report, figures)
                save(report, figures, json_file)
    except KeyboardInterrupt:
        report["interrupted"] = True
        log.warning("interrupted: what was done until now is reported")
    report["differences"] = differences(report["rows"], figures, METRICS)
    report["verdict"] = _verdict(config, report)
    report["seconds"] = round(time.monotonic() - begin, 1)
    save(report, figures, json_file)
    return report


def _empty_report(config: LinearConfig, prepared: Prepared, task: TextTask, tests: Sequence[TextQuestion]) -> Report:
    return new_report(config, METRIC, len(tests)) | {
        "log": {"sha256": prepared.fingerprint, "items": len(prepared.items), "queries": len(task.whole.queries)},
        "tested": prepared.test_source,
        "chosen_by": OF_ITEMS if task.has_made_queries else OF_LOG,
    }


def _default_methods(config: LinearConfig, prepared: Prepared, task: TextTask) -> list[str]:
    """The methods that fit the data and take no longer than a tree."""
    names = [name for name in METHODS if name != "query-neighbours" or len(task.whole.queries)]
    return [*names, *([ONE_VERSUS_ALL] if _one_node_refusal(config, prepared) is None else []), RECIPE]


def _refuse_other_files(file: Path) -> None:
    """Raise InvalidConfig if the path exists and is not a report of texts."""
    try:
        earlier = json.loads(file.read_text()) if file.exists() else {"tested": None}
    except (OSError, ValueError):
        earlier = None
    if not isinstance(earlier, dict) or "tested" not in earlier:
        raise InvalidConfig("--json", str(file), "a report of texts, which is replaced, or no file")


def questions_of(prepared: Prepared) -> list[TextQuestion]:
    """At most MOST_QUERIES test queries, evenly spread. Raises InvalidData if there is none."""
    texts = prepared.written_queries.to_pylist()
    labels = prepared.test.labels
    questions = [TextQuestion(b, texts[b], relevant) for b, relevant in enumerate(_items_of(labels)) if len(relevant)]
    if not questions:
        raise InvalidData(
            "test queries", 0, "at least one with an item; data.test, data.test_share or data.own_texts says where they are from"
        )
    return questions[:: max(1, -(-len(questions) // MOST_QUERIES))]


def task_of(config: LinearConfig, prepared: Prepared, deadline: Deadline = NO_DEADLINE) -> TextTask:
    """The baselines' data. Validation queries are of the log, or made ones if the log has few and the items have words.

    Raises InvalidData if there is no validation query.
    """
    if prepared.people_queries is None or prepared.vectoriser is None:
        raise InvalidConfig("data.format", config.data.format, "log")
    log_queries = prepared.people_queries
    whole = Learned(log_queries, label_features(prepared.train, prepared.own_texts, config.linear)[1])
    part, has_made_queries = whole, bool(prepared.columns) and len(log_queries) < LEAST_VALIDATION / VALIDATION_SHARE
    if has_made_queries:
        ids = prepared.items.column("id").to_pylist()
        row_of = {item: row for row, item in enumerate(ids)}
        share = min(1.0, max(VALIDATION_SHARE, LEAST_VALIDATION / len(ids)))
        queries = made_queries(ids, prepared.columns, share, config.seed + 1)[:MOST_VALIDATION]
        validation = [TextQuestion(b, query, np.array([row_of[item]])) for b, (query, item, _) in enumerate(queries.iter_rows())]
    else:
        rng = np.random.default_rng([config.seed, 0x7E87])
        count = min(MOST_VALIDATION, max(LEAST_VALIDATION, round(VALIDATION_SHARE * len(log_queries))), len(log_queries) // 2)
        held_out = np.sort(rng.permutation(len(log_queries))[:count])
        rows = np.setdiff1d(np.arange(len(log_queries)), held_out)
        training_points = np.setdiff1d(np.arange(len(prepared.train)), prepared.train.asked[held_out])
        centroids = label_features(prepared.train.take(training_points), prepared.own_texts, config.linear)[1]
        part = Learned(LabelledTexts([log_queries.texts[row] for row in rows.tolist()], log_queries.labels[rows]), centroids)
        items = _items_of(log_queries.labels[held_out])
        validation = [TextQuestion(b, log_queries.texts[row], items[b]) for b, row in enumerate(held_out.tolist()) if len(items[b])]
    if not validation:
        raise InvalidData("validation queries", 0, "at least one with an item; see data.train and data.own_texts")
    return TextTask(prepared.columns, whole, part, validation, prepared.vectoriser, has_made_queries, deadline)


def _items_of(labels: Csr) -> list[Int64]:
    return [rows.astype(np.int64) for rows in np.split(labels.indices, labels.indptr[1:-1])]


def _one_node_refusal(config: LinearConfig, prepared: Prepared) -> InvalidData | None:
    """Why one-versus-all cannot be compared with the recipe, or None."""
    items, features = len(prepared.items), prepared.train.points.shape[1]
    if config.tree.count == 1 and shape_of(config, prepared).max_leaf >= items:
        return InvalidData("items", items, "more: the recipe's tree is one node, which is one-versus-all")
    if not len(prepared.train):
        return InvalidData("queries", 0, "some: without them a scorer is its item's centroid, see centroids")
    if items * features > WEIGHTS_OF_ONE_NODE or items * prepared.train.points.nnz > MOST_WORK:
        numbers = prepared.train.points.nnz
        return InvalidData("items", items, f"fewer: {items} scorers of {features} features would each learn from {numbers} numbers")
    return None


def _one_node_config(config: LinearConfig, prepared: Prepared) -> LinearConfig:
    """The configuration with all items as children of the root. Raises InvalidData if that is the same tree, or would take too long."""
    refusal = _one_node_refusal(config, prepared)
    if refusal is not None:
        raise refusal
    tree = config.tree.model_copy(update={"branching": 2, "max_leaf": max(2, len(prepared.items)), "count": 1})
    return config.model_copy(update={"tree": tree, "tail": TailOptions()})


def _tree_entry(name: str, config: LinearConfig, folder: Path, beams: Sequence[int], opened: ExitStack) -> Entry:
    """The bundle that `fit` makes of the configuration, at each serving beam and at its default beam.

    Validation queries choose nothing here, so their figure is 0.
    """
    (folder / "work").mkdir(parents=True)
    begin = time.monotonic()
    bundle = fit_and_export(config, folder / config.name / "1", folder / "work")
    seconds = time.monotonic() - begin
    engine = opened.enter_context(closing(open_engine(bundle, "cpu")))
    default_beam = None if bundle.tree.height == 1 else min(config.search.beam_size, bundle.tree.leaf_count)
    size = sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file())
    by_beam: dict[int | None, Fitted] = {
        beam: Fitted(partial(_answers, bundle, engine, 1 if beam is None else beam), {}, size, seconds)
        for beam in ([None] if default_beam is None else sorted({min(beam, bundle.tree.leaf_count) for beam in (*beams, default_beam)}))
    }
    return Entry(name, by_beam, default_beam, dict.fromkeys(by_beam, 0.0))


def _answers(bundle: Bundle, engine: Engine, beam: int, queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
    kind, vectoriser = bundle.manifest.query, bundle.vectoriser
    if not isinstance(kind, TextKind) or vectoriser is None:
        raise InvalidData("bundle", kind.kind, "a model of texts")
    rows_BM: Int64 = engine.search(encode_texts(kind, vectoriser, queries), SearchParams.uniform(len(queries), beam, m)).item_rows_BM
    return rows_BM


def _verdict(config: LinearConfig, report: Report) -> list[str]:
    """Two sentences. The second is undecided if the queries that chose, or those that measured, do not support a decision."""
    field, in_other_metrics = fields_of(report, STRONG)
    # One-versus-all has no figure of validation queries: it would have to be trained twice.
    field, *in_other_metrics = (
        replace(each, others=[rival for rival in each.others if rival.name != ONE_VERSUS_ALL]) for each in (field, *in_other_metrics)
    )
    finding, conclusion = verdict(field, in_other_metrics)
    if report["chosen_by"] == OF_ITEMS:
        finding = finding.replace("on validation queries", "on queries made of items' words")
    if config.linear.loss == "relevance":
        return [finding, RELEVANCE]
    if report["tested"] == OF_ITEMS:
        return [finding, MADE]
    if report["chosen_by"] == OF_ITEMS and conclusion.startswith("Use") and field.baselines:
        best = best_baseline(field, in_other_metrics)
        better = [rival.name for rival in field.baselines if rival is not best and field.paired(rival.name, best.name).low > 0]
        if better:
            return [finding, f"Undecided: {' and '.join(better)}, which made queries did not choose, found more than {best.name}."]
    return [finding, conclusion]


def show(report: Report) -> None:
    """Print the data and the queries of a comparison."""
    counts = f"{report['log']['items']:,} items, {report['log']['queries']:,} queries to learn from"
    print(f"{report['name']}: {counts}; {report['queries']:,} test queries, {report['tested']}; {report['seconds']:.0f} s in all")
