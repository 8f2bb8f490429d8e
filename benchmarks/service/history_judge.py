"""Checks the answers that clients got about live items against one dictionary: all writes, applied in the order of their sequences.

A write takes effect once, between its request and its answer. A write that got 503, or whose connection broke, may have taken effect by
then, but not later: it must not undo a later write. If the client gave up, the write may take effect at any time.
Knows requests and answers with their times, and the feed of changes. Does not know HTTP or processes (live_history.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

WRITTEN = (200, 201, 202)
EFFECTS = ("inserted", "updated", "deleted")
"""Outcomes of writes that get a new sequence."""
TRANSIENT = (0, 429, 503, 504)
"""Statuses after which a client may retry; 0: no answer."""
WRITES, EDITS = ("put", "delete"), ("hide", "show")
ALLOWED: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(WRITES, (200, 201, 202, 404, 409, 412, 422, 507)),
    **dict.fromkeys(EDITS, (200, 202, 409)),
    **dict.fromkeys(("get", "retrieve"), (200, 404)),  # 404 of a retrieval: its version was dropped
    "feed": (200,),
}
"""Other statuses that each kind of request may get."""


class State(NamedTuple):
    """An item after an operation. sequence: 0 as it was trained; title, user: tokens of the writes that set its fields and its events."""

    sequence: int
    present: bool
    title: str | None = None
    user: str | None = None
    source_version: int | None = None
    valid_until: str | None = None


NOWHERE = "nothing"
"""Instead of the title of a missing item."""
ABSENT, TRAINED = State(0, False), State(0, True)


class Logged(NamedTuple):
    """An operation of the feed. page: the number of the feed's answer in which it came."""

    id: str
    state: State
    page: int


class Violation(NamedTuple):
    """An error of the service. at: s since the run began; id: of the item; rule:

    lost      an acknowledged write is missing
    stale     a read lacks a write that every worker had applied before the read was sent
    value     an operation left another state than in the dictionary, or a GET got a state that the item never had
    torn      a retrieval shows an item as it was at no moment since the answer's sequence, or lacks it
    hidden    a retrieval shows an item that was removed from all answers
    sequence  two writes share it, or it does not ascend; order: it is below that of a write that had ended before
    unasked   an operation that no client asked for, that was refused, or that was already done
    outcome   an answer or refusal that does not fit the item's state; status: one that is not allowed
    disagree  any of these after a second without writes, or two workers or versions that differ
    """

    at: float
    rule: str
    id: str
    text: str


@dataclass(frozen=True)
class Event:
    """One request about an item, one line of a bulk, or one retrieval of all items; times in s since the run began.

    answered   infinite where the client gave up
    body       what was put, or the `source_version` of a delete
    if_match   the sequence that the item must have; if_new: there must be no such item
    bulk       number of the bulk that it was a line of; 0: none
    floor      the sequence that an answer must hold at least
    state      of an item that GET found; shown: id → title, of all that a retrieval found
    agreement  number of the check in which every worker is asked while nothing is written; 0: none
    """

    kind: str
    id: str
    sent: float
    answered: float
    status: int
    by: str = ""
    sequence: int = 0
    outcome: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    if_match: int | None = None
    if_new: bool = False
    bulk: int = 0
    floor: int = 0
    state: State | None = None
    shown: Mapping[str, str | None] | None = None
    agreement: int = 0

    @property
    def token(self) -> str | None:
        """A put's unique text; only a repetition of the same put has it too."""
        fields, users = self.body.get("fields"), self.body.get("users")
        return str(fields["title"]) if fields else str(users[0]) if users else None

    @property
    def is_acknowledged(self) -> bool:
        return self.kind in WRITES and self.status in WRITTEN and self.outcome in EFFECTS

    def may_change(self, state: State) -> bool:
        """Whether its conditions hold."""
        matches = self.if_match is None or (state.present and state.sequence == self.if_match)
        return matches and not (self.if_new and state.present)

    def is_stale(self, state: State) -> bool:
        return bool(self.body.get("source_version", math.inf) < (state.source_version or 0))

    def applied(self, before: State, sequence: int) -> State:
        """An item after this write."""
        base = before if before.present else ABSENT
        version = self.body.get("source_version", before.source_version)  # that of a deleted item stays
        if self.kind == "delete":
            return State(sequence, False, source_version=version)
        title = self.body["fields"]["title"] if "fields" in self.body else base.title
        user = self.body.get("users", [None])[0] if {"events", "like"} & self.body.keys() else base.user
        until = self.body.get("valid_until", base.valid_until)
        return State(sequence, True, title, user, version, until)


