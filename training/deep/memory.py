"""The memory of a tree: tuned neighbours of its training users, cut to the best of each item, with weights for a history's positions.

    mem(b) = Σ_{d < length} w_d · S[h_d, b],   w_d = recency^d / unit,   h_0 the last item of the history

unit is the mean over validation queries of the largest Σ_d recency^d · S[h_d, b] less the m-th largest (0 if fewer leaves have any), m =
200. So λ is the mean difference in memory between the first and the last item of a list. Its meaning does not depend on the scale of S, the
number of neighbours or the recency, nor on whether S is flat.

Knows neighbours and `espalier.memory`. Does not choose λ: see `ranking.py`.

Legend: I items, E entries, B queries, X nodes of a query's list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from espalier.arrays import Array, Float32, Int64
from espalier.manifest import MemoryFormula
from espalier.memory import MAX_VISITS, Memory
from espalier.memory_lists import MemoryLists
from espalier.stored_numbers import stored

from ..data.splits import Split
from ..deep.prepare import Prepared
from ..neighbours.fit import WEIGHED, Neighbours, fading, fit_neighbours, neighbours, neighbours_of
from ..neighbours.neighbour_lists import NeighbourLists
from ..neighbours.slim import sort_rows
from ..retrieval.task import Metric, Task
from ..retrieval.tuning import Options
from ..specification.deep import DeepConfig, InstanceConfig

log = logging.getLogger(__name__)

NEIGHBOUR_COUNTS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of neighbours an item to try in a tree's search; the last is the most that a bundle may hold. They start below NEIGHBOUR_LIMITS
of `neighbours/fit.py`: there neighbours answer alone, and here beside a tree, which finds much without them. Both grids decide what bundles
and comparisons publish, so neither can stand in for the other."""
LEAST_SCORE = 1e-30
LEAST_WEIGHT = 0.01
"""Positions of a history with less weight, relative to the last item's, are left out: each costs a row of S in every search."""
FORMULA = ("row", "column", "power", "shrink", "user", "back", "decay", "window", "near", "slim", "l2")
"""Options that a bundle stores, so that live items get entries much as trained items did, and folds count them again."""
FIT_S = 300.0
"""Most seconds for choosing the neighbours' options. Most logs need less than a fifth; on larger logs fewer options are tried."""


