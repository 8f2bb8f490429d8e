"""A fold fits the rows of live leaves to their events. Everything else in the model stays.

    rank(i | x) = s(x) · w_i + γ · rank(parent(i) | x)
    L(w) = mean_x log Σ_i e^{rank(i | x)} − Σ_i (n_i / n) · m_i · w_i + Σ_i (n_i / n) · ‖w_i − w_i⁰‖² / (2 e_i σ²)

x are the histories of events drawn from all, s(x) their states on the leaf level. n counts the events of all items, n_i those of live item
i. m_i is the mean state of e_i of its events, w_i⁰ the row from its placement. L is the loss of the kinds that train a softmax over all
leaves, as a function of the live rows alone, with a prior. It is convex, and the terms of the other leaves in its sum are constant. The
prior's variance σ² is the mean variance of the columns of the other leaves' rows. Columns in which states do not differ are biases, and
have no prior. Adam minimises L, with learning rates that fall to 0.

Knows rows and states. Does not know journals.

Legend: B histories, I live items, S state, N nodes of a level, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from espalier.arrays import Bool, Float32, Int64
from espalier.bundle import Bundle
from espalier.engines.encoder import QueryEncoder
from espalier.queries import HistoryKind, pad_histories
from espalier.tree import EMPTY_LEAF

BACKGROUND = 2048
"""Histories in the sample that estimates the mean over x."""
STEPS, RATE = 40, 0.1
"""Adam's steps, and its first rate, in multiples of σ."""
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-12
EQUAL = 1e-6
"""States that differ by less are biases."""
AT_ONCE = 256
"""Histories that are encoded at a time."""
MOST_NUMBERS = 1 << 24
"""Ranks of leaves that are held at a time."""


class Background(NamedTuple):
    """state_BS: on the leaf level · inherited_BI: γ · rank(parent) of live leaves · others_B: log Σ e^rank over other leaves."""

    state_BS: Float32
    inherited_BI: Float32
    others_B: Float32


def fitted_rows(
    bundle: Bundle, leaf_I: Int64, mean_IS: Float32, events_I: Float32, share_I: Float32, histories: Sequence[Int64]
) -> Float32:
    """float32[I, S]: the rows of live leaves (int64[I]), fitted to their mean states m, their events e and n_i / n.

    histories  of events drawn from all; there must be one
    """
    rows_IS, spread, is_free_S = _start(bundle, leaf_I)
    background = _background(bundle, leaf_I, histories)
    is_free_S = is_free_S & (background.state_BS.std(0) > EQUAL)
    prior_IS = (share_I / (events_I * spread**2))[:, None] * is_free_S
    start_IS, first_IS, second_IS = rows_IS, np.zeros_like(rows_IS), np.zeros_like(rows_IS)
    for step in range(STEPS):
        gradient_IS = _expected(background, rows_IS) - share_I[:, None] * mean_IS + prior_IS * (rows_IS - start_IS)
        first_IS = BETA1 * first_IS + (1 - BETA1) * gradient_IS
        second_IS = BETA2 * second_IS + (1 - BETA2) * gradient_IS**2
        move_IS = first_IS / (1 - BETA1 ** (step + 1)) / (np.sqrt(second_IS / (1 - BETA2 ** (step + 1))) + EPSILON)
        rows_IS = (rows_IS - RATE * spread * (1 - step / STEPS) * move_IS).astype(np.float32)
    return rows_IS


def mean_states(bundle: Bundle, item_n: Int64, histories: Sequence[Int64], items: int) -> tuple[Float32, Float32]:
    """float32[I, S]: the mean states on the leaf level of each item's histories; float32[I]: how many it has, at least 1.

    item_n  int64[n]: the item of each history, 0 … items − 1
    """
    sum_IS, count_I = np.zeros((items, bundle.graph_scorer.state_dim), np.float32), np.bincount(item_n, minlength=items)
    encoder = QueryEncoder.open(bundle)
    for begin in range(0, len(histories), AT_ONCE):
        states_BLS = _states(bundle, encoder, histories[begin : begin + AT_ONCE], bundle.tree.height)
        np.add.at(sum_IS, item_n[begin : begin + AT_ONCE], states_BLS[:, -1])
    events_I = np.maximum(count_I, 1).astype(np.float32)
    return sum_IS / events_I[:, None], events_I


