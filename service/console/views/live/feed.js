// What was put and deleted last: the end of the changes feed, which is an administrator's.

import { html, useState } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { get } from "../../core/api.js";
import { count, moment } from "../../core/format.js";
import { useAnswer } from "../../core/latest.js";
import { Badge, Button, Empty, ProblemView, Table } from "../../core/ui.js";

const MOST = 50;

// round: another number when something was changed here
export function Feed({ model, round }) {
  const [wanted, setWanted] = useState(false);
  const { value, problem, busy, again } = useAnswer((signal) => last(model, signal), wanted ? [model.name, round] : null);
  return html`<section class="panel"><div class="toolbar"><h2>Last changes</h2>
      <span class="end"></span><${Button} disabled=${busy} onClick=${() => (wanted ? again() : setWanted(true))}>${wanted ? "Read again" : "Read the feed"}</${Button}></div>
    ${!wanted && html`<p class="hint">Changes show what customers did. Where the service has keys, they need an admin key.</p>`}
    ${problem && html`<${ProblemView} problem=${problem} again=${again} />`}
    ${value?.length === 0 && html`<${Empty}>Nothing was ever put or deleted.</${Empty}>`}
    ${value?.length > 0 && html`<${Table} caption="Last changes" rows=${value} rowKey=${(row) => row.sequence} columns=${[
      { label: "Operation", numeric: true, cell: (row) => count(row.sequence) },
      { label: "", cell: (row) => html`<${Badge} kind=${row.kind === "delete" ? "warn" : "good"}>${row.kind}</${Badge}>` },
      { label: "Item", cell: (row) => html`<a href=${href("live", { model: model.name, item: row.id })}><bdi class="mono">${row.id}</bdi></a>` },
      { label: "Title", cell: (row) => html`<bdi class="dim">${row.fields?.title}</bdi>` },
      { label: "Evidence", cell: (row) => evidence(row) },
      { label: "When", cell: (row) => moment(row.at) },
    ]} />`}
  </section>`;
}

async function last(model, signal) {
  const path = `models/${encodeURIComponent(model.name)}/changes`;
  const { sequence } = await get(path, { after: 0, limit: 1 }, signal, { key: "admin" });
  const { changes } = await get(path, { after: Math.max(0, sequence - MOST), limit: MOST }, signal, { key: "admin" });
  return changes.reverse();
}

function evidence(row) {
  return [row.events?.length && `${row.events.length} events`, row.like?.length && `like ${row.like.length}`, row.text && "text"].filter(Boolean).join(", ") || "–";
}
