"""Items that nothing was learned from: whether a tree with content in its rows finds them, beside one without and neighbours by content.

    python -m benchmarks.unseen --set debian-depends --json F
    python -m benchmarks.unseen --set ml-1m --data DIR --json F

The events of a share of the items are left out of the training users' lists (`data.split.unseen_items`); the items stay in the catalogue.
A test query is a test user for whom such an item is relevant, and these items alone are relevant. Each method ranks all items, and then the
unseen items alone (a filter). All methods learn from and choose by the same lists; a test user's history may hold unseen items.

`content` is training.baselines.content; `recipe` the set's configuration without content, `recipe+content` with it.
Rows: {"method", "seed", "beam_size", "among", "m", "recall", "recall_se", "queries"}. `fits` has what each method chose, its recall@m of
validation users (all relevant items), and of the test users. `differences` are paired by query, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from benchmarks import real_logs
from benchmarks.quality.leaderboard import main_of, without_folders
from espalier.errors import InvalidConfig
from espalier.hardware import hardware
from espalier.masks.eligibility import node_mask
from espalier.search import NO_ITEM
from training.baselines.content import content
from training.compare.recipe import Recipe, fit_recipe
from training.data.splits import EvaluationPair, without_seen
from training.deep.prepare import Prepared, prepare
from training.retrieval.task import Metric, Rank, Task
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

Row = dict[str, Any]
Int64 = NDArray[np.int64]
METHODS = ("content", "recipe", "recipe+content")
MS = (10, 50, 200)
BEAMS = (200, 800)
BATCH = 64


def movies(folder: Path, out: Path) -> Path:
    """The item table of MovieLens 1M as Parquet: title, with the year, and genres."""
    file = folder / "movies.dat.gz"
    if not file.is_file():
        raise InvalidConfig("--data", str(folder), "a folder that holds ml-1m/movies.dat.gz")
    with gzip.open(file, "rt", encoding="latin-1") as lines:
        rows = [line.rstrip("\n").split("::") for line in lines]
    table = {"id": [row[0] for row in rows], "title": [row[1] for row in rows], "genres": [row[2].split("|") for row in rows]}
    pq.write_table(pa.table(table), out)
    return out


def protocol(config: DeepConfig, share: float, columns: str | Sequence[str], steps: int | None, items: Path | None) -> DeepConfig:
    """A set's configuration with a share of unseen items, content and at most so many steps."""
    raw = config.model_dump(mode="json")
    raw["data"]["split"]["unseen_items"] = share
    raw["data"]["items"] = raw["data"]["items"] if items is None else str(items)
    raw["content"]["columns"] = columns
    raw["optimiser"]["steps"] = min(raw["optimiser"]["steps"], steps or raw["optimiser"]["steps"])
    return deep_config(raw)


def of_unseen(prepared: Prepared, exclude_seen: bool) -> list[EvaluationPair]:
    """The test queries with a relevant item that no training user touched, and these alone as relevant."""
    seen_I = prepared.seen_I
    pairs = (EvaluationPair(pair.user, pair.history, pair.relevant[~seen_I[pair.relevant]]) for pair in prepared.split.test)
    return [pair for pair in (without_seen(pairs) if exclude_seen else pairs) if len(pair.relevant)]


