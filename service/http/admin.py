"""The admin routes: versions, trials, and removals. models/changes.py makes each change, and the audit log records it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from starlette.responses import Response

from espalier.serving import Candidate

from ..entity_tags import Condition, matches
from ..http.dependencies import Name, as_json, body_of, candidate_of, describe, info_of, service_of
from ..http.item_bodies import ItemId, check_path_id
from ..http.schemas import CandidateRequest, LoadRequest, RemovedRequest, VersionRequest
from ..models.changes import RemovedChange, ServedVersions
from ..models.removals import Ids, check_list, etag, summary, with_id, without_id
from ..watch.audit import BeforeAfter, origin
from ..watch.trial_figures import figures

T = TypeVar("T")

IfMatch = Annotated[
    str | None, Header(description="Entity tags: the change is made if the list is one that has one of them, or for `*`; else 412.")
]
IfNoneMatch = Annotated[
    str | None, Header(description="Entity tags: the change is made unless the list has one of them; never for `*`. Else 412.")
]
IfChanged = Annotated[str | None, Header(alias="If-None-Match", description="Entity tags: the answer is 304 if the list has one of them.")]


async def _check_whole(request: Request, name: Name) -> None:
    service_of(request).registry.check_whole(name)


WholeModel = Annotated[None, Depends(_check_whole)]
"""Refuses a request whose model is unknown or a shard, before its body and ids are checked."""


async def load(request: Request, name: Name, body: Annotated[LoadRequest, body_of(LoadRequest)]) -> Response:
    """Open, verify and warm up a version while the others serve, and make it the default unless `default` is false.

    A version that fails to load changes nothing.
    """
    changes = service_of(request).registry.changes
    return await _changed(request, "load", name, body.version, changes.load(name, body.version, body.default))


async def unload(request: Request, name: Name, body: Annotated[VersionRequest, body_of(VersionRequest)]) -> Response:
    """Unload a version that is not the default, once its accepted requests are answered."""
    return await _changed(request, "unload", name, body.version, service_of(request).registry.changes.unload(name, body.version))


async def set_default(request: Request, name: Name, body: Annotated[VersionRequest, body_of(VersionRequest)]) -> Response:
    """Make a version the default, to pin it or to roll back. It is loaded first if necessary."""
    return await _changed(request, "default", name, body.version, service_of(request).registry.changes.load(name, body.version, True))


async def set_candidate(request: Request, name: Name, body: Annotated[CandidateRequest, body_of(CandidateRequest)]) -> Response:
    """Try a version on some of the requests that name none, as a canary, an A/B test or a shadow. It is loaded first if necessary.

    A user (header `Espalier-User`) keeps the same version during the trial. If the share grows, more users get the candidate. Making it the
    default ends the trial.
    """
    candidate = Candidate(**body.model_dump())
    return await _changed(
        request, "candidate", name, candidate.version, service_of(request).registry.changes.set_candidate(name, candidate)
    )


async def drop_candidate(request: Request, name: Name) -> Response:
    """End the trial: all requests that name no version go to the default version again. The candidate stays loaded."""
    return await _changed(request, "candidate", name, None, service_of(request).registry.changes.set_candidate(name, None))


async def trial(request: Request, name: Name) -> Response:
    """The candidate and the default version compared: the answers of each since it was loaded, their latency, and their overlap."""
    service = service_of(request)
    entry = service.registry.entry(name)
    candidate = candidate_of(entry)
    trial_figures: dict[str, Any] = {"versions": [], "shadow": None}
    if candidate is not None:
        default = None if entry.loaded is None else entry.loaded.version
        trial_figures = await asyncio.to_thread(lambda: figures(service.metrics.samples(), name, default, candidate["version"]))
    return as_json({"candidate": candidate} | trial_figures)


async def set_removed(
    request: Request,
    name: Name,
    _: WholeModel,
    body: Annotated[RemovedRequest, body_of(RemovedRequest)],
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Replace the list of items that no answer of this model may contain. It takes effect without a reload; 202 if a worker is behind.

    Send the ETag of the list that you read in `If-Match`: 412 then says that another client has changed the list since.
    """
    registry = service_of(request).registry
    ids = check_list(body.ids, service_of(request).settings.max_removed)
    edited = await _edit(request, "set_removed", name, lambda _: ids, Condition(if_match, if_none_match), replace=True)
    unknown = await registry.unknown(name, ids)
    answer = {"removed": len(ids) - len(unknown), "unknown": unknown, "behind": edited.behind}
    return await _tagged(answer, ids, 202 if edited.behind else 200)


