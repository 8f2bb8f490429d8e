"""Ids of items in paths: percent-encoded, of any characters. Knows paths, not items."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import unquote_to_bytes

from fastapi import Path
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Scope

from espalier.errors import InvalidInput
from service.models.removals import check_id

ItemId = Annotated[str, Path(alias="id", description="Id of an item, percent-encoded; it may hold `/`.")]


class _ItemIds(Convertor[str]):
    """The rest of a path, whatever is in it; the framework's own stops at a line break."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("item_id", _ItemIds())


def check_path_id(scope: Scope, item_id: str) -> None:
    """Raise InvalidInput for an id that no item can have, or that is not UTF-8: the server has replaced its invalid bytes."""
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        raise InvalidInput("id", item_id, "an item id in UTF-8, percent-encoded") from None
    check_id(item_id, "id")
