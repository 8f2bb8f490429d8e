"""The live catalogue of one model, as the routes of one worker see it.

A write is checked, placed in every version that serves, and handed to the journal's thread; it is answered when all workers answer by it.
Nothing here blocks the event loop. Knows operations and versions. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from espalier.errors import EspalierError, JournalError
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from service.entity_tags import Condition
from service.errors import BeingChanged, ChangesGone, Conflict, Follows, ItemNotFound, NotReady, NotWritable, QueueFull
from service.live.catalogue_types import ALWAYS, NOWHERE, CatalogueStatus, Delete, Outcome, Put, StoredItem
from service.live.group import EvidenceNeeded, Write
from service.live.journal_thread import JournalThread
from service.live.live_version import LiveVersion
from service.live.notices import Notices
from service.live.replay import replay
from service.live.slots import Candidates
from service.watch.live_metrics import LiveMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 1024
"""Writes of single requests that wait; more are answered 429."""
PLACED_AT_ONCE = 8
"""Items of a bulk request that one search places."""
RETRY_S = 1
ATTEMPTS = 3
"""How often a write is placed anew because its item changed meanwhile."""

_placing = ThreadPoolExecutor(2, thread_name_prefix="placing")


class LiveCatalogue:
    """See the module, and `catalogue_types.Catalogue`.

    capacity  most live items
    follows   where the writes go when this host follows another one; None: here
    """

    def __init__(
        self, model: str, journal: Journal, notices: Notices, metrics: LiveMetrics, capacity: int, follows: str | None = None
    ) -> None:
        self.model, self.capacity, self._metrics = model, capacity, metrics
        self._journal, self._notices = journal, notices
        self.thread = JournalThread(model, journal, notices, capacity, self._applied_more, metrics.lag)
        self._follows, self._waiting = follows, 0
        self._not_following: str | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiters: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # those who wait for an operation
        notices.subscribe(model, self.thread.look)

    # -- writes ---------------------------------------------------------------------------------------------------------

    async def put(self, put: Put, condition: Condition = ALWAYS) -> Outcome:
        return await self._one(put, condition)

    async def delete(self, delete: Delete, condition: Condition = ALWAYS) -> Outcome:
        return await self._one(delete, condition)

    async def bulk(self, operations: Sequence[Put | Delete]) -> Sequence[Outcome | EspalierError]:
        return await self._finished(self._write(operations, ALWAYS))

    async def _one(self, what: Put | Delete, condition: Condition) -> Outcome:
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{self._waiting} writes wait already.", RETRY_S)
        self._waiting += 1
        try:
            (found,) = await self._finished(self._write([what], condition))
        finally:
            self._waiting -= 1
        if isinstance(found, EspalierError):
            raise found
        return found

    async def _finished(self, writing: Coroutine[Any, Any, T]) -> T:
        """Finish writes even when their client hangs up."""
        task = asyncio.ensure_future(writing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _write(self, operations: Sequence[Put | Delete], condition: Condition) -> list[Outcome | EspalierError]:
        """What became of each operation, in order. Raises NotReady, Conflict and Follows, where none can be taken."""
        self._check_writable()
        found: list[asyncio.Future[Outcome | EspalierError]] = []
        under_way: set[str] = set()
        for block in blocks(operations):
            if not under_way.isdisjoint(itertools.chain(*map(_placed_by, block))):  # they must be there first
                await asyncio.gather(*found)
                under_way.clear()
            writes = await self._placed(block, condition)
            self.thread.submit([write for write in writes if isinstance(write, Write)])
            found += [
                asyncio.ensure_future(self._outcome(write, self._unknown(operation)))
                for operation, write in zip(block, writes, strict=True)
            ]
            under_way.update(operation.id for operation in block)
        return await asyncio.gather(*found)

    def _unknown(self, operation: Put | Delete) -> tuple[str, ...]:
        """The ids of the evidence that the default version does not have."""
        ids, default = list(_placed_by(operation)), self._default()
        if not ids or default is None:
            return ()
        return tuple(item_id for item_id, row in zip(ids, default.items.rows_of(ids).tolist(), strict=True) if row < 0)

    async def _outcome(self, write: Write | EspalierError, unknown: tuple[str, ...]) -> Outcome | EspalierError:
        """What became of a write. Where its item has changed meanwhile it is placed anew, by all that is known of it."""
        if isinstance(write, EspalierError):
            return write
        for _ in range(ATTEMPTS):
            try:
                return replace(await asyncio.wrap_future(write.outcome), unknown=unknown)
            except EvidenceNeeded as error:
                operation = error.operation
                (again,) = await self._placed([Put(operation.id, operation.body)], write.condition)
                if isinstance(again, EspalierError):
                    return again
                write = replace(write, candidates=again.candidates, outcome=Future())
                self.thread.submit([write])
            except EspalierError as error:
                return error
        return BeingChanged(f"{write.what.id!r} is being changed by others; try again.")

    def _check_writable(self) -> LiveVersion:
        """The default version. Raises where no write can be taken."""
        if self._follows is not None:
            raise Follows(f"This service follows the live catalogue of {self._follows}, which takes the writes.")
        default = self._default()
        if default is None:
            raise NotReady(f"Model {self.model!r} is not ready; see /readyz and /models/{self.model}.")
        if default.refused is not None:
            raise Conflict(f"Model {self.model!r} takes no live items: {default.refused}.")
        return default

    async def _placed(self, operations: Sequence[Put | Delete], condition: Condition) -> list[Write | EspalierError]:
        """The operations as writes, with where their items may go; an error for one that cannot be taken."""
        default = self._check_writable()
        errors: dict[int, EspalierError] = {}
        to_place: dict[int, tuple[str, ItemBody]] = {}
        for place, operation in enumerate(operations):
            if isinstance(operation, Delete):
                continue
            try:
                if operation.body.fields is not None:
                    default.columns.typed(operation.body.fields)
            except EspalierError as error:
                errors[place] = error
                continue
            if operation.body.has_evidence or (default.takes_fields and operation.body.fields and default.placed(operation.id) is None):
                to_place[place] = operation.id, operation.body
        candidates: dict[int, dict[int, Candidates]] = {place: {} for place in to_place}
        loop = asyncio.get_running_loop()
        for version in self.thread.versions.values() if to_place else ():
            try:
                found = await loop.run_in_executor(_placing, version.where, list(to_place.values()))
            except NotReady:
                if version is self._default():
                    raise
                continue  # it is being dropped
            for place, own in zip(to_place, found, strict=True):
                if not isinstance(own, EspalierError):
                    candidates[place][version.version] = own
                elif version is default:
                    errors[place] = own
        return [errors.get(place) or Write(operation, condition, candidates.get(place, {})) for place, operation in enumerate(operations)]

    def _default(self) -> LiveVersion | None:
        number = self.thread.default()
        return None if number is None else self.thread.served.get(number)

    # -- reads ----------------------------------------------------------------------------------------------------------

    async def get(self, item_id: str) -> StoredItem:
        default = self._check_ready()
        try:
            stored = await asyncio.to_thread(self._journal.latest, item_id)
        except JournalError as error:
            raise NotWritable(str(error)) from error
        if stored is not None and (stored.kind == "delete" or _has_expired(stored)):
            raise ItemNotFound(f"There is no item {item_id!r}: it was deleted.")
        if stored is None and not default.is_trained(item_id):
            raise ItemNotFound(f"There is no item {item_id!r}.")
        placed = default.placed(item_id)
        body = ItemBody() if stored is None else stored.body
        if body.fields is None and default.is_trained(item_id):
            body = replace(body, fields=default.fields_of(item_id))
        if stored is None:
            return StoredItem(item_id, NOWHERE, body, False, placed)
        return StoredItem(item_id, stored.sequence, body, True, placed, stored.source_version, stored.at)

    async def changes(self, after: int, limit: int) -> Sequence[Operation]:
        try:
            if after > await asyncio.to_thread(self._journal.last_sequence):
                raise ChangesGone(f"after: there is no operation {after} yet; was a backup put in place?")
            return await asyncio.to_thread(self._journal.since, after, limit)
        except JournalError as error:
            raise NotWritable(str(error)) from error

    async def identity(self) -> str | None:
        try:
            return await asyncio.to_thread(self._journal.identity)
        except JournalError as error:
            raise NotWritable(str(error)) from error

    def status(self) -> CatalogueStatus:
        default, thread = self._default(), self.thread
        reason = thread.reason or (None if default is None else default.refused)
        if self._follows is not None:
            reason = f"follows {self._follows}" + ("" if self._not_following is None else f", but: {self._not_following}")
        state = None if default is None else default.state
        items, tombstones = (0, 0) if state is None else (state.live_items, state.tombstones)
        return CatalogueStatus(thread.applied, 0 if default is None else default.sequence, items, tombstones, self.capacity, reason)

    def applied(self, version: int) -> int:
        found = self.thread.versions.get(version)
        return NOWHERE if found is None else found.sequence

    async def reached(self, version: int, sequence: int, deadline: float) -> bool:
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
            raise NotReady(f"Model {self.model!r} is not ready; see /readyz and /models/{self.model}.")
        return default

    @property
    def has_begun(self) -> bool:
        """Whether anything was ever written."""
        return self._journal.exists()

    # -- the journal's thread and the loader ----------------------------------------------------------------------------

    def join(self, version: LiveVersion) -> None:
        """Bring a version that is about to serve up to date, and keep it so. Blocks; operations that cannot be read are left out so far."""
        if version.refused is None and self._journal.exists():
            try:
                self._journal.check()
                replay(version, self._journal)
            except JournalError as error:
                log.error("%s version %d serves without its live items: %s", self.model, version.version, error)
        self.thread.join(version)

    # -- a host that follows --------------------------------------------------------------------------------------------

    def last_sequence(self) -> int:
        """The last operation that is committed here. Raises JournalError."""
        return self._journal.last_sequence()

    def own_identity(self) -> str | None:
        """Names the sequence numbers that are here; None before the first. Raises JournalError."""
        return self._journal.identity()

    def note(self, behind: int | None, failure: str | None = None) -> None:
        """How far this host is behind the one that it follows, and why it does not follow."""
        self._not_following = failure
        if behind is not None:
            self._metrics.lag(behind)

    def copy(self, operations: Sequence[Operation], identity: str | None) -> None:
        """Commit operations of the journal that this host follows, under their numbers, and have all workers apply them. Blocks.

        Those that are here already are left out. identity: of that journal. Raises JournalError.
        """
        with self._journal.writing() as transaction:
            last = transaction.last_sequence()
            if not last and identity is not None:
                transaction.identify(identity)
            for operation in operations:
                if operation.sequence > last:
                    transaction.append(operation)
        self._notices.committed(self.model)
        self.thread.look()

    def _applied_more(self) -> None:
        for event, loop in list(self._waiters.items()):
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(event.set)
        for version in self.thread.versions.values():
            if (state := version.state) is not None:
                self._metrics.holds(version.version, state.live_items, state.tombstones, self.capacity)

    def stop(self) -> None:
        """Finish what was submitted, and close the journal. Blocks."""
        self.thread.stop()


def blocks(operations: Sequence[Put | Delete]) -> Iterator[Sequence[Put | Delete]]:
    """The operations in blocks that can be placed together: none is placed by an item that another one of its block puts or deletes."""
    block: list[Put | Delete] = []
    ids: set[str] = set()
    for operation in operations:
        if len(block) == PLACED_AT_ONCE or not ids.isdisjoint(_placed_by(operation)):
            yield block
            block, ids = [], set()
        block.append(operation)
        ids.add(operation.id)
    if block:
        yield block


def _placed_by(operation: Put | Delete) -> dict[str, None]:
    """The ids of items that place an item, each once, in their order."""
    if isinstance(operation, Delete):
        return {}
    histories = [event for event in operation.body.events if isinstance(event, list | tuple)]
    return dict.fromkeys([*operation.body.like, *(item for history in histories for item in history if isinstance(item, str))])


def _has_expired(stored: Operation) -> bool:
    return stored.body.valid_until is not None and stored.body.valid_until <= time.time()
