"""MB, recall and ms/query of a bundle with its node rows stored in each precision, in one run.

    python -m benchmarks.row_precision --model DIR [--model DIR …] --json F [--beam 400] [--m 10,50]

The queries are the bundle's held-out ones, seen items excluded, one at a time on one thread. A bundle whose rows are narrower already is
not widened: fit with `scorer.dtype = "float32"` to compare all three. γ, calibration and memory stay those of the bundle.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.report_file import command_line, print_row, write_report
from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.engines import open_engine
from espalier.live.fold import content_of
from espalier.manifest import ManifestDraft
from espalier.node_rows import stored_as
from training import evaluate

DTYPES = ("float32", "float16", "int8")
"""Widest first."""


def measure(bundle: Bundle, folder: Path, beam: int, ms: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each precision that is no wider than the bundle's own."""
    content = content_of(bundle)
    if not isinstance(content, GraphContent):
        raise SystemExit(f"--model: {bundle.path} has linear scorers, expected node rows")
    rows_ND = np.asarray(bundle.node_rows_ND, np.float32)
    fields = {name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields}
    pairs, rows = evaluate.held_out_pairs(bundle), []
    for version, dtype in enumerate(DTYPES[DTYPES.index(bundle.graph_scorer.dtype) :], 1):
        path = folder / bundle.manifest.name / str(version)
        draft = ManifestDraft(**fields | {"version": version})
        written = write_bundle(path, draft, GraphContent(**{**vars(content), "stored_rows": stored_as(rows_ND, dtype)}))
        files = {name: info.size / 1e6 for name, info in written.manifest.files.items()}
        engine = open_engine(written, "cpu")
        figures = evaluate.measure(written, engine, evaluate.labelled(bundle.manifest.query, pairs, exclude_seen=True), [beam], ms)
        row = {
            "model": bundle.manifest.name,
            "items": bundle.tree.item_count,
            "node_dim": bundle.graph_scorer.node_dim,
            "rows": dtype,
            "rows_mb": round(files["nodes.safetensors"], 2),
            "memory_mb": round(files.get("memory.safetensors", 0.0), 2),
            "mb": round(sum(files.values()), 2),
            "queries": len(pairs),
            "ms": round(figures[-1]["ms_per_query"], 3),
            **{f"recall@{figure['m']}": round(figure["recall"], 4) for figure in figures},
        }
        print_row(row)
        rows.append(row)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, action="append", required=True, help="folder of a version; may be repeated")
    parser.add_argument("--beam", type=int, default=400)
    parser.add_argument("--m", default="10,50")
    args = parser.parse_args()
    ms = [int(m) for m in args.m.split(",")]
    with threadpool_limits(1), tempfile.TemporaryDirectory() as folder:
        rows = [row for model in args.model for row in measure(Bundle.open(model), Path(folder), args.beam, ms)]
    write_report(args.json, {"options": {"beam": args.beam}, "rows": rows}, "one thread used")


if __name__ == "__main__":
    main()
