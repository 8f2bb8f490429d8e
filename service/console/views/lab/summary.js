// What an answer was and cost: how many items, whether the search was complete, where its milliseconds went. And what may be done with it.

import { html, useEffect, useState } from "../../core/preact.js";
import { go } from "../../core/address.js";
import { count, ms, percent, plural, share } from "../../core/format.js";
import { queryParams } from "../../core/query.js";
import { Badge, CopyButton, ItemBox } from "../../core/ui.js";
import { compared } from "./comparison.js";
import { asCurl, asPython } from "./copies.js";

const CALM_MS = 600;

export function Summary({ model, params, value, question, busy }) {
  const { sides, bodies } = value;
  const lists = sides.map((side) => side.results[0].items);
  const overlap = lists.length === 2 && compared(...lists).overlap;
  const most = Math.max(...lists.map((items) => items.length), 1);
  const found = question.relevant && lists[0].filter((item) => question.relevant.has(item.id)).length;
  const whyNot = (item) => {
    const to = queryParams(params);
    to.set("item", item.id);
    go("whynot", to);
  };
  const said = `${plural(lists[0].length, "result")}${sides[0].results[0].complete ? "" : ", incomplete"}${overlap === false ? "" : `, ${overlap} in both`}`;

  return html`<div class="summary panel" aria-busy=${String(busy)}>
    <div class="toolbar">
      <strong>${plural(lists[0].length, "result")}</strong>
      ${sides.map((side, place) => html`<${Status} name=${sides.length > 1 ? "AB"[place] : ""} result=${side.results[0]} body=${bodies[place]} search=${model.search} />`)}
      ${overlap !== false && html`<${Badge} kind="info" title="Items that both lists have, of the longer one">overlap ${overlap} of ${most} (${percent(overlap / most)})</${Badge}>`}
      ${found !== null && html`<span class="dim" title="Of the items that this held-out query wants">${found} of ${question.relevant.size} relevant found (recall ${share(found / question.relevant.size, 2)})</span>`}
      <span class="end toolbar"><${CopyButton} text=${() => asCurl(bodies)}>Copy as curl</${CopyButton}><${CopyButton} text=${() => asPython(bodies)}>Copy as Python</${CopyButton}></span>
    </div>
    ${sides.map((side, place) => html`<${Timing} name=${sides.length > 1 ? "AB"[place] : ""} timing=${side.timing} round_trip_ms=${sides.length > 1 ? null : value.round_trip_ms} engine=${side.engine} />`)}
    <div class="whynot"><${ItemBox} model=${model} label="Why is an item not here?" hidden=${true} placeholder="Why is … not here? Type an id or a title" onChoose=${whyNot} /></div>
    <${Said} text=${said} />
  </div>`;
}

function Status({ name, result, body, search }) {
  const asked = body.beam_size ?? search.beam_size;
  return html`${name && html`<b>${name}</b>`}
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
    ${name && html`<b>${name}</b>`}
    <b>${ms(timing.ms_per_query)} per query</b>
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
