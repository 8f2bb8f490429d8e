"""Checks of the engines on this card: random trees compared to the reference, for each engine, scorer form and precision.

integer    weights are small whole numbers, every number is exact in every precision: results equal the reference's, ties included
replay     real weights that every precision holds exactly: the reference rescores the engine's beams
alone      a query gets the same answer alone as in its batch
exported   the graphs that training exports, by replay, within the engine's own rounding for the precision
sanitized  memory accesses of the kernels
large      2^16 items: a beam of all items finds the best ones by float64, and lower precisions find what float32 finds

Every case has mixed beams and m. Cases take turns with masks, with few exclusions and with more than a cell holds. To add a scorer form,
add its name to GRAPH_FORMS or to a list like EXPORTED; to add an engine, write a function like those below and a stage in `stages.py`.

Legend: B queries, E exclusions, M results.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from benchmarks.engine_comparison import differences, wrong_alone, wrong_beams
from benchmarks.gpu.graph_models import model_of, scorer_of
from benchmarks.gpu.lines import Row, read, reason
from benchmarks.gpu.search_speed import M, agreement, filled_cell
from benchmarks.gpu.sparse_speed import AGREED, queries_of
from benchmarks.gpu.sparse_speed import model_of as linear_model_of
from benchmarks.random_bundles import (
    Rng,
    make_bundle,
    make_linear_bundle,
    random_masks,
    random_memory,
    random_queries,
    random_tree,
)
from benchmarks.synthetic import trained_kind
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.onnx import engine as onnx_graph
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.triton.cells import FixedShapes
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch
from espalier.errors import UnsupportedGraph
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.search import Engine, Precision, SearchParams
from espalier.tree import Tree
from training.specification.deep import PAPER_WINDOWS

Device = Literal["cuda", "cpu"]
Open = Callable[[Bundle], Engine]
STEP = 2.0**-5
"""Real weights are multiples of it, see `random_bundles.stepped`."""
GRAPH_FORMS = {
    "mlp": "history", "product": "vector", "mlp, memory": "history memory", "product, sequence and memory": "product sequence memory",
}  # fmt: skip
"""The hand-made scorers, and their bundles: a kind of `make_bundle`, and extras."""
EXPORTED: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("product", (32,)), ("product", ()), ("mlp", (128, 64, 24)), ("mlp", (20,)), ("mlp", (18, 17, 20, 5)), ("sequence", ()),
    ("attention", (16,)),
)  # fmt: skip
SHAPES = {"cuda": ((2, 8), (3, 4), (32, 2), (2, 3), (8, 3), (4, 4), (2, 1)), "cpu": ((2, 4), (3, 2), (2, 1))}
"""Branching and height of the trees."""
LINEAR_SHAPES = {"cuda": ((2, 7), (32, 2), (40, 2), (3, 4), (100, 1), (8, 3), (2, 1)), "cpu": ((2, 3), (8, 2), (40, 1))}
BATCHES = {"cuda": (1, 3, 40, 100), "cpu": (1, 2)}
FIXED_SHAPES = {
    "cuda": FixedShapes(batches=(1, 4, 64, 128), m_sizes=(64, 256), excluded=16),
    "cpu": FixedShapes(batches=(1, 2), m_sizes=(64,), excluded=16),
}
OVERLAP: dict[Precision, float] = {"float32": 1.0, "float16": 0.97, "bfloat16": 0.8}
"""Least share of float32's answers that each precision must find among 2^16 items."""
FLOAT32: Precision = "float32"


# -- the engines ----------------------------------------------------------------------------------------------------------


