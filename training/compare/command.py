"""What `espalier compare` does with its options: checks them, compares, prints a table and draws."""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from espalier.errors import InvalidConfig

from ..baselines.methods import FOR_VECTORS, METHODS, NEEDS
from ..baselines.own import own_method
from ..baselines.own_lists import is_listed, listed_method, write_queries
from ..compare import texts
from ..compare.compare import Asked, compare
from ..compare.contest import FUSION, RECIPE, checked_names
from ..compare.plot import plot_rows
from ..compare.report import Report
from ..compare.verdict import duration, size
from ..deep.fit import pick_device
from ..deep.prepare import prepare
from ..retrieval.needs import by_parts
from ..retrieval.task import Method, Metric
from ..run_log import RunLog
from ..specification.deep import NeighboursConfig
from ..specification.linear import LinearConfig
from ..specification.log_format import VectorsFormat
from ..specification.models import read_config

log = logging.getLogger(__name__)

DEFAULT_METHODS = ("popularity", "item-cf", "neighbours", "ease", "ials", "product-dnn", "sasrec", RECIPE, "fusion")
BEAMS, BEAMS_OF_TEXTS = (50, 200, 800), (10, 50, 200)
VECTOR_METHODS = (*FOR_VECTORS, RECIPE, f"{FUSION}:{RECIPE}:item-means")


def run(
    config: Path,
    data: Path | None,
    methods: str | None,
    minutes: float | None,
    beams: list[int] | None,
    json_file: Path | None,
    plot: Path | None,
    device: Literal["auto", "cpu", "cuda"],
    own: Sequence[str] = (),
    metrics: str | None = None,
    segments: bool = False,
    log_to: str | None = None,
) -> Report:
    """Compare, print the table and the verdict, and write the files that were asked for. Raises InvalidConfig on a wrong option.

    own       methods of one's own, as `own_method` and `listed_method` find them
    metrics   of the table, comma-separated; None: the usual ones
    segments  print them, too
    log_to    where figures go besides, as `RunLog.opened` has it
    """
    judged_by = check_options(minutes, beams, metrics, plot)
    seconds = None if minutes is None else 60 * minutes
    for file in (json_file, plot):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    settings = read_config(config, train=data)
    added: dict[str, Method] = {}
    for where in own:
        name, method = listed_method("--own", Path(where)) if is_listed(Path(where)) else own_method("--own", where)
        if name in added or name in METHODS or name in (RECIPE, FUSION):
            raise InvalidConfig("--own", where, f"a name that no other method has, not {name}")
        added[name] = method
    if isinstance(settings, LinearConfig):
        if own:
            raise InvalidConfig("--own", ", ".join(own), "nothing here: methods of texts cannot be added")
        if device == "cuda":
            raise InvalidConfig("--device", device, "cpu or auto: models of texts are trained on the CPU")
        for option, given in (("--metrics", metrics), ("--segments", segments or None)):
            if given is not None:
                raise InvalidConfig(option, given, "nothing here: methods of texts are judged by nDCG@10, recall@10 and recall@100")
        wanted = None if methods is None else checked_names(methods, texts.NAMES, fusions=False)
        with RunLog.opened("--log-to", log_to, settings.name) as run_log:
            report = texts.compare_texts(settings, wanted, seconds, beams or BEAMS_OF_TEXTS, json_file)
            log_report(run_log, report)
        texts.show(report)
        show_methods(report)
        if plot is not None and report["rows"]:
            plot_rows(report["rows"], set(), report["metric"], f"{report['name']}, {report['queries']:,} test queries", plot)
        return report
    if isinstance(settings, NeighboursConfig):
        raise InvalidConfig(
            "kind", settings.kind, "a kind that trains a tree, such as otm-sequence: neighbours are compared with it anyway"
        )
    usual = VECTOR_METHODS if isinstance(settings.data.format, VectorsFormat) else DEFAULT_METHODS
    baselines = METHODS | added
    names = list(usual) if methods is None else checked_names(methods, [RECIPE, *baselines])
    names = [*added, *(name for name in names if name not in added)]  # their own first: it is not what time may run out for
    needs = NEEDS | {name: by_parts(method, trials=1) for name, method in added.items()}
    digests = {name: _digest(where) for name, where in zip(added, own, strict=True)}
    asked = Asked(settings, data, names, baselines, needs, beams or BEAMS, seconds, pick_device(device), judged_by, digests)
    with RunLog.opened("--log-to", log_to, settings.name) as run_log:
        report = compare(asked, json_file)
        log_report(run_log, report)
    show(report)
    if segments:
        show_segments(report)
    if plot is not None and report["rows"]:
        title = f"{report['name']}, {report['log']['items']:,} items, {report['queries']:,} test queries"
        early = {fit["method"] for fit in report["fits"] if fit["ended"]}
        plot_rows(report["rows"], early, report["metric"], title, plot)
    return report


