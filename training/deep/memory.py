"""The memory of a tree: tuned neighbours of its training users, cut to the best of each item, with the weights of a history's places.

    mem(b) = Σ_{d < length} w_d · S[h_d, b],   w_d = recency^d / unit,   h_0 the last item of the history

unit is the mean over validation queries of the largest Σ_d recency^d · S[h_d, b] less the m-th largest (0 where fewer have any), m = 200.
So λ is by how much memory parts the first of a list from its last, on average. It means the same whatever the scale of
S, the number of neighbours and the recency; and for a flat S, which must be weighed much to say anything.

Knows neighbours and `espalier.memory`. Does not know what λ is best: see `ranking.py`.

Legend: I items, E entries, B queries, X nodes of a query's list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.manifest import MemoryFormula
from espalier.memory import MAX_VISITS, Memory
from espalier.memory_lists import MemoryLists
from espalier.stored_numbers import stored

from ..arrays import Array
from ..data.splits import Split
from ..deep.prepare import Prepared
from ..neighbours.fit import WEIGHED, Neighbours, fading, fitted_to, neighbours, neighbours_of
from ..neighbours.neighbour_lists import NeighbourLists
from ..retrieval.task import Metric, Task
from ..retrieval.tuning import Options
from ..specification.deep import DeepConfig, InstanceConfig

log = logging.getLogger(__name__)

KEPT = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Neighbours an item that are tried, up to those that a bundle may hold."""
LEAST_SCORE = 1e-30
LEAST_WEIGHT = 0.01
"""Places of a history that weigh less, over the last item, are left out: each costs a row of S in every search."""
FORMULA = ("row", "column", "power", "shrink", "user", "back", "decay", "window")
"""Options that a bundle names, so that live items have entries as trained ones have."""
FIT_S = 300.0
"""Most seconds for choosing the neighbours' options. Most logs take less than a fifth; on larger ones fewer are tried."""


