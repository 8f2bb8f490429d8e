"""Messages between a router and a shard: what is encoded comes back, and what cannot be is refused by the name of its field.

Damage of any other kind is among that of all formats, in tests/espalier/bundle/test_damage.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from espalier.arrays import Float32
from espalier.engines.stages import TreeQuery
from espalier.errors import InvalidMessage
from espalier.masks.eligibility import EligibleNodes
from espalier.memory_lists import MemoryLists
from espalier.queries import FeaturesKind, HistoryKind, Kind, QueryBatch, VectorKind
from espalier.search import Frontier, LevelTrace, SearchResult
from espalier.shards.framing import MAX_HEADER_BYTES, framed, unframed
from espalier.shards.messages import (
    FORMAT,
    MAX_NUMBER,
    MAX_QUERIES,
    MaskBits,
    ShardAnswer,
    ShardQuery,
    decode_answer,
    decode_query,
    encode_answer,
    encode_query,
)
from espalier.shards.results import answer_bytes, check_result
from espalier.text.sparse_rows import SparseRows
from tests.espalier.shards.example_messages import PIN, a_level, a_query, an_answer, floats


def same(left: Any, right: Any) -> bool:
    """Whether two messages say the same: arrays by dtype, shape and content."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if is_dataclass(left):
        return type(left) is type(right) and all(same(getattr(left, one.name), getattr(right, one.name)) for one in fields(left))
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return bool(left == right)


def masks(rng: np.random.Generator, count: int) -> list[MaskBits]:
    trees = int(rng.integers(0, 3))
    return [
        MaskBits(
            rng.integers(0, 256, int(rng.integers(0, 9)), np.uint8),
            tuple(np.sort(rng.integers(0, 99, int(rng.integers(0, 4)))) for _ in range(trees)),
        )
        for _ in range(count)
    ]


@st.composite
def shard_queries(draw: st.DrawFn) -> ShardQuery:
    rng, batch = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 5))
    kind, width = draw(st.sampled_from(("history", "vector", "features"))), draw(st.integers(1, 7))
    queries = QueryBatch(HistoryKind(length=width), rng.integers(-1, 50, (batch, width)))
    if kind == "vector":
        queries = QueryBatch(VectorKind(width=width), floats(rng, batch, width))
    elif kind == "features":
        own = [np.flatnonzero(rng.random(width) < 0.5).astype(np.int32) for _ in range(batch)]
        indptr = np.append(0, np.cumsum([len(row) for row in own])).astype(np.int64)
        queries = QueryBatch(FeaturesKind(width=width), SparseRows(indptr, np.concatenate(own), floats(rng, int(indptr[-1])), width))
    known = masks(rng, draw(st.integers(0, 3)))
    digests = [None, *(bits.digest for bits in known)]
    memory = None
    if draw(st.booleans()):
        own_nodes = [np.flatnonzero(rng.random(20) < 0.3) for _ in range(batch)]
        offset = np.append(0, np.cumsum([len(row) for row in own_nodes])).astype(np.int64)
        memory = MemoryLists(offset, np.concatenate(own_nodes), np.abs(floats(rng, int(offset[-1]))))
    return ShardQuery(
        PIN,
        queries,
        rng.integers(1, 100, batch),
        rng.integers(1, 100, batch),
        rng.integers(-1, 50, (batch, draw(st.integers(0, 3)))) if draw(st.booleans()) else None,
        floats(rng, batch, draw(st.integers(1, 4)), draw(st.integers(1, 5))) if draw(st.booleans()) else None,
        draw(st.booleans()),
        draw(st.booleans()),
        tuple(digests[rng.integers(0, len(digests))] for _ in range(batch)) if draw(st.booleans()) else None,
        {bits.digest: bits for bits in known},
        draw(st.floats(0, 1e6)),
        memory,
        draw(st.integers(0, MAX_NUMBER)),
    )


HISTORY = HistoryKind(length=4)
LEVELS = np.array([0, 1, 3, 6, 16])
LEAVES = a_level(3, 6, 15)
"""The first nodes of the levels of a tree of height 3 with 10 leaves, and one past the last node."""


