"""Queries that nothing was learned from, read from a file: the test users of a log, or the queries of a text or feature file."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.queries import VectorKind
from training.data.interactions import read_interactions
from training.data.splits import EvaluationPair, split_log
from training.evaluate import LabelledQueries, labelled
from training.specification.deep import DeepConfig
from training.specification.models import config_of

log = logging.getLogger(__name__)


def pairs_of_log(bundle: Bundle, file: Path) -> list[EvaluationPair]:
    """The test users of a log, split as in training, with known items alone. The log may have grown since."""
    config = config_of(bundle.manifest, DeepConfig)
    with tempfile.TemporaryDirectory() as work:
        interactions = read_interactions(file, config.data.format, Path(work))
        split = split_log(interactions, config.data.split, config.data.format, Path(work), seed=config.seed)
        row_of = bundle.items.rows_of(interactions.item_ids.to_pylist())
        pairs = [replace(p, history=row_of[p.history], relevant=row_of[p.relevant]) for p in split.test]
    if interactions.fingerprint != bundle.manifest.data.get("sha256"):
        log.warning("%s is not the log that the model was trained on; its test users may have been training users", file)
    known = [replace(p, history=p.history[p.history >= 0], relevant=p.relevant[p.relevant >= 0]) for p in pairs]
    return [pair for pair in known if len(pair.relevant) and (len(pair.history) or pair.vector is not None)]


def labelled_queries(bundle: Bundle, file: Path | None) -> LabelledQueries:
    """The queries of a file in the format of the bundle's training data, or the bundle's own held-out ones."""
    if file is None:
        held = read_heldout(bundle)
        return LabelledQueries(held.queries, held.relevant)
    if isinstance(bundle.manifest.query, VectorKind):
        return labelled(bundle.manifest.query, pairs_of_log(bundle, file))
    from training.linear.prepare import read_queries

    return LabelledQueries(*read_queries(bundle, file))
