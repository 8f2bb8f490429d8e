"""A fold learns the memory, the counts of all items and the rows of live items from a log, without training.

The query encoder, the rows of trained items and of inner nodes, γ, λ, the weights of a history's positions, the repeat term and the
calibration stay. An item that no training list has keeps its old memory entries, too, if its put operation states a count, from which they
were made, or has no events. Where an entry exists twice, the larger one counts. The rows of kind `neighbours` are made of the counts.

Legend: J items of the fold.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.errors import InvalidConfig
from espalier.label_counts import LabelCounts
from espalier.manifest import InnerProductForm, ManifestDraft, MemoryFormula
from espalier.memory import LARGEST_VALUE, Memory
from espalier.node_rows import rounded, stored_as
from espalier.placement.placer import trained_with
from espalier.placement.popularity import MOST_EVENTS
from espalier.queries import HistoryKind

from ..data.interactions import read_interactions
from ..data.splits import LEARNED_VALIDATION, Split, split_log
from ..live.catalogue import JournalItems
from ..live.fitted_rows import BACKGROUND, fitted_rows, mean_states
from ..live.fold_log import FoldLog, fold_log, stated_counts
from ..neighbours.cooccurrence import lists_of
from ..neighbours.fit import WITHOUT_ORDER, fit_neighbours
from ..neighbours.popularity import popularity_ranks
from ..specification.deep import DeepConfig, NeighboursConfig
from ..specification.models import config_of
from ..specification.splits import DateSplit, LastSplit

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Lesson:
    """The sources that a fold learns from.

    split    of a log of histories
    journal  the items of the model's journal
    put_ids  the items whose rows are learned
    work     a folder for files
    """

    split: Split
    journal: JournalItems
    put_ids: Sequence[str]
    work: Path

    def holds_out_as(self, bundle: Bundle) -> bool:
        """Whether the events of a bundle's held-out queries are certainly held out of the log: it is the training log."""
        return self.split.lists.fingerprint == bundle.manifest.data.get("sha256")


def read_split(bundle: Bundle, file: Path, work: Path) -> Split:
    """Read and split a log by the configuration in a bundle. Raises InvalidConfig for models of other queries than histories.

    Where the configuration holds out by time, nothing of a log that has grown is held out: what came since the training is what counts.
    """
    if not isinstance(bundle.manifest.query, HistoryKind):
        raise InvalidConfig("--log", str(file), f"no log with a model of {bundle.manifest.query.kind} queries, only with one of histories")
    config = config_of(bundle.manifest, DeepConfig)
    interactions = read_interactions(file, config.data.format, work)
    split = split_log(interactions, config.data.split, config.data.format, work, seed=config.seed)
    if isinstance(config.data.split, DateSplit | LastSplit) and interactions.fingerprint != bundle.manifest.data.get("sha256"):
        return replace(split, lists=interactions, train=np.arange(interactions.user_count), final=None)
    return split.whole() if bundle.manifest.data.get(LEARNED_VALIDATION) else split


def put_since_training(bundle: Bundle, journal: JournalItems) -> list[str]:
    """The ids of items with evidence that training did not have: that of a version, or of the one from which it was folded."""
    with_evidence = (operation for operation in journal.put.values() if operation.body.has_evidence)
    return [operation.id for operation in with_evidence if not trained_with(bundle, operation)]


def learn_from_log(content: GraphContent, draft: ManifestDraft, lesson: Lesson) -> GraphContent:
    """The content of a fold of a model of histories, updated from a log. Raises InvalidData if nothing is left to learn from."""
    journal = lesson.journal
    lists = fold_log(lesson.split, journal, content.items, lesson.work)
    content = with_new_counts(content, lists, stated_counts(journal, content.items))
    config = config_of(draft, DeepConfig)
    if isinstance(config, NeighboursConfig) and content.counts is not None:
        rows_ND = np.array(content.stored_rows)
        rows_ND[:, -1] = popularity_ranks(content.tree, content.counts.counts_I)
        return replace(content, stored_rows=rows_ND)
    if not (isinstance(content.graphs.form, InnerProductForm) and config.is_softmax and draft.ranking.own == "logit"):
        log.info("rows of live items stay as they were placed: they are fitted for inner products that a softmax has trained")
        return content
    rows = content.items.rows_of(lesson.put_ids)
    return _with_fitted_rows(content, draft, lists, np.unique(rows[rows >= 0]), lesson.work)


