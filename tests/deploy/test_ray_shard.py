"""A replica of a shard answers what the service would, by status and body. Ray is not started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'espalier[ray]'")

from deploy.ray.shard import NotLoaded, Shard
from espalier.bundle import Bundle
from espalier.errors import BundleNotFound
from espalier.search import SearchParams
from espalier.shards.messages import decode_answer, encode_query
from tests.service.shards.cutting import cut, pin_of, queries_of, query_for, whole_bundle


class Started:
    """A replica in an event loop of its own, as Ray has one."""

    def __init__(self, whole: Bundle, shards: list[Bundle], folder: Path) -> None:
        self.whole, self.shards, self.folder = whole, shards, folder
        self.runner = asyncio.Runner()
        self.shard = self.runner.run(constructed(folder, index=1))

    def query(self, index: int = 1, **more: Any) -> Any:
        whole = self.whole
        return query_for(whole, self.shards[index], queries_of(whole), SearchParams.uniform(3, 8, 5), **more)

    def search(self, body: bytes) -> tuple[int, bytes]:
        return self.runner.run(self.shard.search(body))


async def constructed(folder: Path, index: int) -> Shard:
    shard = Shard.__new__(Shard)
    await Shard.__init__(shard, {"models": folder, "shard": index, "max_queue_ms": 10_000, "device": "cpu"})
    return shard


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("replica")
    whole = whole_bundle(folder / "models", "product")
    found = Started(whole, cut(whole, folder / "books-shards"), folder / "books-shards")
    yield found
    found.runner.close()


def test_a_search_is_answered_as_by_the_route(started: Started) -> None:
    status, body = started.search(encode_query(started.query()))
    assert status == 200
    answer = decode_answer(body)
    assert answer.pin == pin_of(started.shards[1])
    assert answer.result.count_B.tolist() == [5, 5, 5]


def test_a_refusal_is_a_status_and_no_exception(started: Started) -> None:
    assert started.search(b"garbage")[0] == 422
    status, text = started.search(encode_query(started.query(index=0)))
    assert (status, b"is not served here" in text) == (410, True)
    status, digests = started.search(encode_query(started.query(masks=("0" * 32, None, None))))
    assert (status, orjson.loads(digests)) == (409, ["0" * 32])


def test_it_says_what_it_serves_and_is_healthy_as_long_as_that_is_something(started: Started) -> None:
    listed = started.runner.run(started.shard.shards())
    assert [(one["model"], one["version"], one["index"], one["count"], one["ready"]) for one in listed] == [("1", 1, 1, 2, True)]
    started.shard.check_health()


def test_a_replica_that_is_ended_answers_no_more(started: Started) -> None:
    other = started.runner.run(constructed(started.folder, 0))
    started.runner.run(other.stop())
    assert started.runner.run(other.search(encode_query(started.query(index=0))))[0] == 503
    with pytest.raises(NotLoaded, match="shutting down"):
        other.check_health()


def test_a_replica_is_not_there_where_nothing_can_serve(started: Started, tmp_path: Path) -> None:
    with pytest.raises(BundleNotFound):
        started.runner.run(constructed(tmp_path, 0))
    (damaged,) = cut(started.whole, tmp_path, count=1)
    damaged.path.joinpath("nodes.safetensors").write_bytes(b"damaged")
    with pytest.raises(NotLoaded, match=r"0 version 1: failed: .*nodes\.safetensors"):
        started.runner.run(constructed(tmp_path, 0))
