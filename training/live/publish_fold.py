"""`espalier fold`: the next version of a model is its bundle with live items in it, published without training.

The golden and held-out queries are those of the version before: golden queries are answered again, held-out queries measured again, unless
a log may have taught their answers. A fold keeps what only training can learn: γ, λ, the calibration, stacking, the ranker. With a log, the
memory and the rows of live items are learned from it (`learned_fold.py`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from espalier.bundle import RANKER, Bundle
from espalier.bundle_writer import GraphContent, LinearContent, with_ranker, write_bundle
from espalier.checks.golden import encode_table
from espalier.chunks import Chunks, TreeChunks
from espalier.errors import InvalidConfig
from espalier.live.fold import Folded, fold_draft, folded
from espalier.live.state import LiveState
from espalier.packed_chunks import rounded
from espalier.rerank.text_matches import ranker_texts
from espalier.search import Engine

from ..evaluate import held_out_queries, measure
from ..golden import answered_anew
from ..live.catalogue import journal_of, read_items
from ..live.learned_fold import Lesson, learn_from_log, put_since_training, read_split
from ..live.replay import held_through, replay_operations
from ..live.splitting import split_for_padding
from ..publish import publish, reported_ms
from ..versions import new_version, run_folder

log = logging.getLogger(__name__)

MS = (10, 50, 100)
"""Numbers of results that a version reports its figures for."""
CROWDED = 0.1
"""If more than this share of the parents of leaves is split, the log message is a warning that advises to train."""


def fold(model: Path, out: Path, log_file: Path | None = None) -> Bundle:
    """Write models/NAME/VERSION (`out`), a version with all items of its journal in it, verified and measured on its held-out queries.

    log_file  the log to learn from; None: learn nothing
    Raises InvalidConfig if `out` is of another model, the version already holds all of the journal, or the model cannot learn from a log;
    InvalidData if the log cannot be read.
    """
    new_version(out)
    bundle, now = Bundle.open(model), time.time()
    if out.absolute().parent != model.absolute().parent:
        raise InvalidConfig("--out", str(out), f"another version of {model.absolute().parent.name}: a journal is one model's")
    items, held_sequence = read_items(journal_of(model), now), held_through(bundle)
    if items is None or items.through <= held_sequence:
        problem = "no journal" if items is None else f"a journal through operation {items.through}, all of which it holds"
        raise InvalidConfig("--model", f"{model} with {problem}", "a version with live items that it does not hold")
    state = replay_operations(bundle, journal_of(model), items.operations, now)
    log.info("%d live items and %d tombstones, through operation %d", state.live_items, state.tombstones, state.sequence)
    if log_file is None:
        return publish_fold(bundle, state, out)
    with run_folder(out, resume=False) as work:
        split = read_split(bundle, log_file, work)
        return publish_fold(bundle, state, out, Lesson(split, items, put_since_training(bundle, items), work))


def publish_fold(bundle: Bundle, state: LiveState, out: Path, lesson: Lesson | None = None) -> Bundle:
    """Write models/NAME/VERSION (`out`), the bundle with all items of a state in it, verified and measured on its held-out queries.

    lesson  the log of histories to learn from; None: learn nothing
    The new bundle has the ranker of the old one. Raises BundleExists if `out` exists, InvalidData if no item would be left.
    """
    content = storable_content(bundle, folded(bundle, state.overlay(), state.table))
    draft = fold_draft(bundle, out, state.overlay())
    draft = draft.model_copy(update={"data": draft.data | {"items": len(content.items)}, "metrics": {}})
    if lesson is not None and isinstance(content, GraphContent):
        content = learn_from_log(content, draft, lesson)
    ms = reported_ms(MS, draft.search.max_m)

    def measure_bundle(written: Bundle, engine: Engine) -> dict[str, Any]:
        queries = held_out_queries(written)
        if lesson is not None and not lesson.holds_out_as(bundle):
            log.warning("no recall is reported: the log has grown since training, and may contain what the held-out queries should find")
            return {}
        return {"test": {"raw": measure(written, engine, queries, [draft.search.beam_size], ms, batch=64)}} if len(queries) else {}

    def write_version(folder: Path) -> Bundle:
        ranker = bundle.manifest.ranker
        if ranker is None:
            return write_bundle(folder, draft, content)
        written = write_bundle(folder.with_name("unranked") / folder.name, draft, content)
        return with_ranker(written, folder, ranker, bundle.graph(RANKER), ranker_texts(written, ranker.features))

    golden = bundle.golden()
    return publish(out, write_version, lambda written: answered_anew(golden, written, encode_table(written, golden)), measure_bundle, ms)


def storable_content(bundle: Bundle, fold: Folded) -> GraphContent | LinearContent:
    """The content of a fold, ready to write: numbers as narrow as the bundle's, and no node with more children than padding allows."""
    content = fold.content
    if isinstance(content, LinearContent):
        first, *others = [
            tree._replace(chunks=_narrowed(tree.chunks, original.chunks))
            for tree, original in zip((TreeChunks(content.tree, content.chunks), *content.others), bundle.alone, strict=True)
        ]
        return replace(content, chunks=first.chunks, others=others)
    split_tree = split_for_padding(content.tree)
    if split_tree.split_count:
        parents = bundle.tree.level_size(bundle.tree.height - 1)
        log.log(
            logging.WARNING if split_tree.split_count > CROWDED * parents else logging.INFO,
            "%d of %d nodes above the leaves have too many items and are split; where these are many, `fit` with `--earlier` finds more",
            split_tree.split_count,
            parents,
        )
    stored = np.asarray(content.stored_rows)[split_tree.source_N]
    return replace(content, tree=split_tree.tree, stored_rows=stored)


def _narrowed(chunks: Chunks, original: Chunks) -> Chunks:
    """The chunks with weights in float16, if the original ones are and it can hold them."""
    if chunks.entry_weight.dtype == original.entry_weight.dtype:
        return chunks
    return rounded(chunks) or chunks