def triton(
    precision: Precision, cases: int, large: bool, kind: str = "", device: Device = "cuda", cuda_graphs: bool = True, seed: int = 1
) -> Iterator[Row]:
    """cases: random trees of each scorer form whose name begins with `kind`. large: with 2^16 items too."""

    def opened(bundle: Bundle) -> Engine:
        return Pipeline(bundle, TritonSearch(bundle, device, precision, FIXED_SHAPES[device], cuda_graphs=cuda_graphs))

    forms = {form: words for form, words in GRAPH_FORMS.items() if form.startswith(kind)}
    if device == "cpu" and precision == "bfloat16":
        forms = {form: words for form, words in forms.items() if not form.startswith("mlp")}
        note = "Triton's interpreter cannot multiply matrices of bfloat16"
        yield {"case": f"triton mlp {precision}", "ok": None, "note": note} | labels("triton", "mlp", precision)
    rounding = TritonSearch.roundings["float32"]
    checks_alone = device == "cuda"  # the interpreter multiplies with BLAS, where a row's sum depends on its place
    exported_of_kind = [(name, hidden) for name, hidden in EXPORTED if (name == "mlp") == (kind == "mlp") or not kind]
    kinds = [(name, hidden) for name, hidden in exported_of_kind if (name, precision, device) != ("mlp", "bfloat16", "cpu")]
    yield from exported_cases("triton", opened, kinds, precision, unknown=("attention",))
    if large:
        yield from _large(precision, device)
    yield from graph_cases("triton", opened, forms, precision, cases, device, rounding, checks_alone, seed)


def sparse_cuda(
    precision: Precision, cases: int, large: bool, device: Device = "cuda", cuda_graphs: bool = True, seed: int = 1
) -> Iterator[Row]:
    """cases: random trees. large: with 32^3 labels too, beside sparse-cpu."""

    def opened(bundle: Bundle) -> Engine:
        return Pipeline(bundle, SparseCudaSearch(bundle, device, precision, FIXED_SHAPES[device], cuda_graphs=cuda_graphs))

    if large:
        yield from compared(precision, device, 3, 32, 300)
    yield from linear_cases("sparse-cuda", opened, precision, cases, device, seed)


def onnx_cuda(cases: int, device: Device = "cuda", seed: int = 1) -> Iterator[Row]:
    """`onnx-cuda`, or on the CPU `onnx-cpu` with the same group size."""
    if device == "cuda" and not onnx_graph.cuda_available():
        yield {"case": "onnx-cuda", "ok": None, "note": "not installed: ONNX Runtime here has no CUDA"} | labels("onnx-cuda", "", "float32")
        return

    def opened(bundle: Bundle) -> Engine:
        return Pipeline(bundle, onnx_graph.OnnxSearch(bundle, device, group_size=onnx_graph.GPU_GROUP))

    name = f"onnx-{device}"
    yield from exported_cases(name, opened, EXPORTED, "float32")
    yield from graph_cases(name, opened, GRAPH_FORMS, "float32", cases, device, onnx_graph.OnnxSearch.rounding, True, seed)


# -- the cases ------------------------------------------------------------------------------------------------------------


def labels(engine: str, form: str, precision: str, check: str = "") -> Row:
    return {"engine": engine, "form": form, "precision": precision, "check": check}


def checked(engine: str, form: str, precision: str, check: str, case: str, run: Callable[[], Sequence[str]], must_know: bool = True) -> Row:
    """A row whose "ok" says whether `run` found no error. An exception is an error, too; the other cases go on.

    must_know  whether the engine must support the graphs. An engine whose kernels fail while it tries them reports them as unsupported
    """
    row: Row = {"case": f"{engine} {form} {precision}, {check}: {case}"} | labels(engine, form, precision, check)
    try:
        wrong = run()
    except Exception as error:  # compilers, kernels and allocators raise many types
        if isinstance(error, UnsupportedGraph) and not must_know:
            return row | {"ok": None, "note": f"left to another engine: {error}"}
        return row | {"ok": False, "note": reason(error)}
    return row | {"ok": not wrong} | ({"note": "; ".join(wrong[:3])[:500], "wrong": len(wrong)} if wrong else {})


