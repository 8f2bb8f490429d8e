"""How long a version takes to be brought up to date with a journal of many operations: what a start of the service waits for.

Every operation puts another item of the sample model, with five histories of eight items, under a random parent; places and rows are
stored, as they are once an item was put. Measures the replay alone, not the opening of the bundle, and beside it the check of the file.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import numpy as np

from espalier.bundle import Bundle
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement
from service.live.replay import replay
from service.models.loading import EngineSource, load_version
from service.settings import Settings
from service.watch.metrics import Metrics

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "models" / "debian-depends"
GROUP = 256
EVENTS, LENGTH = 5, 8


def filled(file: Path, bundle: Bundle, operations: int) -> Journal:
    """A journal with as many puts of different items, each with its place and row."""
    journal, rng, numbers = Journal(file), random.Random(0), np.random.default_rng(0)
    tree, width, version = bundle.tree, bundle.graph_scorer.node_dim, bundle.manifest.version
    parents = range(int(tree.level_offset[-3]), int(tree.level_offset[-2]))
    slots = {parent: int(tree.first_child[parent + 1] - tree.first_child[parent]) for parent in parents}
    ids = bundle.items.ids_of(np.arange(min(len(bundle.items), 5000)))
    for begin in range(0, operations, GROUP):
        with journal.writing() as transaction:
            for number in range(begin, min(begin + GROUP, operations)):
                body = ItemBody({"title": f"item {number}"}, events=tuple(rng.sample(ids, LENGTH) for _ in range(EVENTS)))
                stored = transaction.append(Operation(0, f"new-{number}", "put", body))
                parent = rng.choice(parents)
                row = LiveRow(numbers.normal(size=width).astype(np.float32))
                transaction.store_placements(version, {stored.sequence: [Placement(0, parent, slots[parent], row)]})
                slots[parent] += 1
    return journal


def replay_seconds(folder: Path, operations: int, sample: Path = SAMPLE) -> dict[str, float]:
    """Seconds of a replay into a version that was just opened, of the processor alone too, and of the check of the file before it."""
    shutil.copytree(sample, folder / sample.name)
    settings = Settings(models=folder, device="cpu")
    version = max(int(path.name) for path in (folder / sample.name).iterdir() if path.name.isdecimal())
    loaded = load_version(settings, Metrics(), EngineSource(), sample.name, version, lambda _: None)
    journal = filled(folder / sample.name / "live.db", loaded.bundle, operations)
    journal.close()
    began = time.perf_counter()
    journal.check()
    checked, used = time.perf_counter(), time.process_time()
    replay(loaded.live, journal)
    ended, cpu_s = time.perf_counter(), time.process_time() - used
    state = loaded.live.state
    if state is None or state.live_items != operations or loaded.live.sequence != operations:
        raise RuntimeError("the replay did not apply every operation")
    size_mb = journal.file.stat().st_size / 1e6
    journal.close()
    return {"operations": operations, "check_s": checked - began, "replay_s": ended - checked, "cpu_s": cpu_s, "journal_mb": size_mb}
