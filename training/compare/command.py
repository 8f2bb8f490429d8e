"""What `python -m training compare` does with its options: checks them, compares, prints and draws."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Literal

from espalier.errors import InvalidConfig
from training.baselines.fusion import fuse
from training.baselines.methods import FOR_VECTORS, METHODS
from training.compare.compare import Asked, compare
from training.compare.contest import FUSION, RECIPE, checked_names
from training.compare.plot import plot_rows
from training.compare.report import Report
from training.compare.table import show
from training.deep.fit import pick_device
from training.specification.log_format import VectorsFormat
from training.specification.models import read_deep_config

log = logging.getLogger(__name__)

DEFAULT_METHODS = ("popularity", "item-cf", "neighbours", "ease", "ials", "product-dnn", "sasrec", RECIPE, "fusion")
VECTOR_METHODS = (*FOR_VECTORS, RECIPE, f"{FUSION}:{RECIPE}:item-means")


def run(
    config: Path,
    data: Path | None,
    methods: str | None,
    minutes: float | None,
    beams: list[int],
    json_file: Path | None,
    plot: Path | None,
    device: Literal["auto", "cpu", "cuda"],
) -> Report:
    """Compare, print the table and the verdict, and write the files that were asked for. Raises InvalidConfig on a wrong option."""
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise InvalidConfig("--plot", str(plot), "a file name that ends in .png or .svg")
    if minutes is not None and not 0 < minutes < math.inf:
        raise InvalidConfig("--minutes", minutes, "a finite number above 0")
    if min(beams) < 1:
        raise InvalidConfig("--beam", beams, "serving beams of at least 1")
    settings = read_deep_config(config)
    usual = VECTOR_METHODS if isinstance(settings.data.format, VectorsFormat) else DEFAULT_METHODS
    names = list(usual) if methods is None else checked_names(methods, [RECIPE, *METHODS])
    for file in (json_file, plot):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    seconds = None if minutes is None else 60 * minutes
    asked = Asked(settings, data, names, METHODS, fuse, beams, seconds, pick_device(device))
    report = compare(asked, json_file)
    show(report)
    if plot is not None and report["rows"]:
        title = f"{report['name']}, {report['log']['items']:,} items, {report['queries']:,} test queries"
        early = {fit["method"] for fit in report["fits"] if fit["ended"]}
        plot_rows(report["rows"], early, report["metric"], title, plot)
    return report
