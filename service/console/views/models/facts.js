// What a model is, and how much of its live catalogue is taken.

import { html } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { count, percent, plural } from "../../core/format.js";
import { Bar } from "../../core/ui.js";
import { SMALLEST_BEAM } from "../../core/models.js";

export function Facts({ model }) {
  const { query, search, tree, live } = model;
  const branching = Math.max(...tree.max_children);
  const facts = [
    ["Queries", `${query.kind}${query.length ? `, the last ${count(query.length)} items` : ""}${query.width ? `, ${count(query.width)} wide` : ""}`],
    ["Trained as", model.algorithm],
    ["Engine", model.engine],
    ["Items", count(tree.items)],
    ["Tree", `${plural(model.trees, "tree")}, ${count(tree.levels)} levels, ${count(tree.nodes)} nodes, at most ${branching} children`],
    ["Beam", `${count(search.beam_size)}, at most ${count(search.max_beam_size)}; no less than ${count(search.min_beam_size ?? SMALLEST_BEAM)} near a deadline`],
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
