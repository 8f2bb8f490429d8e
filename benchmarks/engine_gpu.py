"""The GPU engine: correct on this card, and how fast beside what else could be done on it.

    python -m benchmarks.engine_gpu --check [--cases 60] [--sanitize]
    python -m benchmarks.engine_gpu --json F [--quick] [--heights 20,22,24] [--beams 50,200,400,800] [--batches 1,16,128,512,2048]
    python -m benchmarks.engine_gpu --growth F.png --json F
    python -m benchmarks.engine_gpu --tune --json F

--check    random trees, scorers, beams, masks and exclusions: equal to the reference with integer weights, replayed with real ones, the
           same answer in any batch, and all items of a large tree when the beam holds them. Exit status 1 where something differs.
           --sanitize runs it once more, on few cases, under compute-sanitizer
--json     a table over 2^height items of complete binary trees, 24 numbers a row in float16, 128–64–24 scorer, m = 200 (m = beam below it):
             triton, torch-graph, torch-eager     the search, from query states on the device
             triton-call, onnx-cuda-call          whole calls, from histories to result rows in NumPy
             inner-product                        torch's matmul of 64 numbers an item, and topk
             exhaustive                           every item with the same scorer, and topk
           `tflops` and `gb_per_s` are of the scorer's products and the node rows alone, beside what the card does at best; the same
           queries are searched again and again, so that the rows of small batches come from the card's cache
--growth   ms of one and of 512 queries over trees of 2^16 … 2^26 items
--tune     the sizes of `Tuning`, at 2^20 items
Without a GPU it ends with status 2, but for `--check --device cpu`, in Triton's interpreter (TRITON_INTERPRET=1).
Through HTTP: `python -m service --device cuda` and `python -m loadtest.sweep`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.synthetic import HIDDEN, NODE_DIM
from espalier.bundle import Bundle
from espalier.eligibility import node_mask
from espalier.engines.gpu import GraphCell, TritonEngine
from espalier.engines.gpu_cells import Grid, Tuning
from espalier.manifest import GraphScorer, Ranking, SearchDefaults
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import Precision, SearchParams
from espalier.tree import Tree, complete_tree
from loadtest.hardware import hardware
from training.scorers.encoders import PAPER_WINDOWS, WindowEncoder
from training.scorers.heads import MlpHead
from training.scorers.model import NodeScorer, export_graphs

M = 200
ROUNDS = 7
VECTOR = 64
LARGEST = 24e9
"""Bytes of scores of a brute-force search that are still tried."""
BLOCK = 1 << 16
"""Node rows that are drawn from one seed."""
Row = dict[str, Any]


# -- models ---------------------------------------------------------------------------------------------------------------


class _Rows:
    """Node rows of any number, drawn when they are read: what an engine does with rows mapped from a file, without the file."""

    def __init__(self, nodes: int) -> None:
        self.shape, self.itemsize = (nodes, NODE_DIM), 2

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[np.float16]:
        start, stop, _ = rows.indices(len(self))
        blocks = [np.random.default_rng(block).random((BLOCK, NODE_DIM), np.float32) for block in range(start // BLOCK, -(-stop // BLOCK))]
        drawn = np.concatenate(blocks)[start % BLOCK : start % BLOCK + stop - start]
        return ((drawn - 0.5) * np.float32(1.7)).astype(np.float16)


def _scorer() -> NodeScorer:
    """The papers' scorer with random weights, always the same."""
    torch.manual_seed(0)
    return NodeScorer(64, NODE_DIM, WindowEncoder(PAPER_WINDOWS, NODE_DIM), MlpHead(10 * NODE_DIM, NODE_DIM, HIDDEN), 0.5)


