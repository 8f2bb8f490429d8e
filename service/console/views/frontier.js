// Frontier: what a wider beam finds and costs, measured now on held-out queries and drawn as it comes.

import { html, useEffect } from "../core/preact.js";
import { changed, go } from "../core/address.js";
import { lines } from "../core/api.js";
import { Chart } from "../core/chart.js";
import { smallestBeam } from "../core/models.js";
import { count, ms, percent, share } from "../core/format.js";
import { useRows } from "../core/running.js";
import { Badge, Busy, Button, Empty, ProblemView, Table } from "../core/ui.js";

export const title = "Frontier";
export const about = "recall against time, over beams";

const STEPS = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const MOST_BEAMS = 32;
const LEFT_MS = [0.1, 0.2, 0.5, 1, 2, 5];
const QUERIES = [64, 256, 1000];

export default function View({ params, model }) {
  const settings = settingsOf(params, model);
  const { rows, problem, busy, start, cancel } = useRows((signal, take) => measured(model, settings, signal, take));
  useEffect(() => (start(), cancel), [model.name, JSON.stringify(settings)]);

  const change = (name, value) => go("frontier", changed(params, { [name]: value }), { replace: true });
  return html`
    <form class="panel frontier-ask" onSubmit=${(event) => event.preventDefault()}>
      <label class="field"><span>Beams</span><input type="text" class="mono" inputmode="numeric" value=${settings.beams.join(", ")}
        onChange=${(event) => change("beams", numbers(event.target.value, model.search.max_beam_size).join(","))} /></label>
      <label class="field"><span>Results (m)</span><input type="number" min="1" max=${model.search.max_m} value=${settings.m}
        onChange=${(event) => change("m", within(event.target.value, model.search.max_m))} /></label>
      <label class="field"><span>Held-out queries</span><select value=${settings.queries} onChange=${(event) => change("queries", event.target.value)}>
        ${QUERIES.map((queries) => html`<option value=${queries} selected=${queries === settings.queries}>${count(queries)}</option>`)}</select></label>
      <div class="toolbar">${busy ? html`<${Button} onClick=${cancel}>Cancel</${Button}>` : html`<${Button} kind="primary" onClick=${start}>Measure again</${Button}>`}
        <${Busy} busy=${busy}>${`Measuring beam ${settings.beams[rows.length] ?? "…"} (${rows.length} of ${settings.beams.length})`}</${Busy}></div>
    </form>
    <${ProblemView} problem=${problem} again=${start} />
    ${rows.length > 0 && html`<p class="frontier-told">${told(rows, model)}</p>
      <div class="columns">
        <section class="panel"><${ByBeam} rows=${rows} m=${settings.m} /></section>
        <section class="panel"><${ByTime} rows=${rows} m=${settings.m} /></section>
      </div>
      <section class="panel">
        <${Table} caption="Recall and time of each beam" rows=${rows} rowKey=${(row) => row.beam_size} columns=${[
          { label: "Beam", numeric: true, cell: (row) => count(row.beam_size) },
          { label: "", cell: (row) => row.default && html`<${Badge} kind="good">default</${Badge}>` },
          { label: `Recall@${settings.m}`, numeric: true, cell: (row) => html`<strong>${share(row.recall)}</strong>` },
          { label: "95 % interval", numeric: true, cell: (row) => `${share(row.recall_ci[0])} to ${share(row.recall_ci[1])}` },
          { label: "Time a query", numeric: true, cell: (row) => ms(row.ms_per_query) },
          { label: "Queries", numeric: true, cell: (row) => count(row.queries) },
        ]} />
        <div class="toolbar"><${Button} onClick=${() => save(`${model.name}-frontier.json`, "application/json", JSON.stringify(rows, null, 1))}>Save as JSON</${Button}>
          <${Button} onClick=${() => save(`${model.name}-frontier.csv`, "text/csv", csv(rows))}>Save as CSV</${Button}>
          <span class="hint">The queries see the trained version alone, and wait until nobody else wants the engine.</span></div>
      </section>`}
    ${!busy && rows.length > 0 && html`<section class="panel"><h2>What a deadline costs</h2>
      <p class="hint">A search that would end after its deadline gets a smaller beam, of those that fit into the time that the queue has left,
        down to ${count(smallestBeam(model))}. Whoever sends <code>"partial": "refuse"</code> gets 504 instead.</p>
      <${Table} caption="Recall by the time that is left" rows=${byTime(rows, model)} rowKey=${(row) => row.left_ms} columns=${[
        { label: "Left for a query", numeric: true, cell: (row) => ms(row.left_ms) },
        { label: "Beam", numeric: true, cell: (row) => (row.found ? count(row.found.beam_size) : "504") },
        { label: `Recall@${settings.m}`, numeric: true, cell: (row) => share(row.found?.recall) },
        { label: "Less than the default's", numeric: true, cell: (row) => share(row.lost) },
      ]} /></section>`}
    ${rows.length === 0 && !busy && !problem && html`<${Empty}>Nothing was measured.</${Empty}>`}`;
}