def random_params(rng: Rng, tree: Tree, batch: int, case: int, max_beam: int, others: Sequence[Tree] = ()) -> tuple[SearchParams, str]:
    """Mixed beams and m; masks in every second case, exclusions in two of three, in one of them more than a cell holds.

    others  a forest's other trees
    """
    masked, width = case % 2 == 1, (0, 3, 40)[case % 3]
    exclude_BE = rng.integers(-1, tree.item_count, (batch, width)) if width else None
    mask_B = random_masks(rng, tree, batch, float(rng.choice([0.05, 0.5])), others) if masked else None
    params = SearchParams(rng.integers(1, max_beam, batch), rng.integers(1, 2 * max_beam, batch), exclude_BE, mask_B=mask_B)
    return params, f"batch {batch}{', masks' if masked else ''}{f', {width} exclusions' if width else ''}"


class Drawn(NamedTuple):
    """One random case. description: text for the row."""

    rng: Rng
    tree: Tree
    gamma: float
    own: Literal["logit", "log_activation"]
    batch: int
    params: SearchParams
    description: str


def drawn_case(case: int, shapes: Sequence[tuple[int, int]], device: Device, max_beam: int, seed: int) -> Drawn:
    """max_beam: beams on the CPU are smaller."""
    rng = np.random.default_rng((seed, case))
    branching, height = shapes[case % len(shapes)]
    ragged, gamma, own = bool(rng.integers(2)), float(rng.choice([0.0, 0.5, 1.0])), cast(Any, rng.choice(["logit", "log_activation"]))
    tree = random_tree(rng, height, branching, ragged, float(rng.choice([0.0, 0.2, 0.9])))
    batch = int(rng.choice(BATCHES[device]))
    params, details = random_params(rng, tree, batch, case, 65 if device == "cuda" else max_beam)
    return Drawn(rng, tree, gamma, own, batch, params, f"{branching}^{height}{' ragged' if ragged else ''}, γ {gamma:g}, {own}, {details}")


def graph_cases(
    name: str,
    opened: Open,
    forms: dict[str, str],
    precision: Precision,
    cases: int,
    device: Device,
    rounding: float,
    checks_alone: bool,
    seed: int,
) -> Iterator[Row]:
    """Case by case, all forms in turn. rounding: of ranks in float32."""
    for case, (form, kind) in itertools.product(range(cases), forms.items()):
        rng, tree, gamma, own, batch, params, description = drawn_case(case, SHAPES[device], device, 6, seed)
        check = partial(checked, name, form, precision)
        with tempfile.TemporaryDirectory() as folder:
            whole = made(Path(folder), rng, tree, kind, True, gamma=gamma, name="whole")
            yield check("integer", description, partial(_integer, opened, whole, random_queries(rng, whole, batch), params))
            real = made(Path(folder), rng, tree, kind, False, gamma=gamma, own=own, name="real", step=STEP)
            queries = random_queries(rng, real, batch, False)
            yield check("replay", description, partial(_replay, opened, real, queries, params, rounding))
            if checks_alone:
                yield check("alone", description, partial(_alone, opened, real, queries, params))


def made(folder: Path, rng: Rng, tree: Tree, words: str, integer: bool, **options: Any) -> Bundle:
    """A bundle of one of GRAPH_FORMS."""
    kind: Any
    kind, *extras = words.split()
    memory = random_memory(rng, tree.item_count, int(rng.integers(1, 6)), integer) if "memory" in extras else None
    encoder: Literal["levels", "sequence"] = "sequence" if "sequence" in extras else "levels"
    return make_bundle(folder, rng, tree, kind, integer=integer, memory=memory, encoder=encoder, **options)