def state_of(document: Mapping[str, Any]) -> State:
    """An item as GET or the feed shows it."""
    fields, users = document.get("fields") or {}, document.get("users") or [None]
    version_and_expiry = document.get("source_version"), document.get("valid_until")
    return State(document["sequence"], document.get("kind") != "delete", fields.get("title"), users[0], *version_and_expiry)


def judged(events: Iterable[Event], log: Sequence[Logged], trained: Collection[str]) -> list[Violation]:
    """All violations, earliest first. log: the whole feed as it was read; trained: ids of the trained items."""
    return sorted(_Judge(sorted(events, key=lambda event: event.sent), log, trained).violations)


class _Highest:
    """The highest sequence that came before a time."""

    def __init__(self, pairs: Iterable[tuple[float, int]]) -> None:
        ordered = sorted(pairs)
        self._times = [time for time, _ in ordered]
        self._highest = list(accumulate((sequence for _, sequence in ordered), max))

    def before(self, time: float) -> int:
        count = bisect_left(self._times, time)
        return self._highest[count - 1] if count else 0


class _Judge:
    """effects: sequence → its write; states: item → its states, ascending; timeline: the states of all items."""

    def __init__(self, events: Sequence[Event], log: Sequence[Logged], trained: Collection[str]) -> None:
        self.violations: list[Violation] = []
        self._log, self._trained = log, frozenset(trained)
        self._writes = [event for event in events if event.kind in WRITES]
        self._edits = [event for event in events if event.kind in EDITS]
        self._effects: dict[int, Event] = {}
        self._states: defaultdict[str, list[State]] = defaultdict(list)
        self._timeline: list[tuple[str, State]] = []
        self._replay()
        accepted_writes = [event for event in self._writes if event.status in WRITTEN]
        self._durable = _Highest((event.answered, event.sequence) for event in accepted_writes)
        self._visible = _Highest((event.answered, event.sequence) for event in accepted_writes if event.status != 202)
        self._begun = _Highest((event.sent, sequence) for sequence, event in self._effects.items())
        self._check_order()
        for event in events:
            self._check(event)
        self._check_retrievals(sorted((event for event in events if event.shown is not None), key=lambda event: event.sequence))

    def _add(self, rule: str, event: Event, text: str, item: str | None = None) -> None:
        at = event.sent if event.answered == math.inf else event.answered
        description = f"{event.kind} by {event.by} at {event.sent:.3f}: {text}"
        self.violations.append(Violation(at, "disagree" if event.agreement else rule, event.id if item is None else item, description))

    def _of(self, item: str) -> list[State]:
        return [TRAINED if item in self._trained else ABSENT, *self._states[item]]

    # -- writes ---------------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """Apply the acknowledged writes and those of the feed to the dictionary."""
        acknowledged: dict[int, Event] = {}
        unknown: defaultdict[tuple[str, str, str | None], list[Event]] = defaultdict(list)
        numbers = {id(event): number for number, event in enumerate(self._writes)}
        last_lines: dict[tuple[int, str], int] = {}  # of a bulk and an item: the last line that was done
        for event in self._writes:
            if event.is_acknowledged and acknowledged.setdefault(event.sequence, event) is not event:
                self._add("sequence", event, f"{event.sequence} was given to {acknowledged[event.sequence].id} too")
            elif event.status in TRANSIENT:
                unknown[event.id, event.kind, event.token].append(event)
        logged = {entry.state.sequence: entry for entry in self._log}
        last = Event("feed", "", 0.0, 0.0, 200)  # the write that was sent last so far
        sequences = sorted(acknowledged.keys() | logged.keys())
        ends = [acknowledged[sequence].answered if sequence in acknowledged else math.inf for sequence in sequences]
        until = dict(zip(sequences, [*accumulate(reversed(ends), min)][::-1], strict=True))  # by when each was done
        if sorted(logged) != [entry.state.sequence for entry in self._log]:
            self._add("sequence", last, "the feed's sequences do not ascend")
        for sequence in sequences:
            write, entry = acknowledged.get(sequence), logged.get(sequence)
            item = entry.id if entry else write.id if write else ""
            before = self._of(item)[-1]
            if write and not entry and not self._was_replaced(write):
                self._add("lost", write, f"{sequence} was acknowledged, and the feed lacks it")
            elif write and entry and not _is_of(entry, write):
                self._add("sequence", write, f"{sequence} was acknowledged for {write.token}, and the feed has {entry}")
                write = None
            elif entry and not write:
                write = _take_unanswered_write(
                    unknown,
                    entry,
                    before,
                    last.sent,
                    until[sequence],
                    lambda event: numbers[id(event)] < last_lines.get((event.bulk, event.id), 0),
                )
                if not write:
                    self._add("unasked", last, f"nobody asked for {entry}, or it was refused or done already", item)
            if write:
                self._effects[sequence] = write
                if write.bulk:
                    last_lines[write.bulk, write.id] = numbers[id(write)]
                last = max(last, write, key=lambda event: event.sent)
                self._check_effect(write, before, entry.state if entry else write.applied(before, sequence))
            state = entry.state if entry else write.applied(before, sequence) if write else before
            self._states[item].append(state)
            self._timeline.append((item, state))

    def _was_replaced(self, write: Event) -> bool:
        """Whether compaction may have dropped a write before the feed was read."""
        later = [entry for entry in self._log if entry.state.sequence > write.sequence]
        return any(entry.id == write.id and entry.page <= later[0].page for entry in later)

    def _check_effect(self, write: Event, before: State, after: State) -> None:
        if after != write.applied(before, after.sequence):
            self._add("value", write, f"{before} became {after}, not {write.applied(before, after.sequence)}")
        if not write.may_change(before) or write.is_stale(before):
            self._add("outcome", write, f"was done at {after.sequence}, against its conditions, of {before}")
        expected = "deleted" if write.kind == "delete" else "updated" if before.present else "inserted"
        if write.is_acknowledged and write.outcome != expected:
            self._add("outcome", write, f"was {write.outcome} at {after.sequence}, of {before}")

    def _check_order(self) -> None:
        """A write follows all writes that ended before it was sent; a bulk's line follows earlier lines of the same item."""
        ended = _Highest((event.answered, sequence) for sequence, event in self._effects.items())
        sequences = {id(event): sequence for sequence, event in self._effects.items()}
        lines: dict[tuple[int, str], int] = {}
        for event in self._writes:
            sequence = sequences.get(id(event), math.inf)
            if (last := ended.before(event.sent)) > sequence:
                self._add("order", event, f"is {sequence}; {last} of {self._effects[last].id} had ended before it was sent")
            if event.bulk and sequence < math.inf:
                if (last := lines.get((event.bulk, event.id), 0)) > sequence:
                    self._add("order", event, f"is {sequence}; an earlier line of its bulk is {last}")
                lines[event.bulk, event.id] = int(sequence)

    # -- answers --------------------------------------------------------------------------------------------------------

    def _possible(self, event: Event, floor: int) -> list[State]:
        """States that an item may have had while a request ran. floor: a sequence that was applied before."""
        states = self._of(event.id)
        first, last = (bisect_right(states, end, key=lambda state: state.sequence) for end in (floor, self._begun.before(event.answered)))
        return states[first - 1 : max(first, last)]

    def _check(self, event: Event) -> None:
        if event.status not in ALLOWED.get(event.kind, ()) and (event.agreement or event.status not in TRANSIENT):
            self._add("status", event, f"was answered {event.status} {event.outcome}")
        elif event.kind == "get" and event.status in (200, 404):
            possible = self._possible(event, max(self._visible.before(event.sent), event.floor))
            if event.state is None and all(state.present for state in possible):
                self._add("lost", event, f"nothing is there, and it was one of {possible}")
            elif event.state is not None and event.state not in possible and (event.state.sequence, possible[0]) != (0, TRAINED):
                rule = "stale" if event.state.sequence < possible[0].sequence else "value"
                self._add(rule, event, f"{event.state}, and it was one of {possible}")
        elif event.kind == "feed" and event.status == 200 and event.sequence < (last := self._durable.before(event.sent)):
            self._add("stale", event, f"the feed ends at {event.sequence}, and {last} was acknowledged before")
        elif event.kind in WRITES and not event.is_acknowledged:
            self._check_no_effect(event)

    def _check_no_effect(self, write: Event) -> None:
        """Check a write that changed nothing: did the item's state allow that?"""
        possible = self._possible(write, self._durable.before(write.sent))
        if write.status in WRITTEN:
            stored = next((state for state in possible if state.sequence == write.sequence), None)
            if write.outcome == "stale":
                fits = stored is not None and write.is_stale(stored)
            else:
                same = stored is not None and (stored.present if write.kind == "put" else not stored.present)
                fits = stored is not None and same and (write.kind == "delete" or write.applied(stored, stored.sequence) == stored)
        elif write.status == 412:
            fits = not all(write.may_change(state) for state in possible)
        elif write.status == 404:
            fits = write.kind == "delete" and ABSENT in possible
        elif write.status == 422:  # without evidence
            is_bare = write.kind == "put" and not {"events", "like"} & write.body.keys() and write.id not in self._trained
            fits = is_bare and not all(state.present for state in possible)
        else:
            return
        if not fits:
            self._add("outcome", write, f"{write.status} {write.outcome} {write.sequence}, and it was one of {possible}")

    def _check_retrievals(self, retrievals: Iterable[Event]) -> None:
        """An answer has every write up to its sequence, and may have later ones. retrievals: by ascending sequence."""
        titles: dict[str, str | None] = {}
        agreed: dict[int, Event] = {}
        position = 0
        for event in retrievals:
            while position < len(self._timeline) and self._timeline[position][1].sequence <= event.sequence:
                _put(titles, *self._timeline[position])
                position += 1
            floor = max(self._visible.before(event.sent), event.floor)
            if event.sequence < floor:
                self._add("stale", event, f"an answer of {event.sequence}, and {floor} was visible before")
            for item in self._wrong(event, titles):
                possible = self._possible(replace(event, id=item), event.sequence)
                shown = (event.shown or {}).get(item, NOWHERE)
                if shown not in [state.title if state.present else NOWHERE for state in possible]:
                    self._add("torn", event, f"an answer of {event.sequence} has {shown}, and it was one of {possible}", item)
            if event.agreement and (first := agreed.setdefault(event.agreement, event)).shown != event.shown:
                differing = set((first.shown or {}).items()) ^ set((event.shown or {}).items())
                self._add("disagree", event, f"{first.by} has something else: {sorted(map(str, differing))[:4]}", min(differing)[0])

    def _wrong(self, event: Event, titles: Mapping[str, str | None]) -> Iterable[str]:
        """Items that an answer shows otherwise than they were at its sequence."""
        shown: Mapping[str, str | None] = event.shown or {}
        hidden, perhaps = self._hidden(event)
        for item in hidden & shown.keys():
            self._add("hidden", event, "it was removed from all answers", item)
        return {item for item, _ in shown.items() ^ titles.items()} - hidden - (perhaps - shown.keys())

    def _hidden(self, event: Event) -> tuple[set[str], set[str]]:
        """Items that were surely removed from all answers while a retrieval ran, and items that may have been."""
        may_be: defaultdict[str, set[bool]] = defaultdict(lambda: {False})
        for edit in self._edits:
            if edit.sent < event.answered:
                if edit.answered < event.sent and edit.status in ((200, 202) if event.agreement else (200,)):
                    may_be[edit.id].clear()
                may_be[edit.id].add(edit.kind == "hide")
        return {item for item in may_be if may_be[item] == {True}}, {item for item in may_be if len(may_be[item]) == 2}


