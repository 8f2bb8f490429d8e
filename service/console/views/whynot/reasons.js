// What spoke for an item, and what forbids it. For it: past items of the memory, features of the query, the trees of a forest, the ranker, the live catalogue.

import { html } from "../../core/preact.js";
import { changed, href } from "../../core/address.js";
import { post } from "../../core/api.js";
import { moment, number } from "../../core/format.js";
import { useAnswer } from "../../core/latest.js";
import { queryOf, retrieveBody } from "../../core/query.js";
import { titleOf, useTitles } from "../../core/titles.js";
import { Bar, Busy, Table } from "../../core/ui.js";

const MOST_TRIED = 8; // conditions that are tried one by one

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

// What forbids an item, each named with what to change: the conditions of the filter one by one, exclusions, removals, deletions.
export function Forbidden({ model, params, item, entry, query }) {
  if (entry.outcome === "filtered") return html`<${Conditions} model=${model} params=${params} item=${item} />`;
  if (entry.outcome === "excluded") {
    const seen = query.exclude_seen && (query.history ?? []).includes(item);
    const named = (query.exclude ?? []).includes(item);
    return html`<ul class="whynot-forbidden">
      ${seen && html`<li>It is in the history, and <code>exclude_seen</code> is on. <a href=${href("lab", withQuery(params, { exclude_seen: false }))}>Ask without it</a></li>`}
      ${named && html`<li>It is in the list <code>exclude</code>. <a href=${href("lab", withQuery(params, { exclude: query.exclude.filter((id) => id !== item) }))}>Ask without it</a></li>`}
    </ul>`;
  }
  if (entry.outcome === "removed") {
    return html`<p class="hint">An administrator takes it off the list: <code>DELETE models/<bdi>${model.name}</bdi>/removed/<bdi>${encodeURIComponent(item)}</bdi></code></p>`;
  }
  if (entry.outcome === "deleted") {
    return html`<p class="hint"><a href=${href("live", { model: model.name, item })}>See it among the live items</a>; a PUT brings it back.</p>`;
  }
  return null;
}

function Conditions({ model, params, item }) {
  const { value, busy } = useAnswer((signal) => tried(model, params, item, signal), [params.toString(), item]);
  if (!value) return html`<${Busy} busy=${busy}>Trying the conditions one by one…</${Busy}>`;
  return html`<ul class="whynot-forbidden">
    ${value.map(({ name, column, condition, forbids }) => html`<li class=${forbids ? "" : "dim"}>
      <code>${name === "filter" ? "" : "not "}<bdi>${column}</bdi>: <bdi>${JSON.stringify(condition)}</bdi></code> ${forbids ? html`forbids it.${" "}
      <a href=${href("lab", without(params, name, column))}>Ask without this condition</a>` : "allows it"}</li>`)}
  </ul>`;
}

// Which of the conditions forbids the item when it is alone.
async function tried(model, params, item, signal) {
  const body = retrieveBody(model, params, { explain_items: [item], fields: [] });
  const conditions = ["filter", "exclude_filter"].flatMap((name) => Object.entries(body[name] ?? {}).map(([column, condition]) => ({ name, column, condition })));
  return Promise.all(conditions.slice(0, MOST_TRIED).map(async (one) => {
    const { filter: _, exclude_filter: __, ...rest } = body;
    const answer = await post("retrieve", { ...rest, [one.name]: { [one.column]: one.condition } }, signal);
    return { ...one, forbids: answer.results[0].explain.items[0].outcome === "filtered" };
  }));
}

function without(params, name, column) {
  const own = name === "filter" ? "filter" : "without";
  const { [column]: _, ...rest } = JSON.parse(params.get(own));
  return changed(params, { [own]: Object.keys(rest).length ? JSON.stringify(rest) : null });
}

function withQuery(params, more) {
  return changed(params, { q: JSON.stringify({ ...queryOf(params), ...more }) });
}
