// The series of a day as small charts, each with what it means where it is empty.

import { html } from "../../core/preact.js";
import { Chart } from "../../core/chart.js";
import { number, share } from "../../core/format.js";
import { Empty } from "../../core/ui.js";
import { newest } from "./said.js";

const MOST_MARKS = 12;

export function Charts({ health }) {
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
