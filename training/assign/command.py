"""`espalier assign`: from a model and a file of points to a Parquet file of every item's best points.

Legend: I items.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from espalier.bundle import Bundle
from espalier.errors import BundleNotFound, InvalidConfig
from espalier.manifest import LinearScorer
from espalier.masks.filters import ItemFilters
from espalier.tree import Tree

from ..assign.best_points import BestPoints
from ..assign.labelwise import Labelwise, ScoredTree
from ..assign.point_files import PointFile
from ..assign.retention import Retention, by_depth, by_share
from ..versions import only_run

log = logging.getLogger(__name__)
KEEP_EVERY_S = 60.0
"""How often the state is kept on disk."""
ROWS = 1 << 20
"""Pairs that are written at a time."""
FILTER_BYTES = 1 << 30
MAX_RANKS = 1 << 25
"""Most ranks of a node's children that are made at once, by each thread."""


Rule = Literal["paper", "released"]


@dataclass(frozen=True)
class Assignment:
    """What is asked for.

    per_item, per_point  most points of an item, and most items of a point (None: any number)
    rule, factor         how many points go down to a node: see `retention.py`. None: the rule's default, 4 (paper) or 10 (released)
    block                points that are predicted together; fewer where a node has so many children that their ranks would not fit
    filter               conditions on items, as requests write them
    column               of a table of texts, the texts
    """

    per_item: int
    per_point: int | None = None
    rule: Rule = "paper"
    factor: float | None = None
    block: int = 1 << 14
    filter: str = "{}"
    column: str = "query"

    def check(self) -> None:
        """Raise InvalidConfig for numbers that are too small."""
        for name, value in (("--per-item", self.per_item), ("--per-point", self.per_point), ("--block", self.block)):
            if value is not None and value < 1:
                raise InvalidConfig(name, value, "at least 1")
        if self.factor is not None and not 0 < self.factor < float("inf"):
            raise InvalidConfig("--factor", self.factor, "a finite number above 0")


def assign(bundle: Bundle, data: Path, asked: Assignment, out: Path, resume: bool = False, threads: int | None = None) -> int:
    """Write the pairs to `out` (item, place, point, score) and return how many there are.

    The state lies in a folder beside `out` until then; with `resume`, a killed run of the same model, file and options goes on from there.
    Raises InvalidConfig and InvalidData.
    """
    asked.check()
    if out.exists() and not out.is_file():
        raise InvalidConfig("--out", str(out), "a file to write, not a folder or a device")
    work = out.absolute().parent / f".{out.name}.work"
    with only_run(work):
        return _assign(bundle, data, asked, out, work, resume, threads or len(os.sched_getaffinity(0)))


def _assign(bundle: Bundle, data: Path, asked: Assignment, out: Path, work: Path, resume: bool, threads: int) -> int:
    points = PointFile(bundle, data, asked.column)
    count = points.count()
    eligible_I = _eligible(bundle, asked.filter)
    best = BestPoints(np.flatnonzero(eligible_I), asked.per_item, len(bundle.alone))
    state, identity, mine = work / "state.npz", work / "identity", _identity(bundle, data, asked)
    if resume and state.is_file() and identity.is_file():  # one alone: killed while the folder was being deleted
        if identity.read_text() != mine:
            raise InvalidConfig("--resume", str(work), "the folder of a run with this model, file and options; leave it out to start anew")
        best.read(state)
    else:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        identity.write_text(mine)
    trees = scored_trees(bundle, asked, count)
    labelwise = Labelwise(trees, bundle.manifest.ranking, eligible_I, asked.per_item, threads)
    kept_at = time.monotonic()
    with tqdm(total=count, initial=best.done, desc="points", unit="point", disable=None) as bar:
        for block in points.blocks(min(asked.block, block_limit(trees)), best.done):
            best.add(labelwise.predict(block, asked.per_point), len(block))
            bar.update(len(block))
            if time.monotonic() - kept_at > KEEP_EVERY_S:
                best.write(state)
                kept_at = time.monotonic()
    pairs = _write(bundle, best, out)
    shutil.rmtree(work)
    return pairs


def scored_trees(bundle: Bundle, asked: Assignment, points: int) -> list[ScoredTree]:
    """A model's trees, with how many of a file's points go down to their nodes. Raises InvalidConfig and BundleNotFound."""
    if not isinstance(bundle.manifest.scorer, LinearScorer):
        raise InvalidConfig("--model", f"{bundle.manifest.scorer.kind} scorers", "a model of linear scorers")
    return [ScoredTree(tree, chunks, _retention(bundle, tree, asked, points)) for tree, chunks in bundle.trees]


def block_limit(trees: Sequence[ScoredTree]) -> int:
    """The most points of a block, all of which may come to the node with the most children."""
    return max(1, MAX_RANKS // max(most for tree in trees for most in tree.tree.max_children))


def _retention(bundle: Bundle, tree: Tree, asked: Assignment, count: int) -> Retention:
    if asked.rule == "released":
        return by_depth(tree, count, 10.0 if asked.factor is None else asked.factor, asked.per_item)
    counts = bundle.label_counts()
    if counts is None:
        raise BundleNotFound(f"{bundle.path}: it does not say how many training points items had; use --rule released, or train it anew")
    return by_share(tree, counts.counts_I, counts.points, 4.0 if asked.factor is None else asked.factor, asked.per_item)


def _eligible(bundle: Bundle, written: str) -> NDArray[np.bool_]:
    """bool[I]: the items that pass the filter."""
    try:
        conditions = json.loads(written)
    except (ValueError, RecursionError) as error:  # also of a number of too many digits
        raise InvalidConfig("--filter", written, f'JSON ({error}), for example {{"language": ["en"]}}') from error
    if not isinstance(conditions, dict):
        raise InvalidConfig("--filter", written, 'an object, for example {"language": ["en"]}')
    filters = ItemFilters([tree.tree for tree in bundle.trees], bundle.items, FILTER_BYTES)
    eligible_I = filters.matches(filters.parse(conditions, {}), np.arange(len(bundle.items)))
    if not eligible_I.any():
        raise InvalidConfig("--filter", written, "conditions that some item meets")
    return eligible_I


def _identity(bundle: Bundle, data: Path, asked: Assignment) -> str:
    status = data.stat()
    files = {name: info.sha256 for name, info in sorted(bundle.manifest.files.items())}
    written = json.dumps([files, str(data.absolute()), status.st_size, status.st_mtime_ns, asdict(asked)])
    return hashlib.sha256(written.encode()).hexdigest()


def _write(bundle: Bundle, best: BestPoints, out: Path) -> int:
    """Write all pairs, by item, best first, all or nothing. Returns how many there are."""
    schema = pa.schema([("item", pa.string()), ("place", pa.int32()), ("point", pa.int64()), ("score", pa.float32())])
    unfinished, written = out.with_name(f".{out.name}.part"), 0
    rows = max(1, ROWS // best.point_IK.shape[1])
    try:
        with pq.ParquetWriter(unfinished, schema) as writer:
            for begin in range(0, len(best.item_I), rows):
                pairs, place = best.pairs(slice(begin, begin + rows))
                columns = [bundle.items.ids_of(pairs.item), place.astype(np.int32), pairs.point, pairs.score]
                writer.write_table(pa.table(columns, schema=schema))
                written += len(pairs.item)
        unfinished.replace(out)
    finally:  # what a full disk cut off would keep it full
        unfinished.unlink(missing_ok=True)
    return written
