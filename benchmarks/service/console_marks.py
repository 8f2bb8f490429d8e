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

MOVE_ONCE = """(beam) => new Promise((resolve, reject) => {
  const slider = document.querySelector("main input[type=range]");
  const wanted = `beam ${beam}`;
  const give_up = setTimeout(() => reject(new Error(`${wanted} was not shown`)), 5000);
  const observer = new MutationObserver(() => {
    if (document.querySelector(".results .result .title")?.textContent !== wanted) return;
    observer.disconnect();
    clearTimeout(give_up);
    const changed = performance.now() - began;
    requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = () => resolve({changed_ms: changed, painted_ms: performance.now() - began});
      channel.port2.postMessage(0);
    });
  });
  observer.observe(document.querySelector("main"), {subtree: true, childList: true, characterData: true});
  slider.value = beam;
  const began = performance.now();
  slider.dispatchEvent(new Event("input", {bubbles: true}));
})"""
"""Move the first slider to `beam`; gives the milliseconds until its answer stands in the page, and until it is painted."""

FIRST_RESULT = """() => { window.firstResult = new Promise((resolve) => new MutationObserver((_, observer) => {
  if (!document.querySelector(".results .result")) return;
  observer.disconnect();
  requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => resolve(performance.now());
    channel.port2.postMessage(0);
  });
}).observe(document, {subtree: true, childList: true})); }"""
"""Sets `firstResult`, a promise of the time at which the Lab's first result is painted."""

REDRAW = """async (times) => {
  const root = document.documentElement;
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const script_ms = [];
  const frame_ms = [];
  let former = await frame();
  for (let time = 0; time < times; time++) {
    const began = performance.now();
    root.dataset.theme = time % 2 ? "light" : "dark";
    for (let turn = 0; turn < 20; turn++) await null;  // the observer, then the rendering, are microtasks
    root.offsetHeight;
    script_ms.push(performance.now() - began);
    const now = await frame();
    frame_ms.push(now - former);
    former = now;
  }
  return {script_ms, frame_ms};
}"""
"""Draw the levels of Why not anew, once a frame, by changing the theme."""
