"""`espalier compare`: measures the recipe and the baselines on one log, and says whether a tree pays there.

Knows a configuration, names of methods, a time and files. Does not know how methods learn and answer.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from espalier.arrays import Int64
from espalier.bundle_files import sha256_of

from ..compare.contest import FUSION, MOST_QUERIES, QUICK, RECIPE, REFUSALS, Contest, attempted, fused_methods, in_order, reason_of
from ..compare.figures import Figures
from ..compare.plan import Plan, is_judged
from ..compare.recipe import MEMORY_SHARE
from ..compare.report import (
    Key,
    Report,
    continued,
    differences,
    fields_of,
    measure,
    new_report,
    queries_file,
    queries_of,
    read_figures,
    save,
)
from ..compare.segments import segments_of
from ..compare.verdict import STRONG, verdict
from ..data.splits import EvaluationPair
from ..data.user_item_matrix import users_of_items
from ..deep.prepare import prepare
from ..retrieval.needs import Estimate, Needs
from ..retrieval.task import Clock, Method, Metric
from ..specification.deep import DeepConfig
from ..specification.splits import FileSplit

log = logging.getLogger(__name__)

CONTINUED_FIELDS = ("rows", "fits", "not_judged", "seconds", "minutes", "own")
"""Fields that a report takes over from the file of the run that it continues."""
LATE = "the methods before it took longer than planned"
MOST_MEASURING = 0.2
"""Largest share of the whole time for measuring what methods need. Trained baselines that are not measured by then are not judged."""
SAME_FIELDS = ("log", "config", "metrics", "queries", "beams")
"""Fields that must be equal in a report and in the run that continues it."""


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison.

    baselines    name → method
    estimates    name → estimate of the baseline's needs
    beams        serving beams of the recipe
    metrics      of the table; none: the default ones
    own_digests  name of a caller's own method → digest of its file; a method whose digest has changed is run again
    seconds      time of the whole comparison, by the clock; None: no limit
    show_plan    gets the plan as text, before the first method begins
    """

    config: DeepConfig
    data: Path | None
    methods: Sequence[str]
    baselines: Mapping[str, Method]
    estimates: Mapping[str, Estimate]
    beams: Sequence[int]
    seconds: float | None
    device: torch.device
    metrics: Sequence[Metric] = ()
    own_digests: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = time.monotonic
    show_plan: Callable[[str], None] = print


def compare(options: CompareOptions, json_file: Path | None) -> Report:
    """The report: the run's options, `plan`, `rows`, `fits`, `not_judged`, `differences` and the two sentences of the `verdict`.

    json_file   written after every method; methods in it are not run again

    After an interrupt the report has the methods measured until then, and says so. Raises InvalidConfig if the file holds another run,
    InvalidData if there is no test query.
    """
    begin = options.clock()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepared = prepare(options.config, options.data, work / "log")
        contest = Contest(
            options.config, prepared, work, options.beams, options.baselines, options.device, options.estimates, options.clock
        )
        pairs = queries_of(prepared.split.test, options.config.search.exclude_seen, MOST_QUERIES)
        metrics, users_I = metrics_of(options), users_of_items(prepared.split.lists, prepared.split.train)
        report = _empty_report(options, contest, pairs)
        figures: dict[Key, Figures] = {}
        if json_file is not None:
            report = continued(report, json_file, SAME_FIELDS, CONTINUED_FIELDS)
            figures = read_figures(queries_file(json_file))
        minutes, report["minutes"] = report["minutes"], _minutes(options)
        has_more_time = minutes is not None and (options.seconds is None or options.seconds > 60 * minutes)
        _drop_rows_to_run_again(figures, report, has_more_time, options.own_digests)
        report["own"] |= options.own_digests
        done = {row["method"] for row in report["rows"]}
        missing = in_order([name for name in options.methods if name not in done])
        report["not_judged"] = [entry for entry in report["not_judged"] if entry["method"] not in missing]
        try:
            for name, seconds in _turns(options, contest, missing, begin, report):
                _run(contest, name, pairs, metrics, users_I, seconds, report, figures)
                save(report, figures, json_file)
        except KeyboardInterrupt:
            report["interrupted"] = True
            log.warning("interrupted: what was done until now is reported")
    report["rows"].sort(key=lambda row: (_position(row["method"], options.methods), row["beam_size"] or 0))
    report["differences"] = differences(report["rows"], figures, metrics)
    strong = STRONG if prepared.interactions.vectors_UF is None else "item-means"
    report["verdict"] = list(verdict(*fields_of(report, strong)))
    report["seconds"] = round(report["seconds"] + options.clock() - begin, 3)
    save(report, figures, json_file)
    return report