@lru_cache(1)
def model_of(height: int) -> Bundle:
    """A bundle of 2^height items that is nowhere on disk, with the papers' scorer; γ = 0."""
    length = sum(PAPER_WINDOWS)
    graphs = export_graphs(_scorer(), "history_nodes", torch.zeros((2, height + 1, length), dtype=torch.int64))
    tree = complete_tree(np.random.default_rng(0).permutation(1 << height), 2)
    kind = HistoryKind(length=length)
    scorer = GraphScorer(dtype="float16", node_dim=NODE_DIM, state_levels=height + 1, state_dim=HIDDEN[0])
    manifest = SimpleNamespace(
        name=f"synthetic-{height}",
        version=1,
        query=kind,
        ranking=Ranking(own="logit", gamma=0.0),
        scorer=scorer,
        search=SearchDefaults(beam_size=200, m=M, max_beam_size=1000, max_m=1000),
    )
    by_name = dict(zip(("query.onnx", "scorer.onnx"), graphs, strict=True))
    parts = {"node_rows_ND": _Rows(tree.node_count), "graph": by_name.__getitem__, "graph_kind": kind, "graph_scorer": scorer}
    return cast(Bundle, SimpleNamespace(tree=tree, manifest=manifest, **parts))


class TorchSearch:
    """The beam search that a careful user would write in torch, in float16: complete binary tree, γ = 0, no masks, ties as topk has them.

    state_BLS  query states, the first of them for level `first`
    """

    def __init__(self, engine: TritonEngine, tree: Tree, state_BLS: Tensor, first: int) -> None:
        self._head = cast(MlpHead, _scorer().head).half().to(engine.device).eval()
        self._rows_ND, self._tree, self._state_BLS, self._first = engine.node_rows_ND.half(), tree, state_BLS, first

    @torch.no_grad()
    def search(self, beam: int, m: int) -> Tensor:
        """int64[B, m] leaves."""
        start, height = self._tree.start_level(beam), self._tree.height
        span = self._tree.level(start)
        nodes = torch.arange(span.start, span.stop, device=self._rows_ND.device).expand(len(self._state_BLS), -1)
        for level in range(start, height):
            kept = nodes.gather(1, self._logits(nodes, level).topk(beam, sorted=False).indices)
            nodes = torch.cat([2 * kept + 1, 2 * kept + 2], 1)
        return nodes.gather(1, self._logits(nodes, height).topk(m).indices)

    def _logits(self, nodes: Tensor, level: int) -> Tensor:
        logits: Tensor = self._head(self._state_BLS[:, level - self._first], self._rows_ND[nodes])
        return logits

    @torch.no_grad()
    def exhaustive(self, m: int) -> Tensor:
        """int64[B, m]: every leaf scored."""
        leaves, state = self._tree.level(self._tree.height), self._state_BLS[:, -1]
        parts = [
            self._head(state, self._rows_ND[start : min(start + (1 << 17), leaves.stop)].expand(len(state), -1, -1))
            for start in range(leaves.start, leaves.stop, 1 << 17)
        ]
        return torch.cat(parts, 1).topk(m).indices


# -- the table ------------------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], object], least: int = 20) -> float:
    """Median over ROUNDS of the time of one of `least` runs in a row."""
    for _ in range(3):
        run()
    times = []
    for _ in range(ROUNDS):
        _wait()
        begin = time.perf_counter()
        for _ in range(least):
            run()
        _wait()
        times.append((time.perf_counter() - begin) * 1e3 / least)
    return float(np.median(times))


def _wait() -> None:
    """For the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The same launches as one CUDA graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def ceilings() -> dict[str, float]:
    """What this card does at best: float16 products in TFLOP/s, copies in GB/s (read and written)."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    products = milliseconds(partial(torch.mm, a, a))
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    copies = milliseconds(partial(torch.empty_like(block).copy_, block))
    return {"tflops": round(2 * 8192**3 / products / 1e9, 1), "gb_per_s": round(2 * (1 << 30) / copies / 1e6, 1)}


