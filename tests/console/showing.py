"""What tests of the console ask of a page: go to a view, wait until nothing is under way, look for what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlencode

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests import ROOT

VIEWS = sorted(path.stem for path in (ROOT / "service" / "console" / "views").glob("*.js"))
PAIR = {"model": "strange", "q": '{"history":["item-0","item-5"]}', "beam": "8", "m": "6"}
PRUNED = {"model": "debian-depends", "q": '{"history":["libsdl2-2.0-0","libgl1"]}', "item": "python3-numpy", "beam": "10"}
STATES: dict[str, tuple[str, dict[str, str]]] = {
    **{view: (view, {}) for view in VIEWS},
    "frontier": ("frontier", {"beams": "10,100", "queries": "64"}),
    **{f"{view} of strange titles": (view, {"model": "strange"}) for view in VIEWS},
    "two versions compared": ("lab", PAIR | {"side": "b", "version": "1", "b.version": "2"}),
    "an item that was pruned": ("whynot", PRUNED),
    "an item with a strange title": ("whynot", PAIR | {"item": "item-8"}),
    "a node of the tree": ("tree", {"model": "debian-depends", "node": "5"}),
    "a node of strange titles": ("tree", {"model": "strange", "node": "3"}),
}
"""Views in states that an address can have, by name."""

SERIOUS = ("serious", "critical")

WIDER_THAN_THE_PAGE = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.querySelectorAll("body *")].filter((element) => element.getBoundingClientRect().right > width + 1)
    .map((element) => `${element.tagName}.${element.className} to ${element.getBoundingClientRect().right} of ${width}`);
}"""

MOVING = """() => [...document.querySelectorAll("*")].flatMap((element) => {
  const style = getComputedStyle(element);
  const durations = `${style.animationName === "none" ? "0s" : style.animationDuration}, ${style.transitionDuration}`.split(", ");
  return durations.some((duration) => parseFloat(duration) > 0.011) ? [`${element.tagName}.${element.className}: ${durations}`] : [];
})"""


MADE_OF_TITLES = """() => [...document.querySelectorAll("body :is(script, img, iframe, .injected, [onload], [onerror]), bdi *")]
  .map((element) => element.outerHTML.slice(0, 200))"""

NOT_ISOLATED = r"""() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode;
    if (/[\u0590-\u05ff\u202a-\u202e\u2066-\u2069]/.test(text.data) && !text.parentElement.closest("bdi, option, textarea")) {
      found.push(`${text.parentElement.outerHTML.slice(0, 200)}`);
    }
  }
  return found;
}"""


def address(base: str, view: str, params: Mapping[str, str] | None = None) -> str:
    """The address of a view. base: that of the page, with its slash."""
    return f"{base}#/{view}" + (f"?{urlencode(params)}" if params else "")


def state(page: Page) -> dict[str, str]:
    """The parameters of a page's address."""
    return {name: values[0] for name, values in parse_qs(page.url.partition("?")[2]).items()}


def settled(page: Page) -> None:
    """Wait until a view is shown and nothing is under way."""
    expect(page.locator("main h1")).to_be_visible()
    expect(page.locator(".busy:not(.still)")).to_have_count(0)
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")


def show(page: Page, base: str, view: str, params: Mapping[str, str] | None = None) -> None:
    page.goto(address(base, view, params))
    settled(page)


def give_key(page: Page, role: str, key: str) -> None:
    """Type a key into the dialog that asks for one of a role."""
    dialog = page.get_by_role("dialog").filter(has_text=role)
    dialog.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()


def kept(page: Page) -> str:
    """All that the browser keeps beyond the page's memory."""
    return str(page.evaluate("JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, history.state, location.href])"))


def serious_findings(page: Page, only: str | None = None) -> list[str]:
    """What axe-core finds on the page that it calls serious or critical, and where. only: by one of its rules."""
    options = {"runOnly": {"type": "rule", "values": [only]}} if only else None
    found: list[dict[str, Any]] = Axe().run(page, options=options).response["violations"]
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for each in found
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]
