"""What options of XR-Linear find, trained on a part of the training data and judged by the rest."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.text_baselines import centroid, fused
from benchmarks.text_linear import BEAMS, TEXTS, Recipe, xr_linear
from benchmarks.text_report import Report, row_of
from benchmarks.text_sets import Task
from training.linear.config import LinearOptions, LinearTree

CHOOSE_BEAMS = (*BEAMS, 400)


VARIANTS: dict[str, Recipe] = {}
"""What --choose tries: one change at a time, then some together."""


def _variant(changed: str, max_leaf: int = LinearTree().max_leaf, texts: str = Recipe.texts, unknown: int = 1, **options: Any) -> None:
    VARIANTS[changed] = Recipe(texts, LinearOptions(**({"prior": 0} | options)), LinearTree(max_leaf=max_leaf), unknown=unknown)


_variant("defaults")
_variant("threshold 0.01", threshold=0.01)
_variant("cost 4", cost=4.0)
_variant("cost 16, threshold 0.01", cost=16.0, threshold=0.01)
_variant("cost 0.25, threshold 0.01", cost=0.25, threshold=0.01)
_variant("negatives teacher, threshold 0.01", negatives="teacher", threshold=0.01)
_variant("beam_size 50, threshold 0.01", beam_size=50, threshold=0.01)
_variant("max_leaf 100, threshold 0.01", max_leaf=100, threshold=0.01)
_variant("max_leaf 400, threshold 0.01", max_leaf=400, threshold=0.01)
_variant("words, threshold 0.01", texts="words", threshold=0.01)
_variant("words, cost 0.25, threshold 0.01", texts="words", cost=0.25, threshold=0.01)
_variant("words, cost 0.05, threshold 0.005", texts="words", cost=0.05, threshold=0.005)
_variant("words, cost 0.01, threshold 0.001", texts="words", cost=0.01, threshold=0.001)
_variant("words, cost 0.05, threshold 0.005, max_leaf 100", texts="words", cost=0.05, threshold=0.005, max_leaf=100)
_variant("words, cost 0.05, threshold 0.005, negatives teacher", texts="words", cost=0.05, threshold=0.005, negatives="teacher")
_variant("unknown 0", unknown=0)
_variant("words, unknown 0, threshold 0.01", texts="words", unknown=0, threshold=0.01)
_variant("words, unknown 0, cost 0.1, threshold 0.01", texts="words", unknown=0, cost=0.1, threshold=0.01)
_variant("words, unknown 0, cost 0.01, threshold 0.001", texts="words", unknown=0, cost=0.01, threshold=0.001)
_variant("words, unknown 0, cost 0.1, threshold 0.01, max_leaf 100", texts="words", unknown=0, cost=0.1, threshold=0.01, max_leaf=100)
_variant(
    "words, unknown 0, cost 0.1, threshold 0.01, negatives teacher",
    texts="words", unknown=0, cost=0.1, threshold=0.01, negatives="teacher",
)  # fmt: skip
_variant("unknown 0, cost 0.1, threshold 0.01", unknown=0, cost=0.1, threshold=0.01)
_variant("unknown 0, cost 4, threshold 0.01", unknown=0, cost=4.0, threshold=0.01)
_variant("unknown 0, cost 0.1, threshold 0.01, bias 0", unknown=0, cost=0.1, threshold=0.01, bias=0.0)
_variant("unknown 0, cost 0.1, threshold 0.01, l1-hinge", unknown=0, cost=0.1, threshold=0.01, activation="l1-hinge")
_variant("unknown 0, cost 0.1, threshold 0.01, sigmoid", unknown=0, cost=0.1, threshold=0.01, activation="sigmoid")


def choose(task: Task, report: Report, work: Path, only: str = "") -> None:
    """The variants whose names match `only`, each also fused with the centroids of its own n-grams, and the centroids alone."""
    fold = task.folds[0]
    for texts, unknown in ((TEXTS[0], 1), (TEXTS[3], 1), (TEXTS[3], 0)):
        trained = centroid(texts, task, fold, work, unknown)[0]
        if not report.has("choose", variant=f"centroid {trained.config}"):
            report.add("choose", {"variant": f"centroid {trained.config}"} | row_of([(trained, fold)], "centroid"))
    for named, recipe in VARIANTS.items():
        if report.has("choose", variant=named) or not re.search(only, named):
            continue
        with tempfile.TemporaryDirectory(dir=work) as folder:
            found = xr_linear(recipe, CHOOSE_BEAMS, "any", task, fold, Path(folder))
        for beam, trained in zip(CHOOSE_BEAMS, found, strict=True):
            report.add("choose", {"variant": named, "beam_size": beam} | row_of([(trained, fold)], "xr-linear"))
        both = fused(found[len(BEAMS) - 1], centroid(recipe.texts, task, fold, work, recipe.unknown)[0])
        report.add("choose", {"variant": named, "beam_size": BEAMS[-1]} | row_of([(both, fold)], "fused"))
        found[0].close()
