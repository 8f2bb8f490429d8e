// How one side searches: its version, beam, re-ranking, live items.

import { html } from "../../core/preact.js";
import { loadedVersions } from "../../core/models.js";
import { Select, Toggle } from "../../core/ui.js";

// prefix: of its parameters in the address, as core/query.js has them
export function Side({ name, model, params, prefix, change }) {
  const beam = params.get(`${prefix}beam`) ?? model.search.beam_size;
  const versions = [["", `${model.version} (default)`], ...loadedVersions(model)];
  return html`<fieldset class="replays-side"><legend>${name}</legend>
    <${Select} label="Version" value=${params.get(`${prefix}version`) ?? ""} options=${versions} onChange=${(value) => change(`${prefix}version`, value)} />
    <label class="select"><span>Beam</span><input class="replays-m" type="number" min="1" max=${model.search.max_beam_size} value=${beam} onChange=${(event) => change(`${prefix}beam`, event.target.value)} /></label>
    ${model.ranker && html`<${Toggle} label="re-ranked" checked=${params.has(`${prefix}rerank`)} onChange=${(on) => change(`${prefix}rerank`, on ? "1" : null)} />`}
    ${model.live && html`<${Toggle} label="live items" checked=${params.get(`${prefix}live`) !== "0"} onChange=${(on) => change(`${prefix}live`, on ? null : "0")} />`}
  </fieldset>`;
}
