"""JTM's tree learning: moves items to leaves that a trained scorer ranks higher for the training users (Zhu et al. 2019, Alg. 2).

    L_c^{s,e}(π) = Σ_{(u,c) ∈ A_c} Σ_{j=s}^{e} log p̂(b_j(π(c)) | u),    p̂ = σ(rank),  rank(n) = logit(n) + γ · rank(parent(n))

A_c are the training samples with target c, b_j the ancestor on level j. γ = 0 is the paper's formula; γ > 0 is for scorers that were
trained on such ranks. log p̂ depends on the objective that a scorer was trained with (`Likelihood`): for `plt`, whose activations are
conditional on the parent, it is the sum of log-sigmoids along the path; for `otm-robust`, a softmax over each level, it is the rank
itself, since the softmax's normaliser is the same for every target on a level. Such sums lack the normaliser: only their differences have
a meaning.

The tree's nodes, and so the scorer, stay as they are. Only the items are reassigned, from the root down, d levels (the
gap) at a time: each node's items to its descendants d levels below, which hold as many items as they have leaves. Ancestors of history
items are those in the old tree.

The assignment is greedy with rebalancing. Where the supplement keeps the heaviest items of an over-full node, this keeps those that would
lose the most elsewhere: weights are sums of negative numbers, so the most frequent targets would be sent away first. Items that are no
sample's target weigh nothing anywhere; they fill the remaining leaves, those of their present node first.

Legend: S samples, B samples of a scorer call, I items, T history, N nodes, L levels, P parents (nodes of the level worked from), C columns:
descendants of a parent on the level worked to, G items of the columns that are being emptied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid
from tqdm import tqdm

from espalier.arrays import Bool, Float32, Int64
from espalier.tree import EMPTY_LEAF, Tree

from ..deep.jtm_samples import Samples
from ..deep.queries import states_of
from ..deep.scorers.model import NodeScorer
from ..deep.topology import Topology

Value = TypeVar("Value", np.int64, np.float64)
Likelihood = Literal["sigmoid", "path", "softmax"]
"""log p̂ of a node: log σ(rank), the rank's log-activations multiplied along the path, or the rank up to a constant of its level."""

MAX_DESCENDANTS = 256
"""A gap is shortened until no node has more descendants: a tree of branching 16 is learned two levels at a time, not seven."""
ROWS = 1 << 15
"""Nodes that the scorer judges in one call; more only costs memory."""


@dataclass(frozen=True)
class LearnedTree:
    """A learned tree and how many items moved. `before` and `after` are Σ_c L_c of the old and the new tree, for histories in the old one.

    For a softmax both lack the same normalisers: only their difference has a meaning.
    """

    tree: Tree
    moved: int
    before: float
    after: float


def learn_tree(
    model: NodeScorer, tree: Tree, samples: Samples, *, gap: int, gamma: float = 0.0, likelihood: Likelihood = "sigmoid"
) -> LearnedTree:
    """The tree with its items reassigned; the old one if that does not raise Σ_c L_c, which greedy assignment cannot promise.

    samples  targets are the tree's item rows
    gap      levels that are matched at once
    """
    matching = Matching(model, tree, samples, gamma, likelihood)
    home_IL = tree.ancestors(tree.leaf_of_item)
    room_N = sum_below(tree, np.ones(tree.leaf_count, np.int64), tree.height)  # empty leaves are room, too
    leaf_I = matching.descend(home_IL, room_N, tree.height, gap)
    before, after = matching.total(tree.leaf_of_item), matching.total(leaf_I)
    if after <= before:
        return LearnedTree(tree, 0, before, before)
    leaf_item = np.full(tree.leaf_count, EMPTY_LEAF, np.int64)
    leaf_item[leaf_I - tree.leaf_offset] = np.arange(len(leaf_I))
    moved = int(np.count_nonzero(leaf_I != tree.leaf_of_item))
    return LearnedTree(Tree(tree.level_offset, tree.first_child, leaf_item), moved, before, after)


