"""The report of a run: its rows as JSON, and as Markdown tables for people.

Knows the rows. Does not run anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import COLUMNS, END, Attempt, Row, latest, read
from benchmarks.gpu.stages import CARD

HIDDEN = {*COLUMNS, "engine", "form", "items", "beam_size", "batch", "precision", "masked", "check", "note", "tuning", "kernels"}
"""Keys that a stage's table does not show again under `more`."""


def rows_of(attempts: dict[str, Attempt]) -> list[Row]:
    """What the last attempts found, and how each ended."""
    return [row for attempt in attempts.values() for row in (*attempt.rows, *([attempt.end] if attempt.end is not None else []))]


def wrong(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["ok"] is False]


def name_of(card: str | None) -> str:
    """A card's name in a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", (card or "no gpu").lower()).strip("-")


def write(lines: Path, folder: Path, command: str) -> tuple[Path, Path]:
    """The report of a file of rows, as gpu_all_<card>_<date>.json and .md in the folder."""
    attempts = latest(read(lines))
    rows = rows_of(attempts)
    device: Row = next((row for row in rows if row["stage"] == CARD and row["case"] == "device"), {})
    date = max(str(attempt.begin["date"]) for attempt in attempts.values())[:10]
    stem = f"gpu_all_{name_of(device.get('card'))}_{date}"
    keys = {str(attempt.begin.get("key")) for attempt in attempts.values()}
    report = {"card": device.get("card"), "date": date, "command": command, "versions": device.get("versions"), "host": device.get("host")}
    as_json, as_text = folder / f"{stem}.json", folder / f"{stem}.md"
    as_json.write_text(json.dumps(report | {"keys": sorted(keys), "rows": rows}, indent=1) + "\n")
    as_text.write_text(markdown(report, attempts, rows, device))
    return as_json, as_text


def markdown(report: Row, attempts: dict[str, Attempt], rows: Sequence[Row], device: Row) -> str:
    versions = ", ".join(f"{name} {version or '–'}" for name, version in (report["versions"] or {}).items())
    parts = [
        f"# {report['card'] or 'No GPU'}, {report['date']}\n\n`{report['command']}`\n",
        f"{report['host']}; driver {device.get('driver')}; {versions}\n",
        _stages(attempts),
    ]
    failed = [row for row in wrong(rows) if row["case"] != END]
    if failed:
        parts.append(
            "## What is wrong\n\n" + _table(("stage", "case", "note"), [[row["stage"], row["case"], row.get("note")] for row in failed])
        )
    parts.append(_correctness(rows))
    for stage in attempts:
        own = [row for row in rows if row["stage"] == stage and row["case"] != END and "check" not in row]
        if own:
            shown = [[row["case"], _ok(row), row["ms"], row["queries_per_s"], _more(row)] for row in own]
            parts.append(f"## {stage}\n\n" + _table(("case", "ok", "ms", "queries/s", "more"), shown))
    return "\n".join(part for part in parts if part)


def _stages(attempts: dict[str, Attempt]) -> str:
    found = []
    for stage, attempt in attempts.items():
        seconds = None if attempt.end is None else round((attempt.end["ms"] or 0) / 1e3, 1)
        found.append([stage, attempt.status or "interrupted", seconds, len(attempt.rows), len(wrong(attempt.rows)) or None])
    return "## Stages\n\n" + _table(("stage", "ended", "s", "rows", "wrong"), found)


def _correctness(rows: Sequence[Row]) -> str:
    """How many cases of each engine, scorer form, precision and check were right."""
    counts: dict[tuple[str, ...], list[int]] = {}
    checks = list(dict.fromkeys(row["check"] for row in rows if row.get("check")))
    notes: dict[tuple[str, ...], str] = {}
    for row in rows:
        if "check" not in row:
            continue
        key = (row["engine"], row["form"], row["precision"])
        counts.setdefault(key, [0, 0] * len(checks))
        if row["ok"] is None:
            notes[key] = row.get("note", "")
        if row["check"] and row["ok"] is not None:
            at = 2 * checks.index(row["check"])
            counts[key][at] += row["ok"]
            counts[key][at + 1] += 1
    if not counts:
        return ""
    found = [
        [*key, *(f"{count[at]} of {count[at + 1]}" if count[at + 1] else None for at in range(0, len(count), 2)), notes.get(key)]
        for key, count in counts.items()
    ]
    return "## Correctness\n\n" + _table(("engine", "scorer", "precision", *checks, "note"), found)


def _ok(row: Row) -> str | None:
    return {True: "yes", False: "NO", None: None}[row["ok"]]


def _more(row: Row) -> str:
    more = [f"{key} {_short(value)}" for key, value in row.items() if key not in HIDDEN and value is not None]
    return ", ".join(([row["note"]] if row.get("note") else []) + more)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_short(each)}" for key, each in list(value.items())[:24]) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        text = "" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]) + "\n"
