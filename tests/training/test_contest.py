"""Methods by name: which there are, in which order they are fitted, and what time each part of a fusion gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.errors import InvalidConfig
from espalier.search import NO_ITEM
from tests.training.planted import planted_log, settings
from training.compare.contest import Contest, Entry, checked_names, in_order, parts_of
from training.deep.prepare import prepare
from training.retrieval.task import Fitted, Task
from training.specification.models import deep_config


def test_methods_are_named_once_and_known() -> None:
    known = ["recipe", "neighbours", "ease"]
    assert checked_names("ease, recipe,ease,fusion,fusion:ease:neighbours", known) == ["ease", "recipe", "fusion", "fusion:ease:neighbours"]
    assert parts_of("fusion") == ("recipe", "neighbours")
    for wrong in ("eas", "fusion:ease", "fusion:ease:ease", "fusion:ease:all", ""):
        with pytest.raises(InvalidConfig, match="--methods"):
            checked_names(wrong, known)


def test_quick_methods_come_first_then_trained_ones_the_tree_and_fusions() -> None:
    assert in_order(["fusion", "recipe", "sasrec", "ease", "neighbours"]) == ["ease", "neighbours", "sasrec", "recipe", "fusion"]


class Watched(Contest):
    """Fits nothing: it notes what time each method gets, of which a method takes half."""

    def entry(self, name: str, exclude_seen: bool, seconds: float | None = None) -> Entry:
        if name.startswith("fusion"):
            return super().entry(name, exclude_seen, seconds)
        self.given.append((name, seconds))
        self.now_s += 0 if seconds is None else seconds / 2
        return Entry(name, {None: answering(0.0)}, None, {None: 0.0})

    given: list[tuple[str, float | None]]
    now_s: float


def answering(seconds: float) -> Fitted:
    return Fitted(lambda queries, m, exclude_seen: np.full((len(queries), m), NO_ITEM), {}, 0, seconds)


@pytest.mark.parametrize("name", ["fusion:recipe:neighbours", "fusion:neighbours:recipe"])
@pytest.mark.parametrize(("seconds", "given"), [(None, (None, None)), (100.0, (45.0, 69.75))])
def test_the_tree_of_a_fusion_is_fitted_last_and_gets_what_the_other_part_leaves(
    tmp_path: Path, name: str, seconds: float | None, given: tuple[float | None, float | None]
) -> None:
    config = deep_config(settings(planted_log(tmp_path), "tdm"))
    fused: list[Task] = []

    def fuse(first: Fitted, second: Fitted, task: Task) -> Fitted:
        fused.append(task)
        return answering(0.0)

    baselines: dict[str, Any] = {"neighbours": None}
    contest = Watched(config, prepare(config, None, tmp_path), tmp_path, [10], baselines, fuse, clock=lambda: contest.now_s)
    contest.given, contest.now_s = [], 1000.0
    contest.entry(name, False, seconds)
    assert contest.given == [("neighbours", given[0]), ("recipe", pytest.approx(given[1]))]
    assert fused[0].seconds == (None if seconds is None else pytest.approx(100 - 22.5 - 69.75 / 2))
