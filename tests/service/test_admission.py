"""What a search is expected to take, and whether a queue is too long to join."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from espalier.arrays import Float64
from service.batching.admission import MORE_CALLS, QUEUE_CALLS, SHORT_S, STANDING_S, STREAM_CALLS, Admission, Cost
from service.errors import QueueFull


def test_a_cost_is_learned_per_power_of_two_of_the_beam_and_says_how_wide_a_beam_fits() -> None:
    cost = Cost(serial=True)
    assert cost.of(100) == 0
    cost.learn([(100, 4)], 0.004)
    assert cost.of(100) == cost.of(64) == cost.of(127) == pytest.approx(1e-3)
    assert cost.of(50) == pytest.approx(0.5e-3)
    assert cost.of(400) == pytest.approx(4e-3)
    for _ in range(200):
        cost.learn([(100, 1)], 0.003)
    assert cost.of(100) == pytest.approx(3e-3, rel=1e-3)
    for serial, expected in ((True, 2e-3 + 3 * 4e-3), (False, 4e-3)):
        cost = Cost(serial)
        cost.learn([(64, 1)], 2e-3)
        assert cost.of_call([(64, 1), (128, 3)]) == pytest.approx(expected)
    cost = Cost(serial=True)
    cost.learn([(64, 1)], 1e-3)
    for _ in range(200):
        cost.learn([(64, 2), (256, 1)], 12e-3)  # expected 2 · 1 + 4 ms
    assert [cost.of(64), cost.of(256)] == pytest.approx([2e-3, 8e-3], rel=1e-3)
    cost = Cost(serial=True)
    cost.learn([(256, 1)], 4e-3)
    assert cost.affordable(256, 10, 5e-3) == 256
    assert cost.affordable(256, 10, 3e-3) == 128
    assert cost.affordable(256, 10, 0.6e-3) == 32
    assert cost.affordable(256, 100, 0.0) == 100
    assert cost.affordable(50, 100, 0.0) == 50


def test_a_queue_refuses_what_it_cannot_hold_or_would_feel_and_says_when_to_come_again() -> None:
    assert not Admission(max_queue=1, burst_s=0.1).refuses(now=0, waiting=0, queries=999, wait_s=9, call_s=9)
    admission = Admission(max_queue=10, burst_s=0.1)
    assert not admission.refuses(0, waiting=9, queries=1, wait_s=0, call_s=0)
    assert admission.refuses(0, waiting=9, queries=2, wait_s=0, call_s=0)
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert admission.refuses(0.0, waiting=500, queries=1, wait_s=0.11, call_s=0.0002)
    assert not admission.refuses(0.1, waiting=10, queries=1, wait_s=SHORT_S, call_s=0.0002)
    assert admission.refuses(0.2, waiting=10, queries=1, wait_s=SHORT_S * 1.01, call_s=0.0002)
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert admission.has_room(waiting=1, queries=1, wait_s=STREAM_CALLS * 0.01, call_s=0.01)
    assert not admission.has_room(waiting=2, queries=1, wait_s=0.02, call_s=0.01)
    retry_after = [dict(QueueFull("", wait_s).headers)["Retry-After"] for wait_s in (0, 0.2, 1.0, 1.1)]
    assert retry_after == ["1", "1", "1", "2"]


def test_a_burst_is_no_queue_that_stands_and_overload_ends_after_a_pause() -> None:
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert not admission.refuses(0.0, waiting=40, queries=1, wait_s=0.1, call_s=0.01)
    assert admission.refuses(0.01, waiting=50, queries=1, wait_s=0.11, call_s=0.01)
    assert admission.refuses(0.02, waiting=40, queries=1, wait_s=0.1, call_s=0.01)
    assert not admission.refuses(0.03, waiting=6, queries=1, wait_s=(QUEUE_CALLS + MORE_CALLS) * 0.01, call_s=0.01)
    # A long queue that was short for a moment is one.
    dips, stands = (Admission(max_queue=1000, burst_s=0.1) for _ in range(2))
    for number in range(30):
        now, dip = number * 0.01, number % 4 == 3
        assert not dips.refuses(now, waiting=2 if dip else 30, queries=1, wait_s=0.002 if dip else 0.03, call_s=0.001)
        assert stands.refuses(now, waiting=30, queries=1, wait_s=0.03, call_s=0.001) is (now >= STANDING_S)
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert admission.refuses(0.0, waiting=500, queries=1, wait_s=0.11, call_s=0.001)
    for _ in range(2000):
        assert admission.refuses(0.5, waiting=10, queries=1, wait_s=0.01, call_s=0.001)
    assert admission.refuses(1.1, waiting=10, queries=1, wait_s=0.01, call_s=0.001)
    assert not admission.refuses(5.0, waiting=10, queries=1, wait_s=0.003, call_s=0.001)
    assert not admission.refuses(5.0, waiting=10, queries=1, wait_s=0.01, call_s=0.001)


SERVICE_S = 0.002


def simulated(load: float, seconds: float, admission: Admission, seed: int = 0, begin_s: float = 0.0) -> tuple[float, Float64, float]:
    """Random arrivals at an engine that takes SERVICE_S for each: answers as a share of what it can do, their seconds, share refused."""
    rng = np.random.default_rng(seed)
    free, ends, took, refused = 0.0, deque[float](), [], 0
    arrivals = np.cumsum(rng.exponential(SERVICE_S / load, int(seconds * load / SERVICE_S)))
    for now in arrivals.tolist():
        while ends and ends[0] <= now:
            ends.popleft()
        waiting, call_s = max(len(ends) - 1, 0), SERVICE_S if ends else 0.0
        if admission.refuses(begin_s + now, waiting, 1, waiting * SERVICE_S + call_s, SERVICE_S):
            admission.refused(1)
            refused += 1
            continue
        admission.accepted(1, busy=bool(ends))
        free = max(free, now) + SERVICE_S * rng.uniform(0.8, 1.2)
        ends.append(free)
        took.append(free - now)
    return len(took) * SERVICE_S / arrivals[-1], np.array(took), refused / len(arrivals)


@pytest.mark.parametrize(("load", "goodput"), [(1.0, 0.9), (1.2, 0.95), (1.5, 0.97), (2.0, 0.97), (10.0, 0.97)])
def test_in_overload_the_engine_is_kept_busy_and_nobody_waits_long(load: float, goodput: float) -> None:
    done, took_s, _ = simulated(load, 60, Admission(max_queue=1000, burst_s=0.1))
    assert done >= goodput
    assert np.percentile(took_s, 99) <= (QUEUE_CALLS + MORE_CALLS / load + 3.5) * SERVICE_S


def test_at_seven_tenths_of_the_capacity_next_to_nothing_is_refused() -> None:
    _, _, refused = simulated(0.7, 120, Admission(max_queue=1000, burst_s=0.1))
    assert refused < 0.003


@pytest.mark.parametrize(("load", "ends"), [(0.3, True), (0.7, True), (0.8, True), (1.1, False), (2.0, False)])
def test_overload_lasts_as_long_as_more_work_comes_than_can_be_done(load: float, ends: bool) -> None:
    """Whatever began it: a stall of the machine, say."""
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert admission.refuses(0.0, waiting=500, queries=1, wait_s=0.11, call_s=SERVICE_S)
    over = []
    for second in range(20):
        simulated(load, 1.0, admission, seed=second, begin_s=second)
        over.append(admission.overloaded)
    assert over[-10:].count(True) <= 1 if ends else all(over)
