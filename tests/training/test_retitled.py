"""A trained product whose text changes is found by its new words, and keeps what the log knew of it as far as its words stay."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.live.fold import write_fold
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.placement.linear_placement import LinearPlacement
from espalier.placement.placer import Placer, needs_placement
from espalier.placement.slots import Slots
from service.live.live_version import LiveVersion
from tests.service.running import Running, bearer, document, run
from tests.training.commands import answer_rows, command, trained
from tests.waiting import until as until_true

PRODUCTS = 200
SYLLABLES = ("lan", "per", "sto", "vik", "zen")
KEY, ADMIN = "a-key-of-sixteen-letters", "another-key-of-an-administrator"
QUERIES = [f"{first}{second}" for first in "bcdfghjklm" for second in ("ix", "oz", "um", "aq")]
"""A name in the log for each of the first products, which no title has."""
UNTITLED = "qalumex"
"""That of the last one, which has no title."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop whose version 1 has many parents and a narrow beam, with the table and the log that it was trained on."""
    folder = tmp_path_factory.mktemp("retitled")
    rng = np.random.default_rng(5)
    words = np.array([f"{first}{second}" for first in ("ba", "ko", "mi", "tu", "re", "sa") for second in SYLLABLES])
    titles = [*(" ".join(rng.permutation(words)[:4]) for _ in range(PRODUCTS - 1)), None]
    frame = pl.DataFrame({"id": [f"p{row:03d}" for row in range(PRODUCTS)], "title": titles, "price": [1.5] * PRODUCTS})
    frame.write_parquet(folder / "items.parquet")
    log = [*((name, f"p{row:03d}") for row, name in enumerate(QUERIES)), (UNTITLED, f"p{PRODUCTS - 1:03d}")]
    pl.DataFrame(log, schema=["query", "item"], orient="row").write_parquet(folder / "log.parquet")
    train(folder, 1)
    return folder


def train(folder: Path, version: int) -> Bundle:
    data = {"format": "log", "items": str(folder / "items.parquet"), "train": str(folder / "log.parquet"), "own_texts": ["title"]}
    shape = {"tree": {"branching": 4, "max_leaf": 4}, "search": {"beam_size": 3}}
    return trained(folder, {"data": data | {"test_share": 0.0}} | shape, f"shop/{version}")


@pytest.fixture
def shop(folder: Path) -> Bundle:
    return Bundle.open(folder / "models" / "shop" / "1")


def title(bundle: Bundle, row: int) -> str:
    return str(bundle.items.values("title", np.array([row]))[0])


def placed(bundle: Bundle, row: int, **body: Any) -> tuple[LiveState, Placement]:
    """The state of a version in which a trained item was put, and where it went."""
    engine, state, placer = open_engine(bundle, "cpu"), LiveState(bundle), Placer(bundle)
    (item_id,) = bundle.items.ids_of(np.array([row]))
    completed = placer.completed(item_id, ItemBody(**body), state.table)
    (candidates,) = placer.place([completed], state.table, state.overlay(), engine.parents, [item_id])
    if isinstance(candidates, EspalierError):
        raise candidates
    placements = Slots(state).place(item_id, candidates)
    state.apply([Change(1, item_id, "put", body.get("fields"), placements, at=1.0)])
    return state, placements[0]


def test_the_same_text_has_the_weights_the_bias_and_the_place_of_training(shop: Bundle) -> None:
    (leaves,) = LinearPlacement(shop)._rows
    for row in range(0, PRODUCTS, 23):
        state, placement = placed(shop, row, fields={"title": title(shop, row)})
        feature, weight = leaves.weights_of(row)
        assert_allclose(placement.row.feature, feature)
        assert_allclose(placement.row.values, weight, rtol=2e-3)
        assert placement.row.bias == pytest.approx(leaves.bias_of(row), abs=1e-6)
        assert (placement.parent, placement.slot) == state.trained_leaf_of(f"p{row:03d}")


def score(bundle: Bundle, query: str, feature: np.ndarray, weight: np.ndarray) -> float:
    asked = bundle.vectoriser.transform([query]).row(0)
    _, of_query, of_row = np.intersect1d(asked[0], feature, return_indices=True)
    return float(asked[1][of_query] @ weight[of_row])


def test_events_of_a_trained_product_leave_it_its_own_words(shop: Bundle) -> None:
    (leaves,) = LinearPlacement(shop)._rows
    _, placement = placed(shop, 60, events=(QUERIES[7],))
    for asked, least in ((title(shop, 60), 0.5 * score(shop, title(shop, 60), *leaves.weights_of(60))), (QUERIES[7], 0.1)):
        assert score(shop, asked, placement.row.feature, placement.row.values) > least > 0


