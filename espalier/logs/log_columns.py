"""What the first line and the times of a log say: which columns it names, and whether the times have one unit.

Knows lines and numbers. Does not know files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from espalier.arrays import Array
from espalier.errors import InvalidData
from espalier.wording import option

Column = str | int
"""The name of a column, or its position."""
Unit = Literal["seconds", "milliseconds", "microseconds", "nanoseconds"]
NAMES = {
    "user": ("user", "customer", "client", "visitor", "account", "member", "reader", "reviewer", "session", "u"),
    "item": ("item", "product", "article", "movie", "book", "song", "track", "video", "business", "sku", "asin", "parentasin", "i"),
    "time": ("timestamp", "time", "datetime", "eventtime", "createdat", "created", "date", "ts", "unixtime", "unixreviewtime", "at", "t"),
    "query": ("query", "querytext", "searchquery", "searchterm", "search", "keywords", "keyword"),
}
"""Names of columns by role, the surest first: lower case, only letters and digits, no `id` at the end."""
TIME = re.compile(r"\s*[0-9]{9,}([.,][0-9]+)?\s*")
"""A time since 1970, which no name of a column looks like."""
LAST_MICROSECOND = 2**53
"""In the year 2255. Later times would lose digits as floats, and are probably in another unit."""
EPOCHS: dict[Unit, tuple[int, int]] = {
    "seconds": (10**8, 10**10),
    "milliseconds": (10**11, 10**13),
    "microseconds": (10**14, LAST_MICROSECOND),
    "nanoseconds": (10**17, 1000 * LAST_MICROSECOND),
}
"""The accepted range of times since 1970 in each unit: 1973 to 2286, for the last two units to 2255."""
MOST_BAD = 0.05
"""Largest share of unreadable rows that count as damaged. With more of them, the log is being read in a wrong way."""


def word_of(name: object) -> str:
    """A column's name in the form of NAMES; "" for a position."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("id") if isinstance(name, str) else ""


def is_header(cells: Sequence[str], names: Collection[str] = ()) -> bool:
    """Whether a log's first line names its columns: a cell is one of some names, or a usual name in a line without times."""
    if any(position_of(cells, name) is not None for name in names):
        return True
    return any(word_of(cell) in words for cell in cells for words in NAMES.values()) and not any(TIME.fullmatch(cell) for cell in cells)


def position_of(names: Sequence[str], column: str) -> int | None:
    """The position of the column with this name, else of the only one that differs just in case and outer blanks; else None."""
    for normal in (str, lambda name: name.strip().casefold()):
        positions = [position for position, name in enumerate(names) if normal(name) == normal(column)]
        if positions:
            return positions[0] if len(positions) == 1 else None
    return None


def check_unit(field: str, stamps_E: Array) -> None:
    """Raises InvalidData if nearly all numbers, zeros aside, are times of the EPOCHS, but of several units."""
    first_of_unit, known = {}, 0
    for unit, (least, last) in EPOCHS.items():
        is_inside_E = (least <= stamps_E) & (stamps_E < last)
        if is_inside_E.any():
            first_of_unit[unit] = stamps_E[is_inside_E.argmax()]
            known += int(np.count_nonzero(is_inside_E))
    if len(first_of_unit) > 1 and known >= (1 - MOST_BAD) * np.count_nonzero(stamps_E):
        examples = ", ".join(f"{stamp:.0f} ({unit})" for unit, stamp in first_of_unit.items())
        raise InvalidData(field, examples, f"times in one unit: convert the others, {unless_in_order()}")


def unless_in_order() -> str:
    """The end of messages about times."""
    return f"or say {option('time', 'file')} if the rows are in order"
