"""Publishes a bundle: writes it to a hidden folder, answers its golden queries, verifies it, measures it, and renames it to its path.

All producers of bundles end here, so every bundle has passed the same checks. A killed run leaves at most a hidden temporary folder beside
the path, which the next publication of a version of the model deletes.

Knows bundles and engines. Does not know how a model is trained or which queries measure it.

Legend: B queries.
"""

from __future__ import annotations

import fcntl
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from espalier.arrays import Int64
from espalier.bundle import RANKER, Bundle
from espalier.bundle_writer import make_folder, with_parts
from espalier.checks.golden import GOLDEN_COLUMNS, verify_golden
from espalier.content.rows import ContentRows
from espalier.engines import open_engine
from espalier.manifest import RankerInfo
from espalier.rerank.features import RankFeatures
from espalier.rerank.ranker import GOLDEN_SCORES, Reranker, golden_scores, verify_ranker
from espalier.search import Engine

from .evaluate import with_recall

HELD_OUT_QUERIES = 1000
"""Held-out queries that a bundle keeps, at most."""
GOLDEN_QUERIES = 32


def publish(
    path: Path,
    write_draft: Callable[[Path], Bundle],
    golden: Callable[[Bundle], pa.Table],
    measure: Callable[[Bundle, Engine], dict[str, Any]] | None = None,
    ms: Sequence[int] = (),
) -> Bundle:
    """Write models/<name>/<version>/ (`path`) and return it, verified and measured.

    write_draft  writes the bundle to a folder; its golden table may be `unanswered`
    golden       the golden queries of the draft with the reference engine's answers
    measure      entries of the manifest's `metrics`; None: the draft's metrics and recall columns stay
    ms           the m of the recall columns of heldout.parquet

    Raises BundleExists if `path` exists, BundleCorrupt if the engine or the ranker fails the golden queries.
    """
    make_folder(path.parent)
    with scratch(path.parent) as folder:
        draft = write_draft(folder / path.absolute().parent.name / path.name)
        table, metrics, heldout = golden(draft), draft.manifest.metrics, draft.heldout()
        engine = open_engine(draft, "cpu")
        try:
            overlap = verify_golden(draft, engine, table)
            if measure is not None:
                metrics = {"golden_overlap": overlap} | measure(draft, engine)
                heldout = with_recall(draft, engine, ms)
        finally:
            engine.close()
        if draft.manifest.content is not None:
            ContentRows(draft)
        if draft.manifest.ranker is not None:
            reranker = Reranker(draft)
            table = _with_ranker_scores(draft, reranker.info, table)
            verify_ranker(draft, reranker, table)
        fields = {"metrics": metrics, "command": training_command()}
        return with_parts(draft, path, fields, {"golden.parquet": table, "heldout.parquet": heldout})


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A hidden folder, deleted at the end. Folders of killed runs, each as large as a bundle, are deleted first.

    A running process holds a lock in its folder; the system frees that of a killed one. The file gets its name when it is locked.
    """
    for lock in parent.glob(".publish-*/lock"):
        with suppress(OSError), lock.open("r+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=".publish-", dir=parent) as name:
        folder = Path(name)
        with (folder / "unlocked").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            (folder / "unlocked").rename(folder / "lock")
            yield folder


def training_command() -> str | None:
    """The command line of `espalier`, also as `python -m`, or of `python -m training`, quoted for a shell; None in any other process."""
    program, *arguments = sys.argv
    path = Path(program)
    modules = Path(__file__).with_name("__main__.py"), Path(__file__).parents[1] / "espalier_cli" / "__main__.py"
    is_ours = path.name == "espalier" or path in modules
    return shlex.join(["espalier", *arguments]) if is_ours else None


def _with_ranker_scores(bundle: Bundle, ranker: RankerInfo, golden: pa.Table) -> pa.Table:
    """The golden table with the ranker's score of every golden item, in place of an earlier ranker's."""
    scores = golden_scores(bundle, golden, RankFeatures(bundle, ranker.features), bundle.graph(RANKER))
    other_columns = golden.select([name for name in golden.column_names if name != GOLDEN_SCORES])
    return other_columns.append_column(pa.field(GOLDEN_SCORES, scores.type), scores)


def unanswered(heldout: pa.Table, kind: str) -> pa.Table:
    """The golden table of a draft: its columns without rows; the query column has its type of `heldout`."""
    return pa.table({kind: heldout.column(kind).slice(0, 0)} | {name: pa.array([], column) for name, column in GOLDEN_COLUMNS.items()})


def golden_beams(beam_size: int, count: int) -> Int64:
    """int64[count]: the default beam, a half, a third and a quarter of it in turn, so that golden queries cover several beam sizes."""
    return np.maximum(1, beam_size // (1 + np.arange(count) % 4))


def reported_ms(requested_ms: Sequence[int], max_m: int) -> list[int]:
    """The m for which a bundle reports its figures."""
    return sorted({min(m, max_m) for m in requested_ms})
