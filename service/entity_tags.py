"""Entity tags and conditional requests (RFC 9110, 8.8.3 and 13.1). Knows headers, not the objects that have the tags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import PreconditionFailed

_TAG = re.compile(r'(?:W/)?"[^"]*"')


def matches(header: str, tag: str) -> bool:
    """Whether an If-None-Match header names this entity tag, or is `*`."""
    return header.strip() == "*" or tag in [listed_tag.removeprefix("W/") for listed_tag in _TAG.findall(header)]


@dataclass(frozen=True)
class Condition:
    """The headers If-Match and If-None-Match of a change; None if the request does not have the header."""

    if_match: str | None = None
    if_none_match: str | None = None

    @property
    def given(self) -> bool:
        return self.if_match is not None or self.if_none_match is not None

    def check(self, tag: str | None, noun: str) -> None:
        """Raise PreconditionFailed unless the condition holds. A weak tag never matches If-Match.

        tag   current tag of the object to change; None if there is no such object
        noun  noun of the object, for the message
        """
        if self.if_match is not None and (tag is None or (self.if_match.strip() != "*" and tag not in _TAG.findall(self.if_match))):
            raise PreconditionFailed(f"The {noun} does not match If-Match: read it again and repeat the change.", tag)
        if self.if_none_match is not None and tag is not None and matches(self.if_none_match, tag):
            raise PreconditionFailed(f"The {noun} matches If-None-Match.", tag)
