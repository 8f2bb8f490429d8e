"""The judge of histories sees each thing that may not be; short runs of the real service."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service.history_judge import Event, Logged, State, judged
from benchmarks.service.live_chaos import chaos, replay_seconds
from benchmarks.service.live_history import live_history

TRAINED = ("old",)


def put(sequence: int, sent: float, item: str = "a", token: str | None = None, **more: Any) -> Event:
    """A put that was answered after half a second."""
    body = {"fields": {"title": token or f"t{sequence}"}, "like": ["old"]} | more.pop("body", {})
    known: dict[str, Any] = {"status": 201, "outcome": "inserted", "by": "c0"} | more
    return Event("put", item, sent, sent + 0.5, sequence=sequence, body=body, **known)


def delete(sequence: int, sent: float, item: str = "a") -> Event:
    return Event("delete", item, sent, sent + 0.5, 200, "c0", sequence, "deleted")


def unanswered(event: Event, status: int = 503) -> Event:
    return replace(event, status=status, sequence=0, outcome="")


def get(sent: float, state: State | None, item: str = "a", **more: Any) -> Event:
    return Event("get", item, sent, sent + 0.3, 404 if state is None else 200, "c1", state=state, **more)


def retrieve(sent: float, sequence: int, shown: Mapping[str, str | None], **more: Any) -> Event:
    return Event("retrieve", "", sent, sent + 0.3, 200, more.pop("by", "c1"), sequence, shown=shown, **more)


def edit(kind: str, sent: float, status: int = 200) -> Event:
    return Event(kind, "a", sent, sent + 0.5, status, "admin")


def logged(*events: Event, page: int = 1) -> list[Logged]:
    """The feed of a service that did what it acknowledged."""
    found: list[Logged] = []
    for event in sorted(events, key=lambda event: event.sequence):
        before = [entry.state for entry in found if entry.id == event.id] or [State(0, event.id in TRAINED)]
        found.append(Logged(event.id, event.applied(before[-1], event.sequence), page))
    return found


def rules(events: list[Event], log: Sequence[Logged]) -> set[str]:
    return {violation.rule for violation in judged(events, log, TRAINED)}


FIRST = put(1, 1.0)
SECOND = put(2, 2.0, status=200, outcome="updated")
GONE = delete(3, 3.0)
ALL = [FIRST, SECOND, GONE]
T1, T2 = (entry.state for entry in logged(FIRST, SECOND))


def test_a_history_of_a_right_service_is_clean() -> None:
    lost = unanswered(put(9, 4.0, token="t9"))
    came = unanswered(put(4, 5.0, token="t4"), 0)  # it was done although nobody was told
    back = put(5, 7.0, body={"source_version": 7, "valid_until": "2100-01-01T00:00:00Z"}, status=200, outcome="updated")
    kept = put(6, 8.0, if_match=5, status=202, outcome="updated", bulk=1)  # keeps the number and the time
    twin = put(7, 8.0, item="b", bulk=1)
    old = put(8, 9.0, item="old", status=200, outcome="updated")
    log = logged(FIRST, SECOND, GONE, replace(came, sequence=4), back, kept, twin, old)
    answers = [
        replace(put(6, 9.0), outcome="stale", status=200, body={"fields": {"title": "late"}, "source_version": 3}),
        replace(kept, sent=9.0, answered=9.5, status=200, outcome="unchanged", if_match=None),
        replace(put(0, 9.0), status=412, outcome="", if_match=5),
        replace(put(0, 9.0, item="c"), status=422, outcome="", body={"fields": {"title": "c"}}),
        replace(delete(0, 9.0, "c"), status=404, outcome=""),
    ]
    everything = {"a": "t6", "b": "t7", "old": "t8"}
    without = {"b": "t7", "old": "t8"}
    reads = [
        *(get(1.2, state) for state in (None, T1)),
        get(2.2, T2),
        get(3.6, None),
        retrieve(1.2, 0, {}),
        retrieve(2.2, 1, {"a": "t2"}),  # what came after its sequence may be there already
        retrieve(9.9, 8, everything, floor=8),
        Event("feed", "", 9.9, 9.95, 200, "follower", 8),
        *(edit("hide", 11.0), retrieve(11.2, 8, everything), retrieve(12.0, 8, without)),
        *(edit("show", 13.0, 0), retrieve(14.0, 8, without), retrieve(14.0, 8, everything)),
    ]
    assert judged([*ALL, came, back, kept, twin, old, lost, *answers, *reads], log, TRAINED) == []


def test_the_source_version_of_a_deleted_item_stays() -> None:
    gone, again = replace(delete(3, 3.0), body={"source_version": 7}), replace(delete(4, 4.0), body={"source_version": 9})
    back = put(5, 5.0)
    writes = [FIRST, SECOND, gone, again, back]
    log = logged(*writes)
    assert [entry.state.source_version for entry in log] == [None, None, 7, 9, 9]
    assert judged(writes, log, TRAINED) == []
    assert rules(writes, [*log[:4], log[4]._replace(state=log[4].state._replace(source_version=None))]) == {"value"}


def test_a_write_that_the_feed_lacks_is_lost_unless_compaction_may_have_dropped_it() -> None:
    other = put(4, 4.0, item="b")
    log = logged(*ALL, other)
    assert rules([*ALL, other], log) == set()
    assert rules([*ALL, other], log[:3]) == {"lost"}
    assert rules([*ALL, other], [log[0], *log[2:]]) == set()  # it was replaced before the feed was read
    seen = [entry._replace(page=entry.state.sequence) for entry in log]
    assert rules([*ALL, other], [seen[0], *seen[2:]]) == set()
    assert rules([FIRST, SECOND, put(4, 4.0)], [seen[0], *logged(put(3, 3.0, "b"), page=3), seen[3]._replace(id="a")]) >= {"lost"}


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (get(2.6, T1), "stale"),  # the second write was answered
        (get(2.6, None), "lost"),
        (get(3.6, T2), "stale"),  # deleted, and back
        (get(2.2, T2._replace(title="t7")), "value"),
        (retrieve(2.6, 1, {"a": "t1"}), "stale"),
        (retrieve(1.6, 1, {"a": "t1"}, floor=2), "stale"),  # min_sequence
        (retrieve(2.2, 1, {}), "torn"),
        (retrieve(2.2, 1, {"a": None}), "torn"),
        (retrieve(3.6, 3, {"a": "t2"}), "torn"),
        (retrieve(3.6, 3, {"b": "t9"}), "torn"),
        (Event("feed", "", 3.6, 3.7, 200, "follower", 2), "stale"),
        (replace(get(2.6, T2), status=500, state=None), "status"),
        (replace(put(0, 3.6), status=400, outcome=""), "status"),
    ],
)
def test_an_answer_that_may_not_be_is_reported_with_its_item(wrong: Event, rule: str) -> None:
    assert rules([*ALL, wrong], logged(*ALL)) == {rule}


LATE = replace(SECOND, status=202)
EARLY, AFTER = put(2, 1.0, item="b"), put(1, 2.0)
LINES = [put(2, 1.0, bulk=1, token="x", outcome="updated", status=200), put(1, 1.0, bulk=1, token="y")]
SHOWN = retrieve(3.0, 1, {"a": "t1"})
OTHERS = logged(FIRST)[0], logged(FIRST, SECOND)[1]._replace(state=T2._replace(user="t0"))


@pytest.mark.parametrize(
    ("events", "log", "found"),
    [
        ([FIRST, LATE, retrieve(2.6, 1, {"a": "t1"})], logged(FIRST, SECOND), set()),  # only some workers have it
        ([FIRST, LATE, retrieve(2.6, 1, {"a": "t1"}, floor=2)], logged(FIRST, SECOND), {"stale"}),
        ([FIRST, put(1, 1.0, item="b")], logged(FIRST), {"sequence"}),  # two writes with one sequence
        ([FIRST], logged(put(1, 1.0, item="b")), {"sequence"}),
        ([FIRST], logged(replace(FIRST, body={"fields": {"title": "t8"}})), {"sequence"}),
        (ALL, logged(*ALL)[::-1], {"sequence"}),
        ([EARLY, AFTER], logged(EARLY, AFTER), {"order"}),
        (LINES, logged(*LINES), {"order"}),  # of a bulk
        ([replace(line, bulk=0) for line in LINES], logged(*LINES), set()),
        ([FIRST, SECOND], OTHERS, {"value"}),  # a state that is not the dictionary's
        ([FIRST, edit("hide", 2.0), SHOWN], logged(FIRST), {"hidden"}),  # removed from all answers
        ([FIRST, edit("hide", 2.0, 202), SHOWN], logged(FIRST), set()),
        ([FIRST, edit("hide", 2.0, 202), replace(SHOWN, floor=1, agreement=1)], logged(FIRST), {"disagree"}),
    ],
)
def test_what_may_be_is_told_from_what_may_not(events: list[Event], log: Sequence[Logged], found: set[str]) -> None:
    assert rules(events, log) == found


def test_of_two_deletes_without_an_answer_the_one_was_done_that_could_be() -> None:
    """The bulk's own delete found no item; it cannot have been done after the bulk's later put."""
    bulk = [unanswered(replace(delete(0, 1.0), bulk=1), 0), unanswered(put(1, 1.0, bulk=1, token="x"), 0)]
    other = unanswered(delete(2, 1.1), 0)
    log = logged(put(1, 1.0, token="x"), delete(2, 1.1))
    assert rules([*bulk, other], log) == set()
    assert rules(bulk, log) == {"order"}


@pytest.mark.parametrize("status", [0, 503])
def test_a_write_without_an_answer_comes_once_or_not_and_not_after_a_later_one(status: int) -> None:
    asked = unanswered(put(9, 0.0, token="x"), status)
    before, after = put(1, 0.0, token="x"), put(2, 0.0, token="x")
    updated = replace(FIRST, sequence=2, status=200, outcome="updated")
    assert rules([asked, updated], logged(before, updated)) == set()
    assert rules([asked, FIRST], logged(FIRST)) == set()
    assert rules([asked, FIRST], logged(FIRST, after)) == {"order"}
    assert rules([replace(asked, answered=math.inf), FIRST], logged(FIRST, after)) == set()
    assert rules([asked, replace(FIRST, sequence=3, outcome="updated", status=200)], logged(before, after, replace(FIRST, sequence=3))) == {
        "unasked"
    }


@pytest.mark.parametrize(
    "wrong",
    [
        put(2, 2.0),  # it was there
        put(2, 2.0, status=200, outcome="updated", if_match=7),
        put(2, 2.0, status=200, outcome="updated", if_new=True),
        put(0, 2.0, status=412, outcome="", if_match=1),
        put(0, 2.0, status=422, outcome=""),  # it has evidence
        put(1, 2.0, status=200, outcome="unchanged", token="x"),
        put(1, 2.0, status=200, outcome="stale"),
        replace(delete(0, 2.0), status=404, outcome=""),
    ],
)
def test_an_outcome_that_the_state_does_not_explain_is_reported(wrong: Event) -> None:
    done = [FIRST, wrong] if wrong.sequence == 2 else [FIRST]
    assert rules([FIRST, wrong], logged(*done)) == {"outcome"}


def test_workers_that_disagree_are_reported() -> None:
    right = retrieve(4.0, 2, {"a": "t2"}, floor=2, agreement=1)
    for wrong in (replace(right, sequence=1, shown={"a": "t1"}), replace(right, shown={}), get(4.0, T1, floor=2, agreement=1)):
        assert rules([FIRST, SECOND, right, wrong], logged(FIRST, SECOND)) == {"disagree"}
    unsure = [FIRST, SECOND, edit("hide", 3.0, 0), right]  # either, but the same everywhere
    assert rules(unsure, logged(FIRST, SECOND)) == set()
    assert rules([*unsure, replace(right, shown={})], logged(FIRST, SECOND)) == {"disagree"}
    assert rules([FIRST, SECOND, replace(right, status=503, shown=None)], logged(FIRST, SECOND)) == {"disagree"}


@pytest.mark.release
def test_a_service_whose_workers_are_killed_loses_nothing_and_applies_nothing_twice(tmp_path: Path) -> None:
    found = chaos(tmp_path, kills=4)
    assert found["acknowledged"] > 20
    assert (found["lost"], found["twice"], found["refused"], found["notes"]) == (0, 0, 0, [])
    assert 0.3 < found["found"] <= 1
    assert replay_seconds(tmp_path / "replay", 300)["operations"] == 300


@pytest.mark.release
def test_a_service_under_failures_does_every_kind_of_operation(tmp_path: Path) -> None:
    found = live_history(tmp_path, seconds=20, seed=3)
    assert found["failure"] == ""
    writes, others = ("put", "delete", "bulk"), ("get", "retrieve", "read own", "feed")
    around = ("publish", "default", "hide", "show", "kill", "stop", "restart")
    assert {*writes, *others, *around} <= {kind for kind, count in found["kinds"].items() if count}
    assert found["violations"] == 0, found["first"]
