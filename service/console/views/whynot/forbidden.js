// What forbids an item, each named with what to change: the conditions of the filter one by one, exclusions, removals, deletions.

import { html } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { post } from "../../core/api.js";
import { useAnswer } from "../../core/latest.js";
import { queryOf, retrieveBody } from "../../core/query.js";
import { Busy } from "../../core/ui.js";

const MOST = 8; // conditions that are tried one by one

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
  return Promise.all(conditions.slice(0, MOST).map(async (one) => {
    const { filter: _, exclude_filter: __, ...rest } = body;
    const answer = await post("retrieve", { ...rest, [one.name]: { [one.column]: one.condition } }, signal);
    return { ...one, forbids: answer.results[0].explain.items[0].outcome === "filtered" };
  }));
}

function without(params, name, column) {
  const next = new URLSearchParams(params);
  const own = name === "filter" ? "filter" : "without";
  const { [column]: _, ...rest } = JSON.parse(next.get(own));
  if (Object.keys(rest).length) next.set(own, JSON.stringify(rest));
  else next.delete(own);
  return next;
}

function withQuery(params, more) {
  const next = new URLSearchParams(params);
  next.set("q", JSON.stringify({ ...queryOf(params), ...more }));
  return next;
}
