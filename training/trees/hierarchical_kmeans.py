"""Balanced hierarchical spherical k-means over sparse rows: a tree whose leaves hold one label each (PECOS §3.1).

The labels are halved repeatedly: each goes to the centre with the larger cosine, half of them to either. The halvings are then grouped into
nodes of `branching` children; the sets that are not halved further are the leaf clusters. By hand, because scikit-learn's k-means does not
balance its clusters.

Legend: I labels, F features.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import numpy as np

from espalier.arrays import Array, Int64
from espalier.compiled_code import compiled
from espalier.tree import Tree, tree_from_children

from ..data.csr import Csr
from ..trees.kmeans import move_sides

ROUNDS = 20
MOST_COPIED = 1 << 26
FAST = {"reassoc", "contract", "arcp", "nsz", "nnan", "ninf"}


def hierarchical_kmeans(labels: Csr, branching: int, max_leaf: int, seed: int, threads: int = 1) -> Tree:
    """The tree over labels 0 … I − 1, given by float32 rows [I, F] of length 1.

    branching  most children of a node above the leaf clusters · max_leaf: most labels in a leaf cluster
    threads    change only the time
    """
    cuts = max(0, math.ceil(math.log2(max(1, labels.shape[0]) / max_leaf)))
    clusters = [np.arange(labels.shape[0])]
    with ThreadPoolExecutor(threads) as pool:
        scratch = threading.local()

        def halve(depth: int, number: int, members: Int64) -> list[Int64]:
            if not hasattr(scratch, "number_of"):
                scratch.number_of = np.full(labels.shape[1], -1, np.int32)
            # A separate seed for each cut, so that cuts do not depend on each other.
            seed_of_cut = (seed << 24) + (1 << depth) + number
            left = _halved(labels.indptr, labels.indices, labels.data, members, scratch.number_of, MOST_COPIED, ROUNDS, seed_of_cut)
            return [members[left], members[~left]]

        for depth in range(cuts):
            halves = pool.map(halve, repeat(depth), range(len(clusters)), clusters)
            clusters = [half for both in halves for half in both]
    counts = [[len(members) for members in clusters]]
    step = 1 << (branching.bit_length() - 1)  # cuts are halves, so nodes have a power of two of children
    while len(counts[0]) > 1:
        size = len(counts[0])
        parents = -(-size // step)
        counts.insert(0, [min(step, size - step * k) for k in range(parents)])
    return tree_from_children(counts, np.concatenate(clusters))


@compiled(fastmath=FAST, error_model="numpy")
def _halved(indptr: Array, indices: Array, values: Array, members: Array, number_of: Array, most: int, rounds: int, seed: int) -> Any:
    """bool[members]: the half that is near one of two centres; of an odd number the smaller half.

    number_of  int32[F] of −1, scratch for `_renumbered`
    most       entries of rows that are renumbered: those of more are read where they are, since a copy would take gigabytes
    """
    if len(members) < 2:
        return np.zeros(len(members), np.bool_)
    begin, end = indptr[members], indptr[members + 1]
    if (end - begin).sum() > most:
        return _halved_rows(begin, end, indices, values, len(number_of), rounds, seed)
    first, number, value, found = _renumbered(indptr, indices, values, members, number_of)
    return _halved_rows(first[:-1], first[1:], number, value, found, rounds, seed)


@compiled(fastmath=FAST, error_model="numpy")
def _halved_rows(begin: Array, end: Array, number: Array, value: Array, found: int, rounds: int, seed: int) -> Any:
    """As `_halved`, of rows of features below `found`; `begin` and `end` of each row's entries."""
    count, half = len(begin), len(begin) // 2
    left = np.zeros(count, np.bool_)
    one, other = _two_of(count, seed)
    difference, sums = np.zeros(found, np.float32), np.empty((2, found), np.float32)
    for e in range(begin[one], end[one]):
        difference[number[e]] -= value[e]
    for e in range(begin[other], end[other]):
        difference[number[e]] += value[e]
    score = np.empty(count, np.float32)
    for _ in range(rounds):
        for k in range(count):
            near = np.float32(0)
            for e in range(begin[k], end[k]):
                near += difference[number[e]] * value[e]
            score[k] = near
        if not move_sides(score, half, left):
            break
        for f in range(found):
            sums[0, f] = sums[1, f] = 0
        for k in range(count):
            side = 0 if left[k] else 1
            for e in range(begin[k], end[k]):
                sums[side, number[e]] += value[e]
        squares, other_squares = np.float32(1e-24), np.float32(1e-24)
        for f in range(found):
            squares += sums[0, f] * sums[0, f]
            other_squares += sums[1, f] * sums[1, f]
        length, other_length = np.sqrt(squares), np.sqrt(other_squares)
        for f in range(found):
            difference[f] = sums[1, f] / other_length - sums[0, f] / length
    return left


@compiled()
def _renumbered(indptr: Array, indices: Array, values: Array, members: Array, number_of: Array) -> tuple[Array, Array, Array, int]:
    """The rows of some members (where each begins, features, values) with their features numbered 0, 1, …, and how many features they have.

    Sums over features then cost what the members have, not F.

    number_of  int32[F], −1 before and after
    """
    count, entries = len(members), 0
    for k in range(count):
        entries += indptr[members[k] + 1] - indptr[members[k]]
    begin, number, value = np.empty(count + 1, np.int64), np.empty(entries, np.int32), np.empty(entries, np.float32)
    feature = np.empty(entries, np.int32)
    found, e = 0, 0
    for k in range(count):
        begin[k] = e
        for entry in range(indptr[members[k]], indptr[members[k] + 1]):
            if number_of[indices[entry]] < 0:
                number_of[indices[entry]] = found
                feature[found] = indices[entry]
                found += 1
            number[e], value[e] = number_of[indices[entry]], values[entry]
            e += 1
    begin[count] = e
    for f in range(found):
        number_of[feature[f]] = -1
    return begin, number, value, found


@compiled()
def _two_of(count: int, seed: int) -> tuple[Any, Any]:
    """Two different numbers below `count`, drawn by a linear congruential generator (Knuth's MMIX constants)."""
    state = np.uint64(seed) * np.uint64(2654435761) + np.uint64(1)
    state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    one = np.int64((state >> np.uint64(33)) % np.uint64(count))
    state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    other = np.int64((state >> np.uint64(33)) % np.uint64(count - 1))
    return one, other + (other >= one)
