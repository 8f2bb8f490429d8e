"""Words of a text, as the vectoriser has them, and what a word of a column says.

Knows texts. Does not know features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from espalier.text.vectoriser import ALONE_RANGES, normalise

_ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in ALONE_RANGES)
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
SHORT = 8
"""Words of a column that weighs 1, at most."""
COUNTED = 10_000
"""Texts whose words are counted, evenly spread: of a million it would take seconds."""


def words_of(text: str) -> list[str]:
    """The words, normalised; each Chinese or Japanese character is one."""
    return _WORD.findall(normalise(text))


def counted_rows(items: int) -> range:
    """The items whose texts say how long those of a column are."""
    return range(0, items, max(1, -(-items // COUNTED)))


def column_weight(texts: Sequence[str]) -> float:
    """√(SHORT / words), at most 1, of the mean words of the texts that are not empty. texts: of `counted_rows`."""
    counts = [len(words_of(text)) for text in texts if text]
    return min(1.0, (SHORT * len(counts) / max(1, sum(counts))) ** 0.5) if counts else 1.0
