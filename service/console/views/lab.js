// Lab: ask a model, move the beam, compare two ways of searching. The whole state is in the address (core/query.js).

import { html, useEffect, useLayoutEffect } from "../core/preact.js";
import { changed, go, read } from "../core/address.js";
import { get, post } from "../core/api.js";
import { useAnswer } from "../core/latest.js";
import { isOpen } from "../core/models.js";
import { queryOf, retrieveBody, shownFields, sideB } from "../core/query.js";
import { rememberTitles } from "../core/titles.js";
import { Busy, Empty, ProblemView } from "../core/ui.js";
import { Results, Summary } from "./lab/answer.js";
import { QueryPanel } from "./lab/query.js";
import { Facets, SearchPanel } from "./lab/search.js";

export const title = "Lab";
export const about = "ask, move the beam, compare";

const WAIT_MS = 15; // between two requests of a slider that moves
const QUERIES = 20;
const SOME_ITEMS = 3;

const heldout = new Map(); // model and version -> its held-out queries; [] where it has none

export default function Lab({ params, model }) {
  // quiet: without a step of the browser's history, for what moves
  const set = (changes, quiet = false) => go("lab", changed(read().params, { model: model.name, ...changes }), { replace: quiet });
  const question = useFirstQuestion(model, params, (query) => set({ q: JSON.stringify(query) }, true));
  const query = queryOf(params);
  const compared = params.get("side") === "b";
  const sides = compared ? [params, sideB(params)] : [params];
  const bodies = sides.map((side) => retrieveBody(model, side, { fields: shownFields(model) }));
  const { value, problem, busy, again } = useAnswer(ask, query && isAsked(model, query) ? [bodies] : null, { wait_ms: WAIT_MS, retry: true });
  const first = value?.sides[0].results[0];
  useShortcut();

  return html`<div class="lab">
    <div class="controls">
      <${QueryPanel} model=${model} query=${query ?? {}} question=${question} unknown=${first?.unknown ?? []} set=${set} />
      <${SearchPanel} model=${model} params=${params} set=${set} />
    </div>
    <section class="answer" aria-label="Results">
      <${ProblemView} problem=${problem ?? question.problem} again=${problem ? again : question.again} />
      ${!query && !question.problem && html`<${Busy}>Looking for a question to ask…</${Busy}>`}
      ${busy && !value && html`<${Busy}>Searching…</${Busy}>`}
      ${query && !isAsked(model, query) && html`<${Empty}>${HOW[model.query.kind]}</${Empty}>`}
      ${value && html`<${Summary} model=${model} params=${params} value=${value} question=${question} busy=${busy} set=${set} />
        <${Results} model=${model} params=${params} sides=${value.sides} stale=${Boolean(problem)} question=${question} query=${query} set=${set} />`}
    </section>
    <${Facets} model=${model} params=${params} set=${set} ready=${value !== null || problem !== null} />
  </div>`;
}

// What there is to do where no query has been asked.
const HOW = {
  history: "Add an item to the history: type the start of its id or title.",
  text: "Type what to search for.",
  features: "Give features as NUMBER:VALUE, separated by spaces.",
  vector: "Paste a vector: its numbers, separated by commas or spaces.",
};

async function ask(signal, bodies) {
  const asked_at = performance.now();
  const sides = await Promise.all(bodies.map((body) => post("retrieve", body, signal)));
  for (const side of sides) rememberTitles(side.model, side.results[0].items.map(({ id, fields }) => ({ id, title: fields?.title })));
  return { sides, bodies, round_trip_ms: performance.now() - asked_at };
}

// An empty history or text is a question too (of a cold user); an empty vector is none.
function isAsked(model, query) {
  const kind = model.query.kind;
  if (kind === "vector") return (query.vector ?? []).length > 0;
  return kind !== "features" || (query.features?.indices.length ?? 0) > 0;
}

// "/" goes to the query.
function useShortcut() {
  useEffect(() => {
    const press = (event) => {
      if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
      event.preventDefault();
      document.querySelector(".query input, .query textarea")?.focus();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

// What a newcomer's Lab asks: a held-out query where they may be read, else some items of the catalogue.
//
// {relevant: Set or null, at: [place, number] or null, next: function or null}: what is known of the query that the address has. Where it has
// none, use(query) is called with the first one; {problem, again} say where that failed.
function useFirstQuestion(model, params, use) {
  const asked = queryOf(params) && params.get("q");
  const version = params.get("version") ?? model.version;
  const find = async (signal, name, version, isNeeded) => {
    const queries = await heldOut(signal, name, version);
    return { queries, first: !isNeeded ? null : (queries[0]?.query ?? (await someItems(signal, model))) };
  };
  const { value, problem, again } = useAnswer(find, [model.name, version, asked === null], { retry: true });
  useLayoutEffect(() => {
    if (asked === null && value?.first) use(value.first);
  }, [asked, value]);

  const queries = value?.queries ?? [];
  const place = queries.findIndex((one) => JSON.stringify(one.query) === asked);
  return {
    relevant: place < 0 ? null : new Set(queries[place].relevant),
    at: place < 0 ? null : [place + 1, queries.length],
    next: queries.length > (place < 0 ? 0 : 1) ? () => use(queries[(place + 1) % queries.length].query) : null,
    problem: asked === null ? problem : null,
    again,
  };
}

async function heldOut(signal, name, version) {
  if (!isOpen()) return [];
  const key = `${name} ${version}`;
  if (!heldout.has(key)) {
    const found = get(`models/${encodeURIComponent(name)}/heldout`, { limit: QUERIES, version }, signal, { key: "admin", quiet: true });
    heldout.set(key, (await found.catch((problem) => (problem.status === 0 ? Promise.reject(problem) : { queries: [] }))).queries);
  }
  return heldout.get(key);
}

async function someItems(signal, model) {
  const kind = model.query.kind;
  if (kind !== "history" && kind !== "text") return {};
  const { items } = await get(`models/${encodeURIComponent(model.name)}/items`, { prefix: "", limit: SOME_ITEMS }, signal);
  if (kind === "text") return { text: items.find((item) => item.title)?.title ?? "" };
  return { history: items.map((item) => item.id) };
}
