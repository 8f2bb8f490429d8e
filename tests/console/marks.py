"""Scripts for a page of the console: marks in answers, by which it is seen which answer is shown, and moves of a slider."""

from __future__ import annotations

MARK_ANSWERS = """(late) => {
  const asked = window.fetch;
  window.asked = [];
  window.fetch = async (resource, options) => {
    if (!/\\/retrieve$/.test(new URL(resource.url ?? resource, document.baseURI).pathname)) return asked(resource, options);
    const request = JSON.parse(options.body);
    const number = window.asked.push(request);
    const answer = await asked(resource, late ? {...options, signal: undefined} : options);
    if (!answer.ok) return answer;
    const content = await answer.json();
    const item = content.results[0].items[0];
    if (item) item.fields = {...item.fields, title: `beam ${request.beam_size}`};
    if (number % 2 === 0) await new Promise((resolve) => setTimeout(resolve, late));
    return new Response(JSON.stringify(content), {headers: {"Content-Type": "application/json"}});
  };
}"""
"""The first title of an answer becomes "beam N" of its request. `late` > 0: every second answer is so many ms late, and even those
that were cancelled come: a page must drop them itself. `asked` lists the requests."""

SHOWN = "document.querySelector('.results .result .title')?.textContent"

MOVE_MANY = """async ({moves, pause_ms}) => {
  const slider = document.querySelector("main input[type=range]");
  const seen = [];
  const observer = new MutationObserver(() => {
    const title = document.querySelector(".results .result .title")?.textContent;
    if (title !== seen.at(-1)) seen.push(title);
  });
  observer.observe(document.querySelector("main"), {subtree: true, childList: true, characterData: true});
  for (const beam of moves) {
    slider.value = beam;
    slider.dispatchEvent(new Event("input", {bubbles: true}));
    await new Promise((resolve) => setTimeout(resolve, pause_ms));
  }
  await new Promise((resolve) => setTimeout(resolve, 1000));
  observer.disconnect();
  return seen;
}"""
"""Move the first slider through `moves`; gives the first titles that were shown, in their order, until a second after the last move."""
