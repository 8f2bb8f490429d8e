"""What the limits of keys let through, in one worker and in several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import pytest

from service.errors import KeyLimit
from service.http.key_limits import COST_BURST_S, DEBT_S, FREE_AFTER_S, SLOTS, KeyLimits
from service.keys_file import Key
from tests.service.limit_workers import lock_for_ever, patiently_taken, taken
from tests.service.own_time import Time
from tests.service.test_counts import fill, small_disk


def limited(**limits: Any) -> Key:
    return Key("a", b"", "retrieve", **limits)


def test_a_rate_lets_a_burst_through_and_then_as_many_as_it_says() -> None:
    clock, key = Time(), limited(rate=2.0, burst=3.0)
    limits = KeyLimits(None, clock)

    def passed(tries: int) -> int:
        count = 0
        for _ in range(tries):
            with suppress(KeyLimit):
                limits.take(key)
                count += 1
        return count

    assert passed(10) == 3
    with pytest.raises(KeyLimit, match="2 requests a second, 3 at once") as raised:
        limits.take(key)
    assert dict(raised.value.headers) == {"Retry-After": "1"}
    clock.s += 0.5
    assert passed(10) == 1
    clock.s += 0.4
    assert passed(10) == 0
    clock.s += 60
    assert passed(10) == 3


def test_a_cost_is_expected_before_and_corrected_after() -> None:
    clock, key = Time(), limited(cost=0.5)
    limits = KeyLimits(None, clock)
    limits.spend(key, 0.25)
    limits.take(key)
    limits.settle(key, 0.25, 1.0)  # it took four times as long: two seconds of what the key may have
    with pytest.raises(KeyLimit, match=r"0\.5 engine seconds a second") as raised:
        limits.take(key)
    assert dict(raised.value.headers) == {"Retry-After": "1"}
    clock.s += 2.0 - COST_BURST_S
    limits.take(key)
    limits.spend(key, 1e6)
    limits.settle(key, 1e6, 0.5)  # however wrong it was: it costs what it took
    clock.s += 1.0
    limits.take(key)
    limits.spend(key, 1e6)
    limits.settle(key, 1e6, 1e6)
    with pytest.raises(KeyLimit):
        limits.take(key)
    clock.s += DEBT_S
    limits.take(key)  # no debt lasts longer
    limits.spend(limited(), 1e6)  # without limits nothing is counted
    limits.take(limited())


def test_a_key_whose_limits_change_begins_anew_and_as_many_keys_as_come_are_counted() -> None:
    limits = KeyLimits(None, Time())
    slow = limited(rate=0.01)
    limits.take(slow)
    with pytest.raises(KeyLimit):
        limits.take(slow)
    limits.take(limited(rate=1000.0))
    for number in range(SLOTS + 5):
        other = replace(slow, name=f"k{number}")
        limits.take(other)
        with pytest.raises(KeyLimit):
            limits.take(other)


def test_slots_of_keys_that_are_no_longer_used_are_used_again_and_one_that_gets_none_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Time()
    workers = [KeyLimits(tmp_path / "key-limits", clock) for _ in range(3)]

    def passed(key: Key) -> int:
        count = 0
        for turn in range(30):
            with suppress(KeyLimit):
                workers[turn % 3].take(key)
                count += 1
        return count

    first = limited(rate=0.5, burst=4.0)
    assert passed(first) == 4
    for number in range(SLOTS - 1):
        workers[0].take(replace(first, name=f"k{number}"))
    assert not caplog.records
    assert passed(replace(first, name="late")) == 3 * 4  # each worker by itself
    assert "each worker counts the key late by itself" in caplog.text
    clock.s += 2 * FREE_AFTER_S
    assert passed(replace(first, name="later")) == 4
    for number in range(SLOTS):  # one of them takes the slot of the first key
        workers[0].take(replace(first, name=f"n{number}"))
    clock.s += 2 * FREE_AFTER_S
    assert passed(first) == 4


def test_a_worker_that_begins_without_space_for_the_file_counts_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = limited(rate=0.5, burst=2.0)
    with small_disk(tmp_path / "small", "512k") as disk:
        filler = fill(disk)
        alone = KeyLimits(disk / "key-limits", Time())
        assert "key-limits: No space left on device: until a restart each worker counts" in caplog.text
        filler.unlink()
        others = [KeyLimits(disk / "key-limits", Time()) for _ in range(2)]
        for limits in (alone, others[0]):
            for _ in range(2):
                limits.take(key)
        for limits in (alone, *others):
            with pytest.raises(KeyLimit):
                limits.take(key)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Other workers: more than there are cores, so that each is interrupted at any point."""
    with get_context("spawn").Pool(4) as started:
        yield started


def test_workers_of_a_host_count_together(pool: Pool, tmp_path: Path) -> None:
    counts = pool.starmap(taken, [(tmp_path / "key-limits", limited(rate=0.001, burst=40.0), 100)] * 4)
    assert sum(counts) == 40


class Late(mmap):
    """Slots in which another worker claims one after a key was looked for and before a free one is."""

    meanwhile: Callable[[], None]

    def find(self, *what: Any) -> int:
        found = super().find(*what)
        self.meanwhile()
        return found


def test_workers_that_see_a_key_first_at_the_same_time_count_it_together(tmp_path: Path) -> None:
    one, other = (KeyLimits(tmp_path / "key-limits", Time()) for _ in range(2))
    key = limited(rate=0.001, burst=2.0)
    assert one._file is not None
    one._slots = slots = Late(one._file, len(one._slots))
    slots.meanwhile = lambda: other.take(key)
    one.take(key)
    for limits in (one, other):
        with pytest.raises(KeyLimit):
            limits.take(key)


def test_a_worker_that_is_interrupted_while_it_counts_undoes_nothing(pool: Pool, tmp_path: Path) -> None:
    limits = KeyLimits(tmp_path / "key-limits")
    key = limited(rate=0.001, burst=2.0)
    with limits._slot_lock(key):
        requests, seconds = limits._arrival_times(key)
        other = pool.apply_async(patiently_taken, (tmp_path / "key-limits", key))
        other.wait(0.5)
        assert not other.ready()
        limits._write(key, max(requests, time.monotonic()) + 1 / 0.001, seconds)
    other.get(20)
    with pytest.raises(KeyLimit):
        limits.take(key)


def test_a_worker_that_stands_still_while_it_counts_stops_no_other(pool: Pool, tmp_path: Path) -> None:
    limits = KeyLimits(tmp_path / "key-limits")
    key = limited(rate=0.001, burst=2.0)
    limits.take(key)
    place = limits._slot(key).offset
    pool.apply(lock_for_ever, (tmp_path / "key-limits", place))
    began = time.monotonic()
    limits.take(key)
    with pytest.raises(KeyLimit):
        limits.take(key)
    assert time.monotonic() - began < 1
