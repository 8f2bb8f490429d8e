// Why not: where an item fell out of the search. The answer first, in a sentence; then what it rests on.

import { html } from "../core/preact.js";
import { changed, go, href } from "../core/address.js";
import { post } from "../core/api.js";
import { count } from "../core/format.js";
import { useAnswer } from "../core/latest.js";
import { queryOf, queryParams, retrieveBody } from "../core/query.js";
import { rememberTitles, titleOf, useTitles } from "../core/titles.js";
import { Busy, Empty, ItemBox, ProblemView } from "../core/ui.js";
import { Ladder } from "./whynot/ladder.js";
import { Levels } from "./whynot/levels.js";
import { Forbidden, Reasons } from "./whynot/reasons.js";
import { isScored, placeOf, verdict } from "./whynot/verdict.js";

export const title = "Why not";
export const about = "where an item fell out of the search";

const NEARBY = 5; // results that are offered, below those that came

export default function View({ params, model }) {
  const item = params.get("item");
  const query = queryOf(params);
  const choose = (id) => go("whynot", changed(params, { item: id }));
  return html`
    <section class="panel whynot-ask">
      <${ItemBox} model=${model} label="Why did this item not come?" placeholder="id or title of an item" value=${item ?? ""} keep
        key=${item} onChoose=${(option) => choose(option.id)} />
      <${Asked} model=${model} params=${params} query=${query} />
    </section>
    ${!query && html`<${Empty}>This view takes over a query. <a href=${href("lab", queryParams(params))}>Ask one in the Lab</a>, then follow
      “Why not?” from there.</${Empty}>`}
    ${query && !item && html`<${Candidates} model=${model} params=${params} choose=${choose} />`}
    ${query && item && html`<${Explained} key=${item} model=${model} params=${params} item=${item} />`}`;
}

// The query in words, and the way back to it.
function Asked({ model, params, query }) {
  const ids = query?.history ?? [];
  useTitles(model, ids);
  if (!query) return null;
  const kind = model.query.kind;
  return html`<p class="hint whynot-query">The query: ${kind === "history" && (ids.length ? ids.map((id) => html`<bdi class="chip" title=${titleOf(model.name, id) ?? ""}>${id}</bdi> `) : "no history")}
    ${kind === "text" && html`<q><bdi>${query.text}</bdi></q>`}${(kind === "vector" || kind === "features") && `of ${kind === "vector" ? "a vector" : "features"}`}
    · ${params.get("beam") ?? model.search.beam_size} nodes kept per level, ${params.get("m") ?? model.search.m} results
    ${params.has("filter") || params.has("without") ? " · with a filter" : ""}${" · "}
    <a href=${href("lab", queryParams(params))}>open in the Lab</a></p>`;
}

// Before an item is named: those that came, as examples to click.
function Candidates({ model, params, choose }) {
  const { value, problem, busy, again } = useAnswer(
    async (signal) => {
      const answer = await post("retrieve", retrieveBody(model, queryParams(params), { fields: titleField(model) }), signal);
      rememberTitles(model.name, answer.results[0].items);
      return answer.results[0].items;
    },
    [queryParams(params).toString()],
  );
  if (problem) return html`<${ProblemView} problem=${problem} again=${again} />`;
  if (!value) return html`<${Busy} busy=${busy} />`;
  return html`<${Empty}>Type an id or a title above: of an item that you missed. Or see why one came, say one of the last:
    ${value.slice(-NEARBY).map(({ id }) => html` <button type="button" class="button quiet" onClick=${() => choose(id)}><bdi class="mono">${id}</bdi></button>`)}</${Empty}>`;
}

function Explained({ model, params, item }) {
  const state = queryParams(params);
  const { value, problem, busy, again } = useAnswer((signal) => explain(model, state, item, signal), [state.toString(), item], { wait_ms: 60 });
  useTitles(model, [item]);
  if (problem) return html`<${ProblemView} problem=${problem} again=${again} />`;
  if (!value) return html`<${Busy} busy=${busy}>Tracing the search…</${Busy}>`;
  const { entry, levels, trees, beam, m, degraded } = value;
  const height = levels.length ? levels[levels.length - 1].level : 0;
  const told = verdict(entry, levels, { m, height });
  return html`
    <section class=${`panel verdict whynot-verdict ${told.kind}`} aria-live="polite">
      <p class="whynot-item"><bdi class="mono">${item}</bdi>${titleOf(model.name, item) && html` <bdi class="dim">${titleOf(model.name, item)}</bdi>`}</p>
      <p class="whynot-sentence">${told.sentence}</p>
      ${degraded && html`<p class="hint warn">The deadline was near: this search had a smaller beam than was asked for.</p>`}
      <${Forbidden} model=${model} params=${state} item=${item} entry=${entry} query=${queryOf(params)} />
      ${isScored(entry, height) && !["returned", "below_min_score"].includes(entry.outcome) && html`<${More} model=${model} params=${state} place=${placeOf(entry)} />`}
      ${entry.outcome === "pruned" && !isScored(entry, height) && html`<${Ladder} model=${model} params=${state} item=${item} beam=${beam} entry=${entry} height=${height} />`}
    </section>
    <${Reasons} model=${model} entry=${entry} />
    ${(trees ? trees.map((tree) => tree.levels) : [levels]).map((own, place) => html`<${Levels} key=${place} model=${model} version=${state.get("version")}
      name=${trees ? `Tree ${place + 1}` : "Level by level"} levels=${own} path=${trees ? null : entry.path} tree=${trees ? entry.trees?.[place] : null} place=${place} beam=${beam} />`)}`;
}

// How many results have it among them.
function More({ model, params, place }) {
  if (!place) return null;
  const most = model.search.max_m;
  if (place > most) return html`<p class="hint">This model returns at most ${count(most)} items.</p>`;
  return html`<p><a href=${href("lab", changed(params, { m: place }))}>Ask for ${count(place)} results</a>, and it is the last of them.</p>`;
}

// The explanation of one item. Where the nodes of all levels are too many for an answer, it comes without them.
async function explain(model, params, item, signal) {
  const ask = (nodes) => post("retrieve", retrieveBody(model, params, { explain_items: [item], fields: [], ...(nodes && { explain_nodes: true }) }), signal);
  const answer = await ask(true).catch((problem) => {
    if (problem.errors?.some((wrong) => wrong.field === "explain_nodes")) return ask(false);
    throw problem;
  });
  const result = answer.results[0];
  const { levels, trees, items } = result.explain;
  return { levels, trees, entry: items[0], beam: result.beam_size, m: result.items.length, degraded: result.degraded };
}

function titleField(model) {
  return (model.fields ?? []).includes("title") ? ["title"] : [];
}
