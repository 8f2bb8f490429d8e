"""Checks of the engines on this card with shards, live items and forests.

shard   each of two shards, with queries encoded elsewhere, finds what the reference finds in it; its beam above the leaves, which a
        router's live items need, is equal too
live    with new, deleted and changed items, an engine finds what the reference finds; live items are in histories and memories, and pass
        filters
forest  the trees of a forest one after the other, with live items and without

Weights are small whole numbers, so results are equal in every precision; the three take turns. Trees, beams, masks and exclusions are as in
`correctness.py`.

Legend: B queries, L levels, S state, R handles.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.engine_comparison import differences, wrong_parents
from benchmarks.gpu.correctness import FIXED_SHAPES, GRAPH_FORMS, checked, labels, made, random_params
from benchmarks.gpu.lines import Row
from benchmarks.random_bundles import Rng, make_linear_bundle, random_queries, random_tree, tree_over
from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.onnx import engine as onnx_graph
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import GivenQueries, TreeSearch
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch
from espalier.live.folded_tables import FoldedRows
from espalier.live.masks import live_mask
from espalier.live.overlay import Overlay
from espalier.manifest import GraphScorer, Ranking
from espalier.masks.eligibility import forest_mask
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import Precision, SearchParams
from espalier.shards.cut import Cut
from espalier.tree import Tree

Device = Literal["cuda", "cpu"]
Open = Callable[[Bundle], TreeSearch]
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
SHAPES = {"cuda": ((2, 8), (3, 4), (32, 2), (8, 3)), "cpu": ((2, 3), (3, 2))}
"""Branching and height of the trees."""
MOST = {"cuda": 65, "cpu": 6}
"""Beams are smaller than this."""
SHARDS = 2


@dataclass(frozen=True)
class Case:
    """One random tree under one engine.

    number  of the case, which selects the options that take turns
    open    bundle → the search to check, in `precision`
    batch   queries of a call
    """

    number: int
    device: Device
    engine: str
    form: str
    precision: Precision
    open: Open
    rng: Rng
    batch: int

    def params(self, trees: Sequence[Tree]) -> SearchParams:
        """As in `correctness.py`, for a bundle of these trees."""
        first, *others = trees
        return random_params(self.rng, first, self.batch, self.number, MOST[self.device], others)[0]

    def row(self, check: str, description: str, run: Callable[[], Sequence[str]]) -> Row:
        return checked(self.engine, self.form, self.precision, check, f"{description}, batch {self.batch}", run)

    def same(self, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> list[str]:
        """Differences between the engine's and the reference's answers and beams."""
        with closing(Pipeline(bundle, self.open(bundle))) as engine:
            wrong = differences(engine.search(queries, params), ReferenceEngine(bundle).search(queries, params))
            return wrong + wrong_parents(engine, bundle, queries, params)


def catalogues(cases: int, device: Device = "cuda", seed: int = 1) -> Iterator[Row]:
    """cases: random trees of each form. Case by case, all engines in turn."""
    onnx_too = device == "cpu" or onnx_graph.cuda_available()
    if not onnx_too:
        yield {"case": "onnx-cuda", "ok": None, "note": "not installed: ONNX Runtime here has no CUDA"} | labels("onnx-cuda", "", "float32")
    for number in range(cases):
        turn = PRECISIONS[number % len(PRECISIONS)]
        for form, kind in GRAPH_FORMS.items():
            # Triton's interpreter cannot multiply matrices of bfloat16.
            precision: Precision = "float32" if device == "cpu" and turn == "bfloat16" and form.startswith("mlp") else turn
            triton = partial(TritonSearch, device=device, precision=precision, shapes=FIXED_SHAPES[device])
            yield from _graphs(_case(number, device, "triton", form, precision, triton, seed), kind)
            if onnx_too:
                opened = partial(onnx_graph.OnnxSearch, device=device)
                yield from _graphs(_case(number, device, f"onnx-{device}", form, "float32", opened, seed), kind)
        sparse = partial(SparseCudaSearch, device=device, precision=turn, shapes=FIXED_SHAPES[device])
        yield from _forests(_case(number, device, "sparse-cuda", "forest", turn, sparse, seed))


def _case(number: int, device: Device, engine: str, form: str, precision: Precision, opened: Open, seed: int) -> Case:
    rng = np.random.default_rng((seed, number))
    return Case(number, device, engine, form, precision, opened, rng, int(rng.choice([1, 3])))


def _tree(case: Case) -> Tree:
    branching, height = SHAPES[case.device][case.number % len(SHAPES[case.device])]
    return random_tree(case.rng, height, branching, bool(case.rng.integers(2)), float(case.rng.choice([0.0, 0.2])))


def _graphs(case: Case, kind: str) -> Iterator[Row]:
    """A bundle of graphs as shards, and with live items."""
    tree, gamma = _tree(case), float(case.rng.choice([0.0, 0.5, 1.0]))
    description = f"{tree.item_count} items, γ {gamma:g}"
    with tempfile.TemporaryDirectory() as folder:
        whole = made(Path(folder), case.rng, tree, kind, True, gamma=gamma, name="whole")
        yield case.row("shard", description, partial(_shards, case, whole, Path(folder)))
        yield case.row("live", description, partial(_live, case, whole))


def _forests(case: Case) -> Iterator[Row]:
    """A forest, each of its shards, and the forest with live items."""
    tree = _tree(case)
    others = [tree_over(case.rng, tree.item_count, int(case.rng.integers(2, 6))) for _ in range(1 + case.number % 2)]
    own: Literal["logit", "log_activation"] = "log_activation" if case.number // 2 % 2 else "logit"
    ranking = Ranking(activation="l3-hinge", own=own, gamma=(0.0, 0.5, 1.0)[case.number % 3])
    description = f"{1 + len(others)} trees, {tree.item_count} labels"
    with tempfile.TemporaryDirectory() as folder:
        forest = make_linear_bundle(Path(folder), case.rng, tree, ranking, others=others)
        queries = random_queries(case.rng, forest, case.batch)
        yield case.row("integer", description, partial(case.same, forest, queries, case.params([tree, *others])))
        yield case.row("shard", description, partial(_shards, case, forest, Path(folder)))
        yield case.row("live", description, partial(_live, case, forest))


def _shards(case: Case, whole: Bundle, folder: Path) -> list[str]:
    queries = random_queries(case.rng, whole, case.batch)
    if isinstance(whole.manifest.scorer, GraphScorer):
        queries = GivenQueries(queries.kind, queries.rows, ReferenceEngine(whole).states(queries))
    wrong = []
    for index in range(SHARDS):
        shard = Cut(whole, SHARDS).write(folder / "shards" / str(index) / "1", index)
        params = case.params([tree_bundle.tree for tree_bundle in shard.alone])
        wrong += [f"shard {index}: {line}" for line in case.same(shard, queries, params)]
    return wrong


def _live(case: Case, bundle: Bundle) -> list[str]:
    touched = min(7, bundle.tree.item_count - 1)
    overlay = random_state(case.rng, bundle, deleted=touched // 2, changed=touched - touched // 2).overlay()
    queries, params = _live_queries(case, bundle, overlay), _live_params(case, bundle, overlay)
    with closing(Pipeline(bundle, case.open(bundle))) as engine_under_test:
        expected = open_engine(bundle, engine="reference")
        for engine in (engine_under_test, expected):
            engine.set_overlay(overlay)
        return differences(engine_under_test.search(queries, params), expected.search(queries, params))


def _live_queries(case: Case, bundle: Bundle, overlay: Overlay) -> QueryBatch:
    """Histories of remaining trained items and of live items; other kinds of queries have no items."""
    kind: Any = bundle.manifest.query
    if not isinstance(kind, HistoryKind):
        return random_queries(case.rng, bundle, case.batch)
    rows = FoldedRows.of(overlay)
    eligible_rows = np.concatenate([rows.kept_rows, overlay.items + rows.new_handles])
    return pad_histories(kind, [case.rng.choice(eligible_rows, case.rng.integers(1, kind.length + 2)) for _ in range(case.batch)])


def _live_params(case: Case, bundle: Bundle, overlay: Overlay) -> SearchParams:
    """Mixed beams and m; every second query has a mask that passes half of the items, trained and live."""
    rng, trees, max_beam = case.rng, [tree_bundle.tree for tree_bundle in bundle.alone], MOST[case.device]
    passing_R = rng.random(overlay.handles) < 0.5
    mask = live_mask(trees, overlay, forest_mask(trees, rng.random(bundle.tree.item_count) < 0.5), passing_R)
    mask_B = tuple(mask if b % 2 else None for b in range(case.batch))
    return SearchParams(rng.integers(1, max_beam, case.batch), rng.integers(1, 2 * max_beam, case.batch), mask_B=mask_B)
