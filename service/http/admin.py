"""The admin routes: versions, and standing exclusions. models/changes.py makes each change, and the audit log records it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Header, Request
from starlette.responses import Response

from espalier.serving import Candidate

from ..entity_tags import Condition, matches
from ..http.dependencies import Name, as_json, candidate_of, describe, info_of, service_of
from ..http.item_bodies import ItemId, check_path_id
from ..http.schemas import CandidateRequest, LoadRequest, RemovedRequest, VersionRequest
from ..models.changes import RemovedChange, ServedVersions
from ..models.removals import Ids, check_condition, check_list, etag, summary, with_id, without_id
from ..watch.audit import BeforeAfter, origin
from ..watch.trial_figures import figures

T = TypeVar("T")

IfMatch = Annotated[
    str | None, Header(description="Entity tags: the change is made if the list is one that has one of them, or for `*`; else 412.")
]
IfNoneMatch = Annotated[
    str | None, Header(description="Entity tags: the change is made unless the list has one of them; never for `*`. Else 412.")
]
IfChanged = Annotated[
    str | None, Header(alias="If-None-Match", description="Entity tags: the answer is 304 where the list has one of them.")
]


async def load(request: Request, name: Name, body: LoadRequest) -> Response:
    """Open, verify and warm up a version while the others serve, and make it the default unless `default` is false.

    A version that fails to load changes nothing.
    """
    changes = service_of(request).registry.changes
    return await _changed(request, "load", name, body.version, changes.load(name, body.version, body.default))


async def unload(request: Request, name: Name, body: VersionRequest) -> Response:
    """Drop a version that is not the default, once the requests that it has accepted are answered."""
    return await _changed(request, "unload", name, body.version, service_of(request).registry.changes.unload(name, body.version))


async def set_default(request: Request, name: Name, body: VersionRequest) -> Response:
    """Make a version the default, after loading it where needed: pin a version, or roll back."""
    return await _changed(request, "default", name, body.version, service_of(request).registry.changes.set_default(name, body.version))


async def set_candidate(request: Request, name: Name, body: CandidateRequest) -> Response:
    """Try a version on some of the requests that name none, after loading it where needed: a canary, an A/B test, or a shadow.

    A user (header `Espalier-User`) gets the same version as long as the trial lasts, and more users get it when the share grows. Making it
    the default ends the trial.
    """
    candidate = Candidate(**body.model_dump() | {"keys": tuple(body.keys), "groups": tuple(body.groups)})
    return await _changed(request, "candidate", name, body.version, service_of(request).registry.changes.set_candidate(name, candidate))


async def drop_candidate(request: Request, name: Name) -> Response:
    """End the trial: all requests that name no version go to the default one again. The candidate stays loaded."""
    return await _changed(request, "candidate", name, None, service_of(request).registry.changes.set_candidate(name, None))


async def trial(request: Request, name: Name) -> Response:
    """The candidate beside the default version: what each has answered since it was loaded, how fast, and how much they agree."""
    service = service_of(request)
    entry = service.registry.entry(name)
    candidate = candidate_of(entry)
    found: dict[str, Any] = {"versions": [], "shadow": None}
    if candidate is not None:
        default = None if entry.loaded is None else entry.loaded.version
        found = await asyncio.to_thread(lambda: figures(service.metrics.samples(), name, default, candidate["version"]))
    return as_json({"candidate": candidate} | found)


async def set_removed(
    request: Request, name: Name, body: RemovedRequest, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Replace the list of items that no answer of this model may hold. Takes effect without a reload; 202 where a worker is behind.

    With the ETag that was read in `If-Match`, no other client's change is lost: 412 says that there was one.
    """
    registry = service_of(request).registry
    listed = check_list(body.ids, service_of(request).settings.max_removed)
    edited = await _edit(request, "set_removed", name, lambda _: listed, Condition(if_match, if_none_match), replace=True)
    unknown = await registry.unknown(name, listed)
    answer = {"removed": len(listed) - len(unknown), "unknown": unknown, "behind": edited.behind}
    return await _tagged(answer, listed, 202 if edited.behind else 200)


async def removed(request: Request, name: Name, if_none_match: IfChanged = None) -> Response:
    """The standing exclusions."""
    ids = service_of(request).registry.removed(name)
    tag = await asyncio.to_thread(etag, ids)
    if if_none_match is not None and matches(if_none_match, tag):
        return Response(None, 304, {"ETag": tag})
    return await _tagged({"ids": ids}, ids)


async def remove_item(
    request: Request, name: Name, item_id: ItemId, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Add an item that no answer of this model may hold; nothing changes where it is on the list already. There is no body."""
    most = service_of(request).settings.max_removed
    condition = Condition(if_match, if_none_match)
    return await _edit_item(request, "remove_item", name, item_id, lambda ids: with_id(ids, item_id, most), condition)


async def restore_item(
    request: Request, name: Name, item_id: ItemId, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Take an item off that list; nothing changes where it is not on it."""
    condition = Condition(if_match, if_none_match)
    return await _edit_item(request, "restore_item", name, item_id, lambda ids: without_id(ids, item_id), condition)


async def _edit_item(
    request: Request, action: str, name: str, item_id: str, edit: Callable[[Ids], Ids | None], condition: Condition
) -> Response:
    """Change the standing exclusions by the item that the path names."""
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
    request: Request, action: str, name: str, edit: Callable[[Ids], Ids | None], condition: Condition, replace: bool = False, **what: Any
) -> RemovedChange:
    """Change the standing exclusions where the condition holds. replace: whether what they were does not matter without a condition."""
    registry = service_of(request).registry
    registry.check_whole(name)

    def edit_checked(before: Ids) -> Ids | None:
        check_condition(condition, before)
        return edit(before)

    change = registry.changes.edit_removed(name, edit_checked, replace=replace and not condition.given)
    return await _audited(request, action, name, change, _lists, **what)


async def _audited(
    request: Request, action: str, name: str, change: Coroutine[Any, Any, T], described: Callable[[T], BeforeAfter], **what: Any
) -> T:
    info = info_of(request)
    by = origin(request.scope, info.request_id.decode(), info.key_name)
    return await service_of(request).audit.change(action, name, by, change, described, **what)


async def _changed(
    request: Request, action: str, name: str, version: int | None, change: Coroutine[Any, Any, tuple[ServedVersions, ServedVersions]]
) -> Response:
    """Make a change of versions, and describe the model after it."""
    await _audited(request, action, name, change, _versions, version=version)
    service = service_of(request)
    return as_json(describe(service.registry.entry(name), service))


def _versions(change: tuple[ServedVersions, ServedVersions]) -> BeforeAfter:
    return BeforeAfter(*map(_described, change))


def _described(served: ServedVersions) -> dict[str, Any]:
    described: dict[str, Any] = {"versions": served.versions, "default": served.default}
    return described if served.candidate is None else described | {"candidate": served.candidate.model_dump(mode="json")}


def _lists(change: RemovedChange) -> BeforeAfter:
    return BeforeAfter(summary(change.before), summary(change.after))


async def _tagged(document: dict[str, Any], ids: Sequence[str], status: int = 200) -> Response:
    """An answer about a list of removed ids."""
    tag = await asyncio.to_thread(etag, ids)
    return as_json(document | {"etag": tag}, status, {"ETag": tag})
