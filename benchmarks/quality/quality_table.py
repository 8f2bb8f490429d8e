"""Markdown tables of what methods find, from the JSON files of `otm_real`, `next_item` and `fixed_split`.

    python -m benchmarks.quality_table benchmarks/results/quality_next_item_ml-1m-sasrec.json …

A table for each file: figures in %, means over seeds, with the standard error over queries (of one seed, the mean of the seeds'). Where the
file has paired differences, the last column is that to the recipe in the first figure, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from espalier.errors import InvalidConfig

Row = Mapping[str, Any]
RECIPE = "recipe"
NEXT_ITEM = ("hr10", "ndcg10")
FIXED_SPLIT = ("recall20", "ndcg20")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="F")
    for file in parser.parse_args().files:
        print(f"### {file.stem}\n\n{table(json.loads(file.read_text()))}")


def table(report: Mapping[str, Any]) -> str:
    """The rows of one report, methods in the order of its first figure. Raises InvalidConfig where it has no rows."""
    if not report["rows"]:
        raise InvalidConfig("file", report.get("set"), "a report with rows")
    lines = flat(report["rows"])
    names = list(lines[0]["figures"])
    lines.sort(key=lambda line: -line["figures"][names[0]][0])
    paired = to_recipe(report.get("differences", []), report["rows"])
    head = ["method", "beam", "seeds", *names, *([f"{names[0]} − {RECIPE}'s"] if paired else [])]
    shown = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for line in lines:
        cells = [line["method"], "" if line["beam_size"] is None else str(line["beam_size"]), str(line["seeds"])]
        cells += [f"{100 * mean:.2f} ± {100 * error:.2f}" for mean, error in line["figures"].values()]
        if paired:
            found = paired.get((line["method"], line["beam_size"]))
            cells.append("" if found is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*(100 * value for value in found)))
        shown.append("| " + " | ".join(cells) + " |")
    notes = [f"{left['method']}, seed {left['seed']}, was left out: {left['reason']}" for left in report["left_out"]]
    notes += sorted({f"{row['method']}, seed {row['seed']}, ended early: {row['ended']}" for row in report["rows"] if row.get("ended")})
    return "\n".join([*shown, *(f"\n{note}." for note in notes)]) + "\n"


def flat(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a method and beam: {"method", "beam_size", "seeds", "figures": {name: (mean, standard error)}}.

    Rows of `otm_real` are those with seen items not left out, at the γ that was chosen: R@m of each m.
    """
    of_otm = "m" in rows[0]
    if of_otm:
        rows = [row for row in rows if not row["exclude_seen"]]
    else:
        names = next(names for names in (NEXT_ITEM, FIXED_SPLIT) if names[0] in rows[0])
    found = []
    for method, beam in dict.fromkeys((row["method"], row["beam_size"]) for row in rows):
        same = [row for row in rows if (row["method"], row["beam_size"]) == (method, beam)]
        if of_otm:
            figures = {
                f"R@{m}": averaged([(row["recall"], row["recall_se"]) for row in same if row["m"] == m])
                for m in sorted({row["m"] for row in same})
            }
        else:
            figures = {name: averaged([(row[name], row[f"{name}_se"]) for row in same]) for name in names}
        found.append({"method": method, "beam_size": beam, "seeds": len({row["seed"] for row in same}), "figures": figures})
    return found


def averaged(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    means, errors = zip(*values, strict=True)
    return float(np.mean(means)), float(np.mean(errors))


def to_recipe(differences: Sequence[Row], rows: Sequence[Row]) -> dict[tuple[str, int | None], tuple[float, float, float]]:
    """(method, chosen beam) → (mean, low, high) of its first figure less the recipe's."""
    beam_of = {row["method"]: row["beam_size"] for row in rows if row.get("chosen")}
    found: dict[tuple[str, int | None], tuple[float, float, float]] = {}
    for row in differences:
        if RECIPE not in (row["first"], row["second"]) or not row["metric"].startswith("recall"):
            continue
        other, sign = (row["second"], -1) if row["first"] == RECIPE else (row["first"], 1)
        low, high = sorted((sign * row["low"], sign * row["high"]))
        found[other, beam_of.get(other)] = sign * row["mean"], low, high
    return found


if __name__ == "__main__":
    main()
