"""The training steps of a model with a sequence encoder: batches of sequences, the level-wise softmax at every position, updates.

A run is a function of its configuration and data: batches come epoch after epoch, and the draws of a step depend on (seed, step).

Legend: B sequences, T positions, N positions that are trained, P targets of a position, I items, D node row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count, islice

import numpy as np
import torch
from torch import Tensor

from espalier.errors import InvalidConfig

from ...data.user_item_matrix import events_of_items
from ...deep.content_rows import ContentRows
from ...deep.optimiser import Optimiser
from ...deep.parallel import process_rows, processes
from ...deep.prepare import Prepared
from ...deep.scorers.model import NodeScorer
from ...deep.scorers.row_table import lookup
from ...deep.scorers.sequence import SequenceQuery
from ...deep.sequence.batches import SequenceBatch, SequenceSource, trained_positions
from ...deep.sequence.level_softmax import ColumnSource, level_softmax_loss
from ...deep.topology import Topology, on_device
from ...specification.deep import SequenceConfig
from ...specification.sections import number_of

BETAS = 0.9, 0.98
"""Of AdamW."""
MAX_NORM = 1.0
"""Gradients are scaled down to this norm."""


class SequenceSteps:
    """The training steps. With several processes, each takes its share of the sequences of every batch.

    topology  its eligible items are the columns of the softmax
    content   of leaf rows; None: rows have no part from content
    """

    def __init__(
        self,
        config: SequenceConfig,
        model: NodeScorer,
        topology: Topology,
        prepared: Prepared,
        bfloat16: bool,
        content: ContentRows | None = None,
    ) -> None:
        if not isinstance(model.encoder, SequenceQuery):
            raise InvalidConfig("scorer.kind", config.scorer.kind, "a model with a sequence encoder")
        lists, users = prepared.interactions, prepared.split.train
        self.config, self.model, self.encoder, self.topology = config, model, model.encoder, topology
        self.lists, self.bfloat16, self.content = lists, bfloat16, content
        places = number_of("optimiser.places", config.optimiser.places)
        self.source = SequenceSource(lists, users, config.history_length, places, config.seed)
        events_I = events_of_items(lists, users)
        share_I = events_I / max(1.0, events_I.sum()) + 1 / len(events_I)  # half by popularity, half uniform
        self.columns = ColumnSource(topology, share_I, config.objective.negatives, config.objective.whole)
        optimiser = config.optimiser
        self.optimiser = Optimiser(model, BETAS, optimiser.average, optimiser.weight_decay, content)
        self.batches: Iterator[SequenceBatch] | None = None

    def make(self, step: int) -> Tensor:
        """One update with the batch of `step`; returns this process's loss (a scalar on the device).

        The first call may be for any step, the others for the steps that follow it.
        The mean of the losses over the processes is the batch's.
        """
        config = self.config
        if self.batches is None:
            self.batches = islice(chain.from_iterable(map(self.source.epoch, count())), step, None)
        if self.content is not None:
            self.content.draw(config.seed * 1_000_003 + step)
        self.optimiser.zero_gradients()
        loss = self._loss(next(self.batches), np.random.default_rng([config.seed, 3, step]))
        loss.backward()
        self.optimiser.step(config.optimiser.learning_rate_at(step), MAX_NORM)
        return loss.detach().to(self.topology.device)

    def _loss(self, batch: SequenceBatch, rng: np.random.Generator) -> Tensor:
        config, device, objective = self.config, self.topology.device, self.config.objective
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**63)))
        instances = config.instances
        nearness = number_of("instances.nearness", instances.nearness)
        positions = trained_positions(self.lists, batch, instances.targets, nearness, instances.cold_share, rng)
        count, sequences = len(positions.position_N), len(batch.history_BT)
        inner = np.sort(rng.permutation(count)[: max(1, round(objective.inner_share * count))])
        rows_of_process, inner_count = process_rows(sequences), len(inner)
        positions, inner = positions.of(rows_of_process, inner)
        shares = processes() * len(positions.position_N) / count, processes() * len(inner) / inner_count
        leaves_BT = self.topology.leaf_of_item_I1[on_device(batch.history_BT[rows_of_process], device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bfloat16):
            states = self.encoder.states(leaves_BT, self.model.table, generator, sequences)
        levels = self.columns.levels(on_device(positions.target_NP, device), generator)
        widths = [part.columns.stop - part.columns.start for part in self.encoder.typed_parts]
        rows = [lookup(level.nodes_M, self.model.table).split(widths, 1) for level in levels]  # one lookup for all parts
        sequence_N, position_N, inner_N = (on_device(array, device) for array in (positions.sequence_N, positions.position_N, inner))
        total = torch.zeros((), device=device)
        for part, state_BXD, columns in zip(self.encoder.typed_parts, states, zip(*rows, strict=True), strict=True):
            state_ND = state_BXD[sequence_N, position_N]
            total = total + level_softmax_loss(
                state_ND.bfloat16() if self.bfloat16 else state_ND.float(),
                columns,
                part.scale_LD,
                levels,
                inner_N,
                objective.gamma,
                objective.level_decay,
                shares,
            )
        return total
