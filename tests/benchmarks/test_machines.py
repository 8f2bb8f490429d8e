"""From items and queries to machines: the formulas beside a real tree and a real bundle, and the tables that docs/scale.md shows."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.service.machines import Catalogue, Machine, Traffic, by_formula, candidates, of_bundle, plan, report, search_ms
from espalier.bundle import Bundle
from tests import ROOT

SAMPLE = ROOT / "models/debian-depends/1"
TRAFFIC = Traffic(queries_per_s=1000, beam=200, m=100, state_bytes=256, search_ms=0.3, measured_items=2**20, router_ms=1.0)
MACHINE = Machine(cores=16, memory_bytes=64e9)


@pytest.mark.parametrize("beam", [20, 50, 100, 200, 400])
def test_candidates_are_those_of_a_real_tree_within_a_tenth(beam: int) -> None:
    tree = Bundle.open(SAMPLE, verify=False).tree
    scored = np.minimum(np.diff(tree.level_offset)[1:], 2 * beam).sum()
    assert candidates(12_410, 2, beam) == pytest.approx(scored, rel=0.1)


def test_the_formula_counts_the_bytes_of_the_sample_within_a_tenth() -> None:
    measured = of_bundle(SAMPLE, 12_410)
    bundle = Bundle.open(SAMPLE, verify=False)
    assert bundle.manifest.memory is not None
    fields = (SAMPLE / "items.arrow").stat().st_size / 12_410
    formula = by_formula(12_410, bundle.graph_scorer.node_dim, 2, bundle.manifest.memory.entries / 12_410, fields, 2)
    assert formula.item_bytes == pytest.approx(measured.item_bytes, rel=0.1)
    assert formula.row_bytes == pytest.approx(measured.row_bytes, rel=0.15)
    assert (measured.branching, measured.index_bytes) == (2, 8)


def test_shards_fit_and_one_less_would_not() -> None:
    catalogue = by_formula(300_000_000, 64, 2, 50, 100, 2)
    found = plan(catalogue, TRAFFIC, MACHINE)
    room = MACHINE.memory_bytes - MACHINE.cores * 230e6
    assert 3 * found.shard_bytes <= room
    assert 3 * plan(catalogue, TRAFFIC, MACHINE, found.shards - 1).shard_bytes > room


def test_four_shards_do_more_than_three_times_the_work_of_one() -> None:
    catalogue = by_formula(2**22, 64, 2, 0, 100, 2)
    one, four = (search_ms(catalogue, TRAFFIC, shards) for shards in (1, 4))
    assert four < one
    assert 3 * one < 4 * four < 4 * one


def test_replicas_carry_the_load_at_seven_tenths_and_one_may_fail() -> None:
    catalogue = by_formula(100_000_000, 64, 2, 50, 100, 2)
    found = plan(catalogue, replace(TRAFFIC, queries_per_s=200_000), MACHINE)
    assert (found.replicas - 1) * MACHINE.cores * 0.7 >= 200 * found.shard_ms > (found.replicas - 2) * MACHINE.cores * 0.7
    assert found.machines == found.shards * found.replicas + found.routers
    assert plan(catalogue, TRAFFIC, MACHINE).replicas == 2  # never fewer


def test_a_model_that_fits_needs_no_router() -> None:
    found = plan(by_formula(1_000_000, 64, 2, 50, 100, 2), TRAFFIC, MACHINE)
    assert (found.shards, found.routers, found.machines, found.bytes_per_query) == (1, 0, found.replicas, 0)
    assert "no router" in report(found)


def test_a_catalogue_whose_index_alone_fills_a_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="every shard keeps of the whole"):
        plan(Catalogue(10**10, 800, 400, 8), TRAFFIC, MACHINE)


def test_the_table_of_the_page_is_what_the_command_finds() -> None:
    page = (ROOT / "docs/scale.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for items, rate, *shown in rows:
        catalogue = by_formula(int(items.replace(",", "")), 64, 2, 50, 100, 2)
        found = plan(catalogue, replace(TRAFFIC, queries_per_s=float(rate.replace(",", ""))), MACHINE)
        counts = [str(count) for count in (found.shards, found.replicas, found.routers, found.machines)]
        assert shown == [*counts, f"{found.shard_bytes / 1e9:.1f}", f"{found.shard_ms:.2f}"], items
    billion = by_formula(10**9, 64, 2, 50, 100, 2)
    without = plan(by_formula(10**9, 64, 2, 0, 100, 2), TRAFFIC, MACHINE).shards
    large = plan(billion, TRAFFIC, replace(MACHINE, memory_bytes=128e9)).shards
    assert f"{without} shards hold a model without a memory, and {large} of 128 GB this one" in page
