"""The tables of XReg beside our rows."""

from __future__ import annotations

from benchmarks.papers.xreg.xmc_baselines import BASELINES
from benchmarks.papers.xreg.xmc_systems import MODELS
from benchmarks.papers.xreg.xreg_tables import ABLATIONS, PUBLISHED, setting, table_2, table_8

ROW = {"p1": 77.7, "p3": 66.2, "p5": 55.6, "psp1": 42.9, "psp3": 47.6, "psp5": 49.9, "xmad5": 0.18371, "tau5": 52.9, "auprc": 0.1}


def test_every_published_method_is_a_system() -> None:
    assert all(system in (*MODELS, *BASELINES) for methods in PUBLISHED.values() for system in methods)


def test_a_row_stands_beside_the_published_one() -> None:
    lines = list(table_2("eurlex-4k", [{"system": "xreg", "beam_size": 10, **ROW}, {"system": "ova", "beam_size": 10, **ROW}]))
    assert lines[2] == (
        "| xreg | 77.70 / 66.20 / 55.60 | 42.90 / 47.60 / 49.90 | 52.90 | .1837 | .1000 | 44.00 / 47.44 / 49.72 | 52.86 | .1849 |"
    )
    assert lines[3].endswith("| – | – | – |")


def test_ablations_change_one_of_trees_beam_and_leaf() -> None:
    names = "xreg", "xreg:tree.count=1", "xreg:tree.max_leaf=20"
    rows = [{"system": name, "beam_size": beam, "model_mb": 1.5, **ROW} for name in names for beam in (5, 10)]
    assert setting(rows[-1]) == (3, 10, 20)
    lines = list(table_8("eurlex-4k", rows))[2:]
    settings = [tuple(line.split(" | ")[:3]) for line in lines]
    assert settings == [("| 3", "10", "100"), ("| 3", "10", "20"), ("| 3", "5", "100"), ("| 1", "10", "100")]
    assert lines[3].endswith("| 49.90 | 52.90 | .1837 | 1.5 | 48.05 | 51.14 | .1899 |")
    assert all((t != 3) + (p != 10) + (m != 100) <= 1 for t, p, m in ABLATIONS["eurlex-4k"])
