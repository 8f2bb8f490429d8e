"""Compare options of XR-Linear: train on a part of the training data, measure on the rest."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.papers.product_search.text_baselines import centroid
from benchmarks.papers.product_search.text_linear import BEAMS, TEXTS, Recipe, xr_linear
from benchmarks.papers.product_search.text_report import Report, row_of
from benchmarks.papers.product_search.text_sets import Task
from training.specification.linear import LinearOptions

CHOOSE_BEAMS = (*BEAMS, 400)


def variant(**options: Any) -> Recipe:
    return Recipe(options=LinearOptions(**options))


VARIANTS: dict[str, Recipe] = {
    "defaults": Recipe(),
    "gamma 1": variant(gamma=1),
    "gamma 0.75": variant(gamma=0.75),
    "prior 0": variant(prior=0),
    "prior 2": variant(prior=2),
    "prior 4": variant(prior=4),
    "few 0": variant(min_positives=0),
    "few 0, cost 0.3": variant(min_positives=0, cost=0.3),
    "few 0, cost 0.1": variant(min_positives=0, cost=0.1),
    "few 0, cost 0.01": variant(min_positives=0, cost=0.01),
    "few 0, teacher": variant(min_positives=0, negatives="teacher"),
    "nothing trained": variant(min_positives=1e9),
}
"""What --choose tries."""


def choose(task: Task, report: Report, work: Path, only: str = "") -> None:
    """The variants whose names match `only`, and the centroids alone."""
    fold = task.folds[0]
    if not report.has("choose", variant="centroid"):
        report.add("choose", {"variant": "centroid"} | row_of([(centroid(TEXTS[3], task, fold, work)[0], fold)], "centroid"))
    for named, recipe in VARIANTS.items():
        if report.has("choose", variant=named) or not re.search(only, named):
            continue
        with tempfile.TemporaryDirectory(dir=work) as folder:
            found = xr_linear(recipe, CHOOSE_BEAMS, "any", task, fold, Path(folder))
        for beam, trained in zip(CHOOSE_BEAMS, found, strict=True):
            report.add("choose", {"variant": named, "beam_size": beam} | row_of([(trained, fold)], "xr-linear"))
        found[0].close()