def linear_cases(name: str, opened: Open, precision: Precision, cases: int, device: Device, seed: int) -> Iterator[Row]:
    check = partial(checked, name, "linear", precision)
    for case in range(cases):
        rng, tree, gamma, own, batch, params, description = drawn_case(case, LINEAR_SHAPES[device], device, 9, seed)
        # With whole numbers the fourth power and the sigmoid would not stay exact.
        activation: Any = rng.choice(["l1-hinge", "l2-hinge", "l3-hinge"])
        real_activation: Any = rng.choice([activation, "sigmoid", "l4-hinge"])
        width = int(rng.choice([1, 20, 300]))
        whole_width = 20 if own == "log_activation" else width  # so that cubes stay whole numbers of 24 bits
        with tempfile.TemporaryDirectory() as folder:
            ranking = Ranking(activation=activation, own=own, gamma=gamma)
            whole = make_linear_bundle(Path(folder), rng, tree, ranking, True, "whole", whole_width)
            run = partial(_integer, opened, whole, random_queries(rng, whole, batch), params)
            yield check("integer", f"{description}, {whole_width} features, {activation}", run)
            ranking = Ranking(activation=real_activation, own=own, gamma=gamma)
            real = make_linear_bundle(Path(folder), rng, tree, ranking, False, "real", width, step=2.0**-8)
            queries, real_description = random_queries(rng, real, batch, False), f"{description}, {width} features, {real_activation}"
            yield check("replay", real_description, partial(_replay, opened, real, queries, params, LINEAR_ROUNDING))
            yield check("alone", real_description, partial(_alone, opened, real, queries, params))


def exported_cases(
    name: str, opened: Open, kinds: Sequence[tuple[str, tuple[int, ...]]], precision: Precision, unknown: Sequence[str] = ()
) -> Iterator[Row]:
    """unknown: scorer forms that the engine need not support."""
    for kind, hidden in kinds:
        rng = np.random.default_rng(5)
        params = SearchParams(np.array([1, 4, 9, 2]), np.array([3, 20, 7, 1]))
        with tempfile.TemporaryDirectory() as folder:
            bundle = trained_kind(Path(folder), kind, hidden, rng)
            queries = random_queries(rng, bundle, len(params.m_B))
            description = f"hidden layers {'–'.join(map(str, hidden)) or 'none'}"
            run = partial(_replay, opened, bundle, queries, params, None)
            yield checked(name, kind, precision, "exported", description, run, kind not in unknown)


LINEAR_ROUNDING = 1e-3
"""Absolute error of ranks of a few hundred, which a fourth power makes of weights that are exact in every precision."""


