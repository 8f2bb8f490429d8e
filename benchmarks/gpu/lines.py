"""The file of rows: one JSON object a line, appended at once, so that a kill loses nothing.

Every row has the keys of COLUMNS and those of its stage. A run of a stage is one attempt: its row `begin`, its rows, its row `end` with a
status. An interrupted attempt has no `end`.

Knows rows and files. Does not know what is measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = ("stage", "case", "ok", "ms", "queries_per_s", "card")
"""ok: True, False, or None if nothing was checked; then `note` says why."""
BEGIN, END = "begin", "end"
COMPLETE = ("done", "cut")
"""Statuses of an attempt that is not run again; `cut`: its time ended before its last cases."""


def append(path: Path, row: Row) -> None:
    """Add a row, with one write, so that several processes may append at once. First end a line that a kill cut off."""
    line = json.dumps({column: row.get(column) for column in COLUMNS} | row) + "\n"
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode())


def reason(error: BaseException) -> str:
    """An exception as a row's note."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:500]


def read(path: Path) -> list[Row]:
    """The rows of a file, without incomplete lines; none if the file is missing."""
    rows: list[Row] = []
    if not path.is_file():
        return rows
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and set(COLUMNS) <= set(row):
            rows.append(row)
    return rows


@dataclass
class Attempt:
    """One run of a stage. status: None if it was interrupted."""

    begin: Row
    rows: list[Row] = field(default_factory=list)
    end: Row | None = None

    @property
    def status(self) -> str | None:
        return None if self.end is None else str(self.end["status"])

    def complete(self, key: str | None) -> bool:
        """Whether it need not be run again. key: the key that it must have; None: any."""
        return self.status in COMPLETE and (key is None or self.begin.get("key") == key)


def latest(rows: Iterable[Row]) -> dict[str, Attempt]:
    """Stage name → its last attempt, in the order of the stages' first attempts."""
    attempts: dict[str, Attempt] = {}
    for row in rows:
        stage = row["stage"]
        if row["case"] == BEGIN:
            attempts[stage] = Attempt(row)
        elif stage in attempts and row["case"] == END:
            attempts[stage].end = row
        elif stage in attempts:
            attempts[stage].rows.append(row)
    return attempts
