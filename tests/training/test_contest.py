"""How methods are compared: what each needs of a log and gets of the time, by a clock that the tests own, in which order they are fitted,
and what the two sentences of the verdict say in every case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from espalier.errors import InvalidConfig
from espalier.search import NO_ITEM
from tests.training.logs import Clock
from tests.training.planted import planted_log, settings
from training.compare.contest import Contest, Entry, checked_names, fused_methods, in_order
from training.compare.figures import Difference
from training.compare.plan import USED, Plan, is_judged, share_out
from training.compare.report import fields_of
from training.compare.verdict import MIN_QUERIES, Contestant, Field, duration, size, verdict
from training.deep.prepare import prepare
from training.retrieval.needs import FULL_S, LEAST_S, SPARE, Needs, by_parts, of_steps, seconds_each
from training.retrieval.task import Fitted, Task
from training.specification.models import deep_config


def plan(needs: dict[str, Needs], seconds: float = 100, clock: Clock | None = None, answers: float = 0.0) -> Plan:
    clock = clock or Clock()
    return Plan(clock, clock.now_s, seconds, needs, dict.fromkeys(needs, answers), {})


# -- needs ----------------------------------------------------------------------------------------------------------------


def test_needs_say_which_share_of_the_steps_fits() -> None:
    needs = of_steps(10, 0.1, 1000)
    assert (needs.least_s, needs.full_s) == pytest.approx((10 + SPARE * 50, 10 + SPARE * 100))
    assert [needs.share(s) for s in (needs.least_s, needs.full_s, 1e6)] == pytest.approx([0.5, 1, 1])
    assert needs.share((needs.least_s + needs.full_s) / 2) == pytest.approx(0.75)
    assert needs.share(0.99 * needs.least_s) < 0.5
    assert Needs(4, 40).share(4) == 1, "all data, with the options as they are"
    assert [is_judged(share) for share in (0.4999, 0.5)] == [False, True]


def test_work_is_timed_after_a_first_time_that_does_not_count() -> None:
    clock, taken = Clock(), iter([9.0, 0.3, 0.1, 0.2, 0.1, 0.2, 9.0])

    def work() -> None:
        clock.now_s += next(taken)

    assert seconds_each(work, clock) == pytest.approx(0.2)
    assert next(taken) == 9, "five times"
    slow = iter([1.0, 2.0, 9.0])
    assert seconds_each(lambda: setattr(clock, "now_s", clock.now_s + next(slow)), clock) == pytest.approx(2), "one that is long is enough"


@dataclass(frozen=True)
class _Split:
    train: Any
    validation: Any


@dataclass(frozen=True)
class _Task:
    """What `by_parts` reads of a task."""

    split: _Split
    clock: Clock
    seed: int = 1
    seconds: float | None = None

    def validation_pairs(self) -> list[int]:
        return list(self.split.validation)


@pytest.mark.parametrize(
    ("users", "fixed_s", "user_s", "power"),
    [
        (100, 0.0, 0.001, 1.0),
        (40_000, 0.02, 0.0002, 1.0),
        (1_000_000, 0.0, 0.0005, 1.0),
        (100_000, 0.02, 2e-6, 1.5),
        (200_000, 0.0, 2e-8, 2.0),
    ],
)
def test_the_time_for_all_users_follows_from_parts_of_them(users: int, fixed_s: float, user_s: float, power: float) -> None:
    clock = Clock()
    sizes: list[int] = []

    def method(task: Task) -> Fitted:
        assert task.seconds == 0, "its shortest fit"
        sizes.append(len(task.split.train))
        clock.now_s += fixed_s + user_s * len(task.split.train) ** power
        return cast(Fitted, None)

    task = cast(Task, _Task(_Split(np.arange(users), range(users // 10)), clock))
    needs = by_parts(method, trials=30, once=8)(task)
    whole_s = fixed_s + user_s * users**power
    assert needs.least_s == pytest.approx(max(LEAST_S, 8 * whole_s), rel=0.02)
    assert needs.full_s == pytest.approx(max(FULL_S, 30 * whole_s), rel=0.02)
    assert max(sizes) == users or max(sizes) <= users / 10, "a small part, or a small log"


# -- shares ---------------------------------------------------------------------------------------------------------------


def test_what_is_left_goes_by_weight_to_those_that_need_more() -> None:
    share = share_out({"recipe": 10, "ease": 5, "ials": 5}, {"recipe": 1000, "ease": 6, "ials": 1000}, 41)
    assert share == pytest.approx({"recipe": 10 + 30, "ease": 6, "ials": 5 + 10})
    assert share_out({"ease": 5}, {"ease": 6}, 100) == {"ease": 6}, "nobody gets more than all that it needs"


def test_the_strong_baseline_and_the_tree_come_first_then_what_needs_least() -> None:
    needs = {"a": Needs(30, 30), "b": Needs(20, 20), "neighbours": Needs(25, 25), "recipe": Needs(40, 40, 100)}
    assert set(plan(needs).shares()) == {"recipe", "neighbours", "b"}
    assert set(plan(needs, seconds=130).shares()) == {"recipe", "neighbours", "b", "a"}
    assert set(plan(needs, seconds=60).shares()) == {"neighbours", "b"}, "a tree that has no time leaves it to others"


@pytest.mark.parametrize(("least", "planned"), [(USED * 100 - 2, True), (USED * 100 - 1.9, False)])
def test_a_method_is_planned_if_its_least_and_its_answers_fit(least: float, planned: bool) -> None:
    assert ("recipe" in plan({"recipe": Needs(least, least, 10)}, answers=2).shares()) is planned


def test_what_methods_leave_goes_to_those_after_them() -> None:
    clock = Clock()
    needs = {"quick": Needs(20, 40), "sasrec": Needs(60, 200, 10), "recipe": Needs(50, 1000, 10)}
    found = plan(needs, clock=clock)
    assert set(found.shares()) == {"quick", "recipe"}
    found.done.add("quick")
    assert found.shares() == pytest.approx({"recipe": USED * 100})
    clock.now_s += 30
    assert found.shares() == pytest.approx({"recipe": USED * 100 - 30})
    clock.now_s += 20
    assert found.shares() == {}, "no longer half of its steps"


def test_what_nobody_needs_is_a_reserve_of_all_that_learn() -> None:
    clock = Clock()
    found = plan({"quick": Needs(5, 10), "recipe": Needs(10, 20, 10), "fusion": Needs(1, 1)}, clock=clock, answers=1.0)
    shares = found.shares()
    assert shares == pytest.approx({"quick": 10, "recipe": 20, "fusion": 1})
    spare_s = USED * 100 - 34
    assert [found.spare_s(name, shares) for name in found.needs] == pytest.approx([spare_s / 4, spare_s * 3 / 4, 0])
    assert found.spare_s("fusion", {"fusion": 1}) == pytest.approx(USED * 100 - 2)
    clock.now_s += 1000
    assert [found.spare_s(name, shares) for name in shares] == [0, 0, 0]


def test_a_fusion_waits_for_its_parts() -> None:
    fusion = "fusion:recipe:ease"
    needs = {"ease": Needs(10, 10), "recipe": Needs(50, 50, 100), fusion: Needs(1, 1)}
    assert fusion in plan(needs).shares()
    late = plan(needs, seconds=50)
    assert fusion not in late.shares()
    assert late.reasons[fusion] == "recipe is not judged"
    refused = Plan(Clock(), 50.0, 100, {fusion: Needs(1, 1)}, {fusion: 0}, {"recipe": "needs 90 GB"})
    assert refused.shares() == {}
    clock = Clock()
    overrun = plan(needs, clock=clock)
    overrun.done |= {"ease"}
    clock.now_s += 97
    assert overrun.shares() == {}, "the tree is still to come"
    overrun.done |= {"recipe"}
    assert overrun.shares() == {fusion: 1}, "what was kept for methods that take longer than planned is left for it"
    assert fusion in plan({fusion: Needs(1, 1)}).shares(), "it fits its parts itself, where they are no methods of the plan"


def test_no_time_is_enough_for_a_fusion_with_a_refused_method() -> None:
    late = plan({"ease": Needs(900, 900), "fusion:recipe:ease": Needs(5, 5), "fusion:ease:ials": Needs(5, 5)})
    late = replace(late, refused={"recipe": "one item"})
    assert [name for name in [*late.needs, *late.refused] if late.lacks_time_alone(name)] == ["ease", "fusion:ease:ials"]


def test_reasons_say_how_much_fits_and_what_would_do() -> None:
    found = plan({"ease": Needs(120, 500), "recipe": Needs(190, 370, 1000), "popularity": Needs(1, 2)})
    assert found.reasons == {
        "ease": "one fit to all data takes 2.0 min",
        "recipe": "250 of 1,000 steps in 95 s; half of them take 3.2 min",
    }
    assert found.minutes(["ease", "recipe"]) == 5.5, "310 s and reserve, in half minutes"
    assert found.table().splitlines()[0].startswith("method      seconds  plan for 100 s")
    assert "popularity        2  all data" in found.table()
    assert "recipe            -  not judged: 250 of 1,000 steps" in found.table()
    assert found.table().splitlines()[-2:] == ["--minutes 3.5 would do for the tree", "--minutes 5.5 would do for all that fit this log"]
    assert [row["share"] for row in found.rows()] == [0, 0, 1]


# -- methods by name ------------------------------------------------------------------------------------------------------


def test_methods_are_named_once_and_known() -> None:
    known = ["recipe", "neighbours", "ease"]
    assert checked_names("ease, recipe,ease,fusion,fusion:ease:neighbours", known) == ["ease", "recipe", "fusion", "fusion:ease:neighbours"]
    assert fused_methods("fusion") == ("recipe", "neighbours")
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
    tmp_path: Path, name: str, seconds: float | None, given: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = deep_config(settings(planted_log(tmp_path), "tdm"))
    fused: list[Task] = []

    def fuse(first: Fitted, second: Fitted, task: Task) -> Fitted:
        fused.append(task)
        return answering(0.0)

    monkeypatch.setattr("training.compare.contest.fuse", fuse)
    baselines: dict[str, Any] = {"neighbours": None}
    contest = Watched(config, prepare(config, None, tmp_path), tmp_path, [10], baselines, clock=lambda: contest.now_s)
    contest.given, contest.now_s = [], 1000.0
    contest.entry(name, False, seconds)
    assert contest.given == [("neighbours", given[0]), ("recipe", pytest.approx(given[1]))]
    assert fused[0].seconds == (None if seconds is None else pytest.approx(100 - 22.5 - 69.75 / 2))


# -- the verdict ----------------------------------------------------------------------------------------------------------


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
    return verdict(field_with("recall@50", tree, others, error, queries, not_judged))


def field_with(
    metric: str,
    tree: Contestant | None,
    others: Sequence[Contestant],
    error: float = 0.002,
    queries: int = 1000,
    not_judged: dict[str, str] | None = None,
) -> Field:
    every = {contestant.name: contestant for contestant in (*others, *([tree] if tree else []))}

    def paired(first: str, second: str) -> Difference:
        mean = every[first].figure - every[second].figure
        return Difference(mean, mean - 1.96 * error, mean + 1.96 * error, queries)

    return Field(metric, tree, others, not_judged or {}, paired)


def fused(figure: float, *parts: str) -> Contestant:
    return contestant(f"fusion:{':'.join(parts)}", figure, fused_methods=parts, ms=2.0)


def test_a_tree_that_finds_more_pays() -> None:
    found, pays = judged(TREE, NEIGHBOURS, EASE)
    assert found == (
        "The tree finds more than neighbours, the best baseline on validation queries: recall@50 0.3000 against 0.2800, "
        "a difference of +0.0200 (95 % interval +0.0161 to +0.0239, 1,000 queries)."
    )
    assert pays == ("The tree pays (recipe: 10.0 min to train, 2.0 MB, 1 ms a query; neighbours: 10 s to train, 2.0 MB, 1 ms a query).")


LESS, NO_MORE, MORE = "The tree finds less than neighbours", "The tree finds no more than neighbours", "The tree finds more than neighbours"
OPEN, USE, PAYS = "The queries do not tell whether the tree finds more", "Use neighbours (", "The tree pays ("
LUCKY = replace(EASE, figure=0.295, validation=0.2)
QUICK, SLOW = replace(TREE, figure=0.279, ms=0.3), replace(NEIGHBOURS, ms=5.0)
BESIDE = "The tree pays only beside another method: the tree and neighbours, fused, find +0.0300 (95 %"


def found(figure: float) -> Contestant:
    return replace(TREE, figure=figure)


@pytest.mark.parametrize(
    ("tree", "others", "given", "finding", "pays"),
    [
        (found(0.26), [NEIGHBOURS, EASE], {}, LESS, USE),
        (found(0.282), [NEIGHBOURS, EASE], {}, NO_MORE, USE),
        (found(0.285), [NEIGHBOURS, EASE], {"error": 0.02}, OPEN, "Undecided with 1,000 queries: "),
        (found(0.285), [NEIGHBOURS, EASE], {"error": 0.001}, MORE, "Use neighbours unless so little more is worth the cost ("),
        # a handful of queries
        *((found(figure), [NEIGHBOURS], {"queries": MIN_QUERIES - 1}, OPEN, "Undecided: 29 queries are too few") for figure in (0.1, 0.9)),
        (found(0.9), [NEIGHBOURS], {"queries": MIN_QUERIES}, MORE, PAYS),
        # fused with another method
        *((found(figure), [NEIGHBOURS, fused(0.31, "recipe", "neighbours")], {}, "The tree", BESIDE) for figure in (0.26, 0.28)),
        (found(0.26), [NEIGHBOURS, fused(0.285, "recipe", "neighbours")], {"error": 0.001}, LESS, USE),
        (found(0.26), [NEIGHBOURS, fused(0.3, "recipe", "neighbours")], {"error": 0.011}, NO_MORE, USE),  # it may as well find less
        (
            found(0.26),
            [NEIGHBOURS, fused(0.31, "ease", "neighbours")],
            {},
            "The tree finds less",
            "Use fusion:ease:neighbours (",
        ),  # without a tree
        (
            found(0.28),
            [NEIGHBOURS, replace(LUCKY, figure=0.31), fused(0.31, "recipe", "neighbours")],
            {},
            NO_MORE,
            "Undecided: ease, which validation did not choose, may find as much as the tree and neighbours, fused (recipe",
        ),
        (TREE, [NEIGHBOURS, fused(0.33, "recipe", "neighbours")], {}, MORE, "The tree pays, and the tree and neighbours, fused, find more"),
        (TREE, [NEIGHBOURS, fused(0.301, "recipe", "neighbours")], {}, MORE, PAYS),
        # validation chose another baseline than the one that finds most
        (TREE, [NEIGHBOURS, LUCKY], {}, MORE, PAYS),
        (TREE, [NEIGHBOURS, replace(LUCKY, figure=0.299)], {}, MORE, "Undecided: ease, which validation did not choose, may find as much"),
        # less time for as much, which less is not, however little
        (QUICK, [SLOW], {}, NO_MORE, "The tree pays by its speed: it finds as much in less time (recipe: "),
        (QUICK, [SLOW, replace(EASE, figure=0.279, ms=0.4)], {}, NO_MORE, USE),
        *((replace(QUICK, figure=figure), [SLOW], {}, LESS, USE) for figure in (0.26, 0.27)),
        (replace(QUICK, figure=0.285), [SLOW], {"error": 0.001}, MORE, "The tree pays by its speed: "),  # a little more is as much, too
        (replace(QUICK, figure=0.285), [SLOW, replace(EASE, figure=0.28, ms=0.4)], {"error": 0.001}, MORE, "Use neighbours unless so"),
        (replace(QUICK, figure=0.285), [SLOW, replace(LUCKY, figure=0.284, ms=5)], {"error": 0.001}, MORE, "The tree pays by its speed: "),
        (found(0.285), [NEIGHBOURS, fused(0.31, "recipe", "neighbours")], {"error": 0.001}, MORE, BESIDE),
        (
            found(0.25),
            [EASE, fused(0.31, "recipe", "ease")],
            {"not_judged": {"neighbours": "too slow"}},
            "The tree finds no more than ease",
            "Undecided: neighbours, often the best baseline, were not judged (",
        ),
    ],
)
def test_the_verdict_follows_from_differences_intervals_and_times(
    tree: Contestant, others: list[Contestant], given: dict[str, Any], finding: str, pays: str
) -> None:
    sentences = judged(tree, *others, **given)
    assert sentences[0].startswith(finding)
    assert sentences[1].startswith(pays)
    assert ("`fit --kind neighbours`" in sentences[1]) == pays.startswith("Use neighbours")
    assert ("; fused: 10 s to train, 2.0 MB, 2 ms a query)" in sentences[1]) == (pays == BESIDE)


def report_of(metrics: Sequence[str] = ("recall@50",), **said: Any) -> dict[str, Any]:
    """What is reported of a tree and a baseline that find as much."""
    names, figures = ("ease", "recipe"), {name: {"mean": 1.0} for name in metrics}
    rows = [{"method": name, "chosen": True, "figures": figures, "validation": 1.0, "ms_per_query": 1.0} for name in names]
    fits = [{"method": name, "seconds": 1.0, "bytes": 1, "ended": None} for name in names]
    pair = {"first": "ease", "second": "recipe", "mean": 0.0, "low": 0.0, "high": 0.0, "queries": 400}
    differences = [pair | {"metric": name} for name in metrics]
    return {"metric": metrics[0], "rows": rows, "fits": fits, "differences": differences, "not_judged": []} | said


def test_a_metric_of_answers_with_all_items_decides_nothing() -> None:
    def said(items: int, metric: str) -> tuple[str, str]:
        return verdict(*fields_of(report_of(("recall@50", "ndcg@10"), metric=metric, log={"items": items}), "neighbours"))

    assert said(50, "recall@50") == (
        "recall@50 decides nothing, because an answer has room for all 50 items.",
        "Undecided: a smaller search.m in a configuration, which `espalier new` writes, can tell the methods apart.",
    )
    assert said(51, "recall@50")[1].startswith("Use ease (")
    assert said(8, "ndcg@10")[1].startswith("Use ease ("), "the order still tells methods apart"


def test_baselines_with_the_same_validation_figure_are_told_apart_by_other_metrics() -> None:
    first, second = (contestant("popularity", 0.28), contestant("neighbours", 0.28))
    field = field_with("recall@50", TREE, [first, second])
    other = field_with("ndcg@10", TREE, [first, replace(second, figure=0.29)])
    assert "popularity, the best baseline" in verdict(field)[0]
    assert "neighbours, the best baseline" in verdict(field, [other])[0]


def in_metrics(tree_ms: float = 1.0, error: float = 0.002, queries: int = 1000, **figures: tuple[float, ...]) -> str:
    """The second sentence where recall@50 decides. figures: of each contestant, by recall@50 and by ndcg@10."""

    def in_metric(position: int, metric: str) -> Field:
        contestants = [contestant(name, values[position], ms=tree_ms if name == "recipe" else 1.0) for name, values in figures.items()]
        contestants = [
            replace(each, name="fusion", fused_methods=("recipe", "neighbours")) if each.name == "fused" else each for each in contestants
        ]
        return field_with(metric, contestants[0], contestants[1:], error, queries)

    return verdict(in_metric(0, "recall@50"), [in_metric(1, "ndcg@10"), in_metric(0, "mrr@50")])[1]


def test_no_difference_has_no_sign_whichever_method_comes_first() -> None:
    finding, _ = verdict(*fields_of(report_of(), "neighbours"))
    assert "a difference of +0.0000 (95 % interval +0.0000 to +0.0000, 400 queries)" in finding


def test_another_metric_that_decides_otherwise_is_said() -> None:
    pays = in_metrics(recipe=(0.285, 0.12), neighbours=(0.28, 0.1), ease=(0.2, 0.05))
    assert pays.startswith("Use neighbours unless so little more is worth the cost (")
    assert pays.endswith(
        "); but by ndcg@10 the tree has 0.1200 against 0.1000, a difference of +0.0200 (95 % interval +0.0161 to +0.0239, 1,000 queries)."
    )
    pays = in_metrics(recipe=(0.3, 0.12), neighbours=(0.28, 0.12))
    assert pays.startswith("The tree pays (")
    assert "; but by ndcg@10 the tree has 0.1200 against 0.1200, a difference of +0.0000 (" in pays
    pays = in_metrics(recipe=(0.28, 0.1), neighbours=(0.28, 0.14), tree_ms=0.1)
    assert pays.startswith("The tree pays by its speed")
    assert "; but by ndcg@10 the tree has 0.1000 against 0.1400, a difference of -0.0400 (" in pays
    pays = in_metrics(recipe=(0.28, 0.1), neighbours=(0.28, 0.14), fused=(0.31, 0.12))
    assert pays.startswith("The tree pays only beside another method: ")
    assert "; but by ndcg@10 the tree and neighbours, fused, have 0.1200 against 0.1400, a difference of -0.0200 (" in pays


def test_another_metric_that_decides_alike_or_nothing_is_not_said() -> None:
    assert "but" not in in_metrics(recipe=(0.27, 0.2), neighbours=(0.28, 0.14), ease=(0.2, 0.4)), (
        "another baseline finds more than the tree"
    )
    assert "but" not in in_metrics(recipe=(0.27, 0.2), neighbours=(0.28, 0.14), ease=(0.2, 0.2)), "or as much"
    assert "but" not in in_metrics(recipe=(0.4, 0.1), neighbours=(0.2, 0.09), error=0.02), "the metric is open"
    assert "but" not in in_metrics(recipe=(0.285, 0.12), neighbours=(0.28, 0.1), queries=MIN_QUERIES - 1), "so few queries decide nothing"
    assert "but" not in in_metrics(recipe=(0.28, 0.14), neighbours=(0.28, 0.14), tree_ms=0.1), "the speed pays there, too"
    assert "but" not in in_metrics(recipe=(0.28, 0.1), neighbours=(0.28, 0.14), fused=(0.31, 0.16))


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
    unjudged = judged(TREE, EASE, not_judged={"neighbours": "one fit takes 20 s"})[1]
    assert unjudged.startswith("Undecided: neighbours, often the best baseline, were not judged (recipe: ")


def test_without_a_tree_or_a_baseline_nothing_is_claimed() -> None:
    found, pays = judged(None, NEIGHBOURS, not_judged={"recipe": "a batch is too large."})
    assert found == "No tree was judged: a batch is too large."
    assert pays == "Whether one pays here is open."
    assert judged(None, NEIGHBOURS)[0] == "No tree was measured, since it was not run."
    assert judged(TREE) == ("The tree has recall@50 0.3000; no baseline was judged.", "Whether it pays is open.")


def test_costs_are_said_as_people_say_them() -> None:
    assert [duration(s) for s in (0.42, 12, 119, 210, 9000)] == ["0.4 s", "12 s", "119 s", "3.5 min", "2.5 h"]
    assert [size(b) for b in (512, 2_500_000, 7 * 10**9)] == ["1 kB", "2.5 MB", "7.0 GB"]
