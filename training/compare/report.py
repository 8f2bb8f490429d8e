"""Reports that a killed run leaves whole and a later one continues: JSON beside what each query was worth.

Knows files. Does not know methods.

The JSON is for readers and stays small. What each query was worth, by which later methods are compared with earlier ones on the same
queries, is in a file of arrays beside it (`F.json` → `F.queries.npz`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from espalier.errors import InvalidConfig
from training.compare.figures import Figures
from training.retrieval.task import Metric

Report = dict[str, Any]
Key = tuple[str, int, int | None]
"""Method, seed, serving beam (None: it has none)."""


def continued(report: Report, file: Path, same: Sequence[str], kept: Sequence[str]) -> Report:
    """The report with what `file` has from an earlier run.

    same  what must be equal in both: rows of another run do not belong into one table
    kept  what is taken over, where it is there

    Raises InvalidConfig where the file is no report or one of another run.
    """
    if not file.exists():
        return report
    try:
        earlier = json.loads(file.read_text())
    except ValueError as error:  # no JSON, or no text
        raise InvalidConfig("--json", str(file), f"a report of an earlier run, or no file; {error}") from error
    now = json.loads(json.dumps(report))
    if not isinstance(earlier, dict) or any(isinstance(now[key], list) and not isinstance(earlier.get(key, []), list) for key in kept):
        raise InvalidConfig("--json", str(file), "a report of an earlier run, or no file; this is JSON of another shape")
    for key in same:
        if earlier.get(key) != now[key]:
            raise InvalidConfig("--json", str(file), f"rows of the same run; its {key} is {earlier.get(key)!r}, not {now[key]!r}")
    return report | {key: earlier[key] for key in kept if key in earlier}


def save(report: Report, file: Path) -> None:
    """Replace the file in one step, so that a killed run leaves whole rows."""
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(file)


def queries_file(file: Path) -> Path:
    """Beside the JSON."""
    return file.with_suffix(".queries.npz")


def save_figures(figures: Mapping[Key, Figures], file: Path) -> None:
    """Write what each query was worth, in one step; values as float32."""
    arrays: dict[str, Any] = {}
    for (method, seed, beam), measured in figures.items():
        place = f"{method}|{seed}|{'' if beam is None else beam}"
        arrays[f"{place}|user"] = measured.user_B
        arrays |= {f"{place}|{metric}": values.astype(np.float32) for metric, values in measured.values.items()}
    partial = file.with_suffix(".part.npz")
    np.savez_compressed(partial, **arrays)
    partial.replace(file)


def read_figures(file: Path) -> dict[Key, Figures]:
    """What `save_figures` wrote; nothing where there is no file. Raises InvalidConfig where it is damaged."""
    if not file.exists():
        return {}
    try:
        return _read_figures(file)
    except (ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise InvalidConfig("--json", str(file), f"what each query was worth, as an earlier run wrote it, or no file; {error}") from error


def _read_figures(file: Path) -> dict[Key, Figures]:
    found: dict[Key, Figures] = {}
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        for name in arrays.files:
            method, seed, beam, what = name.rsplit("|", 3)
            key = method, int(seed), int(beam) if beam else None
            if what == "user":  # the first of a method's arrays
                found[key] = Figures(arrays[name], {})
            else:
                figure, m = what.split("@")
                found[key].values[Metric("ndcg" if figure == "ndcg" else "recall", int(m))] = arrays[name].astype(np.float64)
    return found
