"""The live catalogue of one model, as the routes of one worker see it.

A write is checked and handed to the journal's thread. It is answered when all workers have applied it. Nothing here blocks the event loop.
Knows operations and versions. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TypeVar

from espalier.errors import EspalierError, JournalError, spelled
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation

from ..entity_tags import Condition
from ..errors import Conflict, Gone, NotFound, NotReady, NotWritable, QueueFull, ShardsMissing
from ..live.catalogue_types import ALWAYS, NOWHERE, CatalogueStatus, Delete, ItemOutcome, Put, StoredItem
from ..live.group import Write
from ..live.journal_thread import JournalThread
from ..live.live_version import LiveVersion
from ..live.notices import Notices
from ..live.replay import replay
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 1024
"""Most writes of single requests that wait; more are answered 429."""
RETRY_S = 1
WRITE_S, BULK_S = 10.0, 60.0
"""How long a single write, and a group of a bulk's lines, waits for its outcome."""
READ_S = 2.0
"""How long a request waits for the journal to be read."""


class LiveCatalogue:
    """See the module. Used from the event loop of one worker.

    Writes raise InvalidInput (422: evidence is missing, a column is unknown, a value has a wrong type), PreconditionFailed (412), QueueFull
    (429: too many operations wait), CatalogueFull (507: no room; deletes are still taken), Conflict (409: another host writes this
    catalogue), NotWritable (503: the disk is full, the folder is read-only, or it takes too long) and NotReady (503).
    A write that the thread has begun is finished even if the caller is cancelled.

    capacity  most live items
    follows   the address that takes the writes if this host follows another one; None: this host takes them
    """

    def __init__(self, model: str, journal: Journal, notices: Notices, metrics: Metrics, capacity: int, follows: str | None = None) -> None:
        self.model, self.capacity, self._metrics = model, capacity, metrics
        self.journal, self._notices = journal, notices
        self.thread = JournalThread(model, journal, notices, capacity, self._on_apply, self._on_lag)
        self._follows, self._waiting_writes = follows, 0
        self._stuck_at = -1  # the thread's progress when a write came that it did not take in time
        self._follow_failure: str | None = None
        self._unapplied, self._uncopied = 0, 0.0  # operations: of this host's journal; of the writer's that are not in it
        self._waiters: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # of requests that wait for an operation
        self._reader = ThreadPoolExecutor(1, f"reads-{model}")  # separate, so that a read that hangs takes no thread from other routes
        notices.subscribe(model, self.thread.look)

    # -- writes ---------------------------------------------------------------------------------------------------------

    async def write(self, request: Put | Delete, condition: Condition = ALWAYS) -> ItemOutcome:
        """A delete raises NotFound (404) for an id that never was an item; of a deleted item it is `unchanged`."""
        if self._waiting_writes >= MAX_WAITING:
            raise QueueFull(f"{self._waiting_writes} writes wait already.", RETRY_S)
        self._waiting_writes += 1
        try:
            (outcome,) = await self._write([request], condition, WRITE_S)
        finally:
            self._waiting_writes -= 1
        if isinstance(outcome, EspalierError):
            try:
                raise outcome
            finally:
                del outcome  # it holds this frame
        return outcome

    async def bulk(self, requests: Sequence[Put | Delete]) -> Sequence[ItemOutcome | EspalierError]:
        """The outcome or the error of each request, in order.

        Waits for room instead of raising QueueFull, so that a bulk is read no faster than it is committed.
        """
        return await self._write(requests, ALWAYS, BULK_S)

    async def _write(self, requests: Sequence[Put | Delete], condition: Condition, within_s: float) -> list[ItemOutcome | EspalierError]:
        """The outcome or the error of each request, in order. Raises NotReady and Conflict if no write can be taken.

        The journal's thread finishes the writes that it has begun even if the client hangs up or the time is over. If a write has waited in
        vain and the thread has made no progress since, later ones raise NotWritable: else they would pile up without a bound.
        """
        default = self._check_writable()
        progress = self.thread.progress
        if progress == self._stuck_at:
            raise NotWritable("The writes before it do not end. Nothing was written; retrieval goes on.")
        checked = [_checked(request, condition, default) for request in requests]
        writes = [write for write in checked if isinstance(write, Write)]
        self.thread.submit(*writes)
        try:
            async with asyncio.timeout(within_s):
                for write in reversed(writes):  # the last one is mostly answered last
                    if not write.outcome.done():  # `_outcome` reads its error, which would hold this frame if it were raised
                        await asyncio.gather(asyncio.wrap_future(write.outcome), return_exceptions=True)
        except TimeoutError:
            for write in writes:
                write.outcome.cancel()  # no effect on writes that the thread has begun
            self._stuck_at = max(self._stuck_at, progress)
        return [_outcome(write) if isinstance(write, Write) else write for write in checked]

    def _check_writable(self) -> LiveVersion:
        """The default version. Raises if no write can be taken."""
        if self._follows is not None:
            raise Conflict(f"This service follows the live catalogue of {self._follows}, which takes the writes.")
        default = self._check_ready()
        if default.refused is not None:
            raise Conflict(f"Model {spelled(self.model)} takes no live items: {default.refused}.")
        return default

    def _default(self) -> LiveVersion | None:
        """The default version. If it was dropped after its number was read, the next default."""
        while True:
            number = self.thread.default()
            default = None if number is None else self.thread.served.get(number)
            if default is not None or number == self.thread.default():
                return default

    # -- reads ----------------------------------------------------------------------------------------------------------

    async def get(self, item_id: str) -> StoredItem:
        """Raises NotFound for an id that is unknown or deleted."""
        default = self._check_ready()
        stored = await self._read(self.journal.latest, item_id)
        is_as_stored = stored is None or default.is_as_stored(stored)
        if stored is not None and ((stored.kind == "delete" and is_as_stored) or stored.has_expired(time.time())):
            raise NotFound(f"There is no item {spelled(item_id)}: it was deleted.")
        if stored is None and not default.is_trained(item_id):
            raise NotFound(f"There is no item {spelled(item_id)}.")
        placed = default.placed(item_id)
        body = ItemBody() if stored is None else stored.body
        if (body.fields is None or not is_as_stored) and default.is_trained(item_id):
            body = replace(body, fields=default.fields_of(item_id))
        if stored is None:
            return StoredItem(item_id, NOWHERE, body, False, placed)
        return StoredItem(item_id, stored.sequence, body, True, placed, stored.source_version, stored.at)

    async def changes(self, after: int, limit: int) -> Sequence[Operation]:
        """Operations after a sequence, ascending, at most `limit`; of each id at least the last one, whose body is complete. Raises
        Gone (410) if a follower that has everything up to `after` cannot continue from this journal."""
        if after > await self.committed():
            raise Gone(f"after: there is no operation {after} yet; was a backup put in place?")
        return await self._read(self.journal.since, after, limit)

    async def committed(self) -> int:
        """The last operation that any worker of this host has committed. Raises NotWritable if it cannot be read."""
        return await self._read(self.journal.last_sequence)

    async def dropped(self) -> int:
        """See `Journal.dropped`. A follower that copied an item before that delete, but not the delete, must copy everything again."""
        return await self._read(self.journal.dropped)

    async def identity(self) -> str | None:
        return await self._read(self.journal.identity)

    async def _read(self, read: Callable[..., T], *values: object) -> T:
        """Read the journal. Raises NotWritable if it cannot be read, or not in time."""
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.get_running_loop().run_in_executor(self._reader, read, *values)
        except JournalError as error:
            raise NotWritable(str(error)) from error
        except TimeoutError as error:
            raise NotWritable(f"The journal could not be read within {READ_S:g} s.") from error

    def status(self) -> CatalogueStatus:
        """Cheap: /models asks for it."""
        default, thread = self._default(), self.thread
        reason = thread.reason or (None if default is None else default.refused)
        if self._follows is not None:
            reason = f"follows {self._follows}" + ("" if self._follow_failure is None else f", but: {self._follow_failure}")
        items, tombstones = (0, 0) if default is None else (default.state.live_items, default.state.tombstones)
        capacity = self.capacity if default is None else self._capacity_of(default)
        return CatalogueStatus(thread.applied, 0 if default is None else default.sequence, items, tombstones, capacity, reason)

    def _capacity_of(self, version: LiveVersion) -> int:
        return min(self.capacity, version.state.room)

    def applied(self, version: int) -> int:
        """The operation up to which this worker's answers of a version hold all operations. Cheap: every retrieval calls it."""
        live = self.thread.versions.get(version)
        return NOWHERE if live is None else live.sequence

    async def reached(self, version: int, sequence: int, deadline: float) -> bool:
        """Wait until `applied(version)` is at least `sequence`; False if it is not by `deadline` (of time.perf_counter())."""
        event = asyncio.Event()
        self._waiters[event] = asyncio.get_running_loop()
        try:
            if self.applied(version) < sequence:
                self.thread.look()
            async with asyncio.timeout(max(deadline - time.perf_counter(), 0)):
                while self.applied(version) < sequence:
                    event.clear()
                    if self.applied(version) < sequence:
                        await event.wait()
            return True
        except TimeoutError:
            return False
        finally:
            del self._waiters[event]

    def _check_ready(self) -> LiveVersion:
        default = self._default()
        if default is None:
            raise NotReady(f"Model {spelled(self.model)} is not ready; see /readyz and /models/{self.model}.")
        return default

    # -- the journal's thread and the loader ----------------------------------------------------------------------------

    def join(self, version: LiveVersion) -> None:
        """Bring a version that is about to serve up to date, and keep it so. Blocks. Skips operations that cannot be read yet."""
        if version.refused is None and self.journal.exists():
            try:
                self.journal.check()
                replay(version, self.journal, store=self.thread.store)
            except (JournalError, ShardsMissing) as error:
                log.error("%s version %d serves without its live items: %s", self.model, version.version, error)
        self.thread.join(version)
        if self._follows is None:
            self.thread.check_own()

    # -- a host that follows --------------------------------------------------------------------------------------------

    def note(self, behind: int | None, failure: str | None = None) -> None:
        """Note how far this host is behind the host that it follows, None if that is not known, and why it fails to follow."""
        self._follow_failure, self._uncopied = failure, inf if behind is None else behind
        self._show_lag()

    def copied(self) -> None:
        """Have all workers apply operations that were copied from the followed host and committed here."""
        self._notices.committed(self.model)
        self.thread.look()

    def _on_apply(self) -> None:
        for event, loop in list(self._waiters.items()):
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(event.set)
        for version in self.thread.versions.values():
            if not version.is_empty:
                items, tombstones = version.state.live_items, version.state.tombstones
                for name, value in (("items", items), ("tombstones", tombstones), ("capacity_ratio", items / self._capacity_of(version))):
                    self._metrics.show(f"espalier_live_{name}", value, self.model, version.version)
        self._metrics.show("espalier_live_journal_failing", self.thread.reason is not None, self.model)

    def _on_lag(self, operations: int) -> None:
        self._unapplied = operations
        self._show_lag()

    def _show_lag(self) -> None:
        """Called by the journal's thread and by the one that copies, each of which sets one of the two numbers."""
        self._metrics.show("espalier_live_lag", self._unapplied + self._uncopied, self.model)

    def stop(self) -> None:
        """Finish what was submitted, and close the journal. Blocks."""
        self.thread.stop()
        self._reader.shutdown(wait=False, cancel_futures=True)


def _checked(request: Put | Delete, condition: Condition, default: LiveVersion) -> Write | EspalierError:
    """A request as a write, or an error if its fields do not fit the version's columns."""
    try:
        if request.body.fields is not None:
            default.columns.typed(request.body.fields)
    except EspalierError as error:
        return error.with_traceback(None)  # which holds the list of all that is returned
    return Write(request, condition)


def _outcome(write: Write) -> ItemOutcome | EspalierError:
    """The outcome or the error of a write that is finished or has timed out. Raises unexpected errors."""
    if write.outcome.cancelled():
        return NotWritable("It waited too long for the writes before it. Nothing was written; retrieval goes on.")
    if not write.outcome.done():
        return NotWritable("It takes too long, and whether it will be written is not known; send it again. Retrieval goes on.")
    error = write.outcome.exception()
    if error is None:
        return write.outcome.result()
    if isinstance(error, EspalierError):
        return error
    raise error
