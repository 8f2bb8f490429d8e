"""The benchmark of training speed: the published methods train alike, and its rows say how."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.papers.otm import training_speed
from training.specification.deep import InstanceConfig
from training.specification.scorers import ProductScorer

pytestmark = pytest.mark.slow


def test_rows_say_on_which_targets_and_with_which_scorer_each_method_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    threads = str(torch.get_num_threads())
    sizes = ["--items", "60", "--users", "40", "--batch", "6", "--beam", "4", "--rounds", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["training_speed", *sizes, "--device", "cpu", "--threads", threads, "--json", str(out)])
    training_speed.main()

    report = json.loads(out.read_text())
    assert {report[key] for key in ("items", "batch", "beam_size")} == {60, 6, 4}
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == ["plt", "tdm", "tdm-2k", "otm", "otm-robust"]
    assert all(row["s_per_batch"] > 0 for row in rows.values())
    assert (rows["plt"]["ratio"], rows["otm"]["paper_ratio"], rows["otm-robust"]["paper_ratio"]) == (1, 3.65, None)

    ours = rows.pop("otm-robust")
    assert ours["scorer"] == ProductScorer(init="random").model_dump(mode="json")
    assert ours["instances"] == InstanceConfig().model_dump(mode="json")
    assert ours["targets"] == 1
    for row in rows.values():
        assert (row["scorer"]["kind"], row["scorer"]["node_dim"], row["scorer"]["hidden"]) == ("mlp", 24, [128, 64, 24])
        assert (row["instances"]["split"], row["instances"]["cold_share"]) == ("half", 0)
        assert row["targets"] == training_speed.EVENTS / 2
    assert (rows["tdm-2k"]["objective"]["negatives"], rows["otm"]["objective"]["beam_size"]) == (8, 4)
    assert "50.0 targets" in capsys.readouterr().out
