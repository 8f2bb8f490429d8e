// The smallest tested beam at which an item comes: the beam is doubled until it does, then narrowed. An item that a beam finds may be lost by
// a wider one, so all that is told is what was tested; every step is shown.

import { html, useLayoutEffect } from "../../core/preact.js";
import { changed, href } from "../../core/address.js";
import { post } from "../../core/api.js";
import { count } from "../../core/format.js";
import { retrieveBody } from "../../core/query.js";
import { useRows } from "../../core/running.js";
import { Busy, ProblemView } from "../../core/ui.js";
import { isScored, placeOf } from "./verdict.js";

const NARROWED = 4; // steps between the last beam that missed it and the first that found it

// entry: of a search that dropped it above the leaves; height: the level of these
export function Ladder({ model, params, item, beam, entry, height }) {
  const { rows, problem, busy, start, cancel } = useRows((signal, take) => climb(model, params, item, beam, height, signal, (step) => take([step])));
  useLayoutEffect(() => (start(), cancel), [`${params} ${item} ${beam}`]);
  const steps = [{ beam, entry }, ...rows].sort((one, other) => one.beam - other.beam);
  const first = steps.find((step) => isScored(step.entry, height));
  const last = steps[steps.length - 1];
  return html`<div class="whynot-ladder">
    ${first && html`<p>With a beam of <strong>${count(first.beam)}</strong>, the smallest that was tried, ${found(first.entry)}.${" "}
      <a href=${labLink(params, first)}>See it in the Lab</a></p>`}
    ${!first && !busy && html`<p>No beam that was tried finds it, up to ${count(last?.beam)}, the model's largest: the scorer thinks little of its branch.</p>`}
    <${Busy} busy=${busy}>Trying wider beams…</${Busy}>
    <${ProblemView} problem=${problem} />
    ${steps.length > 1 && html`<ol class="whynot-steps" aria-label="Beams that were tried">
      ${steps.map(({ beam: tried, entry: own }) => html`<li key=${tried} class=${isScored(own, height) ? "good" : "dim"}>
        <span class="mono">${count(tried)}</span> ${isScored(own, height) ? `place ${count(placeOf(own))}` : `out on level ${own.level}`}</li>`)}
    </ol>`}
  </div>`;
}

function found(entry) {
  return entry.outcome === "returned" ? `it comes, at place ${count(entry.place)}` : `it is found, at place ${count(placeOf(entry))}: ask for as many results`;
}

async function climb(model, params, item, beam, height, signal, show) {
  const most = model.search.max_beam_size;
  let missed = beam;
  let found = null;
  for (let next = Math.min(2 * beam, most); found === null && next > missed; next = Math.min(2 * next, most)) {
    const step = await tried(model, params, item, next, signal);
    show(step);
    if (isScored(step.entry, height)) found = next;
    else missed = next;
  }
  for (let narrowed = 0; found !== null && narrowed < NARROWED && found - missed > Math.max(1, missed / 20); narrowed++) {
    const next = Math.round((missed + found) / 2);
    const step = await tried(model, params, item, next, signal);
    show(step);
    if (isScored(step.entry, height)) found = next;
    else missed = next;
  }
}

async function tried(model, params, item, beam, signal) {
  const body = retrieveBody(model, params, { explain_items: [item], fields: [], beam_size: beam });
  const answer = await post("retrieve", body, signal);
  return { beam, entry: answer.results[0].explain.items[0] };
}

function labLink(params, { beam, entry }) {
  const m = entry.outcome === "returned" ? null : placeOf(entry);
  return href("lab", changed(params, m ? { beam, m } : { beam }));
}
