"""The thread of one model that writes its journal, follows what others write, and applies both to the versions of this process.

Waiting writes are placed together, then committed together. Nothing else changes a version that serves. Knows the journal, versions and
the other workers. Does not know how requests wait: catalogue.py does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from espalier.errors import JournalBusy, JournalError, JournalReadOnly, spelled
from espalier.live.journal import Journal, Transaction
from espalier.live.journal_file import os_error
from espalier.live.journal_upkeep import versions_on_disk
from espalier.live.operations import Operation

from ..errors import BeingChanged, NotReady, NotWritable, ShardsMissing
from ..live.catalogue_types import ItemOutcome, ItemPlacement
from ..live.compaction import Compaction
from ..live.group import Decision, EvidenceNeeded, Group, Refusal, Write
from ..live.live_version import LiveVersion, Placements, placed_by
from ..live.notices import UNKNOWN, UNSEEN, Notices
from ..live.placing import named_by, with_candidates
from ..live.replay import Store, Stored, apply_all, replay

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP = 256
"""Most writes of one commit."""
ATTEMPTS = 3
"""How often a write is placed again because its item changed meanwhile."""
PAGE = 1000
"""Operations that are read at a time."""
VISIBLE_S = 1.0
"""How long the other workers have to follow before a write is answered 202."""
TOGETHER, LONGEST_PAUSE_S = 4, 0.02
"""If a write waits when a group of fewer than TOGETHER writes ends, writes come faster than they can be committed one by one. Then the next
group begins when as much time has passed as the last one took, or TOGETHER writes wait: most of a small group's cost is per group."""
SHARDS_S = 5.0
"""How long a version waits before it asks shards again that did not say where items go."""
IDLE_S = 0.5
"""Longest sleep while an item may expire, because the clock may be set."""

Job = Write | Callable[[], None]


