"""A comparison as a table for a terminal: what each method finds, and what it costs to train, to hold and to ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from training.compare.report import Report
from training.compare.verdict import duration, size


def table(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], left_out: Mapping[str, str], metrics: Sequence[str]) -> str:
    """Rows by method and serving beam, then remarks: methods cut short, and those left out.

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
    lines += [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    return "\n".join(lines)


def show(report: Report) -> None:
    """Print the table and the two sentences."""
    log_, seen = report["log"], "left out" if report["exclude_seen"] else "not left out"
    print(f"{report['name']}: {log_['users']:,} users, {log_['items']:,} items, {log_['events']:,} events to learn from")
    print(
        f"split {report['config']['data']['split']['kind']}, {report['queries']:,} test queries, seen items {seen}; "
        f"everything chosen by {report['metric']} of validation queries; {report['seconds']:.0f} s in all"
    )
    if report["rows"]:
        left_out = {left["method"]: left["reason"] for left in report["left_out"]}
        print(table(report["rows"], report["fits"], left_out, list(report["rows"][0]["figures"])))
        print(*report["verdict"], sep="\n")
    if report["interrupted"]:
        print("interrupted: methods that are missing were not run")
