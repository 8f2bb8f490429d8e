"""A live catalogue in memory: it can be held, be full, fail, and be behind. Nothing is placed and nothing is searched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from espalier.errors import MISSING, EspalierError, InvalidInput
from espalier.live.operations import NOTHING, ItemBody, Operation
from service.entity_tags import Condition
from service.errors import CatalogueFull, NotFound
from service.live.catalogue_types import ALWAYS, NOWHERE, CatalogueStatus, Delete, ItemOutcome, ItemPlacement, Put, StoredItem, tag_of

PLACED = ItemPlacement(1, 7, "events")
WRITE, ADMIN = "write-key-00000001", "admin-key-00000001"
"""Keys of the services of tests that have such catalogues."""


class FakeCatalogue:
    """Of one model.

    trained   ids that need no evidence
    capacity  most live items
    visible   what outcomes say
    failure   raised by the next write
    go        writes wait for it; set unless a test clears it
    groups    the operations of each call of `bulk`
    """

    def __init__(self, trained: Sequence[str] = (), capacity: int = 10_000) -> None:
        self.trained, self.capacity, self.visible = set(trained), capacity, True
        self.failure: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.operations: list[Operation] = []
        self.latest: dict[str, Operation] = {}
        self.groups: list[Sequence[Put | Delete]] = []
        self.behind = 0

    async def write(self, request: Put | Delete, condition: Condition = ALWAYS) -> ItemOutcome:
        await self._free()
        return self._put(request, condition) if isinstance(request, Put) else self._delete(request, condition)

    def _put(self, put: Put, condition: Condition) -> ItemOutcome:
        before = self.latest.get(put.id)
        there = before is not None and before.kind == "put"
        known = there or (put.id in self.trained and before is None)
        condition.check(tag_of(before.sequence if before else NOWHERE) if known else None, "item")
        if not known and put.id not in self.trained and not put.body.has_evidence:
            raise InvalidInput("events", MISSING, "evidence of where the item belongs")
        if before is not None and put.source_version is not None and put.source_version < (before.source_version or 0):
            return ItemOutcome(before.sequence, "stale", self.visible, PLACED, ())
        earlier = before.body if before else NOTHING
        body = put.body.over(replace(earlier, valid_until=None) if put.lifts_expiry else earlier)
        after = Operation(0, put.id, "put", body, put.source_version)
        if before is not None and after.same_state(before):
            return ItemOutcome(before.sequence, "unchanged", self.visible, PLACED, ())
        if not there and len([one for one in self.latest.values() if one.kind == "put"]) >= self.capacity:
            raise CatalogueFull(f"{self.capacity} live items are there already.")
        return ItemOutcome(self._commit(after), "updated" if known else "inserted", self.visible, PLACED, self._unknown(put.body))

    def _delete(self, delete: Delete, condition: Condition) -> ItemOutcome:
        before = self.latest.get(delete.id)
        if before is None and delete.id not in self.trained:
            raise NotFound(f"No item {delete.id!r}.")
        deleted = before is not None and before.kind == "delete"
        condition.check(None if deleted else tag_of(before.sequence if before else NOWHERE), "item")
        if before is not None and deleted:
            return ItemOutcome(before.sequence, "unchanged", self.visible, None, ())
        sequence = self._commit(Operation(0, delete.id, "delete", NOTHING, delete.source_version))
        return ItemOutcome(sequence, "deleted", self.visible, None, ())

    async def bulk(self, operations: Sequence[Put | Delete]) -> Sequence[ItemOutcome | EspalierError]:
        self.groups.append(operations)
        await self._free()
        outcomes: list[ItemOutcome | EspalierError] = []
        for operation in operations:
            try:
                outcomes.append(await self.write(operation))
            except EspalierError as error:
                outcomes.append(error)
        return outcomes

    async def get(self, item_id: str) -> StoredItem:
        found = self.latest.get(item_id)
        if found is None and item_id in self.trained:
            return StoredItem(item_id, NOWHERE, ItemBody(fields={"title": item_id}), False, ItemPlacement(1, 3, "trained"))
        if found is None or found.kind == "delete":
            raise NotFound(f"No item {item_id!r}.")
        return StoredItem(item_id, found.sequence, found.body, True, PLACED, found.source_version, found.at)

    async def changes(self, after: int, limit: int) -> Sequence[Operation]:
        return [operation for operation in self.operations if operation.sequence > after][:limit]

    async def identity(self) -> str | None:
        return "fake" if self.operations else None

    async def dropped(self) -> int:
        return 0

    async def committed(self) -> int:
        return len(self.operations)

    def status(self) -> CatalogueStatus:
        last = len(self.operations)
        return CatalogueStatus(last, last - self.behind, len(self.latest), 0, self.capacity, None)

    def applied(self, version: int) -> int:
        return len(self.operations) - self.behind

    async def reached(self, version: int, sequence: int, deadline: float) -> bool:
        while self.applied(version) < sequence:
            if time.perf_counter() > deadline:
                return False
            await asyncio.sleep(0)
        return True

    async def _free(self) -> None:
        await self.go.wait()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _commit(self, operation: Operation) -> int:
        number = len(self.operations) + 1
        done = Operation(number, operation.id, operation.kind, operation.body, operation.source_version, at=1.8e9 + number)
        self.operations.append(done)
        self.latest[operation.id] = done
        return number

    def _unknown(self, body: ItemBody) -> tuple[str, ...]:
        return tuple(item for item in body.like if item not in self.trained and item not in self.latest)


class FakeCatalogues:
    """Of a models folder."""

    def __init__(self, **catalogues: FakeCatalogue) -> None:
        self.catalogues = catalogues

    def of(self, model: str) -> FakeCatalogue:
        if model not in self.catalogues:
            raise NotFound(f"No model {model!r}.")
        return self.catalogues[model]