@st.composite
def shard_answers(draw: st.DrawFn) -> ShardAnswer:
    rng, batch, m = np.random.default_rng(draw(st.integers(0, 2**32))), draw(st.integers(1, 4)), draw(st.integers(0, 5))

    def level(number: int) -> LevelTrace:
        kept, scored = (batch, int(rng.integers(0, 4))), (batch, int(rng.integers(0, 6)))
        nodes, candidates = rng.integers(-1, 90, kept), rng.integers(-1, 90, scored)
        numbers = floats(rng, *kept), candidates, floats(rng, *scored), floats(rng, *kept), floats(rng, *scored)
        return LevelTrace(number, nodes, *numbers)

    traces = [tuple(level(number) for number in range(2, 4)) for _ in range(draw(st.integers(0, 2)))]
    frontiers = [Frontier(rng.integers(-1, 90, (batch, 3)), floats(rng, batch, 3)) for _ in range(draw(st.integers(0, 2)))]
    result = SearchResult(
        rng.integers(-1, 90, (batch, m)),
        floats(rng, batch, m),
        np.where(rng.random((batch, m)) < 0.2, np.float32(-np.inf), floats(rng, batch, m)),
        floats(rng, batch, m),
        rng.integers(0, m + 1, batch),
        rng.random(batch) < 0.5,
        tuple(traces),
        rng.random(batch) < 0.5 if draw(st.booleans()) else None,
        frontiers=tuple(frontiers),
    )
    return ShardAnswer(PIN, result, "compiled-cpu", draw(st.floats(0, 1e6)), draw(st.integers(0, 1000)), draw(st.integers(0, MAX_NUMBER)))


@given(shard_queries())
def test_a_query_comes_back_as_it_was(query: ShardQuery) -> None:
    assert same(decode_query(encode_query(query)), query)


@given(shard_answers())
def test_an_answer_comes_back_as_it_was(answer: ShardAnswer) -> None:
    assert same(decode_answer(encode_answer(answer)), answer)


def test_a_body_is_a_safetensors_file() -> None:
    query = a_query()
    arrays = safetensors.numpy.load(encode_query(query))
    assert np.array_equal(arrays["beam_size"], query.beam_size_B)
    assert np.array_equal(arrays["states"], np.asarray(query.states_BLS))


