"""Which replica of a shard is asked when, and whom that makes a suspect: by a clock that the test owns."""

from __future__ import annotations

import asyncio
import gc
import selectors
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest

from espalier.search import SearchResult
from espalier.shards.messages import Pin, ShardAnswer, encode_answer
from service.router.replicas import LONGEST_REST_S, MAX_BURST, MIN_ANSWERS, REST_S, UNKNOWN_S, Budget, Latencies, Replica
from service.router.shard_call import PAUSE_S, ShardCall, ShardRequest
from service.router.transport import MasksWanted, ReplicaFailed
from service.watch.metrics import Metrics
from tests.service.running import total

PIN = Pin("books", 1, "d" * 64, 0, 2)
ONE = np.zeros((1, 1), np.float32)
FOUND = SearchResult(np.zeros((1, 1), np.int64), ONE, ONE, ONE, np.ones(1, np.int64), np.ones(1, np.bool_))
NEVER, OK = 1e3, "ok"


class Clock:
    """Seconds that pass only where an event loop would wait."""

    now = 100.0


class Waiting(selectors.DefaultSelector):
    """Waiting takes no time: the clock goes on instead."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self.clock.now += max(timeout, 0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop by such a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        super().__init__(Waiting(clock))

    def time(self) -> float:
        return self.clock.now


class Shard:
    """A stand-in for the fleet and its transport: replicas that answer after so many seconds, by turns, the last for ever.

    turns  for each replica: (seconds, OK, a reason to fail, or digests of masks that it lacks)
    sent   (milliseconds since the first, number of the replica, digests whose bits were sent)
    """

    def __init__(self, clock: Clock, turns: Sequence[Sequence[tuple[float, Any]]], hedges: bool = True) -> None:
        self.clock, self.turns = clock, [list(own) for own in turns]
        self.replicas = [Replica(str(number)) for number in range(len(turns))]
        for replica in self.replicas:
            replica.poll_answered(frozenset({PIN}), clock.now)
        self.budget, self.transport = Budget(float(hedges)), self
        self.metrics = Metrics()
        self.latencies = {PIN.index: Latencies()}
        self.sent: list[tuple[int, int, list[str]]] = []
        self.began = clock.now

    def holders(self, pin: Pin, late: bool = False) -> list[Replica]:
        return [replica for replica in self.replicas if pin in replica.shards and not replica.gone]

    async def send(self, address: str, body: bytes, most: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        asked, own = orjson.loads(body), self.turns[int(address)]
        self.sent.append((round(1e3 * (self.clock.now - self.began)), int(address), asked["wanted"]))
        seconds, what = own.pop(0) if len(own) > 1 else own[0]
        timeout_s -= 1e-3  # timers of uvloop may be so early
        await asyncio.sleep(min(seconds, timeout_s))
        if seconds > timeout_s:
            raise ReplicaFailed("late", "no answer in time")
        if what == OK:
            return encode_answer(ShardAnswer(PIN, FOUND, address, 1.0, 1, asked["number"]))
        raise MasksWanted(what) if isinstance(what, tuple) else ReplicaFailed(what, "as the test says")

    def counted(self, name: str) -> float:
        return total(self.metrics, f"espalier_router_{name}_total") or 0.0


class Asked(NamedTuple):
    """What became of a question: the replica that answered or the reason why none did, and the milliseconds that it took."""

    outcome: str
    took_ms: int
    shard: Shard


def _body(wanted: Sequence[str], left_s: float, number: int) -> bytes:
    return orjson.dumps({"wanted": list(wanted), "number": number})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Seconds of the router's modules; of two replicas that are equally busy the first is taken."""
    clock = Clock()
    seconds = SimpleNamespace(perf_counter=lambda: clock.now, monotonic=lambda: clock.now)
    monkeypatch.setattr("service.router.shard_call.time", seconds)
    monkeypatch.setattr("service.router.replicas.random", SimpleNamespace(sample=lambda found, count: found[:count]))
    return clock


def ask(clock: Clock, shard: Shard, within_s: float, patient: bool = False, silent: tuple[int, float] | None = None) -> Asked:
    """Ask once. silent: which replica does not answer a look either, and after how many seconds."""

    calls = list[weakref.ref[ShardCall]]()

    async def scenario() -> str:
        asking = ShardCall(shard, ShardRequest(PIN, _body, 1 << 20, lambda _: None, {}), clock.now + within_s, patient)  # type: ignore[arg-type]  # a stand-in
        calls.append(weakref.ref(asking))
        if silent is not None:
            asyncio.get_running_loop().call_later(silent[1], shard.replicas[silent[0]].poll_failed, True)
        await asyncio.wait([asking.answer])
        await asyncio.sleep(0)  # what is still under way has been given up
        await asyncio.sleep(0)
        assert {replica.in_flight for replica in shard.replicas} == {0}
        error = asking.answer.exception()
        if error is None:
            return asking.answer.result().engine
        assert isinstance(error, ReplicaFailed)
        return error.reason

    shard.began = clock.now
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
            outcome = runner.run(scenario())
            took_ms = round(1e3 * (clock.now - shard.began))
        assert calls[0]() is None, "a reference cycle holds the call, and the bodies of its question and its answer"
    finally:
        gc.enable()
    return Asked(outcome, took_ms, shard)


