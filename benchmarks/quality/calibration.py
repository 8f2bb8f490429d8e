"""Whether a score is how often items of this score are relevant, on the held-out queries of a bundle.

    python -m benchmarks.calibration --model models/NAME/1 --json F

Searched with the bundle's default beam and m, the history's items excluded where its training says so. Nothing is chosen here.

Rows: {"from", "to", "items", "score", "hits"}: how many items came back with a score in [from, to), their mean score, and the share of them
that is relevant. `log_loss` is the mean over all items that came back, in nats.

Legend: B queries, M results, R items that came back.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report_file import write_report
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.search import SearchParams
from training.evaluate import held_out_pairs, labelled
from training.specification.deep import DeepConfig
from training.specification.models import config_of

EDGES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
BATCH = 64
LEAST = 1e-7
"""Scores are float32 and may be 0 or 1; a log loss takes them for so much more or less."""


def reliability(scores_R: NDArray[np.float32], hits_R: NDArray[np.bool_]) -> list[dict[str, float]]:
    """A row for each range of scores that some item has."""
    bin_R = np.clip(np.searchsorted(EDGES, scores_R, side="right") - 1, 0, len(EDGES) - 2)
    rows = []
    for n in np.unique(bin_R).tolist():
        mine = bin_R == n
        means = {"score": float(scores_R[mine].mean()), "hits": float(hits_R[mine].mean())}
        rows.append({"from": EDGES[n], "to": EDGES[n + 1], "items": int(mine.sum())} | means)
    return rows


def log_loss(scores_R: NDArray[np.float32], hits_R: NDArray[np.bool_]) -> float:
    """The mean of −log p of what happened, in nats."""
    p_R = np.clip(scores_R.astype(np.float64), LEAST, 1 - LEAST)
    return float(-np.log(np.where(hits_R, p_R, 1 - p_R)).mean())


def measured(bundle: Bundle) -> dict[str, Any]:
    """The report of one bundle."""
    config, search = config_of(bundle.manifest, DeepConfig), bundle.manifest.search
    queries = labelled(bundle.manifest.query, held_out_pairs(bundle), config.search.exclude_seen)
    engine = open_engine(bundle, "cpu")
    results = []
    for begin in range(0, len(queries), BATCH):
        part = np.arange(begin, min(begin + BATCH, len(queries)))
        params = SearchParams.uniform(len(queries), search.beam_size, search.m, queries.exclude_BE).take(part)
        results.append(engine.search(queries.queries.take(part), params))
    rows_BM, scores_BM = (np.concatenate([getattr(result, name) for result in results]) for name in ("item_rows_BM", "scores_BM"))
    found_BM = rows_BM >= 0
    scores_R = scores_BM[found_BM]
    hits_R = np.stack([np.isin(rows, wanted) for rows, wanted in zip(rows_BM, queries.relevant, strict=True)])[found_BM]
    about = {"queries": len(queries), "items": len(hits_R), "log_loss": log_loss(scores_R, hits_R)}
    return about | {"rows": reliability(scores_R, hits_R)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a bundle of histories: models/NAME/VERSION")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    bundle = Bundle.open(options.model)
    found = measured(bundle)
    for row in found["rows"]:
        print("{from:5g} – {to:<5g} {items:7,} items   score {score:.3f}   relevant {hits:.3f}".format(**row))
    print(f"log loss: {found['log_loss']:.4f}")
    write_report(options.json, {"model": f"{bundle.manifest.name}/{bundle.manifest.version}"} | found)


if __name__ == "__main__":
    main()
