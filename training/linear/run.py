"""A whole training run of linear scorers: data, trees, scorers, bundle; resumable level by level of each tree."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array
from tqdm import tqdm

from espalier.bundle import Bundle
from espalier.chunks import TreeChunks
from espalier.durable import atomic_write
from espalier.errors import InvalidConfig
from espalier.hardware import cores
from espalier.search import Device
from espalier.stacking import Stacking
from espalier.tree import Tree
from espalier.wording import option

from ..data.csr import Csr
from ..data.xmc import LabelledPoints
from ..linear.choosing import Choice, TreeOf, choose
from ..linear.export import export, with_stored_weights
from ..linear.fit import fit_linear, trains_root
from ..linear.label_features import label_features
from ..linear.prepare import Prepared, prepare
from ..linear.stacking import learn_stacking
from ..linear.stacking_examples import Train
from ..linear.stacking_tables import Weighing
from ..live.run_journal import read_run_journal
from ..run_files import check_identity, file_digests, stored_tree
from ..specification.linear import UNCHOSEN_GAMMA, UNTRAINED_GAMMA, LinearConfig, TreeShape
from ..trees.hierarchical_kmeans import hierarchical_kmeans
from ..versions import run_folder

log = logging.getLogger(__name__)
CHOSEN = "chosen.json"


def fit_version(config: LinearConfig, out: Path, resume: bool = False, journal: Path | None = None, device: Device = "auto") -> Bundle:
    """`fit_and_export` in the version's work folder, which is deleted once the bundle is written.

    resume  go on from the last checkpoint of a run that was killed
    Raises InvalidConfig if another run is writing this version, and for the device `cuda`.
    """
    if device == "cuda":
        raise InvalidConfig(option("device"), device, "auto or cpu: linear scorers are trained on a CPU")
    with run_folder(out, resume) as work:
        return fit_and_export(config, out, work, journal=journal)


def fit_and_export(config: LinearConfig, out: Path, work: Path, threads: int | None = None, journal: Path | None = None) -> Bundle:
    """Train by a configuration and write models/NAME/VERSION.

    work     a folder: new, empty, or of a run of the same configuration and data that was killed, from which it goes on
    threads  None: one for each core that this process may use; a container may have fewer than the machine
    journal  the model whose live items are added
    Raises InvalidConfig if the folder is another run's, and the errors of `prepare`.
    """
    begin = time.perf_counter()
    work.mkdir(exist_ok=True)
    run_journal = None if journal is None else read_run_journal(journal, work)
    inputs = {"the journal": "" if run_journal is None else run_journal.identity}
    inputs |= file_digests(config.data, "data")  # before reading: rows that are added meanwhile then show
    prepared = prepare(config, run_journal)
    shape = shape_of(config, prepared)
    config = config.with_beam(len(prepared.items), shape)
    check_identity(work, inputs | {"the configuration": config.model_dump_json()}, resume=True)
    threads = threads or cores()

    def tree_of(points: LabelledPoints) -> tuple[Tree, Csr]:
        labels, centroids = label_features(points, prepared.own_texts, config.linear)
        return hierarchical_kmeans(labels, shape.branching, shape.max_leaf, config.seed, threads), centroids

    unchosen_gamma = UNCHOSEN_GAMMA if trains_root(prepared.train, config.linear) else UNTRAINED_GAMMA
    choice = _choose_or_read(config, prepared, tree_of, threads, unchosen_gamma, work / CHOSEN)
    log.info("C = %g, γ = %g, %.1f s after the start", choice.options.known_cost, choice.options.ranking.gamma, time.perf_counter() - begin)

    def grow_trees(points: LabelledPoints, level_folder: Path | None = None) -> list[TreeChunks]:
        labels, centroids = label_features(points, prepared.own_texts, config.linear)
        seeds = [seed_of_tree(config.seed, number) for number in range(config.tree.count)]
        folders = [None if level_folder is None else folder_of_tree(level_folder, number) for number in range(config.tree.count)]
        grown_trees = []
        for seed, folder in zip(seeds, folders, strict=True):
            build = partial(hierarchical_kmeans, labels, shape.branching, shape.max_leaf, seed, threads)
            tree = build() if folder is None else stored_tree(folder / "tree.npz", build, resume=True)
            log.info("tree of %d items over %d levels, %.1f s after the start", tree.item_count, tree.height, time.perf_counter() - begin)
            grown_trees.append(tree)
        del labels, build  # gigabytes for a million texts
        trees = []
        for tree, seed, folder in zip(grown_trees, seeds, folders, strict=True):
            with tqdm(total=tree.leaf_offset, desc="nodes", unit="node", disable=None) as bar:
                trained_chunks = fit_linear(points, tree, choice.options, threads, seed, bar.update, folder, centroids)
            chunks = with_stored_weights(trained_chunks, config.linear)
            del trained_chunks
            log.info("%d weights in %.1f MB, %.1f s", len(chunks.entry_weight), chunks.nbytes / 1e6, time.perf_counter() - begin)
            trees.append(TreeChunks(tree, chunks))
        return trees

    trees = grow_trees(prepared.train, work)
    stacking = None if config.tail.form != "none" else _learn_stacking(config, choice, prepared, grow_trees, work)
    if prepared.own_texts is not None:  # its rows take gigabytes for a million texts, and the export does not need them
        nothing = csr_array(np.empty((0, 0), np.float32))
        prepared = replace(prepared, own_texts=replace(prepared.own_texts, rows=nothing, is_near=np.empty(0, np.bool_)))
    return export(config, choice, prepared, trees, out, stacking)


def shape_of(config: LinearConfig, prepared: Prepared) -> TreeShape:
    """The shape of the trees that `fit_and_export` grows."""
    return config.tree.shape_of(len(prepared.items), prepared.train.points.shape[1], trains_root(prepared.train, config.linear))


def _learn_stacking(config: LinearConfig, choice: Choice, prepared: Prepared, train: Train, work: Path) -> Stacking | None:
    """The stacking that reorders the best candidates, learned from points that trees of the same kind did not see."""
    inverse = prepared.relevance.inverse_propensity_I if config.relevance.source == "inverse-propensity" else None
    weighing, ranking = Weighing.of(prepared.train.labels, inverse), choice.options.ranking
    beam_size = config.search.beam_size
    return learn_stacking(prepared.train, weighing, train, ranking, config.stacking, beam_size, config.seed, work)


def seed_of_tree(seed: int, number: int) -> int:
    """The seed of a forest's tree `number`. Tree 0 has the run's seed, so it is the tree of a model with one tree."""
    return seed if number == 0 else int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def folder_of_tree(work: Path, number: int) -> Path:
    """The folder for the trained levels of a forest's tree: `work` itself for the first."""
    folder = work if number == 0 else work / f"tree-{number + 1}"
    folder.mkdir(exist_ok=True)
    return folder


def _choose_or_read(config: LinearConfig, prepared: Prepared, tree_of: TreeOf, threads: int, unchosen_gamma: float, file: Path) -> Choice:
    """C and γ, chosen or read from the file of a run that was killed after it had chosen them."""
    if file.is_file():
        stored = json.loads(file.read_text())
        return Choice(config.linear.model_copy(update=stored["options"]), stored["report"])

    choice = choose(prepared.train, tree_of, config.linear, config.search.beam_size, threads, config.seed, unchosen_gamma)
    chosen = {"cost": choice.options.cost, "gamma": choice.options.gamma}
    with atomic_write(file) as part:
        part.write_text(json.dumps({"options": chosen, "report": choice.report}))
    return choice
