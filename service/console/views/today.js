// Today: how the model fared over the last 24 hours, for whoever looks each morning. What is wrong comes first, in a sentence.

import { html, useEffect } from "../core/preact.js";
import { href } from "../core/address.js";
import { get } from "../core/api.js";
import { count, duration, moment, number } from "../core/format.js";
import { useAnswer } from "../core/latest.js";
import { Badge, Bar, Busy, Empty, ProblemView, Table } from "../core/ui.js";
import { Charts } from "./today/charts.js";
import { said } from "./today/said.js";

export const title = "Today";
export const about = "the last 24 hours";

const EVERY_MS = 30_000;
const MOST_EVENTS = 20;

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
    <section class=${`panel today-said ${kind}`} aria-live="polite"><p>${sentence}</p>
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
