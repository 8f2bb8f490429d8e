"""The command `espalier compare`: checks the options, compares, prints a table and draws a plot."""

from __future__ import annotations

import logging
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from espalier.bundle_files import sha256_of
from espalier.errors import InvalidConfig

from ..baselines.methods import FOR_VECTORS, METHODS, NEEDS
from ..baselines.own_lists import is_listed, listed_method, write_queries
from ..baselines.own_method import own_method
from ..compare import texts
from ..compare.compare import CompareOptions, compare
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
    """Compare, print the table and the verdict, and write the requested files. Raises InvalidConfig for a wrong option.

    own       the caller's own methods, as in `own_method` and `listed_method`
    metrics   of the table, comma-separated; None: the default ones
    segments  whether to print segments, too
    log_to    where to note figures, as in `RunLog.opened`
    """
    judged_by = check_options(minutes, beams, metrics, plot, json_file)
    seconds = None if minutes is None else 60 * minutes
    for file in (json_file, plot):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    settings = read_config(config, train=data)
    own_methods: dict[str, Method] = {}
    for source in own:
        name, method = listed_method("--own", Path(source)) if is_listed(Path(source)) else own_method("--own", source)
        if name in own_methods or name in METHODS or name == RECIPE or name.split(":")[0] == FUSION:
            raise InvalidConfig("--own", source, f"a name that no other method has, not {name}")
        own_methods[name] = method
    if isinstance(settings, LinearConfig):
        if own:
            raise InvalidConfig("--own", ", ".join(own), "nothing here: methods of texts cannot be added")
        if device == "cuda":
            raise InvalidConfig("--device", device, "cpu or auto: models of texts are trained on the CPU")
        for option, value in (("--metrics", metrics), ("--segments", segments or None)):
            if value is not None:
                raise InvalidConfig(option, value, "nothing here: methods of texts are judged by nDCG@10, recall@10 and recall@100")
        requested_methods = None if methods is None else checked_names(methods, texts.NAMES, fusions=False)
        with RunLog.opened("--log-to", log_to, settings.name) as run_log:
            report = texts.compare_texts(settings, requested_methods, seconds, beams or BEAMS_OF_TEXTS, json_file)
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
    default_methods = VECTOR_METHODS if isinstance(settings.data.format, VectorsFormat) else DEFAULT_METHODS
    baselines = METHODS | own_methods
    names = list(default_methods) if methods is None else checked_names(methods, [RECIPE, *baselines])
    names = [*own_methods, *(name for name in names if name not in own_methods)]  # own methods first: the time must not run out for them
    needs = NEEDS | {name: by_parts(method, trials=1) for name, method in own_methods.items()}
    digests = {name: _digest(source) for name, source in zip(own_methods, own, strict=True)}
    options = CompareOptions(settings, data, names, baselines, needs, beams or BEAMS, seconds, pick_device(device), judged_by, digests)
    with RunLog.opened("--log-to", log_to, settings.name) as run_log:
        report = compare(options, json_file)
        log_report(run_log, report)
    show(report)
    if segments:
        show_segments(report)
    if plot is not None and report["rows"]:
        title = f"{report['name']}, {report['log']['items']:,} items, {report['queries']:,} test queries"
        early = {fit["method"] for fit in report["fits"] if fit["ended"]}
        plot_rows(report["rows"], early, report["metric"], title, plot)
    return report


def export_queries(config: Path, data: Path | None, folder: Path) -> None:
    """Write training lists and queries for a method that runs elsewhere. Raises InvalidConfig unless queries are histories."""
    settings = read_config(config, train=data)
    if isinstance(settings, LinearConfig | NeighboursConfig) or isinstance(settings.data.format, VectorsFormat):
        raise InvalidConfig("--queries-to", str(folder), "a log of histories: queries of others are in files already")
    with tempfile.TemporaryDirectory() as work:
        prepared = prepare(settings, data, Path(work))
        write_queries(prepared.split, prepared.items, folder)
    train, queries = folder / "train.parquet", folder / "queries.parquet"
    print(f"{train} (user, item) is what to learn from, {queries} (part, user, history) what is asked; compare --own takes the answers")


def _digest(source: str) -> str:
    """SHA-256 of a file of lists, or of an imported module's file; "" for a module without one. Modules that it imports are not read."""
    path = source if is_listed(Path(source)) else sys.modules[source.partition(":")[0]].__file__
    return "" if path is None else sha256_of(Path(path))


def check_options(
    minutes: float | None, beams: list[int] | None, metrics: str | None, plot: Path | None, json_file: Path | None
) -> list[Metric]:
    """The requested metrics. Raises InvalidConfig for options that are wrong for any log: reading the log may take a while."""
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InvalidConfig("--plot", str(plot), "a file name that ends in .png or .svg")
    if json_file is not None and json_file.exists() and not json_file.is_file():
        raise InvalidConfig("--json", str(json_file), "a file, not a folder, a device or a pipe, which would be read and replaced")
    if minutes is not None and not 0 < minutes < math.inf:
        raise InvalidConfig("--minutes", minutes, "a finite number above 0")
    if beams is not None and min(beams) < 1:
        raise InvalidConfig("--beam", beams, "serving beams of at least 1")
    return [] if metrics is None else [Metric.named("--metrics", name.strip()) for name in metrics.split(",")]


def table(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], not_judged: Mapping[str, str], metrics: Sequence[str]) -> str:
    """Rows by method and serving beam, then methods that ended early, and methods that are not judged.

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
    log_info, seen_text = report["log"], "left out" if report["exclude_seen"] else "not left out"
    print(f"{report['name']}: {log_info['users']:,} users, {log_info['items']:,} items, {log_info['events']:,} events to learn from")
    print(
        f"split {report['config']['data']['split']['kind']}, {report['queries']:,} test queries, seen items {seen_text}; "
        f"everything chosen by {report['metric']} of validation queries; {report['seconds']:.0f} s in all"
    )
    show_methods(report)


def show_methods(report: Report) -> None:
    not_judged = {entry["method"]: entry["reason"] for entry in report["not_judged"]}
    metrics = list(report["rows"][0]["figures"]) if report["rows"] else []
    print(table(report["rows"], report["fits"], not_judged, metrics))
    print(*report["verdict"], sep="\n")
    if report["interrupted"]:
        print("interrupted: methods that are missing were not run")


def show_segments(report: Report) -> None:
    for row in report["rows"]:
        if "segments" not in row:
            continue
        segments = row["segments"]
        popularity = "" if segments["popularity"] is None else f", items {segments['popularity']:.2f} times as popular as what is relevant"
        print(f"{row['method']}: shows {segments['coverage']:.1%} of the catalogue{popularity}")
        for segment in (*segments["users"], *segments["items"]):
            print(f"  {segments['metric']} of {segment['of']}: {segment['mean']:.4f} ± {segment['se']:.4f}, {segment['queries']:,} queries")


def log_report(run_log: RunLog, report: Report) -> None:
    """Note the figures of each method at its chosen beam, and its costs."""
    for row in report["rows"]:
        if row.get("chosen", True):
            values = {metric: figure["mean"] for metric, figure in row["figures"].items()}
            run_log.figures(row["method"], values | {"ms_per_query": row["ms_per_query"]})
    for fit in report["fits"]:
        run_log.figures(fit["method"], {"seconds": fit["seconds"], "bytes": fit["bytes"]})
