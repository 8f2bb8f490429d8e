"""What a fold learns from a log, without training: the memory and the counts of all items, and the rows of live ones.

The query encoder, the rows of trained items and of inner nodes, γ, λ, the weights of a history's places, the repeat term and the
calibration stay. Of an item that the log lacks the memory's entries of before stay, too, where it came with a count, with which they were
made, or without events; of two the larger counts.

Legend: J items of the fold.
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
from espalier.label_counts import LabelCounts
from espalier.manifest import InnerProductForm, ManifestDraft, MemoryFormula
from espalier.memory import LARGEST_VALUE, Memory
from espalier.node_rows import rounded, stored_as
from espalier.placement.popularity import MOST_EVENTS
from espalier.queries import HistoryKind

from ..arrays import Int64
from ..data.interactions import read_interactions
from ..data.splits import Split, split_log
from ..live.catalogue import JournalItems
from ..live.fitted_rows import BACKGROUND, fitted_rows, mean_states
from ..live.fold_log import FoldLog, fold_log, given_counts
from ..neighbours.cooccurrence import lists_of
from ..neighbours.fit import WITHOUT_ORDER, fitted_to
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


def _with_fitted_rows(content: GraphContent, draft: ManifestDraft, lists: FoldLog, items: Int64, work: Path) -> GraphContent:
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
        rows_IS = fitted_rows(bare, leaf_I, mean_IS, events_I, share_I, background)
    log.info("rows of %d live items are fitted to %d events", len(leaf_I), len(histories))
    stored = np.array(content.stored_rows)
    stored[leaf_I] = stored_as(rounded(rows_IS, stored.dtype), stored.dtype)
    return replace(content, stored_rows=stored)


def counted_anew(content: GraphContent, lists: FoldLog, given_J: Int64) -> GraphContent:
    """The content with the counts and the memory that the lists give.

    given_J  int64[J]: events that callers say items have had; 0: nobody says
    A memory of which nobody knows how it was made stays as it is.
    """
    events_J = lists_of(lists.lists, lists.users).events_I
    placed_J = events_J if content.counts is None else np.maximum(events_J, content.counts.counts_I)
    most = int(placed_J.max(initial=0))  # as of a placed item: none is taken to be more popular than the most popular one
    counts_J = np.where(lists.logged_J, np.maximum(events_J, np.minimum(given_J, most)), placed_J)
    counts = LabelCounts(counts_J, int(counts_J.sum()))
    memory = content.memory
    if memory is None or memory.formula is None:
        log.info("the memory stays as it is: the bundle %s", "has none" if memory is None else "does not say how it was made")
        return replace(content, counts=counts)
    counted = _counted(memory, memory.formula, lists)
    placed_better_J = ~lists.logged_J & ((given_J > events_J) | (events_J == 0))
    return replace(content, counts=counts, memory=_joined(counted, memory, placed_better_J))


def _counted(memory: Memory, formula: MemoryFormula, lists: FoldLog) -> Memory:
    """As many neighbours an item as the memory has, at most, by descending S."""
    names = formula.model_dump(exclude={"unit"})
    found = fitted_to(lists.lists, lists.users, WITHOUT_ORDER | names, seed=0).lists.limited(int(np.diff(memory.offset).max(initial=0)))
    value = np.minimum(found.score_N / np.float32(formula.unit), LARGEST_VALUE).astype(np.float16)
    return replace(memory, offset=found.offset_I1, item=found.item_N.astype(np.int32), value=value)


def _joined(counted: Memory, placed: Memory, kept_J: NDArray[np.bool_]) -> Memory:
    """The counted entries with the placed ones that lead from or to some items (kept_J); each row by ascending item."""
    source = np.repeat(np.arange(len(placed.offset) - 1), np.diff(placed.offset))
    kept = kept_J[source] | kept_J[placed.item]
    source = np.append(np.repeat(np.arange(len(counted.offset) - 1), np.diff(counted.offset)), source[kept])
    item, value = np.append(counted.item, placed.item[kept]), np.append(counted.value, placed.value[kept])
    order = np.lexsort((-value, item, source))
    source, item, value = source[order], item[order], value[order]
    first = np.append(True, (np.diff(source) != 0) | (np.diff(item) != 0))[: len(order)] & (value > 0)
    offset = np.append(0, np.cumsum(np.bincount(source[first], minlength=len(placed.offset) - 1)))
    return replace(counted, offset=offset, item=item[first], value=value[first]).bounded()
