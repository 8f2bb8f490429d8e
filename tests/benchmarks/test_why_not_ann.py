"""Why not ANN, from the command line: a tiny tree and a tiny product-DNN on the same test users."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.papers.product_search.ann import faiss_is_installed
from benchmarks.quality import ann_systems, why_not_ann
from espalier.bundle import Bundle
from tests.pictures import Pictures
from training.deep.export import export
from training.deep.fit import fit
from training.deep.prepare import build_tree, prepare
from training.specification.models import deep_config

pytestmark = pytest.mark.slow

ITEMS, QUERIES = 48, 5


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users with eight of the twelve items of their group."""
    rng = np.random.default_rng(1)
    lines = [f"u{user},i{item}" for user in range(120) for item in rng.permutation(ITEMS // 4)[:8] * 4 + user % 4]
    file = tmp_path_factory.mktemp("log") / "log.csv"
    file.write_text("user,item\n" + "\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def bundle(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Three steps of training on the log."""
    raw: dict[str, object] = {
        "kind": "otm-robust",
        "name": "small",
        "data": {"log": log, "format": {"min_user_events": 5}},
        "instances": {"windows": [4, 2]},
        "scorer": {"node_dim": 6, "hidden": [8]},
        "optimiser": {"steps": 3, "batch": 20, "precision": "float32"},
        "search": {"beam_size": 8, "m": 8},
    }
    config, work = deep_config(raw), tmp_path_factory.mktemp("work")
    prepared = prepare(config, None, work)
    tree = build_tree(config, prepared)
    model = fit(config, prepared, tree, torch.device("cpu"), work, resume=False)
    return export(config, prepared, tree, model, tmp_path_factory.mktemp("models") / "small" / "1")


@pytest.mark.skipif(not faiss_is_installed(), reason="faiss is not installed (the extra `ann`)")
def test_every_system_is_measured_on_the_same_queries(
    log: Path,
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pictures: Pictures,
) -> None:
    out, plot = tmp_path / "out" / "rows.json", tmp_path / "out" / "plot.png"
    knobs = ["--beam", "4,8,1000", "--ef-search", "10", "--nprobe", "1,1000", "--steps", "4"]
    few = ["--queries", str(QUERIES), "--timed", "2", "--rounds", "1", "--threads", str(torch.get_num_threads())]
    files = ["--model", str(bundle.path), "--log", str(log), "--work", str(tmp_path / "dnn"), "--json", str(out), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["why_not_ann", *files, *knobs, *few])
    why_not_ann.main()

    report = json.loads(out.read_text())
    assert (report["model"], report["items"], report["queries"], report["exclude_seen"]) == ("small", ITEMS, QUERIES, False)
    leaves = bundle.tree.leaf_count
    points = [
        ("tree", 4),
        ("tree", 8),
        ("tree exhaustive", leaves),
        ("exact scan, same encoder", None),
        ("HNSW, same encoder", 10),
        ("product-dnn exact", None),
        ("product-dnn HNSW", 10),
        ("product-dnn IVF", 1),
    ]
    assert [(row["system"], row["knob"], row["m"]) for row in report["rows"]] == [(*point, m) for point in points for m in why_not_ann.MS]
    for row in report["rows"]:
        assert 0 <= row["recall"] <= 1
        assert min(row["ms_per_query"], row["encode_ms"], row["search_ms"]) > 0
    whole = {row["system"] for row in report["rows"] if row["m"] == ann_systems.M and row["recall"] == 1}
    assert whole == {system for system, _ in points} - {"tree"}  # these return all 48 items for m = 200
    assert "product-dnn IVF" in capsys.readouterr().out
    lines = pictures.lines(plot)
    assert sum(len(points) for points in lines.values()) == len(points)
    at = [(row["ms_per_query"], row["recall"]) for row in report["rows"] if (row["system"], row["m"]) == ("tree", ann_systems.M)]
    assert lines["tree"] == at


def test_another_log_than_the_models_own_is_refused(log: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.csv"
    other.write_text(log.read_text() + "u0,i1\n")
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "why_not_ann",
            "--model",
            str(bundle.path),
            "--log",
            str(other),
            "--work",
            str(tmp_path),
            "--threads",
            str(torch.get_num_threads()),
        ],
    )
    with pytest.raises(SystemExit, match=r"error: log: .*the log that .* was trained on"):
        why_not_ann.main()
