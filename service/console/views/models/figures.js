// How a model measured on test users when it was trained; all else of its metrics as they are in the bundle.

import { html } from "../../core/preact.js";
import { href } from "../../core/address.js";
import { count, ms, share } from "../../core/format.js";
import { Table } from "../../core/ui.js";

const MOST_ROWS = 60;
const NAMES = { raw: "with items of the history", seen_excluded: "without items of the history" };
const COLUMNS = [["recall", "Recall"], ["precision", "Precision"], ["ndcg", "nDCG"]];

export function Figures({ model }) {
  const test = model.metrics?.test;
  const groups = Array.isArray(test) ? [["", test]] : Object.entries(test ?? {}).filter(([, rows]) => Array.isArray(rows));
  return html`<section class="panel"><h2>At its training</h2>
    ${groups.length === 0 && html`<p class="dim">The bundle has no figures of test queries. <a href=${href("frontier", { model: model.name })}>Measure its frontier now</a>.</p>`}
    ${groups.map(([name, rows]) => html`<h3>Test queries${name && `, ${NAMES[name] ?? name}`}</h3>
      <${Table} caption=${`Test figures ${NAMES[name] ?? name}`} rows=${rows.slice(0, MOST_ROWS)} columns=${[
        { label: "Beam", numeric: true, cell: (row) => count(row.beam_size) },
        { label: "m", numeric: true, cell: (row) => count(row.m) },
        ...COLUMNS.filter(([key]) => rows.some((row) => typeof row[key] === "number")).map(([key, label]) => ({ label, numeric: true, cell: (row) => share(row[key]) })),
        { label: "Time a query", numeric: true, cell: (row) => ms(row.ms_per_query) },
      ]} />`)}
    ${model.metrics && html`<details><summary>All metrics of the bundle</summary><pre class="models-all" tabindex="0">${JSON.stringify(model.metrics, null, 1)}</pre></details>`}
  </section>`;
}
