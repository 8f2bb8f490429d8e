"""Routes that show the content of a model, for the console and for people: facets, tree nodes, held-out queries, health and samples.

Knows requests and answers. Does not know how answers are computed.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import pyarrow as pa
from fastapi import Path, Query, Request
from pydantic_core import from_json
from starlette.responses import Response

from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.errors import InvalidQuery
from espalier.manifest import MAX_TREES
from espalier.serving import MAX_VERSION

from ..http.dependencies import Name, Service, as_json, service_of
from ..retrieval.facets import facets as find_facets
from ..retrieval.request import parsed_filter
from ..retrieval.subtree import TreeView, describe_node
from ..settings import MAX_SAMPLES
from ..watch import health as model_health
from ..watch import query_samples

MAX_LISTED = 1000
"""Most queries, values or items in one answer."""
MAX_NAME = 512
"""Longest name of a column, or id, in characters."""
MAX_FILTER = 1 << 16
"""Longest filter, in characters of its JSON. The head of a request has no room for more."""

Version = Annotated[int | None, Query(ge=1, le=MAX_VERSION, description="Version of the model; without it the default.")]
Tree = Annotated[int, Query(ge=0, le=MAX_TREES, description="Number of a tree of a forest, from 0.")]
MAX_HELDOUT_BYTES = 8 << 20
"""A list of held-out queries ends with the query that makes its JSON larger than this."""


async def facets(
    request: Request,
    name: Name,
    column: Annotated[str, Query(max_length=MAX_NAME, description="A column of the item table that can be filtered.")],
    filter: Annotated[str, Query(description="JSON of a `filter` as in `POST /retrieve`.")] = "",
    exclude_filter: Annotated[str, Query(description="JSON of an `exclude_filter` as in `POST /retrieve`.")] = "",
    live: Annotated[bool, Query(description="Whether the live catalogue counts.")] = True,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most values to return.")] = 20,
    version: Version = None,
) -> Response:
    """The values of a column among the items that a query with these filters may get, each with the number of items that have it.

    Conditions on the column itself are ignored, so the counts show what choosing another value would give.
    """
    service = service_of(request)
    model = service.registry.choose(name, version)
    filter_json, exclude_filter_json = _object("filter", filter), _object("exclude_filter", exclude_filter)
    parsed = parsed_filter(filter_json, exclude_filter_json, model, service.settings)
    return as_json(await service.scans.run(lambda check: find_facets(model, column, parsed, limit, check, live)))


async def tree_node(
    request: Request,
    name: Name,
    node: Annotated[int, Path(description="Number of a node, as in explanations; 0 is the root.")],
    tree: Tree = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most items to return.")] = 50,
    version: Version = None,
) -> Response:
    """A node of a tree: its path, its children with their numbers of items, some of the items below it, and their typical values."""
    service = service_of(request)
    model = service.registry.choose(name, version)
    return as_json(await service.scans.run(lambda check: describe_node(TreeView(model, tree), node, limit, service.typical_values, check)))


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
    return as_json({"item": item, "nodes": await service.scans.run(lambda _: TreeView(model, tree).path_to_item(item))})


async def heldout(
    request: Request,
    name: Name,
    version: Version = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most queries to return.")] = 20,
) -> Response:
    """Held-out queries, an evenly spaced sample: the queries that the model was measured on, with the items that it should find.

    They show what people did. So an admin key is needed if the service has any keys.
    """
    service = service_of(request)
    bundle = service.registry.choose_whole(name, version).bundle
    lines = await service.scans.run(lambda _: heldout_queries(bundle, limit))
    return Response(b'{"queries":[%s]}' % b",".join(lines), media_type="application/json")


def _object(field: str, text: str) -> dict[str, Any]:
    """The JSON object in a parameter; empty if the parameter is. Raises InvalidQuery."""
    if not text:
        return {}
    if len(text) > MAX_FILTER:
        raise InvalidQuery(field, text, f"at most {MAX_FILTER} characters")
    try:
        document = from_json(text)  # as in the body of POST /retrieve: orjson reads integers of more than 64 bits as floats
    except ValueError as error:
        raise InvalidQuery(field, text, f"a JSON object ({error})") from error
    if not isinstance(document, dict):
        raise InvalidQuery(field, text, "a JSON object")
    return document


async def health(request: Request, name: Name) -> Response:
    """The last 24 hours of a model, over all workers: series with a number a minute, alerts, events, and unknown ids.

    The last number of each series is the current one. Null means unknown. `p50_ms` and `p99_ms` are of the last five minutes.
    """
    service = service_of(request)
    version = _default_version(service, name)
    counts, records = service.unknown_ids.counts(), service.recorder
    document = await service.scans.run(lambda _: model_health.as_json(name, version, records.history(name), records.unknown(name, counts)))
    return Response(document, media_type="application/json")


async def samples(
    request: Request,
    name: Name,
    version: Version = None,
    limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES, description="Most queries to return.")] = 100,
) -> Response:
    """Customers' most recent queries, newest first, from the worker that answers. Empty unless `ESPALIER_SAMPLE_QUERIES` is set."""
    service = service_of(request)
    service.registry.entry(name)
    queries = service.samples.of(name, limit, version)
    return Response(query_samples.as_json(queries, service.samples.most), media_type="application/json")


def _default_version(service: Service, name: str) -> int | None:
    """The number of the default version; None if it is not ready. Raises NotFound. (It returns no reference to the version.)"""
    loaded = service.registry.entry(name).loaded
    return None if loaded is None else loaded.version


def heldout_queries(bundle: Bundle, most: int) -> list[bytes]:
    """JSON of at most `most` held-out queries, evenly spaced among all: `{"query", "relevant", "recall"}`.

    recall  m → recall@m of the query when the bundle was made; empty for bundles without it
    Raises BundleCorrupt.
    """
    heldout, kind = read_heldout(bundle, most), bundle.manifest.query.kind
    queries = bundle.heldout().column(kind).take(pa.array(heldout.table_row_B, pa.int64()))
    lines, size = list[bytes](), 0
    for b, rows in enumerate(heldout.relevant):
        entry: dict[str, Any] = {
            "query": {kind: queries[b].as_py()},
            "relevant": bundle.items.ids_of(rows),
            "recall": {str(m): float(recall_B[b]) for m, recall_B in sorted(heldout.recall_by_m.items())},
        }
        lines.append(orjson.dumps(entry))
        size += len(lines[-1])
        if size > MAX_HELDOUT_BYTES:
            break
    return lines
