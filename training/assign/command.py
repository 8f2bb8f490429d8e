"""`espalier assign`: from a model and a file of points to a Parquet file of every item's best points.

Legend: I items.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from espalier.arrays import Bool
from espalier.bundle import Bundle
from espalier.durable import atomic_write
from espalier.errors import BundleNotFound, InvalidConfig
from espalier.hardware import cores
from espalier.manifest import LinearScorer
from espalier.masks.filters import ItemFilters
from espalier.tree import Tree

from ..assign.best_points import BestPoints
from ..assign.labelwise import Labelwise, Retention, ScoredTree, by_depth, by_share
from ..assign.point_files import PointFile
from ..run_files import check_identity
from ..versions import run_folder

log = logging.getLogger(__name__)
KEEP_EVERY_S = 60.0
"""Seconds between two writes of the state to disk."""
ROWS = 1 << 20
"""Pairs written at a time."""
FILTER_BYTES = 1 << 30
MAX_RANKS = 1 << 25
"""Most ranks of a node's children that a thread computes at once, and most pairs of a block if points are limited."""


Rule = Literal["paper", "released"]


@dataclass(frozen=True)
class Assignment:
    """The options of the command.

    per_item, per_point  most points of an item, and most items of a point (None: any number)
    rule, factor         how many points go down to a node: see `Retention`. None: the rule's default, 4 (paper) or 10 (released)
    block                points predicted together; fewer if the ranks of a node's children, or the pairs, would exceed MAX_RANKS
    filter               conditions on items, as in requests
    column               the text column of a table
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


def assign(bundle: Bundle, data: Path, assignment: Assignment, out: Path, resume: bool = False) -> int:
    """Write the pairs to `out` (item, place, point, score) and return their number.

    Until then the state is in a folder beside `out`. With `resume`, a run continues a killed run of the same model, file and options.
    Raises InvalidConfig and InvalidData.
    """
    assignment.check()
    if out.exists() and not out.is_file():
        raise InvalidConfig("--out", str(out), "a file to write, not a folder or a device")
    with run_folder(out, resume) as work:
        return _assign(bundle, data, assignment, out, work, resume)


def _assign(bundle: Bundle, data: Path, assignment: Assignment, out: Path, work: Path, resume: bool) -> int:
    points = PointFile(bundle, data, assignment.column)
    count = points.count()
    eligible_I = _eligible(bundle, assignment.filter)
    best_points = BestPoints(np.flatnonzero(eligible_I), assignment.per_item, len(bundle.alone))
    check_identity(work, _identity(bundle, data, assignment), resume)
    state = work / "state.npz"
    if state.is_file():
        best_points.read(state)
    trees = scored_trees(bundle, assignment, count)
    if stages := [name for name, stage in (("the tail", bundle.tail), ("stacking", bundle.stacking)) if stage is not None]:
        log.warning("%s: scores are the trees' alone; a search adds %s", bundle.path, " and ".join(stages))
    labelwise = Labelwise(trees, bundle.manifest.ranking, eligible_I, assignment.per_item, cores())
    written_at = time.monotonic()
    with tqdm(total=count, initial=best_points.done, desc="points", unit="point", disable=None) as bar:
        for block in points.blocks(min(assignment.block, block_limit(trees, assignment.per_point)), best_points.done):
            best_points.add(labelwise.predict(block, assignment.per_point), len(block))
            bar.update(len(block))
            if time.monotonic() - written_at > KEEP_EVERY_S:
                best_points.write(state)
                written_at = time.monotonic()
    pairs = _write(bundle, best_points, out)
    state.unlink(missing_ok=True)  # before the identity: a run may be killed while the folder is deleted
    return pairs


def scored_trees(bundle: Bundle, assignment: Assignment, points: int) -> list[ScoredTree]:
    """A model's trees, each with its retention for a file of so many points. Raises InvalidConfig and BundleNotFound."""
    if not isinstance(bundle.manifest.scorer, LinearScorer):
        raise InvalidConfig("--model", f"{bundle.manifest.scorer.kind} scorers", "a model of linear scorers")
    return [ScoredTree(tree, chunks, _retention(bundle, tree, assignment, points)) for tree, chunks in bundle.trees]


def block_limit(trees: Sequence[ScoredTree], per_point: int | None = None) -> int:
    """The most points of a block: all of them may reach the node with the most children, and have `per_point` items in each tree."""
    items = min(per_point or 0, trees[0].tree.item_count)
    return max(1, MAX_RANKS // max(items * len(trees) ** 2, *(most for tree in trees for most in tree.tree.max_children)))


def _retention(bundle: Bundle, tree: Tree, assignment: Assignment, count: int) -> Retention:
    if assignment.rule == "released":
        return by_depth(tree, count, 10.0 if assignment.factor is None else assignment.factor, assignment.per_item)
    counts = bundle.label_counts()
    if counts is None:
        raise BundleNotFound(f"{bundle.path}: it does not say how many training points items had; use --rule released, or train it anew")
    return by_share(tree, counts.counts_I, counts.points, 4.0 if assignment.factor is None else assignment.factor, assignment.per_item)


def _eligible(bundle: Bundle, text: str) -> Bool:
    """bool[I]: the items that pass the filter."""
    try:
        conditions = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number with too many digits
        raise InvalidConfig("--filter", text, f'JSON ({error}), for example {{"language": ["en"]}}') from error
    if not isinstance(conditions, dict):
        raise InvalidConfig("--filter", text, 'an object, for example {"language": ["en"]}')
    filters = ItemFilters([tree.tree for tree in bundle.trees], bundle.items, FILTER_BYTES)
    eligible_I = filters.matches(filters.parse(conditions, {}), np.arange(len(bundle.items)))
    if not eligible_I.any():
        raise InvalidConfig("--filter", text, "conditions that some item meets")
    return eligible_I


def _identity(bundle: Bundle, data: Path, assignment: Assignment) -> dict[str, str]:
    status = data.stat()
    files = json.dumps({name: info.sha256 for name, info in sorted(bundle.manifest.files.items())})
    return {
        "the model": hashlib.sha256(files.encode()).hexdigest(),
        "the points": f"{data.absolute()}, {status.st_size} bytes, {status.st_mtime_ns} ns",
        "the options": json.dumps(asdict(assignment)),
    }


def _write(bundle: Bundle, best_points: BestPoints, out: Path) -> int:
    """Write all pairs, by item, best first, all or nothing. Returns their number."""
    schema = pa.schema([("item", pa.string()), ("place", pa.int32()), ("point", pa.int64()), ("score", pa.float32())])
    rows, written = max(1, ROWS // best_points.point_IK.shape[1]), 0
    with atomic_write(out) as part, pq.ParquetWriter(part, schema) as writer:
        for begin in range(0, len(best_points.item_I), rows):
            pairs, rank = best_points.pairs(slice(begin, begin + rows))
            columns = [bundle.items.ids_of(pairs.item), rank.astype(np.int32), pairs.point, pairs.score]
            writer.write_table(pa.table(columns, schema=schema))
            written += len(pairs.item)
    return written
