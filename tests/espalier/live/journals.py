"""Operations and placements for tests of journals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement


def put(item: str, number: int = 0) -> Operation:
    return Operation(0, item, "put", ItemBody({"number": number}, events=(["a", "b"],)))


def placed(tree: int = 0, parent: int = 3, slot: int = 5, size: int = 4) -> Placement:
    return Placement(tree, parent, slot, LiveRow(np.arange(size, dtype=np.float32), memory_to=(("a", 0.5),)))


def appended(journal: Journal, operations: Sequence[Operation], version: int | None = None) -> list[int]:
    """Append operations in one commit; with a version they are placed in it as well. Returns their sequences."""
    with journal.writing() as transaction:
        sequences = [transaction.append(operation).sequence for operation in operations]
        if version is not None:
            transaction.store_placements(version, {sequence: [placed(slot=sequence)] for sequence in sequences})
    return sequences


def numbers(operations: Sequence[Operation]) -> list[object]:
    """The field `number` of each operation."""
    return [(operation.body.fields or {})["number"] for operation in operations]