def test_arrays_that_do_not_lie_at_multiples_of_their_size_are_copied_there() -> None:
    body = framed({}, {"a": np.arange(3, dtype=np.int64)})
    length = int.from_bytes(body[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + body[8 : 8 + length] + b" " + body[8 + length :]
    array = unframed(shifted)[1]["a"]
    assert array.flags.aligned
    assert array.tolist() == [0, 1, 2]


def edited(body: bytes, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """A body whose header (of the arrays) and message were changed."""
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    message = json.loads(header["__metadata__"]["message"])
    edit(header, message)
    header["__metadata__"]["message"] = json.dumps(message)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body[8 + length :]


def field(name: str, value: Any) -> bytes:
    return edited(encode_query(a_query()), lambda header, message: message.update({name: value}))


def array(name: str, **entry: Any) -> bytes:
    return edited(encode_query(a_query()), lambda header, message: header[name].update(entry))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (field("format", FORMAT + 1), "format"),
        (field("format", True), "format"),
        (field("pin", ["sample", 3, "a", 1]), "pin"),
        (field("pin", ["sample", "3", "a", 1, 4]), "pin"),
        (field("timeout_ms", -1), "timeout_ms"),
        (field("timeout_ms", 1e300), "timeout_ms"),
        (field("timeout_ms", "1"), "timeout_ms"),
        (field("number", -1), "number"),
        (field("frontier", 1), "frontier"),
        (field("kind", "text"), "kind"),
        (field("width", 0), "width"),
        (field("width", 5), "queries"),
        (field("width", 1 << 40), "width"),
        (field("masks", ["x"]), "masks"),
        (field("masks", [1, 2]), "masks"),
        (field("sent", [["0" * 32, 1]]), r"sent\[0\]"),
        (field("sent", [["0" * 32, 1 << 40]]), r"sent\[0\]"),
        (field("sent", [[1]]), r"sent\[0\]"),
        (field("sent", None), "sent"),
        (field("more", 1), "more"),
        (array("m", dtype="F64"), "header.m.dtype"),
        (array("m", dtype="U8"), "header.m.data_offsets"),
        (array("m", dtype=["I64"]), "header.m.dtype"),
        (array("m", shape=[1, 2]), "m"),
        (array("m", shape=[2.0]), "header.m.shape"),
        (array("m", shape=[-2]), "header.m.shape"),
        (array("m", shape=[1, 1, 1, 2]), "header.m.shape"),
        (array("m", shape=[1 << 62]), "header.m.shape"),
        (array("m", shape=[1 << 30]), "header.m.data_offsets"),
        (array("m", shape=[1 << 30], data_offsets=[0, 8 << 30]), "header.m.data_offsets"),
        (array("m", data_offsets=[-16, 0]), "header.m.data_offsets"),
        (array("m", data_offsets=[0]), "header.m.data_offsets"),
        (array("m", more=1), "header.m"),
        (array("states", dtype="I32"), "states"),
        (array("states", shape=[2, 12]), "states"),
        (array("states", shape=[24, 1, 1]), "states"),
        (array("beam_size", shape=[0], data_offsets=[0, 0]), "body"),
        (framed({}, {}), "format"),
        (struct.pack("<Q", 9) + b'{"a": 1} ', "header.__metadata__"),
        (struct.pack("<Q", MAX_HEADER_BYTES) + b"[" * MAX_HEADER_BYTES, "header"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_what_is_wrong(body: bytes, named: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^{named}"):
        decode_query(body)


def test_a_header_of_any_size_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", lambda *_: pytest.fail("the header was parsed"))
    for length in (MAX_HEADER_BYTES + 1, 1 << 63):
        with pytest.raises(InvalidMessage, match=r"^body"):
            decode_query(struct.pack("<Q", length) + b"[" * (MAX_HEADER_BYTES + 2))


def test_an_array_that_is_not_asked_for_is_refused() -> None:
    header, arrays = unframed(encode_query(a_query()))
    with pytest.raises(InvalidMessage, match=r"^more"):
        decode_query(framed(header, arrays | {"more": np.zeros(1, np.int64)}))


def test_two_arrays_cannot_share_bytes() -> None:
    copies = {f"a{i}": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]} for i in range(100)}
    text = json.dumps({"__metadata__": {"message": "{}"}, **copies}).encode()
    with pytest.raises(InvalidMessage, match=r"^body"):
        unframed(struct.pack("<Q", len(text)) + text + b"\0" * 64)


def features(indices: list[int], values: list[float]) -> QueryBatch:
    """Two queries of width 6, the first with all features."""
    own = np.array([0, len(indices), len(indices)]), np.array(indices, np.int32), np.array(values, np.float32)
    return QueryBatch(FeaturesKind(width=6), SparseRows(*own, 6))


def states(value: float) -> Float32:
    found = np.zeros((2, 3, 4), np.float32)
    found[1, 2, 3] = value
    return found


def memory(offset: list[int], nodes: list[int], values: list[float]) -> MemoryLists:
    return MemoryLists(np.array(offset), np.array(nodes), np.array(values, np.float32))


VECTORS = QueryBatch(VectorKind(width=2), np.array([[1, np.nan], [0, 0]], np.float32))
ONE_BIT = MaskBits(np.array([1], np.uint8))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"states_BLS": states(np.nan)}, "states: got nan"),
        ({"states_BLS": states(np.inf)}, "states: got inf"),
        ({"states_BLS": states(-np.inf)}, "states: got -inf"),
        ({"queries": VECTORS}, "queries"),
        ({"queries": features([1], [np.inf])}, "values"),
        ({"queries": features([5, 6], [1, 1])}, "queries"),
        ({"queries": features([-1, 2], [1, 1])}, "queries"),
        ({"queries": features([2, 2], [1, 1])}, "queries"),
        ({"queries": features([3, 1], [1, 1])}, "queries"),
        ({"sent_masks": {ONE_BIT.digest: MaskBits(np.array([2], np.uint8))}}, r"sent\[0\]"),
        ({"memory": memory([0, 1, 3], [1, 2, 2], [1, 1, 1])}, "memory.nodes"),
        ({"memory": memory([0, 1, 3], [1, 5, 2], [1, 1, 1])}, "memory.nodes"),
        ({"memory": memory([0, 0, 2], [2**63 - 1, -(2**63)], [1, 1])}, "memory.nodes"),
        ({"memory": memory([0, 1, 2], [1, 5, 7], [1, 1, 1])}, "memory.offset"),
        ({"memory": memory([0, 3, 2], [1, 5, 7], [1, 1, 1])}, "memory.offset"),
        ({"memory": memory([1, 1, 3], [1, 5, 7], [1, 1, 1])}, "memory.offset"),
        ({"memory": memory([0, 1, 3], [1, 5, 7], [1, -1, 1])}, "memory.values"),
        ({"memory": memory([0, 1, 3], [1, 5, 7], [1, np.nan, 1])}, "memory.values"),
        ({"memory": memory([0, 1, 3], [1, 5, 7], [1, 1])}, "memory.values"),
    ],
)
def test_a_query_that_cannot_be_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^{named}"):
        decode_query(encode_query(a_query(**changed)))


