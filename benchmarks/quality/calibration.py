"""Whether a score is how often items of this score are relevant, on the held-out queries of a bundle.

    python -m benchmarks.calibration --model models/NAME/1 --json F

Searched with the bundle's default beam and m, the history's items excluded where its training says so. `bundle` are its own scores.
`logistic` and `piecewise` (training.deep.calibration) are fitted on four fifths of the same queries each and measured on the other: for a
comparison of the two, whatever the bundle has. Nothing is chosen here.

Rows: {"calibration", "from", "to", "items", "score", "hits"}: how many items came back with a score in [from, to), their mean score, and
the share of them that is relevant. `log_loss` is the mean over all items that came back, in nats.

Legend: B queries, M results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.hardware import hardware
from espalier.manifest import Ranking
from espalier.scores import scores_of_ranks
from espalier.search import SearchParams
from training.deep.calibration import calibrate
from training.evaluate import held_out_pairs, labelled
from training.specification.deep import DeepConfig
from training.specification.models import config_of

EDGES = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
FOLDS = 5
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


def crossed(
    ranking: Ranking, rows_BM: NDArray[np.int64], keys_BM: NDArray[np.float32], relevant: Sequence[NDArray[np.int64]], heavy_tailed: bool
) -> NDArray[np.float32]:
    """float32[B, M]: the scores of each fold of the queries by a calibration that the others gave."""
    fold_B, scores_BM = np.arange(len(rows_BM)) % FOLDS, np.zeros(rows_BM.shape, np.float32)
    for fold in range(FOLDS):
        fitted = np.flatnonzero(fold_B != fold)
        calibration = calibrate(rows_BM[fitted], keys_BM[fitted], [relevant[b] for b in fitted.tolist()], heavy_tailed)
        scores_BM[fold_B == fold] = scores_of_ranks(ranking.model_copy(update={"calibration": calibration}), keys_BM[fold_B == fold])
    return scores_BM


def measured(bundle: Bundle) -> dict[str, Any]:
    """The report of one bundle: `log_loss` by calibration, and the rows."""
    config, search, ranking = config_of(bundle.manifest, DeepConfig), bundle.manifest.search, bundle.manifest.ranking
    queries = labelled(bundle.manifest.query, held_out_pairs(bundle), config.search.exclude_seen)
    engine = open_engine(bundle, "cpu")
    results = []
    for begin in range(0, len(queries), BATCH):
        part = np.arange(begin, min(begin + BATCH, len(queries)))
        params = SearchParams.uniform(len(queries), search.beam_size, search.m, queries.exclude_BE).take(part)
        results.append(engine.search(queries.queries.take(part), params))
    rows_BM, keys_BM, own_BM = (
        np.concatenate([getattr(result, name) for result in results]) for name in ("item_rows_BM", "keys_BM", "scores_BM")
    )
    scores = {"bundle": own_BM} | {
        name: crossed(ranking, rows_BM, keys_BM, queries.relevant, heavy_tailed)
        for name, heavy_tailed in (("logistic", False), ("piecewise", True))
    }
    found_BM = rows_BM >= 0
    hits_R = np.stack([np.isin(rows, wanted) for rows, wanted in zip(rows_BM, queries.relevant, strict=True)])[found_BM]
    return {
        "queries": len(queries),
        "items": len(hits_R),
        "log_loss": {name: log_loss(scores_BM[found_BM], hits_R) for name, scores_BM in scores.items()},
        "rows": [
            {"calibration": name} | row for name, scores_BM in scores.items() for row in reliability(scores_BM[found_BM], hits_R)
        ],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a bundle of histories: models/NAME/VERSION")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args(arguments)
    bundle = Bundle.open(options.model)
    found = measured(bundle)
    about = {"model": f"{bundle.manifest.name}/{bundle.manifest.version}", "date": datetime.now(UTC).isoformat(timespec="seconds")}
    report = about | {"hardware": hardware()} | found
    for row in found["rows"]:
        print("{calibration:10} {from:5g} – {to:<5g} {items:7,} items   score {score:.3f}   relevant {hits:.3f}".format(**row))
    print("log loss: " + ", ".join(f"{name} {loss:.4f}" for name, loss in found["log_loss"].items()))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
