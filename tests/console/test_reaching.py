"""Where a service is and who may use it: behind a path prefix, and with API keys."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, expect

from tests.console.browsing import PHONE, Watched, visit
from tests.console.conftest import RETRIEVE_KEY
from tests.console.showing import (
    MADE_OF_TITLES,
    MOVING,
    NOT_ISOLATED,
    STATES,
    VIEWS,
    WIDER_THAN_THE_PAGE,
    address,
    give_key,
    kept,
    serious_findings,
    settled,
    show,
)
from tests.http_servers import listening
from tests.service.processes import Service

pytestmark = [pytest.mark.slow, pytest.mark.console]

WIDTHS = (1440, 1024, 768, PHONE["width"])
PREFIX = "/tools/espalier"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host"}


@contextmanager
def behind_prefix(port: int, prefix: str) -> Iterator[str]:
    """The address of a proxy that serves another server below a prefix, as an ingress does. port: the server's on this machine.

    HTTP/1.0 goes out, so that the end of a stream is the end of its connection. Anything outside the prefix is 404.
    """

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with closing(upstream), suppress(BrokenPipeError, ConnectionResetError):  # a browser may lose interest
                upstream.request(self.command, self.path.removeprefix(prefix), body or None, headers)
                answer = upstream.getresponse()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                while part := answer.read1(1 << 16):
                    self.wfile.write(part)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with listening(server) as address:
        yield f"{address}{prefix}/"


def test_the_navigation_leads_to_every_view_behind_a_path_prefix_and_from_an_address_of_none(console: Service, browser: Browser) -> None:
    with behind_prefix(console.port, PREFIX) as base, visit(browser, base.removesuffix(f"{PREFIX}/")) as watched:
        page = watched.page
        page.goto(address(base, "nothing"))
        page.get_by_role("link", name="Lab").last.click()
        settled(page)
        links = page.get_by_role("navigation", name="Views").get_by_role("link")
        assert sorted(view for view in VIEWS for link in links.all() if f"#/{view}" in str(link.get_attribute("href"))) == VIEWS
        for link in links.all():
            link.click()
            settled(page)
            expect(link).to_have_attribute("aria-current", "page")
            assert page.get_by_role("heading", level=1).inner_text().startswith(link.inner_text())
            expect(page.get_by_role("alert")).to_have_count(0)
        assert {path for path in watched.paths() if not path.startswith(f"{PREFIX}/")} == set()
        assert urlsplit(page.url).path == f"{PREFIX}/"


def test_a_key_is_asked_for_where_it_is_needed_and_kept_in_memory_alone(guarded: Service, browser: Browser) -> None:
    with visit(browser, f"http://127.0.0.1:{guarded.port}") as watched:
        page = watched.page
        watched.expect_failures("status of 401", "status of 403")
        page.goto(f"{watched.origin}/")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("a retrieval key")
        assert serious_findings(page) == []
        dialog.get_by_label("API key").fill("a-key-that-is-wrong")
        page.keyboard.press("Enter")
        dialog.get_by_label("API key").fill(RETRIEVE_KEY)
        page.keyboard.press("Enter")
        settled(page)
        expect(dialog).to_be_hidden()
        assert RETRIEVE_KEY not in kept(page)
        page.reload()
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("alert").first).to_contain_text("key")
        page.get_by_role("button", name="Enter a key").first.click()
        expect(dialog.get_by_label("API key")).to_be_focused()


def test_back_leaves_the_question_for_a_key(guarded: Service, browser: Browser) -> None:
    with visit(browser, f"http://127.0.0.1:{guarded.port}") as watched:
        page = watched.page
        watched.expect_failures("status of 401", "status of 403")
        page.goto(f"{watched.origin}/#/lab")
        give_key(page, "a retrieval key", RETRIEVE_KEY)
        settled(page)
        page.get_by_role("link", name="Today").click()
        expect(page.get_by_role("dialog")).to_contain_text("an admin key")
        page.go_back()
        expect(page.get_by_role("dialog")).to_have_count(0)
        settled(page)
        expect(page.get_by_role("heading", level=1)).to_contain_text("Lab")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_every_result_shows_its_title_at_any_width(watched: Watched, width: int, side_by_side: bool) -> None:
    page = watched.page
    page.set_viewport_size({"width": width, "height": 844})
    show(page, f"{watched.origin}/", "lab", {"model": "debian-depends"} | ({"side": "b"} if side_by_side else {}))
    expect(page.locator(".results .result .title").first).to_be_visible()
    assert page.locator(".results .result .title").evaluate_all("(titles) => Math.min(...titles.map((title) => title.clientWidth))") > 80


@pytest.mark.parametrize(("view", "replays"), [("replays", True), ("whynot", False)])
def test_a_table_that_scrolls_shades_the_edge_beyond_which_there_is_more(watched: Watched, view: str, replays: bool) -> None:
    page = watched.page
    page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
    show(page, f"{watched.origin}/", *(STATES["replays"] if replays else STATES["an item that was pruned"]))
    if replays:
        page.get_by_role("button", name="Replay").click()
    region = page.get_by_role("region").last
    expect(region).to_be_visible()
    settled(page)
    assert region.evaluate("(region) => region.scrollWidth > region.clientWidth")
    right = [darkness(region)]
    region.evaluate("(region) => region.scrollTo({ left: region.scrollWidth })")
    right.append(darkness(region))
    assert right[0] > 20 > right[1]


def darkness(region: Locator) -> float:
    """How much darker the right edge of a region is than white, of 255: the median over a column of pixels."""
    pixels = np.asarray(Image.open(BytesIO(region.screenshot())).convert("L"))
    return 255 - float(np.median(pixels[40:-8, -2]))


def test_swagger_ui_works_under_its_policy(watched: Watched) -> None:
    page = watched.page
    page.goto(f"{watched.origin}/docs")
    page.locator(".opblock-summary-path", has_text="/readyz").click()
    route = page.locator(".opblock.is-open")
    route.get_by_role("button", name="Try it out").click()
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
    page.locator(".opblock-summary-path", has_text="/retrieve").first.click()
    expect(page.locator(".opblock.is-open")).to_have_count(2)


# -- each view, looked at once: it opens by its address, without a fault, readable for all, on a phone too, and still where that is asked


@pytest.mark.parametrize("state", STATES)
def test_a_view_opens_by_its_address_is_readable_for_all_and_takes_titles_as_text(watched: Watched, state: str) -> None:
    """Axe finds nothing serious in light or dark; nothing is wider than a page or a phone; markup and scripts in titles are text, and
    marks of direction turn nothing but themselves.
    """
    page = watched.page
    show(page, f"{watched.origin}/", *STATES[state])
    expect(page.get_by_role("alert")).to_have_count(0)
    assert "Espalier" in page.title()
    assert page.evaluate(MOVING) == [], "nothing moves by itself where less motion is asked for"
    assert page.evaluate(MADE_OF_TITLES) == []
    assert page.evaluate(NOT_ISOLATED) == []
    light = page.evaluate("getComputedStyle(document.body).color")
    assert serious_findings(page) == []
    page.emulate_media(color_scheme="dark")
    settled(page)
    assert page.evaluate("getComputedStyle(document.body).color") != light
    assert serious_findings(page, only="color-contrast") == []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        settled(page)
        assert page.evaluate(WIDER_THAN_THE_PAGE) == []
        expect(page.get_by_role("navigation", name="Views").locator("[aria-current]")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize(("motion", "moves"), [("reduce", False), ("no-preference", True)])
def test_what_is_under_way_appears_slowly_unless_less_motion_is_asked_for(
    console: Service, browser: Browser, motion: str, moves: bool
) -> None:
    with visit(browser, f"http://127.0.0.1:{console.port}", reduced_motion=motion) as watched:
        page = watched.page
        page.route("**/models", lambda route: None)  # no answer comes
        page.goto(f"{watched.origin}/")
        expect(page.get_by_role("status").first).to_be_visible()
        assert bool(page.evaluate(MOVING)) == moves