def table(
    heights: list[int],
    beams: list[int],
    batches: list[int],
    engines: set[str],
    precision: Precision,
    tuning: Tuning | None = None,
    alone: bool = False,
) -> Iterator[Row]:
    """Rows of one run, as each is measured. alone: of `triton` without masks, nothing else."""
    for height in heights:
        bundle = model_of(height)
        tree, rng = bundle.tree, np.random.default_rng(1)
        grid = Grid(batches=tuple(sorted(batches)), wanted=(64, 256, 1024))
        with closing(TritonEngine(bundle, "cuda", precision, grid, tuning)) as engine:
            calls = {} if alone else {"triton-call": engine} | _peers(bundle, engines)
            masks = [] if alone or height > 22 else [node_mask(tree, rng.random(tree.item_count) < 0.5) for _ in range(2)]
            for beam, batch in itertools.product(beams, batches):
                m = min(M, beam)
                queries = QueryBatch(bundle.manifest.query, rng.integers(0, tree.item_count, (batch, sum(PAPER_WINDOWS))))
                for masked in (False, True) if masks else (False,):
                    mask_B = tuple(masks[b % 2] for b in range(batch)) if masked else None
                    params = SearchParams(np.full(batch, beam), np.full(batch, m), mask_B=mask_B)
                    engine.search(queries, params)  # fills the cell
                    cell, state_BLS = _cell(engine, batch, beam, m)
                    yield _row("triton", engine, beam, batch, milliseconds(captured(partial(cell.launch_search, state_BLS))), masked)
                    for name, caller in calls.items():
                        yield _row(name, engine, beam, batch, milliseconds(partial(caller.search, queries, params), 5), masked)
                search = TorchSearch(engine, tree, state_BLS.half(), tree.start_level(1 << (beam.bit_length() - 1)))
                if "torch" in engines:
                    loop = partial(search.search, beam, m)
                    yield _row("torch-eager", engine, beam, batch, milliseconds(loop, 5))
                    yield _row("torch-graph", engine, beam, batch, milliseconds(captured(loop)))
                if "exhaustive" in engines and batch <= 16 and beam == beams[0]:
                    yield _row("exhaustive", engine, tree.item_count, batch, milliseconds(partial(search.exhaustive, M), 3))
                del cell, search, state_BLS
        if "inner-product" in engines:
            yield from _inner_products(tree.item_count, batches)


def _cell(engine: TritonEngine, batch: int, beam: int, m: int) -> tuple[GraphCell, Tensor]:
    """The cell that a search has just filled, and the query states of its queries."""
    with engine.running():
        cell = engine.cell(batch, beam.bit_length() - 1, m)
        state_BLS = cell.launch_encoder().clone()
    torch.cuda.synchronize()
    return cell, state_BLS


def _row(name: str, engine: TritonEngine, beam: int, batch: int, ms: float, masked: bool = False) -> Row:
    tree = engine.bundle.tree
    scored = batch * sum(min(2 * beam, tree.level_size(level)) for level in range(tree.start_level(beam), tree.height + 1))
    if name == "exhaustive":
        scored = batch * tree.item_count
    products = 2 * sum(a * b for a, b in itertools.pairwise((NODE_DIM, *HIDDEN, 1)))
    row = {"engine": name, "items": tree.item_count, "beam_size": beam, "batch": batch, "masked": masked, "ms": round(ms, 4)}
    row |= {"queries_per_s": round(batch / ms * 1e3)}
    if masked:  # what a mask closes is neither read nor scored
        return row
    width = 4 if name == "onnx-cuda-call" else engine.node_rows_ND.itemsize if name.startswith("triton") else 2
    return row | {"tflops": round(products * scored / ms / 1e9, 1), "gb_per_s": round(scored * NODE_DIM * width / ms / 1e6, 1)}


def _inner_products(items: int, batches: list[int]) -> Iterator[Row]:
    """Brute force over `items` vectors of VECTOR numbers in float16."""
    table_IF = torch.randn(items, VECTOR, device="cuda", dtype=torch.float16)
    for batch in batches:
        if batch * items * 2 > LARGEST:
            print(f"inner-product is left out at {items} items and {batch} queries: {batch * items * 2 / 1e9:.0f} GB of scores", flush=True)
            continue
        vectors_BF = torch.randn(batch, VECTOR, device="cuda", dtype=torch.float16)
        ms = milliseconds(partial(_best_products, vectors_BF, table_IF), 3)
        row = {"engine": "inner-product", "items": items, "beam_size": None, "batch": batch, "masked": False, "ms": round(ms, 4)}
        yield row | {"queries_per_s": round(batch / ms * 1e3)}


def _best_products(vectors_BF: Tensor, table_IF: Tensor) -> Tensor:
    best: Tensor = (vectors_BF @ table_IF.T).topk(M).indices
    return best