def among(rank: Rank, eligible_I: NDArray[np.bool_]) -> Rank:
    """A method's ranking of all items without those that are not eligible."""

    def ranked(histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        found_BM = np.full((len(histories), m), NO_ITEM, np.int64)
        for start in range(0, len(histories), BATCH):
            whole_BI = rank(histories[start : start + BATCH], len(eligible_I), exclude_seen)
            for row_M, row_I in zip(found_BM[start:], whole_BI, strict=False):
                kept = row_I[row_I >= 0]
                kept = kept[eligible_I[kept]][:m]
                row_M[: len(kept)] = kept
        return found_BM

    return ranked


def ranks_of(method: str, prepared: Prepared, config: DeepConfig, folder: Path) -> tuple[dict[tuple[int | None, str], Rank], Row]:
    """How a method answers, by beam and by what is ranked, and how it was fitted."""
    begin, unseen_I = time.perf_counter(), ~prepared.seen_I
    if method == "content":
        metric, exclude_seen = Metric("recall", config.search.m), config.search.exclude_seen
        task = Task(prepared.split, prepared.items, metric, exclude_seen, config.windowed_instances, config.seed)
        fitted = content(task)
        figure = max(trial.figure for trial in fitted.trials)
        about = {"options": fitted.options, "validation": figure}
        return {(None, "all"): fitted.rank, (None, "unseen"): among(fitted.rank, unseen_I)}, about | {"seconds": fitted.seconds}
    recipe: Recipe = fit_recipe(config, prepared, folder, torch.device("cpu"))
    mask = node_mask(recipe.bundle.tree, unseen_I)
    figure = max(trial.figure for trial in recipe.trials)
    ranks: dict[tuple[int | None, str], Rank] = {
        (beam, name): recipe.at(beam, of).rank for beam in BEAMS for name, of in (("all", None), ("unseen", mask))
    }
    return ranks, {"options": recipe.options, "validation": figure, "seconds": time.perf_counter() - begin}


def run_seed(config: DeepConfig, log: Path, methods: Sequence[str], folder: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows, fits and differences of one seed."""
    rows: list[Row] = []
    fits: list[Row] = []
    recalls: dict[tuple[str, int | None, str, int], NDArray[np.float64]] = {}
    exclude_seen = config.search.exclude_seen
    for method in methods:
        nothing = config.content.model_copy(update={"columns": ()})
        own = config if method == "recipe+content" else config.model_copy(update={"content": nothing})
        prepared = prepare(own, log, folder / method / "log")
        pairs, test = of_unseen(prepared, exclude_seen), list(prepared.split.test)
        ranks, about = ranks_of(method, prepared, own, folder / method)
        everything = Metric("recall", config.search.m)
        test = without_seen(test) if exclude_seen else test
        for (beam, name), rank in ranks.items():
            found_BM = rank([pair.history for pair in pairs], max(MS), exclude_seen)
            for m in MS:
                recall_B = recalls[method, beam, name, m] = Metric("recall", m).of(found_BM, pairs)
                error = float(recall_B.std(ddof=1) / np.sqrt(len(recall_B)))
                place = {"method": method, "seed": config.seed, "beam_size": beam, "among": name, "m": m}
                rows.append(place | {"recall": float(recall_B.mean()), "recall_se": error, "queries": len(pairs)})
                print(f"{method:15s} {beam or '-':>4} {name:6s} recall@{m:<3d} {recall_B.mean():.4f} ± {error:.4f}", flush=True)
        answers = next(iter(ranks.values()))([pair.history for pair in test], config.search.m, exclude_seen)
        about |= {"method": method, "seed": config.seed, "test": float(everything.of(answers, test).mean()), "test_queries": len(test)}
        fits.append(about | {"unseen_items": int((~prepared.seen_I).sum()), "items": len(prepared.seen_I)})
        print(fits[-1], flush=True)
    return rows, fits, list(differences(recalls))


def differences(recalls: dict[tuple[str, int | None, str, int], NDArray[np.float64]]) -> list[Row]:
    """Of recipe+content less the others, paired by query."""
    found = []
    for (method, beam, name, m), first_B in recalls.items():
        for (other, other_beam, other_name, other_m), second_B in recalls.items():
            if method == "recipe+content" != other and (name, m) == (other_name, other_m) and other_beam in (beam, None):
                each_B = first_B - second_B
                mean, half = float(each_B.mean()), 1.96 * float(each_B.std(ddof=1)) / float(np.sqrt(len(each_B)))
                place = {"beam_size": beam, "among": name, "m": m, "second": other}
                found.append(place | {"mean": mean, "low": mean - half, "high": mean + half, "queries": len(each_B)})
    return found


def benchmark(options: argparse.Namespace) -> None:
    real, methods = real_logs.load(options), options.methods.split(",")
    if not set(methods) <= set(METHODS):
        raise InvalidConfig("--methods", options.methods, f"some of {', '.join(METHODS)}")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        items = movies(real.log.parent, Path(folder) / "movies.parquet") if real.name == "ml-1m" else None
        config = protocol(real.config, options.share, "auto", options.steps, items)
        report = {
            "set": real.name,
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": hardware(),
            "threads": options.threads,
            "config": without_folders(config.model_copy(update={"data": config.data.model_copy(update={"items": None})})),
        }
        parts: tuple[list[Row], list[Row], list[Row]] = ([], [], [])
        for seed in range(1, options.seeds + 1):
            found = run_seed(config.model_copy(update={"seed": seed}), real.log, methods, Path(folder) / str(seed))
            for part, new in zip(parts, found, strict=True):
                part.extend(new)
    for row in parts[2]:
        print("recipe+content − {second}, {among}, beam {beam_size}, recall@{m}: {mean:+.4f} ({low:+.4f} to {high:+.4f})".format(**row))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        whole = report | dict(zip(("rows", "fits", "differences"), parts, strict=True))
        options.json.write_text(json.dumps(whole, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real_logs.add_arguments(parser)
    parser.add_argument("--methods", default=",".join(METHODS), help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--share", type=float, default=0.1, help="of the items that nothing is learned from")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1 … N")
    parser.add_argument("--steps", type=int, help="at most so many training steps, for a quick look")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the report here")
    main_of(benchmark, parser)


if __name__ == "__main__":
    main()
