"""Whether a tree pays: what the two sentences say in every case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from training.compare.figures import Difference
from training.compare.verdict import MIN_QUERIES, Contestant, Field, duration, size, verdict


def contestant(name: str, figure: float, **other: Any) -> Contestant:
    plain = Contestant(name, figure, validation=figure, seconds=10, bytes=2_000_000, ms=1.0)
    return replace(plain, **other)


TREE, NEIGHBOURS, EASE = contestant("recipe", 0.30, seconds=600.0), contestant("neighbours", 0.28), contestant("ease", 0.25)


def judged(
    tree: Contestant | None,
    *others: Contestant,
    error: float = 0.002,
    queries: int = 1000,
    not_judged: dict[str, str] | None = None,
) -> tuple[str, str]:
    """The verdict where every difference is that of the means, with one standard error for all."""
    every = {contestant.name: contestant for contestant in (*others, *([tree] if tree else []))}

    def paired(first: str, second: str) -> Difference:
        mean = every[first].figure - every[second].figure
        return Difference(mean, mean - 1.96 * error, mean + 1.96 * error, queries)

    return verdict(Field("recall@50", tree, others, not_judged or {}, paired))


def fused(figure: float, *parts: str) -> Contestant:
    return contestant(f"fusion:{':'.join(parts)}", figure, parts=parts, ms=2.0)


def test_a_tree_that_finds_more_pays() -> None:
    found, pays = judged(TREE, NEIGHBOURS, EASE)
    assert found == (
        "The tree finds more than neighbours, the best baseline on validation queries: recall@50 0.3000 against 0.2800, "
        "a difference of +0.0200 (95 % interval +0.0161 to +0.0239, 1,000 queries)."
    )
    assert pays == ("The tree pays (recipe: 10.0 min to train, 2.0 MB, 1 ms a query; neighbours: 10 s to train, 2.0 MB, 1 ms a query).")


@pytest.mark.parametrize(
    ("figure", "error", "found", "pays"),
    [
        (0.26, 0.002, "The tree finds less than neighbours", "Use neighbours ("),
        (0.282, 0.002, "The tree finds no more than neighbours", "Use neighbours ("),
        (0.285, 0.02, "The queries do not tell whether the tree finds more than neighbours", "Undecided with 1,000 queries: "),
        (0.285, 0.001, "The tree finds more than neighbours", "Use neighbours unless so little more is worth the cost ("),
    ],
)
def test_a_tree_that_finds_less_as_much_or_little_more_is_not_said_to_pay(figure: float, error: float, found: str, pays: str) -> None:
    sentences = judged(replace(TREE, figure=figure), NEIGHBOURS, EASE, error=error)
    assert sentences[0].startswith(found)
    assert sentences[1].startswith(pays)


@pytest.mark.parametrize("figure", [0.1, 0.28, 0.9])
def test_a_handful_of_queries_decides_nothing(figure: float) -> None:
    found, pays = judged(replace(TREE, figure=figure), NEIGHBOURS, queries=MIN_QUERIES - 1)
    assert found.startswith("The queries do not tell")
    assert pays.startswith("Undecided: 29 queries are too few")
    assert not judged(replace(TREE, figure=figure), NEIGHBOURS, queries=MIN_QUERIES)[1].startswith("Undecided:")


@pytest.mark.parametrize("figure", [0.26, 0.28])
def test_a_tree_may_pay_beside_neighbours_alone(figure: float) -> None:
    pays = judged(replace(TREE, figure=figure), NEIGHBOURS, fused(0.31, "recipe", "neighbours"))[1]
    assert pays.startswith("The tree pays only beside another method: the tree and neighbours, fused, find +0.0300 (95 %")
    assert "; fused: 10 s to train, 2.0 MB, 2 ms a query)" in pays
    little = judged(replace(TREE, figure=figure), NEIGHBOURS, fused(0.285, "recipe", "neighbours"), error=0.001)[1]
    assert little.startswith("Use neighbours (")
    unsure = judged(replace(TREE, figure=figure), NEIGHBOURS, fused(0.30, "recipe", "neighbours"), error=0.011)[1]
    assert "fused" not in unsure, "the fusion may as well find less"
    without_tree = judged(replace(TREE, figure=figure), NEIGHBOURS, fused(0.31, "ease", "neighbours"))[1]
    assert without_tree.startswith("Use fusion:ease:neighbours ("), "what is to be had without a tree"


def test_a_fusion_that_adds_to_a_paying_tree_is_named() -> None:
    pays = judged(TREE, NEIGHBOURS, fused(0.33, "recipe", "neighbours"))[1]
    assert pays.startswith("The tree pays, and the tree and neighbours, fused, find more still (")
    assert "fused" not in judged(TREE, NEIGHBOURS, fused(0.301, "recipe", "neighbours"))[1]


def test_the_best_baseline_is_the_one_that_validation_chose() -> None:
    lucky = replace(EASE, figure=0.295, validation=0.2)
    found, pays = judged(TREE, NEIGHBOURS, lucky)
    assert "than neighbours" in found
    assert pays.startswith("The tree pays")
    luckier = replace(EASE, figure=0.299, validation=0.2)
    assert judged(TREE, NEIGHBOURS, luckier)[1].startswith("Undecided: ease, which validation did not choose, may find as much")


def test_a_tree_that_finds_as_much_in_less_time_pays_by_its_speed() -> None:
    level, slow = replace(TREE, figure=0.279, ms=0.3), replace(NEIGHBOURS, ms=5.0)
    assert judged(level, slow)[1].startswith("The tree pays by its speed: it finds as much in less time (recipe: ")
    quick_rival = replace(EASE, figure=0.279, ms=0.4)
    assert judged(level, slow, quick_rival)[1].startswith("Use neighbours (")
    assert judged(replace(level, figure=0.26), slow)[1].startswith("Use neighbours ("), "less is not as much"
    assert judged(replace(level, figure=0.27), slow)[1].startswith("Use neighbours ("), "nor is surely less, however little"


def test_what_was_not_judged_or_cut_short_is_said() -> None:
    cut = replace(TREE, figure=0.2, ended="500 of 2,000 steps, as many as fit into 60 s")
    pays = judged(cut, NEIGHBOURS, not_judged={"ease": "needs 90 GB", "ials": "not installed", "fusion": "no neighbours"})[1]
    assert pays.startswith("So far, use neighbours (")
    early = "recipe ended early (500 of 2,000 steps, as many as fit into 60 s), and more time may change this"
    assert pays.endswith(f"); but {early}; ease and ials were not judged.")
    assert judged(TREE, replace(NEIGHBOURS, ended="2 trials"))[1].startswith("So far, the tree pays (")
    assert judged(TREE, NEIGHBOURS, replace(EASE, ended="2 trials"))[1].startswith("The tree pays (")
    assert judged(TREE, NEIGHBOURS, not_judged={"ease": "needs 90 GB"})[1].endswith("); but ease was not judged.")


def test_a_tree_is_not_said_to_pay_without_reserve_where_others_had_no_fair_try() -> None:
    short = replace(EASE, name="sasrec", ended="12 steps")
    assert judged(TREE, NEIGHBOURS, short)[1].endswith("; but sasrec ended early.")
    assert judged(replace(TREE, ended="9 steps"), NEIGHBOURS, short)[1].endswith("may change this; sasrec ended early, too.")
    assert "sasrec" not in judged(replace(TREE, figure=0.26), NEIGHBOURS, short)[1], "more time for others is nothing for the tree"
    assert judged(TREE, EASE)[1].endswith("; but neighbours, often the best baseline, were not run.")
    assert "not run" not in judged(TREE, EASE, not_judged={"neighbours": "no lists"})[1]


def test_without_a_tree_or_a_baseline_nothing_is_claimed() -> None:
    found, pays = judged(None, NEIGHBOURS, not_judged={"recipe": "a batch is too large."})
    assert found == "No tree was judged: a batch is too large."
    assert pays == "Whether one pays here is open."
    assert judged(None, NEIGHBOURS)[0] == "No tree was measured, since it was not run."
    assert judged(TREE) == ("The tree has recall@50 0.3000; no baseline was judged.", "Whether it pays is open.")


def test_costs_are_said_as_people_say_them() -> None:
    assert [duration(s) for s in (0.42, 12, 119, 210, 9000)] == ["0.4 s", "12 s", "119 s", "3.5 min", "2.5 h"]
    assert [size(b) for b in (512, 2_500_000, 7 * 10**9)] == ["1 kB", "2.5 MB", "7.0 GB"]
