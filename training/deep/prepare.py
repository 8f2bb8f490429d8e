"""The inputs of a training run, from its configuration: the log, its split, the item table, the earlier model and the tree."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from espalier.arrays import Bool, Float32
from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.tree import Tree
from espalier.wording import configured, option

from ..data.interactions import Interactions, lists_ascend, read_interactions
from ..data.item_content import ItemContent, item_content
from ..data.item_tables import item_table
from ..data.splits import Split, split_log
from ..data.user_item_matrix import events_of_items
from ..deep.content_rows import predict_vectors
from ..deep.earlier import EarlierModel, open_earlier, warn_of_known_answers
from ..deep.jtm import learn_tree
from ..deep.jtm_samples import draw_samples
from ..deep.parallel import process, wait_for_all
from ..deep.vector_start import embeddings_of as vector_embeddings
from ..deep.vector_start import start_of
from ..live.joined_log import with_journal, with_live_fields
from ..live.run_journal import RunJournal, read_run_journal, with_live_items
from ..retrieval.task import Fitted
from ..specification.deep import DeepConfig, JtmTree, TreeOfEarlierModel
from ..specification.models import config_of
from ..trees.balanced import category_tree, random_tree
from ..trees.embeddings import item_embeddings as embeddings_of
from ..trees.embeddings import spread_unseen
from ..trees.kmeans import kmeans_tree, unit_rows

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
EMBEDDING_DIM = 64
"""Width of the co-occurrence embeddings that balanced k-means clusters."""
PENALTY = 1.0
"""Of the squared weights, in the ridge regression that predicts rows of an earlier model; rows have length 1."""


@dataclass(frozen=True)
class SharedStart:
    """The tree and the first model of a run, from an earlier run with the same data and seed. model: a file of a whole `NodeScorer`."""

    tree: Tree
    model: Path


@dataclass(frozen=True)
class Prepared:
    """Item rows of the lists, of `items`, of their content and of the earlier model's tree are the same.

    start         the earlier model's bundle, with its live items; None: no earlier model
    run_journal   the journal with live items; None: no journal
    shared_start  None: this run makes the tree and the first model
    neighbours    source of the memory; None: this run chooses it
    """

    split: Split
    items: ItemTable
    earlier: EarlierModel | None = None
    content: ItemContent | None = None
    start: Path | None = None
    run_journal: RunJournal | None = None
    shared_start: SharedStart | None = None
    neighbours: Fitted | None = None

    @property
    def interactions(self) -> Interactions:
        """The lists to learn from."""
        return self.split.lists

    @cached_property
    def seen_I(self) -> Bool:
        """bool[I]: the items that a training user touched."""
        return events_of_items(self.split.lists, self.split.train) > 0


def prepare(config: DeepConfig, data: Path | None, work: Path, shared: Path | None = None, journal: Path | None = None) -> Prepared:
    """Read the log (or `data` instead of the configured one), the item table and the earlier model; events stay in files under `work`.

    shared   the work folder of the whole run, if `work` is that of one of its processes
    journal  the model whose live items are added; None: the earlier model
    """
    interactions = read_interactions(data or config.data.log, config.data.format, work)
    if interactions.order == "file" and lists_ascend(interactions):
        no_order = configured('data.format.order = "none"', option("time", "none"))
        log.warning("the events of nearly all users are sorted by item id. If that is not the order of time, say %s", no_order)
    split = split_log(interactions, config.data.split, config.data.format, work, seed=config.seed)
    run_journal, start = shared_run_journal(journal or config.earlier_model, config.earlier_model, shared or work)
    if run_journal is not None:
        split = with_journal(split, run_journal.items, work)
    ids, data_config = split.lists.item_ids, config.data
    if data_config.items is None:
        items = ItemTable.build(pa.table({"id": ids}))
    else:
        items = item_table(data_config.items, ids, data_config.items_format, data_config.items_id)
    if run_journal is not None:
        items = with_live_fields(items, run_journal.items, run_journal.held_through)
    earlier = None
    if start is not None and isinstance(config.tree, TreeOfEarlierModel):
        earlier = open_earlier(start, with_dates(config, split), config.tree, split.lists, split.train, items)
    return Prepared(split, items, earlier, item_content(items, config.content), start, run_journal)


def with_dates(config: DeepConfig, split: Split) -> DeepConfig:
    """The configuration with the dates that a split chose: a log that has grown is cut at the same dates."""
    return config.model_copy(update={"data": config.data.model_copy(update={"split": split.config})})


def shared_run_journal(journal: Path | None, earlier: Path | None, work: Path) -> tuple[RunJournal | None, Path | None]:
    """The run's copies of a journal and of the bundle that it starts from. Process 0 writes them, the others read them."""
    if journal is None:
        return None, None
    if process():
        wait_for_all()
    run_journal = read_run_journal(journal, work)
    start = earlier
    if run_journal is not None and earlier is not None and earlier.absolute().parent == run_journal.models:
        start = with_live_items(earlier, run_journal.items, work)
    if not process():
        wait_for_all()
    return run_journal, start


