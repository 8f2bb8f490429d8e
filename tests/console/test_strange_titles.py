"""Titles are text: markup in them is not read, scripts do not run, and marks of direction turn nothing but themselves."""

from __future__ import annotations

import pytest

from tests.console.browsing import Watched
from tests.console.showing import STATES, WIDER_THAN_THE_PAGE, show

pytestmark = [pytest.mark.slow, pytest.mark.console]

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


@pytest.mark.parametrize("state", [name for name, (_, params) in STATES.items() if params.get("model") == "strange"])
def test_no_view_reads_a_title_as_anything_but_text(watched: Watched, state: str) -> None:
    page = watched.page
    show(page, f"{watched.origin}/", *STATES[state])
    assert page.evaluate(MADE_OF_TITLES) == []
    assert page.evaluate(NOT_ISOLATED) == []
    assert page.evaluate(WIDER_THAN_THE_PAGE) == []