def _peers(bundle: Bundle, engines: set[str]) -> dict[str, Any]:
    if "onnx-cuda" not in engines:
        return {}
    from espalier.engines import onnx_graph

    if not onnx_graph.cuda_available():
        print("onnx-cuda is left out: ONNX Runtime here has no CUDA", flush=True)
        return {}
    whole = SimpleNamespace(**{**vars(bundle), "node_rows_ND": bundle.node_rows_ND[0 : bundle.tree.node_count]})
    return {"onnx-cuda-call": onnx_graph.OnnxEngine(cast(Bundle, whole), "cuda")}


def tune(precision: Precision) -> Iterator[Row]:
    """The table's triton rows under other sizes of tiles and passes, one changed at a time."""
    fields: dict[str, tuple[int, ...]] = {
        "tile": (16, 32), "tiles_per_program": (1, 2, 4, 8), "busy_tiles": (512, 8192), "bits": (1, 2, 4), "warps": (2, 4, 8),
        "select_warps": (4, 8, 16),
    }  # fmt: skip
    tried = [Tuning(), *(replace(Tuning(), **{name: value}) for name, values in fields.items() for value in values)]
    for tuning in dict.fromkeys(tried):
        for row in table([20], [50, 400], [1, 512], set(), precision, tuning, alone=True):
            yield row | {"tuning": {name: getattr(tuning, name) for name in fields}}


def growth(precision: Precision) -> Iterator[Row]:
    yield from table(list(range(16, 27, 2)), [200], [1, 512], set(), precision, alone=True)


