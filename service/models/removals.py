"""Edits of a model's list of removed items by several clients: entity tags and limits.

Knows lists of item ids. Does not know where a list is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from espalier.errors import InvalidInput
from espalier.items import MAX_ID_BYTES

Ids = tuple[str, ...]

MAX_LIST_BYTES = 32 << 20
"""Most UTF-8 bytes of all ids of a list. JSON takes at most six times as much, which is below the largest file that is read."""


def etag(ids: Sequence[str]) -> str:
    """The strong entity tag of a list: the same for the same ids in the same order."""
    digest = hashlib.sha256()
    for item_id in ids:
        encoded = item_id.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return f'"{digest.hexdigest()[:32]}"'


def summary(ids: Sequence[str]) -> dict[str, Any]:
    """What the audit log says of a list."""
    return {"ids": len(ids), "etag": etag(ids).strip('"')}


def check_list(ids: Sequence[str], max_ids: int) -> Ids:
    """The ids of a whole list, without duplicates. Raises InvalidInput for an id that no item can have, and for too many ids."""
    for i, item_id in enumerate(ids):
        check_id(item_id, f"ids[{i}]")
    unique_ids = tuple(dict.fromkeys(ids))
    _check_size(unique_ids, max_ids, "ids")
    return unique_ids


def check_id(item_id: str, field: str) -> None:
    """Raise InvalidInput for an id that no item can have."""
    if not 1 <= len(item_id.encode()) <= MAX_ID_BYTES:
        raise InvalidInput(field, item_id, f"an item id of 1 to {MAX_ID_BYTES} bytes")


def with_id(ids: Ids, item_id: str, max_ids: int) -> Ids | None:
    """The list with one more id; None if it is in the list already. Raises InvalidInput if the list is full."""
    if item_id in ids:
        return None
    longer = (*ids, item_id)
    _check_size(longer, max_ids, "id")
    return longer


def without_id(ids: Ids, item_id: str) -> Ids | None:
    """The list without an id; None if it is not in the list."""
    return tuple(other for other in ids if other != item_id) if item_id in ids else None


def _check_size(ids: Ids, max_ids: int, field: str) -> None:
    if len(ids) > max_ids:
        raise InvalidInput(field, f"a list of {len(ids)} ids", f"at most {max_ids} (ESPALIER_MAX_REMOVED)")
    size = sum(len(item_id.encode()) for item_id in ids)
    if size > MAX_LIST_BYTES:
        raise InvalidInput(field, f"a list of {size} bytes", f"ids of at most {MAX_LIST_BYTES} bytes together")
