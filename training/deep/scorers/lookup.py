"""Looking rows of the node table up: in a tensor, or in the table of a model in training (`row_table.py`).

Legend: N nodes, D node row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.deep.scorers.row_table import RowTable

Rows = Tensor | RowTable
"""The node table float32[N, D]."""


def lookup(nodes: Tensor, node_rows: Rows) -> Tensor:
    """float32[…, D]: rows of node_rows at nodes int64[…]."""
    return node_rows.lookup(nodes) if isinstance(node_rows, RowTable) else nn.functional.embedding(nodes, node_rows)


def rows_of(span: range, node_rows: Rows) -> Tensor:
    """float32[n, D]: neighbouring rows of node_rows."""
    if isinstance(node_rows, RowTable):
        return node_rows.lookup(torch.arange(span.start, span.stop, device=node_rows.device))
    return node_rows[span.start : span.stop]