@dataclass(frozen=True)
class MemorySource:
    """The neighbours that memories are made of.

    lists    S, the best neighbours of each item, in any order
    recency  the best one for the neighbours without a tree; 1 for lists without an order
    options  of S; other values of those in WEIGHED need no new counts
    weigh    options → such lists; None: S cannot change
    """

    lists: NeighbourLists
    recency: float
    options: Options
    weigh: Callable[[Options], NeighbourLists] | None = None

    def with_options(self, options: Options) -> MemorySource:
        """The source with S weighed by these options' values of WEIGHED."""
        new_options = self.options | self.weighed_options(options)
        if self.weigh is None or new_options == self.options:
            return self
        return replace(self, lists=self.weigh(new_options), options=new_options)

    def weighed_options(self, options: Options) -> Options:
        """The values of WEIGHED in these options; missing ones are the source's."""
        return {option.name: options.get(option.name, self.options[option.name]) for option in WEIGHED}

    @property
    def largest(self) -> float:
        """The largest entry of S, which is stored as 1."""
        return max(float(self.lists.score_N.max(initial=0)), LEAST_SCORE)

    @property
    def longest(self) -> int:
        """The neighbours of the item that has the most."""
        return int(np.diff(self.lists.offset_I1).max(initial=0))

    def memory(self, per_item: int, recency: float, length: int) -> Memory:
        """The best `per_item` neighbours of each item, for at most the last `length` items of a history; weights are recency^d.

        Sums do not depend on the entries' order. A bundle has them `with_sorted_rows`.
        """
        lists = self.lists.limited(per_item)
        value_N = (lists.score_N / self.largest).astype(np.float16)
        weight_T = self.weights(per_item, recency, length)
        formula = MemoryFormula(**{name: self.options[name] for name in FORMULA}, unit=self.largest)
        return Memory(lists.offset_I1, lists.item_N, value_N, weight_T, key_weight=1.0, formula=formula)

    def weights(self, per_item: int, recency: float, length: int) -> Float32:
        """w_d of `memory` with the same arguments, times the unit."""
        weight = fading(recency, min(length, MAX_VISITS // max(1, min(per_item, self.longest))))
        return weight[weight >= LEAST_WEIGHT].astype(np.float32)

    def lengths(self, per_item: int) -> Int64:
        """int64[I]: how many neighbours each item has in `memory` with the same arguments."""
        return np.minimum(np.diff(self.lists.offset_I1), per_item)


def memory_source(config: DeepConfig, prepared: Prepared, seconds: float = FIT_S) -> MemorySource:
    """Neighbours tuned on validation queries and learned from the lists of training users, as many an item as the configuration allows."""
    fitted = prepared.neighbours or neighbours(memory_task(config, prepared, seconds))
    source = fitted.source
    if not isinstance(source, Neighbours):
        raise TypeError(f"a memory is made of Neighbours, not of {type(source).__name__}")
    most = NEIGHBOUR_COUNTS[-1] if config.memory.neighbours == "auto" else config.memory.neighbours

    def weigh(options: Options) -> NeighbourLists:
        return neighbours_of(source.counts, source.near, source.regressed, source.events_I, options).lists.limited(most)

    log.info("memory: neighbours in %.1f s%s", fitted.seconds, "" if fitted.ended is None else f", {fitted.ended}")
    return MemorySource(source.lists.limited(most), float(fitted.options["recency"]), fitted.options, weigh)


def recounted(memory: Memory, unit: float, options: Options, config: DeepConfig, split: Split) -> Memory:
    """The memory with entries counted from a split's lists, in the same units; all else stays.

    unit     S's largest entry when λ was chosen
    options  of S, and how many neighbours an item are `kept`
    """
    source = MemorySource(fit_neighbours(split.lists, split.train, options, config.seed).lists, 1.0, options)
    entries = source.memory(options["kept"], 1.0, config.history_length)
    weight = (memory.weight * (source.largest / unit)).astype(np.float32)
    return with_sorted_rows(replace(entries, weight=weight, key_weight=memory.key_weight, repeat=memory.repeat, left_out=memory.left_out))


def memory_task(config: DeepConfig, prepared: Prepared, seconds: float | None) -> Task:
    """The task on which the neighbours of a memory are tuned."""
    metric = Metric("recall", config.search.m)
    return Task(prepared.split, prepared.items, metric, config.search.exclude_seen, InstanceConfig(), config.seed, seconds)


def with_sorted_rows(memory: Memory) -> Memory:
    """Sort the entries of each item by ascending item, in place, and return the memory. Tens of millions take seconds."""
    sort_rows(memory.offset, memory.item, stored(memory.value), 1)
    return memory


def with_weight(memory: Memory, unit: float, weight: float) -> Memory:
    """The memory with its weights divided by `unit`, and with λ = `weight`."""
    return replace(memory, weight=(memory.weight / unit).astype(np.float32), key_weight=weight)


def unit_of(lists: Iterable[MemoryLists], leaf_offset: int, m: int) -> float:
    """The mean over queries of the largest mem less the m-th largest, which is 0 if fewer leaves have any."""
    spreads = [_spread(*block.of(b), leaf_offset, m) for block in lists for b in range(len(block.offset_B) - 1)]
    return float(np.mean(spreads)) if spreads else 0.0


def _spread(nodes: Array, values: Array, leaf_offset: int, m: int) -> float:
    memory = values[nodes >= leaf_offset]
    return float(memory.max(initial=0)) - (float(np.partition(memory, -m)[-m]) if len(memory) >= m else 0.0)
