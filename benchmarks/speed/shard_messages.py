"""µs of the messages between a router and a shard, beside the shard's search, in one run.

    python -m benchmarks.shard_messages [--model models/debian-depends/1] [--shards 2] [--m 200] [--json F]

A bundle is cut, and one query of a router is encoded, decoded with all checks, checked against the shard and turned into its numbers,
searched alone, and its answer encoded, decoded and compared with the query. All take turns, so that a busy machine slows all alike; figures
are medians. Then a query with states of 16 levels and 128 numbers, a history of 50 items and 20 exclusions, whatever the model.

A row is {"what", "us", "share"}: of the search's time, null for the synthetic query.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.hardware import hardware
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import SearchParams
from espalier.shards.cut import Cut
from espalier.shards.local import LocalShard
from espalier.shards.messages import Pin, ShardAnswer, ShardQuery, decode_answer, decode_query, encode_answer, encode_query
from espalier.shards.results import check_result

ROUNDS = 2000
PIN = Pin("any", 1, "0" * 64, 0, 2)


def medians(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """µs of each step; all take turns."""
    seconds: dict[str, list[float]] = {what: [] for what in steps}
    for _ in range(ROUNDS):
        for what, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[what].append(time.perf_counter() - began)
    return {what: float(np.median(own)) * 1e6 for what, own in seconds.items()}


def of_model(whole: Bundle, shards: int, m: int, folder: Path) -> list[dict[str, Any]]:
    """The messages and the search of a model of graphs."""
    shard = Cut(whole, shards).write(folder / "0" / "1", 0)
    assert shard.shard is not None
    engine, local = open_engine(shard, "cpu"), LocalShard(shard.shard, [shard.tree])
    queries = read_heldout(whole, 1).queries
    params = SearchParams.uniform(1, whole.manifest.search.beam_size, m)
    states_BLS = ReferenceEngine(whole).states(queries)
    query = ShardQuery(PIN, queries, params.beam_size_B, params.m_B, None, states_BLS)
    params = SearchParams(params.beam_size_B, params.m_B, states_BLS=states_BLS)
    engine.warm_up()
    found = engine.search(queries, params)
    answer = ShardAnswer(PIN, local.whole(found), engine.name, 1.0, 1)
    body, answered = encode_query(query), encode_answer(answer)
    items, levels, kind = whole.tree.item_count, [whole.tree.level_offset], whole.manifest.query
    taken = medians(
        {
            "search": lambda: engine.search(queries, params),
            f"encode a query of {len(body)} bytes": lambda: encode_query(query),
            "decode it": lambda: decode_query(body),
            "to numbers of the whole": lambda: local.whole(found),
            f"encode an answer of {len(answered)} bytes": lambda: encode_answer(answer),
            "decode it ": lambda: decode_answer(answered),
            "compare it with the query": lambda: check_result(answer.result, 1, m, items, levels, kind),
        }
    )
    return [{"what": what, "us": round(us, 1), "share": round(us / taken["search"], 3)} for what, us in taken.items()]


def of_usual_size() -> list[dict[str, Any]]:
    """A query of the size that messages are made for."""
    rng = np.random.default_rng(0)
    queries = QueryBatch(HistoryKind(length=50), rng.integers(0, 1000, (1, 50)))
    states_BLS = rng.normal(size=(1, 16, 128)).astype(np.float32)
    query = ShardQuery(PIN, queries, np.array([200]), np.array([200]), rng.integers(0, 1000, (1, 20)), states_BLS)
    body = encode_query(query)
    what = f"a query of {len(body)} bytes"
    taken = medians({f"encode {what}": lambda: encode_query(query), f"decode {what}": lambda: decode_query(body)})
    return [{"what": what, "us": round(us, 1), "share": None} for what, us in taken.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/debian-depends/1"), help="a bundle of graphs")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--m", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = of_model(Bundle.open(given.model), given.shards, given.m, Path(folder)) + of_usual_size()
    for row in rows:
        print(f"{row['us']:9.1f} µs  {'' if row['share'] is None else row['share']:>6}  {row['what']}")
    if given.json is not None:
        report = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), "rows": rows}
        given.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
