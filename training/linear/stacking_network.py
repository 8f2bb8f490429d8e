"""The network of a bundle's stacking (espalier.stacking), trained on candidates of points held out.

Legend: B points, C candidates, X features of candidates.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import block_diag

from espalier.stacking import FARTHEST, NETWORK, StackingNetwork

from ..linear.stacking_examples import Examples

UNITS, NETWORKS = (64, 32), 3
"""Units of the layers of one network, and how many of different seeds are averaged: held-out P@1 of three sets rose by .1 to .2."""
PASSES, STEPS, BATCH, RATE, DECAY = 10, 1000, 32, 3e-3, 1e-5
"""Of Adam with one cycle of the learning rate: at most so many passes, of about so many steps; a batch is of points."""
BLOCK = 256
"""Points whose hidden units are held at a time."""


def fitted(examples: Examples, seed: int) -> StackingNetwork:
    """The network, trained by the logistic loss of all candidates: several side by side, whose logits it averages."""
    real = examples.rows >= 0
    mean, scale = np.empty((2, examples.features.shape[2]), np.float32)
    for x in range(len(mean)):  # one at a time: there may be a billion numbers
        wide = examples.features[..., x][real].astype(np.float64)
        mean[x], scale[x] = wide.mean(), 1 / max(float(wide.std()), 1e-3)
    inputs = torch.from_numpy(_standardised(examples.features, mean, scale))
    targets, weights = torch.from_numpy(examples.targets), torch.from_numpy(real.astype(np.float32))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that their number makes no difference
    try:
        found = [_trained(inputs, targets, weights, int(own)) for own in np.random.SeedSequence(seed).generate_state(NETWORKS)]
    finally:
        torch.set_num_threads(threads)
    weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = (
        [array.detach().numpy() for array in parts] for parts in zip(*found, strict=True)
    )
    sums = (np.hstack(weight_1), np.concatenate(bias_1), block_diag(*weight_2), np.concatenate(bias_2))
    arrays = [array.astype(np.float32) for array in (*sums, np.concatenate(weight_3) / NETWORKS, np.mean(bias_3, axis=0))]
    return StackingNetwork(**dict(zip(NETWORK, [mean, scale, *arrays], strict=True)))


def logits(network: StackingNetwork, features: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32[B, C] of features float32[B, C, X]: the network before σ."""
    out = np.empty(features.shape[:2], np.float32)
    for begin in range(0, len(features), BLOCK):
        hidden = _standardised(features[begin : begin + BLOCK], network.mean, network.scale)
        hidden = np.maximum(hidden @ network.weight_1 + network.bias_1, 0)
        hidden = np.maximum(hidden @ network.weight_2 + network.bias_2, 0)
        out[begin : begin + BLOCK] = hidden @ network.weight_3 + network.bias_3
    return out


def _standardised(features: NDArray[np.float32], mean: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    z = features - mean
    z *= scale
    np.clip(z, -FARTHEST, FARTHEST, out=z)
    return z


def _trained(inputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """weight_1, bias_1, …, bias_3."""
    random = torch.Generator().manual_seed(seed)
    layers = []
    for narrow, wide in pairwise((inputs.shape[2], *UNITS, 1)):  # uniform, biases too: of outputs that began at 0, some stayed below it
        layers += [(2 * torch.rand(shape, generator=random) - 1) / narrow**0.5 for shape in ((narrow, wide), (wide,))]
    layers[-2] = layers[-2][:, 0]
    for layer in layers:
        layer.requires_grad_()
    count = len(inputs)
    size = min(BATCH, count)
    passes = max(1, min(PASSES, STEPS // (count // size)))
    steps = passes * (count // size)
    optimiser = torch.optim.AdamW(layers, lr=RATE, weight_decay=DECAY)
    # One step more than are made: of ten, PyTorch would divide by the length of the first phase, which is 0.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps + 1, pct_start=0.1)
    for _ in range(passes):
        order = torch.randperm(count, generator=random)
        for begin in range(0, count - size + 1, size):
            batch = order[begin : begin + size]
            hidden = inputs[batch]
            for layer in range(len(UNITS)):
                hidden = torch.relu(hidden @ layers[2 * layer] + layers[2 * layer + 1])
            logits = hidden @ layers[-2] + layers[-1]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets[batch], weights[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return layers
