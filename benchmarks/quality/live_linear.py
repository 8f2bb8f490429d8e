"""Labels put into a running model of linear scorers, beside `python -m training place` and training with them.

    python -m benchmarks.live_linear --train FILE --test FILE --events 5 --json F

The files are those of the Extreme Classification Repository. A tenth of the labels that enough training points have is hidden: no training
point has them. Then they are put in by a few of their points: live, as a service does it, and by `place`, with the normalised sum of the
same points as their features. Test points are those that a hidden label is right for; those labels alone are right. No model
has a stacking, which `place` would drop.

Rows: {"how", "m", "recall_new", "recall_old"}; `items_per_s` is by the processor time of
`place` and `apply` of a live catalogue, one thread.
"""

from __future__ import annotations

import argparse
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
from numpy.typing import NDArray
from scipy.sparse import csr_array, save_npz

from benchmarks.quality.leaderboard import main_of
from espalier.bundle import Bundle
from espalier.engines import open_engine, open_live_engine
from espalier.errors import EspalierError, InvalidConfig
from espalier.hardware import hardware
from espalier.live.fold import write_fold
from espalier.live.operations import ItemBody
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.metrics import precision_recall_f
from espalier.placement.placer import Placer
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, SearchParams
from training.data.csr import as_rows, normalised
from training.data.xmc import LabelledPoints, read_xmc
from training.linear.placing import place
from training.linear.run import fit_and_export
from training.specification.linear import LinearConfig, NpzData
from training.specification.stacking import StackingOptions

Int64 = NDArray[np.int64]
Row = dict[str, Any]
MS = (5, 10, 50)
BEAM = 50


def hidden_labels(train: LabelledPoints, share: float, events: int, seed: int) -> Int64:
    """Label numbers, ascending."""
    able = np.flatnonzero(np.asarray((train.labels > 0).sum(0)).ravel() >= events)
    if not len(able):
        raise InvalidConfig("--events", events, "few enough for some label to have as many points")
    return np.sort(np.random.default_rng([seed, 7]).permutation(able)[: max(1, int(share * len(able)))])


def trained(train: LabelledPoints, labels: Int64, test: LabelledPoints, folder: Path, name: str) -> Bundle:
    """A model of some labels, whose ids are their numbers."""
    folder.mkdir(parents=True)
    for part, points in (("train", train), ("test", test)):
        some = points.labels[:, labels]
        kept = np.flatnonzero(np.diff(some.tocsr().indptr) > 0)
        save_npz(folder / f"{part}.npz", csr_array(points.points[kept]))
        save_npz(folder / f"{part}-labels.npz", csr_array(some[kept]))
    pq.write_table(pa.table({"id": [str(label) for label in labels.tolist()]}), folder / "items.parquet")
    data = NpzData(
        format="npz",
        train=folder / "train.npz",
        train_labels=folder / "train-labels.npz",
        test=folder / "test.npz",
        test_labels=folder / "test-labels.npz",
        items=folder / "items.parquet",
    )
    (folder / "work").mkdir()
    return fit_and_export(
        LinearConfig(name=name, data=data, stacking=StackingOptions(model="none")), folder / name / "1", folder / "work", threads=1
    )


def found_by(bundle: Bundle, test: LabelledPoints, labels: int) -> Int64:
    """int64[B, M] label numbers."""
    engine = open_engine(bundle, "cpu")
    queries = QueryBatch(bundle.manifest.query, as_rows(normalised(csr_array(test.points))))
    rows_BM = engine.search(queries, SearchParams.uniform(len(queries), BEAM, max(MS))).item_rows_BM
    number = np.array(bundle.items.ids_of(np.arange(len(bundle.items))), np.int64)
    return np.where(rows_BM >= 0, number[np.maximum(rows_BM, 0)], NO_ITEM)