class JournalThread:
    """Started by the first job.

    capacity  most live items
    on_apply  called from this thread after a new snapshot or a change of `reason`; on_lag: with the number of operations to be applied
    versions  those of `served` that take live items
    default   returns the number of the version whose columns and items decide about writes
    on_erasure  called from this thread when a person's events were erased from the journal
    reason    why the journal takes no writes, or cannot be followed; None: it does
    applied   the last operation that all versions of this process hold
    progress  counts the jobs that it has begun, skipped, refused or committed
    """

    def __init__(
        self, model: str, journal: Journal, notices: Notices, capacity: int, on_apply: Callable[[], None], on_lag: Callable[[int], None]
    ) -> None:
        self.model, self.journal, self._notices, self._capacity = model, journal, notices, capacity
        self._on_apply, self._on_lag = on_apply, on_lag
        self._joined_versions: tuple[LiveVersion, ...] = ()  # a version that is opened anew is in it twice for a moment
        self.served: dict[int, LiveVersion] = {}  # by number; replaced as a whole, as is `versions`
        self.versions: dict[int, LiveVersion] = {}
        self._waiting: dict[LiveVersion, float] = {}  # versions that wait for shards → when they ask again, of time.monotonic
        self.default: Callable[[], int | None] = lambda: None
        self.on_erasure: Callable[[], None] = lambda: None
        self.reason: str | None = None
        self.applied = self.progress = self._erasures = 0
        self._queue: SimpleQueue[Job | None] = SimpleQueue()  # None ends the thread
        self._put_back: deque[Job | None] = deque()  # taken from the queue and put back: these come before those in the queue
        self._catch_up_queued = False
        self._begin_at = -math.inf  # when the next group may begin, of time.monotonic
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopped = self._unreadable = False
        self._answering = ThreadPoolExecutor(1, f"visible-{model}")  # waits for the other workers, if there are any
        self._reached = math.inf if notices.folder is None else 0  # all workers have applied this operation, as far as is known
        self._behind: Mapping[int, int] = {}  # the workers that the last answer has waited for in vain
        self._compaction = Compaction(journal.file)

    # -- from any thread ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Have the operations applied that another process may have committed."""
        if not self._catch_up_queued and not self._stopped and (self._thread is not None or self.journal.exists()):
            self._catch_up_queued = True
            self.submit(self._catch_up)

    def call(self, work: Callable[[], T]) -> T:
        """Call a function between two turns of the thread, and return its result."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self.submit(job)
        return done.result()

    def store(self, fingerprint: int, placements: Stored) -> Stored:
        """A `Store` for a loader: this thread locks the journal, because a loader's low priority could block every writer."""
        return self.call(lambda: self.journal.store_placements(fingerprint, placements))

    def join(self, version: LiveVersion) -> None:
        """Apply operations to a version from now on. It has been brought almost up to date."""
        self.call(lambda: self._join(version))

    def check_own(self) -> None:
        """Note it if the journal is a copy of another host's, which this host does not follow."""

        def remark() -> None:
            try:
                self.journal.check_own()
            except JournalReadOnly as error:
                self._remark(str(error))

        with suppress(JournalError):  # which reading it has noted
            self.call(remark)

    def leave(self, version: LiveVersion) -> None:
        """Apply no more operations to a version."""
        if self._thread is None:
            self._drop(version)
        else:
            self._queue.put(lambda: self._drop(version))

    def stop(self) -> None:
        """Finish the submitted writes, and end."""
        with self._starting:
            self._stopped = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        self._answering.shutdown()
        self._compaction.stop()
        self.journal.close()

    def submit(self, *jobs: Job) -> None:
        """Have writes committed, and other jobs called, in their order. The thread sets the outcomes of writes.

        A write whose outcome is cancelled before the thread takes it is skipped. Raises NotReady after `stop`.
        """
        with self._starting:  # no job may be queued behind the end
            if self._stopped:
                raise NotReady("The service is shutting down.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"live-{self.model}", daemon=True)
                self._thread.start()
            for job in jobs:
                self._queue.put(job)

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
            if len(group) < TOGETHER and not self._put_back and not self._queue.empty():  # jobs put back do not enlarge the next group
                ended = time.monotonic()
                self._begin_at = ended + min(ended - began, LONGEST_PAUSE_S)
        self._expire(time.time())
        return True

    def _expire(self, now: float) -> None:
        """Take out the items whose time has passed, in all versions. now: seconds since 1970."""
        expired = sum(version.expire(now) for version in self._joined_versions)
        if expired:
            self._on_apply()

    def _next(self) -> Job | None:
        """The next job; an empty one if none came until an item may expire; None at the end."""
        next_expiry = min((version.next_expiry() for version in self._joined_versions), default=math.inf)
        timeout = None if next_expiry == math.inf else min(max(next_expiry - time.time(), 0.0), IDLE_S)
        try:
            return self._take(timeout)
        except Empty:
            return lambda: None

    def _take(self, timeout: float | None = 0.0) -> Job | None:
        """The first waiting job. Raises Empty if there is none. Skips writes whose outcome is cancelled."""
        while True:
            job = self._put_back.popleft() if self._put_back else self._queue.get(timeout=timeout)
            is_wanted = not isinstance(job, Write) or job.outcome.running() or job.outcome.set_running_or_notify_cancel()
            self.progress += 1
            if is_wanted:
                return job

    def _pause(self, first: Write) -> None:
        """Wait for more writes to join a write. Meanwhile apply the operations of other workers, because these wait for it."""
        jobs: list[Job | None] = [first]
        try:
            while isinstance(jobs[-1], Write) and len(jobs) < TOGETHER and (left_s := self._begin_at - time.monotonic()) > 0:
                job = self._take(left_s)
                if job == self._catch_up:
                    self._catch_up()
                else:
                    jobs.append(job)
        except Empty:
            pass
        finally:
            self._begin_at = -math.inf
            self._put_back.extendleft(reversed(jobs))

    def _group(self, first: Write) -> list[Write]:
        """The waiting writes, up to one of an item of the group, or whose evidence names one: that item must be committed first."""
        group, ids = [first], {first.request.id}
        while len(group) < GROUP:
            try:
                job = self._take()
            except Empty:
                break
            if not isinstance(job, Write) or job.request.id in ids or not ids.isdisjoint(named_by(job.request.body)):
                self._put_back.appendleft(job)
                break
            group.append(job)
            ids.add(job.request.id)
        return group

    def _take_writes(self) -> list[Write]:
        """All waiting writes. Other jobs stay."""
        jobs: list[Job | None] = []
        with suppress(Empty):
            while True:
                jobs.append(self._take())
        self._put_back.extend(job for job in jobs if not isinstance(job, Write))
        return [job for job in jobs if isinstance(job, Write)]

    def _commit(self, group: list[Write]) -> None:
        default = self._default()
        placed_in = [version for version in self.versions.values() if version is default or version not in self._waiting]
        writes, refusals = with_candidates(group, placed_in, default)
        if any(isinstance(refusal.error, NotReady) for refusal in refusals) and self._default() is not default:
            self._put_back.extendleft(reversed(group))  # the default was dropped meanwhile: the next one places them
            return
        for refusal in refusals:
            self._refuse([refusal.write], refusal.error)
        if not writes:
            return
        try:
            self._replay()
            if self._catch_up_queued:  # others have committed: apply most of it before the journal is locked
                self._catch_up()
            with self.journal.writing() as transaction:
                transaction.check_own()
                self._apply_until(transaction.last_sequence(), transaction)
                now = time.time()
                self._expire(now)
                current = {number: version for number, version in self.versions.items() if version not in self._waiting}
                results = Group(transaction, current, default, self._held(transaction), self._capacity, now).decide(writes)
        except JournalError as error:
            self._remark(str(error))
            if isinstance(error, JournalBusy):  # else each waiting write would wait in turn for the process that holds the lock
                writes += self._take_writes()
            self._refuse(writes, NotWritable(f"{error}. Retrieval goes on."))
            return
        except Exception as error:
            self._refuse(writes, error)
            raise
        self._remark(None)
        self.progress += 1  # before anybody sees the operations
        decisions = [result for result in results if isinstance(result, Decision)]
        try:
            if any(decision.operation is not None for decision in decisions):
                self._apply_decided(decisions)
                self._notices.committed(self.model)
                self._compaction.look()
        except JournalError as error:  # a version must wait; the next look applies the rest
            self._remark(str(error))
            self._unreadable = True
        finally:
            answers = [(decision.write.outcome, self._outcome(decision, default)) for decision in decisions]
            if self._notices.folder is None:
                self._answer(answers)
            else:
                self._answering.submit(self._answer, answers, time.monotonic() + VISIBLE_S)
            self._answer_refusals([result for result in results if isinstance(result, Refusal)])

    def _held(self, transaction: Transaction) -> int:
        """The last operation that a version holds; at the beginning of a journal also of those that do not serve. Raises JournalError."""
        held = [version.through for version in self.versions.values()]
        if not transaction.last_sequence():
            try:
                held += [version.through for version in versions_on_disk(self.journal.file.parent)()]
            except OSError as error:
                raise os_error(self.journal.file, error) from error
        return max(held, default=0)

    def _refuse(self, writes: Sequence[Write], error: Exception) -> None:
        self.progress += 1  # before anybody sees the error
        for write in writes:
            write.outcome.set_exception(error)

    def _answer_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Answer refused writes. Those that must be placed by stored evidence are put back, before others."""
        for write, error in reversed(refusals):
            if not isinstance(error, EvidenceNeeded):
                write.outcome.set_exception(error)
            elif write.attempts == ATTEMPTS:
                write.outcome.set_exception(BeingChanged(f"{spelled(write.request.id)} is being changed by others; try again."))
            else:
                self._put_back.appendleft(replace(write, evidence=error.operation.body, attempts=write.attempts + 1))

    def _outcome(self, decision: Decision, default: LiveVersion | None) -> ItemOutcome:
        placed: ItemPlacement | None = None
        if decision.outcome != "deleted" and default is not None:
            placements = decision.placements.get(default.fingerprint)
            if placements and decision.operation is not None:
                placed = ItemPlacement(default.version, placements[0].parent, placed_by(decision.operation))
            else:
                placed = default.placed(decision.write.request.id)
        return ItemOutcome(decision.sequence, decision.outcome, default not in self._waiting, placed, decision.write.unknown)

    def _answer(self, answers: Sequence[tuple[Future[ItemOutcome], ItemOutcome]], until: float = 0.0) -> None:
        """Answer writes that this process has applied when the other workers have applied them, or at `until`, of time.monotonic."""
        for future, outcome in answers:
            if outcome.sequence > self._reached:
                left_s = max(until - time.monotonic(), 0.0)
                try:  # later writes do not wait for workers that an earlier write has waited for in vain, until these move
                    self._behind = self._notices.wait_applied(self.model, outcome.sequence, left_s, self._behind)
                except Exception as error:  # no failure may leave a write unanswered
                    log.error("%s: the other workers cannot be seen: %s", self.model, error)
                    self._behind = {UNSEEN: UNKNOWN}
                self._reached = self._reached if self._behind else outcome.sequence
            future.set_result(replace(outcome, visible=False) if outcome.sequence > self._reached else outcome)

    def _default(self) -> LiveVersion | None:
        number = self.default()
        return None if number is None else self.versions.get(number)

    # -- applying -------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Apply the operations that other processes have committed."""
        self._catch_up_queued, before = False, self.applied
        try:
            end = self.journal.last_sequence()
            self._show_progress(end)
            self._replay()
            self._apply_until(end, self.journal)
            self._forget_erased()
        except JournalError as error:
            self._remark(str(error))
            self._unreadable = True
            return
        if self._unreadable or self.applied > before:  # others can write
            self._remark(None)

    def _forget_erased(self) -> None:
        """Drop queries in memory that a command has erased from the journal. Raises JournalError."""
        erasures = self.journal.erasures()
        for version in self._joined_versions:
            if version.recent.erasures != erasures:
                version.recent.read_again(self.journal, erasures)
        if erasures != self._erasures:
            self._erasures = erasures
            self.on_erasure()

    def _replay(self) -> None:
        """Apply to each version what it could not read when it joined, or has waited for. Raises JournalError; then nothing later may be
        applied to it.
        """
        for version in self._joined_versions:
            if time.monotonic() >= self._waiting.get(version, -math.inf):
                self._bring(version, partial(replay, version, self.journal, self.applied))

    def _bring(self, version: LiveVersion, work: Callable[[], None]) -> None:
        """Have a version apply operations. If shards do not say where an item goes, it waits, and nothing later is applied to it."""
        try:
            work()
            if self._waiting.pop(version, None) is not None:
                self._show_progress(self.applied)
        except ShardsMissing as error:
            if version not in self._waiting:
                log.warning("%s version %d does not have all live items yet: %s", self.model, version.version, error)
            self._waiting[version] = time.monotonic() + SHARDS_S

    def _apply_until(self, end: int, journal: Journal | Transaction) -> None:
        """Apply the committed operations up to a sequence."""
        while self.applied < end and (operations := journal.since(self.applied, PAGE)):
            sequences = [operation.sequence for operation in operations]
            stored = {version.fingerprint: journal.placements(version.fingerprint, sequences) for version in self._joined_versions}
            self._apply(operations, stored, journal.store_placements)

    def _apply_decided(self, decisions: Sequence[Decision]) -> None:
        """Apply the operations that this process has committed."""
        stored: dict[int, dict[int, Placements]] = {version.fingerprint: {} for version in self._joined_versions}
        for decision in decisions:
            for fingerprint, placements in stored.items():
                if leaves := decision.placements.get(fingerprint):
                    placements[decision.sequence] = leaves
        self._apply([decision.operation for decision in decisions if decision.operation is not None], stored, self.journal.store_placements)

    def _apply(self, operations: Sequence[Operation], stored: Mapping[int, Stored], store: Store) -> None:
        """Apply operations, in their order, to all versions, and publish them. stored: their placements by the fingerprint of a version."""
        for version in self._joined_versions:
            if version.refused is None and version not in self._waiting:
                self._bring(version, partial(apply_all, version, operations, stored[version.fingerprint], store))
                version.publish()
        self._reach(operations[-1].sequence)

    def _reach(self, sequence: int) -> None:
        self.applied = sequence
        self._show_progress(sequence)
        self._on_apply()

    def _show_progress(self, end: int) -> None:
        """Tell the other workers and the metric what all versions have applied. end: the last committed operation."""
        reached = min([self.applied, *(version.applied for version in self._waiting)])
        self._on_lag(max(end - reached, 0))
        self._notices.applied(self.model, reached if self.versions else None)

    def _join(self, version: LiveVersion) -> None:
        """Bring a version up to date with the others, and keep it so."""
        if version.refused is None:
            if not self.versions:
                self.applied = version.sequence
            self._notices.applied(self.model, self.applied)  # first, so that later commits wait for this worker
        self._set_joined((*self._joined_versions, version))
        try:
            self._catch_up()
        except BaseException:
            self._drop(version)
            raise
        self._on_apply()

    def _drop(self, version: LiveVersion) -> None:
        self._set_joined(tuple(other for other in self._joined_versions if other is not version))
        if not self.versions:
            self._notices.applied(self.model, None)

    def _set_joined(self, joined: tuple[LiveVersion, ...]) -> None:
        self._joined_versions = joined
        self._waiting = {version: at for version, at in self._waiting.items() if version in joined}
        self.served = {version.version: version for version in joined}
        self.versions = {number: version for number, version in self.served.items() if version.refused is None}

    def _remark(self, reason: str | None) -> None:
        """Note why the journal takes no writes; None: it does. Logs changes."""
        if reason != self.reason:
            if reason is not None:
                log.error("%s: the live catalogue takes no writes: %s", self.model, reason)
            else:
                log.info("%s: the live catalogue takes writes again", self.model)
            self.reason = reason
            self._on_apply()
        self._unreadable = False
