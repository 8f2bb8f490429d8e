// How a query is searched: beam, m, switches, those of side B where two are compared; and filters, with how many items each would leave.

import { html, useState } from "../../core/preact.js";
import { get } from "../../core/api.js";
import { count } from "../../core/format.js";
import { useAnswer } from "../../core/latest.js";
import { loadedVersions } from "../../core/models.js";
import { conditionsOf, sideB } from "../../core/query.js";
import { Busy, Button, ProblemView, Select, Slider, Toggle } from "../../core/ui.js";

const FEW = 8;
const STEP = 5; // "More" shows so many times as many
const MOST = 1000;

export function SearchPanel({ model, params, set }) {
  const { search } = model;
  const compared = params.get("side") === "b";
  const value = (name, otherwise) => Number(params.get(name)) || otherwise;
  const compare = () => set(compared ? { side: null, "b.version": null, "b.beam": null, "b.live": null, "b.rerank": null } : firstSideB(model, params));

  return html`<section class="panel" aria-labelledby="search-title">
    <div class="toolbar"><h2 id="search-title">Search${compared && " A"}</h2>
      <${Button} kind="end" onClick=${compare} aria-pressed=${String(compared)}>${compared ? "Stop comparing" : "Compare A | B"}</${Button}></div>
    <${Slider} label="Beam" hint=${`default ${search.beam_size}`} value=${value("beam", search.beam_size)} min=${1} max=${search.max_beam_size} onInput=${(beam) => set({ beam }, true)} />
    <${Slider} label="m" hint="results wanted" value=${value("m", search.m)} min=${1} max=${search.max_m} onInput=${(m) => set({ m }, true)} />
    <label class="inline"><span>Least score</span><input type="number" min="0" max="1" step="0.01" placeholder="0" value=${params.get("min") ?? ""}
      onInput=${(event) => event.target.validity.valid && set({ min: event.target.value }, true)} /></label>
    <${Switches} model=${model} params=${params} prefix="" set=${set} />
    ${compared && html`<h2>Search B</h2>
      <${Slider} label="Beam of B" value=${value("b.beam", search.beam_size)} min=${1} max=${search.max_beam_size} onInput=${(beam) => set({ "b.beam": beam }, true)} />
      <${Select} label="Version of B" value=${params.get("b.version") ?? ""} options=${[["", `default (${model.version})`], ...loadedVersions(model)]}
        onChange=${(version) => set({ "b.version": version })} />
      <${Switches} model=${model} params=${sideB(params)} prefix="b." set=${set} />`}
  </section>`;
}

function Switches({ model, params, prefix, set }) {
  const rerank = params.get("rerank");
  const ranker = model.ranker;
  return html`<div class="toolbar">
    ${model.live && html`<${Toggle} label="Live items" hint=${model.live.items || null} checked=${params.get("live") !== "0"} onChange=${(on) => set({ [`${prefix}live`]: on ? null : "0" })} />`}
    ${ranker && html`<${Toggle} label="Re-rank" checked=${rerank !== null} onChange=${(on) => set({ [`${prefix}rerank`]: on ? ranker.depth : null })} />`}
    ${ranker && rerank !== null && html`<label class="inline"><span>Depth</span><input type="number" min="1" max=${ranker.max_depth}
      value=${rerank === "1" ? ranker.depth : rerank} onChange=${(event) => event.target.value !== "" && event.target.validity.valid && set({ [`${prefix}rerank`]: event.target.value })} /></label>`}
  </div>`;
}

// B begins as A with four times the beam: what a wider search would add.
function firstSideB(model, params) {
  const beam = Number(params.get("beam") ?? model.search.beam_size);
  const changes = { side: "b", "b.beam": Math.min(4 * beam, model.search.max_beam_size) };
  for (const name of ["version", "live", "rerank"]) changes[`b.${name}`] = params.get(name);
  return changes;
}

