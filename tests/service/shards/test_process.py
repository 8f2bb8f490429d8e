"""`espalier serve` over a folder of shards, asked over a plain connection."""

from __future__ import annotations

import http.client
import signal
from pathlib import Path

import numpy as np
import pytest

from espalier.engines import open_engine
from espalier.search import SearchParams
from espalier.shards.messages import MEDIA_TYPE, MaskBits, ShardQuery, decode_answer, encode_query
from tests.espalier.shards.merging import answers_of, with_states
from tests.service.processes import COMPILING_S, Service, exit_code, service
from tests.service.shards.cutting import cut, queries_of, query_for, whole_bundle
from tests.waiting import until

pytestmark = pytest.mark.slow
KEY = "an-internal-key-of-a-test"


def post(running: Service, query: ShardQuery) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    try:
        headers = {"content-type": MEDIA_TYPE, "authorization": f"Bearer {KEY}"}
        connection.request("POST", "/internal/search", encode_query(query), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_service_over_two_shards_answers_as_the_reference_does(tmp_path: Path) -> None:
    whole = whole_bundle(tmp_path / "whole", "product memory")
    shards = cut(whole, tmp_path / "books-shards")
    with service(tmp_path / "books-shards", 2, ESPALIER_INTERNAL_KEYS=KEY) as running:
        until(lambda: "".join(running.log).count("is ready on") == 4, "each worker has both shards", COMPILING_S)
        document = [running.request("GET", "/internal/shards", Authorization=f"Bearer {KEY}")[1] for _ in range(8)]
        assert {one["process"] for one in document} == {document[0]["process"]}
        assert [(one["index"], one["version"]) for one in document[0]["shards"]] == [(0, 1), (1, 1)]
        for seed in range(10):
            queries, params = queries_of(whole, 3, seed), SearchParams.uniform(3, 4, 6)
            for shard in shards:
                status, body = post(running, query_for(whole, shard, queries, params))
                assert status == 200, body
                found = decode_answer(body).result
                for b, items in enumerate(answers_of(shard, open_engine(shard, engine="reference"), with_states(whole, queries), params)):
                    count = int(found.count_B[b])
                    assert [*zip(found.item_rows_BM[b, :count], found.ranks_BM[b], found.keys_BM[b], strict=False)] == items
        bits = MaskBits(np.full((shards[0].tree.item_count + 7) // 8, 15, np.uint8))
        query = query_for(whole, shards[0], queries, params, masks=(bits.digest,) * 3, sent_masks={bits.digest: bits})
        assert post(running, query)[0] == 200
        assert running.request("POST", "/retrieve", {"model": "0", "queries": [{"history": []}]})[0] == 409
        assert running.metric('espalier_shard_searches_total{model="0"}') == 11
        running.process.send_signal(signal.SIGTERM)
        assert exit_code(running) == 0