@pytest.mark.parametrize(
    ("turns", "within_s", "outcome", "took_ms", "sent", "trust"),
    [
        ([[(0.01, OK)], [(0.01, OK)]], 1, "0", 10, "0@0", "trusted trusted"),
        ([[(0.01, "broken")], [(0.01, OK)]], 1, "1", 20, "0@0 1@10", "failed trusted"),
        ([[(0.01, "full")], [(0.01, OK)]], 1, "1", 20, "0@0 1@10", "trusted trusted"),
        ([[(0.01, "refused")], [(0.01, OK)]], 1, "1", 20, "0@0 1@10", "trusted trusted"),
        ([[(0.01, "broken")], [(0.01, "connection")], [(0.01, OK)]], 1, "connection", 20, "0@0 1@10", "failed failed trusted"),
        ([[(0.01, "late")], [(0.01, OK)]], 1, "1", 20, "0@0 1@10", "trusted trusted"),
        ([[(0.055, "late")], [(0.01, OK)]], 1, "1", 60, "0@0 1@50", "late trusted"),
        ([[(NEVER, OK)], [(0.01, OK)]], 1, "1", 60, "0@0 1@50", "late trusted"),
        ([[(0.09, OK)], [(0.06, OK)]], 1, "0", 90, "0@0 1@50", "trusted trusted"),
        ([[(NEVER, OK)], [(0.01, "broken")], [(0.01, OK)]], 1, "2", 70, "0@0 1@50 2@60", "late failed trusted"),
        ([[(NEVER, OK)]], 0.2, "late", 200, "0@0", "late"),
        ([[(NEVER, OK)]], 0.04, "late", 40, "0@0", "trusted"),
        ([[(0.01, ("a", "b")), (0.01, OK)]], 1, "0", 20, "0@0 0@10ab", "trusted"),
        ([[(0.01, ("a",)), (0.01, ("b",))], [(0.01, OK)]], 1, "1", 30, "0@0 0@10a 1@20", "failed trusted"),
    ],
)
def test_who_is_asked_and_when(
    clock: Clock, turns: Sequence[Sequence[tuple[float, Any]]], within_s: float, outcome: str, took_ms: int, sent: str, trust: str
) -> None:
    """`1@50`: replica 1 after 50 ms. A failure is followed once, silence gets company at the 95th percentile, the first answer counts."""
    found = ask(clock, Shard(clock, turns), within_s)
    assert (found.outcome, found.took_ms) == (outcome, took_ms)
    assert " ".join(f"{replica}@{at}{''.join(wanted)}" for at, replica, wanted in found.shard.sent) == sent
    assert " ".join(replica.trust for replica in found.shard.replicas) == trust


@pytest.mark.parametrize(
    ("first", "hedged", "retried", "failed"), [((0.01, "broken"), 0, 1, 1), ((NEVER, OK), 1, 0, 0), ((0.01, OK), 0, 0, 0)]
)
def test_retries_company_and_failures_are_counted(clock: Clock, first: tuple[float, Any], hedged: int, retried: int, failed: int) -> None:
    shard = ask(clock, Shard(clock, [[first], [(0.01, OK)]]), 1).shard
    assert [shard.counted(name) for name in ("hedges", "retries", "failures")] == [hedged, retried, failed]


def test_a_deadline_that_passes_is_one_failure_and_no_other_replica_is_asked_for_it(clock: Clock) -> None:
    asked = ask(clock, Shard(clock, [[(NEVER, OK)], [(0.01, OK)]], hedges=False), 0.2)
    assert asked[:2] == ("late", 200)
    assert [asked.shard.counted(name) for name in ("retries", "failures")] == [0, 1]
    assert [replica.trust for replica in asked.shard.replicas] == ["late", "trusted"]


def test_who_is_silent_or_gone_is_followed_and_three_are_asked_at_most(clock: Clock) -> None:
    assert ask(clock, Shard(clock, [[(0.3, OK)], [(0.01, OK)]], hedges=False), 1)[:2] == ("0", 300)
    gone = Shard(clock, [[(0.01, OK)], [(0.01, "not_served")]])
    gone.replicas[0].gone = True
    assert ask(clock, gone, 1).outcome == "not_served"
    assert PIN not in gone.replicas[1].shards
    assert ask(clock, gone, 1)[:2] == ("connection", 0)
    found = ask(clock, Shard(clock, [[(NEVER, OK)], [(0.01, OK)]]), 1, silent=(0, 0.02))
    assert found[:2] == ("1", 30)
    assert (found.shard.counted("hedges"), found.shard.counted("retries")) == (0, 1)
    # One fails, one is silent, and one that was asked beside it fails, too.
    turns = [[(0.01, "broken")], [(NEVER, OK)], [(0.01, "broken")], [(0.01, OK)]]
    assert ask(clock, Shard(clock, turns), 1, silent=(1, 0.1))[:2] == ("late", 1000)


