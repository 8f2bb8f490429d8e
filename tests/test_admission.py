"""What a search is expected to take, and whether a queue is too long to join."""

from __future__ import annotations

import pytest

from service.admission import OVERLOAD_S, SHORT_CALLS, SHORT_S, Admission, Cost, retry_after_s


def test_a_cost_is_learned_per_power_of_two_of_the_beam() -> None:
    cost = Cost(serial=True)
    assert cost.of(100) == 0
    cost.learn([(100, 4)], 0.004)
    assert cost.of(100) == cost.of(64) == cost.of(127) == pytest.approx(1e-3)
    assert cost.of(50) == pytest.approx(0.5e-3)
    assert cost.of(400) == pytest.approx(4e-3)
    for _ in range(200):
        cost.learn([(100, 1)], 0.003)
    assert cost.of(100) == pytest.approx(3e-3, rel=1e-3)


def test_a_call_costs_its_sum_on_a_cpu_and_its_dearest_query_on_a_gpu() -> None:
    for serial, expected in ((True, 2e-3 + 3 * 4e-3), (False, 4e-3)):
        cost = Cost(serial)
        cost.learn([(64, 1)], 2e-3)
        assert cost.of_call([(64, 1), (128, 3)]) == pytest.approx(expected)


def test_a_mixed_call_corrects_all_its_beams_alike() -> None:
    cost = Cost(serial=True)
    cost.learn([(64, 1)], 1e-3)
    for _ in range(200):
        cost.learn([(64, 2), (256, 1)], 12e-3)  # expected 2 · 1 + 4 ms
    assert [cost.of(64), cost.of(256)] == pytest.approx([2e-3, 8e-3], rel=1e-3)


def test_the_beam_is_halved_until_it_fits() -> None:
    cost = Cost(serial=True)
    cost.learn([(256, 1)], 4e-3)
    assert cost.affordable(256, 10, 5e-3) == 256
    assert cost.affordable(256, 10, 3e-3) == 128
    assert cost.affordable(256, 10, 0.6e-3) == 32
    assert cost.affordable(256, 100, 0.0) == 100
    assert cost.affordable(50, 100, 0.0) == 50


def test_an_empty_queue_takes_anything() -> None:
    assert not Admission(max_queue=1, burst_s=0.1).refuses(now=0, waiting=0, queries=999, wait_s=9, call_s=9)


def test_a_burst_may_fill_the_queue_and_after_an_overflow_it_is_kept_short() -> None:
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert not admission.refuses(0.0, waiting=40, queries=1, wait_s=0.1, call_s=0.02)
    assert admission.refuses(1.0, waiting=50, queries=1, wait_s=0.11, call_s=0.02)
    soon = 1 + OVERLOAD_S * 0.9
    assert not admission.refuses(soon, waiting=1, queries=1, wait_s=SHORT_CALLS * 0.02, call_s=0.02)
    assert admission.refuses(soon, waiting=2, queries=1, wait_s=0.06, call_s=0.02)


@pytest.mark.parametrize(("share", "lasts"), [(0.5, False), (0.9, False), (1.0, True), (10.0, True)])
def test_overload_lasts_as_long_as_more_work_comes_than_can_be_done(share: float, lasts: bool) -> None:
    """Queries of 1 ms: half of them accepted, half of them refused, since the queue is always a little too long for overload."""
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert admission.refuses(0.0, waiting=500, queries=1, wait_s=0.11, call_s=0.001, query_s=0.001)
    now, between_s = 0.0, 0.001 / share
    refused = False
    for number in range(int(3 * OVERLOAD_S / between_s)):
        now += between_s
        if number % 2:
            admission.accepted(1, query_s=0.001)
        else:
            refused = admission.refuses(now, waiting=10, queries=1, wait_s=0.01, call_s=0.001, query_s=0.001)
            if refused is False:
                admission.accepted(1, query_s=0.001)
    assert refused is lasts


def test_overload_is_over_after_a_pause() -> None:
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert admission.refuses(0.0, waiting=500, queries=1, wait_s=0.11, call_s=0.001, query_s=0.001)
    for _ in range(2000):
        assert admission.refuses(0.5, waiting=10, queries=1, wait_s=0.01, call_s=0.001, query_s=0.001)
    assert not admission.refuses(5.0, waiting=10, queries=1, wait_s=0.01, call_s=0.001, query_s=0.001)


def test_a_wait_that_nobody_feels_is_no_reason_to_refuse() -> None:
    admission = Admission(max_queue=1000, burst_s=0.1)
    assert admission.refuses(0.0, waiting=500, queries=1, wait_s=0.11, call_s=0.0002)
    assert not admission.refuses(0.1, waiting=10, queries=1, wait_s=SHORT_S, call_s=0.0002)
    assert admission.refuses(0.2, waiting=10, queries=1, wait_s=SHORT_S * 1.01, call_s=0.0002)


def test_more_queries_than_the_queue_holds_are_refused_whatever_they_cost() -> None:
    admission = Admission(max_queue=10, burst_s=0.1)
    assert not admission.refuses(0, waiting=9, queries=1, wait_s=0, call_s=0)
    assert admission.refuses(0, waiting=9, queries=2, wait_s=0, call_s=0)


def test_retry_after_is_in_whole_seconds() -> None:
    assert [retry_after_s(s) for s in (0, 0.2, 1.0, 1.1)] == [1, 1, 1, 2]
