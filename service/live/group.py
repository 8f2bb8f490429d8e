"""What becomes of a group of writes, decided inside the transaction that stores them.

Each write is looked at after those before it, and no id comes twice in a group. Knows
the journal's transaction and the versions. Does not know threads or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from espalier.errors import EspalierError, InvalidInput, JournalError
from espalier.live.items import characters_of
from espalier.live.journal import Transaction
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import Placement
from espalier.live.state import MAX_HANDLES
from espalier.placement.placer import Candidates

from ..entity_tags import Condition
from ..errors import CatalogueFull, ItemNotFound
from ..live.catalogue_types import ALWAYS, NOWHERE, Delete, Outcome, OutcomeKind, Put, tag_of
from ..live.live_version import LiveVersion
from ..live.slots import Slots

MAX_CHARACTERS = 1 << 28
"""Characters of all fields of live and changed items of one model: every worker holds them."""
MAX_NUMBERS = 1 << 27
"""Numbers of the rows of all live leaves of one version: rows of linear models may have a weight for every feature of their evidence."""
EVIDENCE = "`events`, `like` or `text`: the item is new, and nothing says where it belongs"


class EvidenceNeeded(EspalierError):
    """A write must be placed by what is stored of its item, because its place was given up. operation: with all that is known of it."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(f"{operation.id!r} must be placed by operation {operation.sequence}")
        self.operation = operation


@dataclass(frozen=True, eq=False)
class Write:
    """One write that waits for the journal's thread.

    outcome     set when all workers answer by it
    candidates  by version: where the item may go; empty where nothing new says so
    unknown     ids of its evidence that the catalogue does not have
    evidence    what it is placed by in place of its own body
    attempts    how often it was placed by that
    """

    what: Put | Delete
    condition: Condition = ALWAYS
    outcome: Future[Outcome] = field(default_factory=Future)
    candidates: Mapping[int, Candidates] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    evidence: ItemBody | None = None
    attempts: int = 0


@dataclass(frozen=True, eq=False)
class Decided:
    """A write that is stored, or need not be.

    operation   that was appended; None where nothing changes
    placements  by version
    """

    write: Write
    outcome: OutcomeKind
    sequence: int
    operation: Operation | None = None
    placements: Mapping[int, tuple[Placement, ...]] = field(default_factory=dict)