async def removed(request: Request, name: Name, if_none_match: IfChanged = None) -> Response:
    """The list of removed items."""
    ids = service_of(request).registry.entry(name).removed
    tag = await asyncio.to_thread(etag, ids)
    if if_none_match is not None and matches(if_none_match, tag):
        return Response(None, 304, {"ETag": tag})
    return await _tagged({"ids": ids}, ids)


async def remove_item(
    request: Request, name: Name, _: WholeModel, item_id: ItemId, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Add an item that no answer of this model may contain; nothing changes if it is on the list already. There is no body."""
    most = service_of(request).settings.max_removed
    condition = Condition(if_match, if_none_match)
    return await _edit_item(request, "remove_item", name, item_id, lambda ids: with_id(ids, item_id, most), condition)


async def restore_item(
    request: Request, name: Name, _: WholeModel, item_id: ItemId, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Remove an item from that list; nothing changes if it is not on it."""
    condition = Condition(if_match, if_none_match)
    return await _edit_item(request, "restore_item", name, item_id, lambda ids: without_id(ids, item_id), condition)


async def _edit_item(
    request: Request, action: str, name: str, item_id: str, edit: Callable[[Ids], Ids | None], condition: Condition
) -> Response:
    """Add the item of the path to the removed items, or take it off."""
    check_path_id(request.scope, item_id)
    edited = await _edit(request, action, name, edit, condition, id=item_id)
    unknown = await service_of(request).registry.unknown(name, (item_id,))
    answer = {
        "id": item_id,
        "removed": action == "remove_item",
        "changed": edited.before != edited.after,
        "known": not unknown,
        "total": len(edited.after),
        "behind": edited.behind,
    }
    return await _tagged(answer, edited.after, 202 if edited.behind else 200)


async def _edit(
    request: Request, action: str, name: str, edit: Callable[[Ids], Ids | None], condition: Condition, replace: bool = False, **extra: Any
) -> RemovedChange:
    """Change the list of removed items if the condition holds. replace: apart from a condition, the former list does not matter."""

    def edit_checked(ids: Ids) -> Ids | None:
        if condition.given:
            condition.check(etag(ids), "list")
        return edit(ids)

    change = service_of(request).registry.changes.edit_removed(name, edit_checked, replace=replace and not condition.given)
    return await _audited(request, action, name, change, lambda lists: BeforeAfter(summary(lists.before), summary(lists.after)), **extra)


async def _audited(
    request: Request, action: str, name: str, change: Coroutine[Any, Any, T], describe_change: Callable[[T], BeforeAfter], **extra: Any
) -> T:
    info = info_of(request)
    by = origin(request.scope, info.request_id.decode(), info.key_name)
    return await service_of(request).audit.change(action, name, by, change, describe_change, **extra)


async def _changed(
    request: Request, action: str, name: str, version: int | None, change: Coroutine[Any, Any, tuple[ServedVersions, ServedVersions]]
) -> Response:
    """Make a change of versions, and describe the model after it."""
    await _audited(request, action, name, change, lambda served: BeforeAfter(*map(_served_json, served)), version=version)
    service = service_of(request)
    return as_json(describe(service.registry.entry(name), service))


def _served_json(served: ServedVersions) -> dict[str, Any]:
    document: dict[str, Any] = {"versions": served.versions, "default": served.default}
    return document if served.candidate is None else document | {"candidate": served.candidate.model_dump(mode="json")}


async def _tagged(document: dict[str, Any], ids: Sequence[str], status: int = 200) -> Response:
    """An answer about a list of removed ids."""
    tag = await asyncio.to_thread(etag, ids)
    return as_json(document | {"etag": tag}, status, {"ETag": tag})