def write_asked(config: Path, data: Path | None, folder: Path) -> None:
    """Write what methods learn from and what they are asked, for one that runs elsewhere. Raises InvalidConfig unless that is histories."""
    settings = read_config(config, train=data)
    if isinstance(settings, LinearConfig | NeighboursConfig) or isinstance(settings.data.format, VectorsFormat):
        raise InvalidConfig("--queries-to", str(folder), "a log of histories: queries of others are in files already")
    with tempfile.TemporaryDirectory() as work:
        prepared = prepare(settings, data, Path(work))
        write_queries(prepared.split, prepared.items, folder)
    learned, asked = folder / "train.parquet", folder / "queries.parquet"
    print(f"{learned} (user, item) is what to learn from, {asked} (part, user, history) what is asked; compare --own takes the answers")


def _digest(where: str) -> str:
    """That of a file of lists, by which another one of that name is known; of a module none."""
    if not is_listed(Path(where)):
        return ""
    with Path(where).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_options(minutes: float | None, beams: list[int] | None, metrics: str | None, plot: Path | None) -> list[Metric]:
    """The metrics that were asked for. Raises InvalidConfig for what is wrong whatever the log is: reading that may take a while."""
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InvalidConfig("--plot", str(plot), "a file name that ends in .png or .svg")
    if minutes is not None and not 0 < minutes < math.inf:
        raise InvalidConfig("--minutes", minutes, "a finite number above 0")
    if beams is not None and min(beams) < 1:
        raise InvalidConfig("--beam", beams, "serving beams of at least 1")
    return [] if metrics is None else [Metric.named("--metrics", name.strip()) for name in metrics.split(",")]


def table(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], not_judged: Mapping[str, str], metrics: Sequence[str]) -> str:
    """Rows by method and serving beam, then remarks: methods cut short, and those that are not judged.

    rows   {"method", "beam_size", "ms_per_query", "figures": {metric: {"mean", "se"}}}
    fits   {"method", "seconds", "bytes", "ended"}
    """
    cost = {fit["method"]: fit for fit in fits}
    names = [row["method"] + ("" if row["beam_size"] is None else f", beam {row['beam_size']}") for row in rows]
    width = max([len("method"), *map(len, names)])
    lines = [
        f"{'method':{width}}  " + "  ".join(f"{metric:>15}" for metric in metrics) + f"  {'to train':>9} {'to hold':>9} {'ms/query':>9}"
    ]
    short = [name for name, fit in cost.items() if fit["ended"]]
    for name, row in zip(names, rows, strict=True):
        fit = cost[row["method"]]
        figures = "  ".join(f"{row['figures'][metric]['mean']:.4f} ± {row['figures'][metric]['se']:.4f}" for metric in metrics)
        costs = f"{duration(fit['seconds']):>9} {size(fit['bytes']):>9} {row['ms_per_query']:9.3f}"
        lines.append(f"{name:{width}}  {figures}  {costs}" + (" *" if fit["ended"] else ""))
    lines += [f"* {name} ended early: {cost[name]['ended']}" for name in short]
    lines += [f"not judged: {name}: {reason}" for name, reason in not_judged.items()]
    return "\n".join(lines)


def show(report: Report) -> None:
    log_, seen = report["log"], "left out" if report["exclude_seen"] else "not left out"
    print(f"{report['name']}: {log_['users']:,} users, {log_['items']:,} items, {log_['events']:,} events to learn from")
    print(
        f"split {report['config']['data']['split']['kind']}, {report['queries']:,} test queries, seen items {seen}; "
        f"everything chosen by {report['metric']} of validation queries; {report['seconds']:.0f} s in all"
    )
    show_methods(report)


def show_methods(report: Report) -> None:
    not_judged = {left["method"]: left["reason"] for left in report["not_judged"]}
    metrics = list(report["rows"][0]["figures"]) if report["rows"] else []
    print(table(report["rows"], report["fits"], not_judged, metrics))
    print(*report["verdict"], sep="\n")
    if report["interrupted"]:
        print("interrupted: methods that are missing were not run")


def show_segments(report: Report) -> None:
    """Print what each method finds for whom, at its chosen beam."""
    for row in report["rows"]:
        if "segments" not in row:
            continue
        found = row["segments"]
        popularity = "" if found["popularity"] is None else f", items {found['popularity']:.2f} times as popular as what is relevant"
        print(f"{row['method']}: shows {found['coverage']:.1%} of the catalogue{popularity}")
        for segment in (*found["users"], *found["items"]):
            print(f"  {found['metric']} of {segment['of']}: {segment['mean']:.4f} ± {segment['se']:.4f}, {segment['queries']:,} queries")


def log_report(run_log: RunLog, report: Report) -> None:
    """The figures of each method at its chosen beam, and what it cost."""
    for row in report["rows"]:
        if row.get("chosen", True):
            values = {metric: figure["mean"] for metric, figure in row["figures"].items()}
            run_log.figures(row["method"], values | {"ms_per_query": row["ms_per_query"]})
    for fit in report["fits"]:
        run_log.figures(fit["method"], {"seconds": fit["seconds"], "bytes": fit["bytes"]})
