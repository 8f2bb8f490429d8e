// What spoke for an item: past items of the memory, features of the query, the trees of a forest, the ranker, the live catalogue.

import { html } from "../../core/preact.js";
import { moment, number } from "../../core/format.js";
import { titleOf, useTitles } from "../../core/titles.js";
import { Bar, Table } from "../../core/ui.js";

export function Reasons({ model, entry }) {
  const sources = entry.memory?.items ?? [];
  useTitles(model, sources.map(({ id }) => id));
  const parts = [
    sources.length > 0 && html`<${Part} name="What the history says for it"><${Weighted} caption="Past items that speak for it" unit="adds to its key"
      rows=${sources.map(({ id, part }) => ({ name: id, note: titleOf(model.name, id), value: part }))} />
      <p class="hint">Together ${number(entry.memory.part)}, added to its rank when nodes are cut and items are ordered.</p></${Part}>`,
    entry.memory && sources.length === 0 && html`<${Part} name="What the history says for it"><p class="dim">No item of the history is a neighbour of it: it has its rank alone.</p></${Part}>`,
    entry.features?.length > 0 && html`<${Part} name="Features of the query"><${Weighted} caption="Features that speak for or against it" unit="contribution"
      rows=${entry.features.map(({ feature, contribution }) => ({ name: feature, value: contribution }))} /></${Part}>`,
    entry.trees && html`<${Part} name="In each tree"><${Table} caption="The item in each tree" rows=${entry.trees.map((tree, place) => ({ ...tree, place }))}
      columns=${[
        { label: "Tree", cell: (tree) => tree.place + 1 },
        { label: "Outcome", cell: (tree) => (tree.outcome === "pruned" ? `dropped on level ${tree.level}` : "scored") },
        { label: "Rank", numeric: true, cell: (tree) => number(tree.rank) },
        { label: "Cut", numeric: true, cell: (tree) => number(tree.cut) },
      ]} /></${Part}>`,
    entry.rank_features && html`<${Part} name="What the ranker saw"><${Weighted} caption="The ranker's features of it" unit="value" bars=${false}
      rows=${Object.entries(entry.rank_features).map(([name, value]) => ({ name, value }))} />
      <p class="hint">Its place before: ${entry.retrieved_place}; the ranker's score: ${number(entry.rerank_score)}.</p></${Part}>`,
    entry.live && html`<${Part} name="Live"><p>Put in ${moment(entry.live.since)}, placed by ${entry.live.placed_by}; its last change is operation ${entry.live.sequence}.</p></${Part}>`,
  ].filter(Boolean);
  return parts.length ? html`<div class="columns">${parts}</div>` : null;
}

function Part({ name, children }) {
  return html`<section class="panel"><h2>${name}</h2>${children}</section>`;
}

function Weighted({ caption, unit, rows, bars = true }) {
  const most = Math.max(...rows.map(({ value }) => Math.abs(value ?? 0)), 1e-12);
  return html`<${Table} caption=${caption} rows=${rows} columns=${[
    { label: "", cell: (row) => html`<bdi class="mono">${row.name}</bdi>${row.note && html` <bdi class="dim">${row.note}</bdi>`}` },
    ...(bars ? [{ label: "", cell: (row) => html`<${Bar} value=${Math.abs(row.value) / most} kind=${row.value < 0 ? "info" : ""} />` }] : []),
    { label: unit, numeric: true, cell: (row) => number(row.value) },
  ]} />`;
}
