"""From scores and grades to the loss of each query: which model of choice, and what becomes of equal grades.

Legend: B queries, N places of items in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.rankers.elimination import elimination_loss, staged_elimination
from training.rankers.plackett_luce import first_places, plackett_luce_loss
from training.rankers.ties import log_group_first, random_order, tied_elimination_loss, tied_plackett_luce_loss
from training.specification.ranker import RankerConfig


def query_losses(config: RankerConfig, scores_BN: Tensor, grades_BN: Tensor, present_BN: Tensor, generator: torch.Generator) -> Tensor:
    """[B]: −log P of each query's grades under the configured model.

    scores_BN  float32 or float64; grades_BN likewise, higher is better
    present_BN    bool: where there is an item; elsewhere is padding
    generator  of the order inside a grade, for `ties = "random"`

    With `top_k`, places beyond are a group without an order: nothing has to be added for Plackett–Luce, and by elimination that group
    leaves first, in any order.
    """
    if config.ties == "marginal":
        tied = tied_elimination_loss if config.loss == "elimination" else tied_plackett_luce_loss
        return tied(scores_BN, grades_BN, present_BN)
    order_BN = random_order(grades_BN, present_BN, generator)
    scores_BN, present_BN = scores_BN.gather(-1, order_BN), present_BN.gather(-1, order_BN)
    if config.loss == "plackett-luce":
        return plackett_luce_loss(scores_BN, present_BN, config.top_k)
    if config.top_k is None:
        return elimination_loss(scores_BN, present_BN)
    first_BN = first_places(present_BN, config.top_k)
    return staged_elimination(scores_BN, present_BN, first_BN) - log_group_first(-scores_BN, present_BN & ~first_BN, first_BN)