def build_tree(config: DeepConfig, prepared: Prepared, device: torch.device = CPU) -> Tree:
    """The configured tree over the catalogue, from training users only. On `device` an earlier model learns it."""
    interactions, tree = prepared.interactions, config.tree
    if prepared.shared_start is not None:
        return prepared.shared_start.tree
    if prepared.earlier is not None:
        prepared.earlier.model.to(device)
        return relearn_tree(config.seed, tree, prepared, prepared.earlier) if isinstance(tree, JtmTree) else prepared.earlier.tree
    branching = tree.children(interactions.item_count)
    if tree.kind == "random":
        return random_tree(interactions.item_count, branching, seed=config.seed)
    if tree.kind == "category":
        if interactions.category_of_item_I is None:
            raise InvalidConfig("tree.kind", tree.kind, "a log with a category column")
        return category_tree(interactions.category_of_item_I, branching, seed=config.seed)
    if prepared.start is None:
        embeddings_ID = item_embeddings(prepared, EMBEDDING_DIM, config.seed)
    else:
        bundle = Bundle.open(prepared.start)
        earlier_config = config_of(bundle.manifest, DeepConfig, "earlier_model")
        warn_of_known_answers(prepared.start, bundle, config, earlier_config)
        learned_ID = leaf_rows(bundle, prepared.items)
        if not learned_ID.any():
            first_id = prepared.items.column("id")[0].as_py()
            raise InvalidConfig("earlier_model", str(config.earlier_model), f"a model of the log's items, such as {first_id!r}")
        embeddings_ID = with_new(learned_ID, prepared, config.seed)
    return kmeans_tree(embeddings_ID, branching, seed=config.seed)


def relearn_tree(seed: int, tree: JtmTree, prepared: Prepared, earlier: EarlierModel) -> Tree:
    """The tree that JTM learns from a trained model, with samples of training users. Logs the gain."""
    begin = time.perf_counter()
    samples = draw_samples(prepared.interactions, prepared.split.train, earlier.length, tree.samples, seed=seed)
    gamma = earlier.gamma if tree.gamma is None else tree.gamma
    learned_tree = learn_tree(earlier.model, earlier.tree, samples, gap=tree.gap, gamma=gamma, likelihood=earlier.likelihood)
    count = len(samples.target_S)
    log.info(
        "tree: %s per sample %.4f → %.4f over %d samples, %d of %d items moved, %.1f s",
        "rank" if earlier.likelihood == "softmax" else "log-likelihood",  # a softmax's lacks its normalisers, before as after
        learned_tree.before / count,
        learned_tree.after / count,
        count,
        learned_tree.moved,
        learned_tree.tree.item_count,
        time.perf_counter() - begin,
    )
    return learned_tree.tree


def leaf_rows(bundle: Bundle, items: ItemTable) -> Float32:
    """float32[I, D]: the leaf rows of these items in a bundle, zero for items that it lacks."""
    row = bundle.items.rows_of(items.column("id").to_pylist())
    leaves = bundle.tree.leaf_of_item[row]
    return np.where((row >= 0)[:, None], bundle.node_rows_ND[leaves], 0).astype(np.float32)


def item_embeddings(prepared: Prepared, width: int, seed: int) -> Float32:
    """float32[I, D]: co-occurrence embeddings of all items from training users, or means of the vectors that lead to them.

    D is less than `width` only for tiny catalogues and short vectors.
    """
    interactions, train = prepared.interactions, prepared.split.train
    users = "users" if interactions.vectors_UF is None else "queries"
    if min(len(train), interactions.item_count) < 2:
        counts = f"{len(train)} training {users} and {interactions.item_count} items"
        raise InvalidData("log", counts, f"at least 2 of each: a tree is made of what {users} have in common")
    if interactions.vectors_UF is not None:
        return vector_embeddings(interactions, train, start_of(interactions, train, width, seed=seed), seed=seed)
    width = min(width, len(train) - 1, interactions.item_count - 1)
    embeddings = embeddings_of(interactions, train, width, seed=seed)
    return with_unseen(embeddings, prepared, seed)


def with_new(rows_ID: Float32, prepared: Prepared, seed: int) -> Float32:
    """Leaf rows of an earlier model at unit length, with zero rows replaced: by the prediction from co-occurrence, which knows new items.

    Ridge regression over the items with a row predicts it from an item's embedding.
    """
    known_I = np.asarray(rows_ID.any(axis=1), np.bool_)
    if known_I.all():
        return rows_ID
    unit_ID, embeddings_ID = unit_rows(rows_ID), unit_rows(item_embeddings(prepared, EMBEDDING_DIM, seed))
    known_KE = embeddings_ID[known_I]
    weights = np.linalg.solve(known_KE.T @ known_KE + PENALTY * np.eye(known_KE.shape[1]), known_KE.T @ unit_ID[known_I])
    return np.where(known_I[:, None], unit_ID, embeddings_ID @ weights).astype(np.float32)


def with_unseen(embeddings_ID: Float32, prepared: Prepared, seed: int) -> Float32:
    """The embeddings, with zero rows replaced: by the prediction from the item's content if it has any, else by another item's row."""
    content = prepared.content
    if content is not None:
        known_I = np.asarray(embeddings_ID.any(axis=1), np.bool_)
        length_I = np.linalg.norm(embeddings_ID, axis=1)
        unit_ID = embeddings_ID / np.where(known_I, length_I, 1)[:, None]  # only directions matter for trees and first rows
        predicted_ID = predict_vectors(content.rows, unit_ID.astype(np.float32), known_I)
        embeddings_ID = np.where((known_I | ~content.known_I)[:, None], embeddings_ID, predicted_ID)
    return spread_unseen(embeddings_ID, prepared.interactions.category_of_item_I, seed=seed)
