"""The engine's threads: jobs between calls, several calls at once, and what is said of overload."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.live.overlay import Overlay
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, Engine, Frontier, SearchContext, SearchParams, SearchResult
from service.batching.admission import OVERLOAD_S, Limits
from service.batching.batcher import INLINE_VALUES, JOB_QUERIES, QUIET_JOB_QUERIES, QUIET_S, Batcher
from service.batching.priority import Priority
from service.errors import DeadlinePassed, EngineFailed, NotReady, QueueFull
from service.models.loading import limits_of
from service.settings import Settings
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import OwnTime, pass_time, turns_until
from tests.service.shards.cutting import whole_bundle
from tests.service.test_batching import ITEMS, NewBatcher, accepted, ask, calls, held, idle, new_batcher, queries

__all__ = ["new_batcher"]


async def test_it_says_when_overload_begins_and_when_it_ends(engine: FakeEngine) -> None:
    said = list[bool]()
    batcher = Batcher(engine, Limits(max_batch=1, max_queue=1), "test", on_overload=said.append, clock=asyncio.get_running_loop().time)
    for last in (False, True):
        async with held(engine, batcher) as busy:
            (waiting,) = await accepted(ask(batcher, 1))
            batcher.check_overload(1)
            with pytest.raises(QueueFull):
                await ask(batcher, 2)
            assert said == [True, False, True][: 1 + 2 * last]
            with pytest.raises(QueueFull):
                batcher.check_overload(1)
        await asyncio.gather(busy, waiting)
        if not last:
            await pass_time(2 * OVERLOAD_S)
            batcher.check_overload(1)
            assert said == [True, False]
    assert await batcher.drain(10)
    assert said == [True, False, True, False]


# -- jobs -----------------------------------------------------------------------------------------------------------------


async def test_a_job_runs_on_the_engines_thread_and_gives_its_result_or_its_error(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher()

    def job(given: Engine) -> str:
        assert given is engine
        return threading.current_thread().name

    def failing(given: Engine) -> None:
        raise ValueError("so")

    assert await asyncio.wrap_future(batcher.run(job)) == "engine-test"
    with pytest.raises(ValueError, match="so"):
        await asyncio.wrap_future(batcher.run(failing))
    await ask(batcher, 1)
    await batcher.drain(5)
    with pytest.raises(NotReady):
        batcher.run(job)


class Leading(FakeEngine):
    """A query leads to the node of its newest item's number, and that is its state; the beams are as wide as the call."""

    def set_overlay(self, overlay: Overlay | None) -> None:
        raise AssertionError("nothing is live")

    def candidates(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        return self.search(queries, params, context)

    def parents(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        nodes_BK = np.full((len(queries), len(queries)), -1, np.int64)
        nodes_BK[:, 0] = queries.array[:, -1]
        ranks_BK = np.where(nodes_BK >= 0, np.float32(0), np.float32(-np.inf))
        states_BS = queries.array[:, -1:].astype(np.float32)
        return replace(self.search(queries, params), frontiers=(Frontier(nodes_BK, ranks_BK),), leaf_states_BS=states_BS)


async def test_where_queries_lead_is_found_in_short_jobs_and_is_one_result(new_batcher: NewBatcher) -> None:
    engine = Leading(ITEMS)
    batcher = new_batcher(engine)
    await ask(batcher, 1)
    asked = queries(*range(JOB_QUERIES + 2))
    found = await asyncio.to_thread(batcher.parents_now, engine.parents, asked, SearchParams.uniform(len(asked), 5, 5))
    assert [len(call) for call in calls(engine)] == [1, JOB_QUERIES, 2]
    assert found.item_rows_BM.shape == (JOB_QUERIES + 2, 5)
    (frontier,) = found.frontiers
    assert frontier.nodes_BK[:, 0].tolist() == [*range(JOB_QUERIES + 2)]
    assert frontier.nodes_BK.shape == (JOB_QUERIES + 2, JOB_QUERIES)
    assert found.leaf_states_BS is not None
    assert found.leaf_states_BS[:, 0].tolist() == [*range(JOB_QUERIES + 2)]


async def test_where_queries_lead_is_found_by_who_asks_while_the_engine_is_idle_and_by_its_own_thread_else(new_batcher: NewBatcher) -> None:
    asking = list[str]()

    class Noted(Leading):
        def parents(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
            asking.append(threading.current_thread().name)
            return super().parents(queries, params)

    engine = Noted(ITEMS)
    batcher, params = new_batcher(engine), SearchParams.uniform(1, 5, 5)
    await idle(batcher)
    await asyncio.to_thread(batcher.parents_now, engine.parents, queries(1), params)
    assert asking.pop() != "engine-test"
    async with held(engine, batcher) as busy:
        found = asyncio.create_task(asyncio.to_thread(batcher.parents_now, engine.parents, queries(1), params))
        while not batcher._jobs.waiting:
            await asyncio.sleep(0)
    await asyncio.gather(busy, found)
    assert asking == ["engine-test"]
    asking.clear()
    await idle(batcher)
    (wake,) = batcher._wake_locks
    batcher._wake_locks.clear()  # as after it was woken, and before it has looked what for
    found = asyncio.create_task(asyncio.to_thread(batcher.parents_now, engine.parents, queries(1), params))
    await turns_until(lambda: batcher._jobs.waiting or asking)
    wake.release()
    await found
    assert asking == ["engine-test"]
    await batcher.drain(5)
    with pytest.raises(NotReady):
        await asyncio.to_thread(batcher.parents_now, engine.parents, queries(1), params)
    elsewhere = new_batcher(engine, serial=False)  # on a GPU
    await idle(elsewhere)
    await asyncio.to_thread(elsewhere.parents_now, engine.parents, queries(1), params)
    assert asking == ["engine-test"] * 2


async def test_jobs_are_larger_while_nobody_asks(new_batcher: NewBatcher) -> None:
    engine = Leading(ITEMS)
    batcher = new_batcher(engine)
    await ask(batcher, 1)
    asked = queries(*range(QUIET_JOB_QUERIES + 2))
    for waited_s in (QUIET_S, QUIET_S / 2):  # after the second the limit has passed
        await pass_time(waited_s)
        await asyncio.to_thread(batcher.parents_now, engine.parents, asked, SearchParams.uniform(len(asked), 5, 5))
    small, large = [JOB_QUERIES] * 4 + [2], [QUIET_JOB_QUERIES, 2]
    assert [len(call) for call in calls(engine)] == [1, *small, *large]


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (Priority.NORMAL, "call, job 0, call, call, call, job 1, call, call, call, job 2, call"),
        (Priority.BACKGROUND, "call, job 0, job 1, job 2, call, call, call, call, call, call, call"),
    ],
)
async def test_jobs_are_done_in_turn_and_pause_for_queries_that_wait_but_for_background_ones(
    new_batcher: NewBatcher, priority: Priority, expected: str
) -> None:
    loop, order = asyncio.get_running_loop(), list[str]()
    assert isinstance(loop, OwnTime)

    def took_a_second(what: str) -> None:
        order.append(what)
        loop.passed_s += 1

    class Timed(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
            took_a_second("call")
            return super().search(queries, params, context)

    timed = Timed(ITEMS)
    batcher = new_batcher(timed, max_batch=1, burst_s=1e9)
    async with held(timed, batcher):
        asked = await accepted(*(ask(batcher, 1, priority=priority) for _ in range(7)))
        jobs = [batcher.run(partial(lambda what, _: took_a_second(what), f"job {number}")) for number in range(3)]
    await asyncio.gather(*asked, *map(asyncio.wrap_future, jobs))
    assert ", ".join(order) == expected


# -- several calls at once ------------------------------------------------------------------------------------------------


class Meeting(FakeEngine):
    """Its searches end once as many as `parties` are under way, or fail when that takes longer than `wait_s`."""

    def __init__(self, parties: int, wait_s: float = 10) -> None:
        super().__init__(ITEMS)
        self.barrier = threading.Barrier(parties, timeout=wait_s)

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        self.barrier.wait()
        return super().search(queries, params, context)


async def test_as_many_calls_run_at_once_as_the_limits_say(new_batcher: NewBatcher) -> None:
    engine = Meeting(3)
    batcher = new_batcher(engine, max_batch=1, calls=3)
    answers = await asyncio.gather(*(ask(batcher, i) for i in range(6)))
    assert [answer.batch for answer in answers] == [1] * 6
    assert sorted(calls(engine)) == [[i] for i in range(6)]
    batcher = new_batcher(Meeting(2, wait_s=0.1), max_batch=1)
    failed = await asyncio.gather(*(ask(batcher, i) for i in range(2)), return_exceptions=True)
    assert [type(error) for error in failed] == [EngineFailed] * 2


async def test_a_remote_engine_is_told_the_nearest_deadline_of_a_call(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=16, calls=2, remote=True)
    async with held(engine, batcher) as first, held(engine, batcher) as second:
        tasks = await accepted(*(ask(batcher, i, deadline=50 + i) for i in range(2)))
    await asyncio.gather(first, second, *tasks)
    assert [context.deadline for context in engine.contexts[:2]] == [None, None]
    assert {context.deadline for context in engine.contexts[2:]} <= {50, 51}
    assert engine.contexts[2].deadline == 50


# -- which queries the event loop searches for itself: those that are known to be short, where the engine is free ---------


SHORT_S = 1e-4


class Timed(FakeEngine):
    """A call takes `takes_s` of the running loop's time. inline: of each call, whether the event loop made it."""

    def __init__(self) -> None:
        super().__init__(ITEMS)
        self.takes_s, self.inline = SHORT_S, list[bool]()
        self.loop, self.meanwhile = asyncio.get_running_loop(), list[Callable[[], None]]()

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        self.inline.append(threading.current_thread() is threading.main_thread())
        assert isinstance(self.loop, OwnTime)
        self.loop.passed_s += self.takes_s
        for act in self.meanwhile:
            act()
        return super().search(queries, params, context)


async def seen(new_batcher: NewBatcher, takes_s: float = SHORT_S, **limits: Any) -> tuple[Timed, Batcher]:
    """A batcher that searches for queries of at most SHORT_S itself, and has seen one of beam 5 take so long; it is idle."""
    engine = Timed()
    engine.takes_s = takes_s
    batcher = new_batcher(engine, **{"inline_s": SHORT_S} | limits)
    await ask(batcher, 0)
    await idle(batcher)
    return engine, batcher


@pytest.mark.parametrize(("takes_s", "inline"), [(SHORT_S, True), (1.01 * SHORT_S, False)])
async def test_a_query_is_searched_inline_once_its_beam_is_known_to_be_short(new_batcher: NewBatcher, takes_s: float, inline: bool) -> None:
    engine, batcher = await seen(new_batcher, takes_s)
    answer = await ask(batcher, 1)
    assert engine.inline == [False, inline]
    assert answer.result.item_rows_BM.tolist() == [[0, 1, 2, 3, 4]]
    assert (answer.batch, answer.beam_size, answer.degraded) == (1, 5, False)
    assert answer.engine_s == pytest.approx(takes_s)


async def test_another_power_of_two_of_the_beam_must_be_seen_first(new_batcher: NewBatcher) -> None:
    """What is assumed of it is no measurement."""
    engine, batcher = await seen(new_batcher)
    for beam_size in (7, 3, 2):
        await ask(batcher, 1, beam_size=beam_size)
        await idle(batcher)
    assert engine.inline == [False, True, False, True]


async def test_after_one_long_query_the_next_are_handed_to_the_thread(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    engine.takes_s = 100 * SHORT_S
    await ask(batcher, 1)
    engine.takes_s = SHORT_S / 2
    while not engine.inline[-1] or len(engine.inline) == 2:
        await ask(batcher, 1)
        await idle(batcher)
    assert engine.inline[:2] == [False, True]
    assert engine.inline[2:6] == [False] * 4


def wide(values: int) -> SearchParams:
    """Of a query whose history, results and exclusions are so many values."""
    return SearchParams.uniform(1, 5, 5, np.full((1, values - 3 - 5), -1))


@pytest.mark.parametrize(
    ("params", "priority", "inline"),
    [
        (wide(INLINE_VALUES), Priority.NORMAL, True),
        (wide(INLINE_VALUES + 1), Priority.NORMAL, False),
        (SearchParams.uniform(1, 5, INLINE_VALUES - 3), Priority.NORMAL, True),
        (SearchParams.uniform(1, 5, INLINE_VALUES - 2), Priority.NORMAL, False),
        (SearchParams.uniform(1, 5, 5, trace=True), Priority.NORMAL, False),
        (SearchParams.uniform(2, 5, 5), Priority.NORMAL, False),
        (SearchParams.uniform(1, 5, 5), Priority.PATIENT, False),
        (SearchParams.uniform(1, 5, 5), Priority.BACKGROUND, False),
    ],
)
async def test_only_a_single_small_normal_query_is(new_batcher: NewBatcher, params: SearchParams, priority: Priority, inline: bool) -> None:
    """A stream, or a measurement in the background, would keep the event loop for itself."""
    engine, batcher = await seen(new_batcher)
    await batcher.search(queries(*range(len(params.m_B))), params, priority=priority)
    assert engine.inline == [False, inline]


async def test_queries_that_come_together_go_to_the_thread(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    await asyncio.gather(*(ask(batcher, item) for item in range(3)))
    assert not any(engine.inline)
    await idle(batcher)
    await ask(batcher, 1)
    assert engine.inline[-1]


async def test_who_hung_up_at_once_makes_no_later_query_one_of_two(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    for _ in range(2):
        gone = asyncio.ensure_future(ask(batcher, 1))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    await ask(batcher, 1)
    assert engine.inline == [False, True]


async def test_a_query_waits_for_a_busy_engine(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    async with held(engine, batcher, beam_size=16) as busy:
        (behind,) = await accepted(ask(batcher, 1))
        assert not behind.done()
    await asyncio.gather(busy, behind)
    assert engine.inline == [False, False, False]


async def test_a_query_waits_for_a_job(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    begun, end = threading.Event(), threading.Event()

    def job(_: Engine) -> None:
        begun.set()
        assert end.wait(10)

    done = batcher.run(job)
    assert await asyncio.to_thread(begun.wait, 10)
    (behind,) = await accepted(ask(batcher, 1))
    end.set()
    await asyncio.gather(behind, asyncio.wrap_future(done))
    assert engine.inline == [False, False]


async def test_a_job_waits_for_the_query(new_batcher: NewBatcher) -> None:
    """An engine takes one search at a time."""
    engine, batcher = await seen(new_batcher)
    jobs = []

    def ask_for_a_job() -> None:
        jobs.append(batcher.run(lambda _: "done"))
        with pytest.raises(TimeoutError):
            jobs[0].result(0.02)

    engine.meanwhile.append(ask_for_a_job)
    await ask(batcher, 1)
    assert engine.inline == [False, True]
    assert await asyncio.wrap_future(jobs[0]) == "done"


async def test_an_engine_that_fails_inline_serves_on(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    engine.failure = ValueError("out of memory")
    with pytest.raises(EngineFailed, match="out of memory"):
        await ask(batcher, 1)
    assert (await ask(batcher, 2)).batch == 1
    assert engine.inline == [False, True, True]


async def test_a_search_of_the_event_loop_is_waited_for_before_the_engine_may_close(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    ended: list[bool] = []

    def drain_elsewhere() -> None:
        draining = threading.Thread(target=lambda: ended.append(asyncio.run(batcher.drain(0.05))))
        draining.start()
        draining.join()

    engine.meanwhile.append(drain_elsewhere)
    await ask(batcher, 1)
    assert (engine.inline, ended) == ([False, True], [False])
    assert await batcher.drain(10)


@pytest.mark.parametrize(("fixed_beam", "beam_size"), [(False, 2), (True, 5)])
async def test_near_the_deadline_the_beam_shrinks_inline_too_unless_it_is_fixed(
    new_batcher: NewBatcher, fixed_beam: bool, beam_size: int
) -> None:
    engine, batcher = await seen(new_batcher, smallest_beam_size=1)
    deadline = asyncio.get_running_loop().time() + SHORT_S / 2
    answer = await ask(batcher, 1, beam_size=5, deadline=deadline, fixed_beam=fixed_beam)
    assert (answer.beam_size, answer.degraded, engine.inline) == (beam_size, not fixed_beam, [False, True])


async def test_in_overload_all_queries_are_counted_in_the_queue(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher, max_queue=1, inline_s=2 * SHORT_S)
    async with held(engine, batcher, beam_size=16) as busy:
        (waiting,) = await accepted(ask(batcher, 1, beam_size=16))
        with pytest.raises(QueueFull):
            await ask(batcher, 2)
    await asyncio.gather(busy, waiting)
    for _ in range(2):
        await idle(batcher)
        await ask(batcher, 1)
        await pass_time(2 * OVERLOAD_S)  # the second finds that overload is over
    await idle(batcher)
    await ask(batcher, 1)
    assert engine.inline[-3:] == [False, False, True]


async def test_a_job_that_paused_for_expired_queries_is_done(new_batcher: NewBatcher) -> None:
    engine, batcher = await seen(new_batcher)
    loop = engine.loop
    assert isinstance(loop, OwnTime)

    def takes_a_second(_: Engine) -> None:
        loop.passed_s += 1

    async with held(engine, batcher, beam_size=16) as busy:
        (late,) = await accepted(ask(batcher, 1, deadline=loop.time() + 0.5))
        jobs = [asyncio.wrap_future(batcher.run(takes_a_second)) for _ in range(2)]
    await asyncio.wait_for(asyncio.gather(*jobs), 60)
    with pytest.raises(DeadlinePassed):
        await late
    await busy


@pytest.mark.parametrize(
    ("engine", "remote", "settings", "inline_s"),
    [
        ("compiled-cpu", False, {}, 2e-4),
        ("compiled-cpu", False, {"max_inline_us": 50}, 5e-5),
        ("compiled-cpu", False, {"max_wait_us": 1}, 0.0),
        ("sharded", True, {}, 0.0),
        ("triton", False, {}, 0.0),
    ],
)
def test_only_engines_that_search_here_on_a_cpu_and_wait_for_nothing_do(
    tmp_path: Path, engine: str, remote: bool, settings: dict[str, Any], inline_s: float
) -> None:
    bundle, named = whole_bundle(tmp_path), FakeEngine(ITEMS)
    named.name = engine
    assert limits_of(Settings(**settings), bundle, named, remote=remote).inline_s == inline_s
