"""Decides a group of writes, inside the transaction that stores them.

They are decided in order; no id comes twice in a group. Knows the journal's transaction and the versions. Does not know threads or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from espalier.errors import EspalierError, JournalError, NoRoom, spelled
from espalier.live.items import characters_of
from espalier.live.journal import Transaction
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import Placement
from espalier.live.state import MAX_HANDLES
from espalier.placement.evidence import has_other_text, is_retitled, no_evidence, own_fields
from espalier.placement.placer import Candidates, needs_placement, trained_with
from espalier.placement.slots import Slots

from ..entity_tags import Condition
from ..errors import CatalogueFull, NotFound, NotReady
from ..live.catalogue_types import ALWAYS, NOWHERE, Delete, ItemOutcome, OutcomeKind, Put, tag_of
from ..live.live_version import LiveVersion

MAX_CHARACTERS = 1 << 28
"""Most characters of all fields of live and changed items of one model. Every worker holds them in memory."""
MAX_NUMBERS = 1 << 27
"""Most numbers in the rows of all live leaves of a version. Rows of linear models may have a weight for each feature of their evidence."""


class EvidenceNeeded(EspalierError):
    """A write must be placed by the stored evidence of its item. operation: the item's, with everything known of it."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(f"{spelled(operation.id)} must be placed by operation {operation.sequence}")
        self.operation = operation


@dataclass(frozen=True, eq=False)
class Write:
    """One write that waits for the journal's thread.

    outcome     set when all workers have applied it
    candidates  of the item, by version; empty for a request without new evidence
    unknown     ids of its evidence that the catalogue does not have
    evidence    the stored body by which it is placed; None: the request's body
    attempts    how often it was placed by stored evidence
    """

    request: Put | Delete
    condition: Condition = ALWAYS
    outcome: Future[ItemOutcome] = field(default_factory=Future)
    candidates: Mapping[int, Candidates] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    evidence: ItemBody | None = None
    attempts: int = 0


class Refusal(NamedTuple):
    """A write that is not taken."""

    write: Write
    error: Exception


@dataclass(frozen=True, eq=False)
class Decision:
    """A write that is stored, or changes nothing.

    operation   the appended one; None if nothing changes
    placements  by the fingerprint of a version
    """

    write: Write
    outcome: OutcomeKind
    sequence: int
    operation: Operation | None = None
    placements: Mapping[int, tuple[Placement, ...]] = field(default_factory=dict)


