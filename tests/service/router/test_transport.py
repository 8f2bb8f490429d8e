"""What replicas may say that they hold."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from service.router.transport import MAX_COUNTED, ReplicaFailed, held_of
from tests.service.running import Json

SHARD: Json = {"of": "books", "version": 1, "digest": "d" * 64, "index": 0, "count": 2, "engine": "compiled-cpu"}


def listed(*shards: Json, **more: Any) -> bytes:
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
        {"engine": "x" * 100},
        {"index": -1},
    ],
)
def test_a_shard_that_cannot_be_is_garbage(changed: Json) -> None:
    assert len(held_of(listed(SHARD)).engines) == 1
    with pytest.raises(ReplicaFailed) as failed:
        held_of(listed(SHARD, SHARD | changed))
    assert failed.value.reason == "garbage"
    assert "shards.1" in str(failed.value)


def test_the_layouts_of_one_replica_have_a_limit() -> None:
    many = [SHARD | {"version": version, "count": 4096} for version in range(1, MAX_COUNTED // 4096 + 1)]
    assert len(held_of(listed(*many)).engines) == len(many)
    with pytest.raises(ReplicaFailed, match="expected at most"):
        held_of(listed(SHARD, *many))