def sum_below(tree: Tree, value_n: NDArray[Value], level: int) -> NDArray[Value]:
    """[N, …]: values [n, …] of the nodes of a level, summed upward; 0 below that level."""
    total_N = np.zeros((tree.node_count, *value_n.shape[1:]), value_n.dtype)
    total_N[tree.level(level).start : tree.level(level).stop] = value_n
    for h in range(level - 1, -1, -1):
        span = tree.level(h)
        below = total_N[: tree.level_offset[h + 2]]
        total_N[span.start : span.stop] = np.add.reduceat(below, tree.first_child[span.start : span.stop])
    return total_N


class Matching:
    """Assigns items to the nodes of a tree by a scorer's sums of log p̂ over samples."""

    def __init__(self, model: NodeScorer, tree: Tree, samples: Samples, gamma: float, likelihood: Likelihood) -> None:
        self.model, self.tree, self.samples, self.likelihood = model.eval(), tree, samples, likelihood
        self.gamma = 1.0 if likelihood == "path" else gamma
        self.topology = Topology(tree, model.node_rows.device)

    def descend(self, home_IL: Int64, room_N: Int64, bottom: int, gap: int) -> Int64:
        """int64[I]: the node of level `bottom` that each item is assigned to, from the root down (Alg. 2).

        home_IL  int64[I, L]: where the items are now, on every level; −1 = nowhere
        room_N   int64[N]: how many of the items a node's subtree can hold; the root's is at least I
        """
        seen_I = np.bincount(self.samples.target_S, minlength=len(home_IL)) > 0
        node_I = np.zeros(len(home_IL), np.int64)
        level = 0
        while level < bottom:
            spans = self._spans(level, min(gap, bottom - level))
            first_P, stop_P = spans[-1]
            column_C = np.arange((stop_P - first_P).max())
            node_PC = first_P[:, None] + column_C
            room_PC = np.where(node_PC < stop_P[:, None], room_N[np.minimum(node_PC, self.tree.node_count - 1)], 0)
            parent_I = node_I - self.tree.level(level).start
            weight_IC = self._weights(node_I, level, spans)
            level += len(spans)
            home_I = home_IL[:, level] - first_P[parent_I]
            home_I[(home_I < 0) | (home_IL[:, level] >= stop_P[parent_I])] = -1
            node_I = first_P[parent_I] + assign(weight_IC, parent_I, room_PC, home_I, seen_I)
        return node_I

    def total(self, leaf_I: Int64) -> float:
        """Σ_c L_c^{1,H}: the log-likelihood of all samples when the items are at these leaves."""
        total = 0.0
        leaf_S = leaf_I[self.samples.target_S]
        for block, state_BLS in self._states(1, self.tree.height, self.tree.height, "measuring"):
            path_BL = self.tree.ancestors(leaf_S[block])
            total += float(self._path_ranks(state_BLS, path_BL)[1].double().sum())
        return total

    def _spans(self, level: int, gap: int) -> list[tuple[Int64, Int64]]:
        """First and last + 1 descendant of every node of `level`, on each of the next levels: `gap` of them, or fewer (at least one)."""
        first_P, stop_P = np.arange(*self.tree.level_offset[level : level + 2]), np.arange(*self.tree.level_offset[level : level + 2]) + 1
        spans: list[tuple[Int64, Int64]] = []
        for _ in range(gap):
            first_P, stop_P = self.tree.first_child[first_P], self.tree.first_child[stop_P]
            if spans and (stop_P - first_P).max() > MAX_DESCENDANTS:
                break
            spans.append((first_P, stop_P))
        return spans

    @torch.no_grad()
    def _weights(self, node_I: Int64, level: int, spans: list[tuple[Int64, Int64]]) -> Float32:
        """float32[I, C]: L_c^{l+1,l+d} of each item at each descendant, d levels below, of its node on level l.

        Columns beyond a node's own descendants are padding.
        """
        device, parent_N1 = self.topology.device, self.topology.parent_N1
        width = int(max((stop_P - first_P).max() for first_P, stop_P in spans))
        weight_IC = torch.zeros((len(node_I), int((spans[-1][1] - spans[-1][0]).max())), device=device)
        node_S = node_I[self.samples.target_S]
        parent_S = node_S - self.tree.level(level).start
        lowest = 1 if self.gamma else level + 1
        for block, state_BLS in self._states(lowest, level + len(spans), width, f"matching level {level + len(spans)}"):
            up_B = torch.from_numpy(node_S[block]).to(device)
            if self.gamma and level:
                rank_BC, _ = self._path_ranks(state_BLS, self.tree.ancestors(node_S[block])[:, self.tree.height - level :])
            else:
                rank_BC = torch.zeros((len(up_B), 1), device=device)
            total_BC = torch.zeros((len(up_B), 1), device=device)
            for j, (first_P, stop_P) in enumerate(spans, level + 1):
                first_B, stop_B = (torch.from_numpy(node_P[parent_S[block]]).to(device) for node_P in (first_P, stop_P))
                nodes_BC = first_B[:, None] + torch.arange(int((stop_P - first_P).max()), device=device)
                nodes_BC = torch.minimum(nodes_BC, stop_B[:, None] - 1)  # padding repeats the last node; nothing is assigned there
                slot_BC = parent_N1[nodes_BC] - up_B[:, None]
                step_BC, rank_BC = self._node_ranks(state_BLS, nodes_BC, j - lowest, rank_BC.gather(1, slot_BC))
                total_BC = total_BC.gather(1, slot_BC) + step_BC
                up_B = first_B
            target_B = torch.from_numpy(self.samples.target_S[block]).to(device)
            item_G, count_G = torch.unique_consecutive(target_B, return_counts=True)
            weight_IC[item_G] += torch.segment_reduce(total_BC, "sum", lengths=count_G)  # unlike index_add, the same on every run
        weights: Float32 = weight_IC.cpu().numpy()
        return weights

    @torch.no_grad()
    def _path_ranks(self, state_BLS: Tensor, path_BL: Int64) -> tuple[Tensor, Tensor]:
        """[B, 1] each: rank of the last node of paths from the root, and Σ log p̂ over their nodes but the root."""
        nodes_BL = torch.from_numpy(path_BL).to(self.topology.device)
        rank_B1 = torch.zeros((len(nodes_BL), 1), device=self.topology.device)
        total_B1 = torch.zeros_like(rank_B1)
        for h in range(1, nodes_BL.shape[1]):
            step_B1, rank_B1 = self._node_ranks(state_BLS, nodes_BL[:, h : h + 1], h - 1, rank_B1)
            total_B1 = total_B1 + step_B1
        return rank_B1, total_B1

    def _node_ranks(self, state_BLS: Tensor, nodes_BC: Tensor, state_level: int, rank_BC: Tensor) -> tuple[Tensor, Tensor]:
        """log p̂ and rank [B, C] of nodes, given their parents' ranks; `state_level` is their level's position among the states."""
        logits_BC = self.model.logits(state_BLS, nodes_BC, state_level).float()
        rank_BC = (logsigmoid(logits_BC) if self.likelihood == "path" else logits_BC) + self.gamma * rank_BC
        return (logsigmoid(rank_BC) if self.likelihood == "sigmoid" else rank_BC), rank_BC

    def _states(self, lowest: int, highest: int, width: int, title: str) -> Iterator[tuple[slice, Tensor]]:
        """Query states [B, L, S] of the levels `lowest` … `highest`, so many samples at a time that their nodes fit a scorer call."""
        samples = self.samples
        size = max(1, ROWS // width)
        with torch.no_grad(), tqdm(total=len(samples.target_S), unit="sample", desc=title, mininterval=1.0, delay=1.0) as bar:
            for start in range(0, len(samples.target_S), size):
                block = slice(start, min(start + size, len(samples.target_S)))
                yield block, states_of(self.model, self.topology, samples.queries(block), slice(lowest, highest + 1))
                bar.update(block.stop - block.start)


def assign(weight_IC: Float32, parent_I: Int64, room_PC: Int64, home_I: Int64, seen_I: Bool) -> Int64:
    """int64[I]: a column for every item, at most room_PC items in each, with a large sum of weights (JTM's greedy with rebalancing).

    weight_IC  float32[I, C]
    parent_I   int64[I]: the row of room_PC that an item's columns belong to; no parent has more items than room
    room_PC    int64[P, C]: 0 where a parent has fewer columns
    home_I     int64[I]: the column that an item comes from, −1 = none of them; it is kept at a tie
    seen_I     whether an item has weights at all

    Each item takes its best column. Then, as long as a column holds too many, each parent's fullest such column keeps those that would
    lose the most by leaving and sends the others to their best column among those that have not done so yet. Unseen items come last.
    """
    slot_I = np.full(len(parent_I), -1, np.int64)
    seen = np.flatnonzero(seen_I)
    slot_I[seen] = _assign_seen(weight_IC[seen], parent_I[seen], room_PC, home_I[seen])
    _fill(slot_I, parent_I, room_PC, home_I)
    return slot_I


def _assign_seen(weight_IC: Float32, parent_I: Int64, room_PC: Int64, home_I: Int64) -> Int64:
    parents, columns = room_PC.shape
    weight_IC = np.where(room_PC[parent_I] > 0, weight_IC, -np.inf).astype(np.float32)
    items = np.arange(len(parent_I))
    slot_I = weight_IC.argmax(1) if len(items) else np.zeros(0, np.int64)
    at_tie_I = (home_I >= 0) & (weight_IC[items, home_I] == weight_IC[items, slot_I])
    slot_I = np.where(at_tie_I, home_I, slot_I)
    done_PC = room_PC == 0
    while True:
        count_PC = np.bincount(parent_I * columns + slot_I, minlength=parents * columns).reshape(parents, columns)
        excess_PC = np.where(done_PC, 0, count_PC - room_PC)
        worst_P = excess_PC.argmax(1)
        over_P = excess_PC[np.arange(parents), worst_P] > 0
        if not over_P.any():
            return slot_I
        done_PC[over_P, worst_P[over_P]] = True
        members = np.flatnonzero(over_P[parent_I] & (slot_I == worst_P[parent_I]))
        parent_G = parent_I[members]
        elsewhere_GC = np.where(done_PC[parent_G], -np.inf, weight_IC[members])
        other_G = elsewhere_GC.argmax(1)
        loss_G = weight_IC[members, slot_I[members]] - elsewhere_GC[np.arange(len(members)), other_G]
        stranger_G = home_I[members] != slot_I[members]
        order = np.lexsort((stranger_G, -loss_G, parent_G))
        leaving = order[_rank_within(parent_G[order]) >= room_PC[parent_G, slot_I[members]][order]]
        slot_I[members[leaving]] = other_G[leaving]


def _fill(slot_I: Int64, parent_I: Int64, room_PC: Int64, home_I: Int64) -> None:
    """Give the items without a column (−1) one that has room: their home if they can, else any."""
    parents, columns = room_PC.shape
    is_placed = slot_I >= 0
    free_PC = room_PC.ravel() - np.bincount((parent_I * columns + slot_I)[is_placed], minlength=parents * columns)
    waiting = np.flatnonzero(~is_placed & (home_I >= 0))
    home = parent_I[waiting] * columns + home_I[waiting]
    order = np.argsort(home, kind="stable")
    stays = order[_rank_within(home[order]) < free_PC[home[order]]]
    slot_I[waiting[stays]] = home_I[waiting[stays]]
    free_PC -= np.bincount(home[stays], minlength=parents * columns)
    waiting = np.flatnonzero(slot_I < 0)
    waiting = waiting[np.argsort(parent_I[waiting], kind="stable")]
    seat = np.repeat(np.arange(parents * columns), free_PC)
    first_P = np.searchsorted(seat, np.arange(parents) * columns)
    item_seat = seat[first_P[parent_I[waiting]] + _rank_within(parent_I[waiting])]
    slot_I[waiting] = item_seat - parent_I[waiting] * columns


def _rank_within(group_G: Int64) -> Int64:
    """int64[G]: 0, 1, 2, … inside each run of equal numbers."""
    starts = np.flatnonzero(np.diff(group_G, prepend=-1) != 0)
    return np.arange(len(group_G)) - np.repeat(starts, np.diff(starts, append=len(group_G)))