@dataclass(frozen=True)
class Remembered:
    """What memories are made of.

    lists    S, best first
    recency  of the weights that were best for the neighbours alone; 1 for lists without an order
    options  of S; other values of those of WEIGHED weigh the same counts anew. Empty: not known
    weigh    options → S, best first; None: it is as it is
    """

    lists: NeighbourLists
    recency: float
    options: Options = field(default_factory=dict)
    weigh: Callable[[Options], NeighbourLists] | None = None

    def weighed(self, options: Options) -> Remembered:
        """With the values that some options have of those of WEIGHED."""
        chosen = self.options | self.values(options)
        if self.weigh is None or chosen == self.options:
            return self
        return replace(self, lists=self.weigh(chosen), options=chosen)

    def values(self, options: Options) -> Options:
        """Those of WEIGHED, where these options have none its own."""
        names = [option.name for option in WEIGHED if option.name in self.options]
        return {name: options.get(name, self.options[name]) for name in names}

    @property
    def largest(self) -> float:
        """The largest entry of S, as which 1 is stored."""
        return max(float(self.lists.score_N.max(initial=0)), LEAST_SCORE)

    @property
    def most(self) -> int:
        """The neighbours of the item that has the most."""
        return int(np.diff(self.lists.offset_I1).max(initial=0))

    def memory(self, kept: int, recency: float, length: int) -> Memory:
        """The best `kept` neighbours of each item, best first, for the last `length` items of a history at most; weights are recency^d.

        Sums do not depend on the entries' order. Those of a bundle are `in_order`.
        """
        lists = self.lists.limited(kept)
        value_N = (lists.score_N / self.largest).astype(np.float16)
        weight_T = self.weights(kept, recency, length)
        return Memory(lists.offset_I1, lists.item_N, value_N, weight_T, key_weight=1.0, formula=self.formula)

    @property
    def formula(self) -> MemoryFormula | None:
        """How S is made of lists, but for what near items add; None where it is not known."""
        if not self.options:
            return None
        return MemoryFormula(**{name: self.options[name] for name in FORMULA}, unit=self.largest)

    def weights(self, kept: int, recency: float, length: int) -> NDArray[np.float32]:
        """w_d of that memory, times the unit."""
        weight = fading(recency, min(length, MAX_VISITS // max(1, min(kept, self.most))))
        return weight[weight >= LEAST_WEIGHT].astype(np.float32)

    def lengths(self, kept: int) -> NDArray[np.int64]:
        """int64[I]: the neighbours of each item in that memory."""
        return np.minimum(np.diff(self.lists.offset_I1), kept)


def remembered(config: DeepConfig, prepared: Prepared, seconds: float = FIT_S) -> Remembered:
    """Neighbours tuned on validation queries and learned from the lists of training users, as many an item as the configuration allows."""
    fitted = prepared.neighbours or neighbours(memory_task(config, prepared, seconds))
    found = fitted.source
    if not isinstance(found, Neighbours):
        raise TypeError(f"a memory is made of Neighbours, not of {type(found).__name__}")
    most = KEPT[-1] if config.memory.neighbours == "auto" else config.memory.neighbours

    def weigh(options: Options) -> NeighbourLists:
        return neighbours_of(found.counts, found.near, found.events_I, options).lists.limited(most)

    log.info("memory: neighbours in %.1f s%s", fitted.seconds, "" if fitted.ended is None else f", {fitted.ended}")
    return Remembered(found.lists.limited(most), float(fitted.options["recency"]), fitted.options, weigh)


def counted_again(memory: Memory, unit: float, options: Options, config: DeepConfig, split: Split) -> Memory:
    """A memory with the entries that a split's lists give, in the same units; all else as it was chosen.

    unit     S's largest entry when it was
    options  of S, and how many neighbours an item are `kept`
    """
    source = Remembered(fitted_to(split.lists, split.train, options, config.seed).lists, 1.0, options)
    entries = source.memory(options["kept"], 1.0, config.history_length)
    weight = (memory.weight * (source.largest / unit)).astype(np.float32)
    return in_order(replace(entries, weight=weight, key_weight=memory.key_weight, repeat=memory.repeat, left_out=memory.left_out))


def memory_task(config: DeepConfig, prepared: Prepared, seconds: float | None) -> Task:
    """What the neighbours of a memory learn from."""
    metric = Metric("recall", config.search.m)
    return Task(prepared.split, prepared.items, metric, config.search.exclude_seen, InstanceConfig(), config.seed, seconds)


def in_order(memory: Memory) -> Memory:
    """The memory with the entries of each item by ascending item, in its own arrays: of tens of millions that takes seconds."""
    _sort_rows(memory.offset, memory.item, stored(memory.value))
    return memory


def in_units(memory: Memory, unit: float, weight: float) -> Memory:
    """The memory with its places' weights divided by `unit`, and λ."""
    return replace(memory, weight=(memory.weight / unit).astype(np.float32), key_weight=weight)


def unit_of(lists: Iterable[MemoryLists], leaf_offset: int, m: int) -> float:
    """The mean over queries of the largest mem less the m-th largest, which is 0 where fewer leaves have any."""
    spreads = [_spread(*part.of(b), leaf_offset, m) for part in lists for b in range(len(part.offset_B) - 1)]
    return float(np.mean(spreads)) if spreads else 0.0


def _spread(nodes: Array, values: Array, leaf_offset: int, m: int) -> float:
    mem = values[nodes >= leaf_offset]
    return float(mem.max(initial=0)) - (float(np.partition(mem, -m)[-m]) if len(mem) >= m else 0.0)


@compiled()
def _sort_rows(offset: Array, item: Array, value: Array) -> None:
    """Each row's entries by ascending item, in place."""
    for a in range(len(offset) - 1):
        row = slice(offset[a], offset[a + 1])
        order = np.argsort(item[row])
        item[row], value[row] = item[row][order], value[row][order]