def _turns(
    options: CompareOptions, contest: Contest, names: Sequence[str], begin: float, report: Report
) -> Iterator[tuple[str, float | None]]:
    """The methods in order, each with its seconds: None without a time limit, else as planned when its turn comes.

    Methods that cannot be judged are added to the report's `not_judged`.
    """
    if options.seconds is None:
        yield from ((name, None) for name in names)
        return
    plan = _planned(options, contest, names, begin)
    options.show_plan(plan.table())
    report["plan"] = plan.rows()
    report["not_judged"] += [{"method": name, "reason": reason} for name, reason in plan.refused.items()]
    while shares := plan.shares():
        name = next(name for name in names if name in shares)
        seconds = shares[name] + plan.spare_s(name, shares)
        plan.done.add(name)
        yield name, seconds
    report["not_judged"] += [{"method": name, "reason": plan.reasons.get(name, LATE)} for name in names if name in plan.waiting]
    unjudged = [entry["method"] for entry in report["not_judged"] if plan.lacks_time_alone(entry["method"])]
    unjudged = [name for name in unjudged if not contest.has_refused(name)]
    if unjudged and RECIPE not in plan.refused:
        report["minutes_needed"] = plan.minutes([RECIPE] if RECIPE in unjudged else unjudged)


def _planned(options: CompareOptions, contest: Contest, names: Sequence[str], begin: float) -> Plan:
    """The plan. Needs are measured for the tree first, then the strong baseline, then quick methods."""
    seconds = options.seconds or 0.0
    needs: dict[str, Needs] = {}
    refused: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name != RECIPE, name != STRONG, name not in QUICK)):
        is_trained = name in options.baselines and name not in QUICK
        if is_trained and options.clock() - begin > MOST_MEASURING * seconds:
            refused[name] = "no time was left to measure what it needs"
            continue
        try:
            needs[name] = _needs(contest, name, names)
        except REFUSALS as refusal:
            refused[name] = reason_of(refusal)
    if STRONG in needs and RECIPE in needs:  # the tree would take this time for its memory
        least_s = min(needs[STRONG].full_s, max(needs[STRONG].least_s, MEMORY_SHARE * needs[RECIPE].least_s))
        needs[STRONG] = replace(needs[STRONG], least_s=least_s)
    needs = {name: needs[name] for name in names if name in needs}
    return Plan(options.clock, begin, seconds, needs, {name: contest.answering_seconds(name) for name in needs}, refused)


def _needs(contest: Contest, name: str, names: Sequence[str]) -> Needs:
    """The needs of a method; of a fusion, with the needs of its methods that are not compared themselves."""
    exclude_seen = contest.config.search.exclude_seen
    total_needs = contest.needs(name, exclude_seen, has_neighbours=STRONG in names)
    for part in fused_methods(name) if name.split(":")[0] == FUSION else ():
        if part not in names:
            part_needs = contest.needs(part, exclude_seen)
            total_needs = Needs(total_needs.least_s + part_needs.least_s, total_needs.full_s + part_needs.full_s)
    return total_needs