class Group:
    """Decides the writes of one transaction.

    versions  those that have all operations, by number: what another one would place might take a slot that it does not know of
    default   its columns and items decide; None if no version serves. If it is not among `versions`, only deletes are taken
    held      the last operation that a version on disk holds, perhaps of an earlier journal: a new journal continues behind it
    capacity  most live items
    now       seconds since 1970
    """

    def __init__(
        self,
        transaction: Transaction,
        versions: Mapping[int, LiveVersion],
        default: LiveVersion | None,
        held: int,
        capacity: int,
        now: float,
    ) -> None:
        self._transaction, self._versions, self._default, self._capacity, self._now = transaction, versions, default, capacity, now
        self._slots = {version.fingerprint: Slots(version.state) for version in versions.values()}
        self._characters = self._numbers = 0  # upper bounds of what the group's items add in fields and rows
        self._added_leaves = 0  # live leaves that the group adds to the default version
        self._first_sequence = 1 + held
        self._new_ids: set[str] = set()  # ids that need a handle
        self._stored: dict[str, Operation] = {}

    def decide(self, writes: Sequence[Write]) -> list[Decision | Refusal]:
        """The decision on each write, or why it is refused. Appends the operations."""
        ids = [write.request.id for write in writes]
        self._stored = self._transaction.read(ids)
        for version in self._versions.values():
            version.bundle.items.rows_of(ids)  # fills its cache; one call is faster than one for each id
        results: list[Decision | Refusal] = []
        for write in writes:
            try:
                results.append(self._put(write, write.request) if isinstance(write.request, Put) else self._delete(write, write.request))
            except JournalError:  # the whole transaction has failed
                raise
            except NoRoom as error:
                results.append(Refusal(write, CatalogueFull(str(error))))
            except EspalierError as error:
                results.append(Refusal(write, error.with_traceback(None)))  # which holds the write, as the write will hold the error
        return results

    def _put(self, write: Write, put: Put) -> Decision:
        if self._default is not None and self._default.version not in self._versions:
            raise NotReady(f"Version {self._default.version} does not have all live items yet: shards did not say where they go.")
        stored, exists = self._stored_state(put.id)
        self._check(write, stored, exists)
        if stored is not None and _is_stale(put.source_version, stored):
            return Decision(write, "stale", stored.sequence)
        body, source_version = put.body, _stored_with(put.source_version, stored)
        if stored is not None and stored.kind == "put":
            keeps_expiry = exists and not put.lifts_expiry  # an expired item comes back without its expiry
            earlier = stored.with_evidence_from
            body = body.over(earlier if keeps_expiry else replace(earlier, valid_until=None))
        operation = Operation(0, put.id, "put", body, source_version, self._now)
        if stored is not None and exists and operation.same_state(stored) and self._has(stored):
            return Decision(write, "unchanged", stored.sequence)
        placements: dict[int, tuple[Placement, ...]] = {}
        try:
            for version in self._versions.values():
                placements[version.fingerprint] = self._placements(write, operation, stored, version)
            is_new_id = self._check_handles(operation.id)
            characters, numbers, leaves = self._checked_room(operation, placements)
            decision = self._append(write, operation, "updated" if exists else "inserted", placements)
        except EspalierError:
            for fingerprint, promised in placements.items():
                self._slots[fingerprint].give_back(promised)
            raise
        self._characters, self._numbers = self._characters + characters, self._numbers + numbers
        self._added_leaves += leaves
        if is_new_id:
            self._new_ids.add(operation.id)
        return decision

    def _delete(self, write: Write, delete: Delete) -> Decision:
        stored, exists = self._stored_state(delete.id)
        self._check(write, stored, exists)
        if stored is None and not exists:
            raise NotFound(f"There is no item {spelled(delete.id)}.")
        if stored is not None and _is_stale(delete.source_version, stored):
            return Decision(write, "stale", stored.sequence)
        source_version = _stored_with(delete.source_version, stored)
        if stored is not None and stored.kind == "delete" and not exists and source_version == stored.source_version:
            return Decision(write, "unchanged", stored.sequence)
        decision = self._append(write, Operation(0, delete.id, "delete", source_version=source_version, at=self._now), "deleted", {})
        if self._default is not None and self._default.state.live_leaf_of(delete.id) is not None:
            self._added_leaves -= 1
        return decision

    def _stored_state(self, item_id: str) -> tuple[Operation | None, bool]:
        """The last operation of an id, and whether the item exists now. A delete counts if the default version lacks the item, too."""
        stored = self._stored.get(item_id)
        if stored is None:
            return None, self._default is not None and self._default.is_trained(item_id)
        if stored.kind == "delete":
            return stored, self._default is not None and not self._default.is_as_stored(stored)
        return stored, not stored.has_expired(self._now)

    def _has(self, stored: Operation) -> bool:
        """Whether the default version has an item that exists. One made while the item was deleted may lack its evidence."""
        if self._default is None or self._default.state.live_leaf_of(stored.id) is not None:
            return True
        return self._default.is_trained(stored.id) and self._default.is_as_stored(stored)

    def _check(self, write: Write, stored: Operation | None, exists: bool) -> None:
        if write.condition.given:
            sequence = NOWHERE if stored is None else stored.sequence
            write.condition.check(tag_of(sequence) if exists else None, "item")

    def _placements(self, write: Write, operation: Operation, stored: Operation | None, version: LiveVersion) -> tuple[Placement, ...]:
        """The item's leaves in a version; empty if it keeps its trained row, or if its row is not known yet."""
        slots, item_id = self._slots[version.fingerprint], operation.id
        candidates = write.candidates.get(version.version)
        if version.is_as_trained(operation):
            return ()
        if stored is not None and _is_known(operation, stored, version):
            return self._kept(item_id, stored, version)
        if candidates is not None:
            evidence = write.evidence or write.request.body
            if operation.body.has_evidence and not evidence.has_evidence:
                raise EvidenceNeeded(operation)  # it was placed by its new fields alone, but more evidence is stored
            if operation.body.count != evidence.count:
                raise EvidenceNeeded(operation)  # its row depends on the stored count
            if stored is not None and stored.has_expired(self._now) and operation.body.fields is not None and evidence.fields is None:
                raise EvidenceNeeded(operation)  # it was placed without the fields that it had when it expired
            return slots.place(item_id, candidates)
        if not write.candidates and stored is not None and stored.kind == "put":
            by_fields = version.takes_fields and bool(operation.body.fields) and not version.is_trained(item_id)
            if write.evidence is None and operation.body.count != stored.body.count and (operation.body.has_evidence or by_fields):
                raise EvidenceNeeded(operation)
            if write.evidence is None and _needs_row_of_text(operation, stored, version):
                raise EvidenceNeeded(operation)  # another write changed its text meanwhile, or this one changes it beside other evidence
            if kept := self._kept(item_id, stored, version):
                return kept
        if version is self._default and not version.is_trained(item_id):
            if operation.body.has_evidence and write.evidence is None:
                raise EvidenceNeeded(operation)
            raise no_evidence(operation.body, version.bundle.manifest.query, version.takes_fields)
        return ()

    def _kept(self, item_id: str, stored: Operation, version: LiveVersion) -> tuple[Placement, ...]:
        """The leaves that the item has in a version; none if it has only its trained row, or if the journal has damaged ones."""
        placements = self._transaction.placements(version.fingerprint, [stored.sequence]).get(stored.sequence, ())
        return self._slots[version.fingerprint].keep(item_id, placements) if version.state.has_parents(placements) else ()

    def _checked_room(self, operation: Operation, placements: Mapping[int, tuple[Placement, ...]]) -> tuple[int, int, int]:
        """The characters, numbers and live leaves that are added to the default version. Raises CatalogueFull if it has no room."""
        if self._default is None:
            return 0, 0, 0
        state, characters = self._default.state, characters_of(operation.body.fields)
        if characters and state.table.characters + self._characters + characters > MAX_CHARACTERS:
            full = f"The fields of live items have {MAX_CHARACTERS} characters together; fold them into a version. Deletes are taken."
            raise CatalogueFull(full)
        numbers = sum(placement.row.numbers for placement in placements.get(self._default.fingerprint, ()))
        if numbers and state.numbers + self._numbers + numbers > MAX_NUMBERS:
            raise CatalogueFull(f"The rows of live items have {MAX_NUMBERS} numbers together; fold them into a version. Deletes are taken.")
        had_leaf, has_leaf = state.live_leaf_of(operation.id) is not None, bool(placements.get(self._default.fingerprint))
        leaves = has_leaf - had_leaf if has_leaf or self._default.is_trained(operation.id) else 0
        if leaves > 0 and state.live_items + self._added_leaves >= self._capacity:
            raise CatalogueFull(f"There are {self._capacity} live items (ESPALIER_MAX_LIVE); fold them into a version. Deletes are taken.")
        return characters, numbers, leaves

    def _append(
        self, write: Write, operation: Operation, outcome: OutcomeKind, placements: Mapping[int, tuple[Placement, ...]]
    ) -> Decision:
        if self._transaction.last_sequence() + 1 < self._first_sequence:
            operation = replace(operation, sequence=self._first_sequence)
        stored = self._transaction.append(operation, placements)
        return Decision(write, outcome, stored.sequence, stored, placements)

    def _check_handles(self, item_id: str) -> bool:
        """Whether an id is new to a version of this process. Raises CatalogueFull if such a version has no handle left."""
        tables = [table for version in self._versions.values() if (table := version.state.table).entry(item_id) is None]
        if any(table.handles + len(self._new_ids) >= MAX_HANDLES for table in tables):
            full = f"{MAX_HANDLES} ids were put or deleted since the version was trained; fold them into a version. Deletes are taken."
            raise CatalogueFull(full)
        return bool(tables)


