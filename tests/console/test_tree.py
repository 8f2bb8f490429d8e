"""Tree: a node and what is below it, by address, by item and by keyboard."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.browsing import PHONE, Watched
from tests.console.showing import WIDER_THAN_THE_PAGE, serious_findings, settled

pytestmark = [pytest.mark.slow, pytest.mark.console]

WIDE, HEIGHT, TRAINED = 200, 22, 40_000
FIRST = TRAINED - WIDE


def see(watched: Watched, **params: str | int) -> Page:
    watched.page.goto(f"{watched.origin}/#/tree?{urlencode({'model': 'debian-depends'} | params)}")
    expect(watched.page.locator("#tree-node")).to_be_visible()
    settled(watched.page)
    return watched.page


def path(page: Page) -> list[str]:
    return page.get_by_role("navigation", name="Path from the root").get_by_role("link").all_inner_texts()


def children(page: Page) -> list[int]:
    nodes = page.locator(".tree-children a").evaluate_all("links => links.map(link => link.dataset.node)")  # at one moment
    return [int(node) for node in nodes]


def here(page: Page) -> str:
    return str(page.locator("#tree-node").inner_text())


def documents(node: int) -> dict[str, Any]:
    """A tree of 22 levels below whose last inner node are 200 leaves and a live one."""
    leaf = node >= FIRST
    row: dict[str, Any] = {"node": node, "height": HEIGHT, "trained_nodes": TRAINED, "looked_at": 1, "values": {}, "items": []}
    line = [0, *range(10_001, 10_000 + HEIGHT)]
    if leaf:
        row |= {"level": HEIGHT, "parent": line[-1], "path": [*line, node], "children": [], "children_items": [], "child_count": 0}
        return row | {"item_count": 1, "items": [{"id": f"item-{node}", "title": "a title", "live": node >= TRAINED, "eligible": True}]}
    below = [*range(FIRST, TRAINED + 1)]
    row |= {"level": HEIGHT - 1, "parent": line[-2], "path": line, "children": below, "children_items": [1] * len(below)}
    return row | {"child_count": len(below), "item_count": len(below)}


def answered(route: Route) -> None:
    node = int(urlsplit(route.request.url).path.rpartition("/")[2])
    route.fulfill(status=200, content_type="application/json", body=json.dumps(documents(node)))


def test_it_begins_at_the_root_and_a_child_leads_down(watched: Watched) -> None:
    page = see(watched)
    assert here(page) == "Root, node 0"
    assert path(page) == ["root"]
    expect(page.locator(".tree [role=status]").first).to_contain_text("level 0 of 14 · 12,410 items below · 2 children")
    expect(page.locator(".tree-children")).to_contain_text("role::shared-lib 56 %")
    page.locator(".tree-children a", has_text="libs").first.click()
    expect(page.locator("#tree-node")).to_have_text("Node 1")
    assert path(page) == ["root", "1"]
    expect(page.get_by_role("region", name="Typical values of section")).to_contain_text("× 1.8")
    assert "node=1" in page.url
    page.go_back()
    expect(page.locator("#tree-node")).to_have_text("Root, node 0")


def test_an_item_is_found_among_its_neighbours_and_its_path_leads_to_the_leaf(watched: Watched) -> None:
    page = see(watched)
    box = page.get_by_role("combobox", name="Find an item")
    box.fill("libc6")
    page.get_by_role("option").filter(has_text="libc6").first.click()
    expect(page.get_by_text("is below, at leaf")).to_be_visible()
    way = path(page)
    assert (len(way), way[0]) == (15, "root")
    current = page.locator(".tree-path [aria-current]").inner_text()
    assert here(page) == f"Node {current}"
    assert children(page)[0] == int(way[way.index(current) + 1])  # the item's child is first
    page.get_by_role("navigation", name="Path from the root").get_by_role("link").last.click()
    expect(page.locator("#tree-node")).to_have_text(f"Leaf {way[-1]}")
    expect(page.get_by_role("region", name="Items below").locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("region", name="Items below")).to_contain_text("libc6")


def test_a_node_beside_the_way_to_an_item_says_so_and_lists_more_on_demand(watched: Watched) -> None:
    page = see(watched, item="libc6", node=2)
    expect(page.get_by_text("is not below this node")).to_be_visible()
    rows = page.get_by_role("region", name="Items below").locator("tbody tr")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Show more items").click()
    expect(rows).to_have_count(1000)
    expect(page.get_by_role("button", name="Show more items")).to_have_count(0)
    page.get_by_role("link", name="Go to it").click()
    expect(page.get_by_text("is below, at leaf")).to_be_visible()


def test_the_keyboard_alone_goes_down_and_up(watched: Watched) -> None:
    page = see(watched)
    page.locator(".tree-children a").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".tree-children a").nth(1)).to_be_focused()
    second = children(page)[1]
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tree-node")).to_have_text(f"Node {second}")
    expect(page.locator(".tree-children a").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".tree [role=status]").first).to_contain_text("level 2")
    expect(page.locator(".tree-children a").first).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tree-node")).to_have_text(f"Node {second}")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tree-node")).to_have_text("Root, node 0")
    expect(page.locator(f".tree-children a[data-node='{second}']")).to_be_focused()  # where it came from


def test_hundreds_of_children_on_level_22_are_readable_and_the_live_leaf_is_first(watched: Watched) -> None:
    page = watched.page
    page.route("**/models/*/tree/*", answered)
    see(watched, node=10_021)
    assert len(path(page)) == HEIGHT
    listed = children(page)
    assert listed == [TRAINED, *range(FIRST, FIRST + len(listed) - 1)]
    assert len(listed) < 30
    expect(page.locator(".tree-children .badge")).to_have_text("live")
    expect(page.locator(".tree-children li").last).to_contain_text(f"item-{listed[-1]}")
    asked = [each for each in watched.paths() if each.startswith("/models/") and "/tree/" in each]
    assert len(asked) <= len(listed) + 1
    while (more := page.get_by_role("button", name="more children")).count():
        more.click()
    expect(page.locator(".tree-children li")).to_have_count(WIDE + 1)
    assert serious_findings(page) == []
    page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
    assert page.evaluate(WIDER_THAN_THE_PAGE) == []


def test_of_more_children_than_the_service_lists_it_says_so_and_an_item_s_own_is_first(watched: Watched) -> None:
    page = watched.page
    line = [0, 9000, TRAINED - 1]
    root = documents(10_021) | {"node": 0, "level": 0, "height": 2, "parent": None, "path": [0], "child_count": 9000}
    root |= {"children": [*range(1, 201)], "children_items": [5] * 200}
    nodes = {0: root, 9000: documents(10_021) | {"node": 9000, "level": 1, "height": 2, "parent": 0, "path": line[:2], "item_count": 1}}
    nodes[7] = root | {"node": 7, "level": 1, "path": [0, 7], "parent": 0}

    def wide(route: Route) -> None:
        address = urlsplit(route.request.url)
        found = (
            {"item": "far", "nodes": line} if "item=" in address.query else nodes.get(int(address.path.rpartition("/")[2]), documents(5))
        )
        route.fulfill(status=200, content_type="application/json", body=json.dumps(found))

    page.route("**/models/*/tree?**", wide)
    page.route("**/models/*/tree/*", wide)
    see(watched, item="far")
    assert here(page) == "Node 9000", "the root has no neighbours of an item: it has all items"
    see(watched, item="far", node=0)
    assert children(page)[:3] == [9000, 1, 2]
    expect(page.get_by_text("The first 200 have 5 items each.")).to_be_visible()
    expect(page.get_by_text("The largest 24 of the first 200 of 9,000 are listed.")).to_be_visible()
    page.get_by_role("button", name="more children").click()
    expect(page.get_by_text("The first 200 of 9,000 are listed.")).to_be_visible()
    see(watched, item="far", node=7)
    expect(page.locator(".tree-children a").first).to_have_attribute("data-node", "1")  # the item is not below


def test_a_node_or_an_item_that_is_not_there_is_told(watched: Watched) -> None:
    watched.expect_failures("status of 404")
    page = watched.page
    page.goto(f"{watched.origin}/#/tree?model=debian-depends&node=99999999")
    expect(page.get_by_role("alert")).to_contain_text("nodes 0 to 28792")
    page.get_by_role("link", name="Begin at the root").click()
    expect(page.locator("#tree-node")).to_have_text("Root, node 0")
    expect(page.get_by_role("alert")).to_have_count(0)
    see(watched, item="no-such-thing", node=1)
    expect(page.locator(".tree")).to_contain_text('There is no item "no-such-thing"')
    assert here(page) == "Node 1"


def test_an_item_leads_to_what_goes_with_it(watched: Watched) -> None:
    page = see(watched, item="libc6")
    row = page.get_by_role("region", name="Items below").locator("tbody tr").filter(has_text="GNU C Library: Shared")
    row.get_by_role("link", name="what goes with it").click()
    settled(page)
    query = json.loads(parse_qs(urlsplit(page.url).fragment.partition("?")[2])["q"][0])
    assert query["history"] == ["libc6"]


def test_children_of_which_nothing_is_typical_are_told_by_some_of_their_items(watched: Watched) -> None:
    page = watched.page
    page.route("**/models/*/tree/*", lambda route: route.fulfill(json=route.fetch().json() | {"values": {}}))
    see(watched, node=0)
    expect(page.locator(".tree-children li").first).to_contain_text(", ")
    expect(page.locator(".tree-children li").first.locator("bdi")).to_have_count(3)
    page.unroute_all(behavior="wait")  # an answer that came after the page was closed would fail the next test