def metrics_of(options: CompareOptions) -> list[Metric]:
    """The metrics of the table: the requested ones, by default recall and nDCG at 10 and at the configured `search.m`. Recall at `search.m`
    is always among them, since it makes all choices.
    """
    m = options.config.search.m
    default_metrics = [metric for cut in sorted({10, m}) for metric in (Metric("recall", cut), Metric("ndcg", cut))]
    return list(dict.fromkeys([*(options.metrics or default_metrics), Metric("recall", m)]))


def _empty_report(options: CompareOptions, contest: Contest, pairs: Sequence[EvaluationPair]) -> Report:
    config, lists = options.config, contest.prepared.interactions
    log_: dict[str, Any] = {"sha256": lists.fingerprint, "users": lists.user_count, "items": lists.item_count}
    log_ |= {"events": lists.event_count, "bad_rows": dict(lists.bad_rows)}
    if isinstance(config.data.split, FileSplit):
        log_["test_sha256"] = sha256_of(config.data.split.test)
    if config.data.items is not None:
        log_["items_sha256"] = sha256_of(config.data.items)
    return new_report(config, contest.metric, len(pairs)) | {
        "log": log_,
        "threads": torch.get_num_threads(),
        "minutes": _minutes(options),
        "metrics": [str(metric) for metric in metrics_of(options)],
        "beams": list(options.beams),
        "exclude_seen": config.search.exclude_seen,
        "plan": [],
        "minutes_needed": None,
        "own": {},
    }


def _run(
    contest: Contest,
    name: str,
    pairs: Sequence[EvaluationPair],
    metrics: Sequence[Metric],
    users_I: Int64,
    seconds: float | None,
    report: Report,
    figures: dict[Key, Figures],
) -> None:
    """Fit and measure a method, and add its rows, or the reason why it is not judged, to the report. users_I: as in `segments_of`."""
    log.info("%s%s …", name, "" if seconds is None else f", at most {seconds:.0f} s")
    exclude_seen, seed = contest.config.search.exclude_seen, contest.config.seed
    entry = attempted(contest, name, exclude_seen, seconds)
    if not isinstance(entry, str) and not is_judged(entry.fitted.share):
        entry = entry.fitted.ended or f"{entry.fitted.share:.0%} of its data"
    if isinstance(entry, str):
        report["not_judged"].append({"method": name, "reason": entry})
        return
    try:
        answers_BM = measure(entry, pairs, metrics, contest.metric, exclude_seen, seed, report, figures)
    except REFUSALS as refusal:  # of a caller's method, for some query
        report["not_judged"].append({"method": name, "reason": contest.refuse(name, exclude_seen, refusal)})
        return
    chosen_row = next(row for row in report["rows"] if row["method"] == name and row["chosen"])
    chosen_row["segments"] = segments_of(answers_BM, pairs, contest.metric, users_I)


def _minutes(options: CompareOptions) -> float | None:
    return None if options.seconds is None else options.seconds / 60


def _drop_rows_to_run_again(figures: Mapping[Key, Figures], report: Report, has_more_time: bool, own_digests: Mapping[str, str]) -> None:
    """Drop methods whose figures of single queries are lost: nothing can be compared with them. With more time than the earlier run had,
    drop methods that ended early, too. Drop the caller's methods whose file has changed, and fusions with them.
    """
    changed = {name for name, digest in own_digests.items() if report["own"].get(name, digest) != digest}
    dropped = {row["method"] for row in report["rows"] if (row["method"], row["seed"], row["beam_size"]) not in figures}
    dropped |= {fit["method"] for fit in report["fits"] if fit["ended"] and has_more_time}
    dropped |= {row["method"] for row in report["rows"] if changed & {row["method"], *row["method"].split(":")[1:]}}
    dropped |= {row["method"] for row in report["rows"]} - {fit["method"] for fit in report["fits"]}
    for part in ("rows", "fits"):
        report[part] = [entry for entry in report[part] if entry["method"] not in dropped]


def _position(name: str, methods: Sequence[str]) -> int:
    return methods.index(name) if name in methods else len(methods)