export function Facets({ model, params, set, ready }) {
  const columns = (model.fields ?? []).filter((name) => name !== "id" && name !== "title");
  const filter = conditionsOf(params, "filter");
  const without = conditionsOf(params, "without");
  const change = (name, conditions, column, condition) => {
    const next = { ...conditions, [column]: condition };
    if (condition === null || condition.length === 0) delete next[column];
    set({ [name]: Object.keys(next).length ? JSON.stringify(next) : null });
  };
  const active = Object.keys(filter).length + Object.keys(without).length;

  return html`<section class="panel facets" aria-labelledby="facets-title">
    <div class="toolbar"><h2 id="facets-title">Filters</h2>
      ${active > 0 && html`<${Button} kind="quiet end" onClick=${() => set({ filter: null, without: null })}>Clear</${Button}>`}</div>
    ${columns.length === 0 && html`<p class="hint">The item table has no columns to filter by.</p>`}
    ${columns.map((column, place) => html`<${Facet} key=${column} model=${model} column=${column} version=${params.get("version")}
      live=${params.get("live") === "0" ? false : null} filter=${filter} without=${without}
      open=${place === 0 || column in filter || column in without} ready=${ready}
      onFilter=${(condition) => change("filter", filter, column, condition)} onWithout=${(condition) => change("without", without, column, condition)} />`)}
  </section>`;
}

const given = (conditions) => (Object.keys(conditions).length ? conditions : null);

function Facet({ model, column, version, live, filter, without, open, ready, onFilter, onWithout }) {
  const [opened, setOpened] = useState(open);
  const [limit, setLimit] = useState(FEW);
  const asked = { column, version, limit, live, filter: given(filter), exclude_filter: given(without) };
  const ask = (signal) => get(`models/${encodeURIComponent(model.name)}/facets`, asked, signal);
  const { value, problem, busy, again } = useAnswer(ask, opened && ready ? [model.name, asked] : null, { retry: true });
  const included = filter[column] ?? null;
  const excluded = without[column] ?? [];
  const chosen = (Array.isArray(included) ? included.length : included ? 1 : 0) + excluded.length;

  return html`<details open=${opened} onToggle=${(event) => setOpened(event.target.open)}>
    <summary><bdi>${column}</bdi>${chosen > 0 && html` <span class="badge good">${chosen}</span>`}</summary>
    <${ProblemView} problem=${problem} again=${again} />
    ${!value && busy && html`<${Busy}>Counting…</${Busy}>`}
    ${value?.histogram && html`<${Range} column=${column} facet=${value} range=${Array.isArray(included) ? null : included} onFilter=${onFilter} />`}
    ${value?.values && html`<${Values} column=${column} facet=${value} included=${Array.isArray(included) ? included : []} excluded=${excluded} onFilter=${onFilter} onWithout=${onWithout} />`}
    ${value?.values.length < (value?.distinct ?? 0) && limit < MOST && html`<${Button} kind="quiet" onClick=${() => setLimit(Math.min(STEP * limit, MOST))}>More</${Button}>`}
  </details>`;
}

function Values({ column, facet, included, excluded, onFilter, onWithout }) {
  const most = Math.max(1, ...facet.values.map((one) => one.count));
  const gone = included.concat(excluded).filter((value) => !facet.values.some((one) => one.value === value)); // chosen, but not among the listed
  const rows = facet.values.concat(gone.map((value) => ({ value, count: null })));
  const flip = (list, value) => (list.includes(value) ? list.filter((one) => one !== value) : list.concat([value]));
  return html`<ul class="values">
    ${rows.map(({ value, count: items }) => html`<li key=${String(value)} class=${excluded.includes(value) ? "excluded" : ""}>
      <label class="toggle"><input type="checkbox" checked=${included.includes(value)} onChange=${() => onFilter(flip(included, value))} />
        <bdi class="ellipsis">${String(value).trim() || "(empty)"}</bdi></label>
      <span class="numeric dim">${count(items)}</span>
      <button type="button" class="cross" aria-pressed=${String(excluded.includes(value))} aria-label=${`Leave out ${column} ${value}`} title="Leave out"
        onClick=${() => onWithout(flip(excluded, value))}>−</button>
      <progress class="count" max=${most} value=${items ?? 0} aria-hidden="true"></progress>
    </li>`)}
  </ul>`;
}

function Range({ column, facet, range, onFilter }) {
  const take = (end) => (event) => {
    const next = { ...range, [end]: event.target.value === "" ? undefined : Number(event.target.value) };
    onFilter(next.min === undefined && next.max === undefined ? null : next);
  };
  return html`<div class="toolbar">
    <label class="inline"><span>from</span><input type="number" step="any" aria-label=${`${column}, least`} placeholder=${facet.min} value=${range?.min ?? ""} onChange=${take("min")} /></label>
    <label class="inline"><span>to</span><input type="number" step="any" aria-label=${`${column}, most`} placeholder=${facet.max} value=${range?.max ?? ""} onChange=${take("max")} /></label>
  </div>`;
}
