"""Finds the candidate parents of a group's items in every version that serves, before the journal is locked, many items at a time.

Knows writes and versions. Does not know which slots are free (group.py), nor the journal.
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
from ..live.group import Refusal, Write
from ..live.live_version import LiveVersion

log = logging.getLogger(__name__)

PLACED_AT_ONCE = 64
"""Items that one call places. Its searches run as short jobs between the engine's calls, however many there are."""


def with_candidates(
    writes: Sequence[Write], versions: Collection[LiveVersion], default: LiveVersion | None
) -> tuple[list[Write], list[Refusal]]:
    """The writes with their items' candidates and the ids that the default version does not know; and the writes that are refused."""
    if default is None:
        return [], [Refusal(write, NotReady("No version of the model takes writes now.")) for write in writes]
    placeable: list[Write] = []
    refusals: list[Refusal] = []
    unplaceable: NotReady | None = None  # nothing can be placed now: a shard does not answer, or the version is being dropped
    for begin in range(0, len(writes), PLACED_AT_ONCE):
        for write, candidates in _candidates(writes[begin : begin + PLACED_AT_ONCE], versions, default, unplaceable):
            unplaceable = candidates if isinstance(candidates, NotReady) else unplaceable
            if isinstance(candidates, InvalidInput) and _needs_no_place(write, default):
                placeable.append(replace(write, candidates={}))  # its row stays
            elif isinstance(candidates, Exception):
                refusals.append(Refusal(write, candidates))
            else:
                placeable.append(replace(write, candidates=candidates, unknown=_unknown(write.request, default)))
    return placeable, refusals


def named_by(body: ItemBody) -> dict[str, None]:
    """The item ids in the evidence of a body, each once, in their order."""
    histories = [event for event in body.events if isinstance(event, list | tuple)]
    return dict.fromkeys([*body.like, *(item for history in histories for item in history if isinstance(item, str))])


def _candidates(
    writes: Sequence[Write], versions: Collection[LiveVersion], default: LiveVersion, unplaceable: NotReady | None = None
) -> list[tuple[Write, dict[int, Candidates] | Exception]]:
    """For each write its item's candidates by version, or the error of the default version. unplaceable: that of an earlier call."""
    items = {i: (write.request.id, body) for i, write in enumerate(writes) if (body := _evidence(write, default)) is not None}
    results: dict[int, dict[int, Candidates] | Exception] = {i: {} for i in range(len(writes))}
    try:
        if unplaceable is not None:
            raise unplaceable
        for version in versions if items else ():
            for i, candidates in _in_version(version, items, is_default=version is default).items():
                by_version = results[i]
                if isinstance(by_version, Exception):
                    continue
                if not isinstance(candidates, EspalierError):
                    by_version[version.version] = candidates
                elif version is default:
                    results[i] = candidates
    except NotReady as error:
        results |= dict.fromkeys(items, error.with_traceback(None))  # which holds the writes, as they will hold the error
    except Exception as error:
        if len(writes) == 1:
            if not isinstance(error, EspalierError):
                log.exception("%r cannot be placed", writes[0].request.id)
            return [(writes[0], error.with_traceback(None))]
        return [result for write in writes for result in _candidates([write], versions, default)]  # so that others do not fail with it
    return list(zip(writes, results.values(), strict=True))


def _in_version(version: LiveVersion, items: Mapping[int, tuple[str, ItemBody]], is_default: bool) -> dict[int, Candidates | EspalierError]:
    """The candidates of items in a version; none if the version is being dropped and is not the default."""
    try:
        return dict(zip(items, version.candidates(list(items.values())), strict=True))
    except NotReady:
        if is_default:
            raise
        return {}


def _evidence(write: Write, default: LiveVersion) -> ItemBody | None:
    """The body by which an item is placed; None for a write without new evidence."""
    body = write.evidence or write.request.body
    if write.evidence is not None or body.has_evidence:
        return body
    return body if body.fields and default.is_placed_by(write.request.id, body.fields) else None


def _needs_no_place(write: Write, default: LiveVersion) -> bool:
    """Whether a write is taken although it cannot be placed: a trained item has new fields, which say nothing, or an item a new count, and
    the items of its stored evidence are gone."""
    body, is_trained = write.request.body, default.is_trained(write.request.id)
    no_new_evidence = not body.has_evidence and (body.fields is None or not default.takes_fields or is_trained)
    return no_new_evidence and (is_trained or (write.evidence is not None and body.count is not None))


def _unknown(request: Put | Delete, default: LiveVersion) -> tuple[str, ...]:
    ids = list(named_by(request.body))
    if not ids:
        return ()
    return tuple(item_id for item_id, row in zip(ids, default.items.rows_of(ids).tolist(), strict=True) if row < 0)
