"""What a fold learns from a log, without training: the memory and the counts of all items, and the rows of live ones.

The query encoder, the rows of trained items and of inner nodes, γ, λ and the calibration stay.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.errors import InvalidConfig
from espalier.manifest import InnerProductForm, ManifestDraft
from espalier.node_rows import rounded, stored_as
from espalier.placement.popularity import MOST_EVENTS
from espalier.queries import HistoryKind

from ..data.interactions import read_interactions
from ..data.splits import Split, split_log
from ..live.catalogue import JournalItems
from ..live.counted_memory import counted_anew
from ..live.fitted_rows import BACKGROUND, Evidence, fitted_rows, mean_states
from ..live.fold_log import FoldLog, fold_log, given_counts
from ..specification.deep import DeepConfig
from ..specification.models import config_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a fold learns from.

    split    of a log of histories
    journal  all that the model's journal says
    trained  the operation up to which its items were trained
    work     a folder for files
    """

    split: Split
    journal: JournalItems
    trained: int
    work: Path


def read_split(bundle: Bundle, file: Path, work: Path) -> Split:
    """A log as the configuration in a bundle reads and splits it. Raises InvalidConfig for models of other queries than histories."""
    if not isinstance(bundle.manifest.query, HistoryKind):
        raise InvalidConfig("--log", str(file), f"no log with a model of {bundle.manifest.query.kind} queries, only with one of histories")
    config = config_of(bundle.manifest, DeepConfig)
    interactions = read_interactions(file, config.data.format, work)
    return split_log(interactions, config.data.split, config.data.format, work, seed=config.seed)


def trained_through(bundle: Bundle) -> int:
    """The last operation whose item the rows of a version were trained with; 0 for a fold, of which nobody knows."""
    live = bundle.manifest.live
    return 0 if live is None or live.folded_from is not None else live.through


def learned(content: GraphContent, draft: ManifestDraft, lesson: Lesson) -> GraphContent:
    """The content of a fold, of histories, with what a log says. Raises InvalidData where nothing is left to learn from."""
    journal = lesson.journal
    lists = fold_log(lesson.split, journal, content.items, lesson.work)
    content = counted_anew(content, lists, given_counts(journal, content.items))
    config = config_of(draft, DeepConfig)
    if not (isinstance(content.form, InnerProductForm) and config.is_softmax and draft.ranking.own == "logit"):
        log.info("rows of live items stay as they were placed: they are fitted for inner products that a softmax has trained")
        return content
    put = [item_id for item_id, operation in journal.put.items() if operation.sequence > lesson.trained and operation.body.has_evidence]
    rows = content.items.rows_of(put)
    return _with_fitted_rows(content, draft, lists, np.unique(rows[rows >= 0]), lesson.work)


def _with_fitted_rows(content: GraphContent, draft: ManifestDraft, lists: FoldLog, items: NDArray[np.int64], work: Path) -> GraphContent:
    """The content with fitted rows of those of some items that have events."""
    rng = np.random.default_rng(config_of(draft, DeepConfig).seed)
    of_n, histories = lists.events_of(items, MOST_EVENTS, rng)
    has_events, of_n = np.unique(of_n, return_inverse=True)
    background = lists.drawn(BACKGROUND, rng)
    if not len(has_events) or not background or content.counts is None:
        return content
    with TemporaryDirectory(dir=work) as folder:  # states are made with the rows of a bundle
        bare = write_bundle(Path(folder) / draft.name / str(draft.version), draft, content, check_padding=False)
        leaf_I = bare.tree.leaf_of_item[items[has_events]]
        mean_IS, events_I = mean_states(bare, of_n, histories, len(leaf_I))
        counts_J = content.counts.counts_I
        share_I = (np.maximum(counts_J[items[has_events]], events_I) / counts_J.sum()).astype(np.float32)
        rows_IS = fitted_rows(bare, Evidence(leaf_I, mean_IS, events_I, share_I), background)
    log.info("rows of %d live items are fitted to %d events", len(leaf_I), len(histories))
    stored = np.array(content.stored_rows)
    stored[leaf_I] = stored_as(rounded(rows_IS, stored.dtype), stored.dtype)
    return replace(content, stored_rows=stored)
