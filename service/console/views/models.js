// Models: what each is, which of its versions serve, and how it measured at its training. Versions are loaded, pinned and dropped here.

import { html } from "../core/preact.js";
import { href } from "../core/address.js";
import { count } from "../core/format.js";
import { useModels } from "../core/models.js";
import { Badge, Table } from "../core/ui.js";
import { Facts } from "./models/facts.js";
import { Figures } from "./models/figures.js";
import { STATES, Versions } from "./models/versions.js";

export const title = "Models";
export const about = "versions, shapes, figures at training";

export default function View({ model }) {
  const { models } = useModels();
  return html`
    ${models?.length > 1 && html`<section class="panel"><${Table} caption="All models" rows=${models} rowKey=${(one) => one.name} rowClass=${(one) => (one.name === model.name ? "models-own" : "")} columns=${[
      { label: "Model", cell: (one) => html`<a href=${href("models", { model: one.name })} aria-current=${one.name === model.name ? "true" : undefined}><bdi>${one.name}</bdi></a>` },
      { label: "State", cell: (one) => html`<${Badge} kind=${STATES[one.state] ?? ""}>${one.state}</${Badge}>` },
      { label: "Serves", numeric: true, cell: (one) => one.version ?? "–" },
      { label: "Items", numeric: true, cell: (one) => count(one.tree?.items) },
      { label: "Queries", cell: (one) => one.query?.kind ?? "–" },
      { label: "Engine", cell: (one) => one.engine ?? "–" },
      { label: "", cell: (one) => html`<bdi class="dim">${one.reason}</bdi>` },
    ]} /></section>`}
    <${Versions} model=${model} />
    ${model.query && html`<${Facts} model=${model} /><${Figures} model=${model} />`}`;
}
