"""Operations of a live catalogue: their canonical bodies, and fields as their columns would keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import InvalidData, InvalidInput
from espalier.items import MAX_ID_BYTES, ItemTable
from espalier.label_counts import MAX_COUNT
from espalier.live.fields import Columns
from espalier.live.operations import MAX_BODY_BYTES, MAX_SEQUENCE, ItemBody, Operation

texts = st.text(st.characters(codec="utf-8"), max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(1 << 60), 1 << 60)
values = st.none() | st.booleans() | numbers | texts
events = st.lists(st.lists(texts, max_size=3) | texts | st.lists(numbers, max_size=3), max_size=3)
bodies = st.builds(
    ItemBody,
    st.none() | st.dictionaries(texts, values | st.lists(texts, max_size=3), max_size=3),
    st.none() | texts,
    st.lists(texts.filter(bool), max_size=3).map(tuple),
    events.map(tuple),
    valid_until=st.none() | st.floats(0, 1e12),
    count=st.none() | st.integers(0, MAX_COUNT),
    evidence_from=st.none() | st.tuples(st.integers(0, MAX_SEQUENCE), st.floats(0, 1e12)),
)


@given(bodies)
def test_a_body_comes_back_from_its_bytes(body: ItemBody) -> None:
    assert ItemBody.from_bytes(body.to_bytes()) == body


@given(bodies)
def test_bytes_do_not_depend_on_the_order_of_fields(body: ItemBody) -> None:
    fields = None if body.fields is None else dict(reversed([*body.fields.items()]))
    assert replace(body, fields=fields).to_bytes() == body.to_bytes()


def test_whole_seconds_are_the_same_time_as_numbers_with_a_fraction() -> None:
    assert ItemBody(valid_until=5).to_bytes() == ItemBody(valid_until=5.0).to_bytes()


@given(bodies)
def test_a_body_over_an_earlier_one_keeps_what_it_does_not_give(body: ItemBody) -> None:
    earlier = ItemBody({"title": "old"}, "old text", ("a",), (["b"],), ("u",), 7.0, 9)
    merged = body.over(earlier)
    assert merged.count == (9 if body.count is None else body.count)
    assert merged.valid_until == (7.0 if body.valid_until is None else body.valid_until)
    assert merged.fields == ({"title": "old"} if body.fields is None else body.fields)
    evidence = body if body.has_evidence else earlier
    assert (merged.text, merged.like, merged.events, merged.users) == (evidence.text, evidence.like, evidence.events, evidence.users)
    assert body.over(merged).to_bytes() == merged.to_bytes()  # the same put again changes nothing


def test_events_of_a_person_are_dropped_and_those_of_others_stay() -> None:
    body = ItemBody(events=(["a"], ["b"], ["c"]), users=("u1", "u2", "u1"))
    assert body.without("u1") == ItemBody(events=(["b"],), users=("u2",))
    assert body.without("u3") is body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ItemBody(fields={"a": float("nan")}), "body"),
        (ItemBody(fields={"a": object()}), "body"),
        (ItemBody(text="\ud800"), "body"),
        (ItemBody(text="x" * MAX_BODY_BYTES), f"at most {MAX_BODY_BYTES}"),
    ],
)
def test_a_body_that_is_no_bounded_json_is_refused(body: ItemBody, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        body.to_bytes()


def test_the_largest_body_is_kept() -> None:
    room = MAX_BODY_BYTES - len(ItemBody(text="").to_bytes())
    assert ItemBody.from_bytes(ItemBody(text="x" * room).to_bytes()).text == "x" * room


NO_BODIES = [
    b"", b"{", b"[]", b"[" * 100_000, b" " * (MAX_BODY_BYTES + 1), b'{"other":1}', b'{"like":"a"}', b'{"like":[1]}', b'{"events":{}}',
    b'{"fields":[]}', b'{"text":1}', b'{"valid_until":true}', b'{"valid_until":NaN}', b'{"users":["u"]}',
    b'{"count":1.5}', b'{"count":true}', b'{"count":-1}', b'{"count":9007199254740993}',
    b'{"evidence_from":1}', b'{"evidence_from":[1]}', b'{"evidence_from":[1,2]}', b'{"evidence_from":[true,1.5]}',
]  # fmt: skip


@pytest.mark.parametrize("data", NO_BODIES)
def test_bytes_that_are_no_body_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidData):
        ItemBody.from_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": "é" * (MAX_ID_BYTES // 2) + "e"},
        {"id": "\ud800"},
        {"kind": "get"},
        {"sequence": -1},
        {"source_version": 1 << 63},
        {"at": float("inf")},
        {"kind": "delete", "body": ItemBody(text="t")},
    ],
)
def test_an_operation_that_cannot_be_kept_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidData):
        replace(Operation(1, "a", "put"), **change)  # type: ignore[arg-type]  # wrong values are the point


def test_operations_leave_the_same_state_where_only_sequence_and_time_differ() -> None:
    put = Operation(1, "a", "put", ItemBody({"x": 1, "y": 2}), 3, 10.0)
    assert put.same_state(Operation(9, "a", "put", ItemBody({"y": 2, "x": 1}), 3, 20.0))
    assert not put.same_state(replace(put, source_version=4))
    assert not put.same_state(replace(put, body=ItemBody({"x": 1})))
    assert put.same_state(replace(put, body=replace(put.body, evidence_from=(1, 5.0))))
    assert not put.same_state(Operation(9, "a", "delete", source_version=3))


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def columns() -> Columns:
    return Columns(
        ItemTable.build(
            pa.table(
                {
                    "id": ["a"],
                    "title": ["A"],
                    "price": pa.array([1.5], pa.float32()),
                    "year": pa.array([1990], pa.int16()),
                    "sold": [True],
                    "tags": [["x"]],
                }
            )
        )
    )


def test_values_are_those_of_the_columns_and_nulls_are_left_out(columns: Columns) -> None:
    given = {"title": "B", "price": 0.1, "year": 2026, "sold": False, "tags": ["y", "z"]}
    assert columns.typed(given) == given | {"price": float(np.float32(0.1))}
    assert columns.typed({"title": None, "price": 3}) == {"price": 3.0}
    assert columns.typed({}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("colour", "red"),
        ("id", "b"),
        ("title", 5),
        ("title", ["B"]),
        ("price", "5"),
        ("price", True),
        ("price", 1e39),
        ("year", 1.5),
        ("year", True),
        ("year", 1 << 20),
        ("sold", 1),
        ("tags", "x"),
        ("tags", [1]),
    ],
)
def test_what_a_column_cannot_keep_is_refused_by_name(columns: Columns, name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=f"fields.{name}"):
        columns.typed({name: value})
    assert columns.fitting({name: value, "title": "B"} if name != "title" else {name: value, "sold": True}) in (
        {"title": "B"},
        {"sold": True},
    )
