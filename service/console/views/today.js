// Today: how the model fared over the last 24 hours, for whoever looks each morning. What is wrong comes first, in a sentence.

import { html, useEffect } from "../core/preact.js";
import { href } from "../core/address.js";
import { get } from "../core/api.js";
import { Chart } from "../core/chart.js";
import { count, duration, moment, number, plural, share } from "../core/format.js";
import { useAnswer } from "../core/latest.js";
import { Badge, Bar, Busy, Empty, ProblemView, Table } from "../core/ui.js";

export const title = "Today";
export const about = "the last 24 hours";

const EVERY_MS = 30_000;
const MOST_EVENTS = 20;
const MOST_MARKS = 12; // of versions in the charts

export default function View({ model }) {
  const work = (signal) => get(`models/${encodeURIComponent(model.name)}/health`, {}, signal, { key: "admin" });
  const { value: health, problem, busy, again } = useAnswer(work, [model.name]);
  useEffect(() => {
    const timer = setInterval(() => document.visibilityState === "visible" && !problem && again(), EVERY_MS);
    return () => clearInterval(timer);
  }, [again]);
  if (problem) return html`<${ProblemView} problem=${problem} again=${again} />${problem.status === 403 && html`<p class="hint">The figures name ids that customers asked for, so a service with keys shows them to
    administrators alone (<code>ESPALIER_ADMIN_KEYS</code>). <a href="metrics">Metrics</a> are there without a key.</p>`}`;
  if (!health) return html`<${Busy} busy=${busy}>Reading the last day…</${Busy}>`;
  const { kind, sentence } = said(health);
  const firing = health.alerts.filter((alert) => alert.firing);
  return html`
    <section class=${`panel verdict today-said ${kind}`} aria-live="polite"><p>${sentence}</p>
      <p class="hint">${health.at.length > 1 && `Since ${moment(health.since)}, ${duration(health.now - health.since)} ago; read at ${moment(health.now)} and again every ${EVERY_MS / 1000} s.`}${" "}
        Version ${health.version ?? "–"} serves.</p></section>
    ${firing.length > 0 && html`<section class="panel"><h2>Alerts</h2><ul class="today-alerts">${firing.map((alert) => html`<li key=${alert.name}>
      <${Badge} kind="bad">${alert.name.replace(/^Espalier/, "")}</${Badge}> ${alert.what} <strong>${number(alert.value)}</strong> <span class="dim">against ${number(alert.threshold)}${alert.since ? `, since ${moment(alert.since)}` : ""}</span></li>`)}</ul></section>`}
    <${Charts} health=${health} />
    <div class="columns">
      <section class="panel"><h2>Unknown ids asked for most</h2><${Unknown} found=${health.unknown_ids} /></section>
      <section class="panel"><h2>What happened</h2>
        ${health.events.length === 0 ? html`<p class="dim">No version came or went, and no worker was replaced.</p>` : html`<ul class="today-events">${[...health.events].reverse().slice(0, MOST_EVENTS).map((event) => html`<li><time class="dim">${moment(event.at)}</time> <bdi>${event.what}</bdi></li>`)}</ul>`}
        <p><a href=${href("models", { model: model.name })}>Versions and live catalogue</a></p></section>
    </div>
    <details class="panel"><summary>All ${count(health.alerts.length)} conditions</summary><${Table} caption="Conditions of alerts" rows=${health.alerts} rowKey=${(alert) => alert.name} columns=${[
      { label: "Alert", cell: (alert) => html`<span class="mono">${alert.name}</span>` },
      { label: "", cell: (alert) => html`<${Badge} kind=${alert.firing ? "bad" : "good"}>${alert.firing ? "holds" : "well"}</${Badge}>` },
      { label: "What", cell: (alert) => alert.what },
      { label: "Value", numeric: true, cell: (alert) => number(alert.value) },
      { label: "Threshold", numeric: true, cell: (alert) => number(alert.threshold) },
    ]} /></details>`;
}

function Unknown({ found }) {
  if (found.length === 0) return html`<${Empty}>Every id that customers asked for is in the catalogue. A broken feed would show here: ids of new items, of another shop, or in another form.</${Empty}>`;
  const most = found[0].count;
  return html`<${Table} caption="Unknown ids" rows=${found} rowKey=${(row) => row.id} columns=${[
    { label: "Id", cell: (row) => html`<bdi class="mono">${row.id}</bdi>` },
    { label: "", cell: (row) => html`<${Bar} value=${row.count / most} kind="info" />` },
    { label: "Times", numeric: true, cell: (row) => count(row.count) },
  ]} />`;
}

