"""The tables of XReg (Prabhu et al. 2020) that our sets have, with our rows beside the published ones, as Markdown.

    python -m benchmarks.xmc --data DIR --set eurlex-4k --systems SYSTEMS --beam 10 --json F
    python -m benchmarks.xreg_tables --json F [F …]

F are reports of `benchmarks.xmc`; several of one set are joined. Rows of one beam make Tables 2 and 7. Rows of several beams make Table 8:
trees T, beam P, largest leaf M. Times are left out: the published ones are of other machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NOT_PUBLISHED = "–"
PUBLISHED: dict[str, dict[str, tuple[str, str, str]]] = {
    "bibtex": {
        "pfastrexml": ("52.28 / 54.36 / 60.55", NOT_PUBLISHED, NOT_PUBLISHED),
        "pfastxml": ("52.43 / 53.41 / 59.75", "53.68", ".3151"),
        "parabel-3": ("50.88 / 52.42 / 57.36", "51.48", ".3372"),
        "leml": ("51.30 / 52.17 / 56.42", "51.58", ".3520"),
        "least-squares": ("53.50 / 55.10 / 60.14", "54.21", ".3337"),
        "rank-svm": ("49.31 / 51.79 / 59.12", "52.58", ".7089"),
        "dismec": ("50.88 / 52.52 / 57.23", "51.47", ".3371"),
        "proxml": ("50.10 / 52.00 / 58.30", NOT_PUBLISHED, NOT_PUBLISHED),
        "xreg": ("49.66 / 52.66 / 58.61", "52.35", ".3158"),
        "xreg-t": ("49.86 / 53.04 / 58.77", "52.46", ".3386"),
    },
    "eurlex-4k": {
        "pfastrexml": ("43.86 / 45.72 / 46.97", NOT_PUBLISHED, NOT_PUBLISHED),
        "pfastxml": ("40.16 / 43.07 / 45.17", "48.85", ".1900"),
        "parabel-3": ("36.36 / 44.04 / 48.29", "50.75", ".4227"),
        "leml": ("27.20 / 30.15 / 32.30", "37.24", ".2115"),
        "least-squares": ("47.02 / 50.85 / 52.27", "53.96", ".1744"),
        "rank-svm": ("39.52 / 43.82 / 46.70", "51.43", "1.1967"),
        "dismec": ("37.58 / 45.92 / 50.62", "52.33", ".4308"),
        "proxml": ("45.20 / 48.50 / 51.00", NOT_PUBLISHED, NOT_PUBLISHED),
        "xreg": ("44.00 / 47.44 / 49.72", "52.86", ".1849"),
        "xreg-t": ("45.23 / 48.51 / 50.40", "53.45", ".2132"),
    },
}
"""Of Tables 2 and 7: PSP@1/3/5, Tau@5, XMAD@5. What the paper calls PfastreXML is beside `pfastxml`, whose figures it has; beside
`pfastrexml` stands the XMC repository's page."""
ABLATIONS: dict[str, dict[tuple[int, int, int], tuple[str, str, str]]] = {
    "eurlex-4k": {
        (1, 10, 100): ("48.05", "51.14", ".1899"),
        (3, 10, 100): ("49.72", "52.86", ".1849"),
        (5, 10, 100): ("50.25", "53.24", ".1836"),
        (7, 10, 100): ("50.44", "53.42", ".1831"),
        (3, 5, 100): ("49.60", "52.76", ".1858"),
        (3, 20, 100): ("49.70", "52.86", ".1847"),
        (3, 30, 100): ("49.71", "52.86", ".1847"),
        (3, 10, 20): ("49.34", "52.75", ".1845"),
        (3, 10, 50): ("49.60", "52.71", ".1859"),
        (3, 10, 200): ("50.11", "53.05", ".1846"),
    }
}
"""Of Table 8, by T, P and M: PSP@5, Tau@5, XMAD@5."""


def decimal(value: float, places: int) -> str:
    """As the paper writes numbers: without a 0 in front."""
    return f"{value:.{places}f}".removeprefix("0")


def table_2(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a table with a line for each row of a report, all of one beam."""
    yield "| | P@1 / 3 / 5 | PSP@1 / 3 / 5 | Tau@5 | XMAD@5 | AUPRC | published: PSP@1 / 3 / 5 | Tau@5 | XMAD@5 |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        published = PUBLISHED.get(name, {}).get(row["system"], (NOT_PUBLISHED,) * 3)
        tau = f"{row['tau5']:.2f}" if "tau5" in row else NOT_PUBLISHED
        auprc = decimal(row["auprc"], 4) if "auprc" in row else NOT_PUBLISHED
        our_cells = (_at("p", row), _at("psp", row), tau, decimal(row["xmad5"], 4), auprc)
        yield f"| {' | '.join([row['system'], *our_cells, *published])} |"


def _at(metric: str, row: Row) -> str:
    return " / ".join(f"{row[f'{metric}{k}']:.2f}" for k in (1, 3, 5))


def setting(row: Row) -> tuple[int, int, int]:
    """T, P and M of a row of `xreg`, whose defaults are 3 and 100."""
    changes = dict(change.split("=") for change in row["system"].split(":")[1:])
    return int(changes.get("tree.count", 3)), row["beam_size"], int(changes.get("tree.max_leaf", 100))


def table_8(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a table with a line for each setting of XReg: what differs from T = 3, P = 10, M = 100 in at most one of them."""
    yield "| T | P | M | PSP@5 | Tau@5 | XMAD@5 | MB | published: PSP@5 | Tau@5 | XMAD@5 |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    settings = {setting(row): row for row in rows}
    default_key = (3, 10, 100)
    for key in sorted(settings, key=lambda key: ([key[k] != default_key[k] for k in (0, 1, 2)], key)):
        if sum(key[k] != default_key[k] for k in (0, 1, 2)) <= 1:
            row = settings[key]
            published = ABLATIONS.get(name, {}).get(key, (NOT_PUBLISHED,) * 3)
            our_cells = (f"{row['psp5']:.2f}", f"{row['tau5']:.2f}", decimal(row["xmad5"], 4), str(row["model_mb"]))
            yield f"| {' | '.join([*map(str, key), *our_cells, *published])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, nargs="+", required=True)
    reports: dict[tuple[str, bool], list[Row]] = {}
    for file in parser.parse_args().json:
        report = json.loads(file.read_text())
        reports.setdefault((report["set"], len(report["beams"]) > 1), []).extend(report["rows"])
    for (name, several), rows in reports.items():
        print(f"## {name}\n")
        print("\n".join((table_8 if several else table_2)(name, rows)) + "\n")


if __name__ == "__main__":
    main()
