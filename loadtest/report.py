"""Writes the report of a sweep from the document in sweep.json: sweep.csv, sweep.md and the frontier plots.

Knows the document and tables. Does not know how the figures were measured.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from .cell import LOAD_SHARE, failed_share
from .frontier import MAX_FAILED_SHARE, Point, Proposal, plot_frontier, propose
from .target import Json

COLUMNS = ("beam_size", "m", "recall", "p50_ms", "p95_ms", "p99_ms", "requests_per_s", "ms_per_query", "loop")
FEW_SAMPLES = 100
"""A 99th percentile of fewer samples is unreliable and gets UNRELIABLE_MARK."""
UNRELIABLE_MARK = " \\*"
LATE_SHARE = 0.1
"""A warning is written if requests of an open loop left later than this share of the p99: the load generator itself was busy."""


def write_report(document: Json, folder: Path, budgets_ms: Sequence[float]) -> list[str]:
    """Write all files into `folder`. Returns the lines of the table of proposals, and the warnings."""
    points = points_of(document)
    proposals = [proposal for budget_ms in budgets_ms for proposal in propose(points, budget_ms)]
    write_csv(document, folder / "sweep.csv")
    warning_texts = warnings(document)
    (folder / "sweep.md").write_text(markdown(document, proposals, warning_texts))
    if points:
        title = f"{document['model']['name']} version {document['model']['version']}, {document['model']['engine']}"
        plot_frontier(points, proposals, title, [folder / "frontier.png", folder / "frontier.svg"])
    return [*_proposals(proposals), *(f"warning: {warning}" for warning in warning_texts)]


def points_of(document: Json) -> list[Point]:
    return [
        Point(
            beam_size=cell["beam_size"],
            m=cell["m"],
            loop=loop,
            recall=cell["recall"],
            p99_ms=float("nan") if figures["p99_ms"] is None else figures["p99_ms"],
            requests_per_s=figures["requests_per_s"],
            samples=figures["samples"],
            failed_share=failed_share(figures),
        )
        for cell in cells_of(document)
        for loop, figures in cell["loops"].items()
    ]


def cells_of(document: Json) -> list[Json]:
    """The cells, sorted by m, then by beam size."""
    return sorted(document["cells"], key=lambda cell: (cell["m"], cell["beam_size"]))


def write_csv(document: Json, file: Path) -> None:
    """A row per beam size, m and loop. Figures that were not measured are empty."""
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for cell in cells_of(document):
            for loop, figures in cell["loops"].items():
                row = {name: figures[name] if name in figures else cell.get(name) for name in COLUMNS[:-1]} | {"loop": loop}
                writer.writerow({name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()})


def warnings(document: Json) -> list[str]:
    texts = []
    for cell in cells_of(document):
        cell_name = f"beam {cell['beam_size']}, m {cell['m']}"
        if cell["recall_unanswered"]:
            texts.append(f"{cell_name}: no recall, {cell['recall_unanswered']} of its queries were not answered")
        if cell["recall_degraded"]:
            texts.append(f"{cell_name}: {cell['recall_degraded']} of the queries for recall were searched with a smaller beam")
        failures = {status: count for status, count in cell["capacity_statuses"].items() if status != "200"}
        if failures:
            clients = cell["capacity_connections"]
            texts.append(f"{cell_name}: statuses {_counts(failures)} while the capacity was measured with {clients} clients")
        for loop, figures in cell["loops"].items():
            loop_name = f"{cell_name}, {loop} loop"
            if figures["failed"]:
                share = failed_share(figures)
                remark = "; its percentiles are of the answered alone" if share > MAX_FAILED_SHARE else ""
                failures = {status: count for status, count in figures["statuses"].items() if status != "200"}
                texts.append(f"{loop_name}: {figures['failed']} requests ({share:.2%}) failed, statuses {_counts(failures)}{remark}")
            if figures["degraded"]:
                texts.append(f"{loop_name}: {figures['degraded']} requests were searched with a smaller beam, because of their deadline")
            late_ms, p99_ms = figures["late_p99_ms"], figures["p99_ms"]
            if loop == "open" and late_ms is not None and p99_ms is not None and late_ms > max(LATE_SHARE * p99_ms, 0.2):
                texts.append(f"{loop_name}: 1 % of the requests left {late_ms:.2f} ms late or more, which is in the p99 of {p99_ms:.2f} ms")
    return texts


def _counts(statuses: dict[str, int]) -> str:
    return ", ".join(f"{'no answer' if status == '0' else status}: {count}" for status, count in statuses.items())


def markdown(document: Json, proposals: Sequence[Proposal], warning_texts: Sequence[str]) -> str:
    lines = _introduction(document)
    if proposals:
        lines += ["## The beam that a budget buys", "", *_proposals(proposals), ""]
    for m in sorted({cell["m"] for cell in document["cells"]}):
        lines += _table(m, [cell for cell in cells_of(document) if cell["m"] == m])
    if any("writes" in cell for cell in document["cells"]):
        lines += _writes(cells_of(document))
    if any(loop["samples"] < FEW_SAMPLES for cell in document["cells"] for loop in cell["loops"].values()):
        lines += [f"{UNRELIABLE_MARK.strip()} of fewer than {FEW_SAMPLES} requests: hardly more than the slowest one.", ""]
    if warning_texts:
        lines += ["## Warnings", "", *(f"- {warning}" for warning in warning_texts), ""]
    if document["cells"]:
        lines += ["![Recall against p99, one point per beam size](frontier.png)", ""]
    return "\n".join(lines)


def _introduction(document: Json) -> list[str]:
    model, settings, queries = document["model"], document["settings"], document["queries"]
    days = sorted({cell["measured"][:10] for cell in document["cells"]})
    rate = settings["rate_per_s"]
    clients = " or ".join(sorted({str(cell["capacity_connections"]) for cell in document["cells"]}, key=int))
    deadline = "the service's own" if settings["timeout_ms"] is None else f"{settings['timeout_ms']:g} ms"
    offered = f"{rate:g} requests/s" if rate else f"{LOAD_SHARE:.0%} of the cell's capacity"
    seen = ", seen items excluded from the answers and from what is relevant" if settings["exclude_seen"] else ""
    items = f", {model['items']} items" if model["items"] else ""
    return [
        f"# Recall against latency: {model['name']} version {model['version']}",
        "",
        f"- Model: {model['name']} version {model['version']} on `{model['engine']}`{items}",
        f"- Service: {settings['url']}; load from: {document['hardware']}",
        f"- Date: {' to '.join([days[0], days[-1]] if len(days) > 1 else days) or 'nothing is finished'}",
        f"- Command: `{document['command']}`",
        f"- Queries: {queries['count']} from {queries['source']}, {queries['with_relevant']} of them with relevant items{seen}",
        f"- Deadline of a request: {deadline}",
        "",
        "Every request holds one query. Latencies are wall time at the client, in ms, of the requests that were answered 200; "
        "ms/query is the mean of what the answers say of the engine's time.",
        *(
            [f"Each loop ran {settings['rounds']} times; a figure is the median of its rounds, a count their sum."]
            if settings["rounds"] > 1
            else []
        ),
        "",
        "- recall: recall@m over all queries with relevant items, through HTTP, one after the other, outside of the loops.",
        f"- closed: one client for {settings['seconds']:g} s, which sends its next request when it has its answer.",
        f"- open: requests at random times, for {settings['seconds']:g} s, {offered}, timed from when they are due: waiting counts.",
        *([f"- mixed: as open, with {settings['writes_per_s']:g} items put per second beside it."] if "writes_per_s" in settings else []),
        f"- capacity: requests/s of {clients} clients in a closed loop, for {settings['seconds'] / 2:g} s.",
        "",
    ]


def _proposals(proposals: Sequence[Proposal]) -> list[str]:
    if not proposals:
        return []
    lines = [
        "The largest recall whose p99 is within the budget. The open loop is what counts: with one client nobody waits for another.",
        "",
        "| p99 within | m | loop | beam | recall | p99 ms | requests/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for proposal in proposals:
        start = f"| {proposal.budget_ms:g} ms | {proposal.m} | {proposal.loop} |"
        best, fastest = proposal.best, proposal.fastest
        if best is not None:
            mark = "" if best.samples >= FEW_SAMPLES else UNRELIABLE_MARK
            recall = _optional(best.recall, ".4f")
            lines.append(f"{start} **{best.beam_size}** | {recall} | {best.p99_ms:.2f}{mark} | {best.requests_per_s:.0f} |")
        else:
            reason = f"smallest p99: {fastest.p99_ms:.2f}, of beam {fastest.beam_size}" if fastest else "nothing was answered well enough"
            lines.append(f"{start} none | | {reason} | |")
    return lines


def _table(m: int, cells: Sequence[Json]) -> list[str]:
    lines = [
        f"## m = {m}",
        "",
        "| beam | recall | loop | offered/s | requests/s | p50 | p95 | p99 | ms/query | answered | failed | capacity/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for loop, figures in cell["loops"].items():
            p50, p95, p99 = (_optional(figures[name], ".3f") for name in ("p50_ms", "p95_ms", "p99_ms"))
            mark = "" if figures["samples"] >= FEW_SAMPLES else UNRELIABLE_MARK
            lines.append(
                f"| {cell['beam_size']} | {_optional(cell['recall'], '.4f')} | {loop} | {_optional(figures['offered_per_s'], '.0f')} "
                f"| {figures['requests_per_s']:.0f} | {p50} | {p95} | {p99}{mark} | {_optional(figures['ms_per_query'], '.3f')} "
                f"| {figures['samples']} | {figures['failed']} | {cell['capacity_per_s']:.0f} |"
            )
    return [*lines, ""]


def _writes(cells: Sequence[Json]) -> list[str]:
    lines = [
        "## Writes of the mixed loop",
        "",
        "| beam | m | offered/s | p50 | p99 | done | failed | statuses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        writes = cell.get("writes")
        if writes is not None:
            p50, p99 = (_optional(writes[name], ".3f") for name in ("p50_ms", "p99_ms"))
            counts = f"{writes['samples']} | {writes['failed']} | {_counts(writes['statuses'])}"
            lines.append(f"| {cell['beam_size']} | {cell['m']} | {writes['offered_per_s']:.0f} | {p50} | {p99} | {counts} |")
    return [*lines, ""]


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