class Group:
    """Decides the writes of one transaction.

    versions  those that serve, by number; default: the one whose columns and items decide, None where none serves
    most      live items
    now       seconds since 1970
    """

    def __init__(
        self, transaction: Transaction, versions: Mapping[int, LiveVersion], default: LiveVersion | None, most: int, now: float
    ) -> None:
        self._transaction, self._versions, self._default, self._most, self._now = transaction, versions, default, most, now
        self._slots = {number: Slots(version.state) for number, version in versions.items()}
        self._characters = self._numbers = 0  # that fields and rows of the group's items may add
        self._new = 0  # live leaves that the default version has more since the group began
        # the first operation of a new journal beside a version that holds operations of an earlier one
        self._first = 1 + max((version.through for version in versions.values()), default=0)
        self._unseen: set[str] = set()  # ids that need a handle
        self._stored: dict[str, Operation] = {}

    def decide(self, writes: Sequence[Write]) -> list[Decided | tuple[Write, EspalierError]]:
        """What becomes of each write: an operation is appended, nothing changes, or an error."""
        ids = [write.what.id for write in writes]
        self._stored = self._transaction.read(ids)
        for version in self._versions.values():
            version.bundle.items.rows_of(ids)  # which it remembers; one by one takes longer
        found: list[Decided | tuple[Write, EspalierError]] = []
        for write in writes:
            try:
                found.append(self._put(write, write.what) if isinstance(write.what, Put) else self._delete(write, write.what))
            except JournalError:  # the whole transaction has failed
                raise
            except EspalierError as error:
                found.append((write, error))
        return found

    def _put(self, write: Write, put: Put) -> Decided:
        stored, exists = self._now_stored(put.id)
        self._check(write, stored, exists)
        if stored is not None and _is_stale(put.source_version, stored):
            return Decided(write, "stale", stored.sequence)
        body, source_version = put.body, put.source_version
        if stored is not None and stored.kind == "put":
            is_kept = exists and not put.lifts_expiry  # an item whose time has passed comes back without it
            body = body.over(stored.body if is_kept else replace(stored.body, valid_until=None))
            source_version = stored.source_version if source_version is None else source_version
        operation = Operation(0, put.id, "put", body, source_version, self._now)
        if stored is not None and exists and operation.same_state(stored):
            return Decided(write, "unchanged", stored.sequence)
        placements: dict[int, tuple[Placement, ...]] = {}
        try:
            for number, version in self._versions.items():
                placements[number] = self._placed(write, operation, stored, version)
            is_unseen = self._checked_handle(operation.id)
            characters, numbers, leaves = self._checked_room(operation, placements)
            decided = self._append(write, operation, "updated" if exists else "inserted", placements)
        except EspalierError:
            for number, own in placements.items():
                self._slots[number].give_back(own)
            raise
        self._characters, self._numbers, self._new = self._characters + characters, self._numbers + numbers, self._new + leaves
        if is_unseen:
            self._unseen.add(operation.id)
        return decided

    def _delete(self, write: Write, delete: Delete) -> Decided:
        stored, exists = self._now_stored(delete.id)
        self._check(write, stored, exists)
        if stored is None and not exists:
            raise ItemNotFound(f"There is no item {delete.id!r}.")
        if stored is not None and _is_stale(delete.source_version, stored):
            return Decided(write, "stale", stored.sequence)
        if stored is not None and not exists:
            return Decided(write, "unchanged", stored.sequence)
        kept = stored.source_version if stored is not None and delete.source_version is None else delete.source_version
        decided = self._append(write, Operation(0, delete.id, "delete", source_version=kept, at=self._now), "deleted", {})
        if self._default is not None and self._default.state.live_leaf_of(delete.id) is not None:
            self._new -= 1
        return decided

    def _now_stored(self, item_id: str) -> tuple[Operation | None, bool]:
        """The last operation of an id, and whether there is such an item now."""
        stored = self._stored.get(item_id)
        if stored is None:
            return None, self._default is not None and self._default.is_trained(item_id)
        return stored, stored.kind == "put" and not stored.has_expired(self._now)

    def _check(self, write: Write, stored: Operation | None, exists: bool) -> None:
        if write.condition.given:
            sequence = NOWHERE if stored is None else stored.sequence
            write.condition.check(tag_of(sequence) if exists else None, "item")

    def _placed(self, write: Write, operation: Operation, stored: Operation | None, version: LiveVersion) -> tuple[Placement, ...]:
        """The item's leaves in a version; none where its row is the trained one, or is not known yet."""
        slots, item_id = self._slots[version.version], operation.id
        candidates = write.candidates.get(version.version)
        if candidates is not None:
            evidence = write.evidence or write.what.body
            if operation.body.has_evidence and not evidence.has_evidence:
                raise EvidenceNeeded(operation)  # its new fields have placed it, but more is stored of it
            if operation.body.count != evidence.count:
                raise EvidenceNeeded(operation)  # its row says how popular it is, which is stored
            return slots.place(item_id, candidates)
        if not write.candidates and stored is not None and stored.kind == "put":
            by_fields = version.takes_fields and bool(operation.body.fields) and not version.is_trained(item_id)
            if write.evidence is None and operation.body.count != stored.body.count and (operation.body.has_evidence or by_fields):
                raise EvidenceNeeded(operation)
            before = self._transaction.placements(version.version, [stored.sequence]).get(stored.sequence)
            if before:
                return slots.keep(item_id, before)
        if version is self._default and not version.is_trained(item_id):
            if operation.body.has_evidence and write.evidence is None:
                raise EvidenceNeeded(operation)
            raise InvalidInput("item", item_id, EVIDENCE)
        return ()

    def _checked_room(self, operation: Operation, placements: Mapping[int, tuple[Placement, ...]]) -> tuple[int, int, int]:
        """The characters, numbers and live leaves that are added to the default version. Raises CatalogueFull where it has no room."""
        if self._default is None:
            return 0, 0, 0
        state, characters = self._default.state, characters_of(operation.body.fields)
        if characters and state.table.characters + self._characters + characters > MAX_CHARACTERS:
            full = f"The fields of live items have {MAX_CHARACTERS} characters together; fold them into a version. Deletes are taken."
            raise CatalogueFull(full)
        numbers = sum(placement.row.numbers for placement in placements.get(self._default.version, ()))
        if numbers and state.numbers + self._numbers + numbers > MAX_NUMBERS:
            raise CatalogueFull(f"The rows of live items have {MAX_NUMBERS} numbers together; fold them into a version. Deletes are taken.")
        leaves = int(bool(placements.get(self._default.version)) and state.live_leaf_of(operation.id) is None)
        if leaves and state.live_items + self._new >= self._most:
            raise CatalogueFull(f"There are {self._most} live items (ESPALIER_MAX_LIVE); fold them into a version. Deletes are taken.")
        return characters, numbers, leaves

    def _append(self, write: Write, operation: Operation, outcome: OutcomeKind, placements: Mapping[int, tuple[Placement, ...]]) -> Decided:
        if self._transaction.last_sequence() + 1 < self._first:
            operation = replace(operation, sequence=self._first)
        stored = self._transaction.append(operation, placements)
        return Decided(write, outcome, stored.sequence, stored, placements)

    def _checked_handle(self, item_id: str) -> bool:
        """Whether an id is new to a version of this process. Raises CatalogueFull where one has seen too many for another."""
        unseen = [table for version in self._versions.values() if (table := version.state.table).entry(item_id) is None]
        if any(table.handles + len(self._unseen) >= MAX_HANDLES for table in unseen):
            full = f"{MAX_HANDLES} ids were put or deleted since the version was trained; fold them into a version. Deletes are taken."
            raise CatalogueFull(full)
        return bool(unseen)


def _is_stale(source_version: int | None, stored: Operation) -> bool:
    return source_version is not None and stored.source_version is not None and source_version < stored.source_version