def _is_known(operation: Operation, stored: Operation, version: LiveVersion) -> bool:
    """Whether a put has no new evidence, and the version was made with the stored one, so that its row of the item knows more.

    A row from a placement has not learned a popularity: a new count counts there.
    """
    if operation.body.evidence_from is None or needs_placement(version.bundle, operation):
        return False
    return trained_with(version.bundle, operation) or operation.body.count == stored.body.count


def _needs_row_of_text(operation: Operation, stored: Operation, version: LiveVersion) -> bool:
    """Whether an item has another own text than before, or none, and can be placed by it or by other evidence."""
    bundle, before = version.bundle, stored.body.fields
    if before is None:
        row = bundle.items.row_of(operation.id)
        before = own_fields(bundle, row) if row >= 0 else {}
    fields = operation.body.fields
    return has_other_text(bundle, before, fields) and (operation.body.has_evidence or is_retitled(bundle, before, fields))


def _stored_with(source_version: int | None, stored: Operation | None) -> int | None:
    """The source version of a write that is not stale: its own, or else the stored one, also that of a deleted item."""
    return stored.source_version if source_version is None and stored is not None else source_version


def _is_stale(source_version: int | None, stored: Operation) -> bool:
    return source_version is not None and stored.source_version is not None and source_version < stored.source_version
