"""The thread of one model that writes its journal, follows what others write, and applies both to the versions of this process.

Writes that wait are placed together, then committed together. Nothing else changes a version that serves. Knows the journal, versions and
the other workers. Does not know requests: catalogue.py does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from espalier.errors import EspalierError, InvalidData, JournalBusy, JournalError
from espalier.live.journal import Journal, Transaction
from espalier.live.journal_messages import read_message
from espalier.live.operations import Operation

from ..errors import BeingChanged, NotReady, NotWritable
from ..live.catalogue_types import Outcome, Placed
from ..live.compaction import Compaction
from ..live.group import Decided, EvidenceNeeded, Group, Write
from ..live.live_version import LiveVersion, placed_by
from ..live.notices import UNSEEN, Notices
from ..live.placing import named_by, placed
from ..live.progress_pages import UNKNOWN
from ..live.replay import Store, Stored, apply_all, replay

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP = 256
"""Most writes of one commit."""
ATTEMPTS = 3
"""How often a write is placed anew because its item changed meanwhile."""
PAGE = 1000
"""Operations that are read at a time."""
VISIBLE_S = 1.0
"""How long the other workers have to follow before a write is answered 202."""
TOGETHER, LONGEST_PAUSE_S = 4, 0.02
"""While a write waits when a smaller group ends, so that writes come faster than they are committed one by one, the next group begins when
as much time has passed as the last one took, or when so many wait: what a group costs beside its writes is most of what a few cost."""
IDLE_S = 0.5
"""Longest sleep while an item may expire: the clock may be set."""

Waiting = Write | Callable[[], None]


class JournalThread:
    """Started by the first write, or by the first version where there is a journal.

    most      live items
    on_apply  called after a new snapshot, or a new remark, from this thread; on_lag: with how many operations are to be applied
    versions  those of `served` that take live items
    default   the number of the version that decides what an item may be
    reason    why the journal takes no writes, or cannot be followed; None where it does
    applied   the last operation that all versions of this process answer by
    progress  grows with each thing that it begins, leaves out, refuses or has committed
    """

    def __init__(
        self, model: str, journal: Journal, notices: Notices, most: int, on_apply: Callable[[], None], on_lag: Callable[[int], None]
    ) -> None:
        self.model, self.journal, self._notices, self._most = model, journal, notices, most
        self._on_apply, self._on_lag = on_apply, on_lag
        self._joined: tuple[LiveVersion, ...] = ()  # one that is opened anew is there twice for a moment
        self.served: dict[int, LiveVersion] = {}  # by number; replaced as a whole, as is `versions`
        self.versions: dict[int, LiveVersion] = {}
        self.default: Callable[[], int | None] = lambda: None
        self.reason: str | None = None
        self.applied = self.progress = 0
        self._waiting: SimpleQueue[Waiting | None] = SimpleQueue()
        self._held: deque[Waiting | None] = deque()  # taken from the queue and put back: it comes before what waits
        self._looks = False
        self._begin_at = -math.inf  # when the next group may begin, of time.monotonic
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopped = self._unreadable = False
        self._visible = _Visible(model, notices)
        self._compaction = Compaction(journal.file)

    # -- from any thread ------------------------------------------------------------------------------------------------

    def submit(self, writes: Sequence[Write]) -> None:
        """Commit writes, soon, in the order in which they came; their outcomes say what became of them.

        A write whose outcome is cancelled before the thread takes it is not done.
        """
        self._enqueue(*writes)

    def look(self) -> None:
        """Another process may have committed something."""
        if not self._looks and not self._stopped and (self._thread is not None or self.journal.exists()):
            self._looks = True
            self._enqueue(self._catch_up)

    def call(self, work: Callable[[], T]) -> T:
        """Do something between two turns of the thread, and return what it returns."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self._enqueue(job)
        return done.result()

    def store(self, version: int, places: Stored) -> Stored:
        """A `Store` for a loader: this thread locks the journal, because a loader's low priority could hold up every writer."""
        return self.call(lambda: self.journal.store_placements(version, places))

    def join(self, version: LiveVersion) -> None:
        """Apply what is committed to a version from now on. It has been brought almost up to date."""
        self.call(lambda: self._join(version))

    def leave(self, version: LiveVersion) -> None:
        """Apply nothing to a version any more."""
        if self._thread is None:
            self._drop(version)
        else:
            self._waiting.put(lambda: self._drop(version))

    def stop(self) -> None:
        """Finish what was submitted, and end."""
        with self._starting:
            self._stopped = True
            self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
        self._visible.stop()
        self._compaction.stop()
        self.journal.close()

    def _enqueue(self, *waiting: Waiting) -> None:
        with self._starting:  # nothing comes behind the end
            if self._stopped:
                raise NotReady("The service is shutting down.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"live-{self.model}", daemon=True)
                self._thread.start()
            for found in waiting:
                self._waiting.put(found)

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:  # no failure may end this thread
                log.exception("%s: the thread of the live catalogue goes on after", self.model)

    def _turn(self) -> bool:
        """One group of writes, a pause before one, or one call. False after the last."""
        first = self._next()
        if first is None:
            return False
        if not isinstance(first, Write):
            first()
        elif time.monotonic() < self._begin_at:
            self._pause(first)
        else:
            began = time.monotonic()
            group = self._group(first)
            self._commit(group)
            if len(group) < TOGETHER and not self._held and not self._waiting.empty():  # what is held would make the next one no larger
                ended = time.monotonic()
                self._begin_at = ended + min(ended - began, LONGEST_PAUSE_S)
        now = time.time()
        for version in self._joined:
            version.expire(now)
        return True

    def _next(self) -> Waiting | None:
        """What waits; a call of nothing when nothing did until an item may expire; None at the end."""
        next_expiry = min((version.next_expiry() for version in self._joined), default=math.inf)
        timeout = None if next_expiry == math.inf else min(max(next_expiry - time.time(), 0.0), IDLE_S)
        try:
            return self._take(timeout)
        except Empty:
            return _nothing

    def _take(self, timeout: float | None = 0.0) -> Waiting | None:
        """What waits and came first. Raises Empty when nothing does. A write that nobody waits for any more is left out."""
        while True:
            found = self._held.popleft() if self._held else self._waiting.get(timeout=timeout)
            is_wanted = not isinstance(found, Write) or found.outcome.running() or found.outcome.set_running_or_notify_cancel()
            self.progress += 1
            if is_wanted:
                return found

    def _pause(self, first: Write) -> None:
        """Let more writes come to one that waits. What others have committed is applied meanwhile, because they wait for it."""
        waiting: list[Waiting | None] = [first]
        try:
            while isinstance(waiting[-1], Write) and len(waiting) < TOGETHER and (left_s := self._begin_at - time.monotonic()) > 0:
                found = self._take(left_s)
                if found == self._catch_up:
                    self._catch_up()
                else:
                    waiting.append(found)
        except Empty:
            pass
        finally:
            self._begin_at = -math.inf
            self._held.extendleft(reversed(waiting))

    def _group(self, first: Write) -> list[Write]:
        """The writes that wait, up to the first of an item of the group, or that such an item places: it must be there first."""
        group, ids = [first], {first.what.id}
        while len(group) < GROUP:
            try:
                found = self._take()
            except Empty:
                break
            if not isinstance(found, Write) or found.what.id in ids or not ids.isdisjoint(named_by(found.what.body)):
                self._held.appendleft(found)
                break
            group.append(found)
            ids.add(found.what.id)
        return group

    def _taken(self) -> list[Write]:
        """All writes that wait; what else waits stays."""
        waiting: list[Waiting | None] = []
        with suppress(Empty):
            while True:
                waiting.append(self._take())
        self._held.extend(found for found in waiting if not isinstance(found, Write))
        return [found for found in waiting if isinstance(found, Write)]

    def _commit(self, group: list[Write]) -> None:
        default = self._default()
        writes, failed = placed(group, self.versions.values(), default)
        if any(isinstance(error, NotReady) for _, error in failed) and self._default() is not default:
            self._held.extendleft(reversed(group))  # it was dropped meanwhile: the next default places them
            return
        for write, error in failed:
            self._refuse([write], error)
        if not writes:
            return
        try:
            self._replay()
            if self._looks:  # others have committed: what they did is applied before the journal is locked, most of it
                self._catch_up()
            with self.journal.writing() as transaction:
                self._follow(transaction.last_sequence(), transaction)
                now = time.time()
                for version in self._joined:
                    version.expire(now)
                decided = Group(transaction, self.versions, default, self._most, now).decide(writes)
        except JournalError as error:
            self._remark(str(error))
            if isinstance(error, JournalBusy):  # nobody waits in turn for a process that does not let go
                writes += self._taken()
            self._refuse(writes, NotWritable(f"{error}. Retrieval goes on."))
            return
        except Exception as error:
            self._refuse(writes, error)
            raise
        self._remark(None)
        self.progress += 1  # before anybody sees what was written
        stored = [found for found in decided if isinstance(found, Decided) and found.operation is not None]
        try:
            if stored:
                self._apply_own(stored)
                self._notices.committed(self.model, transaction.message.to_bytes())
                self._compaction.look()
        finally:
            for found in decided:
                if isinstance(found, Decided):
                    self._visible.wait(found.write.outcome, self._outcome(found, default))
            self._fail([found for found in decided if not isinstance(found, Decided)])

    def _refuse(self, writes: Sequence[Write], error: Exception) -> None:
        self.progress += 1  # before anybody hears of it
        for write in writes:
            write.outcome.set_exception(error)

    def _fail(self, failed: Sequence[tuple[Write, EspalierError]]) -> None:
        """Answer writes that were not stored. Those that must be placed by all that is known of their items come again, before others."""
        for write, error in reversed(failed):
            if not isinstance(error, EvidenceNeeded):
                write.outcome.set_exception(error)
            elif write.attempts == ATTEMPTS:
                write.outcome.set_exception(BeingChanged(f"{write.what.id!r} is being changed by others; try again."))
            else:
                self._held.appendleft(replace(write, evidence=error.operation.body, attempts=write.attempts + 1))

    def _apply_own(self, decided: Sequence[Decided]) -> None:
        """Apply what this process has committed."""
        operations = [found.operation for found in decided if found.operation is not None]
        stored = {number: {found.sequence: own for found in decided if (own := found.placements.get(number))} for number in self.versions}
        self._apply(operations, stored, self.journal.store_placements)

    def _outcome(self, found: Decided, default: LiveVersion | None) -> Outcome:
        where: Placed | None = None
        if found.outcome != "deleted" and default is not None:
            own = found.placements.get(default.version)
            if own and found.operation is not None:
                where = Placed(default.version, own[0].parent, placed_by(found.operation))
            else:
                where = default.placed(found.write.what.id)
        return Outcome(found.sequence, found.outcome, True, where, found.write.unknown)

    def _default(self) -> LiveVersion | None:
        number = self.default()
        return None if number is None else self.versions.get(number)

    # -- applying -------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Apply what other processes have committed."""
        self._looks = False
        try:
            if not self._follow_told():
                end = self.journal.last_sequence()
                self._on_lag(max(end - self.applied, 0))
                self._replay()
                self._follow(end, self.journal)
        except JournalError as error:
            self._remark(str(error))
            self._unreadable = True
            return
        if self._unreadable:
            self._remark(None)

    def _follow_told(self) -> bool:
        """Apply what other workers have said that they committed. False where the journal must be read: they did not say all."""
        told = self._notices.told(self.model)
        if not all(told):
            return False
        try:
            found = [one for message in told for one in read_message(message) if one[0].sequence > self.applied]
        except InvalidData:
            return False
        if [operation.sequence for operation, _ in found] != [*range(self.applied + 1, self.applied + 1 + len(found))]:
            return False
        if found:
            self._replay()
            stored = {number: {one.sequence: places[number] for one, places in found if number in places} for number in self.versions}
            self._apply([operation for operation, _ in found], stored, self.journal.store_placements)
        return bool(found)  # what was known already says nothing of what came after it

    def _replay(self) -> None:
        """Give each version what it could not read when it joined. Raises JournalError, and then nothing later may be applied to it."""
        for version in self._joined:
            replay(version, self.journal, self.applied)

    def _follow(self, end: int, journal: Journal | Transaction) -> None:
        """Apply what was committed up to an operation."""
        while self.applied < end and (operations := journal.since(self.applied, PAGE)):
            sequences = [operation.sequence for operation in operations]
            stored = {number: journal.placements(number, sequences) for number in self.versions}
            self._apply(operations, stored, journal.store_placements)

    def _apply(self, operations: Sequence[Operation], stored: Mapping[int, Stored], store: Store) -> None:
        """Apply operations, in their order, to all versions, and show them. stored: their places by version."""
        for version in self._joined:
            if version.refused is None:
                apply_all(version, operations, stored[version.version], store)
                version.publish()
        self._reach(operations[-1].sequence)

    def _reach(self, sequence: int) -> None:
        self.applied = sequence
        self._on_lag(0)
        self._notices.applied(self.model, sequence if self.versions else None)
        self._on_apply()

    def _join(self, version: LiveVersion) -> None:
        """Bring a version up to date with the others, and keep it so."""
        if version.refused is None:
            if not self.versions:
                self.applied = version.sequence
            self._notices.applied(self.model, self.applied)  # first: whoever commits from now on waits for it
        self._set_joined((*self._joined, version))
        try:
            self._catch_up()
        except BaseException:
            self._drop(version)
            raise
        self._on_apply()

    def _drop(self, version: LiveVersion) -> None:
        self._set_joined(tuple(other for other in self._joined if other is not version))
        if not self.versions:
            self._notices.applied(self.model, None)

    def _set_joined(self, joined: tuple[LiveVersion, ...]) -> None:
        self._joined = joined
        self.served = {version.version: version for version in joined}
        self.versions = {number: version for number, version in self.served.items() if version.refused is None}

    def _remark(self, reason: str | None) -> None:
        """Note why the journal takes no writes, once."""
        if reason != self.reason:
            if reason is not None:
                log.error("%s: the live catalogue takes no writes: %s", self.model, reason)
            else:
                log.info("%s: the live catalogue takes writes again", self.model)
            self.reason = reason
            self._on_apply()
        self._unreadable = False


def _nothing() -> None:
    """An item may have expired."""


class _Visible:
    """Answers writes once the other workers have applied them, in the order of their sequence."""

    def __init__(self, model: str, notices: Notices) -> None:
        self._model, self._notices = model, notices
        self._waiting: SimpleQueue[tuple[Future[Outcome], Outcome, float] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, future: Future[Outcome], outcome: Outcome) -> None:
        """Answer a write that this process has applied."""
        if self._notices.folder is None:
            future.set_result(outcome)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"visible-{self._model}", daemon=True)
            self._thread.start()
        self._waiting.put((future, outcome, time.monotonic() + VISIBLE_S))

    def stop(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        reached = 0
        behind: Mapping[int, int] = {}
        while (found := self._waiting.get()) is not None:
            future, outcome, until = found
            if outcome.sequence > reached:
                left_s = max(until - time.monotonic(), 0.0)
                try:  # a worker that one write has waited for in vain holds up no other one until it moves
                    behind = self._notices.wait_applied(self._model, outcome.sequence, left_s, behind)
                except OSError as error:  # no failure may end this thread
                    log.error("%s: the other workers cannot be seen: %s", self._model, error)
                    behind = {UNSEEN: UNKNOWN}
                reached = reached if behind else outcome.sequence
            future.set_result(replace(outcome, visible=False) if outcome.sequence > reached else outcome)
