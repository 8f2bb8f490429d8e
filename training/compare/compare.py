"""`espalier compare`: the recipe and the baselines on one log, and whether a tree pays there.

Knows a configuration, names of methods, a time and files. How methods learn and answer is theirs.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..compare.contest import FUSION, MOST_QUERIES, QUICK, RECIPE, REFUSALS, Contest, attempted, in_order, named, parts_of
from ..compare.figures import Figures, Int64
from ..compare.plan import Plan, is_judged
from ..compare.recipe import MEMORY_SHARE
from ..compare.report import (
    Key,
    Report,
    continued,
    differences,
    field_of,
    measure,
    new_report,
    queries_file,
    queries_of,
    read_figures,
    save,
    save_figures,
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

KEPT = ("rows", "fits", "not_judged", "seconds", "minutes", "own")
"""What it takes over from there."""
LATE = "the methods before it took longer than planned"
MOST_MEASURING = 0.2
"""Of the whole time, for learning what methods need: trained baselines that are not measured by then are not judged."""
SAME = ("log", "config", "metrics", "queries", "beams")
"""What a report must have in common with the run that continues it."""


@dataclass(frozen=True)
class Asked:
    """What is compared, and for how long.

    baselines  name → method
    estimates  name → what the baseline needs of a log
    beams      serving beams of the recipe
    metrics    of the table; none: the usual ones
    own        methods of one's own → what they are known by: where that is another one, they are run again
    seconds    time of everything, by the clock; None: as long as it takes
    say        gets the plan, before it begins
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
    own: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = time.monotonic
    say: Callable[[str], None] = print


def compare(asked: Asked, json_file: Path | None) -> Report:
    """The report: what was run, `plan`, `rows`, `fits`, `not_judged`, `differences` and the two sentences of the `verdict`.

    json_file   written after every method; methods that are in it are not run again

    After an interrupt the report is of what was done until then, and says so. Raises InvalidConfig where the file holds another run,
    InvalidData where there is no test query.
    """
    begin = asked.clock()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepared = prepare(asked.config, asked.data, work / "log")
        contest = Contest(asked.config, prepared, work, asked.beams, asked.baselines, asked.device, asked.estimates, asked.clock)
        pairs = queries_of(prepared.split.test, asked.config.search.exclude_seen, MOST_QUERIES)
        metrics, users_I = metrics_of(asked), users_of_items(prepared.split.lists, prepared.split.train)
        report = _begun(asked, contest, pairs)
        figures: dict[Key, Figures] = {}
        if json_file is not None:
            report = continued(report, json_file, SAME, KEPT)
            figures = read_figures(queries_file(json_file))
        minutes, report["minutes"] = report["minutes"], _minutes(asked)
        has_more_time = minutes is not None and (asked.seconds is None or asked.seconds > 60 * minutes)
        _drop_rows_to_run_again(figures, report, has_more_time, asked.own)
        report["own"] = dict(asked.own)
        done = {row["method"] for row in report["rows"]}
        missing = in_order([name for name in asked.methods if name not in done])
        report["not_judged"] = [left for left in report["not_judged"] if left["method"] not in missing]
        try:
            for name, seconds in _turns(asked, contest, missing, begin, report):
                _run(contest, name, pairs, metrics, users_I, seconds, report, figures)
                _write(report, figures, json_file)
        except KeyboardInterrupt:
            report["interrupted"] = True
            log.warning("interrupted: what was done until now is reported")
    report["rows"].sort(key=lambda row: (_place(row["method"], asked.methods), row["beam_size"] or 0))
    report["differences"] = differences(report["rows"], figures, metrics)
    strong = STRONG if prepared.interactions.vectors_UF is None else "item-means"
    report["verdict"] = list(verdict(field_of(report, strong)))
    report["seconds"] = round(report["seconds"] + asked.clock() - begin, 3)
    _write(report, figures, json_file)
    return report


def _turns(asked: Asked, contest: Contest, names: Sequence[str], begin: float, report: Report) -> Iterator[tuple[str, float | None]]:
    """The methods one after another, each with its seconds: None where time is not limited, else as it is planned when its turn comes.

    Those that cannot be judged join the report's `not_judged`.
    """
    if asked.seconds is None:
        yield from ((name, None) for name in names)
        return
    plan = _planned(asked, contest, names, begin)
    asked.say(plan.table())
    report["plan"] = plan.rows()
    report["not_judged"] += [{"method": name, "reason": reason} for name, reason in plan.refused.items()]
    while shares := plan.shares():
        name = next(name for name in names if name in shares)
        spare_s = plan.spare_s(shares) if name == RECIPE else 0.0  # its steps may take longer than when they were measured
        plan.done.add(name)
        yield name, shares[name] + spare_s
    report["not_judged"] += [{"method": name, "reason": plan.reasons.get(name, LATE)} for name in names if name in plan.waiting]
    unjudged = [left["method"] for left in report["not_judged"] if left["method"] in plan.needs]
    if unjudged:
        report["minutes_needed"] = plan.minutes([RECIPE] if RECIPE in unjudged else unjudged)


