"""A linear classifier with the 1-norm of its weights as the regulariser, by a proximal Newton method, compiled by numba.

    min_w ‖w‖₁ + Σ_i C_i ℓ(t_i w·x_i),   t_i = ±1,   ℓ(m) = log(1 + exp(−m)) or max(0, 1 − m)²

The method is newGLMNET (Yuan, Ho and Lin 2012): each round replaces the loss by its second-order model at w, lowers model + ‖w‖₁ by
passes of coordinate descent, and then shortens the step until the objective falls enough. Features whose weight is 0 and stays so are left
out of a round, and of a pass.

Knows one problem over sparse columns. Does not know trees or labels.

Legend: R points, F features, E entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Float64
from espalier.compiled_code import compiled

FLOOR = 1e-12
"""Least curvature, and least change of a weight."""
LONGEST = 10.0
"""Longest step of one weight."""
ENOUGH, HALVINGS = 0.01, 20
"""The share of the predicted fall that a step must bring, and how often it is halved for that."""


class Columns(NamedTuple):
    """The entries of R points by feature.

    begin  int64[F + 1]: where each feature's entries begin
    row    int32[E]: the point of each, from 0 to R − 1
    value  float32[E]
    """

    begin: Array
    row: Array
    value: Array


class Stop(NamedTuple):
    """When the descent ends.

    tolerance  of the summed violations of optimality, as a share of those at w = 0
    rounds     most rounds
    passes     most passes of coordinate descent in a round
    """

    tolerance: float
    rounds: int
    passes: int


def minimise(columns: Columns, sign_R: Array, cost_R: Array, hinge: bool, stop: Stop, seed: int) -> Float64:
    """float64[F]: the weights.

    sign_R  float64, ±1
    cost_R  float64: C_i
    hinge   whether the loss is the squared hinge; else it is the logistic one
    """
    weight_F = np.zeros(len(columns.begin) - 1)
    _descend(columns, sign_R, cost_R, hinge, stop, seed, weight_F)
    return weight_F


@compiled(error_model="numpy")
def _descend(columns: Columns, sign: Array, cost: Array, hinge: bool, stop: Stop, seed: int, weight: Array) -> None:
    begin, row, value = columns
    tolerance, rounds, passes = stop
    features, points = len(weight), len(sign)
    margin, moved = np.zeros(points), np.zeros(points)
    slope, curve = np.zeros(points), np.zeros(points)
    gradient, curvature, step = np.zeros(features), np.zeros(features), np.zeros(features)
    order = np.zeros(features, np.int64)
    random = np.uint64(seed) * np.uint64(2654435761) + np.uint64(1)
    first, worst, share = 0.0, np.inf, 1.0
    for number in range(rounds):
        for i in range(points):
            slope[i], curve[i] = _derivatives(margin[i], sign[i], cost[i], hinge)
        active, total, worst_before, worst = 0, 0.0, worst, 0.0
        for j in range(features):
            g, h = 0.0, FLOOR
            for e in range(begin[j], begin[j + 1]):
                g += value[e] * slope[row[e]]
                h += value[e] * value[e] * curve[row[e]]
            if weight[j] == 0 and abs(g) < 1 - worst_before / points:
                continue
            gradient[j], curvature[j], step[j] = g, h, 0
            order[active] = j
            active += 1
            violation = _violation(weight[j], g)
            total += violation
            worst = max(worst, violation)
        if number == 0:
            first = total
        if total <= tolerance * first:
            break
        moved[:] = 0
        model = curve, gradient, curvature, weight
        sweeps, random = _lower_model(columns, model, step, moved, order[:active], passes, share * first, random)
        if sweeps == 1:
            share *= 0.25
        fall, before, after = 0.0, 0.0, 0.0
        for a in range(active):
            j = order[a]
            fall += gradient[j] * step[j]
            before += abs(weight[j])
            after += abs(weight[j] + step[j])
        fall += after - before
        length = _length(margin, moved, sign, cost, hinge, weight, step, order[:active], fall, before)
        for a in range(active):
            weight[order[a]] += length * step[order[a]]
        for i in range(points):
            margin[i] += length * moved[i]
        if length == 0:
            break


@compiled(error_model="numpy")
def _lower_model(
    columns: Columns, model: Any, step: Array, moved: Array, order: Array, passes: int, enough: float, random: Any
) -> tuple[int, Any]:
    """Passes of coordinate descent over the steps of some features; `moved` are the margins' steps.

    Returns how many passes, and the state of the random numbers.
    """
    begin, row, value = columns
    curve, gradient, curvature, weight = model
    points, left, worst = len(moved), len(order), np.inf
    sweeps = 0
    while sweeps < passes:
        for a in range(left - 1, 0, -1):
            random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            b = np.int64((random >> np.uint64(33)) % np.uint64(a + 1))
            order[a], order[b] = order[b], order[a]
        total, worst_before, worst, a = 0.0, worst, 0.0, 0
        while a < left:
            j = order[a]
            g, h, w = gradient[j] + FLOOR * step[j], curvature[j], weight[j] + step[j]
            for e in range(begin[j], begin[j + 1]):
                g += value[e] * curve[row[e]] * moved[row[e]]
            if w == 0 and abs(g) < 1 - worst_before / points:
                left -= 1
                order[a], order[left] = order[left], order[a]
                continue
            a += 1
            violation = _violation(w, g)
            total += violation
            worst = max(worst, violation)
            change = -w
            if g + 1 < h * w:
                change = -(g + 1) / h
            elif g - 1 > h * w:
                change = -(g - 1) / h
            change = min(max(change, -LONGEST), LONGEST)
            if abs(change) >= FLOOR:
                step[j] += change
                for e in range(begin[j], begin[j + 1]):
                    moved[row[e]] += value[e] * change
        sweeps += 1
        if total <= enough:
            if left == len(order):
                break
            left, worst = len(order), np.inf  # the features that were left out must agree
    return sweeps, random


@compiled(error_model="numpy")
def _length(
    margin: Array,
    moved: Array,
    sign: Array,
    cost: Array,
    hinge: bool,
    weight: Array,
    step: Array,
    order: Array,
    fall: float,
    before: float,
) -> float:
    """How much of a step to take: 1, ½, ¼ …, the first with which the objective falls by ENOUGH of what the model promises, else 0."""
    length = 1.0
    for _ in range(HALVINGS):
        change = -before
        for a in range(len(order)):
            change += abs(weight[order[a]] + length * step[order[a]])
        for i in range(len(margin)):
            if moved[i] != 0:
                change += cost[i] * (_loss(sign[i] * (margin[i] + length * moved[i]), hinge) - _loss(sign[i] * margin[i], hinge))
        if change <= ENOUGH * length * fall:
            return length
        length *= 0.5
    return 0.0


@compiled(error_model="numpy")
def _loss(margin: float, hinge: bool) -> float:
    if hinge:
        return max(0.0, 1 - margin) ** 2
    return float(np.log1p(np.exp(-abs(margin))) + max(-margin, 0.0))


@compiled(error_model="numpy")
def _derivatives(margin: float, sign: float, cost: float, hinge: bool) -> tuple[float, float]:
    """Of a point's loss by w·x: the first and the second derivative."""
    if hinge:
        lacking = 1 - sign * margin
        return (-2 * cost * sign * lacking, 2 * cost) if lacking > 0 else (0.0, 0.0)
    wrong = 1 / (1 + np.exp(sign * margin))
    return -cost * sign * wrong, cost * wrong * (1 - wrong)


@compiled(error_model="numpy")
def _violation(weight: float, gradient: float) -> float:
    """By how much 0 is outside the subgradient of |w| + loss."""
    if weight > 0:
        return abs(gradient + 1)
    if weight < 0:
        return abs(gradient - 1)
    return max(abs(gradient) - 1, 0.0)
