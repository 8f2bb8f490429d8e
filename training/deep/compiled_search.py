"""The engine that serves, over a model in training: validation's searches of queries that are encoded, in compiled loops.

Knows which models the loops can search. Does not know logs or figures.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from espalier.engines.compiled.engine import DenseSearch
from espalier.engines.scorer_weights import Layer, ScorerWeights
from espalier.tree import Tree
from training.deep.beam import Own
from training.deep.scorers.heads import MlpHead, ProductHead, SharedPReLU
from training.deep.scorers.model import NodeScorer


def compiled_search(model: NodeScorer, tree: Tree, gamma: float, own: Own, key_weight: float) -> DenseSearch | None:
    """The search of a model's rows as they are, not copied; close it. None where its scorer or its rows are none that the loops know.

    key_weight  λ of a memory; 0 without one
    """
    scorer = _scorer_of(model)
    if scorer is None or model.row_table is not None or model.node_rows.device.type != "cpu":
        return None
    rows_ND = model.node_rows.detach().numpy()
    return DenseSearch(tree, rows_ND, scorer, gamma, own == "log_activation", key_weight, torch.get_num_threads())


def _scorer_of(model: NodeScorer) -> ScorerWeights | None:
    head = model.head
    if isinstance(head, ProductHead):
        return ScorerWeights()
    if not isinstance(head, MlpHead):
        return None
    first = _array(head.node_part.weight.T)
    linear = [layer for layer in head.layers if isinstance(layer, nn.Linear)]
    weights = [first, *(_array(layer.weight.T) for layer in linear)]
    biases = [np.zeros(first.shape[1], np.float32), *(_array(layer.bias) for layer in linear)]
    slope_of_layer = [slope.weight.item() for slope in head.slopes if isinstance(slope, SharedPReLU)]
    slopes = [np.full(len(bias), slope, np.float32) for bias, slope in zip(biases, slope_of_layer, strict=True)]
    layers = tuple(Layer(*arrays) for arrays in zip(weights, biases, slopes, strict=True))
    return ScorerWeights(layers, _array(head.out.weight[0]), head.out.bias.item())


def _array(weights: Tensor) -> NDArray[np.float32]:
    return weights.detach().float().numpy()
