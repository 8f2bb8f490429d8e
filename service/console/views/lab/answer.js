// An answer, or two beside each other: what it cost, its items, and how the two lists differ. A title leads to "Why not", which says how an
// item came, too.

import { html, useEffect, useState } from "../../core/preact.js";
import { changed, go, href } from "../../core/address.js";
import { absolute, hasKey } from "../../core/api.js";
import { count, ms, number, percent, plural, share } from "../../core/format.js";
import { queryParams, sideB } from "../../core/query.js";
import { Badge, Bar, Button, CopyButton, Empty, ItemBox } from "../../core/ui.js";

const CALM_MS = 600;
const MOST_SHOWN = 200; // more are drawn on demand: a slider must stay quick

export function Summary({ model, params, value, question, busy }) {
  const { sides, bodies } = value;
  const lists = sides.map((side) => side.results[0].items);
  const overlap = lists.length === 2 && compared(...lists).overlap;
  const most = Math.max(...lists.map((items) => items.length), 1);
  const found = question.relevant && lists.map((items) => items.filter((item) => question.relevant.has(item.id)).length);
  const whyNot = (item) => go("whynot", changed(queryParams(params), { item: item.id }));
  const said = `${plural(lists[0].length, "result")}${sides[0].results[0].complete ? "" : ", incomplete"}${overlap === false ? "" : `, ${overlap} in both`}`;

  return html`<div class="summary panel" aria-busy=${String(busy)}>
    <div class="toolbar">
      <strong>${lists.map((items) => count(items.length)).join(" | ")} ${lists[0].length === 1 ? "result" : "results"}</strong>
      ${sides.map((side, place) => html`<${Status} name=${sides.length > 1 ? "AB"[place] : ""} result=${side.results[0]} body=${bodies[place]} search=${model.search} />`)}
      ${overlap !== false && html`<${Badge} kind="info" title="Items that both lists have, of the longer one">overlap ${overlap} of ${most} (${percent(overlap / most)})</${Badge}>`}
      ${found !== null && html`<span class="dim" title="Of the items that this held-out query wants">${found.join(" | ")} of ${question.relevant.size} relevant found (recall ${found.map((one) => share(one / question.relevant.size, 2)).join(" | ")})</span>`}
      <span class="end toolbar"><${CopyButton} text=${() => asCurl(bodies)}>Copy as curl</${CopyButton}><${CopyButton} text=${() => asPython(bodies)}>Copy as Python</${CopyButton}></span>
    </div>
    ${sides.map((side, place) => html`<${Timing} name=${sides.length > 1 ? "AB"[place] : ""} timing=${side.timing} round_trip_ms=${sides.length > 1 ? null : value.round_trip_ms} engine=${side.engine} />`)}
    <div class="whynot"><${ItemBox} model=${model} label="Why is an item not here?" hidden=${true} placeholder="Why is … not here? Type an id or a title" onChoose=${whyNot} /></div>
    <${Said} text=${said} />
  </div>`;
}

function Status({ name, result, body, search }) {
  const asked = body.beam_size ?? search.beam_size;
  return html`${name && html`<strong>${name}</strong>`}
    ${result.complete ? html`<${Badge} kind="good">complete</${Badge}>` : html`<${Badge} kind="warn" title="Fewer items than wanted and eligible: the beam was too small">incomplete</${Badge}>`}
    ${result.degraded && html`<${Badge} kind="warn" title="Searched with a smaller beam because of the deadline">degraded</${Badge}>`}
    ${result.beam_size !== asked && html`<${Badge} kind="info" title=${`${asked} was wanted; filters, removals or the deadline changed it`}>beam ${count(result.beam_size)}</${Badge}>`}
    ${result.unknown.length > 0 && html`<${Badge} kind="warn" title=${result.unknown.slice(0, 10).join(", ")}>${result.unknown.length} unknown</${Badge}>`}`;
}

const STAGES = [["queue_ms", "queue", 5], ["encode_ms", "encode", 2], ["search_ms", "search", 1], ["rerank_ms", "re-rank", 4], ["serialise_ms", "write", 3]]; // colours

