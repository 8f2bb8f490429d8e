"""The start of a model of query vectors, computed from its training queries.

    f(x) = (x − μ) · s         μ the mean vector, 1/s the root mean square of x − μ over all entries: encoders differ in both
    e_i  = mean of P f(x) over the queries that lead to item i
    u(x) = c · P f(x)          the product scorer's network at the first step

P has the k main axes of f(x), or is the identity if k is at least the width of x. So the first model searches for the nearest item means.
Vectors are read in blocks; the axes are those of a sample.

Legend: U queries, F numbers of a vector, I items, B queries of a block, k axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from torch import nn

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData

from ..data.interactions import Interactions
from ..deep.scorers.encoders import VectorEncoder
from ..deep.scorers.heads import ProductHead
from ..deep.scorers.model import NodeScorer
from ..trees.embeddings import spread_unseen

BLOCK = 1 << 24
"""Numbers of vectors that are held at a time."""
SAMPLE = 1 << 26
"""Most numbers in the sample of vectors that the axes are computed from."""
LEAST_SIZE = float(np.finfo(np.float32).tiny)
"""Least 1/s, if not 0."""
INVERSE_TEMPERATURE = 10.0
"""A first logit is about so many times the cosine of query and node."""


@dataclass(frozen=True)
class VectorStart:
    """f and P: mean_F float32[F], scale s, axes_kF float32[k, F] with orthonormal rows."""

    mean_F: Float32
    scale: float
    axes_kF: Float32

    def projected(self, vectors_BF: Float32) -> Float32:
        """float32[B, k]: P f(x)."""
        return np.asarray((vectors_BF - self.mean_F) * np.float32(self.scale) @ self.axes_kF.T, np.float32)


def start_of(interactions: Interactions, queries: Int64, width: int, *, seed: int) -> VectorStart:
    """f and at most `width` axes, from the vectors of `queries` (pass training queries). The same seed gives the same axes.

    Raises InvalidData if vectors are so small that 32-bit numbers cannot hold s.
    """
    vectors_UF = _vectors(interactions)
    total_F, squares_F = np.zeros(vectors_UF.shape[1]), np.zeros(vectors_UF.shape[1])
    for block in _blocks(queries, vectors_UF.shape[1]):
        total_F += vectors_UF[block].sum(0, dtype=np.float64)
    mean_F = (total_F / len(queries)).astype(np.float32)
    for block in _blocks(queries, vectors_UF.shape[1]):
        squares_F += np.square(vectors_UF[block].astype(np.float64) - mean_F).sum(0)
    size = float(np.sqrt(squares_F.sum() / (len(queries) * len(mean_F))))
    if 0 < size < LEAST_SIZE:
        raise InvalidData(
            "log", f"vectors that differ by {size:.1g}", f"differences of at least {LEAST_SIZE:.1g}: multiply all vectors by a number"
        )
    scale = 1 / size if size > 0 else 1.0
    if len(mean_F) <= width:
        return VectorStart(mean_F, scale, np.eye(len(mean_F), dtype=np.float32))
    sampled = queries[:: max(1, -(-len(queries) * len(mean_F) // SAMPLE))]
    sample_BF = scale * (vectors_UF[sampled] - mean_F)
    axes_kF = randomized_svd(sample_BF, min(width, len(sampled)), n_iter=7, random_state=seed)[2]
    return VectorStart(mean_F, scale, np.ascontiguousarray(axes_kF, np.float32))


def item_means(interactions: Interactions, queries: Int64, project: Callable[[Float32], Float32], width: int) -> Float32:
    """float32[I, k = width]: the mean of project(x) over the `queries` that lead to each item; zero if none does."""
    vectors_UF = _vectors(interactions)
    sums_Ik, counts_I = np.zeros((interactions.item_count, width), np.float32), np.zeros(interactions.item_count)
    for block in _blocks(queries, vectors_UF.shape[1]):
        lists = [interactions.of(query) for query in block.tolist()]
        items = np.concatenate(lists)
        rows = np.repeat(np.arange(len(block)), [len(items) for items in lists])
        leads_IB = sparse.csr_array((np.ones(len(items), np.float32), (items, rows)), shape=(interactions.item_count, len(block)))
        sums_Ik += leads_IB @ project(vectors_UF[block])
        counts_I += np.bincount(items, minlength=interactions.item_count)
    return np.asarray(sums_Ik / np.maximum(counts_I, 1)[:, None], np.float32)


def embeddings_of(interactions: Interactions, queries: Int64, start: VectorStart, *, seed: int) -> Float32:
    """float32[I, k]: e_i; an item that none of `queries` leads to has the vector of a random other one."""
    return spread_unseen(item_means(interactions, queries, start.projected, len(start.axes_kF)), seed=seed)


def start_model(model: NodeScorer, interactions: Interactions, queries: Int64, init_std: float, *, seed: int) -> Float32:
    """Set the encoder of a model to compute f and, if its head is an inner product, its network to compute u; returns e_i, float32[I, k].

    queries   training queries
    init_std  root mean square of the first node rows
    """
    encoder, head = model.encoder, model.head
    if not isinstance(encoder, VectorEncoder):
        raise InvalidData("scorer", type(encoder).__name__, "an encoder of vectors")
    width = _most_axes(head) if isinstance(head, ProductHead) else model.node_rows.shape[1]
    start = start_of(interactions, queries, width, seed=seed)
    encoder.mean_F.copy_(torch.from_numpy(start.mean_F))
    encoder.scale.fill_(start.scale)
    embeddings_Ik = embeddings_of(interactions, queries, start, seed=seed)
    if isinstance(head, ProductHead):
        start_network(head, start, embeddings_Ik, init_std)
    return embeddings_Ik


def _most_axes(head: ProductHead) -> int:
    """The most axes that the network of a head can represent: each takes two units of a hidden layer, since ReLU keeps one sign."""
    return max(1, min([head.state_dim - 1, *(layer.out_features // 2 for layer in _layers(head)[:-1])]))


def _layers(head: ProductHead) -> list[nn.Linear]:
    return cast(list[nn.Linear], list(head.layers))


@torch.no_grad()
def start_network(head: ProductHead, start: VectorStart, embeddings_Ik: Float32, init_std: float) -> None:
    """Set the network of a head to compute u, if its layers are wide enough.

    Units that u does not need keep their random weights and feed nothing at first.

    embeddings_Ik  e_i. Node rows begin with length init_std · √k, so c = INVERSE_TEMPERATURE / (mean ‖e_i‖ · init_std · √k)
    """
    axes = torch.from_numpy(start.axes_kF)
    k, layers = len(axes), _layers(head)
    if any(layer.out_features < 2 * k for layer in layers[:-1]):
        return
    length = float(np.linalg.norm(embeddings_Ik, axis=1).mean()) * init_std * k**0.5
    gain = INVERSE_TEMPERATURE / length if length > 0 else 1.0
    last = layers[-1]
    last.weight.zero_()
    last.bias.zero_()
    if len(layers) == 1:
        last.weight[:k] = gain * axes
        return
    layers[0].weight[: 2 * k] = torch.cat([axes, -axes])
    layers[0].bias[: 2 * k] = 0
    for layer in layers[1:-1]:
        layer.weight[: 2 * k] = 0
        layer.weight[: 2 * k, : 2 * k] = torch.eye(2 * k)
        layer.bias[: 2 * k] = 0
    last.weight[:k, : 2 * k] = gain * torch.cat([torch.eye(k), -torch.eye(k)], 1)


def _vectors(interactions: Interactions) -> Float32:
    if interactions.vectors_UF is None:
        raise InvalidData("log", "histories", "vectors")
    return interactions.vectors_UF


def _blocks(queries: Int64, width: int) -> Iterator[Int64]:
    size = max(1, BLOCK // width)
    return (queries[start : start + size] for start in range(0, len(queries), size))
