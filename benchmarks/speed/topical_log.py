"""A synthetic log of any size as a folder of Parquet files: popularity by power laws, and users who keep to a few topics.

Knows numbers of items and events. Does not know what is made of the log. An item is one of a topic; an event is in one of its user's three
topics, or by CHANCE in any. Users are drawn event by event, and times are not quite in the order of the files, so that lists lie scattered
over the whole log as those of a shop do. Everything is drawn block by block from (seed, block), so a log is a function of its numbers.

Legend: E events of a block.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

BLOCK = 1 << 20
"""Events that are drawn at a time, and of a row group."""
GROUPS = 4
"""Row groups of a file."""
ITEMS_OF_A_TOPIC, EVENTS_OF_A_USER = 1000, 25
TASTE = (0.5, 0.75, 0.9)
"""Cumulated chances of a user's topics; the rest is any topic."""
JITTER = 4 * BLOCK
"""How far, in events, an event's time may be from its place."""
DONE = "_done.json"
FORMAT: dict[str, Any] = {"format": "parquet", "user": "user", "item": "item", "timestamp": "time", "order": "timestamp"}


def topic_of(item: Int64) -> Int64:
    """The topic of an item's number; items of a topic follow each other by popularity."""
    topics: Int64 = item // ITEMS_OF_A_TOPIC
    return topics


def item_of(ids: list[str]) -> Int64:
    """The numbers of items from their ids."""
    hashed = np.array([int(name, 16) for name in ids], np.uint64)
    return (hashed * np.uint64(pow(_ODD, -1, 1 << 40)) % np.uint64(1 << 40)).astype(np.int64)


_ODD = 0x9E3779B97F | 1


def _ids(items: int) -> pa.Array:
    """large_string: ids whose order tells nothing of topics."""
    numbers = np.arange(items, dtype=np.uint64) * np.uint64(_ODD) % np.uint64(1 << 40)
    return pa.array([f"{number:010x}" for number in numbers.tolist()], pa.large_string())


def _mixed(values: UInt64) -> Float64:
    """Uniform numbers from 0 to 1 that depend on the values alone (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniform: Float64 = ((values ^ (values >> np.uint64(31))) >> np.uint64(11)) / float(1 << 53)
    return uniform


def write_log(folder: Path, items: int, events: int, seed: int = 1) -> None:
    """Write the log, in files of some 4 M events; a folder with a whole one is left as it is."""
    if (folder / DONE).exists():
        return
    ids, users, topics = _ids(items), max(2, events // EVENTS_OF_A_USER), -(-items // ITEMS_OF_A_TOPIC)
    blocks = -(-events // BLOCK)
    schema = pa.schema([("user", pa.int64()), ("item", pa.large_string()), ("time", pa.int64())])
    with tqdm(total=events, unit="event", unit_scale=True, desc="log", mininterval=5.0) as bar:
        for first in range(0, blocks, GROUPS):
            file = folder / f"month={first // GROUPS // 4:03}" / f"part-{first // GROUPS % 4}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=["item"]) as writer:
                for block in range(first, min(first + GROUPS, blocks)):
                    start, stop = block * BLOCK, min((block + 1) * BLOCK, events)
                    user, item, time = _drawn(np.random.default_rng([seed, block]), start, stop, users, items, topics)
                    writer.write_table(pa.table([pa.array(user), ids.take(pa.array(item)), pa.array(time)], schema), row_group_size=BLOCK)
                    bar.update(stop - start)
    (folder / DONE).write_text(json.dumps({"items": items, "events": events, "seed": seed}) + "\n")


def _drawn(rng: np.random.Generator, start: int, stop: int, users: int, items: int, topics: int) -> tuple[Int64, Int64, Int64]:
    """Users, item numbers and times of the events start … stop − 1."""
    count = stop - start
    user_E = (users * rng.random(count) ** 1.5).astype(np.int64)
    which_E = np.searchsorted(TASTE, rng.random(count), side="right")
    taste_E = _mixed(user_E.astype(np.uint64) * np.uint64(4) + which_E.astype(np.uint64) + np.uint64(1))
    chosen_E = np.where(which_E < len(TASTE), taste_E, rng.random(count))
    topic_E = np.minimum((topics * chosen_E**1.5).astype(np.int64), topics - 1)
    size_E = np.minimum(ITEMS_OF_A_TOPIC, items - topic_E * ITEMS_OF_A_TOPIC)
    item_E = topic_E * ITEMS_OF_A_TOPIC + np.minimum((size_E * rng.random(count) ** 2.0).astype(np.int64), size_E - 1)
    time_E = 1_700_000_000 + np.arange(start, stop) + rng.integers(JITTER, size=count)
    return user_E, item_E, time_E
