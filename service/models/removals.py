"""Edits of a model's standing exclusions by several clients: entity tags, conditions and limits.

Knows lists of item ids. Does not know where a list is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from espalier.errors import InvalidInput
from espalier.items import MAX_ID_BYTES

from ..entity_tags import Condition

Ids = tuple[str, ...]

MAX_LIST_BYTES = 32 << 20
"""UTF-8 bytes of all ids of a list. As JSON they take at most six times as much, which is below the largest file that is read."""


def etag(ids: Sequence[str]) -> str:
    """The strong entity tag of a list: the same for the same ids in the same order."""
    digest = hashlib.sha256()
    for item_id in ids:
        encoded = item_id.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return f'"{digest.hexdigest()[:32]}"'


def summary(ids: Sequence[str]) -> dict[str, Any]:
    """A list in the audit log."""
    return {"ids": len(ids), "etag": etag(ids).strip('"')}


def check_condition(condition: Condition, ids: Sequence[str]) -> None:
    """Raise PreconditionFailed unless the condition holds for the list. There always is a list; it may be empty."""
    if condition.given:
        condition.check(etag(ids), "list")


def check_list(ids: Sequence[str], most: int) -> Ids:
    """The ids of a whole list, each once. Raises InvalidInput for one that no item can have, or too many of them."""
    for i, item_id in enumerate(ids):
        check_id(item_id, f"ids[{i}]")
    listed = tuple(dict.fromkeys(ids))
    _check_size(listed, most, "ids")
    return listed


def check_id(item_id: str, field: str) -> None:
    """Raise InvalidInput for an id that no item can have."""
    if not 1 <= len(item_id.encode()) <= MAX_ID_BYTES:
        raise InvalidInput(field, item_id, f"an item id of 1 to {MAX_ID_BYTES} bytes")


def with_id(ids: Ids, item_id: str, most: int) -> Ids | None:
    """The list with one more id; None where it is there already. Raises InvalidInput where the list is full."""
    if item_id in ids:
        return None
    longer = (*ids, item_id)
    _check_size(longer, most, "id")
    return longer


def without_id(ids: Ids, item_id: str) -> Ids | None:
    """The list without an id; None where it is not there."""
    return tuple(other for other in ids if other != item_id) if item_id in ids else None


def _check_size(ids: Ids, most: int, field: str) -> None:
    if len(ids) > most:
        raise InvalidInput(field, f"a list of {len(ids)} ids", f"at most {most} (ESPALIER_MAX_REMOVED)")
    size = sum(len(item_id.encode()) for item_id in ids)
    if size > MAX_LIST_BYTES:
        raise InvalidInput(field, f"a list of {size} bytes", f"ids of at most {MAX_LIST_BYTES} bytes together")
