// What a replay found: means with their intervals, and the queries that lost most.

import { html, useState } from "../../core/preact.js";
import { changed, href } from "../../core/address.js";
import { count, percent, share } from "../../core/format.js";
import { Bar, Button, Table as Rows } from "../../core/ui.js";

const SHOWN = 50; // rows at first; more on demand

export function Summary({ rows, m, done }) {
  const known = rows.filter((row) => row.recallA !== null);
  const gains = known.map((row) => row.recallB - row.recallA);
  const overlap = mean(rows.map((row) => row.overlap));
  const [gain, half] = [mean(gains), 1.96 * deviation(gains) / Math.sqrt(Math.max(1, gains.length))];
  return html`<section class="panel replays-summary" aria-live=${done ? "polite" : "off"}>
    <p class="replays-said">${told(known.length, gain, half, overlap, m)}</p>
    <dl class="replays-figures">
      <div><dt>Queries</dt><dd>${count(rows.length)}</dd></div>
      <div><dt>Same items</dt><dd>${percent(overlap, 1)}</dd></div>
      ${known.length > 0 && html`<div><dt>Recall@${m}, A</dt><dd>${share(mean(known.map((row) => row.recallA)))}</dd></div>
        <div><dt>Recall@${m}, B</dt><dd>${share(mean(known.map((row) => row.recallB)))}</dd></div>
        <div><dt>B less A</dt><dd>${signed(gain)} ± ${share(half)}</dd></div>
        <div><dt>Better, equal, worse by B</dt><dd>${count(gains.filter((one) => one > 0).length)}, ${count(gains.filter((one) => one === 0).length)}, ${count(gains.filter((one) => one < 0).length)}</dd></div>`}
    </dl></section>`;
}

function told(known, gain, half, overlap, m) {
  if (known === 0) return overlap === 1 ? "A and B return the same items." : `A and B have ${percent(overlap, 1)} of their items in common.`;
  if (gain === 0 && overlap === 1) return "A and B return the same items.";
  if (Math.abs(gain) <= half) return `No difference in recall@${m} that this many queries can tell: ${signed(gain)}, within ± ${share(half)}.`;
  return `B finds ${gain > 0 ? "more" : "less"}: recall@${m} ${signed(gain)}, ± ${share(half)}.`;
}

export function Table({ rows, m, model, params }) {
  const [most, setMost] = useState(SHOWN);
  const sorted = [...rows].sort((one, other) => (one.recallB ?? 0) - (one.recallA ?? 0) - ((other.recallB ?? 0) - (other.recallA ?? 0)) || one.overlap - other.overlap);
  const known = rows.some((row) => row.recallA !== null);
  return html`<section class="panel"><h2>${known ? "Worst by B first" : "Least alike first"}</h2>
    <${Rows} caption="Queries of the replay" rows=${sorted.slice(0, most)} columns=${[
      { label: "Query", cell: (row) => html`<a class="replays-query" href=${labLink(model, params, row.query, m)}><bdi>${nameOf(row.query)}</bdi></a>` },
      { label: "Same items", cell: (row) => html`<${Bar} value=${row.overlap} /> <span class="dim">${percent(row.overlap)}</span>` },
      ...(known ? [
        { label: "Recall A", numeric: true, cell: (row) => share(row.recallA) },
        { label: "Recall B", numeric: true, cell: (row) => share(row.recallB) },
        { label: "B less A", numeric: true, cell: (row) => row.recallA !== null && html`<span class=${row.recallB < row.recallA ? "bad" : row.recallB > row.recallA ? "good" : "dim"}>${signed(row.recallB - row.recallA)}</span>` },
      ] : []),
    ]} />
    ${sorted.length > most && html`<div class="toolbar"><${Button} onClick=${() => setMost(most + 200)}>Show more of ${count(sorted.length)}</${Button}></div>`}
  </section>`;
}

function labLink(model, params, query, m) {
  return href("lab", changed(params, { from: null, count: null, model: model.name, q: JSON.stringify(query), m, side: "b" }));
}

function nameOf(query) {
  if (query.text !== undefined) return query.text || "an empty text";
  if (query.history) return query.history.length ? query.history.slice(-6).join(", ") : "an empty history";
  return JSON.stringify(query).slice(0, 80);
}

function signed(value) {
  return value > 0 ? `+${share(value)}` : value < 0 ? `−${share(-value)}` : share(value);
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
}

function deviation(values) {
  const middle = mean(values);
  return values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1)) : 0;
}