def _planned(asked: Asked, contest: Contest, names: Sequence[str], begin: float) -> Plan:
    """What each method needs, the tree and quick methods first."""
    seconds = asked.seconds or 0.0
    needs: dict[str, Needs] = {}
    refused: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name != RECIPE, name != STRONG, name not in QUICK)):
        is_trained = name in asked.baselines and name not in QUICK
        if is_trained and asked.clock() - begin > MOST_MEASURING * seconds:
            refused[name] = "no time was left to measure what it needs"
            continue
        try:
            needs[name] = _needs(contest, name, names)
        except REFUSALS as refusal:
            refused[name] = named(refusal)
    if STRONG in needs and RECIPE in needs:  # the time that the tree would take for its memory
        least_s = min(needs[STRONG].full_s, max(needs[STRONG].least_s, MEMORY_SHARE * needs[RECIPE].least_s))
        needs[STRONG] = replace(needs[STRONG], least_s=least_s)
    needs = {name: needs[name] for name in names if name in needs}
    return Plan(asked.clock, begin, seconds, needs, {name: contest.answering_seconds(name) for name in needs}, refused)


def _needs(contest: Contest, name: str, names: Sequence[str]) -> Needs:
    """What the method needs, with those parts of a fusion that are not among the methods themselves."""
    exclude_seen = contest.config.search.exclude_seen
    found = contest.needs(name, exclude_seen, has_neighbours=STRONG in names)
    for part in parts_of(name) if name.split(":")[0] == FUSION else ():
        if part not in names:
            of_part = contest.needs(part, exclude_seen)
            found = Needs(found.least_s + of_part.least_s, found.full_s + of_part.full_s)
    return found


def metrics_of(asked: Asked) -> list[Metric]:
    """Those of the table: the ones that were asked for, or recall and nDCG at 10 and at the configured `search.m`; and in any case the
    recall there, by which everything is chosen.
    """
    m = asked.config.search.m
    usual = [metric for other in sorted({10, m}) for metric in (Metric("recall", other), Metric("ndcg", other))]
    return list(dict.fromkeys([*(asked.metrics or usual), Metric("recall", m)]))


def _begun(asked: Asked, contest: Contest, pairs: Sequence[EvaluationPair]) -> Report:
    config, lists = asked.config, contest.prepared.interactions
    log_: dict[str, Any] = {"sha256": lists.fingerprint, "users": lists.user_count, "items": lists.item_count}
    log_ |= {"events": lists.event_count, "bad_rows": dict(lists.bad_rows)}
    if isinstance(config.data.split, FileSplit):
        with config.data.split.test.open("rb") as test:
            log_["test_sha256"] = hashlib.file_digest(test, "sha256").hexdigest()
    return new_report(config, contest.metric, len(pairs)) | {
        "log": log_,
        "threads": torch.get_num_threads(),
        "minutes": _minutes(asked),
        "metrics": [str(metric) for metric in metrics_of(asked)],
        "beams": list(asked.beams),
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
    """Fit and measure a method; its rows, or why it is not judged, join the report. users_I: as `segments_of` has it."""
    log.info("%s%s …", name, "" if seconds is None else f", at most {seconds:.0f} s")
    exclude_seen, seed = contest.config.search.exclude_seen, contest.config.seed
    entry = attempted(contest, name, exclude_seen, seconds)
    if not isinstance(entry, str) and not is_judged(entry.fitted.share):
        entry = entry.fitted.ended or f"{entry.fitted.share:.0%} of its data"
    if isinstance(entry, str):
        report["not_judged"].append({"method": name, "reason": entry})
        return
    found_BM = measure(entry, pairs, metrics, contest.metric, exclude_seen, seed, report, figures)
    chosen = next(row for row in report["rows"] if row["method"] == name and row["chosen"])
    chosen["segments"] = segments_of(found_BM, pairs, contest.metric, users_I)


def _write(report: Report, figures: Mapping[Key, Figures], json_file: Path | None) -> None:
    if json_file is not None:
        save_figures(figures, queries_file(json_file))
        save(report, json_file)


def _minutes(asked: Asked) -> float | None:
    return None if asked.seconds is None else asked.seconds / 60


def _drop_rows_to_run_again(figures: Mapping[Key, Figures], report: Report, has_more_time: bool, own: Mapping[str, str]) -> None:
    """Methods whose figures of each query are no longer there: nothing could be compared with them. With more time than the earlier run
    had, those that ended early, too. own: see `Asked`."""
    lost = {row["method"] for row in report["rows"] if (row["method"], row["seed"], row["beam_size"]) not in figures}
    lost |= {fit["method"] for fit in report["fits"] if fit["ended"] and has_more_time}
    lost |= {name for name, known in own.items() if report["own"].get(name, known) != known}
    lost |= {row["method"] for row in report["rows"]} - {fit["method"] for fit in report["fits"]}
    for part in ("rows", "fits"):
        report[part] = [entry for entry in report[part] if entry["method"] not in lost]


def _place(name: str, methods: Sequence[str]) -> int:
    return methods.index(name) if name in methods else len(methods)
