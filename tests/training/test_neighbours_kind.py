"""Neighbours as a bundle: its search finds what counting ranks best, whatever the tree, and popular items behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from espalier.arrays import Array, Float64, Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import EspalierError, InvalidConfig, InvalidData
from espalier.live.operations import ItemBody
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.placement.placer import Placer
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import Engine, SearchParams
from tests.training import content_logs
from tests.training.commands import command, written_toml
from tests.training.runs import exported
from training.data.user_item_matrix import events_of_items
from training.deep.memory import memory_task
from training.deep.prepare import Prepared, prepare
from training.deep.run import train_and_export
from training.neighbours.fit import Neighbours, neighbours
from training.specification.models import SPECIFICATION, deep_config, read_config

M = 10


def configuration(folder: Path) -> dict[str, object]:
    log, items = content_logs.write_log(folder)
    data = {"log": str(log), "items": str(items), "format": {"order": "file"}}
    return {"kind": "neighbours", "name": "counted", "data": data, "search": {"beam_size": M, "m": M, "exclude_seen": False}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Prepared, Neighbours]:
    """The bundle, its log, and the baseline that is fitted to the same."""
    folder = tmp_path_factory.mktemp("neighbours")
    config = deep_config(configuration(folder))
    prepared = prepare(config, None, folder / "log")
    (folder / "work").mkdir()
    bundle = train_and_export(config, prepared, folder / "counted" / "1", torch.device("cpu"), folder / "work", False)
    source = neighbours(memory_task(config, prepared, None)).source
    assert bundle is not None
    assert isinstance(source, Neighbours)
    return bundle, prepared, source


def histories(prepared: Prepared) -> list[Int64]:
    """Of test users, whole and in parts, and of nobody."""
    whole = [pair.history for pair in prepared.split.test]
    return [*whole, *(history[-2:] for history in whole), np.empty(0, np.int64)]


def batch_of(bundle: Bundle, lists: list[Int64]) -> QueryBatch:
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    return pad_histories(kind, lists)


def found(bundle: Bundle, engine: Engine, lists: list[Int64], m: int = M) -> Int64:
    return engine.search(batch_of(bundle, lists), SearchParams.uniform(len(lists), m, m)).item_rows_BM


def exact(bundle: Bundle, lists: list[Int64], popular_I: Array) -> Float64:
    """float64[B, I]: the key of every item; −∞ of what is left out."""
    memory = bundle.memory
    assert memory is not None
    keys_BI = np.tile(popular_I.astype(np.float64), (len(lists), 1))
    for key_I, history_T in zip(keys_BI, lists, strict=True):
        for item in range(len(key_I)):
            key_I[item] += sum(part for _, part in memory.sources(history_T, item))
            if memory.leaves_out(history_T, item):
                key_I[item] = -np.inf
    return keys_BI


@pytest.mark.parametrize("name", ["compiled-cpu", "onnx-cpu", "reference"])
def test_a_beam_of_m_finds_the_best_of_all_items(made: tuple[Bundle, Prepared, Neighbours], name: str) -> None:
    bundle, prepared, _ = made
    lists = histories(prepared)[::7] + histories(prepared)[-1:]
    engine: Engine = ReferenceEngine(bundle) if name == "reference" else open_engine(bundle, "cpu", name)
    popular_I = bundle.node_rows_ND[bundle.tree.leaf_of_item, -1]
    keys_BI = exact(bundle, lists, popular_I)
    rows_BM = found(bundle, engine, lists)
    best_BM = -np.sort(-keys_BI, axis=1)[:, :M]
    np.testing.assert_allclose(np.take_along_axis(keys_BI, rows_BM, 1), best_BM, rtol=1e-5)


def test_it_ranks_as_the_baseline_does(made: tuple[Bundle, Prepared, Neighbours]) -> None:
    bundle, prepared, baseline = made
    lists = histories(prepared)[:-1]
    by_baseline_BM = baseline.rank(lists, M, exclude_seen=True)
    exclude_BE = batch_of(bundle, lists).array.astype(np.int64)
    params = SearchParams.uniform(len(lists), M, M, exclude_BE)
    rows_BM = open_engine(bundle, "cpu").search(batch_of(bundle, lists), params).item_rows_BM
    same = [len(np.intersect1d(one, other)) / M for one, other in zip(rows_BM, by_baseline_BM, strict=True)]
    assert np.mean(same) > 0.97  # values are stored in float16, so that neighbours of nearly equal scores may change places


def test_an_empty_history_gets_popular_items(made: tuple[Bundle, Prepared, Neighbours]) -> None:
    bundle, prepared, _ = made
    events_I = events_of_items(prepared.interactions, prepared.split.train)
    (rows_M,) = found(bundle, open_engine(bundle, "cpu"), [np.empty(0, np.int64)], 50)
    assert_array_equal(events_I[rows_M], -np.sort(-events_I)[:50])


def test_fit_takes_the_kind_from_its_option_and_the_data_from_the_file(tmp_path: Path) -> None:
    raw = configuration(tmp_path)
    other = {
        **raw,
        "kind": "otm-sequence",
        "seed": 3,
        "scorer": {"node_dim": 8},
        "memory": {"weight": 2.0},
        "search": {"beam_size": 99, "exclude_seen": False},
    }
    file = written_toml(tmp_path / "config.toml", other)
    assert read_config(file, kind="neighbours") == SPECIFICATION.checked(
        {"kind": "neighbours", "seed": 3, "name": "counted", "data": raw["data"], "search": {"exclude_seen": False}}
    )
    out = tmp_path / "models" / "counted" / "1"
    made = command("fit", "--config", file, "--kind", "neighbours", "--out", out)
    assert made.status == 0, made.err
    assert Bundle.open(out).manifest.algorithm == "neighbours"


def test_a_comparison_wants_a_tree_to_compare(tmp_path: Path) -> None:
    refused = command("compare", "--config", written_toml(tmp_path / "config.toml", configuration(tmp_path)))
    assert refused.status == 1
    assert "kind" in refused.err


def test_the_refusal_of_another_kind_names_the_option_and_what_the_data_lacks(tmp_path: Path) -> None:
    file = written_toml(tmp_path / "config.toml", configuration(tmp_path))
    with pytest.raises(InvalidConfig, match=r"^--kind: got 'xreg'.*data\.format"):
        read_config(file, kind="xreg")


@pytest.mark.parametrize("events", [1, 5, 64])
def test_a_live_item_ranks_among_trained_ones_and_is_found_by_its_own_histories(
    made: tuple[Bundle, Prepared, Neighbours], events: int
) -> None:
    bundle, prepared, _ = made
    history = prepared.split.test[0].history
    state, engine = LiveState(bundle), open_engine(bundle, "cpu")
    body = ItemBody(events=tuple([list(bundle.items.ids_of(history[-3:]))] * events))
    (found,) = Placer(bundle).place([body], state.table, state.overlay(), engine.parents)
    assert not isinstance(found, EspalierError)
    parent, row = next((parent, row) for parent, row in found[0] if state.has_room(0, parent))
    assert 0 <= row.values[-1] <= 1
    state.apply([Change(1, "new", "put", placements=(Placement(0, parent, state.next_slot(0, parent), row),))])
    engine.set_overlay(state.overlay())
    new = bundle.tree.item_count
    asked = engine.search(batch_of(bundle, [history[-3:], np.empty(0, np.int64)]), SearchParams.uniform(2, M, M)).item_rows_BM
    assert new in asked[0]
    assert new not in asked[1], "popular items come to nobody's history"


def test_all_neighbours_stay_where_fewer_would_lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.deep.ranking.NEIGHBOUR_COUNTS", (1, 4096))
    monkeypatch.setattr("training.deep.ranking.FIRST_KEPT", 1)
    monkeypatch.setattr("training.deep.ranking.MOST_LOST", -10.0)
    memory = exported(configuration(tmp_path), tmp_path / "counted" / "1").memory
    assert memory is not None
    assert np.diff(memory.offset).max() > 1


def test_lists_with_nothing_in_common_are_refused(tmp_path: Path) -> None:
    lines = [f"u{user},i{user}-{item}" for user in range(60) for item in range(12)]
    (tmp_path / "log.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    data = {"log": str(tmp_path / "log.csv"), "format": {"user": "user", "item": "item", "order": "file"}}
    with pytest.raises(InvalidData, match="in common"):
        exported({"kind": "neighbours", "name": "alone", "data": data}, tmp_path / "m" / "1")


def test_without_anything_to_find_there_is_nothing_to_choose_by(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\n" + "".join(f"u{user},i{item % 2}\n" for user in range(20) for item in range(12)))
    form = {"user": "user", "item": "item", "order": "file"}
    raw = {"kind": "neighbours", "name": "seen", "data": {"log": str(tmp_path / "log.csv"), "format": form}}
    with pytest.raises(InvalidData, match="validation user"):
        exported(raw, tmp_path / "none" / "1")


@pytest.mark.parametrize(
    ("section", "value", "key"),
    [
        ("scorer", {"kind": "mlp"}, "scorer"),
        ("optimiser", {"steps": 5}, "optimiser"),
        ("memory", {"weight": 2.0}, "memory.weight"),
        ("search", {"gamma": 0.5}, "search.gamma"),
        ("tree", {"kind": "jtm"}, "tree.kind"),
    ],
)
def test_keys_that_say_how_to_train_are_refused(tmp_path: Path, section: str, value: dict[str, object], key: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{key}"):
        deep_config(configuration(tmp_path) | {section: value})