def test_an_answer_restores_trust_and_is_counted(clock: Clock) -> None:
    shard = Shard(clock, [[(0.02, OK)]])
    while shard.budget.take():
        pass
    shard.replicas[0].suspect("failed", clock.now)
    for number in range(1, MIN_ANSWERS + 1):
        assert ask(clock, shard, 1).outcome == "0"
        assert shard.replicas[0].trust == "trusted"
        assert total(shard.metrics, "espalier_router_shard_seconds_count") == number
    assert shard.latencies[PIN.index].p95_s == pytest.approx(0.02)
    assert shard.budget.take()


def test_only_company_that_comes_is_paid_for(clock: Clock) -> None:
    shard = Shard(clock, [[(0.1, OK)]])
    for _ in range(int(MAX_BURST) + 1):
        assert ask(clock, shard, 1).outcome == "0"
    assert shard.counted("hedges") == 0
    assert [shard.budget.take() for _ in range(int(MAX_BURST) + 1)] == [True] * int(MAX_BURST) + [False]


@pytest.mark.parametrize(
    ("reason", "patient", "within_s", "outcome", "took_ms"),
    [
        ("full", False, 5, "0", round(1e3 * PAUSE_S) + 30),
        ("full", True, 5, "0", round(1e3 * PAUSE_S) + 30),
        ("full", False, 0.1, "late", 100),
        ("late", False, 5, "late", 20),
        ("late", True, 5, "0", round(1e3 * PAUSE_S) + 30),
    ],
)
def test_who_has_time_asks_again_those_that_were_too_busy(
    clock: Clock, reason: str, patient: bool, within_s: float, outcome: str, took_ms: int
) -> None:
    shard = Shard(clock, [[(0.01, reason), (0.01, OK)], [(0.01, reason)]])
    assert ask(clock, shard, within_s, patient)[:2] == (outcome, took_ms)
    assert {replica.trust for replica in shard.replicas} == {"trusted"}


def test_who_was_too_busy_is_asked_again_when_another_one_has_failed(clock: Clock) -> None:
    shard = Shard(clock, [[(0.01, "full"), (0.01, OK)], [(0.01, "connection")]])
    assert ask(clock, shard, 5)[:2] == ("0", round(1e3 * PAUSE_S) + 30)
    assert ask(clock, Shard(clock, [[(0.01, "full"), (0.01, OK)], [(0.01, "refused")]]), 5)[:2] == ("refused", 20)


def test_a_replica_that_is_asked_again_just_before_the_deadline_is_not_late(clock: Clock) -> None:
    shard = Shard(clock, [[(0.01, "full"), (NEVER, OK)]])
    assert ask(clock, shard, 0.01 + PAUSE_S + UNKNOWN_S / 2)[0] == "late"
    assert shard.replicas[0].trust == "trusted"
    again = Shard(clock, [[(0.01, "full"), (NEVER, OK)]])
    assert ask(clock, again, 0.01 + PAUSE_S + 2 * UNKNOWN_S)[0] == "late"
    assert again.replicas[0].trust == "late"


def test_suspects_rest_longer_percentiles_are_found_anew_and_second_tries_are_a_share() -> None:
    replica, now = Replica("0"), 100.0
    for failure in range(10):
        replica.suspect("failed", now)
        rest_s = min(REST_S * 2**failure, LONGEST_REST_S)
        assert replica.suspect_until == pytest.approx(now + rest_s)
        replica.suspect("late", now)  # it is one already
        replica.poll_answered(frozenset({PIN}), now + rest_s - 0.01)
        before, now = replica.trust, now + rest_s
        replica.poll_answered(frozenset({PIN}), replica.suspect_until)
        assert (before, replica.trust) == ("late", "trusted")
    replica.answered()
    replica.suspect("failed", now)
    assert replica.suspect_until == now + REST_S
    latencies = Latencies()
    found = []
    for number in range(1, 300):
        latencies.add(float(number))
        found.append(latencies.p95_s)
    assert found[: MIN_ANSWERS - 1] == [UNKNOWN_S] * (MIN_ANSWERS - 1)
    assert (found[MIN_ANSWERS - 1], found[30], found[31]) == (20.0, 20.0, 31.0)  # the 20th of 20, and the 31st of 32
    assert found[287] == 32 + 1 + int(0.95 * 256)  # the oldest are forgotten
    budget = Budget(0.5)
    assert [budget.take() for _ in range(int(MAX_BURST) + 1)] == [True] * int(MAX_BURST) + [False]
    budget.first_try()
    assert not budget.take()
    budget.first_try()
    assert (budget.take(), budget.take()) == (True, False)
    for _ in range(100):
        budget.first_try()
    assert sum(budget.take() for _ in range(100)) == MAX_BURST
    assert not Budget(0.0).take()