def test_values_at_their_limits_are_right() -> None:
    for changed in ({"queries": features([0, 5], [1, 0])}, {"memory": memory([0, 1, 3], [7, 1, 5], [0, 1, 1])}):
        assert same(decode_query(encode_query(a_query(**changed))), a_query(**changed))


def test_no_more_queries_than_the_limit() -> None:
    def of(batch: int) -> bytes:
        queries = QueryBatch(HistoryKind(length=1), np.zeros((batch, 1), np.int64))
        return encode_query(ShardQuery(PIN, queries, np.ones(batch, np.int64), np.ones(batch, np.int64)))

    assert len(decode_query(of(MAX_QUERIES)).queries) == MAX_QUERIES
    with pytest.raises(InvalidMessage, match=f"^beam_size: got '{MAX_QUERIES + 1} queries'"):
        decode_query(of(MAX_QUERIES + 1))
    with pytest.raises(InvalidMessage, match=r"^beam_size"):
        decode_query(of(0))


def test_a_digest_tells_masks_apart_by_bits_nodes_and_trees() -> None:
    one, two = np.array([1], np.int64), np.array([1, 1], np.int64)
    bits = np.array([1], np.uint8)
    found = [MaskBits(bits, nodes) for nodes in ((), (one,), (one, one), (two,), (one, one[:0]), (one[:0], one))]
    found += [MaskBits(np.array([1, 1], np.uint8)), MaskBits(bits[:0])]
    assert len({mask.digest for mask in found}) == len(found)
    assert MaskBits(bits.copy(), (one.copy(),)).digest == MaskBits(bits, (one,)).digest
    assert len(found[0].digest) == 32


WRAPPED = [0, 2**63 - 1, -(2**63), -1, 4]
"""Offsets whose differences, in 64 bits, are never below 0."""


def test_offsets_whose_differences_wrap_are_refused() -> None:
    queries = QueryBatch(FeaturesKind(width=9), SparseRows(np.arange(5), np.arange(4, dtype=np.int32), np.ones(4, np.float32), 9))
    body = encode_query(ShardQuery(PIN, queries, np.full(4, 10), np.full(4, 5)))
    assert decode_query(body).queries.features.indptr.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidMessage, match=r"features\.indptr: got .*never decreasing"):
        decode_query(body.replace(np.arange(5).tobytes(), np.array(WRAPPED).tobytes()))
    lists = MemoryLists(np.array(WRAPPED), np.arange(1, 5), np.ones(4, np.float32))
    with pytest.raises(InvalidMessage, match=r"^memory\.offset.*never decreasing"):
        decode_query(encode_query(ShardQuery(PIN, queries, np.full(4, 10), np.full(4, 5), memory=lists)))


def test_the_largest_answer_to_a_search_is_as_long_as_it_may_be() -> None:
    batch, m, beam, trees = 400, 200, 100, 2
    rows, numbers = np.zeros((batch, m), np.int64), np.zeros((batch, m), np.float32)
    frontier = Frontier(np.zeros((batch, beam), np.int64), np.zeros((batch, beam), np.float32))
    every = np.ones(batch, np.bool_)
    result = SearchResult(rows, numbers, numbers, numbers, rows[:, 0], every, finite_B=every, frontiers=(frontier,) * trees)
    eligible = EligibleNodes(rows[:, 0], (None,) * batch, None)
    query = TreeQuery(a_query().queries, None, np.full(batch, beam), np.full(batch, m), (eligible,) * trees, frontier=True)
    for answered, asked in ((result, query), (replace(result, frontiers=()), replace(query, frontier=False))):
        assert 1 / 2 < len(encode_answer(ShardAnswer(PIN, answered, "compiled-cpu", 1.5, 2))) / answer_bytes(asked) < 1