def _is_of(entry: Logged, write: Event) -> bool:
    is_same = (entry.id, entry.state.present) == (write.id, write.kind == "put")
    return is_same and (write.kind == "delete" or write.token in (entry.state.title, entry.state.user))


def _take_unanswered_write(
    unknown: Mapping[tuple[str, str, str | None], list[Event]],
    entry: Logged,
    before: State,
    after_s: float,
    until_s: float,
    is_overtaken: Callable[[Event], bool],
) -> Event | None:
    """Take the unanswered write that best explains an operation of the feed; it cannot explain another one.

    after_s, until_s  the operation was done between these times
    is_overtaken      whether a later line of its bulk was already done: only this tells two deletes apart
    """
    state = entry.state
    keys = [("put", state.title), ("put", state.user)] if state.present else [("delete", None)]
    candidates = [event for kind, token in keys for event in unknown.get((entry.id, kind, token), ())]

    def misfit(event: Event) -> tuple[bool, bool, bool, float]:
        is_in_time = event.answered >= after_s and event.sent <= until_s
        leaves_it_so = event.may_change(before) and event.applied(before, state.sequence) == state
        return not is_in_time, not leaves_it_so, is_overtaken(event), event.answered

    best_match = min(candidates, key=misfit, default=None)
    if best_match is not None:
        unknown[best_match.id, best_match.kind, best_match.token].remove(best_match)
    return best_match


def _put(titles: dict[str, str | None], item: str, state: State) -> None:
    if state.present:
        titles[item] = state.title
    else:
        titles.pop(item, None)
