// The items of an answer, or of two beside each other. A title leads to "Why not", which says how an item came, too.

import { html, useState } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { number, share } from "../../core/format.js";
import { queryParams, sideB } from "../../core/query.js";
import { Bar, Button, Empty } from "../../core/ui.js";
import { compared, mark } from "./comparison.js";

const MOST_SHOWN = 200; // more are drawn on demand: a slider must stay quick

export function Results({ model, params, sides, stale, question, query, set }) {
  const [all, setAll] = useState(false);
  const lists = sides.map((side) => side.results[0].items);
  const comparison = lists.length === 2 ? compared(...lists) : null;
  const best = lists.flat().reduce((most, { score }) => Math.max(most, score), 1e-9);
  const longest = Math.max(...lists.map((items) => items.length));
  const linked = [queryParams(params), queryParams(sideB(params))];
  const change = (changes) => set({ q: JSON.stringify({ ...query, ...changes }) });
  const add = model.query.kind === "history" && ((id) => change({ history: [...(query.history ?? []), id] }));
  const exclude = (id) => change({ exclude: [...(query.exclude ?? []), id] });

  return html`<div class=${stale ? "results stale" : "results"}>
    ${stale && html`<p class="hint warn">The last answer that came:</p>`}
    <div class=${comparison ? "sides" : ""}>
      ${lists.map((items, place) => html`<div>
        ${comparison && html`<h2><span class=${`badge ${place ? "info" : "good"}`}>${"AB"[place]}</span> version ${sides[place].version}, beam ${sides[place].results[0].beam_size}</h2>`}
        ${items.length === 0 && html`<${Empty}>No item came. ${params.has("filter") || params.has("without") ? "Try without the filters." : ""}</${Empty}>`}
        <ol>${items.slice(0, all ? items.length : MOST_SHOWN).map((item, at) => html`<${Item} key=${item.id} item=${item} place=${at + 1} best=${best} side=${place}
          params=${linked[place]} marked=${comparison && mark(comparison.places, item.id, "ab"[place])} relevant=${question.relevant?.has(item.id)}
          isSeen=${(query.history ?? []).includes(item.id)} add=${add} exclude=${exclude} />`)}</ol>
      </div>`)}
    </div>
    ${!all && longest > MOST_SHOWN && html`<${Button} onClick=${() => setAll(true)}>Show all ${longest}</${Button}>`}
  </div>`;
}

function Item({ item, place, best, side, params, marked, relevant, isSeen, add, exclude }) {
  const { title, ...others } = item.fields ?? {};
  const other = Object.values(others).flat().filter((value) => value !== null).map((value) => (typeof value === "number" ? number(value, 5) : value)).join(", ");
  const to = new URLSearchParams(params);
  to.set("item", item.id);
  return html`<li class=${`result ${marked?.kind ?? ""}`}>
    <span class="place">${place}</span>
    ${marked && html`<span class=${`mark-${marked.kind}`} title=${marked.text}><span aria-hidden="true">${SIGNS[marked.kind](marked.by)}</span><span class="unseen">${marked.text}</span></span>`}
    <a class="name" href=${href("whynot", to)}>
      <bdi class="ellipsis title">${title ?? item.id}</bdi>
      <span class="ellipsis about">${title && html`<bdi class="mono">${item.id}</bdi>`}${other && html` <bdi class="other">${other}</bdi>`}</span>
    </a>
    <span class="tags">${relevant && html`<span class="badge good" title="This held-out query wants it">relevant</span>`}${isSeen && html`<span class="badge">in the history</span>`}</span>
    <span class="score"><${Bar} value=${item.score / best} kind=${side ? "info" : ""} /><span>${share(item.score)}</span>
      ${item.rerank_score !== undefined && html`<span class="dim" title="By the ranker">${number(item.rerank_score)}</span>`}</span>
    <span class="actions">
      ${add && html`<button type="button" class="cross" disabled=${isSeen} aria-label=${`Add ${item.id} to the history`} title="Add to the history" onClick=${() => add(item.id)}>+</button>`}
      <button type="button" class="cross" aria-label=${`Leave out ${item.id}`} title="Leave out" onClick=${() => exclude(item.id)}>−</button>
    </span>
  </li>`;
}

const SIGNS = { same: () => "=", new: () => "new", lost: () => "lost", moved: (by) => `${by > 0 ? "▲" : "▼"}${Math.abs(by)}` };