def plot_growth(rows: list[Row], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for batch in sorted({row["batch"] for row in rows}):
        points = sorted((row["items"], row["ms"]) for row in rows if row["batch"] == batch)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{batch} queries" if batch > 1 else "one query")
    axes.set(xscale="log", xlabel="items", ylabel="ms", ylim=(0, None), title="beam 200, from query states")
    axes.legend()
    figure.savefig(path, bbox_inches="tight", dpi=150)


# -- correct on this card -------------------------------------------------------------------------------------------------


def check(device: Literal["cuda", "cpu"], cases: int, large: bool, cuda_graphs: bool = True, seed: int | None = None) -> list[str]:
    """What is wrong, a line each. large: also with trees and networks as large as in use; seed: of the cases, None for new ones."""
    from espalier.engines.reference import ReferenceEngine
    from tests.builders import make_bundle, random_masks, random_queries, random_tree

    wrong: list[str] = []
    seed = int(time.time()) if seed is None else seed
    shapes = [(2, 3), (2, 8), (3, 4), (4, 4), (8, 3), (32, 2), (2, 1)]
    grid = Grid(batches=(1, 4, 64), wanted=(64, 256), closed=16)
    for case in range(cases):
        rng = np.random.default_rng((seed, case))
        branching, height = shapes[rng.integers(len(shapes))]
        tree = random_tree(rng, height, branching, bool(rng.integers(2)), float(rng.choice([0.0, 0.2, 0.9])))
        kind: Any = rng.choice(["history", "vector"])
        gamma, own = float(rng.choice([0.0, 0.5, 1.0])), cast(Any, rng.choice(["logit", "log_activation"]))
        batch = int(rng.choice([1, 3, 40] if device == "cuda" else [1, 2]))
        exclude_BE = rng.integers(-1, tree.item_count, (batch, 40)) if rng.integers(2) else None
        mask_B = random_masks(rng, tree, batch, float(rng.choice([0.05, 0.5]))) if rng.integers(2) else None
        params = SearchParams(rng.integers(1, 65, batch), rng.integers(1, 150, batch), exclude_BE, mask_B=mask_B)
        name = f"case {seed}/{case}: {branching}^{height}, {kind}, γ {gamma}, {own}, batch {batch}"
        with tempfile.TemporaryDirectory() as folder:
            for integer in (True, False):
                bundle = make_bundle(Path(folder), rng, tree, kind, gamma, own, integer, name=f"m{int(integer)}")
                queries = random_queries(rng, bundle, batch, integer)
                engine, reference = TritonEngine(bundle, device, grid=grid, cuda_graphs=cuda_graphs), ReferenceEngine(bundle)
                got = engine.search(queries, replace(params, trace=not integer))
                if integer and own == "logit":
                    expected = reference.search(queries, params)
                    for field in ("item_rows_BM", "ranks_BM", "scores_BM", "count_B", "complete_B"):
                        if not np.array_equal(getattr(got, field), getattr(expected, field)):
                            wrong.append(f"{name}: {field} differs from the reference")
                if not integer:
                    wrong += [f"{name}: {line}" for line in replayed(reference, queries, params, got, engine.rounding)]
                for b in range(
                    min(batch, 3) if device == "cuda" else 0
                ):  # the interpreter multiplies with BLAS, whose rows depend on their place
                    alone = engine.search(queries.take(np.array([b])), params.take(np.array([b])))
                    if not np.array_equal(alone.ranks_BM[0], got.ranks_BM[b, : params.m_B[b]]):
                        wrong.append(f"{name}: query {b} gets another answer alone than in a batch")
                engine.close()
        print(f"{name}: {'ok' if not any(line.startswith(name) for line in wrong) else 'WRONG'}", flush=True)
    wrong += _trained(device, cuda_graphs)
    if large:
        wrong += _large()
    return wrong


def _trained(device: Literal["cuda", "cpu"], cuda_graphs: bool) -> Iterator[str]:
    """The graphs that training exports, by whole calls."""
    from espalier.engines.reference import ReferenceEngine
    from tests.builders import random_queries
    from tests.trained import trained_kind

    for kind, hidden in (("product", (32,)), ("mlp", HIDDEN)):
        rng = np.random.default_rng(1)
        with tempfile.TemporaryDirectory() as folder:
            bundle = trained_kind(Path(folder), kind, hidden, rng)
            queries, params = random_queries(rng, bundle, 3), SearchParams(np.array([1, 4, 9]), np.array([3, 20, 7]))
            expected = ReferenceEngine(bundle).search(queries, params)
            with closing(TritonEngine(bundle, device, cuda_graphs=cuda_graphs)) as engine:
                for time_ in ("first", "second"):
                    got = engine.search(queries, params)
                    if not np.array_equal(got.item_rows_BM, expected.item_rows_BM):
                        yield f"the {kind} scorer that training exports: the {time_} answer differs from the reference's"


def replayed(reference: Any, queries: QueryBatch, params: SearchParams, result: Any, rounding: float) -> Iterator[str]:
    """Kept nodes that are worse than dropped ones by more than the rounding, by the reference's scores."""
    tree = reference.bundle.tree
    for b in range(len(queries)):
        start = tree.start_level(1 << int(params.beam_size_B[b]).bit_length() - 1)  # above it, only queries of other buckets were searched
        kept = {level.level: level.nodes_BK[b][level.nodes_BK[b] >= 0] for level in result.trace if level.level >= start}
        for step in reference.steps(queries, params, b, follow=kept):
            if step.level not in kept:
                continue
            mine = np.isin(step.candidates_C, kept[step.level])
            size = int(params.beam_size_B[b] if step.level < tree.height else params.m_B[b])
            if mine.sum() != min(len(mine), size) or mine.sum() != len(kept[step.level]):
                yield f"query {b}, level {step.level}: {mine.sum()} of {len(mine)} candidates kept, expected {min(len(mine), size)}"
            elif mine.any() and not mine.all() and step.ranks_C[mine].min() < step.ranks_C[~mine].max() - rounding:
                yield f"query {b}, level {step.level}: a kept node is worse than a dropped one"


def _large() -> Iterator[str]:
    """A tree of 2^16 items whose beam holds them all finds the best of all; float16 beside float32."""
    bundle = model_of(16)
    rng = np.random.default_rng(1)
    queries = QueryBatch(bundle.manifest.query, rng.integers(0, 1 << 16, (64, sum(PAPER_WINDOWS))))
    found: dict[tuple[Precision, int], NDArray[np.int64]] = {}
    precisions: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
    for precision in precisions:
        with closing(TritonEngine(bundle, "cuda", precision)) as engine:
            for beam in (200, 1 << 16):
                found[precision, beam] = engine.search(queries, SearchParams.uniform(64, beam, M)).item_rows_BM
    exact = found["float32", 1 << 16]
    for (precision, beam), rows in found.items():
        overlap = np.mean([len(np.intersect1d(a, b)) / M for a, b in zip(rows, found["float32", beam], strict=True)])
        print(f"{precision}, beam {beam}: {overlap:.4f} of the answers of float32, recall of the best of all items "
              f"{np.mean([len(np.intersect1d(a, b)) / M for a, b in zip(rows, exact, strict=True)]):.4f}", flush=True)  # fmt: skip
        if overlap < {"float32": 1.0, "float16": 0.97, "bfloat16": 0.8}[precision]:
            yield f"{precision} at beam {beam} agrees with float32 on {overlap:.4f} of the items"
    with closing(TritonEngine(bundle, "cuda")) as engine, torch.no_grad():
        engine.search(queries, SearchParams.uniform(64, 1 << 16, M))
        _, state_BLS = _cell(engine, 64, 1 << 16, M)
        leaves = engine.node_rows_ND[bundle.tree.leaf_offset :].double().expand(64, -1, -1)
        scores = cast(MlpHead, _scorer().head).double().cuda()(state_BLS[:, -1].double(), leaves)
    best = bundle.tree.leaf_item[scores.topk(M).indices.cpu().numpy()]
    overlap = np.mean([len(np.intersect1d(a, b)) / M for a, b in zip(exact, best, strict=True)])
    print(f"float32 with all items in the beam: {overlap:.4f} of the best of all in float64", flush=True)
    if overlap < 0.999:
        yield f"float32 with all items in the beam finds {overlap:.4f} of the best of all, expected at least .999"


def sanitized(module: str) -> int:
    """The exit status of a benchmark's check under compute-sanitizer, on few cases."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise SystemExit("compute-sanitizer is not on the PATH")
    again = [tool, "--error-exitcode", "3", sys.executable, "-m", module, "--check", "--eager", "--cases", "4"]
    # torch's own store of memory would hide what is read beyond an array's end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(again, env=environment, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--sanitize", action="store_true", help="with --check: once more under compute-sanitizer")
    parser.add_argument("--eager", action="store_true", help="with --check: without CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="2^20 items, beams 50, 200 and 400, batches of 1 and 512")
    parser.add_argument("--heights", default="20,22,24")
    parser.add_argument("--beams", default="50,200,400,800")
    parser.add_argument("--batches", default="1,16,128,512,2048")
    parser.add_argument("--engines", default="onnx-cuda,torch,inner-product,exhaustive", help="what is measured beside triton")
    parser.add_argument("--precision", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--growth", type=Path, help="a plot of time over items instead of the table")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not (args.check and args.device == "cpu"):
        print("this benchmark needs an NVIDIA GPU, and torch finds none", file=sys.stderr)
        raise SystemExit(2)
    if args.check:
        wrong = check(args.device, args.cases, large=args.device == "cuda" and not args.eager, cuda_graphs=not args.eager)
        print("\n".join(wrong) or "all is well", flush=True)
        if args.sanitize and not wrong:
            raise SystemExit(sanitized("benchmarks.engine_gpu"))
        raise SystemExit(1 if wrong else 0)
    if args.growth:
        rows = growth(args.precision)
    elif args.tune:
        rows = tune(args.precision)
    elif args.quick:
        rows = table([20], [50, 200, 400], [1, 512], {"onnx-cuda", "torch", "inner-product"}, args.precision)
    else:
        heights, beams, batches = ([int(entry) for entry in text.split(",")] for text in (args.heights, args.beams, args.batches))
        rows = table(heights, beams, batches, set(args.engines.split(",")), args.precision)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{torch.cuda.get_device_name()}, {hardware()}",
        "torch": torch.__version__,
        "precision": args.precision,
        "ceilings": ceilings(),
        "rows": [],
    }
    print(f"{report['hardware']}; at best {report['ceilings']}", flush=True)
    for row in rows:
        report["rows"].append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.growth:
        plot_growth(report["rows"], args.growth)


if __name__ == "__main__":
    main()
