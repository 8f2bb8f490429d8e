"""Search for items by text: XR-Linear beside BM25, centroids, neighbours, DSSM and one-versus-all, on the same training pairs.

    python -m benchmarks.text_search --data DIR --set debian-describe|debian-depends|psearch [--systems a,b,…] --json F
    python -m benchmarks.text_search --data DIR --set NAME --sweep beam|threshold --json F

The protocol is that of Chang et al. 2021 (papers' product search), Tables 2 to 4 and Figure 4, on sets that are at hand (text_sets). What a
row says: text_report. XR-Linear is trained, exported and searched by the product's code (text_linear). BM25 wants `pip install bm25s`; a
system that cannot run is named and left out.

--sweep searches one model with several beams, or trains with several thresholds. Rows are printed as they come and kept in the file, whose
rows are not made again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.papers.product_search.dssm import EF_SEARCH, dssm
from benchmarks.papers.product_search.text_baselines import bm25, centroid, neighbours
from benchmarks.papers.product_search.text_linear import BEAMS, PUBLISHED, TEXTS, Recipe, one_versus_all, xr_linear
from benchmarks.papers.product_search.text_report import Report, Trained, row_of
from benchmarks.papers.product_search.text_sets import SETS, Fold, Task, fold_of, pairs_of, read_set
from benchmarks.papers.product_search.text_sweeps import sweep_beam, sweep_threshold
from benchmarks.report_file import command_line
from espalier.errors import EspalierError
from training.specification.linear import LinearTree


@dataclass(frozen=True)
class Job:
    """A system with the configurations that one training gives, in this order."""

    system: str
    configs: tuple[str, ...]
    train: Callable[[Task, Fold, Path], list[Trained]]


def jobs_of(dssm_cpu_s: float = 240) -> list[Job]:
    def beams(config_name: str) -> tuple[str, ...]:
        return tuple(f"{config_name}, beam {beam}" for beam in BEAMS)

    compared_texts = (TEXTS[0], TEXTS[3])
    jobs = [Job("centroid", (texts,), partial(centroid, texts)) for texts in compared_texts]
    jobs += [Job("neighbours", (texts,), partial(neighbours, texts)) for texts in compared_texts]
    jobs.append(Job("bm25", ("k1 1.5, b 0.75",), bm25))
    jobs += [Job("xr-linear", beams(texts), partial(xr_linear, Recipe(texts), BEAMS, texts)) for texts in TEXTS]
    published = f"{TEXTS[3]}, prior 0"
    jobs.append(Job("xr-linear", beams(published), partial(xr_linear, Recipe(options=PUBLISHED), BEAMS, published)))
    jobs.append(Job("dssm", ("exact", *(f"HNSW, efSearch {effort}" for effort in EF_SEARCH)), partial(dssm, dssm_cpu_s)))
    jobs += [Job("one-versus-all", (texts,), partial(one_versus_all, texts)) for texts in compared_texts]
    return jobs


def run(task: Task, jobs: Sequence[Job], report: Report, work: Path) -> None:
    """Make the rows that the report lacks."""
    for number, job in enumerate(jobs):
        if all(report.has("rows", system=job.system, config=config) for config in job.configs):
            continue
        print(f"[{number + 1} / {len(jobs)}] {job.system}: {job.configs[0]}", flush=True)
        by_fold = []
        try:
            for fold in task.folds:
                with tempfile.TemporaryDirectory(dir=work) as folder:  # a bundle that is open outlives its folder
                    by_fold.append(job.train(task, fold, Path(folder)))
        except EspalierError as error:
            print(f"{job.system} ({job.configs[0]}) is left out: {error}", flush=True)
            continue
        for trained in zip(*by_fold, strict=True):
            if not report.has("rows", system=job.system, config=trained[0].config):
                report.add("rows", row_of(list(zip(trained, task.folds, strict=True)), job.system))
        for fold_systems in by_fold:
            fold_systems[0].close()


def warm_up(work: Path) -> None:
    """Compile, or load what an earlier run has compiled, outside of what is timed."""
    texts = [f"{colour} {thing}" for colour in ("red", "green", "blue", "black") for thing in ("lamp", "chair", "table")]
    fold = fold_of(pairs_of([(text, row) for row, text in enumerate(texts)]), texts, [np.array([row]) for row in range(len(texts))])
    with tempfile.TemporaryDirectory(dir=work) as folder:
        small = Recipe("words", tree=LinearTree(branching=2, max_leaf=2))
        for trained in xr_linear(small, [1, 2], "any", Task("any", texts, [fold]), fold, Path(folder)):
            trained.find("red lamp")
        trained.close()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="the folder that holds the sets")
    parser.add_argument("--set", choices=SETS)
    parser.add_argument("--systems", help="some of xr-linear, bm25, centroid, neighbours, dssm, one-versus-all; all by default")
    parser.add_argument("--sweep", choices=("beam", "threshold"))
    parser.add_argument("--dssm-cpu-s", type=float, default=240, help="CPU seconds that DSSM may train, of each fold")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where models lie meanwhile")
    args = parser.parse_args()
    if args.data is None or args.set is None:
        parser.error("--data and --set are needed: the folder that holds the sets, and which")
    jobs = jobs_of(args.dssm_cpu_s)
    wanted_systems = args.systems.split(",") if args.systems else [job.system for job in jobs]
    known_systems = {"xr-linear", "bm25", "centroid", "neighbours", "dssm", "one-versus-all"}
    if unknown := set(wanted_systems) - known_systems:
        parser.error(f"--systems: got {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(known_systems))}")
    try:
        task = read_set(args.data, args.set)
        report = Report(args.json, task)
        warm_up(args.work)
        if args.sweep == "beam":
            sweep_beam(task, report, args.work, Recipe())
        elif args.sweep == "threshold":
            sweep_threshold(task, report, args.work, Recipe())
        else:
            run(task, [job for job in jobs if job.system in wanted_systems], report, args.work)
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