def test_another_item_takes_the_slot_of_a_moved_one_that_has_expired(shop: Bundle) -> None:
    state, placement = placed(shop, 4, fields={"title": title(shop, 150)})
    state.apply([Change(2, "p004", "put", None, (placement,), valid_until=5.0, at=2.0)])
    state.apply([Change(3, "new", "put", {}, (placement,), at=6.0)])
    assert (state.live_items, state.tombstones) == (1, 1)
    assert 4 in state.overlay().hidden


def test_a_product_without_a_text_keeps_all_that_the_log_knew(shop: Bundle) -> None:
    (leaves,), row = LinearPlacement(shop)._rows, PRODUCTS - 1
    before = score(shop, UNTITLED, *leaves.weights_of(row))
    assert before > 0.1
    for body, asked in (({"fields": {"title": title(shop, 150)}}, title(shop, 150)), ({"events": (QUERIES[7],)}, QUERIES[7])):
        _, placement = placed(shop, row, **body)
        assert score(shop, UNTITLED, placement.row.feature, placement.row.values) == pytest.approx(before, rel=0.01)
        assert score(shop, asked, placement.row.feature, placement.row.values) > 0.1


def test_what_the_log_knew_counts_as_far_as_the_words_stay(shop: Bundle) -> None:
    (leaves,) = LinearPlacement(shop)._rows
    row, other = 4, 150
    before = score(shop, QUERIES[row], *leaves.weights_of(row))
    words = title(shop, row).split()
    scores = []
    for text in (" ".join([*words[:3], "quxuq"]), " ".join([*words[:2], *title(shop, other).split()[:2]]), title(shop, other)):
        _, placement = placed(shop, row, fields={"title": text})
        scores.append(score(shop, QUERIES[row], placement.row.feature, placement.row.values) / before)
    assert 1 > scores[0] > scores[1] > scores[2] >= 0
    assert scores[0] > 0.5
    assert scores[2] < 0.3


def test_a_product_with_the_text_of_another_hangs_where_searches_for_it_pass(shop: Bundle, tmp_path: Path) -> None:
    moved = 0
    for row, other in ((4, 150), (70, 9), (160, 33), (190, 101)):
        state, placement = placed(shop, row, fields={"title": title(shop, other)})
        overlay, trained_leaf = state.overlay(), state.trained_leaf_of(f"p{row:03d}")
        moved += (placement.parent, placement.slot) != trained_leaf
        assert row in answer_rows(shop, [title(shop, other)], 3, 3, overlay)[0]
        assert row not in answer_rows(shop, [title(shop, row)], 3, 10, overlay)[0]
        fold = write_fold(tmp_path / str(row) / "1", shop, overlay, state.table)
        assert len(fold.items) == PRODUCTS
        assert f"p{row:03d}" in fold.items.ids_of(np.array(answer_rows(fold, [title(shop, other)], 3, 3)[0]))
    assert moved == 4


def test_only_another_text_places_a_trained_product(shop: Bundle) -> None:
    def needs(**body: Any) -> bool:
        return needs_placement(shop, Operation(1, "p007", "put", ItemBody(**body), at=1.0))  # long before the training

    own = title(shop, 7)
    assert not needs(fields={"title": own, "price": 3.0})
    assert not needs(fields={"price": 3.0}), "without a text no search can find it better elsewhere"
    assert not needs(fields={"title": "unheard"}), "no word that the model knows"
    assert not needs(text=f"{own} balan"), "evidence from before the training"
    assert needs(fields={"title": f"{own} balan"})


def put(running: Running, item: str, **body: Any) -> dict[str, Any]:
    answer = running.client.request("PUT", f"/models/shop/items/{item}", json=body, headers=bearer(KEY))
    assert answer.status_code in (200, 201), answer.text
    return dict(answer.json())


def put_all(running: Running, *titles: tuple[str, str]) -> None:
    """Put titles of items in one bulk."""
    lines = "".join(f'{{"id": "{item}", "fields": {{"title": "{text}"}}}}\n' for item, text in titles)
    headers = bearer(KEY) | {"Content-Type": "application/x-ndjson"}
    answer = running.client.request("POST", "/models/shop/items", content=lines.encode(), headers=headers)
    assert [json.loads(line)["status"] for line in answer.text.splitlines()] == [200] * len(titles)


def found(running: Running, text: str, m: int = 5, **request: Any) -> dict[str, float]:
    """The first answers and their scores."""
    answer = running.client.post("/retrieve", json={"model": "shop", "queries": [{"text": text}], "m": m} | request)
    return {item["id"]: item["score"] for item in document(answer)["results"][0]["items"]}


