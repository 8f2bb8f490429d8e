"""Chooses by the log what a configuration of sequences leaves `auto`: targets, width of a row, length of a history, dropout, updates.

Knows lengths of lists, and the shape of an earlier model. Does not know models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from espalier.arrays import Int64

from ...data.interactions import Interactions
from ...data.splits import EvaluationPair
from ...deep.prepare import Prepared
from ...specification.deep import DeepConfig, SequenceConfig

log = logging.getLogger(__name__)


def history_length(lists: Interactions, users: Int64, most: int = 200) -> int:
    """The length that 99 of 100 lists of the users do not exceed, from 50 to `most`."""
    length_U = np.diff(lists.offset_U1)[users]
    return int(np.clip(np.quantile(length_U, 0.99), 50, most)) if len(users) else 50


def places_of_a_batch(lists: Interactions, users: Int64) -> int:
    """Positions of a batch: about 400 batches an epoch, of 1,024 to 4,096 positions."""
    return int(np.clip(np.diff(lists.offset_U1)[users].sum() // 400, 1024, 4096))


FEW_EVENTS = 50
"""Events an item below which a transformer overfits soon."""
MANY_ITEMS = 65_536
LONGEST_MEAN = 1000
"""Longest history that is averaged as a whole: more items cost next to nothing there, unlike for a transformer."""
LEAST_STEPS = 1000
"""Fewer updates learn too little of a small log."""
MOST_PASSES = 100
"""More passes for the sake of LEAST_STEPS learn a tiny log by heart: of 150 lists, recall@10 falls by a tenth after 1,000 passes."""


def has_few_events(lists: Interactions, users: Int64) -> bool:
    """Whether an item has few events of these users, on average."""
    return bool(np.diff(lists.offset_U1)[users].sum() < FEW_EVENTS * lists.item_count)


def dropout_of(lists: Interactions, users: Int64) -> float:
    """0.5 for logs of few events an item, else 0.2."""
    return 0.5 if has_few_events(lists, users) else 0.2


def epochs_of(lists: Interactions, users: Int64, encoders: Sequence[str]) -> float:
    """16; 4 for logs of few events an item, 2 where their many items are read by windows alone."""
    if not has_few_events(lists, users):
        return 16.0
    return 2.0 if is_wide(lists.item_count, encoders) else 4.0


def steps_of(lists: Interactions, users: Int64, epochs: float, places: int, most: int) -> int:
    """The updates in `epochs` passes over the users' lists; at least LEAST_STEPS, or those of MOST_PASSES; at most `most`."""
    updates = int(np.diff(lists.offset_U1)[users].sum()) / places  # of a pass
    return max(1, min(most, max(min(LEAST_STEPS, round(MOST_PASSES * updates)), round(epochs * updates))))


def width_of(items: int, encoders: Sequence[str]) -> int:
    """256; 128 for many items that windows alone read, whose rows take most of the time and of the bundle."""
    return 128 if is_wide(items, encoders) else 256


def is_wide(items: int, encoders: Sequence[str]) -> bool:
    """Whether most of the time goes to node rows: there are many, and windows alone read them."""
    return items > MANY_ITEMS and list(encoders) == ["windows"]


def nearness_of(validation: Sequence[EvaluationPair]) -> float:
    """1 if validation queries have two relevant items or more, on average; else 2: then the next item matters most."""
    relevant = [len(pair.relevant) for pair in validation]
    return 1.0 if relevant and np.mean(relevant) >= 2 else 2.0


def with_rules(config: DeepConfig, prepared: Prepared) -> DeepConfig:
    """The configuration with numbers in place of `auto`; kinds without these rules come back as they are."""
    if not isinstance(config, SequenceConfig):
        return config
    lists, users = prepared.interactions, prepared.split.train
    instances, scorer, optimiser = config.instances, config.scorer, config.optimiser
    if scorer.init == "earlier" and prepared.earlier is not None:
        shape = {"node_dim": prepared.earlier.model.node_rows.shape[1], "length": prepared.earlier.length}
        scorer = scorer.model_copy(update={key: value for key, value in shape.items() if getattr(scorer, key) == "auto"})
    if instances.nearness == "auto":
        nearness = 0.0 if lists.order == "none" else nearness_of(prepared.split.validation)
        instances = instances.model_copy(update={"nearness": nearness})
    encoders = scorer.readers(lists.order != "none")
    if scorer.length == "auto":
        most = LONGEST_MEAN if list(encoders) == ["windows"] and lists.order == "none" else 200
        scorer = scorer.model_copy(update={"length": history_length(lists, users, most)})
    if scorer.node_dim == "auto":
        scorer = scorer.model_copy(update={"node_dim": width_of(lists.item_count, encoders)})
    if scorer.dropout == "auto":
        scorer = scorer.model_copy(update={"dropout": dropout_of(lists, users)})
    epochs = epochs_of(lists, users, encoders) if optimiser.epochs == "auto" else optimiser.epochs
    places = places_of_a_batch(lists, users) if optimiser.places == "auto" else optimiser.places
    steps = steps_of(lists, users, epochs, places, optimiser.steps)
    if steps < optimiser.steps and "steps" in optimiser.model_fields_set:
        passes = steps * places / np.diff(lists.offset_U1)[users].sum()
        log.info(
            "%s steps: %.1f passes over the lists (optimiser.epochs); optimiser.steps allows %s",
            f"{steps:,}",
            passes,
            f"{optimiser.steps:,}",
        )
    optimiser = optimiser.model_copy(update={"epochs": epochs, "places": places, "steps": steps})
    return config.model_copy(update={"instances": instances, "scorer": scorer, "optimiser": optimiser})
