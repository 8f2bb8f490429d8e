"""Where the items of a group of writes may go in every version that serves: found before the journal is locked, many items at a time.

Knows writes and versions. Does not know which slots are free (slots.py), nor the journal.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from espalier.errors import EspalierError, InvalidInput
from espalier.live.operations import ItemBody
from espalier.placement.placer import Candidates

from ..errors import NotReady
from ..live.catalogue_types import Delete, Put
from ..live.group import Write
from ..live.live_version import FIELDS, LiveVersion

log = logging.getLogger(__name__)

PLACED_AT_ONCE = 64
"""Items that one call places. Its searches are short jobs between the engine's calls, however many there are."""

Failed = tuple[Write, Exception]


def placed(writes: Sequence[Write], versions: Collection[LiveVersion], default: LiveVersion | None) -> tuple[list[Write], list[Failed]]:
    """The writes with where their items may go, and what they named that the default version does not know; those that cannot be taken."""
    if default is None:
        return [], [(write, NotReady("No version of the model takes writes now.")) for write in writes]
    found: list[Write] = []
    failed: list[Failed] = []
    for begin in range(0, len(writes), PLACED_AT_ONCE):
        for write, candidates in _candidates(writes[begin : begin + PLACED_AT_ONCE], versions, default):
            if isinstance(candidates, InvalidInput) and _says_a_count_alone(write):
                found.append(replace(write, candidates={}))  # what its item's evidence named is gone: it stays as it is
            elif isinstance(candidates, Exception):
                failed.append((write, candidates))
            else:
                found.append(replace(write, candidates=candidates, unknown=_unknown(write.what, default)))
    return found, failed


def named_by(body: ItemBody) -> dict[str, None]:
    """The ids of items that place an item, each once, in their order."""
    histories = [event for event in body.events if isinstance(event, list | tuple)]
    return dict.fromkeys([*body.like, *(item for history in histories for item in history if isinstance(item, str))])


def _candidates(
    writes: Sequence[Write], versions: Collection[LiveVersion], default: LiveVersion
) -> list[tuple[Write, dict[int, Candidates] | Exception]]:
    """For each write where its item may go, by version, or why nobody can say."""
    items = {place: (write.what.id, body) for place, write in enumerate(writes) if (body := _evidence(write, default)) is not None}
    found: dict[int, dict[int, Candidates] | Exception] = {place: {} for place in range(len(writes))}
    try:
        for version in versions if items else ():
            for place, own in _where(version, items, is_default=version is default).items():
                of_write = found[place]
                if isinstance(of_write, Exception):
                    continue
                if not isinstance(own, EspalierError):
                    of_write[version.version] = own
                elif version is default:
                    found[place] = own
    except Exception as error:
        if len(writes) == 1:
            if not isinstance(error, EspalierError):
                log.exception("%r cannot be placed", writes[0].what.id)
            return [(writes[0], error)]
        return [one for write in writes for one in _candidates([write], versions, default)]  # so that it fails nobody else's
    return list(zip(writes, found.values(), strict=True))


def _where(version: LiveVersion, items: Mapping[int, tuple[str, ItemBody]], is_default: bool) -> Mapping[int, Candidates | EspalierError]:
    """Where items may go in a version, none where it is being dropped."""
    try:
        return dict(zip(items, version.where(list(items.values())), strict=True))
    except NotReady:
        if is_default:
            raise
        return {}


def _evidence(write: Write, default: LiveVersion) -> ItemBody | None:
    """What an item is placed by; None where nothing new says where it belongs."""
    body = write.evidence or write.what.body
    if write.evidence is not None or body.has_evidence:
        return body
    if not default.takes_fields or not body.fields:
        return None
    where = default.placed(write.what.id)
    return body if where is None or where.by == FIELDS else None


def _says_a_count_alone(write: Write) -> bool:
    """Whether a write comes again to be placed by what is stored, and names how popular its item is and neither evidence nor fields."""
    body = write.what.body
    return write.evidence is not None and body.count is not None and not body.has_evidence and body.fields is None


def _unknown(what: Put | Delete, default: LiveVersion) -> tuple[str, ...]:
    ids = list(named_by(what.body))
    if not ids:
        return ()
    return tuple(item_id for item_id, row in zip(ids, default.items.rows_of(ids).tolist(), strict=True) if row < 0)