def _states(bundle: Bundle, encoder: QueryEncoder, histories: Sequence[Int64], first: int) -> Float32:
    kind = bundle.graph_kind
    if not isinstance(kind, HistoryKind):
        raise TypeError(f"histories for a model of {kind.kind}")
    return encoder.states(pad_histories(kind, histories).array, [first] * len(histories))


def _start(bundle: Bundle, leaf_I: Int64) -> tuple[Float32, float, Bool]:
    """The rows from the placement, σ, and the columns that differ.

    σ comes from the rows of the other leaves (of all leaves if there are none): rows that earlier folds fitted would make it grow.
    """
    tree = bundle.tree
    leaves = tree.leaf_offset + np.flatnonzero(tree.leaf_item != EMPTY_LEAF)
    other_leaves = np.setdiff1d(leaves, leaf_I)
    leaves = other_leaves if len(other_leaves) > 1 else leaves
    variance_S = np.asarray(bundle.node_rows_ND[leaves], np.float64).var(0)
    is_free_S = np.asarray(variance_S > 0, np.bool_)
    spread = float(np.sqrt(variance_S[is_free_S].mean())) if is_free_S.any() else 1.0
    return np.asarray(bundle.node_rows_ND[leaf_I], np.float32), spread, is_free_S


def _background(bundle: Bundle, leaf_I: Int64, histories: Sequence[Int64]) -> Background:
    tree, encoder = bundle.tree, QueryEncoder.open(bundle)
    is_other = tree.leaf_item != EMPTY_LEAF
    is_other[leaf_I - tree.leaf_offset] = False
    at_once = max(1, min(AT_ONCE, MOST_NUMBERS // tree.leaf_count))
    blocks = []
    for begin in range(0, len(histories), at_once):
        states_BLS = _states(bundle, encoder, histories[begin : begin + at_once], 1)
        ranks_BN, inherited_BN = _ranks(bundle, states_BLS)
        others_B = logsumexp(ranks_BN[:, is_other], axis=1) if is_other.any() else np.full(len(ranks_BN), -np.inf, np.float32)
        blocks.append((states_BLS[:, -1], inherited_BN[:, leaf_I - tree.leaf_offset], others_B))
    state_BS, inherited_BI, others_B = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    return Background(state_BS, inherited_BI, others_B)


def _ranks(bundle: Bundle, states_BLS: Float32) -> tuple[Float32, Float32]:
    """float32[B, N] twice: the ranks of all leaves, and the part that comes from their parents' ranks."""
    tree, gamma = bundle.tree, np.float32(bundle.manifest.ranking.gamma)
    ranks_BN = inherited_BN = np.zeros((len(states_BLS), 1), np.float32)
    for h in range(1, tree.height + 1):
        level, level_above = tree.level(h), tree.level(h - 1)
        rows_NS = np.asarray(bundle.node_rows_ND[level.start : level.stop], np.float32)
        inherited_BN = gamma * ranks_BN[:, tree.parent[level.start : level.stop] - level_above.start]
        ranks_BN = states_BLS[:, 0 if states_BLS.shape[1] == 1 else h] @ rows_NS.T + inherited_BN
    return ranks_BN, inherited_BN


def _expected(background: Background, rows_IS: Float32) -> Float32:
    """float32[I, S]: mean_x p(i | x) · s(x)."""
    rank_BI = background.state_BS @ rows_IS.T + background.inherited_BI
    others_B1 = background.others_B[:, None]
    largest_B1 = np.maximum(rank_BI.max(1, keepdims=True), others_B1)
    share_BI = np.exp(rank_BI - largest_B1)
    sum_B1 = np.exp(others_B1 - largest_B1) + share_BI.sum(1, keepdims=True)
    expected_IS: Float32 = (share_BI / (sum_B1 * len(rank_BI))).T @ background.state_BS
    return expected_IS