def _integer(opened: Open, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> list[str]:
    with closing(opened(bundle)) as engine:
        expected = ReferenceEngine(bundle).search(queries, params)
        repeat_differences = [f"the second time, {line}" for line in differences(engine.search(queries, params), expected)]
        return differences(engine.search(queries, params), expected) or repeat_differences


def _replay(opened: Open, bundle: Bundle, queries: QueryBatch, params: SearchParams, rounding: float | None) -> list[str]:
    with closing(opened(bundle)) as engine:
        return wrong_beams(engine, bundle, queries, params, rounding)


def _alone(opened: Open, bundle: Bundle, queries: QueryBatch, params: SearchParams) -> list[str]:
    with closing(opened(bundle)) as engine:
        return wrong_alone(engine, queries, params, 3)


# -- models as large as in use --------------------------------------------------------------------------------------------


def _large(precision: Precision, device: Device) -> Iterator[Row]:
    """2^16 items on a GPU, 2^5 in the interpreter."""
    height, batch = (16, 64) if device == "cuda" else (5, 2)
    bundle = model_of(height)
    items = bundle.tree.item_count
    m, wide = min(M, items // 4), items
    queries = QueryBatch(bundle.manifest.query, np.random.default_rng(1).integers(0, items, (batch, sum(PAPER_WINDOWS))))
    shapes = FixedShapes(batches=(batch,), m_sizes=(256,))
    rows_by_cell = {}
    for each in dict.fromkeys((precision, FLOAT32)):
        with closing(TritonSearch(bundle, device, each, shapes)) as trees, torch.no_grad():
            engine = Pipeline(bundle, trees)
            for beam in (min(200, items // 2), wide):
                rows_by_cell[each, beam] = engine.search(queries, SearchParams.uniform(batch, beam, m)).item_rows_BM
            if each == "float32":
                _, state_BLS = filled_cell(trees, batch, wide, m)
                leaves = trees.node_rows_ND[bundle.tree.leaf_offset :].double().expand(batch, -1, -1)
                scores = scorer_of("mlp").head.double().to(trees.device)(state_BLS[:, -1].double(), leaves)
    best_BM = bundle.tree.leaf_item[scores.topk(m).indices.cpu().numpy()]
    of_row = labels("triton", "mlp", precision, "large")
    share = agreement(rows_by_cell["float32", wide], best_BM)
    if precision == "float32":
        yield {
            "case": f"triton mlp float32, large: all {items} items, beside float64",
            "ok": share >= 0.999,
            "share": round(share, 5),
        } | of_row
    for (each, beam), found_BM in rows_by_cell.items():
        if each == precision != "float32":
            share = agreement(found_BM, rows_by_cell["float32", beam])
            case = f"triton mlp {precision}, large: {items} items, beam {beam}, beside float32"
            yield {"case": case, "ok": share >= OVERLAP[precision], "share": round(share, 5)} | of_row


def compared(precision: Precision, device: Device, levels: int, branching: int, count: int) -> Iterator[Row]:
    """The synthetic linear model's answers beside those of sparse-cpu."""
    bundle, own_NF = linear_model_of(levels, branching)
    queries = queries_of(bundle, own_NF, count)
    on_cpu = open_engine(bundle, "cpu")
    shapes = FixedShapes(batches=(1, 8, 64, 512), m_sizes=(64,)) if device == "cuda" else FixedShapes(batches=(count,), m_sizes=(64,))
    for beam in (10, 200) if device == "cuda" else (3,):
        params = SearchParams.uniform(count, beam, 10)
        expected = on_cpu.search(queries, params)
        with closing(Pipeline(bundle, SparseCudaSearch(bundle, device, precision, shapes))) as engine:
            result = engine.search(queries, params)
        share = agreement(result.item_rows_BM, expected.item_rows_BM)
        largest_difference = np.nanmax(np.abs(np.where(np.isfinite(expected.ranks_BM), result.ranks_BM, np.nan) - expected.ranks_BM))
        case = f"sparse-cuda linear {precision}, large: {bundle.tree.leaf_count} labels, beam {beam}, beside sparse-cpu"
        row: Row = {"case": case, "ok": share >= AGREED[precision], "share": round(share, 5), "ranks_within": float(largest_difference)}
        yield row | labels("sparse-cuda", "linear", precision, "large")


def sanitized(seconds: float) -> Iterator[Row]:
    """The memory accesses of our engines on few cases, under compute-sanitizer where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield {"case": "compute-sanitizer", "ok": None, "note": "not installed"}
        return
    arguments = json.dumps({"precision": FLOAT32, "cases": 2, "large": False, "cuda_graphs": False})
    # torch's memory cache would hide accesses beyond an array's end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for function in ("triton", "sparse_cuda"):
        with tempfile.TemporaryDirectory() as folder:
            rows, begin = Path(folder) / "rows.jsonl", time.monotonic()
            stage = ["benchmarks.gpu.stage", str(rows), function, "benchmarks.gpu.correctness", function, arguments, str(seconds / 4), ""]
            command = [tool, "--error-exitcode", "3", sys.executable, "-m", *stage]
            row: Row = {"case": f"compute-sanitizer, {function}"}
            try:
                completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds / 2)
            except subprocess.TimeoutExpired:
                yield row | {"ok": None, "note": f"left out: {seconds / 2:.0f} s were over"}
                continue
            print(completed.stdout[-4000:], completed.stderr[-4000:], flush=True)
            error_lines = [line for line in completed.stdout.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
            right = sum(line["ok"] is True for line in read(rows))
            row |= {"ms": round((time.monotonic() - begin) * 1e3), "ok": completed.returncode != 3 and right > 0, "cases": right}
            yield row | {"note": "; ".join(error_lines[:3])[:500]}
