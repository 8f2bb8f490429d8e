"""The updates of a model: AdamW, dense for its network and by `row_adam.py` for its node rows, and the mean of both over steps.

Knows models, processes and gradients. Does not know batches or objectives.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..deep.content_rows import ContentRows
from ..deep.parallel import average, processes
from ..deep.row_adam import EPSILON, RowAdam
from ..deep.scorers.model import NodeScorer
from ..deep.scorers.row_table import RowTable

AVERAGE_EVERY = 5
"""Steps between two updates of the averaged weights: one reads and writes all of them."""


class Optimiser:
    """The optimiser of a model on its device. From now on the model's lookups go through a `RowTable`.

    span      steps that the mean spans
    content   of the leaves: node rows then hold the items' own parts from now on, and lookups add the part from content
    averaged  a second model with the mean of the weights over steps; its node rows are up to date after `refresh`
    """

    def __init__(
        self, model: NodeScorer, betas: tuple[float, float], span: int, weight_decay: float = 0.0, content: ContentRows | None = None
    ) -> None:
        nodes = len(model.node_rows) if model.row_table is None else model.row_table.nodes
        if content is not None:
            content.split_rows(model)
        self.averaged = copy.deepcopy(model).requires_grad_(False)
        self._rows = RowAdam(model.node_rows, self.averaged.node_rows, betas, weight_decay)
        compose = None if content is None else content.compose(model, dropping=True)
        self.table = model.row_table = RowTable(model.node_rows, nodes, self._rows, compose)
        if content is not None:
            self.averaged.row_table = RowTable(self.averaged.node_rows, nodes, None, content.compose(self.averaged, dropping=False))
        self._network = [weights for weights in model.parameters() if weights is not model.node_rows]
        self._averaged_network = [weights for weights in self.averaged.parameters() if weights is not self.averaged.node_rows]
        self._adam = torch.optim.AdamW(self._network, betas=betas, eps=EPSILON, weight_decay=weight_decay, fused=True)
        self._span, self._averages = span, 0

    def zero_gradients(self) -> None:
        """Reset the gradients; call it before a backward pass."""
        self._adam.zero_grad()

    @torch.no_grad()
    def step(self, rate: float, most_norm: float | None = None) -> None:
        """Update all weights by the mean of the gradients over the processes; call it after a backward pass. A collective call.

        most_norm  scale all gradients together down to this norm; None: do not
        """
        position_R, gradient_RD = self.table.gradients()
        gradients = [weights.grad for weights in self._network if weights.grad is not None]
        for gradient in gradients:
            average(gradient)
        if most_norm is not None:
            squares = torch.linalg.vector_norm(gradient_RD).double().square()
            if processes() > 1:
                dist.all_reduce(squares)
            norms = torch.stack([squares.sqrt().float(), *(torch.linalg.vector_norm(gradient) for gradient in gradients)])
            scale = (most_norm / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1)
            for gradient in (gradient_RD, *gradients):
                gradient.mul_(scale)
        self._rows.step(position_R, gradient_RD, rate)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()

    @torch.no_grad()
    def average(self) -> None:
        """Add the weights to the mean."""
        share = mean_share(self._span, self._averages)
        self._averages += 1
        self._rows.average(share)
        for mean, value in zip(self._averaged_network, self._network, strict=True):
            mean.lerp_(value, 1 - share)

    def refresh(self) -> None:
        """Bring the node rows of the model and of the mean up to date: call it before using either in another way than by lookups."""
        self._rows.refresh_all()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, after `refresh`; not copied."""
        averaged = self.averaged.state_dict()
        return {"network": self._adam.state_dict(), "rows": self._rows.state_dict(), "averaged": averaged, "averages": self._averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["network"])
        self._rows.load_state_dict(state["rows"])
        self.averaged.load_state_dict(state["averaged"])
        self._averages = state["averages"]


def averaged_over(steps: int, model: nn.Module) -> AveragedModel:
    """A copy of a model that follows the mean of its weights over about `steps` steps; update it every AVERAGE_EVERY steps."""
    return AveragedModel(model, avg_fn=lambda mean, value, times: torch.lerp(mean, value, 1 - mean_share(steps, int(times))))


def mean_share(steps: int, times: int) -> float:
    """d of averaged ← d · averaged + (1 − d) · current, at an update after `times` others.

    It is 0 at the first and grows from 2/11 to 1 − AVERAGE_EVERY / steps: the first weights soon lose their share.
    """
    return 0.0 if times == 0 else max(0.0, min(1 - AVERAGE_EVERY / steps, (1 + times) / (10 + times)))
