"""Bodies as they arrive: in pieces, slowly, too long, or not to their end; and the memory that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message

from service.errors import NotJson, ServiceError, SlowBody
from service.http.memory_budget import RECHECK_S, Budget, Reservation
from service.http.request_bodies import check_head, read_body, read_lines
from tests.service.own_time import pass_time, settled

ROOM = Budget(1 << 20, 0)


def arriving(*pieces: bytes, whole: bool = True) -> Callable[[], Awaitable[Message]]:
    """A receive that gives the pieces and then the end of the body, or, unless `whole`, a client that hangs up."""
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False} if whole else {"type": "http.disconnect"})

    async def receive() -> Message:
        return messages.pop(0)

    return receive


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def lines(*pieces: bytes, longest: int = 100, whole: bool = True, room: Budget = ROOM) -> list[bytes | str]:
    """The lines, and the names of errors."""

    async def collect() -> list[bytes | str]:
        with Reservation(room) as held:
            found = read_lines(arriving(*pieces, whole=whole), longest, 10, held)
            return [line if isinstance(line, bytes) else type(line).__name__ async for line in found]

    return asyncio.run(collect())


def test_a_body_is_put_together_or_was_too_slow_left_or_of_another_type() -> None:
    assert asyncio.run(read_body(arriving(b"ab", b"", b"cd"), 10, Reservation(ROOM))) == b"abcd"
    with pytest.raises(SlowBody, match=r"0\.01 s"):
        asyncio.run(read_body(never, 0.01, Reservation(ROOM)))
    with pytest.raises(ClientDisconnect):
        asyncio.run(read_body(arriving(b"ab", whole=False), 10, Reservation(ROOM)))
    with pytest.raises(ClientDisconnect):
        lines(b"ab", whole=False)
    check_head({"query_string": b""}, b"Application/JSON; charset=utf-8", ["application/json"])
    for wrong in (b"", b"text/plain", b"application/jsonx", b"\xff"):
        with pytest.raises(NotJson, match="application/json or text/x"):
            check_head({"query_string": b""}, wrong, ["application/json", "text/x"])


@given(st.lists(st.binary(max_size=9).filter(lambda line: b"\n" not in line and line == line.strip()), max_size=6), st.data())
def test_lines_are_the_same_however_they_are_cut(wanted: list[bytes], data: st.DataObject) -> None:
    body = b"\n".join(wanted) + data.draw(st.sampled_from([b"", b"\n", b"\r\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=4)))
    pieces = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert lines(*pieces) == [line for line in wanted if line]


@pytest.mark.parametrize("cut", range(0, 24, 3))
def test_a_line_that_is_too_long_costs_one_line(cut: int) -> None:
    body = b"first\n" + b"x" * 11 + b"\nlast"
    assert lines(body[:cut], body[cut:], longest=10) == [b"first", "BodyTooLarge", b"last"]
    assert lines(b"y" * 40, longest=10) == ["BodyTooLarge"]


def test_an_endless_line_takes_no_memory_and_a_silent_stream_ends() -> None:
    async def last(receive: Callable[[], Awaitable[Message]], timeout_s: float) -> bytes | ServiceError:
        return [line async for line in read_lines(receive, 10, timeout_s, Reservation(Budget(100, 0)))][-1]

    assert asyncio.run(last(arriving(*[b"z" * 1000] * 50, b"\nok"), 10)) == b"ok"
    assert isinstance(asyncio.run(last(never, 0.01)), SlowBody)


def test_a_line_that_is_not_whole_takes_room() -> None:
    room = Budget(10, free=0)
    assert lines(b"abc\nde", b"f\n", b"0123456", b"7890abc", room=room) == [b"abc", b"def", "Busy"]
    assert room.available == 10


async def test_a_piece_of_empty_lines_lets_others_have_their_turn() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    assert [line async for line in read_lines(arriving(b"\n" * 100_000), 100, 10, Reservation(ROOM))] == []
    beside.cancel()
    assert turns >= 90


# -- memory that requests share -------------------------------------------------------------------------------------------


def test_a_little_is_free_for_everybody() -> None:
    budget = Budget(10, free=5)
    with Reservation(budget) as large, Reservation(budget) as small, Reservation(budget) as other:
        assert large.take(15)
        assert budget.available == 0
        assert small.take(3)
        assert small.take(2)
        assert not small.take(1)
        assert not other.take(6)
        assert small.units == 5
        large.give(4)
        assert other.take(9)
    assert budget.available == budget.units


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-8, 12)), max_size=40))
def test_what_is_given_back_is_there_again(steps: list[tuple[int, int]]) -> None:
    budget = Budget(20, free=4)
    holders = [Reservation(budget) for _ in range(3)]
    for holder, units in steps:
        if units < 0:
            holders[holder].give(min(-units, holders[holder].units))
        else:
            holders[holder].take(units)
        assert budget.available == 20 - sum(max(held.units - 4, 0) for held in holders)
        assert budget.available >= 0
    for held in holders:
        held.give(held.units)
    assert budget.available == 20


async def test_who_waits_for_room_is_woken_gives_up_or_waits_for_itself() -> None:
    budget = Budget(10, free=0)
    first, second = Reservation(budget), Reservation(budget)
    assert first.take(8)
    waiting = asyncio.create_task(second.wait(5, 100, lambda: False))
    await settled()
    first.give(2)
    await settled()
    assert not waiting.done()  # two are back
    first.give(3)
    assert await waiting
    assert budget.available == 10 - 3 - 5
    budget = Budget(10, free=0)
    with Reservation(budget) as first, Reservation(budget) as second:
        assert first.take(10)
        waiting = asyncio.create_task(second.wait(5, 100, lambda: False))
        await asyncio.sleep(0)
        waiting.cancel()
        first.give(10)
        await asyncio.gather(waiting, return_exceptions=True)
    assert budget.available == 10
    budget = Budget(100, free=0)
    with Reservation(budget) as held:
        assert await held.wait(7, 5, lambda: False)  # more than its share, but nothing else
        waiting = asyncio.create_task(held.wait(1, 5, lambda: False))
        await asyncio.sleep(0)
        assert not waiting.done()
        held.give(7)
        assert await waiting


async def test_only_so_many_may_wait_and_nobody_who_has_gone() -> None:
    budget, gone = Budget(10, free=0, most_waiting=2), [False]
    with Reservation(budget) as first, Reservation(budget) as second, Reservation(budget) as third, Reservation(budget) as fourth:
        assert first.take(10)
        waiting = [asyncio.create_task(held.wait(5, 100, lambda: gone[0])) for held in (second, third)]
        await asyncio.sleep(0)
        assert not await fourth.wait(5, 100, lambda: False)
        gone[0] = True
        await pass_time(RECHECK_S)
        assert await asyncio.gather(*waiting) == [False, False]
        assert budget.waiting == 0
    assert budget.available == 10
