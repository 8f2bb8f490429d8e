"""Searches of validation queries, encoded once, and their figures.

Legend: B queries, M results, C cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.masks.eligibility import eligible_nodes, unrestricted_mask
from espalier.memory import Memory
from espalier.memory_lists import MemoryLists, MemoryTree
from espalier.metrics import precision_recall_f
from espalier.search import SearchParams

from ..data.splits import EvaluationPair
from ..deep.beam import OwnScore
from ..deep.memory import MemorySource, unit_of, with_weight
from ..deep.scorers.model import NodeScorer
from ..deep.topology import Topology
from ..deep.validation import EncodedQueries, encode_blocks, search_encoded
from ..publish import reported_ms
from ..retrieval.tuning import CUTS, Figures, Options
from ..specification.deep import DeepConfig


@dataclass
class Searches:
    """Searches of the same validation queries, encoded once; figures by options."""

    config: DeepConfig
    topology: Topology
    model: NodeScorer
    pairs: Sequence[EvaluationPair]
    own_score: OwnScore
    source: MemorySource | None = None
    figures: dict[tuple[tuple[str, Any], ...], Figures] = field(default_factory=dict, init=False)
    units: dict[tuple[Any, ...], float] = field(default_factory=dict, init=False)
    _entries: tuple[tuple[Any, ...], Memory] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.ms = reported_ms(CUTS, self.config.search.max_m)
        self.relevant = [pair.relevant for pair in self.pairs]
        self.length = self.config.history_length
        self.blocks = list(encode_blocks(self.config, self.topology, self.model, self.pairs))

    def memory(self, options: Options) -> Memory | None:
        """The memory of these options; None if they have none, or no validation query has any memory."""
        if self.source is None or "weight" not in options:
            return None
        per_item, recency, entries = options["kept"], options["recency"], self._entry_key(options)
        if self._entries is None or self._entries[0] != entries:
            self._entries = entries, self.source.with_options(options).memory(per_item, recency, self.length)
        unscaled = replace(self._entries[1], weight=self.source.weights(per_item, recency, self.length))
        key = *entries, recency
        if key not in self.units:
            self.units[key] = unit_of(self.lists(unscaled), self.topology.tree.leaf_offset, CUTS[-1])
        return with_weight(unscaled, self.units[key], options["weight"]) if self.units[key] > 0 else None

    def has_entries(self, options: Options) -> bool:
        """Whether the entries of their memory are cached."""
        return self._entries is not None and self._entries[0] == self._entry_key(options)

    def _entry_key(self, options: Options) -> tuple[Any, ...]:
        """The options that the entries of a memory depend on."""
        return options["kept"], *(self.source.weighed_options(options).values() if self.source is not None else ())

    def lists(self, memory: Memory) -> Iterator[MemoryLists]:
        """The nodes with memory, for each block of queries."""
        memory_tree = MemoryTree(memory, self.topology.tree)
        return (memory_tree.lists(block.rows, block.eligible) for block in self.blocks)

    def visits(self, source: MemorySource, per_item: int) -> float:
        """The mean number of a memory's entries that a query adds up."""
        length_I, positions = source.lengths(per_item), len(source.weights(per_item, source.recency, self.length))
        rows = np.concatenate([block.rows for block in self.blocks])
        position_BT = np.cumsum((rows >= 0)[:, ::-1], 1)[:, ::-1]  # 1 for the newest item
        is_counted_BT = (rows >= 0) & (position_BT <= positions)
        return float(length_I[rows[is_counted_BT]].sum()) / len(rows)

    def ranked(self, gamma: float, memory: Memory | None, m: int) -> tuple[Int64, Float32]:
        """int64[B, M] item rows and float32[B, M] keys of all queries."""
        memory_tree, weight = (None, 0.0) if memory is None else (MemoryTree(memory, self.topology.tree), memory.key_weight)
        remaining = (self._without_left_out(block, memory_tree) for block in self.blocks)
        blocks = ((block, None if memory_tree is None else memory_tree.lists(block.rows, block.eligible)) for block in remaining)
        return search_encoded(self.model, self.topology, blocks, gamma, self.own_score, self.config.search.beam_size, m, weight)

    def _without_left_out(self, block: EncodedQueries, memory_tree: MemoryTree | None) -> EncodedQueries:
        """The block without the items that the memory leaves out; if the configuration excludes seen items, they already are."""
        if memory_tree is None or self.config.search.exclude_seen or (left_out := memory_tree.left_out(block.rows)) is None:
            return block
        params = SearchParams.uniform(len(left_out), 1, 1, left_out)
        return replace(block, eligible=eligible_nodes(self.topology.tree, params, unrestricted_mask(self.topology.tree)))

    def measured(self, options: Options) -> Figures:
        """The figures of some options; searched once, then cached."""
        key = tuple(sorted(options.items()))
        if key not in self.figures:
            self.answers(options)
        return self.figures[key]

    def answers(self, options: Options) -> Int64:
        """int64[B, M]: the item rows that a search with these options finds. Caches their figures."""
        rows_BM, _ = self.ranked(options["gamma"], self.memory(options), self.ms[-1])
        self.figures[tuple(sorted(options.items()))] = self.figures_of(rows_BM)
        return rows_BM

    def figures_of(self, rows_BM: Int64) -> Figures:
        """The figures of answers."""
        return Figures(np.stack([precision_recall_f(rows_BM, self.relevant, m)[1] for m in self.ms]))

    def figure(self, options: Options) -> float:
        """The figure to choose by."""
        return self.measured(options).figure

    def trials(self) -> list[dict[str, Any]]:
        """All trials in order: options, the figure that they were compared by, and the recall at each cut."""
        return [
            {
                "options": dict(key),
                "figure": figures.figure,
                "recall": dict(zip(map(str, self.ms), figures.figure_CB.mean(1).tolist(), strict=True)),
            }
            for key, figures in self.figures.items()
        ]
