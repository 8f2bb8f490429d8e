"""Messages between a router and a shard: queries with their encoded states, and answers.

Item rows and node numbers in messages are global: those of the bundle that was cut into shards. A body is a message in JSON and arrays
(`framing.py`). Decoding checks types, shapes and all that is cheap to check without a bundle. The receiver checks the ranges against its
bundle. Knows no HTTP.

Legend: B queries, E excluded items, L levels, S state, M results, I items of the shard, T history, X nodes with memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Array, Float32, Int64
from espalier.errors import InvalidInput, InvalidMessage
from espalier.manifest import MAX_TREES
from espalier.memory_lists import MemoryLists
from espalier.queries import FeaturesKind, HistoryKind, Kind, QueryBatch, VectorKind
from espalier.search import SearchResult
from espalier.shards.framing import Arrays, Fields, framed, unframed
from espalier.shards.results import result_arrays, result_of
from espalier.stored_arrays import ascends_in_rows, rises
from espalier.text.sparse_rows import SparseRows

MEDIA_TYPE = "application/vnd.espalier.search"
FORMAT = 2
"""Version of the messages. A router and a shard with different versions refuse each other's messages."""
MAX_QUERIES = 4096
MAX_TIMEOUT_MS = 3_600_000.0
MAX_NUMBER = (1 << 63) - 1


@dataclass(frozen=True)
class Pin:
    """Which shard of which version a query asks, or an answer comes from.

    of, version    the bundle that was cut
    digest         SHA-256 of its manifest.json, in hex
    index, count   shard `index`, from 0, of `count` shards
    """

    of: str
    version: int
    digest: str
    index: int
    count: int


