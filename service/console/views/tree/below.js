// What is below a node: values that are typical of its items, and some of them.

import { html } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { count, number, percent } from "../../core/format.js";
import { Badge, Bar, Button, Empty, Table } from "../../core/ui.js";

export function Typical({ shown }) {
  const columns = Object.entries(shown.values).filter(([, values]) => values.length);
  return html`<section class="panel"><h2>${shown.level ? "Typical of its items" : "Most frequent values"}</h2>
    ${columns.length === 0 && html`<${Empty}>${shown.item_count ? "The item table has no column whose values items share." : "Nothing is below."}</${Empty}>`}
    ${columns.map(([name, values]) => html`<section key=${name}><h3><bdi>${name}</bdi></h3><${Table} caption=${`Typical values of ${name}`} rows=${values} columns=${[
      { label: "Value", cell: (row) => html`<bdi>${String(row.value).trim() || "(empty)"}</bdi>` },
      { label: "", cell: (row) => html`<${Bar} value=${row.share} />` },
      { label: "Share", numeric: true, cell: (row) => percent(row.share, 1) },
      ...(shown.level ? [{ label: "Lift", numeric: true, cell: (row) => `× ${number(row.lift, 2)}` }] : []),
    ]} /></section>`)}
    ${columns.length > 0 && shown.level > 0 && html`<p class="hint">Lift: how many times the value's share in the catalogue.</p>`}
    ${columns.length > 0 && shown.looked_at < shown.item_count && html`<p class="hint">Counted from ${count(shown.looked_at)} of ${count(shown.item_count)} items.</p>`}
  </section>`;
}

// onMore: lists more of them; false where it did.
export function Items({ model, version, shown, link, onMore }) {
  const { items, item_count } = shown;
  const goesWith = (id) => href("lab", { model: model.name, version, q: JSON.stringify({ history: [id], exclude_seen: true }) });
  return html`<section class="panel"><h2>Items</h2>
    ${items.length === 0 && html`<${Empty}>No item is below this node now.</${Empty}>`}
    ${items.length > 0 && html`<${Table} caption="Items below the node" rows=${items} rowKey=${(row) => row.id} columns=${[
      { label: "Id", cell: (row) => html`<a href=${link({ item: row.id, node: null })}><bdi class="mono">${row.id}</bdi></a>` },
      { label: "Title", cell: (row) => html`<bdi class="dim">${row.title}</bdi>` },
      { label: "", cell: (row) => html`${row.live && html`<${Badge} kind="info">live</${Badge}>`} ${!row.eligible && html`<${Badge} kind="warn">removed</${Badge}>`}` },
      ...(model.query.kind === "history" ? [{ label: "", cell: (row) => html`<a href=${goesWith(row.id)}>what goes with it</a>` }] : []),
    ]} />`}
    ${items.length < item_count && html`<div class="toolbar">${onMore && html`<${Button} onClick=${onMore}>Show more items</${Button}>`}
      <span class="hint">${count(items.length)} of ${count(item_count)}: live ones first, the others at even distances.</span></div>`}
  </section>`;
}
