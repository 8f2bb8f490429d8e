// Models: what each is, which of its versions serve, and how it measured at its training. Versions are loaded, pinned and dropped here.

import { html } from "../core/preact.js";
import { href } from "../core/address.js";
import { count, ms, percent, plural, share } from "../core/format.js";
import { smallestBeam, useModels } from "../core/models.js";
import { Badge, Bar, Table } from "../core/ui.js";
import { STATES, Versions } from "./models/versions.js";

export const title = "Models";
export const about = "versions, shapes, figures at training";

const MOST_ROWS = 60; // of figures
const NAMES = { raw: "with items of the history", seen_excluded: "without items of the history" };
const COLUMNS = [["recall", "Recall"], ["precision", "Precision"], ["ndcg", "nDCG"]];

export default function View({ model }) {
  const { models } = useModels();
  return html`
    ${models?.length > 1 && html`<section class="panel"><${Table} caption="All models" rows=${models} rowKey=${(one) => one.name} rowClass=${(one) => (one.name === model.name ? "models-own" : "")} columns=${[
      { label: "Model", cell: (one) => html`<a href=${href("models", { model: one.name })} aria-current=${one.name === model.name ? "true" : undefined}><bdi>${one.name}</bdi></a>` },
      { label: "State", cell: (one) => html`<${Badge} kind=${STATES[one.state] ?? ""}>${one.state}</${Badge}>` },
      { label: "Serves", numeric: true, cell: (one) => one.version ?? "–" },
      { label: "Items", numeric: true, cell: (one) => count(one.tree?.items) },
      { label: "Queries", cell: (one) => one.query?.kind ?? "–" },
      { label: "Engine", cell: (one) => one.engine ?? "–" },
      { label: "", cell: (one) => html`<bdi class="dim">${one.reason}</bdi>` },
    ]} /></section>`}
    <${Versions} model=${model} />
    ${model.query && html`<${Facts} model=${model} /><${Figures} model=${model} />`}`;
}

// What a model is, and how much of its live catalogue is taken.
function Facts({ model }) {
  const { query, search, tree, live } = model;
  const branching = Math.max(...tree.max_children);
  const facts = [
    ["Queries", `${query.kind}${query.length ? `, the last ${count(query.length)} items` : ""}${query.width ? `, ${count(query.width)} wide` : ""}`],
    ["Trained as", model.algorithm],
    ["Engine", model.engine],
    ["Items", count(tree.items)],
    ["Tree", `${plural(model.trees, "tree")}, ${count(tree.levels)} levels, ${count(tree.nodes)} nodes, at most ${branching} children`],
    ["Beam", `${count(search.beam_size)}, at most ${count(search.max_beam_size)}; no less than ${count(smallestBeam(model))} near a deadline`],
    ["Results", `${count(search.m)}, at most ${count(search.max_m)}`],
    ["Ranker", model.ranker ? `the best ${count(model.ranker.depth)}, at most ${count(model.ranker.max_depth)}` : "none"],
    ["Columns", model.fields.join(", ")],
  ];
  return html`<div class="columns">
    <section class="panel"><h2>What it is</h2><dl class="models-facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd><bdi>${value}</bdi></dd></div>`)}</dl></section>
    ${live && html`<section class="panel"><h2>Live catalogue</h2>
      <p><strong>${plural(live.items, "live item")}</strong> of at most ${count(live.capacity)} <${Bar} value=${live.items / live.capacity} kind="info" />
        <span class="dim">${percent(live.items / live.capacity, 1)}</span></p>
      <dl class="models-facts">
        <div><dt>Deleted trained items</dt><dd>${count(live.tombstones)}</dd></div>
        <div><dt>Last operation</dt><dd>${count(live.sequence)}${live.applied < live.sequence ? `, applied up to ${count(live.applied)}` : ""}</dd></div>
      </dl>
      ${live.reason && html`<p class="bad"><bdi>${live.reason}</bdi></p>`}
      <p><a href=${href("live", { model: model.name })}>Put, look up or delete live items</a></p></section>`}
  </div>`;
}

// How a model measured on test users when it was trained; all else of its metrics as they are in the bundle.
function Figures({ model }) {
  const test = model.metrics?.test;
  const groups = Array.isArray(test) ? [["", test]] : Object.entries(test ?? {}).filter(([, rows]) => Array.isArray(rows));
  return html`<section class="panel"><h2>At its training</h2>
    ${groups.length === 0 && html`<p class="dim">The bundle has no figures of test queries. <a href=${href("frontier", { model: model.name })}>Measure its frontier now</a>.</p>`}
    ${groups.map(([name, rows]) => html`<h3>Test queries${name && `, ${NAMES[name] ?? name}`}</h3>
      <${Table} caption=${`Test figures ${NAMES[name] ?? name}`} rows=${rows.slice(0, MOST_ROWS)} columns=${[
        { label: "Beam", numeric: true, cell: (row) => count(row.beam_size) },
        { label: "m", numeric: true, cell: (row) => count(row.m) },
        ...COLUMNS.filter(([key]) => rows.some((row) => typeof row[key] === "number")).map(([key, label]) => ({ label, numeric: true, cell: (row) => share(row[key]) })),
        { label: "Time a query", numeric: true, cell: (row) => ms(row.ms_per_query) },
      ]} />`)}
    ${model.metrics && html`<details><summary>All metrics of the bundle</summary><pre class="models-all" tabindex="0">${JSON.stringify(model.metrics, null, 1)}</pre></details>`}
  </section>`;
}