def check(batch: int = 2, m: int = 3, items: int = 10, levels: Any = (LEVELS,), kind: Kind = HISTORY, **changed: Any) -> None:
    """Check an answer of two queries as it comes from a shard."""
    check_result(decode_answer(encode_answer(an_answer(**changed))).result, batch, m, items, levels, kind)


def one_row(**changed: list[list[float]]) -> dict[str, Any]:
    return {name: np.array(rows, np.float32) for name, rows in changed.items()}


def frontier(node: int, rank: float) -> tuple[Frontier, ...]:
    """Of two queries with a node each, that of the second given."""
    return (Frontier(np.array([[3], [node]]), np.array([[0], [rank]], np.float32)),)


def test_a_right_answer_passes_its_check() -> None:
    check()
    check(finite_B=np.array([True, False]), kind=VectorKind(width=4))
    check(traces=((a_level(1, 1, 2), a_level(2, -1, 5), LEAVES),))
    check(**one_row(scores_BM=[[1, 0, 1], [0, 9, 9]]))
    check(frontiers=frontier(5, -1))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"batch": 1}, "item_rows"),
        ({"m": 2}, "item_rows"),
        ({"items": 9}, "item_rows"),
        ({"levels": [np.array([0, 1, 3, 5, 16])]}, "frontier"),
        ({"levels": [np.array([0, 1, 6])]}, "frontier"),
        ({"levels": []}, "frontiers"),
        ({"kind": VectorKind(width=4)}, "finite"),
        ({"finite_B": np.array([False, False])}, "finite"),
        ({"count_B": np.array([3, 2])}, "count"),
        ({"count_B": np.array([3, -1])}, "count"),
        ({"count_B": np.array([4, 1])}, "count"),
        ({"count_B": np.array([2, 1])}, "count"),
        ({"item_rows_BM": np.array([[4, 9, 2], [-1, 7, -1]])}, "count"),
        ({"item_rows_BM": np.array([[4, 9, 2], [7, -2, -1]])}, "item_rows"),
        (one_row(keys_BM=[[3, np.nan, 1], [1, 0, 0]]), "keys"),
        (one_row(ranks_BM=[[3, np.inf, 1], [1, 0, 0]]), "ranks"),
        (one_row(scores_BM=[[1, -np.inf, 1], [1, 0, 0]]), "scores"),
        (one_row(scores_BM=[[1.001, 1, 1], [1, 0, 0]]), "scores"),
        (one_row(scores_BM=[[1, 1, 1], [-1e-3, 0, 0]]), "scores"),
        ({"frontiers": frontier(3, np.nan)}, r"frontier\.0\.ranks"),
        ({"frontiers": frontier(3, np.inf)}, r"frontier\.0\.ranks"),
        ({"frontiers": frontier(-2, 1)}, r"frontier\.0"),
        ({"frontiers": frontier(2, 1)}, r"frontier\.0"),
        ({"frontiers": frontier(6, 1)}, r"frontier\.0"),
        ({"traces": ((a_level(1, 3, 2), LEAVES),)}, r"trace\.0: got 3,"),
        ({"traces": ((a_level(1, 2, 0), LEAVES),)}, r"trace\.0: got 0,"),
        ({"traces": ((a_level(4, 2, 2), LEAVES),)}, r"trace\.0: got 4,"),
        ({"traces": ((),)}, r"trace\.0: got \[\]"),
        ({"traces": ((LEAVES,), (a_level(1, 1, 2),)), "levels": (LEVELS, LEVELS)}, r"trace\.1: got \[1\]"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^{named}"):
        check(**changed)


def test_arrays_are_views_of_the_body_that_cannot_be_written_to() -> None:
    body = encode_query(a_query())
    states = decode_query(body).states_BLS
    assert states is not None
    assert not states.flags.writeable
    assert np.shares_memory(states, np.frombuffer(body, np.uint8))
