"""Words of a text, as the vectoriser has them.

Knows texts. Does not know features.
"""

from __future__ import annotations

import re

from espalier.text.vectoriser import ALONE_RANGES, normalise

_ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in ALONE_RANGES)
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")


def words_of(text: str) -> list[str]:
    """The words, normalised; each Chinese or Japanese character is one."""
    return _WORD.findall(normalise(text))
