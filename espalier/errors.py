"""Every error that Espalier raises on purpose.

    EspalierError
    ├── InvalidInput          a value from outside is wrong; says the field, the value and what was expected
    │   ├── InvalidQuery      a query or a search parameter
    │   ├── InvalidMessage    a message between a router and a shard
    │   ├── InvalidConfig     a training configuration or a command-line option
    │   └── InvalidData       a log, an item table or another data file
    ├── InvalidTree           arrays that are not a tree
    ├── BundleError           a bundle on disk
    │   ├── BundleNotFound    nothing there, or a part is missing
    │   ├── BundleExists      a version is never overwritten
    │   ├── BundleCorrupt     a checksum, a size, a shape or a golden query does not match
    │   └── UnsupportedSchema written by another generation of this software
    ├── JournalError          the journal of a live catalogue
    │   ├── JournalCorrupt    damaged, or no journal
    │   ├── UnsupportedJournal  written by another generation of this software
    │   ├── JournalFull       the disk or a quota has no room for the commit; nothing of it was kept
    │   ├── JournalReadOnly   the folder or the file cannot be written to
    │   └── JournalBusy       another process held the lock for too long
    ├── StoreError            models on object storage
    │   ├── StoreUnavailable  not reachable, or it refuses what was asked
    │   ├── StoreMissing      no such folder, model, version or blob
    │   ├── StoreConflict     the version is there with other content, or others change the same thing
    │   ├── StoreDamaged      what is stored is not what its manifest says
    │   └── CacheFull         the disk has no room for the version
    ├── UnsupportedGraph      an engine does not know an operator of a bundle's graphs; others may
    ├── NotCompiled           a compiled function was called with types that it was not compiled for, where nothing may compile
    └── DeviceUnavailable     the device or the engine that was asked for is not there

Nothing in this file knows about HTTP; the service maps these classes to status codes.
"""

from __future__ import annotations


class EspalierError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInput(EspalierError):
    """A value from outside is wrong.

    Attributes: `field` (where it was), `value` (what it was, shortened), `expected` (what would have been right).
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = _short(value)
        self.expected = expected
        super().__init__(f"{field}: got {self.value}, expected {expected}")


class InvalidQuery(InvalidInput):
    """A query or a search parameter."""


class InvalidMessage(InvalidInput):
    """A message between a router and a shard."""


class InvalidConfig(InvalidInput):
    """A training configuration or a command-line option."""


class InvalidData(InvalidInput):
    """A log, an item table or another data file."""


class InvalidTree(EspalierError):
    """Arrays that do not describe a tree."""


class BundleError(EspalierError):
    """A bundle on disk."""


class BundleNotFound(BundleError):
    """Nothing there, or a part of it is missing."""


class BundleExists(BundleError):
    """The version is there already; a version is never overwritten."""


class BundleCorrupt(BundleError):
    """A checksum, a size, a shape or a golden query does not match."""


class UnsupportedSchema(BundleError):
    """The bundle was written by another generation of this software."""


class JournalError(EspalierError):
    """The journal of a live catalogue. After any of these nothing of the operation in progress is kept; reading goes on where it can."""


class JournalCorrupt(JournalError):
    """Damaged, or no journal."""


class UnsupportedJournal(JournalError):
    """The journal was written by another generation of this software."""


class JournalFull(JournalError):
    """The disk or a quota has no room for the commit."""


class JournalReadOnly(JournalError):
    """The folder or the file cannot be written to."""


class JournalBusy(JournalError):
    """Another process held the lock for too long."""


class StoreError(EspalierError):
    """Models on object storage. The text names the store by its URL, which holds no secrets."""


class StoreUnavailable(StoreError):
    """Not reachable, or it refuses what was asked."""


class StoreMissing(StoreError):
    """No such folder, model, version or blob."""


class StoreConflict(StoreError):
    """The version is there with other content, or others change the same thing."""


class StoreDamaged(StoreError):
    """What is stored is not what its manifest says, or no manifest at all."""


class CacheFull(StoreError):
    """The disk has no room for the version."""


class UnsupportedGraph(EspalierError):
    """An engine does not know an operator of a bundle's graphs, or a use of one; the message names it. Others may."""


class NotCompiled(EspalierError):
    """A compiled function was called with types that it was not compiled for, where nothing may compile."""


class DeviceUnavailable(EspalierError):
    """The device or the engine that was asked for is not there."""


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
