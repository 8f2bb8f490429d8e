"""Titles are text: markup in them is not read, scripts do not run, and marks of direction turn nothing but themselves."""

from __future__ import annotations

import pytest

from tests.console.browsing import Watched
from tests.console.showing import VIEWS, WIDER_THAN_THE_PAGE, serious_findings, show
from tests.console.strange_model import RIGHT_TO_LEFT, STRANGE

pytestmark = [pytest.mark.slow, pytest.mark.console]

MADE_OF_TITLES = """() => [...document.querySelectorAll("body :is(script, img, iframe, b, i:not([class]), .injected, [onload], [onerror])")]
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


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_reads_a_title_as_anything_but_text(watched: Watched, view: str) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", view, {"model": "strange"})
    assert page.evaluate(MADE_OF_TITLES) == []
    assert page.evaluate(NOT_ISOLATED) == []
    assert page.evaluate(WIDER_THAN_THE_PAGE) == []


def test_the_lab_shows_titles_as_they_are(watched: Watched) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", "lab", {"model": "strange", "q": '{"history":["item-0"]}', "beam": "64", "m": "32"})
    text = page.evaluate("document.querySelector('main').textContent")
    assert [title for title in STRANGE if title.strip() and title not in text] == []
    isolated = page.evaluate("[...document.querySelectorAll('main bdi')].map((element) => element.textContent)")
    assert RIGHT_TO_LEFT in isolated
    assert page.evaluate(NOT_ISOLATED) == []
    assert page.evaluate(MADE_OF_TITLES) == []
    assert serious_findings(page) == []