// The state of a model in a sentence, from the newest figures: {kind: "good" | "warn" | "bad", sentence}
function said(health) {
  const firing = health.alerts.filter((alert) => alert.firing);
  const load = newest(health, "requests_per_s");
  const busy = load === null ? "" : load > 0 ? `, ${number(load, 2)} requests a second` : ", and nobody asks now";
  const shed = newest(health, "shed_per_s") ?? 0;
  const failed = newest(health, "errors_per_s") ?? 0;
  if (firing.length > 0) {
    const names = firing.slice(0, 3).map((alert) => alert.what.replace(/\.$/, "").toLowerCase()).join("; ");
    return { kind: "bad", sentence: `${plural(firing.length, "alert holds", "alerts hold")}: ${names}${firing.length > 3 ? "; and others" : ""}.` };
  }
  if (failed > 0) return { kind: "warn", sentence: `${number(failed, 2)} requests a second fail (5xx)${busy}.` };
  if (shed > 0) return { kind: "warn", sentence: `${number(shed, 2)} requests a second are refused (429)${busy}: the service is near its capacity.` };
  if (health.alerts.every((alert) => alert.value === null)) return { kind: "warn", sentence: `Nothing is watched: no condition of an alert has a value${busy}.` };
  return { kind: "good", sentence: `All is well: ${recall(health)}${busy}.` };
}

function recall(health) {
  const now = newest(health, "recall");
  if (now === null) return "recall is not watched (ESPALIER_PROBE_PER_S=1 would replay a held-out query a second)";
  const expected = newest(health, "expected_recall");
  const away = expected === null ? null : now - expected;
  return `recall@${health.recall_m} ${share(now)}${away === null ? "" : Math.abs(away) < 0.0015 ? " as expected" : ` against ${share(expected)} expected`}`;
}

function newest(health, name) {
  const values = health.series[name] ?? [];
  for (let place = values.length - 1; place >= 0; place--) if (values[place] !== null) return values[place];
  return null;
}

// The series of a day as small charts, each with what it means where it is empty.
function Charts({ health }) {
  const { at, series } = health;
  const marks = health.events.filter((event) => /serves|default/.test(event.what)).slice(-MOST_MARKS).map((event) => ({ x: event.at, label: /(\d+) is the default/.test(event.what) ? `v${/(\d+)/.exec(event.what)[1]}` : "" })).filter((mark) => mark.label);
  const line = (name, label, more = {}) => ({ label, values: series[name] ?? at.map(() => null), ...more });
  const chart = (name, lines, format, range = [0, null]) => html`<section class="panel"><${Chart} title=${name} x=${at} time=${true} series=${lines} format=${format} range=${range} marks=${marks} height=${150} /></section>`;
  if (at.length < 2) return html`<${Empty}>The service has just begun; the first minute is not over.</${Empty}>`;
  const perSecond = (value) => number(value, 2);
  const watched = newest(health, "recall") !== null;
  const live = (newest(health, "live_items") ?? 0) > 0 || (newest(health, "live_tombstones") ?? 0) > 0;
  return html`<div class="columns today-charts">
    ${watched
      ? chart(`Recall@${health.recall_m} of the probe`, [line("recall", "recall"), line("expected_recall", "expected", { dash: true, colour: 5 })], (value) => share(value, 2), around(series.recall, series.expected_recall))
      : html`<section class="panel"><h2>Recall</h2><${Empty}>Nobody replays held-out queries, so a loss of recall would not show. Start the service with <code>ESPALIER_PROBE_PER_S=1</code>.</${Empty}></section>`}
    ${chart("Latency of requests", [line("p50_ms", "p50"), line("p99_ms", "p99", { colour: 3 })], (value) => `${number(value, 2)} ms`)}
    ${chart("Requests a second", [line("requests_per_s", "customers"), line("background_per_s", "background", { colour: 5 })], perSecond)}
    ${chart("Not as asked, a second", [line("shed_per_s", "refused"), line("errors_per_s", "failed", { colour: 3 }), line("degraded_per_s", "smaller beam", { colour: 2 }), line("incomplete_per_s", "incomplete", { colour: 4 })], perSecond)}
    ${chart("Unknown ids a second", [line("unknown_ids_per_s", "unknown ids", { colour: 4 })], perSecond)}
    ${chart("Share of the time that engines search", [line("engine_busy", "busy")], (value) => share(value, 2), [0, 1])}
    ${live && chart("Live items", [line("live_items", "live"), line("live_tombstones", "deleted", { colour: 3 })], (value) => number(value, 6))}
    ${live && chart("Live items found by their own evidence", [line("live_canary_recall", "found"), line("live_displacement", "recall taken from others", { colour: 3 })], (value) => share(value, 2), [0, 1])}
  </div>`;
}

// The range of shares with some room, so that noise does not look like a landslide.
function around(...values) {
  const known = values.flat().filter((value) => value !== null);
  return [Math.max(0, Math.floor(20 * (Math.min(...known) - 0.03)) / 20), Math.min(1, Math.ceil(20 * (Math.max(...known) + 0.03)) / 20)];
}