def test_a_service_finds_trained_products_by_their_present_titles(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "shop" / "1")
    shop = Bundle.open(tmp_path / "shop" / "1")
    own, other = title(shop, 4), title(shop, 150)

    def served() -> Any:
        return run(tmp_path, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,))

    with served() as running:
        asked = [own, other, QUERIES[4]]
        before = [found(running, text) for text in asked]
        assert put(running, "p004", fields={"title": own, "price": 1.0})["placed"]["by"] == "trained"
        assert [found(running, text) for text in asked] == before, "a price changes no score"
        put(running, "p004", fields={"title": other})
        assert "p004" in found(running, other, 2)
        assert "p004" not in found(running, own)
        changed = [found(running, text) for text in asked]
    with served() as running:
        assert [found(running, text) for text in asked] == changed, "after a restart"
        put(running, "p004", count=3)
        assert [found(running, text) for text in asked] == changed
        assert put(running, "p004", fields={"title": own})["placed"]["by"] == "trained"
        assert [found(running, text) for text in asked] == before, "with its old title as it was trained"
        put_all(running, ("p004", other), ("p004", own))
        assert [found(running, text) for text in asked] == before, "two puts in one group"
        put(running, "p004", fields={"title": other})
        put(running, "p004", fields={"title": "unheard"})
        assert found(running, QUERIES[4]) == before[2], "a title without a known word leaves the row of training"
        assert put(running, "p004", fields={"title": own}, events=[QUERIES[4]])["placed"]["by"] == "events"
        with_event = found(running, other, 2)
        assert put(running, "p004", fields={"title": other})["placed"]["by"] == "events", "new fields place it with its events"
        assert {*found(running, other, 2)} == {"p004", "p150"} != {*with_event}


