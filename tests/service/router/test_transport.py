"""What replicas may say that they hold."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from espalier.shards.messages import Pin
from service.router.transport import MAX_CONTAINERS, MAX_COUNTED, MAX_LISTED, ReplicaFailed, answered, held_of
from service.watch.logs import LONGEST
from tests.service.running import Json

SHARD: Json = {"of": "books", "version": 1, "digest": "d" * 64, "index": 0, "count": 2, "engine": "compiled-cpu"}


def listed(*shards: Any, **more: Any) -> bytes:
    return orjson.dumps({"shards": shards, **more})


@pytest.mark.parametrize(
    "changed",
    [
        {"count": 300_000_000},
        {"of": "books\nforged"},
        {"of": "x" * 100},
        {"digest": "d"},
        {"version": 0},
        {"version": 1 << 63},
        {"index": -1},
        {"index": None},
        {"count": True},
        {"ready": 1},
    ],
)
def test_a_shard_that_cannot_be_is_garbage(changed: Json) -> None:
    assert len(held_of(listed(SHARD))) == 1
    with pytest.raises(ReplicaFailed) as failed:
        held_of(listed(SHARD, SHARD | changed))
    assert failed.value.reason == "garbage"
    assert "shards.1" in str(failed.value)


def test_what_a_replica_says_besides_its_shards_is_passed_over() -> None:
    without = {name: value for name, value in SHARD.items() if name != "engine"}
    for document in (listed(without), listed(SHARD | {"engine": None, "items": 5}, process="p" * 1000)):
        assert held_of(document) == {Pin("books", 1, "d" * 64, 0, 2)}


def test_the_layouts_of_one_replica_have_a_limit() -> None:
    many = [SHARD | {"version": version, "count": 4096} for version in range(1, MAX_COUNTED // 4096 + 1)]
    assert len(held_of(listed(*many))) == len(many)
    with pytest.raises(ReplicaFailed, match="expected at most"):
        held_of(listed(SHARD, *many))


@pytest.mark.parametrize(
    "document", [b"no JSON", "\ud800", b"[]", b"{}", listed(SHARD, *[1] * MAX_LISTED), listed(1), listed(more=[[]] * MAX_CONTAINERS)]
)
def test_what_is_no_list_of_shards_is_garbage(document: bytes | str) -> None:
    with pytest.raises(ReplicaFailed, match="a list of shards was expected") as failed:
        held_of(document)
    assert failed.value.reason == "garbage"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"\x1b[31m\nfake log line\n" * 50),
        (503, "\x9b2J\u2028".encode() * 100),
        (409, b'[0, "\n\x1b[31m"]'),
        (409, orjson.dumps([["\n\x1b"] * 1000])),
    ],
)
def test_what_a_replica_says_can_neither_end_a_line_of_the_log_nor_act_on_a_terminal(status: int, body: bytes) -> None:
    with pytest.raises(ReplicaFailed) as failed:
        answered(status, body)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) <= LONGEST