def _with_fitted_rows(content: GraphContent, draft: ManifestDraft, lists: FoldLog, items: Int64, work: Path) -> GraphContent:
    """The content with fitted rows for those of `items` that have events."""
    rng = np.random.default_rng(config_of(draft, DeepConfig).seed)
    item_n, histories = lists.events_of(items, MOST_EVENTS, rng)
    has_events, item_n = np.unique(item_n, return_inverse=True)
    background = lists.draw_histories(BACKGROUND, rng)
    if not len(has_events) or not background or content.counts is None:
        return content
    with TemporaryDirectory(dir=work) as folder:  # states are made with the rows of a bundle
        unfinished = write_bundle(Path(folder) / draft.name / str(draft.version), draft, content, check_padding=False)
        leaf_I = unfinished.tree.leaf_of_item[items[has_events]]
        mean_IS, events_I = mean_states(unfinished, item_n, histories, len(leaf_I))
        counts_J = content.counts.counts_I
        share_I = (np.maximum(counts_J[items[has_events]], events_I) / counts_J.sum()).astype(np.float32)
        rows_IS = fitted_rows(unfinished, leaf_I, mean_IS, events_I, share_I, background)
    log.info("rows of %d live items are fitted to %d events", len(leaf_I), len(histories))
    stored = np.array(content.stored_rows)
    stored[leaf_I] = stored_as(rounded(rows_IS, stored.dtype), stored.dtype)
    return replace(content, stored_rows=stored)


def with_new_counts(content: GraphContent, lists: FoldLog, stated_J: Int64) -> GraphContent:
    """The content with counts and memory from the lists.

    stated_J  int64[J]: `stated_counts`
    A memory without a formula stays as it is.
    """
    events_J = lists_of(lists.lists, lists.users).events_I
    placed_J = events_J if content.counts is None else np.maximum(events_J, content.counts.counts_I)
    most = int(placed_J.max(initial=0))  # the limit of a placed item: a stated count makes none more popular than the most popular one
    counts_J = np.where(lists.logged_J, np.maximum(events_J, np.minimum(stated_J, most)), placed_J)
    counts = LabelCounts(counts_J, int(counts_J.sum()))
    memory = content.memory
    if memory is None or memory.formula is None:
        log.info("the memory stays as it is: the bundle %s", "has none" if memory is None else "does not say how it was made")
        return replace(content, counts=counts)
    new_memory = _count_memory(memory, memory.formula, lists)
    keeps_entries_J = ~lists.logged_J & ((stated_J > events_J) | (events_J == 0))
    return replace(content, counts=counts, memory=_join_memories(new_memory, memory, keeps_entries_J))


def _count_memory(memory: Memory, formula: MemoryFormula, fold_lists: FoldLog) -> Memory:
    """A memory from the lists, with at most as many neighbours an item as the old one."""
    names = formula.model_dump(exclude={"unit"})
    most = int(np.diff(memory.offset).max(initial=0))
    neighbours = fit_neighbours(fold_lists.lists, fold_lists.users, WITHOUT_ORDER | names, seed=0).lists.limited(most)
    value = np.minimum(neighbours.score_N / np.float32(formula.unit), LARGEST_VALUE).astype(np.float16)
    return replace(memory, offset=neighbours.offset_I1, item=neighbours.item_N.astype(np.int32), value=value)


def _join_memories(counted: Memory, placed: Memory, keeps_entries_J: Bool) -> Memory:
    """The counted entries with the placed ones from or to the items in keeps_entries_J; each row by ascending item."""
    source = np.repeat(np.arange(len(placed.offset) - 1), np.diff(placed.offset))
    is_kept = keeps_entries_J[source] | keeps_entries_J[placed.item]
    source = np.append(np.repeat(np.arange(len(counted.offset) - 1), np.diff(counted.offset)), source[is_kept])
    item, value = np.append(counted.item, placed.item[is_kept]), np.append(counted.value, placed.value[is_kept])
    order = np.lexsort((-value, item, source))
    source, item, value = source[order], item[order], value[order]
    first = np.append(True, (np.diff(source) != 0) | (np.diff(item) != 0))[: len(order)] & (value > 0)
    offset = np.append(0, np.cumsum(np.bincount(source[first], minlength=len(placed.offset) - 1)))
    return replace(counted, offset=offset, item=item[first], value=value[first]).bounded()