@pytest.mark.parametrize("fields", [{"price": 2.0}, {"title": "unheard"}])
def test_a_product_with_events_is_not_found_by_a_title_that_it_lost(folder: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "first" / "shop" / "1")
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "second" / "shop" / "1")
    own, other = (title(Bundle.open(tmp_path / "first" / "shop" / "1"), row) for row in (4, 150))
    asked, lists = [own, other, QUERIES[4], QUERIES[9]], []
    with run(tmp_path / "first", lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
        for item in ("new", "p004"):
            put(running, item, fields={"title": other}, events=[QUERIES[9]])
            assert item in found(running, other, 3)
            put(running, item, fields=fields)
            assert item not in found(running, other)
        put(running, "p005", events=[QUERIES[9]])
        put(running, "p005", fields=fields)
        lists.append([found(running, text, 200) for text in asked])
    with run(tmp_path / "second", lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
        for item in ("new", "p004", "p005"):
            put(running, item, fields=fields, events=[QUERIES[9]])
        lists.append([found(running, text, 200) for text in asked])
    assert lists[0] == lists[1], "as if nothing had been put before"


@pytest.mark.parametrize("item", ["new", "p004"])
def test_a_text_that_is_sent_is_searched_instead_of_the_fields(folder: Path, tmp_path: Path, item: str) -> None:
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "shop" / "1")
    first, second, third = (title(Bundle.open(tmp_path / "shop" / "1"), row) for row in (60, 150, 9))
    with run(tmp_path, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
        put(running, item, fields={"title": first}, text=second)
        assert item in found(running, second, 2)
        assert item not in found(running, first)
        put(running, item, fields={"title": third})
        assert item in found(running, second, 2), "the text stays until other evidence comes"
        put(running, item, text=third)
        assert item in found(running, third, 2)
        assert item not in found(running, second)


def test_a_folded_product_is_placed_as_one_that_is_still_live(folder: Path, tmp_path: Path) -> None:
    answers = []
    for name in ("live", "folded"):
        models = tmp_path / name
        shutil.copytree(folder / "models" / "shop" / "1", models / "shop" / "1")
        first, second = (title(Bundle.open(models / "shop" / "1"), row) for row in (60, 150))
        with run(models, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
            put(running, "new", fields={"title": first}, events=[QUERIES[9]])
        if name == "folded":
            assert command("fold", "--model", models / "shop" / "1", "--out", models / "shop" / "2").status == 0
        with run(models, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
            put(running, "new", fields={"title": second})
            answers.append([found(running, text, 40, beam_size=64).get("new") for text in (second, QUERIES[9])])
    assert None not in answers[0]
    assert answers[1] == pytest.approx(answers[0], rel=1e-3)


def test_the_last_operations_alone_give_the_same_answers(folder: Path, tmp_path: Path) -> None:
    """A host that follows, and a version that is loaded later, place items by the last operation of each."""
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "shop" / "1")
    bundle, rng = Bundle.open(tmp_path / "shop" / "1"), random.Random(0)
    titles = [title(bundle, row) for row in range(PRODUCTS - 1)]
    trained_items, new_items = [f"p{row:03d}" for row in range(0, PRODUCTS - 1, 8)], [f"new-{number}" for number in range(8)]

    def body(own: str | None) -> dict[str, Any]:
        text = rng.choice([rng.choice(titles), f"{rng.choice(titles)} {rng.choice(titles)}", "unheard", None, own])
        fields, events = {"title": text, "price": rng.random()}, [rng.choice(QUERIES)]
        return rng.choice([{"fields": fields}, {"events": events}, {"fields": fields, "events": events}])

    def answers(running: Running) -> list[dict[str, float]]:
        lists = [found(running, text, 40, beam_size=64) for text in (*titles[::4], *QUERIES[::4])]
        return [{item: score for item, score in scores.items() if score > 1e-5} for scores in lists]  # below, many are equal

    with run(tmp_path, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
        for item in new_items:
            put(running, item, events=[QUERIES[9]])
        for item in rng.choices([*trained_items, *new_items], k=300):
            put(running, item, **body(title(bundle, int(item[1:])) if item in trained_items else None))
        first = answers(running)
    with closing(sqlite3.connect(tmp_path / "shop" / "live.db")) as journal, journal:
        assert journal.execute("DELETE FROM placements").rowcount > 10
    with run(tmp_path, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
        assert answers(running) == first


def test_an_expired_product_comes_back_with_its_last_title(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "shop" / "1")
    own, other = (title(Bundle.open(tmp_path / "shop" / "1"), row) for row in (4, 150))
    with run(tmp_path, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,)) as running:
        until = datetime.now(UTC) + timedelta(seconds=0.7)
        put(running, "p004", fields={"title": other}, valid_until=until.isoformat())
        until_true(lambda: "p004" not in found(running, other, 200))
        put(running, "p004", events=[other], valid_until=None)
        assert "p004" in found(running, other, 2)
        assert "p004" not in found(running, own)


def test_only_another_text_places_an_item_again_and_a_move_back_frees_its_room(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "shop" / "1")
    own, other = (title(Bundle.open(tmp_path / "shop" / "1"), row) for row in (4, 150))
    with run(tmp_path, lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,), max_live=1) as running:
        put(running, "new", fields={"title": other}, events=[QUERIES[9]])
        with monkeypatch.context() as patch:
            patch.setattr(LiveVersion, "candidates", lambda *_: pytest.fail("it is placed"))
            put(running, "new", fields={"title": other, "price": 2.0})
        put_all(running, ("new", own), ("new", other))
        assert "new" not in found(running, own, 2)
        assert "new" in found(running, other, 3), "two puts in one bulk"
        with monkeypatch.context() as patch:
            patch.setattr(LiveVersion, "is_placed_by", lambda *_: False)
            put(running, "new", fields={"title": own})
        assert "new" in found(running, own, 3), "when it was looked at, another worker had not yet changed its title"
        document(running.client.request("DELETE", "/models/shop/items/new", headers=bearer(KEY)))
        put_all(running, ("p004", other), ("p004", own), ("p005", other))
        full = running.client.request("PUT", "/models/shop/items/p006", json={"fields": {"title": other}}, headers=bearer(KEY))
        assert full.status_code == 507


def test_each_version_places_a_product_by_the_text_that_it_was_trained_with(folder: Path, tmp_path: Path) -> None:
    for name in ("items.parquet", "log.parquet"):
        shutil.copy(folder / name, tmp_path / name)
    shutil.copytree(folder / "models" / "shop" / "1", tmp_path / "models" / "shop" / "1")
    frame = pl.read_parquet(folder / "items.parquet")
    titles = frame["title"].to_list()
    frame.with_columns(pl.Series("title", [*titles[:4], titles[150], *titles[5:]])).write_parquet(tmp_path / "items.parquet")
    train(tmp_path, 2)
    with run(tmp_path / "models", lambda opened: open_engine(opened, "cpu"), write_keys=(KEY,), admin_keys=(ADMIN,)) as running:
        body = {"version": 1, "default": False}
        document(running.client.request("POST", "/models/shop/load", json=body, headers=bearer(ADMIN)))
        versions = running.app.state.service.registry.catalogue("shop").thread.versions
        assert put(running, "p004", fields={"title": titles[150]})["placed"]["version"] == 2
        assert (versions[1].placed("p004").by, versions[2].placed("p004").by) == ("fields", "trained")
        assert "p004" in found(running, titles[150], 2, version=1)
        put(running, "p004", fields={"title": titles[4]})
        assert (versions[1].placed("p004").by, versions[2].placed("p004").by) == ("trained", "fields")
