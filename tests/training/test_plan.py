"""What methods need of a log, and how a comparison divides its time: both by a clock that the tests own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from training.compare.plan import USED, Plan, is_judged, share_out
from training.retrieval.needs import FULL_S, LEAST_S, SPARE, Needs, by_parts, of_steps, seconds_each
from training.retrieval.task import Fitted, Task


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


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


@pytest.mark.parametrize(("users", "fixed_s", "user_s"), [(100, 0.0, 0.001), (40_000, 0.02, 0.0002), (1_000_000, 0.0, 0.0005)])
def test_the_time_for_all_users_follows_from_parts_of_them(users: int, fixed_s: float, user_s: float) -> None:
    clock = Clock()
    sizes: list[int] = []

    def method(task: Task) -> Fitted:
        assert task.seconds == 0, "its shortest fit"
        sizes.append(len(task.split.train))
        clock.now_s += fixed_s + user_s * len(task.split.train)
        return cast(Fitted, None)

    task = cast(Task, _Task(_Split(np.arange(users), range(users // 10)), clock))
    needs = by_parts(method, trials=30, once=8)(task)
    whole_s = fixed_s + user_s * users
    assert needs.least_s == pytest.approx(max(LEAST_S, 8 * whole_s), rel=0.02)
    assert needs.full_s == pytest.approx(max(FULL_S, 30 * whole_s), rel=0.02)
    assert max(sizes) == users or max(sizes) <= users / 10, "a small part, or a small log"


# -- shares ---------------------------------------------------------------------------------------------------------------


def test_what_is_left_goes_by_weight_to_those_that_need_more() -> None:
    share = share_out({"recipe": 10, "ease": 5, "ials": 5}, {"recipe": 1000, "ease": 6, "ials": 1000}, 41)
    assert share == pytest.approx({"recipe": 10 + 30, "ease": 6, "ials": 5 + 10})
    assert share_out({"ease": 5}, {"ease": 6}, 100) == {"ease": 6}, "nobody gets more than all that it needs"


def test_the_tree_and_the_strong_baseline_come_first_then_what_needs_least() -> None:
    needs = {"a": Needs(30, 30), "b": Needs(20, 20), "neighbours": Needs(25, 25), "recipe": Needs(40, 40, 100)}
    assert set(plan(needs).shares()) == {"recipe", "neighbours", "b"}
    assert set(plan(needs, seconds=130).shares()) == {"recipe", "neighbours", "b", "a"}
    assert set(plan(needs, seconds=30).shares()) == {"neighbours"}, "a tree that has no time leaves it to others"


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


def test_a_fusion_waits_for_its_parts() -> None:
    fusion = "fusion:recipe:ease"
    needs = {"ease": Needs(10, 10), "recipe": Needs(50, 50, 100), fusion: Needs(1, 1)}
    assert fusion in plan(needs).shares()
    late = plan(needs, seconds=50)
    assert fusion not in late.shares()
    assert late.reasons[fusion] == "recipe is not judged"
    refused = Plan(Clock(), 50.0, 100, {fusion: Needs(1, 1)}, {fusion: 0}, {"recipe": "needs 90 GB"})
    assert refused.shares() == {}
    assert fusion in plan({fusion: Needs(1, 1)}).shares(), "it fits its parts itself, where they are no methods of the plan"


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
