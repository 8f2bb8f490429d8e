"""Memory that requests share."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from service.http.memory_budget import RECHECK_S, Budget, Held
from tests.service.own_time import pass_time, settled


def test_a_little_is_free_for_everybody() -> None:
    budget = Budget(10, free=5)
    with Held(budget) as large, Held(budget) as small, Held(budget) as other:
        assert large.take(15)
        assert budget.left == 0
        assert small.take(3)
        assert small.take(2)
        assert not small.take(1)
        assert not other.take(6)
        assert small.units == 5
        large.give(4)
        assert other.take(9)
    assert budget.left == budget.units


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-8, 12)), max_size=40))
def test_what_is_given_back_is_there_again(steps: list[tuple[int, int]]) -> None:
    budget = Budget(20, free=4)
    holders = [Held(budget) for _ in range(3)]
    for holder, units in steps:
        if units < 0:
            holders[holder].give(min(-units, holders[holder].units))
        else:
            holders[holder].take(units)
        assert budget.left == 20 - sum(max(held.units - 4, 0) for held in holders)
        assert budget.left >= 0
    for held in holders:
        held.give(held.units)
    assert budget.left == 20


async def test_who_waits_is_woken() -> None:
    budget = Budget(10, free=0)
    first, second = Held(budget), Held(budget)
    assert first.take(8)
    waiting = asyncio.create_task(second.wait(5, 100, lambda: False))
    await settled()
    first.give(2)
    await settled()
    assert not waiting.done()  # two are back
    first.give(3)
    assert await waiting
    assert budget.left == 10 - 3 - 5


async def test_who_gives_up_waiting_holds_nothing() -> None:
    budget = Budget(10, free=0)
    with Held(budget) as first, Held(budget) as second:
        assert first.take(10)
        waiting = asyncio.create_task(second.wait(5, 100, lambda: False))
        await asyncio.sleep(0)
        waiting.cancel()
        first.give(10)
        await asyncio.gather(waiting, return_exceptions=True)
    assert budget.left == 10


async def test_only_so_many_may_wait_and_nobody_who_has_gone() -> None:
    budget, gone = Budget(10, free=0, most_waiting=2), [False]
    with Held(budget) as first, Held(budget) as second, Held(budget) as third, Held(budget) as fourth:
        assert first.take(10)
        waiting = [asyncio.create_task(held.wait(5, 100, lambda: gone[0])) for held in (second, third)]
        await asyncio.sleep(0)
        assert not await fourth.wait(5, 100, lambda: False)
        gone[0] = True
        await pass_time(RECHECK_S)
        assert await asyncio.gather(*waiting) == [False, False]
        assert budget.waiting == set()
    assert budget.left == 10


async def test_one_holder_waits_for_itself_before_it_takes_more_than_its_share() -> None:
    budget = Budget(100, free=0)
    with Held(budget) as held:
        assert await held.wait(7, 5, lambda: False)  # more than its share, but nothing else
        waiting = asyncio.create_task(held.wait(1, 5, lambda: False))
        await asyncio.sleep(0)
        assert not waiting.done()
        held.give(7)
        assert await waiting
