"""Publishing a bundle: written bare, its golden queries answered, verified, measured, and only then put in its place.

All producers of bundles end here, so a bundle at its place has passed the same checks whoever made it. A run that is killed leaves at
most a hidden temporary folder beside the place, until the next version of the model is published.

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
from numpy.typing import NDArray

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
    write_bare: Callable[[Path], Bundle],
    golden: Callable[[Bundle], pa.Table],
    measure: Callable[[Bundle, Engine], dict[str, Any]] | None = None,
    ms: Sequence[int] = (),
) -> Bundle:
    """Write models/<name>/<version>/ (`path`) and return it, verified and measured.

    write_bare   writes the bundle to the folder that it is given; its golden table may be `unanswered`
    golden       the golden queries of the bare bundle with the reference engine's answers
    measure      entries of the manifest's `metrics`; None: the bare bundle's metrics and recall columns stay
    ms           the m of the recall columns of heldout.parquet

    Raises BundleExists where `path` is taken, BundleCorrupt where the engine or the ranker fails the golden queries.
    """
    make_folder(path.parent)
    with scratch(path.parent) as folder:
        bare = write_bare(folder / path.absolute().parent.name / path.name)
        table, metrics, heldout = golden(bare), bare.manifest.metrics, bare.heldout()
        engine = open_engine(bare, "cpu")
        try:
            overlap = verify_golden(bare, engine, table)
            if measure is not None:
                metrics = {"golden_overlap": overlap} | measure(bare, engine)
                heldout = with_recall(bare, engine, ms)
        finally:
            engine.close()
        if bare.manifest.content is not None:
            ContentRows(bare)
        if bare.manifest.ranker is not None:
            reranker = Reranker(bare)
            table = _with_ranker_scores(bare, reranker.info, table)
            verify_ranker(bare, reranker, table)
        fields = {"metrics": metrics, "command": training_command()}
        return with_parts(bare, path, fields, {"golden.parquet": table, "heldout.parquet": heldout})


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A hidden folder, deleted at the end. Those that killed runs have left, each as large as a bundle, are deleted first.

    A running process holds the lock in its folder, of which the system frees a killed one. The file gets its name when it is locked.
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
    """The command line of `espalier`, or of `python -m training`, quoted for a shell; None in a process that something else started."""
    program, *arguments = sys.argv
    is_ours = Path(program).name == "espalier" or Path(program) == Path(__file__).with_name("__main__.py")
    return shlex.join(["espalier", *arguments]) if is_ours else None


def _with_ranker_scores(bundle: Bundle, ranker: RankerInfo, golden: pa.Table) -> pa.Table:
    """The golden table with the ranker's score of every golden item, in place of an earlier ranker's."""
    scores = golden_scores(bundle, golden, RankFeatures(bundle, ranker.features), bundle.graph(RANKER))
    kept = golden.select([name for name in golden.column_names if name != GOLDEN_SCORES])
    return kept.append_column(pa.field(GOLDEN_SCORES, scores.type), scores)


def unanswered(heldout: pa.Table, kind: str) -> pa.Table:
    """The golden table of a bare bundle: its columns without a row, the queries' with the type that they have in `heldout`."""
    return pa.table({kind: heldout.column(kind).slice(0, 0)} | {name: pa.array([], column) for name, column in GOLDEN_COLUMNS.items()})


def golden_beams(beam_size: int, count: int) -> NDArray[np.int64]:
    """int64[count]: the default beam, a half, a third and a quarter of it in turn, so that golden queries cut beams of several sizes."""
    return np.maximum(1, beam_size // (1 + np.arange(count) % 4))


def reported_ms(wanted: Sequence[int], max_m: int) -> list[int]:
    """The numbers of results that a bundle reports its figures for."""
    return sorted({min(m, max_m) for m in wanted})
