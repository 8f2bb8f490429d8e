"""Routes that show what is in a model, for the console and for people: facets, nodes of its trees, held-out queries, health and samples.

Knows requests and answers. Does not know how they are found.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import pyarrow as pa
from fastapi import Path, Query, Request
from starlette.responses import Response

from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.errors import InvalidQuery
from espalier.manifest import MAX_TREES

from ..http.dependencies import Name, Service, as_json, service_of
from ..retrieval.facets import facets as find_facets
from ..retrieval.request import parsed_conditions
from ..retrieval.subtree import Trees, describe_node
from ..settings import MAX_SAMPLES
from ..watch import health as watched
from ..watch import query_samples

MAX_LISTED = 1000
"""Most queries, values or items in one answer."""
MAX_NAME = 512
"""Longest name of a column, or id, in characters."""
MAX_FILTER = 1 << 16
"""Longest filter, in characters of its JSON; the head of a request holds no more."""
MAX_VERSION = (1 << 63) - 1

Version = Annotated[int | None, Query(ge=1, le=MAX_VERSION, description="Version of the model; without it the default.")]

Tree = Annotated[int, Query(ge=0, le=MAX_TREES, description="Which tree of a forest, counted from 0.")]
MAX_HELDOUT_BYTES = 8 << 20
"""A list of held-out queries ends with the query that makes its JSON larger than this."""


async def facets(
    request: Request,
    name: Name,
    column: Annotated[str, Query(max_length=MAX_NAME, description="A column of the item table that can be filtered.")],
    filter: Annotated[str, Query(description="JSON of a `filter` as in `POST /retrieve`.")] = "",
    exclude_filter: Annotated[str, Query(description="JSON of an `exclude_filter` likewise.")] = "",
    live: Annotated[bool, Query(description="Whether the live catalogue counts.")] = True,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most values to return.")] = 20,
    version: Version = None,
) -> Response:
    """The values of a column among the items that a query with these filters may get, by how many have each.

    Conditions on the column itself are left out: so the counts say what another value there would find.
    """
    service = service_of(request)
    model = service.registry.choose(name, version)
    wanted, barred = _object("filter", filter), _object("exclude_filter", exclude_filter)
    conditions = parsed_conditions(wanted, barred, model, service.settings)
    return as_json(await service.scans.run(lambda check: find_facets(model, column, conditions, limit, check, live)))


async def tree_node(
    request: Request,
    name: Name,
    node: Annotated[int, Path(description="Number of a node, as in explanations; 0 is the root.")],
    tree: Tree = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most items to return.")] = 50,
    version: Version = None,
) -> Response:
    """A node of a tree: its path, its children and how many items each has, some of its items, and what values are typical of them."""
    service = service_of(request)
    model = service.registry.choose(name, version)
    return as_json(await service.scans.run(lambda check: describe_node(Trees(model, tree), node, limit, service.typical_values, check)))


async def tree_path(
    request: Request,
    name: Name,
    item: Annotated[str, Query(min_length=1, max_length=MAX_NAME, description="Id of an item, trained or live.")],
    tree: Tree = 0,
    version: Version = None,
) -> Response:
    """The nodes from the root of a tree to the leaf of an item."""
    service = service_of(request)
    model = service.registry.choose(name, version)
    return as_json({"item": item, "nodes": await service.scans.run(lambda _: Trees(model, tree).path_to(item))})


async def heldout(
    request: Request,
    name: Name,
    version: Version = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most queries to return.")] = 20,
) -> Response:
    """Held-out queries, at even distances among all: what the model was measured on, and what it should find.

    They show what people did. So an admin key is needed where the service has any keys.
    """
    service = service_of(request)
    bundle = service.registry.choose_whole(name, version).bundle
    found = await service.scans.run(lambda _: heldout_queries(bundle, limit))
    return Response(b'{"queries":[%s]}' % b",".join(found), media_type="application/json")


def _object(field: str, text: str) -> dict[str, Any]:
    """A JSON object in a parameter; empty where there is none. Raises InvalidQuery."""
    if not text:
        return {}
    if len(text) > MAX_FILTER:
        raise InvalidQuery(field, text, f"at most {MAX_FILTER} characters")
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidQuery(field, text, f"a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise InvalidQuery(field, text, "a JSON object")
    return found


async def health(request: Request, name: Name) -> Response:
    """The last 24 hours of a model, all workers together: a number a minute of each series, alerts, events, and unknown ids.

    The last number of each series is of now. Null is what is not known. `p50_ms` and `p99_ms` are those of the last five minutes.
    """
    service = service_of(request)
    version = _default_version(service, name)
    counts = service.asked.unknown.counts()

    def made() -> bytes:
        return watched.as_json(name, version, service.recorder.history(name), service.recorder.unknown(name, counts))

    return Response(await service.scans.run(lambda _: made()), media_type="application/json")


async def samples(
    request: Request,
    name: Name,
    version: Version = None,
    limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES, description="Most queries to return.")] = 100,
) -> Response:
    """Customers' most recent queries, newest first, of the worker that answers. None unless `ESPALIER_SAMPLE_QUERIES` says how many."""
    service = service_of(request)
    service.registry.entry(name)
    kept = service.asked.samples
    return Response(query_samples.as_json(kept.of(name, limit, version), kept.most), media_type="application/json")


def _default_version(service: Service, name: str) -> int | None:
    """None where none is ready. Raises ModelNotFound. (The version is not kept.)"""
    loaded = service.registry.entry(name).loaded
    return None if loaded is None else loaded.version


def heldout_queries(bundle: Bundle, most: int) -> list[bytes]:
    """JSON of at most so many held-out queries, at even distances among all: `{"query", "relevant", "recall"}`.

    recall  m → recall@m of the query when the bundle was made; empty for bundles that do not say
    Raises BundleCorrupt.
    """
    heldout, kind = read_heldout(bundle, most), bundle.manifest.query.kind
    queries = bundle.heldout().column(kind).take(pa.array(heldout.table_row_B, pa.int64()))
    found, size = list[bytes](), 0
    for b, rows in enumerate(heldout.relevant):
        entry: dict[str, Any] = {
            "query": {kind: queries[b].as_py()},
            "relevant": bundle.items.ids_of(rows),
            "recall": {str(m): float(recall_B[b]) for m, recall_B in sorted(heldout.recall_by_m.items())},
        }
        found.append(orjson.dumps(entry))
        size += len(found[-1])
        if size > MAX_HELDOUT_BYTES:
            break
    return found
