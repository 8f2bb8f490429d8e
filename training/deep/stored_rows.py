"""What node rows are stored as: as few bytes as validation users allow.

float16 costs nothing that could be measured, so it is the default. int8 halves it again, which only matters where the rows are large: there
the same validation users are searched for with rows of both, and int8 is taken unless it finds less.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch

from espalier.manifest import Ranking
from espalier.node_rows import rounded
from training.deep.prepare import Prepared
from training.deep.ranking import Figures, Searches
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.deep.validation import validation_pairs
from training.specification.deep import DeepConfig

log = logging.getLogger(__name__)

Dtype = Literal["float32", "float16", "int8"]
LARGE_BYTES = 32 << 20
"""Rows of float16 that take more are tried in int8: less fits into the caches of a server."""
MOST_LOST = 0.002
"""int8 is taken where recall, the geometric mean over cuts, falls by no more than this share."""
QUERIES = 1000


def store_rows(config: DeepConfig, prepared: Prepared, topology: Topology, model: NodeScorer, ranking: Ranking) -> Dtype:
    """Round the model's node rows to what they will be stored as, and return that.

    Raises FloatingPointError where the configured type cannot hold them.
    """
    rows_ND = model.node_rows.detach().cpu().numpy()

    def rounded_to(dtype: Dtype) -> Dtype:
        model.node_rows.data = torch.from_numpy(rounded(rows_ND, dtype)).to(model.node_rows.device)
        return dtype

    asked = config.scorer.dtype
    if asked != "auto":
        return rounded_to(asked)
    try:
        rounded_to("float16")
    except FloatingPointError:
        return rounded_to("float32")
    pairs = validation_pairs(config, prepared, QUERIES)
    if 2 * rows_ND.size <= LARGE_BYTES or not pairs:
        return "float16"

    def measured() -> Figures:
        return Searches(config, topology, model, pairs, ranking.own).measured({"gamma": ranking.gamma})

    before = measured()
    rounded_to("int8")
    gain, error = measured().gain_over(before)
    log.info("node rows in int8: recall %+.2f %% (± %.2f) of float16's, %d validation users", 100 * gain, 100 * error, len(pairs))
    return "int8" if gain >= -MOST_LOST else rounded_to("float16")