def put_live(bundle: Bundle, points: Sequence[tuple[int, csr_array[Any, Any]]], out: Path) -> tuple[Bundle, float]:
    """The bundle with live labels in it, by some points of each, and how many were placed in a second of processor time."""
    engine, state, placer = open_live_engine(bundle, "cpu"), LiveState(bundle), Placer(bundle)
    bodies = [ItemBody(events=tuple(_event(own[[b]]) for b in range(own.shape[0]))) for _, own in points]
    placer.place(bodies[:1], state.table, None, engine.search)
    begin = time.process_time()
    placed = placer.place(bodies, state.table, None, engine.search)
    for number, ((label, _), found) in enumerate(zip(points, placed, strict=True), 1):
        if isinstance(found, EspalierError):
            raise found
        leaves = []
        for tree, parents in enumerate(found):
            parent, row = next((parent, row) for parent, row in parents if state.has_room(tree, parent))
            leaves.append(Placement(tree, parent, state.next_slot(tree, parent), row))
        state.apply([Change(number, str(label), "put", None, tuple(leaves))])
    per_s = len(points) / (time.process_time() - begin)
    return write_fold(out, bundle, state.overlay(), state.table), per_s


def _event(point: csr_array[Any, Any]) -> dict[str, list[Any]]:
    return {"indices": point.indices.tolist(), "values": point.data.astype(np.float64).tolist()}


def put_offline(bundle: Bundle, points: Sequence[tuple[int, csr_array[Any, Any]]], folder: Path) -> Bundle:
    """The same by `place`."""
    features = []
    for _, own in points:
        total = csr_array(normalised(own).sum(0).reshape(1, -1))
        features.append({"indices": total.indices.tolist(), "values": total.data.astype(np.float64).tolist()})
    kind = pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float64())})
    pq.write_table(pa.table({"id": [str(label) for label, _ in points], "features": pa.array(features, kind)}), folder / "new.parquet")
    return place(bundle.path, folder / "new.parquet", (), folder / "placed" / "2")


def benchmark(options: argparse.Namespace) -> None:
    train, test = read_xmc(options.train), read_xmc(options.test)
    labels = train.labels.shape[1]
    hidden = hidden_labels(train, options.share, options.events, options.seed)
    old = np.setdiff1d(np.arange(labels), hidden)
    rng, by_label = np.random.default_rng([options.seed, 8]), csr_array(train.labels).T.tocsr()
    points = []
    for label in hidden.tolist():
        own = by_label.indices[by_label.indptr[label] : by_label.indptr[label + 1]]
        points.append((label, csr_array(train.points[np.sort(rng.choice(own, options.events, replace=False))])))
    right = csr_array(test.labels)
    wanted = [right.indices[right.indptr[b] : right.indptr[b + 1]].astype(np.int64) for b in range(right.shape[0])]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = trained(train, old, test, folder / "old", "old")
        live, per_s = put_live(before, points, folder / "live" / "2")
        models = {
            "before": before,
            "live": live,
            "place": put_offline(before, points, folder),
            "retrained": trained(train, np.arange(labels), test, folder / "whole", "whole"),
        }
        for how, bundle in models.items():
            found_BM = found_by(bundle, test, labels)
            for m in MS:
                row: Row = {"how": how, "m": m}
                for group, some in (("new", hidden), ("old", old)):
                    relevant = [own[np.isin(own, some)] for own in wanted]
                    kept = np.flatnonzero([len(own) > 0 for own in relevant])
                    row[f"recall_{group}"] = float(precision_recall_f(found_BM[kept], [relevant[b] for b in kept.tolist()], m)[1].mean())
                rows.append(row)
                print(row, flush=True)
    report = {
        "set": options.train.name,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "labels": labels,
        "hidden": len(hidden),
        "events": options.events,
        "items_per_s": round(per_s),
        "rows": rows,
    }
    print(f"{per_s:.0f} labels a second", flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--events", type=int, default=5, help="points of each hidden label")
    parser.add_argument("--share", type=float, default=0.1, help="of the labels that may be hidden")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report here")
    main_of(benchmark, parser)


if __name__ == "__main__":
    main()
