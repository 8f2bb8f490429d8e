"""Reads held-out queries from a file: the test users of a log, or the queries of a text or feature file."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.bundle import Bundle
from espalier.checks.heldout import Unknown
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import VectorKind

from .data.interactions import Interactions, read_interactions
from .data.splits import LEARNED_VALIDATION, EvaluationPair, Split, split_log
from .data.user_item_matrix import events_of_items
from .evaluate import LabelledQueries, held_out_queries, in_rows, labelled
from .specification.deep import DeepConfig
from .specification.models import config_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutLog:
    """The test queries of a log, split as in training, with the bundle's item rows.

    pairs     with known items only
    unknown   what was left out for that
    unseen_I  bool[I]: whether no training user touched the item
    """

    pairs: list[EvaluationPair]
    unknown: Unknown
    unseen_I: Bool

    def of_unseen(self) -> list[EvaluationPair]:
        """The queries for which unseen items are relevant, with only these as relevant. Raises InvalidData if there is none."""
        pairs = [replace(pair, relevant=pair.relevant[self.unseen_I[pair.relevant]]) for pair in self.pairs]
        pairs = [pair for pair in pairs if len(pair.relevant)]
        if not pairs:
            counts = f"{len(self.pairs)} test queries, {int(self.unseen_I.sum())} unseen items"
            raise InvalidData("log", counts, "a test query with a relevant item that no training user touched; see data.split.unseen_items")
        return pairs


def held_out_log(bundle: Bundle, file: Path | None = None) -> HeldOutLog:
    """The test queries of a log, which may have grown since training; without a file, of the training log.

    Raises InvalidConfig if the training log is no longer at its path.
    """
    config = config_of(bundle.manifest, DeepConfig)
    if file is None:
        file = config.data.log
        if not file.exists():
            raise InvalidConfig("--data", None, f"the log, since {file}, which the model was trained on, is not there")
    with split_as_trained(bundle, file) as (interactions, split, row_of):
        pairs = in_rows(split.test, row_of)
        unknown = Unknown.of([(pair.relevant, row_of[pair.relevant]) for pair in split.test], len(pairs))
        training = split.whole() if bundle.manifest.data.get(LEARNED_VALIDATION) else split
        touched = row_of[events_of_items(training.lists, training.train) > 0]
    if interactions.fingerprint != bundle.manifest.data.get("sha256"):
        log.warning("%s is not the log that the model was trained on; its test users may have been training users", file)
    unseen_I = np.ones(len(bundle.items), np.bool_)
    unseen_I[touched[touched >= 0]] = False
    if (counts := bundle.label_counts()) is not None:  # of a log that has grown, other items are hidden and other users are held out
        trained = bundle.manifest.trained_items.items
        unseen_I[:trained] = counts.counts_I[:trained] == 0
    return HeldOutLog(pairs, unknown, unseen_I)


@contextmanager
def split_as_trained(bundle: Bundle, file: Path | None = None) -> Iterator[tuple[Interactions, Split, Int64]]:
    """A log, by default the configured one, its split as in training, and the bundle's row of each of its items, −1 for none."""
    config = config_of(bundle.manifest, DeepConfig)
    with tempfile.TemporaryDirectory() as work:
        interactions = read_interactions(file or config.data.log, config.data.format, Path(work))
        split = split_log(interactions, config.data.split, config.data.format, Path(work), seed=config.seed)
        yield interactions, split, bundle.items.rows_of(interactions.item_ids.to_pylist())


def labelled_queries(bundle: Bundle, file: Path | None) -> LabelledQueries:
    """The queries of a file in the format of the bundle's training data, or the bundle's own held-out ones."""
    if file is None:
        return held_out_queries(bundle)
    if isinstance(bundle.manifest.query, VectorKind):
        log_queries = held_out_log(bundle, file)
        return replace(labelled(bundle.manifest.query, log_queries.pairs), unknown=log_queries.unknown)
    from .linear.prepare import read_queries

    return read_queries(bundle, file)
