// How a query is searched: beam, m and the switches, and those of side B where two are compared.

import { html } from "../../core/preact.js";
import { loadedVersions } from "../../core/models.js";
import { sideB } from "../../core/query.js";
import { Button, Select, Slider, Toggle } from "../../core/ui.js";

export function SearchPanel({ model, params, set }) {
  const { search } = model;
  const compared = params.get("side") === "b";
  const value = (name, otherwise) => Number(params.get(name) ?? otherwise);
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
