// Replays: many queries over two sides, the worst first. Queries are held-out ones, of which it is known what they should find, or pasted.

import { html, useEffect, useState } from "../core/preact.js";
import { changed, go } from "../core/address.js";
import { count } from "../core/format.js";
import { loadedVersions } from "../core/models.js";
import { useRows } from "../core/running.js";
import { Busy, Button, ProblemView, Select, Toggle } from "../core/ui.js";
import { heldOut, pasted, replay } from "./replays/replay.js";
import { Table, Summary } from "./replays/results.js";

export const title = "Replays";
export const about = "many queries over A and B, the worst first";

const COUNTS = [20, 100, 500, 1000];

export default function View({ params, model }) {
  const [wanted, setWanted] = useState(0);
  const [text, setText] = useState("");
  const source = params.get("from") ?? "heldout";
  const limit = COUNTS.find((one) => one === Number(params.get("count"))) ?? COUNTS[1];

  const change = (name, value) => go("replays", changed(params, { [name]: value }), { replace: true });
  const { rows, problem, busy, start, cancel } = useRows(async (signal, take) => {
    const queries = source === "pasted" ? pasted(text, model) : await heldOut(model, params.get("version"), limit, signal);
    setWanted(queries.length);
    await replay(model, params, queries, signal, take);
  });
  useEffect(() => cancel, [model.name]);
  const m = Math.min(Number(params.get("m")) || model.search.m, model.search.max_m);

  return html`
    <form class="panel replays-ask" onSubmit=${(event) => (event.preventDefault(), start())}>
      <div class="columns">
        <${Side} name="A" model=${model} params=${params} prefix="" change=${change} />
        <${Side} name="B" model=${model} params=${params} prefix="b." change=${change} />
      </div>
      <div class="toolbar">
        <${Select} label="Queries" value=${source} options=${[["heldout", "held out from training"], ["pasted", "pasted"]]} onChange=${(value) => change("from", value === "heldout" ? null : value)} />
        ${source === "heldout" && html`<${Select} label="of them" value=${limit} options=${COUNTS.map((one) => [one, count(one)])} onChange=${(value) => change("count", value)} />`}
        <label class="select"><span>Results (m)</span><input class="replays-m" type="number" min="1" max=${model.search.max_m} value=${m} onChange=${(event) => change("m", event.target.value)} /></label>
        ${busy ? html`<${Button} onClick=${cancel}>Cancel</${Button}>` : html`<button type="submit" class="button primary">Replay</button>`}
        <${Busy} busy=${busy}>${`${count(rows.length)} of ${count(wanted)}`}</${Busy}>
      </div>
      ${source === "pasted" && html`<label class="field"><span>Queries, one a line: ids of a history, or a query as JSON</span>
        <textarea rows="6" spellcheck=${false} placeholder="libsdl2-2.0-0, libgl1" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>`}
    </form>
    <${ProblemView} problem=${problem} again=${start} />
    ${rows.length > 0 && html`<${Summary} rows=${rows} m=${m} done=${!busy} /><${Table} rows=${rows} m=${m} model=${model} params=${params} />`}
    ${rows.length === 0 && !busy && !problem && html`<p class="hint">A is what customers get now. Give B another version, beam or re-ranking, and replay: the queries that lose most by B come first.</p>`}`;
}

// How one side searches: its version, beam, re-ranking, live items. prefix: of its parameters in the address, as core/query.js has them
function Side({ name, model, params, prefix, change }) {
  const beam = params.get(`${prefix}beam`) ?? model.search.beam_size;
  const versions = [["", `${model.version} (default)`], ...loadedVersions(model)];
  return html`<fieldset class="replays-side"><legend>${name}</legend>
    <${Select} label="Version" value=${params.get(`${prefix}version`) ?? ""} options=${versions} onChange=${(value) => change(`${prefix}version`, value)} />
    <label class="select"><span>Beam</span><input class="replays-m" type="number" min="1" max=${model.search.max_beam_size} value=${beam} onChange=${(event) => change(`${prefix}beam`, event.target.value)} /></label>
    ${model.ranker && html`<${Toggle} label="re-ranked" checked=${params.has(`${prefix}rerank`)} onChange=${(on) => change(`${prefix}rerank`, on ? "1" : null)} />`}
    ${model.live && html`<${Toggle} label="live items" checked=${params.get(`${prefix}live`) !== "0"} onChange=${(on) => change(`${prefix}live`, on ? null : "0")} />`}
  </fieldset>`;
}