function ByBeam({ rows, m }) {
  const chosen = rows.find((row) => row.default);
  return html`<${Chart} title=${`Recall@${m} over the beam`} x=${rows.map((row) => row.beam_size)} logarithmic=${true} xLabel="Beam" xFormat=${count} format=${(value) => share(value)} height=${260}
    marks=${chosen ? [{ x: chosen.beam_size, label: "default" }] : []} series=${[series(rows)]} />`;
}

// Beams may cost the same, so rows are in the order of their time.
function ByTime({ rows, m }) {
  const sorted = [...rows].sort((one, other) => one.ms_per_query - other.ms_per_query);
  const chosen = sorted.find((row) => row.default);
  return html`<${Chart} title=${`Recall@${m} over milliseconds a query`} x=${sorted.map((row) => row.ms_per_query)} logarithmic=${true} xLabel="Time a query" xFormat=${ms} format=${(value) => share(value)} height=${260}
    marks=${chosen ? [{ x: chosen.ms_per_query, label: "default" }] : []} series=${[series(sorted)]} />`;
}

function series(rows) {
  return { label: "recall", points: true, values: rows.map((row) => row.recall), low: rows.map((row) => row.recall_ci[0]), high: rows.map((row) => row.recall_ci[1]) };
}

// What the figures say, in a sentence.
function told(rows, model) {
  const best = rows.reduce((one, other) => (other.recall > one.recall ? other : one));
  const own = rows.find((row) => row.default) ?? null;
  if (!own) return `The best so far is beam ${count(best.beam_size)}: ${share(best.recall)} in ${ms(best.ms_per_query)}.`;
  const least = rows.filter((row) => row.recall >= best.recall_ci[0]).reduce((one, other) => (other.ms_per_query < one.ms_per_query ? other : one));
  const gain = best.recall - own.recall;
  const first = `The default beam, ${count(model.search.beam_size)}, finds ${share(own.recall)} in ${ms(own.ms_per_query)}`;
  if (gain <= 0) return `${first}, and no beam that was measured finds more.`;
  return `${first}; the best, ${count(best.beam_size)}, finds ${percent(gain / best.recall, 1)} more in ${ms(best.ms_per_query)}. Beam ${count(least.beam_size)} is the quickest within the best one's interval.`;
}

// For each time that may be left the widest beam, of those up to the default one, that fits into it.
function byTime(rows, model) {
  const usual = rows.find((row) => row.default);
  const allowed = rows.filter((row) => row.beam_size >= smallestBeam(model) && row.beam_size <= model.search.beam_size);
  return LEFT_MS.map((left_ms) => {
    const found = allowed.filter((row) => row.ms_per_query <= left_ms).pop() ?? null;
    return { left_ms, found, lost: found && usual ? usual.recall - found.recall : null };
  });
}

async function measured(model, { beams, m, queries, version }, signal, take) {
  const body = { beam_size: beams, m, queries, ...(version && { version: Number(version) }) };
  for await (const row of lines(`models/${encodeURIComponent(model.name)}/frontier`, body, signal, { key: "admin" })) {
    if (row.status) throw row; // a problem document in place of a line
    take([row]);
  }
}

function settingsOf(params, model) {
  const { beam_size: usual, max_beam_size: most } = model.search;
  const own = numbers(params.get("beams") ?? "", most);
  const steps = STEPS.filter((beam) => beam <= most).concat(usual, most).sort((one, other) => one - other);
  return {
    beams: own.length ? own : [...new Set(steps)],
    m: Math.min(Number(params.get("m")) || model.search.m, model.search.max_m),
    queries: QUERIES.find((queries) => queries === Number(params.get("queries"))) ?? QUERIES[1],
    version: params.get("version"),
  };
}

function numbers(text, most) {
  const found = text.split(/[^0-9]+/).filter(Boolean).map(Number).filter((beam) => beam >= 1 && beam <= most);
  return [...new Set(found)].sort((one, other) => one - other).slice(0, MOST_BEAMS);
}

function within(text, most) {
  return String(Math.min(Math.max(Math.round(Number(text)) || 1, 1), most));
}

function csv(rows) {
  const names = ["beam_size", "m", "recall", "low", "high", "ms_per_query", "queries"];
  const cells = rows.map((row) => [row.beam_size, row.m, row.recall, ...row.recall_ci, row.ms_per_query, row.queries]);
  return [names, ...cells].map((line) => line.join(",")).join("\r\n") + "\r\n";
}

function save(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
