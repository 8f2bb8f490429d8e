"""The benchmark of sharded recall: it merges as the reference does, and fails where shards lose recall."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.quality import shard_recall
from espalier.bundle import Bundle
from espalier.bundle_writer import with_parts
from tests.training.shard.test_shard import made


def with_heldout(folder: Path, kind: str) -> Bundle:
    """A bundle with held-out queries for which random items are relevant."""
    rng, bundle = np.random.default_rng(0), made(folder, kind)
    ids = [bundle.items.ids_of(rng.integers(0, bundle.tree.item_count, 3)) for _ in range(6)]
    heldout = pa.table({bundle.manifest.query.kind: bundle.golden().column(bundle.manifest.query.kind), "relevant": ids})
    return with_parts(bundle, folder / "heldout" / "1", {}, {"heldout.parquet": heldout})


def test_it_reports_recall_by_shards_and_beams_and_passes_where_nothing_is_lost(tmp_path: Path) -> None:
    bundle = with_heldout(tmp_path, "product memory")
    arguments = ["--model", str(bundle.path), "--shards", "1,2", "--beam", "2,64", "--m", "3", "--json", str(tmp_path / "report.json")]
    code = shard_recall.main(arguments)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(row["shards"], row["beam_size"], row["m"]) for row in report["rows"]] == [(1, 2, 3), (1, 64, 3), (2, 2, 3), (2, 64, 3)]
    assert [row["same"] for row in report["rows"] if row["shards"] == 1 or row["beam_size"] == 64] == [1, 1, 1]
    assert code == (min(row["difference"] for row in report["rows"]) < -shard_recall.LOST)
    assert report["passed"] is (code == 0)
    assert report["queries"] == 6
    assert [row["standard_error"] for row in report["rows"] if row["same"] == 1] == [0] * sum(row["same"] == 1 for row in report["rows"])


def test_it_fails_where_the_only_shard_gives_other_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = with_heldout(tmp_path, "vector")
    monkeypatch.setattr(shard_recall, "in_pairs", lambda *_: {"same": 0.5, "standard_error": 0.0})
    assert shard_recall.main(["--model", str(bundle.path), "--shards", "1", "--beam", "64", "--m", "3"]) == 1