@dataclass(frozen=True, eq=False)
class MaskBits:
    """A filter's mask for one shard, as a message has it.

    eligible    uint8[⌈I / 8⌉]: a bit for each of the shard's items in their order, the first one in the highest bit (np.packbits)
    open_nodes  for each tree int64, ascending: global numbers of the nodes above leaves with a live item that passes the filter. They are
                eligible even if no trained item below them is. An empty tuple: none in any tree
    """

    eligible: NDArray[np.uint8]
    open_nodes: tuple[Int64, ...] = ()

    @cached_property
    def digest(self) -> str:
        """BLAKE2b-128 of the content, in hex."""
        lengths = np.array([len(self.eligible), len(self.open_nodes), *map(len, self.open_nodes)], "<i8")
        digest = hashlib.blake2b(lengths.tobytes(), digest_size=16)
        for array in (self.eligible, *(nodes.astype("<i8") for nodes in self.open_nodes)):
            digest.update(array.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ShardQuery:
    """Queries for one shard of one version. `beam_size_B` and `m_B` as in `SearchParams`, `states_BLS` as in `GivenQueries`.

    queries     histories are global item rows; texts travel as features, so that the kind of a decoded query is never `text`
    exclude_BE  int64[B, E], global item rows, −1 as padding; those of other shards are ignored
    masks       by query the digest of its mask, None: all items are eligible
    sent_masks  masks by their digests. A shard that lacks one of `masks` and does not get it here asks for it
    timeout_ms  after this time the router ignores the answer
    number      of the question, from 0 to MAX_NUMBER; its answer repeats it
    memory      mem of leaves and of nodes above leaves (global numbers, ascending for each query), used instead of computing mem from the
                histories. The shard ignores nodes of other shards and computes higher levels from these. None: it computes mem itself
    """

    pin: Pin
    queries: QueryBatch
    beam_size_B: Int64
    m_B: Int64
    exclude_BE: Int64 | None = None
    states_BLS: Float32 | None = None
    frontier: bool = False
    trace: bool = False
    masks: tuple[str | None, ...] | None = None
    sent_masks: Mapping[str, MaskBits] = field(default_factory=dict)
    timeout_ms: float = 1000.0
    memory: MemoryLists | None = None
    number: int = 0


@dataclass(frozen=True, eq=False)
class ShardAnswer:
    """The answer to a ShardQuery: item rows and node numbers of the result are global.

    engine     which engine of the shard searched
    engine_ms  wall time of the engine calls that the queries were in
    batch      queries in those calls, other requests' included
    number     of the question
    """

    pin: Pin
    result: SearchResult
    engine: str
    engine_ms: float
    batch: int
    number: int = 0


def encode_query(query: ShardQuery) -> bytes:
    """The body of a query."""
    arrays: dict[str, Array] = {"beam_size": query.beam_size_B, "m": query.m_B}
    message: dict[str, Any] = {"format": FORMAT, "pin": astuple(query.pin), "frontier": query.frontier, "trace": query.trace}
    message |= {"timeout_ms": query.timeout_ms, "number": query.number}
    kind, rows = query.queries.kind, query.queries.rows
    message["kind"] = "features" if isinstance(rows, SparseRows) else kind.kind
    message["width"] = kind.length if isinstance(kind, HistoryKind) else kind.width
    if isinstance(rows, SparseRows):
        arrays |= {"indptr": rows.indptr, "indices": rows.indices, "values": rows.values}
    else:
        arrays["queries"] = rows
    if query.exclude_BE is not None:
        arrays["exclude"] = query.exclude_BE
    if query.states_BLS is not None:
        arrays["states"] = query.states_BLS
    if query.masks is not None:
        message["masks"] = query.masks
    if query.sent_masks:
        message["sent"] = [[digest, len(bits.open_nodes)] for digest, bits in query.sent_masks.items()]
        for i, bits in enumerate(query.sent_masks.values()):
            arrays[f"mask.{i}"] = bits.eligible
            arrays |= {f"mask.{i}.{tree}": nodes for tree, nodes in enumerate(bits.open_nodes)}
    if query.memory is not None:
        memory = query.memory
        arrays |= {"memory.offset": memory.offset_B, "memory.nodes": memory.nodes, "memory.values": memory.values}
    return framed(message, arrays)


def decode_query(body: bytes) -> ShardQuery:
    """The query of a body; its arrays are read-only. Raises InvalidMessage."""
    message, arrays = _opened(body)
    pin = _pin(message)
    beam_size_B = arrays.take("beam_size", np.int64, (None,))
    batch = len(beam_size_B)
    if not 1 <= batch <= MAX_QUERIES:
        raise InvalidMessage("beam_size", f"{batch} queries", f"from 1 to {MAX_QUERIES}")
    masks = message.optional("masks", list)
    if masks is not None and (len(masks) != batch or not all(mask is None or isinstance(mask, str) for mask in masks)):
        raise InvalidMessage("masks", masks, f"{batch} digests or nulls, one for each query")
    query = ShardQuery(
        pin,
        _queries(message, arrays, batch),
        beam_size_B,
        arrays.take("m", np.int64, (batch,)),
        arrays.optional("exclude", np.int64, (batch, None)),
        arrays.finite("states", (batch, None, None)) if "states" in arrays else None,
        message.take("frontier", bool),
        message.take("trace", bool),
        None if masks is None else tuple(masks),
        _sent_masks(message, arrays),
        message.number("timeout_ms", 0, MAX_TIMEOUT_MS),
        _memory(arrays, batch) if "memory.offset" in arrays else None,
        message.integer("number", 0, MAX_NUMBER),
    )
    message.check_all_taken()
    arrays.check_all_taken()
    return query


def encode_answer(answer: ShardAnswer) -> bytes:
    """The body of an answer, without the result's coverage: a shard knows nothing of other shards."""
    described, arrays = result_arrays(answer.result)
    message = {
        "format": FORMAT,
        "pin": astuple(answer.pin),
        "engine": answer.engine,
        "engine_ms": answer.engine_ms,
        "batch": answer.batch,
        "number": answer.number,
        **described,
    }
    return framed(message, arrays)


def decode_answer(body: bytes) -> ShardAnswer:
    """The answer of a body; its arrays are read-only. Raises InvalidMessage.

    `check_result` (results.py) checks whether it can be the answer to a query.
    """
    message, arrays = _opened(body)
    pin = _pin(message)
    answer = ShardAnswer(
        pin,
        result_of(message, arrays),
        message.take("engine", str),
        message.number("engine_ms", 0, math.inf),
        message.integer("batch", 0, 1 << 40),
        message.integer("number", 0, MAX_NUMBER),
    )
    message.check_all_taken()
    arrays.check_all_taken()
    return answer


def _opened(body: bytes) -> tuple[Fields, Arrays]:
    fields, arrays = unframed(body)
    message = Fields(fields)
    if (format_number := message.take("format", int)) != FORMAT:
        raise InvalidMessage("format", format_number, f"{FORMAT}: the router and the shard must be of releases that understand each other")
    return message, Arrays(arrays)


def _pin(message: Fields) -> Pin:
    values = message.take("pin", list)
    if [type(value) for value in values] != [str, int, str, int, int]:
        raise InvalidMessage("pin", values, "[of, version, digest, index, count]")
    return Pin(*values)


def _queries(message: Fields, arrays: Arrays, batch: int) -> QueryBatch:
    name, width = message.take("kind", str), message.integer("width", 1, 2**31 - 1)
    kind: Kind
    try:
        if name == "features":
            kind = FeaturesKind(width=width)
            arrays_of_rows = (
                arrays.take("indptr", np.int64, (batch + 1,)),
                arrays.take("indices", np.int32, (None,)),
                arrays.finite("values", (None,)),
            )
            rows = SparseRows(*arrays_of_rows, width)
            rows.check()
            return QueryBatch(kind, rows)
        if name == "history":
            return QueryBatch(HistoryKind(length=width), arrays.take("queries", np.int64, (batch, width)))
        if name == "vector":
            return QueryBatch(VectorKind(width=width), arrays.finite("queries", (batch, width)))
    except InvalidMessage:
        raise
    except (InvalidInput, ValueError) as error:
        raise InvalidMessage("queries", name, f"right queries ({error})") from None
    raise InvalidMessage("kind", name, "history, vector or features")


def _sent_masks(message: Fields, arrays: Arrays) -> Mapping[str, MaskBits]:
    masks = {}
    for i, entry in enumerate(message.optional("sent", list) or []):
        if not isinstance(entry, list) or [type(value) for value in entry] != [str, int] or not 0 <= entry[1] <= MAX_TREES:
            raise InvalidMessage(f"sent[{i}]", entry, f"[digest, trees], at most {MAX_TREES} trees")
        digest, trees = entry
        open_nodes = tuple(arrays.take(f"mask.{i}.{tree}", np.int64, (None,)) for tree in range(trees))
        bits = MaskBits(arrays.take(f"mask.{i}", np.uint8, (None,)), open_nodes)
        if bits.digest != digest:
            raise InvalidMessage(f"sent[{i}]", digest, f"{bits.digest}, the digest of the bits")
        masks[digest] = bits
    return masks


def _memory(arrays: Arrays, batch: int) -> MemoryLists:
    nodes = arrays.take("memory.nodes", np.int64, (None,))
    lists = MemoryLists(arrays.take("memory.offset", np.int64, (batch + 1,)), nodes, arrays.finite("memory.values", (len(nodes),)))
    if not rises(lists.offset_B, batch, len(nodes)):
        raise InvalidMessage("memory.offset", lists.offset_B[:8].tolist(), f"from 0 to {len(nodes)}, never decreasing")
    if np.any(lists.values < 0):
        raise InvalidMessage("memory.values", float(lists.values.min()), "numbers of at least 0")
    if not ascends_in_rows(nodes, lists.offset_B):
        raise InvalidMessage("memory.nodes", "numbers that do not ascend", "ascending and distinct numbers for each query")
    return lists