// Where the milliseconds of the service went.
function Timing({ name, timing, round_trip_ms, engine }) {
  const stages = STAGES.map(([key, label, colour]) => [label, timing[key], colour]).filter(([, spent]) => spent > 0);
  const rest = timing.total_ms - stages.reduce((sum, [, spent]) => sum + spent, 0);
  if (rest > 0) stages.push(["other", rest, "other"]);
  return html`<div class="timing">
    ${name && html`<strong>${name}</strong>`}
    <strong>${ms(timing.ms_per_query)} per query</strong>
    <span class="split" aria-hidden="true">${stages.map(([label, spent, colour]) => html`<i key=${label} class=${`series-${colour}`} style=${{ flexGrow: spent }} title=${`${label} ${ms(spent)}`}></i>`)}</span>
    <span class="legend">${stages.map(([label, spent, colour]) => html`<span><i class=${`swatch series-${colour}`}></i>${label} ${ms(spent)}</span>`)}</span>
    <span class="dim">${ms(timing.total_ms)} in the service${timing.batch > 1 && ` · batch of ${timing.batch}`}${round_trip_ms !== null && ` · ${ms(round_trip_ms)} to here`} · ${engine}</span>
  </div>`;
}

// Says an answer to a screen reader once a slider has come to rest.
function Said({ text }) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    const timer = setTimeout(() => setSaid(text), CALM_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<span class="unseen" role="status">${said}</span>`;
}

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
  return html`<li class=${`result ${marked?.kind ?? ""}`}>
    <span class="place">${place}</span>
    ${marked && html`<span class=${`mark-${marked.kind}`} title=${marked.text}><span aria-hidden="true">${SIGNS[marked.kind](marked.by)}</span><span class="unseen">${marked.text}</span></span>`}
    <a class="name" href=${href("whynot", changed(params, { item: item.id }))}>
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

// Two lists of items: {overlap: how many are in both, places: id -> {a, b} from 1, absent where it is not in that list}.
function compared(itemsA, itemsB) {
  const places = new Map();
  itemsA.forEach(({ id }, place) => places.set(id, { a: place + 1 }));
  itemsB.forEach(({ id }, place) => places.set(id, { ...places.get(id), b: place + 1 }));
  const overlap = [...places.values()].filter((one) => one.a && one.b).length;
  return { overlap, places };
}

// What became of an item: {kind: "same" | "moved" | "new" | "lost", by: places gained, text}. side: in whose list it stands.
function mark(places, id, side) {
  const { a, b } = places.get(id);
  if (a === undefined) return { kind: "new", text: "new in B" };
  if (b === undefined) return { kind: "lost", text: "not in B" };
  const by = side === "b" ? a - b : 0;
  if (by === 0) return { kind: "same", text: "" };
  return { kind: "moved", by, text: `${by > 0 ? "up" : "down"} ${Math.abs(by)}` };
}

// The requests as commands and as a program, to be run elsewhere. A key is never copied, only its place.
function asCurl(bodies) {
  const key = hasKey("retrieve") ? ` \\\n  -H "Authorization: Bearer $ESPALIER_KEY"` : "";
  return bodies.map((body) => `curl -s ${quoted(absolute("retrieve"))} -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}\n`).join("\n");
}

function asPython(bodies) {
  const key = hasKey("retrieve") ? `, api_key=os.environ["ESPALIER_KEY"]` : "";
  const asked = bodies.map(({ queries, ...options }) => `    answer = client.retrieve(
        [${query(queries[0])}],${Object.entries(options).map(([name, value]) => `\n        ${name}=${name === "rerank" && value !== true ? value.depth : python(value)},`).join("")}
    )
    for item in answer.results[0].items:
        print(item.id, item.score, item.fields)
    print(answer.timing.ms_per_query, "ms per query")
`);
  return `${key && "import os\n\n"}from espalier_client import Client, Query\n\nwith Client(${python(absolute("").replace(/\/$/, ""))}${key}) as client:\n${asked.join("\n")}`;
}

function query({ features, ...members }) {
  const own = Object.entries(members).map(([name, value]) => `${name}=${python(value)}`);
  if (features) own.push(`features={${features.indices.map((index, place) => `${index}: ${features.values[place]}`).join(", ")}}`);
  return `Query(${own.join(", ")})`;
}

// A value of JSON as Python writes it.
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

// For a shell: nothing in it is special.
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
